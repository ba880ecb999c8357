"""Kernels compiled ahead of time are complete, current and enough for every launch."""

import json
from dataclasses import replace

import pytest

from cuq1.config import load_config
from cuq1.config_qwen2 import parse_qwen2
from cuq1.cuda import compile as jit
from cuq1.cuda.kernels import packing
from cuq1.cuda.kernels.bandwidth import fill_random, read_once
from cuq1.cuda.qwen2_weights import qwen2_layout
from cuq1.cuda.weights import weights_plan
from cuq1.errors import DeviceError
from cuq1.models import decode, loop, prefill, q1, qwen2, qwen2_decode, qwen2_prefill
from tests.paths import NANO, RELEASED
from tools import build_ptx
from tools.checkpoint_qwen2 import qwen2_config

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python")


def launched(folder, tp, **options):
    """Digests of all that the last of `tp` ranks may launch: by either loop, and for prompts."""
    config, draft = load_config(folder)
    place = {"tp": tp, "rank": tp - 1, "ranks": tp, "place": tp - 1}
    layout = weights_plan(config, draft, tp, tp - 1)
    found = set()
    for capacity in (100, 2000):
        model = q1.resolve(config, draft, layout, capacity=capacity, **place, **options)
        plans = [decode.round_of(model, rows, drafts) for rows in (1, 2, 5, 8) for drafts in (0, 3, 7)]
        plans += [decode.round_of(model, 8, 3, short=True), decode.target_of(model, 8, short=True)]
        plans += [decode.first_of(model, 4), decode.depth_of(model, 2), decode.depth_of(model, 0, settle_only=True)]
        plans += [loop.round_of(model, rows, 4, short=short) for rows in (1, 8) for short in (False, True)]
        plans += [loop.first_of(model, 4), loop.depth_of(model, 5), decode.logits_of(model)]
        plans += [prefill.chunk_plan(model, prefill.Chunk(64, rows, 63, 64)) for rows in (1, 33)]
        plans += [prefill.plan_of(model, [prefill.logits_step(model)], prefill.Chunk(0, 5))]
        found |= {jit.digest(kernel, "sm_90a") for plan in plans for kernel in plan.kernels()}
    return found | {jit.digest(kernel, "sm_90a") for kernel in packing.kernels(model.dims)}


@pytest.mark.parametrize(("folder", "tp"), [(RELEASED, 8), (NANO, 1), (NANO, 2)])
def test_what_a_round_a_prompt_or_loading_launches_is_compiled_ahead_and_nothing_else(folder, tp):
    needed = launched(folder, tp) | launched(folder, tp, fp8_activations=True)
    assert needed == {jit.digest(kernel, "sm_90a") for kernel in build_ptx.model_kernels(folder, tp)}


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-3b-tiny", "qwen2.5-coder-7b-tiny"])
def test_what_a_qwen2_model_launches_is_compiled_ahead(tmp_path, name):
    raw = qwen2_config(name)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = parse_qwen2(raw)
    needed = set()
    for int4_head in (False, True):
        for sms in (114, 132):
            model = qwen2.resolve(config, qwen2_layout(config, int4_head=int4_head), capacity=4000, sms=sms)
            plans = [qwen2_decode.target_of(model, short=True), loop.round_of(model, 1, 0, short=False)]
            plans += [loop.first_of(model, 0), qwen2_prefill.chunk_plan(model, prefill.Chunk(64, 33))]
            plans += [qwen2_prefill.steps_plan(model, qwen2_prefill.logits_steps(model), prefill.Chunk(3, 1))]
            needed |= {jit.digest(kernel, "sm_90a") for plan in plans for kernel in plan.kernels()}
    assert needed == {jit.digest(kernel, "sm_90a") for kernel in build_ptx.model_kernels(tmp_path, 1)}


def test_kernels_that_exchange_are_others():
    config, draft = load_config(NANO)
    alone = q1.resolve(config, draft, weights_plan(config, draft, 2, 0), tp=2)
    assert {jit.digest(kernel, "sm_90a") for kernel in decode.first_of(alone, 3).kernels()} - launched(NANO, 2)


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
    monkeypatch.undo()
    # further kernels, beside these or in their place
    other = replace(read_once(), defines=(("A", 1),))
    build_ptx.build([other], "sm_90a", tmp_path, add=True)
    assert build_ptx.missing([*kernels, other], "sm_90a", tmp_path) == []
    build_ptx.build(kernels, "sm_90a", tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    # the controls: a lost file, and constants that it was not compiled for
    assert build_ptx.missing([other], "sm_90a", tmp_path) == ["bandwidth.cu: read_once"]
    (tmp_path / entry["file"]).unlink()
    assert len(build_ptx.missing(kernels, "sm_90a", tmp_path)) == 2


def test_a_kernel_over_its_budget_is_not_shipped(tmp_path):
    with pytest.raises(DeviceError, match="read_once takes 32 of 16 registers"):
        build_ptx.build([replace(read_once(), max_registers=16)], "sm_90a", tmp_path)


def test_the_command_line_reports_what_is_missing(tmp_path, capsys):
    arguments = [str(NANO), "--tp", "1", "2", "--out", str(tmp_path)]
    assert build_ptx.main([*arguments, "--check"]) == 1
    assert "no current cubin of qkv.cu: qkv" in capsys.readouterr().out.splitlines()
    assert build_ptx.main([str(tmp_path / "none"), "--check"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
