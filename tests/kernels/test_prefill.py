"""Prefill kernels against their twins; each check also runs with a broken kernel, which must fail."""

from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda import abi
from cuq1.cuda.kernels import prefill
from cuq1.errors import DeviceError
from cuq1.plan.dims import HEAD_DIM
from tests.kernels.prefill_checks import (
    check_attention,
    check_entry,
    check_experts,
    check_group,
    check_linear,
    check_qkv,
    check_ring,
    check_rope,
    check_route,
    check_router,
    error,
    generator,
)
from tests.kernels.shapes import NANO, NANO2, RELEASED
from tests.kernels.twins import prefill as twin

FEW = replace(RELEASED, experts=10)  # an expert's sizes do not depend on how many there are
DIMS = {"released": FEW, "nano": NANO, "nano2": NANO2}
F16 = {"fp8_attention": False, "fp8_experts": False}
ROWS = (1, 7, 63, 64, 65, 127, 129, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 190_000])
def test_rope(gpu, start):
    check_rope(gpu, RELEASED, 1000, start)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", DIMS)
def test_qkv(gpu, name, rows):
    check_qkv(gpu, DIMS[name], rows, start=500)
    check_qkv(gpu, replace(DIMS[name], **F16), rows, start=1500, slots=1024, kv_only=True)


@pytest.mark.gpu
def test_qkv_goes_into_a_staging_buffer(gpu):
    check_qkv(gpu, NANO, 129, start=5000, first_position=4736, slots=512)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "start", "first"), [(1, 0, 0), (129, 700, 448), (320, 1000, 960), (17, 319, 256)])
@pytest.mark.parametrize("to_ring", [0, 1])
def test_ring(gpu, rows, start, first, to_ring):
    check_ring(gpu, NANO, rows, start, first, to_ring)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("start", "window"), [(0, 0), (777, 0), (0, 256), (255, 256), (1311, 256), (64, 64)])
def test_attention(gpu, rows, start, window):
    check_attention(gpu, NANO, rows, start, window)
    check_attention(gpu, RELEASED, rows, start, window)


@pytest.mark.gpu
def test_attention_of_the_released_window(gpu):
    check_attention(gpu, RELEASED, 500, 5000, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 129])
@pytest.mark.parametrize(("start", "window", "splits"), [(0, 0, 4), (777, 0, 3), (1311, 256, 2), (3000, 0, 32)])
def test_attention_in_splits(gpu, rows, start, window, splits):
    check_attention(gpu, NANO, rows, start, window, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("fp8", [True, False])
def test_linear(gpu, rows, fp8):
    check_linear(gpu, 768, 3072, rows, fp8)
    check_linear(gpu, 256, 200, rows, fp8, column=384)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dims", [RELEASED, NANO], ids=["released", "nano"])
def test_routing(gpu, dims, rows):
    check_router(gpu, dims, rows)
    check_route(gpu, dims, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [*ROWS, 2048])
def test_group(gpu, rows):
    check_group(gpu, RELEASED, rows, 256)
    check_group(gpu, RELEASED, rows, 9)  # most experts have no token
    check_group(gpu, RELEASED, rows, 8)  # all rows choose the same experts
    check_group(gpu, RELEASED, rows, 0, dense_groups=8)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "rows"),
    [("released", 7), ("released", 129), *((name, rows) for name in ("nano", "nano2") for rows in (1, 7, 64, 65, 300))],
)
def test_experts(gpu, name, rows):
    dims = DIMS[name]
    check_experts(gpu, dims, rows, dims.experts)
    check_experts(gpu, dims, rows, dims.top_k)
    check_experts(gpu, dims, rows, 0, dense_groups=4)
    check_experts(gpu, replace(dims, **F16), rows, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{"inner": 96}, {"inner": 32}, {"inner": 48, "fp8_experts": False}], ids=str)
def test_experts_of_other_widths(gpu, changes):
    check_experts(gpu, replace(NANO, **changes), 129, 32)


@pytest.mark.gpu
def test_one_expert_takes_all(gpu):
    check_experts(gpu, replace(FEW, top_k=1), 1000, 1)
    check_group(gpu, replace(FEW, top_k=1), 1000, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 65, 1000])
def test_entry(gpu, rows):
    check_entry(gpu, NANO, rows)
    check_entry(gpu, replace(RELEASED, vocab_total=1000), rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "slots"), [(256, 320), (100, 192)])
def test_chunks_through_a_ring(gpu, window, slots):
    """Whole sequence in chunks: ring to staging, the chunk's rows, attention, back to the ring."""
    rng = generator()
    dims, chunks = NANO, (130, 1, 64, 700, 63, 2, 321)
    total, scale = sum(chunks), HEAD_DIM**-0.5
    q = rng.standard_normal((total, dims.q_heads, HEAD_DIM)).astype(np.float16)
    k, v = (rng.standard_normal((total, dims.kv_heads, HEAD_DIM)).astype(np.float16) for _ in "kv")
    sink = rng.standard_normal((dims.kv_heads, HEAD_DIM)).astype(np.float32)
    staged_slots = window + 64 + 1024
    rings = [gpu.poison((dims.kv_heads, slots, HEAD_DIM), np.float16) for _ in "kv"]
    staged = [gpu.poison((dims.kv_heads, staged_slots, HEAD_DIM), np.float16) for _ in "kv"]
    put_sink = gpu.array(sink)
    places = [x.data.ptr for x in (*rings, *staged)]
    found, start = [], 0
    for rows in chunks:
        first = max(0, start - window + 1) // 64 * 64
        if start:
            args = abi.PrefillRingArgs(
                gpu.fault.address, 0, 0, start - first, *places, slots, staged_slots, first, first, 0
            )  # fmt: skip
            gpu.run(prefill.ring(dims, start - first), args)
        for cache, values in zip(staged, (k, v), strict=True):
            host = twin.swizzle(cache.get())
            host[:, start - first : start - first + rows] = values[start : start + rows].swapaxes(0, 1)
            cache[:] = gpu.array(twin.swizzle(host))
        put_q = gpu.array(q[start : start + rows])
        out = gpu.poison((rows, dims.q_heads, HEAD_DIM), np.float16)
        args = abi.PrefillAttentionArgs(
            gpu.fault.address, 0, 0, rows, put_q.data.ptr, *places[2:], put_sink.data.ptr, out.data.ptr, 0, 0,
            staged_slots, start, first, window, scale, 1,
        )  # fmt: skip
        gpu.run(prefill.attention(dims, rows), args)
        found.append(out.get())
        kept = min(rows, slots)
        args = abi.PrefillRingArgs(
            gpu.fault.address, 0, 0, kept, *places, slots, staged_slots, start + rows - kept, first, 1
        )  # fmt: skip
        gpu.run(prefill.ring(dims, kept), args)
        start += rows
    wanted = twin.attention(q, k, v, sink, np.arange(total), window, scale)
    assert error(np.concatenate(found), wanted) < 1e-3


BROKEN = {
    "rope": (lambda g, p: check_rope(g, NANO, 65, 9, patch=p), "double(a.start + i", "double(a.start + 1 + i"),
    "qkv scale": (lambda g, p: check_qkv(g, NANO, 65, patch=p), "head_scales[block]", "head_scales[0]"),
    "qkv norm": (lambda g, p: check_qkv(g, NANO, 65, patch=p), "1.0f / HEAD_DIM", "1.01f / HEAD_DIM"),
    "qkv rope": (lambda g, p: check_qkv(g, NANO, 65, patch=p), "x = x0 * turn.x - y", "x = x0 * turn.x + y"),
    "qkv dead rows": (lambda g, p: check_qkv(g, NANO, 65, patch=p), "row >= a.rows) break", "row >= a.rows + 1) break"),
    "ring": (
        lambda g, p: check_ring(g, NANO, 65, 300, 256, 1, patch=p), "position % a.ring", "(position + 1) % a.ring"
    ),
    "attention causal": (
        lambda g, p: check_attention(g, NANO, 65, 70, 0, patch=p), "key <= position0", "key < position0"
    ),
    "attention window": (
        lambda g, p: check_attention(g, NANO, 65, 700, 64, patch=p),
        "position0 - key < a.window", "position0 - key <= a.window",
    ),
    "attention sink": (
        lambda g, p: check_attention(g, NANO, 65, 0, 0, patch=p), "sum0 = t == 0 ? 1.0f", "sum0 = t == 0 ? 0.9f"
    ),
    "attention merge": (
        lambda g, p: check_attention(g, NANO, 65, 700, 0, 3, patch=p), "weight * stat.y", "stat.y"
    ),
    "attention garbage": (
        lambda g, p: check_attention(g, NANO, 65, 0, 0, patch=p), "position > high)", "position > high + 1)"
    ),
    "linear scale": (
        lambda g, p: check_linear(g, 256, 200, 65, True, patch=p), "a.scales[tile", "a.scales[0 * tile"
    ),
    "linear last tile": (
        lambda g, p: check_linear(g, 256, 200, 65, True, patch=p), "&& column < OUT_ROWS", ""
    ),
    "router": (lambda g, p: check_router(g, NANO, 65, patch=p), "fmaf(x[i], e.w, sum[i][3])", "x[i] * e.w"),
    "route ties": (lambda g, p: check_route(g, NANO, 65, patch=p), "other_where < where", "other_where > where"),
    "group order": (
        lambda g, p: check_group(g, RELEASED, 300, 9, patch=p), "chosen & ((1u << lane) - 1)", "chosen >> lane >> 1"
    ),
    "gate_up": (
        lambda g, p: check_experts(g, NANO, 65, 9, patch=("gate_up", *p)), "unit)[block]", "unit)[0]"
    ),
    "down": (
        lambda g, p: check_experts(g, NANO2, 65, 9, patch=("down", *p)), "(1.0f / INNER_SCALE);\n                out",
        "1.0f;\n                out",
    ),
    "combine": (
        lambda g, p: check_experts(g, NANO, 65, 9, patch=("combine", *p)), "k < TOP_K; ++k", "k < TOP_K - 1; ++k"
    ),
    "entry": (lambda g, p: check_entry(g, NANO, 65, patch=p), "write_norm(h, a.hnorm", "write_norm(h, a.enorm"),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_noticed(gpu, name):
    check, old, new = BROKEN[name]
    with pytest.raises((AssertionError, DeviceError)) as noticed:
        check(gpu, (old, new))
    assert noticed.type is AssertionError or "reported a fault" in str(noticed.value)
