"""Whole chunks: the plan on a CPU, and the nano model's prompt on a GPU against the reference."""

from contextlib import contextmanager

import numpy as np
import pytest

from cuq1.checkpoint import Checkpoint
from cuq1.config import load_config
from cuq1.cuda.chunks import Chunks
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.memory import Arena, copy_in
from cuq1.cuda.weights import rank_weights, weights_plan
from cuq1.cuda.weights_device import load_weights
from cuq1.models import prefill, q1
from cuq1.models.prefill import Chunk
from cuq1.plan.types import Ref
from cuq1.reference.mtp import DraftForward
from cuq1.reference.q1 import TargetForward
from cuq1.reference.weights import load_draft, load_target
from tests import paths
from tests.kernels.twins import prefill as twin

CAPACITY = 1024


def model_of(path, tp):
    config, draft = load_config(path)
    return q1.resolve(config, draft, weights_plan(config, draft, tp), tp=tp, capacity=8192)


@pytest.mark.parametrize(("path", "tp"), [(paths.RELEASED, 8), (paths.NANO, 1), (paths.NANO, 2)])
@pytest.mark.parametrize(
    "chunk",
    [Chunk(0, 1), Chunk(0, 2048, 0, 2047), Chunk(2048, 2048, 2047, 4096), Chunk(6000, 65, 6001, 6060)],
    ids=str,
)
def test_a_plan_stays_within_its_buffers(path, tp, chunk):
    model = model_of(path, tp)
    plan = prefill.chunk_plan(model, chunk)
    held = {buffer.name for buffer in (*q1.working_buffers(model), *prefill.working_buffers(model))}
    assert {b.name for b in plan.buffers} <= held | model.weights.tensors.keys()
    for launch in plan.launches:
        for name, ref in launch.refs():
            width = {"tokens": 4, "hidden": model.dims.hidden * 4, "rope": model.dims.rotary * 4}.get(name, 0)
            end = ref.offset + launch.args["rows"] * width if launch.label != "rope" else 0
            assert end <= plan.buffer(ref.buffer).bytes, (launch.label, name)
    staged = [launch for launch in plan.launches if launch.label in ("window", "ring")]
    assert all(
        one.args["start"] + one.args["rows"] - one.args["first_position"] <= one.args["staged_slots"] for one in staged
    )


def test_rows_for_the_draft():
    model = model_of(paths.NANO, 1)

    def settled(chunk):
        plan = prefill.chunk_plan(model, chunk)
        return [
            (one.args["start"], one.args["rows"], one.args["rope"])
            for one in plan.launches
            if one.label == "qkv" and one.layer == -1
        ]

    theta = f"prefill.rope.{model.draft.theta:g}"
    row = model.dims.rotary * 4
    assert settled(Chunk(300, 40, 0, 0)) == []
    assert settled(Chunk(300, 40, 299, 300)) == [(299, 1, Ref("prefill.rope_before"))]
    assert settled(Chunk(300, 40, 310, 339)) == [(310, 29, Ref(theta, 10 * row))]
    both = settled(Chunk(300, 400, 299, 700))
    assert both == [
        (299, 1, Ref("prefill.rope_before")),
        (700 - model.draft.slots, model.draft.slots, Ref(theta, (400 - model.draft.slots) * row)),
    ]


@pytest.mark.parametrize("wrong", [(-1, 5), (0, 0), (0, 2049), (10, 5, 8, 12), (10, 5, 12, 16)])
def test_no_such_chunk(wrong):
    with pytest.raises(ValueError, match=r"chunk|draft"):
        Chunk(*wrong)


@contextmanager
def nano_on(gpu):
    """The nano model on a GPU: model, addresses of all buffers, checkpoint."""
    checkpoint = Checkpoint.open(paths.NANO)
    weights = rank_weights(checkpoint)
    model = q1.resolve(checkpoint.config, checkpoint.draft_config, weights.layout, capacity=CAPACITY)
    buffers = [b for b in (*q1.working_buffers(model), *prefill.working_buffers(model)) if b.name != "fault"]
    arena = Arena({"weights": weights.layout.nbytes, **{b.name: b.bytes for b in buffers}})
    try:
        arena.clear()
        load_weights(weights, arena["weights"], gpu.stream)
        addresses = {b.name: arena[b.name] for b in buffers} | {"fault": gpu.fault.address}
        addresses |= {name: weights.layout.address(arena["weights"], name) for name in weights.layout.tensors}
        for layer in (*model.layers, model.draft):
            pairs = np.arange(model.dims.rotary // 2)
            copy_in(addresses[f"rope.{layer.theta:g}"], layer.theta ** (-2.0 * pairs / model.dims.rotary))
        yield model, addresses, checkpoint
    finally:
        arena.close()


def get(address, shape, dtype):
    out = np.empty(shape, dtype)
    check(bindings().cuMemcpyDtoH(out.ctypes.data, bindings().CUdeviceptr(address), out.nbytes))
    return out


def distance(found, wanted):
    assert np.isfinite(found).all()
    return np.linalg.norm(np.float64(found) - wanted) / np.linalg.norm(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(700,), (300, 1, 64, 335), (7, 130, 563)], ids=str)
def test_a_prompt_of_nano(gpu, lengths):
    """Hidden states, logits and all caches, the draft's too; what the draft takes in late is the row before a chunk."""
    total = sum(lengths)
    with nano_on(gpu) as (model, addresses, checkpoint):
        text = np.frombuffer((paths.ROOT / "cuq1" / "generate.py").read_bytes(), np.uint8)[:total]
        ids = text.astype(np.int32) + 100
        run, score = Chunks(prefill.chunk_steps(model), addresses), Chunks([prefill.logits_step(model)], addresses)
        hidden, logits, start, settled = [], [], 0, 0
        for rows in lengths:
            copy_in(addresses["prefill.tokens"], ids[start : start + rows + 1])
            run.issue(Chunk(start, rows, settled, start + rows - 1), gpu.stream)  # its last row waits for the next
            settled = start + rows - 1
            gpu.wait()
            hidden.append(get(addresses["prefill.hidden"], (rows, model.dims.hidden), np.float32))
            newest = get(addresses["hidden"], (1, model.dims.hidden), np.float32)
            assert (newest[0] == hidden[-1][-1]).all()
            for first in range(0, rows, prefill.SCORED):
                count = min(prefill.SCORED, rows - first)
                score.issue(Chunk(first, count), gpu.stream)
                gpu.wait()
                logits.append(get(addresses["prefill.logits"], (count, model.dims.vocab), np.float32))
            start += rows

        target = TargetForward(load_target(checkpoint, 1), checkpoint.config, CAPACITY)
        wanted = target.forward(ids.astype(np.int64), 0)
        draft = DraftForward(load_draft(checkpoint, 1), checkpoint.draft_config)
        first = max(0, total - 1 - draft.slots)
        draft.settle(ids[first + 1 :].astype(np.int64), wanted[first : total - 1], first)
        assert distance(np.concatenate(hidden), wanted) < 1e-2
        assert distance(np.concatenate(logits), target.logits(wanted)) < 1e-2
        for layer, forward in zip((*model.layers, model.draft), (*target.layers, draft.layer), strict=True):
            end = total - (layer is model.draft)
            positions = np.arange(max(0, end - layer.slots), end)
            for kind in "kv":
                cache = get(
                    addresses[f"{layer.prefix}.{kind}_cache"], (layer.dims.kv_heads, layer.slots, 128), np.float16
                )
                found = twin.swizzle(cache)[:, positions % layer.slots]
                held = forward.caches[0]
                slots = held.k.shape[1]
                reference = (held.k if kind == "k" else held.v)[:, positions % slots]
                assert distance(found, reference) < 1e-2, (layer.prefix, kind)


@pytest.mark.gpu
def test_the_same_bits_again(gpu):
    """What a prompt leaves does not depend on the run."""
    with nano_on(gpu) as (model, addresses, _):
        run = Chunks(prefill.chunk_steps(model), addresses)
        copy_in(addresses["prefill.tokens"], np.arange(600, dtype=np.int32) + 200)
        found = []
        for _ in range(2):
            run.issue(Chunk(0, 600, 0, 599), gpu.stream)
            gpu.wait()
            found.append(get(addresses["prefill.hidden"], (600, model.dims.hidden), np.uint32))
        assert (found[0] == found[1]).all()
