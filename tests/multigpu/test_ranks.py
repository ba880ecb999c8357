"""The engine on two GPUs: what it gives, that ranks stay equal, and how a run ends in which something goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.commands import COMMAND
from tests.multigpu import engine_ranks
from tests.multigpu.test_exchange import SHOWN, running, until
from tests.paths import ROOT

pytestmark = pytest.mark.multigpu

GREEDY = ("--prompt", "def is_even(n):\n", "--temperature", "0", "--max-tokens", "40", "--device", "cuda")


def test_two_gpus_give_the_tokens_of_one(two):
    """tools/check_ranks, a short one: near ties apart, greedy and seeded, both loops, and the same again."""
    command = [sys.executable, "-m", "tools.check_ranks", "--prompts", "6", "--tokens", "60"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=200)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.stderr, rows)
    checks = ("score", "greedy", "seeded", "repeat") * 2
    assert [(row["check"], row["failed"]) for row in rows] == [(check, 0) for check in checks]


def test_ranks_stay_equal_through_conversations(two):
    first, second = two.call(engine_ranks.conversations, timeout=200)
    for name in first:
        assert first[name][1] == second[name][1], name  # what the engines count
    assert first["device"][0] == first["host"][0]
    assert {trace[1] for trace in first["device"][0]} == {"stop", "length", None}
    assert first["fp8"][0] == first["fp8, host"][0]
    found = first["rewound"][0]
    assert found["slow"]
    assert found["pieces"]
    assert found["resumed"] > 0


def test_masks_and_snapshots_are_every_ranks(two):
    first, second = two.call(engine_ranks.masked_and_remembered, timeout=100)
    (free, same, kept), counts = first
    assert free
    assert same
    assert min(kept[3:12]) > 400  # there was room for all of it
    assert counts == second[1]


@pytest.mark.parametrize(("number", "loop"), [(signal.SIGKILL, "device"), (signal.SIGSTOP, "host")])
def test_a_lost_rank_ends_the_request_and_the_next_run_starts_at_once(two, tmp_path, number, loop):
    with two.started(*two.command(engine_ranks.endless, str(tmp_path), loop)) as launcher:
        until(lambda: (tmp_path / "begun").exists() or launcher.poll() is not None, 60)
        assert launcher.poll() is None, launcher.communicate()[1].decode()
        pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in (0, 1)]
        begun = time.monotonic()
        os.kill(pids[1], number)
        _, err = launcher.communicate(timeout=60)
        assert time.monotonic() - begun < SHOWN
    assert launcher.returncode != 0
    (said,) = [line for line in err.decode().splitlines() if line.startswith("cuq1-launch: ")]
    assert "rank 1" in said
    assert not any(map(running, pids))
    first, second = two.call(engine_ranks.brief, timeout=60)
    assert len(first[0][1]) == 2
    assert first[1] == second[1]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("push", ["cuq1-launch: rank 0 failed: rank 1's part of the candidates of the head never came within 4 s"]),
        ("weights", ["cuq1-launch: rank", "failed: a value that is not finite appeared in", "of the draft's layer"]),
    ],
)
def test_what_one_rank_does_wrong_is_said_of_it(two, what, said):
    done = two.run(*two.command(engine_ranks.damaged, what), timeout=60)
    assert done.status != 0
    for part in said:
        assert part in done.err
    assert "not noticed" not in done.out


def test_ranks_that_differ_do_not_start(two):
    done = two.run(*two.command(engine_ranks.unequal), timeout=60)
    assert done.status != 0
    assert "ranks disagree on 'context' at 'setup': '1024' on rank 0, '1025' on rank 1" in done.err


def generate(*args, **more):
    """Status, stdout and stderr of python -m cuq1.generate."""
    done = subprocess.run([*COMMAND, *args], capture_output=True, cwd=ROOT, check=False, timeout=120, **more)
    return done.returncode, done.stdout, done.stderr.decode()


def test_the_command_line(two):
    expected = generate(*GREEDY)
    assert expected[::2] == (0, "")
    assert generate(*GREEDY, "--tp", "2") == expected
    assert generate(*GREEDY, "--tp", "2", "--loop", "host") == expected
    done = two.run(*COMMAND, *GREEDY, timeout=60)
    assert (done.status, done.out.encode(), done.err) == expected


def test_fewer_gpus_than_ranks_are_one_error(two):
    status, out, err = generate(*GREEDY, "--tp", "2", env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
    assert (status, out) == (2, b"")
    assert err.startswith("cuq1.generate: tp 2 needs 2 GPUs, one for each rank, and the driver sees 1")
    assert err.count("\n") == 1


def test_ctrl_c_gives_what_there_is(two):
    args = ["--prompt", "def", "--tp", "2", "--device", "cuda", "--max-tokens", "60000", "--top-k", "20", "--seed", "1"]
    process = subprocess.Popen([*COMMAND, *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        rest, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < 3
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err.decode()) == (130, "")
    assert len(first) == 20
    assert len(rest) > 0
