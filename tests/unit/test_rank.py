"""A command line that ranks run together: what is said, how often and by whom, and that all of them end."""

import os
import signal
import sys
import time

import pytest

from tests.unit.test_launch import SHOWN, gone, launched, pids, run, until

RANK = [sys.executable, "-m", "tests.unit.follow_rank"]


def whole(tmp_path, *mode, world=3, launch=()):
    """(status, stdout, stderr) of a run, all of whose processes have ended."""
    status, out, err = run("-n", world, *launch, "--", *RANK, tmp_path, *mode)
    assert gone(tmp_path, 1)
    return status, out, err


def test_a_run_is_rank_0s_output_and_nothing_else(tmp_path):
    status, out, err = whole(tmp_path, "whole")
    assert (status, err) == (0, "")
    assert out.count(",") == 19


@pytest.mark.parametrize(
    ("mode", "status", "said"),
    [
        ("refused", 2, "follow_rank: the prompt is empty\n"),
        ("no device", 2, "cuq1-launch: rank 1 failed: GPU 1 does not exist\n"),
        ("help", 0, ""),
        ("alone", 0, ""),
        ("status", 5, ""),
    ],
)
def test_what_goes_wrong_is_said_once(tmp_path, mode, status, said):
    found, out, err = whole(tmp_path, mode, world=2)
    assert (found, err) == (status, said)
    assert out == ("alone\n" if mode in ("alone", "status") else "")


@pytest.mark.parametrize(
    ("mode", "victim", "status", "said"),
    [
        ("device error", 1, 2, "cuq1-launch: rank 1 failed: the GPU fell off"),
        ("device error", 0, 2, "follow_rank: the GPU fell off"),
        ("peer error", 1, 2, "cuq1-launch: rank 1 failed: a part never came"),
        ("peer error", 0, 2, "cuq1-launch: rank 0 failed: a part never came"),
        ("exit3", 1, 3, "cuq1-launch: rank 1 exited with status 3"),
        (f"signal{int(signal.SIGKILL)}", 2, 137, "cuq1-launch: rank 2 was ended by SIGKILL"),
        (f"signal{int(signal.SIGKILL)}", 0, 137, "cuq1-launch: rank 0 was ended by SIGKILL"),
        ("stop", 1, 137, "cuq1-launch: rank 1 stopped answering: no heartbeat for 1 s"),
    ],
)
def test_a_rank_that_ends_within_a_request_ends_the_others(tmp_path, mode, victim, status, said):
    limits = ["--heartbeat", 1] if mode == "stop" else []
    with launched("-n", 3, *limits, "--", *RANK, tmp_path, mode, victim) as process:
        until((tmp_path / "begun.pid").exists)
        begun = time.monotonic()
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < SHOWN
    assert (process.returncode, out.decode(), err.decode()) == (status, "", said + "\n")
    assert gone(tmp_path, 3)


def test_an_error_that_is_a_defect_keeps_its_traceback(tmp_path):
    status, _, err = whole(tmp_path, "raise", 1)
    assert status == 1
    assert "cuq1-launch: rank 1 failed: RuntimeError: no such layer\n" in err
    assert "[rank 1] RuntimeError: no such layer" in err


def test_ctrl_c_gives_what_there_is(tmp_path):
    with launched("-n", 3, "--", *RANK, tmp_path, "endless") as process:
        until((tmp_path / "begun.pid").exists)
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < 3
    assert (process.returncode, out.decode(), err.decode()) == (130, "True\n", "")
    assert gone(tmp_path, 3)


def test_ctrl_c_that_only_rank_0_has_ends_the_others(tmp_path):
    with launched("-n", 2, "--", *RANK, tmp_path, "endless") as process:
        until((tmp_path / "begun.pid").exists)
        pids(tmp_path, 3)
        os.kill(int((tmp_path / "rank0.pid").read_text()), signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out.decode(), err.decode()) == (130, "True\n", "")
    assert gone(tmp_path, 2)
