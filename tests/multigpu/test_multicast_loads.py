"""The multicast kernels on two GPUs, with loads from each rank's memory in the switch's place: no multicast object."""

import sys

import pytest

from tools.check_multicast import CHECKS

pytestmark = pytest.mark.multigpu


def test_all_checks_pass_without_the_switch(two):
    """Sums by both paths, errors and a lost send among them; and one damaged bit, which is noticed."""
    done = two.run(sys.executable, "-m", "tools.check_multicast", "--peer-loads", "--exchanges", 960)
    found = {row["check"]: row["failed"] for row in done.lines}
    assert found == dict.fromkeys(CHECKS, 0) | {"all": []}, done.err
    assert done.status == 0
    assert {row["loads"] for row in done.lines} == {"peers"}
