"""cuq1-launch with ranks that need no GPU: their output, their failures, and that nothing outlives a run."""

import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cuq1.parallel import launch
from tests.paths import ROOT

LAUNCH = [sys.executable, "-m", "cuq1.parallel.launch"]
DUMMY = [sys.executable, str(Path(__file__).parent / "dummy_rank.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SHOWN = 10.0  # seconds within which a failed run has to be over, from the failure


def _restore():
    """Tests may run where a shell has its background jobs ignore signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


@contextmanager
def launched(*args, prefix=LAUNCH):
    process = subprocess.Popen(
        [*prefix, *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=ENVIRONMENT,
        start_new_session=True,
        preexec_fn=_restore,  # noqa: PLW1509  (nothing here holds a lock)
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(*args):
    """(status, stdout, stderr) of one launcher."""
    with launched(*args) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out.decode(), err.decode()


def sentence(err):
    """The launcher's own line, which is one."""
    (line,) = [line for line in err.splitlines() if line.startswith("cuq1-launch: ")]
    return line.removeprefix("cuq1-launch: ")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, seconds=30.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it does not happen"
        time.sleep(0.02)


def pids(folder, count):
    """Process ids that `count` processes have noted."""
    until(lambda: len(list(folder.glob("*.pid"))) >= count)
    return [int(path.read_text()) for path in folder.glob("*.pid")]


def changed(code):
    """A launcher with something broken or replaced."""
    imports = "import sys; from pathlib import Path; from cuq1.parallel import launch, leftovers, processes\n"
    return [sys.executable, "-c", f"{imports}{code}sys.exit(launch.main())"]


def gone(folder, count):
    """Whether all of them have ended, soon."""
    found = pids(folder, count)
    limit = time.monotonic() + SHOWN
    while any(map(alive, found)) and time.monotonic() < limit:
        time.sleep(0.02)
    return not any(map(alive, found))


def test_output_of_rank_0_is_the_launchers_and_that_of_others_is_marked(tmp_path):
    status, out, err = run("-n", 3, "--", *DUMMY, tmp_path, "print")
    assert (status, out) == (0, "first\nsecond\n")
    marked = [f"[rank {rank}] {text}" for rank in (1, 2) for text in ("first", "second", "problem")]
    assert sorted(err.replace("problem[", "problem\n[").splitlines()) == sorted([*marked, "problem"])
    assert gone(tmp_path, 3)


def test_the_script_of_a_checkout_needs_no_installation(tmp_path):
    script, command = str(ROOT / "launch" / "launch.py"), 'test -z "$PYTHONPATH" && echo $CUQ1_RANK of $CUQ1_WORLD'
    found = subprocess.run(
        [script, "-n", "2", "--", "sh", "-c", command],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        check=True,
    )
    assert (found.stdout, found.stderr) == (b"0 of 2\n", b"[rank 1] 1 of 2\n")


def test_much_output_arrives_whole_and_its_reader_may_leave():
    script = "import os; [print('x' * 99) for _ in range(40_000 * int(os.environ['CUQ1_RANK']))]"
    status, out, err = run("-n", 2, "--", sys.executable, "-c", script)
    assert (status, out) == (0, "")
    assert err == f"[rank 1] {'x' * 99}\n" * 40_000
    with launched("-n", 2, "--", sys.executable, "-c", script) as process:
        process.stderr.read(10)
        process.stderr.close()
        process.stderr = None
        assert process.wait(60) == 0
    with launched("-n", 1, "--", sys.executable, "-c", "import time; time.sleep(1); exit(3)") as process:
        process.stderr.close()
        process.stderr = None
        assert process.wait(60) == 3


@pytest.mark.parametrize(
    ("mode", "status", "reason"),
    [
        ("exit3", 3, "rank 1 exited with status 3"),
        (f"signal{int(signal.SIGSEGV)}", 139, "rank 1 was ended by SIGSEGV"),
        (f"signal{int(signal.SIGKILL)}", 137, "rank 1 was ended by SIGKILL"),
        ("raise", 1, "rank 1 failed: RuntimeError: no such layer"),
        ("stop", 137, "rank 1 stopped answering: no heartbeat for 1 s"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_status(tmp_path, mode, status, reason):
    limits = ["--heartbeat", 1] if mode == "stop" else []
    with launched("-n", 3, *limits, "--", *DUMMY, tmp_path, mode, 1) as process:
        pids(tmp_path, 3)
        begun = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < SHOWN
    assert (process.returncode, sentence(err.decode())) == (status, reason)
    assert gone(tmp_path, 3)


def test_ranks_that_ignore_sigterm_are_killed_and_have_heard_why(tmp_path):
    with launched("-n", 2, "--", *DUMMY, tmp_path, "stubborn", 1) as process:
        pids(tmp_path, 2)
        time.sleep(0.3)
        os.kill(int((tmp_path / "rank1.pid").read_text()), signal.SIGKILL)
        begun = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < SHOWN
    assert (process.returncode, sentence(err.decode())) == (137, "rank 1 was ended by SIGKILL")
    assert (tmp_path / "rank0.heard").read_text() == "rank 1 was ended by SIGKILL"
    assert gone(tmp_path, 2)


def test_the_slowest_end_is_in_time(tmp_path):
    """With the default limits: a rank falls silent, and the others heed no SIGTERM."""
    with launched("-n", 3, "--", *DUMMY, tmp_path, "stubborn stop", 1) as process:
        pids(tmp_path, 3)
        begun = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < SHOWN
    assert (process.returncode, sentence(err.decode())) == (137, "rank 1 stopped answering: no heartbeat for 5 s")
    assert gone(tmp_path, 3)


IMMORTAL = "processes.Process.poll = lambda self, poll=processes.Process.poll: self.rank != 1 and poll(self)\n"


def test_a_rank_that_cannot_be_killed_is_named_in_time(tmp_path):
    """Its end is never seen here, as that of one which waits for a device in the kernel."""
    with launched("-n", 3, "--", *DUMMY, tmp_path, "stubborn stop", 1, prefix=changed(IMMORTAL)) as process:
        pids(tmp_path, 3)
        begun = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < SHOWN
    found = "rank 1 stopped answering: no heartbeat for 5 s; ranks that cannot be killed: 1"
    assert (process.returncode, sentence(err.decode())) == (1, found)


def test_a_stopped_rank_is_killed_when_another_fails(tmp_path):
    with launched("-n", 3, "--heartbeat", 60, "--", *DUMMY, tmp_path, "wait", 0) as process:
        pids(tmp_path, 3)
        os.kill(int((tmp_path / "rank2.pid").read_text()), signal.SIGSTOP)
        os.kill(int((tmp_path / "rank1.pid").read_text()), signal.SIGKILL)
        begun = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < SHOWN
    assert (process.returncode, sentence(err.decode())) == (137, "rank 1 was ended by SIGKILL")
    assert gone(tmp_path, 3)


def test_a_guard_that_is_stopped_holds_nobody_up(tmp_path):
    with launched("-n", 2, "--", *DUMMY, tmp_path, "wait", 0) as process:
        pids(tmp_path, 2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (guard,) = [pid for pid in children if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(guard), signal.SIGSTOP)
        process.terminate()
        assert process.wait(SHOWN) == 143
    assert not alive(int(guard))
    assert gone(tmp_path, 2)


def test_a_rank_that_never_arrives(tmp_path):
    status, _, err = run("-n", 3, "--timeout", 1, "--", *DUMMY, tmp_path, "absent", 2)
    assert sentence(err) == "rank 2 did not arrive at barrier 'met' within 1 s; rank 2 never joined"
    assert status == 143  # how it ended: it had to be stopped


def test_a_rank_with_another_secret(tmp_path):
    script = (
        "import os; from cuq1.parallel import Rendezvous; rank = os.environ['CUQ1_RANK']\n"
        "with Rendezvous(secret='guessed' if rank == '1' else None) as meeting: meeting.barrier('met')"
    )
    status, _, err = run("-n", 2, "--", sys.executable, "-c", script)
    assert (status, sentence(err)) == (1, "rank 1 exited with status 1")
    assert "[rank 1] cuq1.errors.LaunchError: the rendezvous at 127.0.0.1:" in err
    assert "do not share a secret" in err


def test_ranks_that_disagree_end_the_run_with_the_difference():
    script = (
        "import os; from cuq1.parallel import Rendezvous\n"
        "with Rendezvous() as meeting: meeting.agree('setup', {'config': 'same', 'plan': f'p{meeting.rank // 2}'})"
    )
    status, _, err = run("-n", 3, "--", sys.executable, "-c", script)
    said = sentence(err)
    assert (status, said[:5], said[6:14]) == (1, "rank ", " failed:")  # whichever is first
    assert (
        said[15:]
        == "ranks disagree on 'plan' at 'setup': 'p0' on ranks 0 and 1, 'p1' on rank 2; start all of them alike"
    )


def test_what_a_rank_leaves_behind_is_killed(tmp_path):
    with launched("-n", 1, "--", *DUMMY, tmp_path, "child", 0) as process:
        assert process.wait(60) == 0
    assert gone(tmp_path, 2)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_to_the_launchers_group_stop_every_rank(tmp_path, number, status):
    with launched("-n", 3, "--", *DUMMY, tmp_path, "wait", 0) as process:
        pids(tmp_path, 3)
        os.killpg(process.pid, number)
        assert process.wait(SHOWN) == status
        assert b"cuq1-launch" not in process.stderr.read()
    assert gone(tmp_path, 3)


def test_ctrl_c_again_does_not_wait(tmp_path):
    with launched("-n", 2, "--", *DUMMY, tmp_path, "stubborn", 1) as process:
        pids(tmp_path, 2)
        begun = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(SHOWN) == 130
        assert time.monotonic() - begun < launch.GRACE_SECONDS
    assert gone(tmp_path, 2)


HEEDLESS = (
    "import os, signal, sys, time; from pathlib import Path\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "path = Path(sys.argv[1], os.environ['CUQ1_RANK'] + '.pid')\n"
    "path.with_suffix('.new').write_text(str(os.getpid())); path.with_suffix('.new').rename(path)\n"
    "time.sleep(600)"
)
UNBOUND = "processes.bound_to_this_process = lambda: None\n"
UNGUARDED = "processes.Guard.watch = lambda self, process: None\n"


@pytest.mark.parametrize("below_a_shell", [False, True])
@pytest.mark.parametrize("broken", ["", UNBOUND, UNGUARDED, UNBOUND + UNGUARDED])
def test_ranks_die_with_a_launcher_that_is_killed(tmp_path, broken, below_a_shell):
    """They heed no signal and have not joined: the kernel ends the rank's own process, the guard all of its group."""
    command = [sys.executable, "-c", HEEDLESS, tmp_path]
    if below_a_shell:
        command = ["sh", "-c", '"$@"; true', "sh", *command]
    with launched("-n", 2, "--", *command, prefix=changed(broken)) as process:
        found = pids(tmp_path, 2)
        process.kill()
        process.wait()
        expected = UNGUARDED in broken and (UNBOUND in broken or below_a_shell)
        limit = time.monotonic() + (0.5 if expected else SHOWN)
        while any(map(alive, found)) and time.monotonic() < limit:
            time.sleep(0.02)
        left = [pid for pid in found if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert bool(left) == expected


def test_shared_memory_goes_with_a_launcher_that_is_killed(tmp_path):
    path = Path(f"/dev/shm/nccl-{secrets.token_hex(6)}")
    script = f"from pathlib import Path; import time; Path({str(path)!r}).touch(); time.sleep(600)"
    try:
        with launched("-n", 1, "--", sys.executable, "-c", script) as process:
            until(path.exists)
            process.kill()
            until(lambda: not path.exists(), SHOWN)
    finally:
        path.unlink(missing_ok=True)


def test_a_rank_notices_by_its_connection_that_the_launcher_is_killed(tmp_path):
    with launched("-n", 2, "--", *DUMMY, tmp_path, "wait", 0, prefix=changed(UNBOUND + UNGUARDED)) as process:
        pids(tmp_path, 2)
        process.kill()
        assert gone(tmp_path, 2)


UNCLEARED = "leftovers.Leftovers.clear = lambda self: None\n"
HEEDLESS_OF_OTHERS = "leftovers._used = lambda names: set()\n"


@pytest.mark.parametrize(
    ("broken", "left"),
    [
        ("", {"nccl-before", "nccl-opened", "nccl-mapped", "other"}),
        (UNCLEARED, {"nccl-before", "nccl-opened", "nccl-mapped", "nccl-mine00", "other"}),
        (HEEDLESS_OF_OTHERS, {"nccl-before", "other"}),
    ],
)
def test_shared_memory_of_a_killed_rank_is_removed_and_nobody_elses(tmp_path, broken, left):
    folder = tmp_path / "shm"
    folder.mkdir()
    (folder / "nccl-before").touch()
    redirected = f"leftovers.Leftovers.__init__.__defaults__ = (None, Path({str(folder)!r}))\n"
    with launched("-n", 2, "--", *DUMMY, tmp_path, "memory", 1, prefix=changed(redirected + broken)) as process:
        pids(tmp_path, 1)
        (folder / "other").touch()
        with (folder / "nccl-mapped").open("wb+") as file:  # of a run beside this one
            file.truncate(4096)
            mapped = mmap.mmap(file.fileno(), 4096)
        with (folder / "nccl-opened").open("wb+"), mapped:
            _, err = process.communicate(timeout=60)
    assert (process.returncode, sentence(err.decode())) == (137, "rank 1 was ended by SIGKILL")
    assert {path.name for path in folder.iterdir()} == left


def test_launches_that_start_at_once(tmp_path):
    """Each with ports, secrets and ranks of its own: one of them fails, and the others do not notice."""
    folders = [tmp_path / str(number) for number in range(4)]
    with ExitStack() as stack:
        runs = []
        for number, folder in enumerate(folders):
            folder.mkdir()
            mode = ["exit7", 0] if number == 1 else ["print"]
            runs.append(stack.enter_context(launched("-n", 3, "--", *DUMMY, folder, *mode)))
        assert [process.wait(60) for process in runs] == [0, 7, 0, 0]
        outputs = [process.stdout.read() for process in runs]
    assert outputs == [b"first\nsecond\n", b"", b"first\nsecond\n", b"first\nsecond\n"]
    assert all(gone(folder, 3) for folder in folders)


def test_two_launches_side_by_side(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with (
        launched("-n", 2, "--", *DUMMY, folders[0], "wait", 0) as first,
        launched("-n", 2, "--", *DUMMY, folders[1], "print") as second,
    ):
        assert second.wait(60) == 0
        assert all(map(alive, pids(folders[0], 2)))
        first.terminate()
        assert first.wait(SHOWN) == 143
    assert gone(folders[0], 2)


def test_a_new_run_starts_at_once_on_the_same_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, _, err = run("-n", 2, "--address", address, "--", *DUMMY, tmp_path, "print")
        assert status == 2
        assert sentence(err).startswith(f"cannot listen on {address} (")
        assert "Traceback" not in err
    assert run("-n", 2, "--address", address, "--", *DUMMY, tmp_path, "exit3", 1)[0] == 3
    assert run("-n", 2, "--address", address, "--", *DUMMY, tmp_path, "print")[0] == 0


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ([], "the following arguments are required: -n"),
        (["-n", "2"], "no command: put -- and then what the ranks run at the end"),
        (["-n", "2", "--"], "no command"),
        (["-n", "2", "python"], "'python' is no option of cuq1-launch: put -- before the command"),
        (["-n", "0", "--", "true"], "'0' is not from 1 to 64 ranks"),
        (["-n", "x", "--", "true"], "'x' is not from 1 to 64 ranks"),
        (["-n", "2", "--timeout", "nan", "--", "true"], "'nan' is not from 0.1 to 86400 seconds"),
        (["-n", "2", "--address", "nowhere", "--", "true"], "'nowhere' is no rendezvous address"),
        (["-n", "2", "--address", "0.0.0.0:0", "--", "true"], "is every address of this host"),
        (["-n", "2", "--", "/no/such/program"], "'/no/such/program' cannot be started (No such file or directory)"),
    ],
)
def test_bad_input_is_one_sentence_and_2(args, found, capfd):
    assert launch.main(args) == 2
    err = capfd.readouterr().err
    assert found in err
    assert len(err.splitlines()) == 1
