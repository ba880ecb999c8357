"""The exchange on two GPUs: sums bit for bit, inboxes, NCCL, and how a run ends that has lost a rank."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.multigpu import exchange_ranks
from tools.check_exchange import CHECKS

pytestmark = pytest.mark.multigpu

SHOWN = 10.0  # seconds within which all have ended


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, seconds):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it does not happen"
        time.sleep(0.02)


def test_sums_errors_and_broken_variants(two):
    """tools/check_exchange, a short one: its rows, which hold the controls as well."""
    done = two.run(sys.executable, "-m", "tools.check_exchange", "--exchanges", 30_000)
    assert {row["check"]: row["failed"] for row in done.lines} == dict.fromkeys(CHECKS, 0), done.err
    assert done.status == 0


def test_inboxes_are_shared_and_leave_nothing(two):
    for found in two.call(exchange_ranks.inboxes, 20, 3 << 20):
        assert all(found["seen"])
        assert len(found["seen"]) == 20
        assert found["free"][-1] >= found["free"][1]  # the first may take what the driver keeps


def test_nccl_sums_and_gathers_also_in_a_graph(two):
    for found in two.call(exchange_ranks.sum_with_nccl, 8 * 3072):
        assert found == {"gathered": True, "summed": True, "again": True}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_ends_all_and_the_next_run_starts_at_once(two, tmp_path, number, victim):
    command = two.command(exchange_ranks.exchange_on, str(tmp_path))
    with two.started(*command) as launcher:
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 2 or launcher.poll() is not None, 60)
        assert launcher.poll() is None, launcher.communicate()[1].decode()
        pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in (0, 1)]
        time.sleep(0.5)
        os.kill(pids[victim], number)
        begun = time.monotonic()
        until(lambda: not running(pids[1 - victim]), SHOWN)
        print(f"rank {victim}, {number.name}: the other ended after {time.monotonic() - begun:.1f} s")
        _, err = launcher.communicate(timeout=SHOWN)
        assert not any(map(running, pids))
    (sentence,) = [line for line in err.decode().splitlines() if line.startswith("cuq1-launch: ")]
    assert f"rank {victim}" in sentence
    if number == signal.SIGKILL:
        assert launcher.returncode == 137
    for found in two.call(exchange_ranks.exchange, 1000, 11):
        assert (found["wrong"], found["fault"]) == (0, None)
