"""Kernels compiled ahead of time are complete, current and enough for every launch."""

import json
from dataclasses import replace

import pytest

from cuq1.config import load_config
from cuq1.cuda import compile as jit
from cuq1.cuda.kernels.bandwidth import fill_random, read_once
from cuq1.cuda.weights import weights_plan
from cuq1.errors import DeviceError
from cuq1.models import decode, prefill, q1
from tests.paths import NANO, RELEASED
from tools import build_ptx

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python")


@pytest.mark.parametrize(("folder", "tp"), [(RELEASED, 8), (NANO, 1), (NANO, 2)])
def test_whatever_a_round_or_a_prompt_launches_is_compiled_ahead(folder, tp):
    ahead = {jit.digest(kernel, "sm_90a") for kernel in build_ptx.model_kernels(folder, tp)}
    config, draft = load_config(folder)
    for capacity in (100, 2000):
        model = q1.resolve(
            config, draft, weights_plan(config, draft, tp, tp - 1), tp=tp, rank=tp - 1, capacity=capacity
        )
        plans = [decode.round_of(model, rows, drafts) for rows in (1, 2, 5, 8) for drafts in (0, 3, 7)]
        plans += [decode.round_of(model, 8, 3, short=True), decode.target_of(model, 8, short=True)]
        plans += [decode.first_of(model, 4), decode.depth_of(model, 2), decode.depth_of(model, 0, settle_only=True)]
        plans += [prefill.chunk_plan(model, prefill.Chunk(64, rows)) for rows in (1, 33)]
        assert {jit.digest(kernel, "sm_90a") for plan in plans for kernel in plan.kernels()} <= ahead


def test_a_folder_is_filled_checked_and_used(tmp_path, monkeypatch):
    kernels = [read_once(), fill_random()]
    assert build_ptx.missing(kernels, "sm_90a", tmp_path) == ["bandwidth.cu: fill_random", "bandwidth.cu: read_once"]
    (tmp_path / "old.cubin").write_text("")
    manifest = build_ptx.build(kernels, "sm_90a", tmp_path)
    assert build_ptx.missing(kernels, "sm_90a", tmp_path) == []
    (entry,) = manifest["cubins"].values()  # one file holds both
    assert set(entry["kernels"]) == {"read_once", "fill_random"}
    assert {path.name for path in tmp_path.iterdir()} == {"MANIFEST.json", entry["file"]}
    assert json.loads((tmp_path / "MANIFEST.json").read_text()) == manifest
    assert manifest["compiler"] == f"NVRTC {jit.nvrtc_version()}"
    folder = jit.folder
    monkeypatch.setattr(jit, "folder", lambda name: tmp_path if name == "ptx" else folder(name))
    monkeypatch.setenv("CUQ1_NO_JIT", "1")
    assert jit.compile_kernel(read_once()).path == tmp_path / entry["file"]
    # the controls: a lost file, and constants that it was not compiled for
    assert build_ptx.missing([replace(read_once(), defines=(("A", 1),))], "sm_90a", tmp_path) == [
        "bandwidth.cu: read_once"
    ]
    (tmp_path / entry["file"]).unlink()
    assert len(build_ptx.missing(kernels, "sm_90a", tmp_path)) == 2


def test_a_kernel_over_its_budget_is_not_shipped(tmp_path):
    with pytest.raises(DeviceError, match="read_once takes 32 of 16 registers"):
        build_ptx.build([replace(read_once(), max_registers=16)], "sm_90a", tmp_path)


def test_the_command_line_reports_what_is_missing(tmp_path, capsys):
    arguments = [str(NANO), "--out", str(tmp_path)]
    assert build_ptx.main([*arguments, "--check"]) == 1
    assert "no current cubin of qkv.cu: qkv" in capsys.readouterr().out.splitlines()
    assert build_ptx.main([str(tmp_path / "none"), "--check"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
