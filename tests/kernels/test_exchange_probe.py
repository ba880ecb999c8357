"""The exchange on one GPU, whose launches stand for several places: tools/check_exchange with one rank."""

import json
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tools.check_exchange import CHECKS


@pytest.mark.gpu
def test_one_rank_with_several_places(gpu):
    command = [sys.executable, "-m", "tools.check_exchange", "--ranks", "1", "--exchanges", "20000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["check"]: row["failed"] for row in rows} == dict.fromkeys(CHECKS, 0), done.stdout + done.stderr
    assert done.returncode == 0
