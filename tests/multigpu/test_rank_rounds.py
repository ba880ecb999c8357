"""tools/bench_round --ranks on two GPUs: nano's sizes, whose results it checks itself."""

import json
import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.multigpu

SIZES = ["--config", "iquest-q1-nano", "--tp", "2", "--ranks", "0,1", "--drafts", "3", "--repeats", "3", "--no-log"]


def test_two_ranks_beside_each_alone(two):
    command = [sys.executable, "-m", "tools.bench_round", *SIZES, "--rows", "2,8", "--unfolded"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results: the same bits on all ranks, finite") == 2
    for kind in ("alone", "exchanging", "unfolded"):
        assert done.stdout.count(f"\n  {kind} ") == 4, json.dumps(done.stdout)
    assert "target mlp_tail" in done.stdout
