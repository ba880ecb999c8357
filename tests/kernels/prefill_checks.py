"""Each prefill kernel against its twin, as a function that also takes a `patch` of the kernel."""

from dataclasses import replace
from math import gcd

import ml_dtypes
import numpy as np

from cuq1.cuda import abi, repack
from cuq1.cuda.kernels import prefill
from cuq1.plan.dims import HEAD_DIM
from cuq1.reference import ops
from tests.kernels.twins import prefill as twin

EXTRA = 3  # rows beyond the chunk: NaN going in, untouched coming out


def generator():
    seed = int(np.random.default_rng().integers(2**63))
    print("seed", seed)
    return np.random.default_rng(seed)


def error(found, wanted):
    assert np.isfinite(found).all(), "something live was not written, or is not finite"
    return np.linalg.norm(np.float64(found) - wanted) / np.linalg.norm(wanted)


def untouched(values):
    return np.isnan(values).all() if values.dtype.kind == "f" else (values.view(np.uint8) == 0x7F).all()


def dead_rows(values, rows):
    """Activations followed by rows that nobody may read."""
    out = np.full((rows + EXTRA, *values.shape[1:]), np.nan, values.dtype)
    out[:rows] = values
    return out


def codes(rng, *shape):
    found = rng.integers(0, 256, shape, np.uint8)
    found[(found & 0x7F) == 0x7F] = 0x30
    found[(found & 0x7F) > 0x60] -= 0x28  # nothing so large that it outweighs everything else
    return found


def matrix(rng, rows, k, fp8, scale_rows, scale_k=128):
    """A weight as it is packed (codes or halves), its scales [rows / scale_rows, k / scale_k], its values."""
    if not fp8:
        values = (rng.standard_normal((rows, k)) / k**0.5).astype(np.float16)
        return values, None, values.astype(np.float64)
    found = codes(rng, rows, k)
    scales = rng.uniform(0.002, 0.02, (rows // scale_rows, k // scale_k)).astype(np.float32)
    return found, scales, twin.e4m3(found) * np.repeat(np.repeat(scales, scale_rows, 0), scale_k, 1)


def address(array):
    return 0 if array is None else array.data.ptr


def frequencies(dims, theta=1e4):
    return theta ** (-np.arange(dims.rotary // 2, dtype=np.float64) * 2 / dims.rotary)


def check_rope(gpu, dims, rows, start, patch=None):
    found = gpu.array(frequencies(dims, 1e6))
    table = gpu.poison((rows + EXTRA, dims.rotary // 2, 2), np.float32)
    args = abi.PrefillRopeArgs(gpu.fault.address, 0, 0, rows, found.data.ptr, table.data.ptr, start)
    gpu.run(prefill.rope(dims, rows), args, patch)
    angles = (start + np.arange(rows))[:, None] * frequencies(dims, 1e6)
    out = table.get()
    assert np.abs(out[:rows] - np.stack((np.cos(angles), np.sin(angles)), -1)).max() < 1e-7
    assert untouched(out[rows:])


def check_qkv(gpu, dims, rows, start=0, first_position=0, slots=2048, kv_only=False, patch=None):
    rng = generator()
    heads = dims.q_heads + 2 * dims.kv_heads
    x = rng.standard_normal((rows, dims.hidden)).astype(np.float16)
    packed, scales, values = matrix(rng, heads * HEAD_DIM, dims.hidden, dims.fp8_attention, HEAD_DIM)
    order = np.arange(heads * HEAD_DIM).reshape(heads, HEAD_DIM)
    order[: dims.q_heads + dims.kv_heads] = order[: dims.q_heads + dims.kv_heads, repack.head_rows(dims.rotary)]
    norms = rng.uniform(0.5, 1.5, (2, HEAD_DIM)).astype(np.float32)
    positions = start + np.arange(rows)
    angles = positions[:, None] * frequencies(dims)
    rope = np.stack((np.cos(angles), np.sin(angles)), -1).astype(np.float32)
    put = [gpu.array(a) for a in (dead_rows(x, rows), repack.tiles(packed[order.ravel()]), norms, rope)]
    put_scales = None if scales is None else gpu.array(scales)
    q = gpu.poison((rows + EXTRA, dims.q_heads, HEAD_DIM), np.float16)
    caches = [gpu.poison((dims.kv_heads, slots, HEAD_DIM), np.float16) for _ in "kv"]
    args = abi.PrefillQkvArgs(
        gpu.fault.address, 0, 3, rows, put[0].data.ptr, put[1].data.ptr, address(put_scales), put[2].data.ptr,
        put[2].data.ptr + HEAD_DIM * 4, put[3].data.ptr, q.data.ptr, caches[0].data.ptr, caches[1].data.ptr, slots,
        start, first_position, dims.q_heads if kv_only else 0,
    )  # fmt: skip
    gpu.run(prefill.qkv(dims, rows, kv_only=kv_only), args, patch)
    wanted = twin.qkv(
        x, values.reshape(heads, HEAD_DIM, -1),
        dims.q_heads, dims.kv_heads, norms, positions, frequencies(dims), dims.eps
    )  # fmt: skip
    out = q.get()
    if kv_only:
        assert untouched(out)
    else:
        assert error(out[:rows], wanted[0]) < 4e-4
        assert untouched(out[rows:])
    place = (positions - first_position) % slots
    for cache, want in zip(caches, wanted[1:], strict=True):
        found = twin.swizzle(cache.get())
        assert error(found[:, place], want.swapaxes(0, 1)) < 4e-4
        assert untouched(np.delete(found, place, axis=1))


def check_ring(gpu, dims, rows, start, first_position, to_ring, patch=None):
    rng = generator()
    ring_slots, staged_slots = 320, 1024
    shapes = {"ring": (dims.kv_heads, ring_slots, HEAD_DIM), "staged": (dims.kv_heads, staged_slots, HEAD_DIM)}
    source, target = ("staged", "ring") if to_ring else ("ring", "staged")
    held = {source: [rng.standard_normal(shapes[source]).astype(np.float16) for _ in "kv"]}
    put = {source: [gpu.array(x) for x in held[source]], target: [gpu.poison(shapes[target], np.float16) for _ in "kv"]}
    args = abi.PrefillRingArgs(
        gpu.fault.address, 0, 0, rows, *(x.data.ptr for x in (*put["ring"], *put["staged"])), ring_slots, staged_slots,
        start, first_position, to_ring,
    )  # fmt: skip
    gpu.run(prefill.ring(dims, rows), args, patch)
    positions = start + np.arange(rows)
    place = {"ring": positions % ring_slots, "staged": positions - first_position}
    for cache, source_values in zip(put[target], held[source], strict=True):
        found = twin.swizzle(cache.get())
        assert (found[:, place[target]] == twin.swizzle(source_values)[:, place[source]]).all()
        assert untouched(np.delete(found, place[target], axis=1))


def check_attention(gpu, dims, rows, start, window, splits=1, patch=None):
    rng = generator()
    end = start + rows
    q = rng.standard_normal((rows, dims.q_heads, HEAD_DIM)).astype(np.float16)
    k, v = (rng.standard_normal((end, dims.kv_heads, HEAD_DIM)).astype(np.float16) for _ in "kv")
    sink = rng.standard_normal((dims.kv_heads, HEAD_DIM)).astype(np.float32)
    oldest = max(0, start - window + 1) if window else 0
    first_position = oldest // 64 * 64
    slots = (end - first_position + 63) // 64 * 64 + 64
    tiles = np.full((2, dims.kv_heads, slots, HEAD_DIM), np.nan, np.float16)  # NaN wherever nobody may look
    for cache, values in zip(tiles, (k, v), strict=True):
        cache[:, oldest - first_position : end - first_position] = values[oldest:].swapaxes(0, 1)
    scale = HEAD_DIM**-0.5
    put = [gpu.array(a) for a in (dead_rows(q, rows), twin.swizzle(tiles[0]), twin.swizzle(tiles[1]), sink)]
    attended = gpu.poison((rows + EXTRA, dims.q_heads, HEAD_DIM), np.float16)
    parts = [gpu.poison((splits, rows, dims.q_heads, width), np.float32) for width in (HEAD_DIM, 2)]
    args = abi.PrefillAttentionArgs(
        gpu.fault.address, 0, 0, rows, *(x.data.ptr for x in (*put, attended, *parts)), slots, start, first_position,
        window, scale, splits,
    )  # fmt: skip
    gpu.run(prefill.attention(dims, rows, splits), args, patch if splits == 1 else None)
    if splits > 1:
        args = abi.PrefillMergeArgs(
            gpu.fault.address, 0, 0, rows, *(x.data.ptr for x in parts), attended.data.ptr, splits
        )  # fmt: skip
        gpu.run(prefill.merge(dims, rows), args, patch)
    out = attended.get()
    assert error(out[:rows], twin.attention(q, k, v, sink, start + np.arange(rows), window, scale)) < 1e-3
    assert untouched(out[rows:])


def check_linear(gpu, in_width, out_rows, rows, fp8, column=0, patch=None):
    rng = generator()
    padded = -(-out_rows // 16) * 16
    x = rng.standard_normal((rows, in_width)).astype(np.float16)
    packed, scales, values = matrix(rng, padded, in_width, fp8, 16)
    put, weights = gpu.array(dead_rows(x, rows)), gpu.array(repack.tiles(packed))
    put_scales = None if scales is None else gpu.array(scales)
    width = column + out_rows + 5
    out = gpu.poison((rows + EXTRA, width), np.float32)
    args = abi.PrefillLinearArgs(
        gpu.fault.address, 0, 0, rows, put.data.ptr, weights.data.ptr, address(put_scales), out.data.ptr, width, column,
        0.75,
    )  # fmt: skip
    gpu.run(prefill.linear(in_width, out_rows, rows, fp8=fp8), args, patch)
    found = out.get()
    assert error(found[:rows, column : column + out_rows], 0.75 * x.astype(np.float64) @ values[:out_rows].T) < 1e-5
    found[:rows, column : column + out_rows] = np.nan
    assert untouched(found)


def check_router(gpu, dims, rows, patch=None):
    rng = generator()
    x = rng.standard_normal((rows, dims.hidden)).astype(np.float32)
    router = rng.standard_normal((dims.experts, dims.hidden)).astype(np.float32)
    put, weights = gpu.array(dead_rows(x, rows)), gpu.array(router)
    splits = prefill.router_splits(dims)
    logits = gpu.poison((splits * rows + EXTRA, dims.experts), np.float32)
    args = abi.PrefillRouterArgs(gpu.fault.address, 0, 0, rows, put.data.ptr, weights.data.ptr, logits.data.ptr)
    gpu.run(prefill.router(dims, rows), args, patch)
    out = logits.get()
    total = out[: splits * rows].reshape(splits, rows, -1).astype(np.float64).sum(0)
    assert error(total, x.astype(np.float64) @ router.astype(np.float64).T) < 1e-6
    assert untouched(out[splits * rows :])


def check_route(gpu, dims, rows, patch=None):
    rng = generator()
    splits = prefill.router_splits(dims)
    # few distinct values, exact in any order of summing: ties everywhere
    parts = rng.integers(-4, 5, (splits, rows, dims.experts)).astype(np.float32) / 4
    logits = gpu.array(parts)
    ids = gpu.poison((rows + EXTRA, dims.top_k), np.int32)
    weights = gpu.poison((rows + EXTRA, dims.top_k), np.float32)
    args = abi.PrefillRouteArgs(gpu.fault.address, 0, 0, rows, logits.data.ptr, ids.data.ptr, weights.data.ptr)
    gpu.run(prefill.route(dims, rows), args, patch)
    wanted_ids, wanted_weights = ops.route(parts.sum(0), dims.top_k)
    assert (ids.get()[:rows] == wanted_ids).all()
    assert error(weights.get()[:rows], wanted_weights) < 1e-6
    assert untouched(ids.get()[rows:])
    assert untouched(weights.get()[rows:])


def choices(rng, rows, experts, top_k, spread):
    """Expert ids [rows, top_k]; `spread` experts are chosen at all."""
    return np.stack([rng.permutation(spread)[:top_k] for _ in range(rows)]).astype(np.int32)


def check_group(gpu, dims, rows, spread, dense_groups=0, patch=None):
    rng = generator()
    experts, top_k = (dense_groups, dense_groups) if dense_groups else (dims.experts, dims.top_k)
    ids = (
        np.tile(np.arange(experts, dtype=np.int32), (rows, 1))
        if dense_groups
        else choices(rng, rows, experts, top_k, spread)
    )
    put = None if dense_groups else gpu.array(ids)
    bound = prefill.tiles_bound(replace(dims, experts=experts, top_k=top_k), rows)
    pairs = gpu.poison((rows * top_k + EXTRA,), np.int32)
    tiles = gpu.poison((bound + 1, 4), np.int32)
    count = gpu.poison((1,), np.int32)
    args = abi.PrefillGroupArgs(
        gpu.fault.address, 0, 0, rows, address(put), pairs.data.ptr, tiles.data.ptr, count.data.ptr
    )
    gpu.run(prefill.group(dims, rows, dense_groups=dense_groups), args, patch)
    wanted_pairs, wanted_tiles = twin.group(ids, experts)
    assert len(wanted_tiles) <= bound
    assert count.get()[0] == len(wanted_tiles)
    assert pairs.get()[: rows * top_k].tolist() == wanted_pairs
    assert [tuple(t) for t in tiles.get()[: len(wanted_tiles), :3]] == wanted_tiles
    assert untouched(pairs.get()[rows * top_k :])
    assert untouched(tiles.get()[len(wanted_tiles) :])


def check_experts(gpu, dims, rows, spread, dense_groups=0, patch=None):
    """gate_up, then down on what the twin says of gate_up, then combine on what the twin says of down."""
    rng = generator()
    experts, top_k = (dense_groups, dense_groups) if dense_groups else (dims.experts, dims.top_k)
    ids = (
        np.tile(np.arange(experts, dtype=np.int32), (rows, 1))
        if dense_groups
        else choices(rng, rows, experts, top_k, spread)
    )
    pairs, tiles = twin.group(ids, experts)
    hidden, inner, scale_k = dims.hidden, dims.inner, gcd(dims.inner, 128)
    x = rng.standard_normal((rows, hidden)).astype(np.float16)
    units, gates, ups, downs, down_values, down_scales = [], [], [], [], [], []
    for _ in range(experts):
        packed, _, values = matrix(rng, 2 * inner, hidden, dims.fp8_experts, 8)
        scales = None
        if dims.fp8_experts:
            scales = rng.uniform(0.002, 0.02, (inner // 8, hidden // 128, 2)).astype(np.float32)
            rows_scales = np.concatenate((np.repeat(scales[..., 0], 8, 0), np.repeat(scales[..., 1], 8, 0)))
            values = twin.e4m3(packed) * np.repeat(rows_scales, 128, 1)
        units.append(repack.gate_up_units(packed, scales))
        gates.append(values[:inner])
        ups.append(values[inner:])
        packed, scales, values = matrix(rng, hidden, inner, dims.fp8_experts, 16, scale_k)
        downs.append(repack.tiles(packed))
        down_scales.append(scales)
        down_values.append(values)
    listed = np.array([(*tile, 0) for tile in tiles], np.int32)
    put_pairs, put_tiles = gpu.array(np.array(pairs, np.int32)), gpu.array(listed)
    count = gpu.array(np.array([len(tiles)], np.int32))
    lists = (put_pairs.data.ptr, put_tiles.data.ptr, count.data.ptr)
    put_x, put_units = gpu.array(dead_rows(x, rows)), gpu.array(np.stack(units))
    out = gpu.poison((rows * top_k + EXTRA, inner), np.float16)
    args = abi.PrefillGateUpArgs(
        gpu.fault.address, 0, 0, rows, put_x.data.ptr, put_units.data.ptr, *lists, out.data.ptr
    )  # fmt: skip
    entry = patch[0] if patch else None
    gpu.run(prefill.gate_up(dims, rows, dense_groups=dense_groups), args, patch[1:] if entry == "gate_up" else None)
    found = out.get()
    wanted = twin.gate_up(x, np.stack(gates), np.stack(ups), pairs, ids)
    assert error(found[: rows * top_k] * 16.0, wanted) < 4e-4
    assert untouched(found[rows * top_k :])

    halves = (wanted / 16).astype(np.float16)
    put_inner, put_down = gpu.array(dead_rows(halves, rows * top_k)), gpu.array(np.stack(downs))
    put_scales = gpu.array(np.stack(down_scales)) if dims.fp8_experts else None
    apart = gpu.poison((rows + EXTRA, top_k, hidden), np.float32)
    args = abi.PrefillDownArgs(
        gpu.fault.address, 0, 0, rows, put_inner.data.ptr, put_down.data.ptr, address(put_scales), *lists,
        apart.data.ptr,
    )  # fmt: skip
    gpu.run(prefill.down(dims, rows, dense_groups=dense_groups), args, patch[1:] if entry == "down" else None)
    found = apart.get()
    wanted = twin.down(halves.astype(np.float64) * 16, np.stack(down_values), pairs, ids)
    assert error(found[:rows], wanted) < 1e-5
    assert untouched(found[rows:])

    weights = None if dense_groups else rng.uniform(0, 1, (rows, top_k)).astype(np.float32)
    put_weights = None if weights is None else gpu.array(weights)
    y = gpu.poison((rows + EXTRA, hidden), np.float32)
    args = abi.PrefillCombineArgs(gpu.fault.address, 0, 0, rows, apart.data.ptr, address(put_weights), y.data.ptr)
    gpu.run(prefill.combine(dims, rows, dense_groups=dense_groups), args, patch[1:] if entry == "combine" else None)
    ones = np.ones((rows, top_k), np.float32) if weights is None else weights
    assert error(y.get()[:rows], twin.combine(found[:rows], ones)) < 1e-6
    assert untouched(y.get()[rows:])


def check_entry(gpu, dims, rows, patch=None):
    rng = generator()
    table = rng.standard_normal((dims.vocab_total, dims.hidden)).astype(ml_dtypes.bfloat16)
    tokens = rng.integers(0, dims.vocab_total, rows).astype(np.int32)
    hidden = (5 * rng.standard_normal((rows, dims.hidden))).astype(np.float32)
    norms = rng.uniform(0.5, 1.5, (2, dims.hidden)).astype(np.float32)
    put = [gpu.array(a) for a in (tokens, table.view(np.uint16), dead_rows(hidden, rows), norms)]
    out = gpu.poison((rows + EXTRA, 2 * dims.hidden), np.float16)
    args = abi.PrefillEntryArgs(
        gpu.fault.address, 0, -1, rows, put[0].data.ptr, put[1].data.ptr, put[2].data.ptr, put[3].data.ptr,
        put[3].data.ptr + dims.hidden * 4, out.data.ptr,
    )  # fmt: skip
    gpu.run(prefill.entry(dims, rows), args, patch)
    wanted = twin.entry(table[tokens].astype(np.float32), hidden, *norms, dims.eps)
    assert error(out.get()[:rows], wanted) < 4e-4
    assert untouched(out.get()[rows:])
    normed = gpu.poison((rows + EXTRA, dims.hidden), np.float16)
    args = abi.PrefillNormArgs(gpu.fault.address, 0, -1, rows, put[2].data.ptr, put[3].data.ptr, normed.data.ptr)
    gpu.run(prefill.norm(dims, rows), args)
    assert error(normed.get()[:rows], twin.rms(hidden, norms[0], dims.eps)) < 4e-4
    assert untouched(normed.get()[rows:])
