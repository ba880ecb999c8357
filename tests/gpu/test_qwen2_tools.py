"""What measures and checks Qwen2 models, on a GPU and small models."""

import numpy as np
import pytest

from cuq1.models.qwen2_forms import FORMS
from tools import bench_e2e, breakdown, check_qwen2

pytestmark = pytest.mark.gpu

SMALL = ["--config", "qwen2.5-coder-0.5b-tiny", "--prompt", "20", "--gen", "16", "--repeats", "2", "--traced", "2"]


def test_a_models_figures(gpu, capsys):
    assert bench_e2e.main([*SMALL, "--context", "700"]) == 0
    out = capsys.readouterr().out
    for part in ("device  ", "host  ", "eager  ", "700  ", "kernel_gap", "qkv_gemv", "sample"):
        assert part in out
    assert "PROBLEM" not in out


def test_every_forms_figures(gpu, capsys):
    """Each in turn, its regions and gap equal to its time, and a layer's parts one after the other."""
    argv = ["--config", "qwen2.5-coder-7b-tiny", *SMALL[2:], "--form", *FORMS, "--timeline"]
    assert bench_e2e.main(argv) == 0
    out = capsys.readouterr().out
    assert "PROBLEM" not in out
    for form in FORMS:
        assert f"form {form}; a token: " in out
    for part in ("qkv", "attention", "o_proj", "gate_up", "down"):
        (line,) = (line.split() for line in out.splitlines() if line.split()[:1] == [f"layers.{part}"])
        first, half, last, first_end, half_end, last_end = map(float, line[1:7])
        assert first <= half <= last, line
        assert first_end <= half_end <= last_end, line
        assert half < half_end, line


def test_a_launch_that_leaves_no_times_is_found(gpu, capsys, monkeypatch):
    """The control: what is not traced would look like a gap."""
    monkeypatch.setattr(bench_e2e, "REGIONS", {k: v for k, v in breakdown.REGIONS.items() if k != "norm"})
    monkeypatch.setattr(bench_e2e, "region_bytes", lambda plan: {})
    assert bench_e2e.main(SMALL) == 1
    assert "launches a token left their times, of" in capsys.readouterr().out


def test_the_graphs_tier(gpu, capsys):
    assert check_qwen2.main(["graph", "--prompts", "12", "--tokens", "24"]) == 0
    out = capsys.readouterr().out
    assert "graph: passed: 12 prompts, " in out
    assert "288 tokens" in out


def test_a_changed_weight_fails_it(gpu, capsys, monkeypatch):
    opened = check_qwen2.open_engine

    def changed(*args, **more):
        engine = opened(*args, **more)
        norm = np.empty(engine.config.hidden_size, np.float16)
        engine._runtime.read("layers.1.post_norm", norm)
        engine._runtime.write("layers.1.post_norm", norm * np.float16(1.25))
        return engine

    monkeypatch.setattr(check_qwen2, "open_engine", changed)
    assert check_qwen2.main(["graph", "--prompts", "6", "--tokens", "8"]) == 1
    assert "graph: FAILED" in capsys.readouterr().out
