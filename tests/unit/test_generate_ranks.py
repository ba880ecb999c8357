"""python -m cuq1.generate --tp N without a GPU: on the CPU, and what is refused before GPUs are touched."""

import subprocess
import sys

import pytest

from cuq1 import generate as module
from cuq1.cuda import driver
from cuq1.errors import DeviceError
from tests.commands import COMMAND, run
from tests.paths import ROOT
from tests.unit.test_launch import ENVIRONMENT

LAUNCH = [sys.executable, "-m", "cuq1.parallel.launch", "-n", "2", "--", *COMMAND]
PROMPT = ("--prompt", "def is_even(n):", "--max-tokens", "8", "--seed", "1", "--device", "cpu")
ON_GPUS = ("--tp", "2", "--device", "cuda")


def launched(*args, stdin=b""):
    """Status, stdout and stderr of two ranks of cuq1-launch."""
    done = subprocess.run([*LAUNCH, *args], input=stdin, capture_output=True, cwd=ROOT, env=ENVIRONMENT, check=False)
    return done.returncode, done.stdout, done.stderr.decode()


def test_shares_on_the_cpu_give_the_text_of_one():
    assert run(*PROMPT, "--tp", "2") == run(*PROMPT)


def test_under_the_launcher_the_cpus_output_is_rank_0s_alone():
    text = "naïve 漢字".encode()
    args = [*PROMPT[2:], "--prompt-file", "-"]
    expected = subprocess.run([*COMMAND, *args], input=text, capture_output=True, cwd=ROOT, check=True).stdout
    assert launched(*args, stdin=text) == (0, expected, "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "a", "--temperature", "-1"), "temperature"),
        (("--prompt", "a", "--nonsense"), "--nonsense"),
        (("--messages", "/nowhere.json"), "/nowhere.json"),
        (("--prompt-file", "-"), "stdin is not UTF-8"),
        (("--prompt", "a", "--model", "/nowhere"), "/nowhere/config.json"),
    ],
)
@pytest.mark.parametrize("how", ["--tp", "cuq1-launch"])
def test_bad_input_is_one_sentence_whoever_starts_the_ranks(how, args, said):
    if how == "--tp":
        done = subprocess.run([*COMMAND, *ON_GPUS, *args], input=b"\xff", capture_output=True, cwd=ROOT, check=False)
        status, out, err = done.returncode, done.stdout, done.stderr.decode()
    else:
        status, out, err = launched("--device", "cuda", *args, stdin=b"\xff")
    assert (status, out) == (2, b""), err
    assert err.startswith("cuq1.generate: ")
    assert err.count("\n") == 1
    assert said in err


def test_ranks_that_are_not_as_many_as_tp_are_refused_once():
    status, _, err = launched("--tp", "4", "--device", "cuda", "--prompt", "a")
    assert (status, err.count("\n")) == (2, 1)
    assert "--tp 4 does not go with 2 ranks of cuq1-launch" in err


@pytest.fixture
def sees(monkeypatch):
    """A driver that sees some GPUs, and a launcher that only notes what it is to run."""
    started = []

    class Launch:
        def __init__(self, command, world, program):
            started.append((command, world, program))

        def run(self):
            return 7

    def seeing(count):
        def check_devices(wanted):
            if count < wanted:
                raise DeviceError(f"needs {wanted} GPUs, sees {count}")

        monkeypatch.setattr(driver, "require_devices", check_devices)
        monkeypatch.setattr(module, "require_devices", check_devices)
        monkeypatch.setattr("cuq1.parallel.launch.Launch", Launch)
        return started

    return seeing


def test_ranks_are_started_where_there_are_gpus(sees, generate):
    started = sees(2)
    for device in (("--device", "cuda"), ()):
        args = ["--tp", "2", "--prompt", "a b", *device]
        assert generate(*args) == (7, "", "")
        assert started.pop() == ([*COMMAND, *args], 2, "cuq1.generate")
    assert generate("--tp", 5, "--device", "cuda", "--prompt", "a")[0] == 2
    assert not started


def test_without_any_gpu_auto_is_the_cpu(sees, generate):
    started = sees(0)
    status, out, err = generate("--tp", 2, *PROMPT[:-2])
    assert (status, err, started) == (0, "", [])
    assert out == generate(*PROMPT)[1]


def test_fewer_gpus_than_ranks_are_one_error(sees, generate):
    started = sees(1)
    status, out, err = generate("--tp", 2, "--prompt", "a")
    assert (status, out, err) == (2, "", "cuq1.generate: needs 2 GPUs, sees 1\n")
    assert not started


def test_the_driver_is_asked_for_as_many_gpus_as_ranks(monkeypatch):
    class Bindings:
        @staticmethod
        def cuDeviceGetCount():  # noqa: N802
            return 0, 3

    monkeypatch.setattr(driver, "bindings", lambda: Bindings)
    driver.require_devices(3)
    with pytest.raises(DeviceError, match="tp 4 needs 4 GPUs, one for each rank, and the driver sees 3"):
        driver.require_devices(4)
