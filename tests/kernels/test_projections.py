"""qkv and o_proj against their twins."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cuq1.cuda import repack
from cuq1.cuda.abi import OProjArgs, QkvArgs
from cuq1.cuda.kernels import projections
from cuq1.cuda.kernels.draft import eh_splits
from cuq1.errors import DeviceError
from cuq1.plan.dims import HEAD_DIM, ROWS
from tests.kernels import shapes
from tests.kernels.twins import projections as twin

HALF_TOLERANCE = 4e-4  # of what is rounded to a half
ENTRY_TOLERANCE = 6e-4  # of halves, times what was rounded to halves
SUM_TOLERANCE = 2e-6  # FP32 sums of exact products

DIMS = {
    **shapes.DIMS,
    "released BF16": replace(shapes.RELEASED, fp8_attention=False),
    "nano BF16": replace(shapes.NANO, fp8_attention=False),
}


def fresh():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # pytest shows it with a failure
    return np.random.default_rng(seed)


def matrix(rng, rows, k, fp8, row_step):
    """Stored weights, their scales [rows / row_step, k / 128] (None for halves), and their values in float64."""
    if not fp8:
        stored = (rng.standard_normal((rows, k), np.float32) / np.float32(k**0.5)).astype(np.float16)
        return stored, None, stored.astype(np.float64)
    codes = rng.integers(0, 0x58, (rows, k), np.uint8) | (rng.integers(0, 2, (rows, k), np.uint8) << 7)
    scales = (rng.uniform(0.2, 1.0, (rows // row_step, k // 128)) / k**0.5).astype(np.float32)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return codes, scales, values * scales.astype(np.float64).repeat(row_step, axis=0).repeat(128, axis=1)


def error(found, expected):
    assert np.isfinite(found).all()
    return np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)


class Qkv:
    """Random weights of one layer, as they are and on the GPU."""

    def __init__(self, gpu, dims, rng, theta=1e4, window=4096):
        self.gpu, self.dims, self.theta = gpu, dims, theta
        self.kernel = projections.qkv(dims)
        self.slots = window + 64
        heads = dims.q_heads + 2 * dims.kv_heads
        stored, scales, self.values = matrix(rng, heads * HEAD_DIM, dims.hidden, dims.fp8_attention, HEAD_DIM)
        rotated = (dims.q_heads + dims.kv_heads) * HEAD_DIM
        rows = np.arange(heads * HEAD_DIM)
        rows[:rotated] = rows[:rotated].reshape(-1, HEAD_DIM)[:, repack.head_rows(dims.rotary)].ravel()
        self.norms = rng.uniform(0.5, 1.5, (2, HEAD_DIM)).astype(np.float32)
        frequencies = theta ** (-2.0 * np.arange(dims.rotary // 2) / dims.rotary)
        self.weights = gpu.array(repack.tiles(stored[rows]))
        self.scales = None if scales is None else gpu.array(scales)
        self.tables = [gpu.array(x) for x in (*self.norms, frequencies)]

    def args(self, normed, positions, q, k_cache, v_cache, rows=ROWS, live=None):
        return QkvArgs(
            fault=self.gpu.fault.address,
            live=0 if live is None else live.data.ptr,
            layer=5,
            rows=rows,
            normed=normed.data.ptr,
            weights=self.weights.data.ptr,
            scales=0 if self.scales is None else self.scales.data.ptr,
            q_norm=self.tables[0].data.ptr,
            k_norm=self.tables[1].data.ptr,
            positions=positions.data.ptr,
            inverse_frequencies=self.tables[2].data.ptr,
            q=q.data.ptr,
            k_cache=k_cache.data.ptr,
            v_cache=v_cache.data.ptr,
            slots=self.slots,
        )

    def buffers(self):
        tiles = (self.dims.kv_heads, self.slots // 64, 64, HEAD_DIM)
        return [self.gpu.poison(shape, np.float16) for shape in ((ROWS, self.dims.q_heads, HEAD_DIM), tiles, tiles)]

    def check(self, rng, rows, positions, live=None, patch=None, dead=np.nan):
        """Computes `rows` rows at positions [rows], and judges q, k, v and all that must not be written."""
        gpu, dims = self.gpu, self.dims
        alive = rows if live is None else min(rows, live)
        normed = rng.standard_normal((ROWS, dims.hidden)).astype(np.float16)
        normed[alive:] = dead
        given = np.full(ROWS, 17, np.int32)
        given[:rows] = positions
        q, k_cache, v_cache = self.buffers()
        held = gpu.array(normed), gpu.array(given), gpu.array(np.array([live or 0], np.int32))
        args = self.args(*held[:2], q, k_cache, v_cache, rows, None if live is None else held[2])
        gpu.run(self.kernel, args, patch)
        q = q.get()
        assert np.isnan(q[alive:]).all(), "a dead row was written"
        caches = [twin.slots_of(cache.get()) for cache in (k_cache, v_cache)]
        slots = given[:alive] % self.slots
        for cache in caches:
            written = np.zeros(self.slots, bool)
            written[slots] = True
            assert np.isnan(cache[:, ~written]).all(), "a slot was written that no live row has"
        if alive == 0:
            return
        ends = np.cumsum([dims.q_heads, dims.kv_heads]) * HEAD_DIM
        found = q[:alive], *(cache[:, slots].swapaxes(0, 1) for cache in caches)
        rules = zip(np.split(self.values, ends), (*self.norms, None), found, "qkv", strict=True)
        for weight, norm, ours, name in rules:
            expected = twin.heads(normed[:alive], weight, norm, given[:alive], self.theta, dims.rotary, dims.eps)
            for row in range(alive):
                off = error(ours[row], expected[row])
                assert off < HALF_TOLERANCE, f"relative error {off:.2e} in {name}, row {row}"


def test_rope_of_the_twin_turns_pairs():
    x = np.zeros((2, 256))
    x[:, [3, 19]] = 1, 2
    turned = twin.heads(x[:, :4], np.eye(128, 4), np.ones(128), np.array([0, 5]), 1e4, 32, 0.0)[:, 0]
    angle = 5 * 1e4 ** (-2 * 3 / 32)
    assert np.allclose(turned[0, 3], 128**0.5)
    assert np.allclose(turned[1, [3, 19]], 128**0.5 * np.array([np.cos(angle), np.sin(angle)]))


def test_swizzle_of_the_twin():
    flat = np.arange(2 * 2 * 64 * 128)
    found = twin.slots_of(flat.reshape(2, 2, 64, 128))
    slot, dim = 75, 42
    assert found[1, slot, dim] == 2 * 64 * 128 + slot * 128 + (((dim >> 3) ^ (slot & 7)) << 3) + (dim & 7)


class Entry(Qkv):
    """The same with the norm before the projection: of a sum of pieces, or of one that is added to a base."""

    def __init__(self, gpu, dims, rng, base):
        super().__init__(gpu, dims, rng)
        self.base, self.pieces = base, 1 if base else eh_splits(dims)
        self.kernel = projections.qkv(dims, pieces=self.pieces, base=base)

    def check(self, rng, rows, live=None, patch=None, dead=np.nan, size=1.0):
        gpu, dims = self.gpu, self.dims
        alive = rows if live is None else min(rows, live)
        pieces, base = (
            (size * rng.standard_normal((n, ROWS, dims.hidden))).astype(np.float32) for n in (self.pieces, 1)
        )
        pieces[:, alive:], base[:, alive:] = dead, dead
        norm = rng.uniform(0.5, 1.5, dims.hidden).astype(np.float32)
        positions = int(rng.integers(4000)) + np.arange(ROWS, dtype=np.int32)
        buffers = self.buffers()
        residual, inverse = gpu.poison((ROWS, dims.hidden), np.float32), gpu.poison(ROWS, np.float32)
        held = [gpu.array(x) for x in (pieces, base, norm, positions, np.array([live or 0], np.int32))]
        args = self.args(held[0], held[3], *buffers, rows, None if live is None else held[4])
        args.normed, args.pieces, args.norm = 0, held[0].data.ptr, held[2].data.ptr
        args.residual, args.entry_scale = residual.data.ptr, 0.3 if self.base else 1.0
        if self.base:
            args.base, args.inverse = held[1].data.ptr, inverse.data.ptr
        gpu.run(self.kernel, args, patch)
        x, by = twin.entry(pieces, base[0] if self.base else None, np.float64(np.float32(0.3)), dims.eps)
        residual, inverse = residual.get(), inverse.get()
        assert np.isnan(residual[alive:]).all(), "a dead row was written"
        assert np.isnan(inverse[alive if self.base else 0 :]).all(), "a dead row was written"
        if alive == 0:
            return
        stored = x * norm if self.base else x
        for row in range(alive):
            assert error(residual[row], stored[row]) < SUM_TOLERANCE, f"residual, row {row}"
            assert not self.base or abs(inverse[row] / by[row] - 1) < SUM_TOLERANCE, f"inverse, row {row}"
        normed = (x * by[:, None] * norm)[:alive]
        ends = np.cumsum([dims.q_heads, dims.kv_heads]) * HEAD_DIM
        slots = positions[:alive] % self.slots
        caches = [twin.slots_of(cache.get()) for cache in buffers[1:]]
        found = buffers[0].get()[:alive], *(cache[:, slots].swapaxes(0, 1) for cache in caches)
        rules = zip(np.split(self.values, ends), (*self.norms, None), found, "qkv", strict=True)
        for weight, head_norm, ours, name in rules:
            expected = twin.heads(normed, weight, head_norm, positions[:alive], self.theta, dims.rotary, dims.eps)
            for row in range(alive):
                off = error(ours[row], expected[row])
                assert off < ENTRY_TOLERANCE, f"relative error {off:.2e} in {name}, row {row}"


@pytest.mark.gpu
@pytest.mark.parametrize("base", [True, False], ids=["added", "pieces"])
@pytest.mark.parametrize("name", DIMS)
def test_qkv_normalises_its_input(gpu, name, base):
    rng = fresh()
    layer = Entry(gpu, DIMS[name], rng, base)
    for rows in (1, 2, 5, 8):
        layer.check(rng, rows)
        layer.check(rng, 8, live=rows)
    layer.check(rng, 8, live=0)
    for size in (1e-3, 1e4, 1e12):
        layer.check(rng, 8, size=size)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("fmaf(a.entry_scale, x[j].x", "fmaf(1.0f, x[j].x"),
        ("squares += shared.squares[group][warp];", "squares = shared.squares[group][warp];"),
        ("block < CLUSTER; ++block) total", "block < CLUSTER - 1; ++block) total"),
        ("* factor[i % 2];", ";"),
        ("if (mine && token < (a.live != nullptr ? min_int(live, a.rows) : a.rows))", "if (mine)"),
        ("a.inverse != nullptr ? scaled[j] : x[j]", "x[j]"),
        ("(p * ROWS + row(a))", "(p * ROWS)"),
    ],
    ids=["scale", "a group's squares", "a block's squares", "factor", "dead rows", "residual", "rows"],
)
def test_qkv_entry_check_rejects(gpu, patch):
    rng = fresh()
    layer = Entry(gpu, shapes.RELEASED, rng, base=True)
    with pytest.raises((AssertionError, DeviceError)):
        layer.check(rng, 5, live=3, patch=patch, dead=2.5, size=3.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("base", "reported"), [(True, "down, layer 4"), (False, "eh_proj, layer 5")])
def test_qkv_reports_an_input_that_is_not_finite(gpu, base, reported):
    rng = fresh()
    layer = Entry(gpu, shapes.NANO2, rng, base)
    layer.check(rng, 2, dead=np.inf)
    with pytest.raises(DeviceError, match=f"not finite in {reported}|not finite in qkv, layer 5"):
        layer.check(rng, 2, dead=np.inf, size=np.inf)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("name", DIMS)
def test_qkv(gpu, name, rows):
    rng = fresh()
    layer = Qkv(gpu, DIMS[name], rng)
    layer.check(rng, rows, int(rng.integers(4000)) + np.arange(rows))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "positions",
    [np.arange(8), 4157 + np.arange(8), 524280 + np.arange(8), 9000 - np.arange(8), np.array([9, 70, 3, 4170])],
    ids=["first", "around the ring", "last", "descending", "any order"],
)
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_qkv_at_positions(gpu, positions, theta):
    rng = fresh()
    Qkv(gpu, shapes.NANO, rng, theta).check(rng, len(positions), positions)


@pytest.mark.gpu
@pytest.mark.parametrize("live", [0, 1, 5, 8])
def test_qkv_computes_live_rows_only(gpu, live):
    rng = fresh()
    Qkv(gpu, shapes.RELEASED, rng).check(rng, 6, 4155 + np.arange(6), live=live)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("second ? other : -other", "second ? -other : other"),
        ("* 0.15915494309189535", "* 0.1592"),
        ("FP8 ? a.scales[", "FP8 && false ? a.scales["),
        ("position % a.slots", "(position + 1) % a.slots"),
        ("counted ? min_int(live, a.rows) : a.rows", "a.rows"),
        ("(head.is_q ? a.q_norm : a.k_norm) + dim", "a.q_norm + dim"),
        ("(lane & 2) / 2 * PAIRS", "(lane & 2) / 2 * 8"),
        ("pair = lane / 4 * 8", "pair = lane / 8 * 8"),
    ],
    ids=["sign", "turns", "no scale", "slot", "dead rows", "one norm", "order of rows", "angle"],
)
def test_qkv_check_rejects(gpu, patch):
    rng = fresh()
    layer = Qkv(gpu, shapes.NANO, rng)
    with pytest.raises((AssertionError, DeviceError)):
        layer.check(rng, 5, 100 + np.arange(5), live=3, patch=patch, dead=2.5)


@pytest.mark.gpu
def test_qkv_reports_what_is_not_finite(gpu):
    rng = fresh()
    layer = Qkv(gpu, shapes.NANO2, rng)
    normed = rng.standard_normal((ROWS, layer.dims.hidden)).astype(np.float16)
    normed[2, 7] = np.inf
    held = gpu.array(normed), gpu.array(np.arange(ROWS, dtype=np.int32)), *layer.buffers()
    gpu.run(layer.kernel, layer.args(*held, rows=2))
    with pytest.raises(DeviceError, match="not finite in qkv, layer 5"):
        gpu.run(layer.kernel, layer.args(*held, rows=3))


class OProj:
    """Random weights of one layer, as they are and on the GPU."""

    def __init__(self, gpu, dims, rng, moe=True):
        self.gpu, self.dims = gpu, dims
        self.kernel = projections.o_proj(dims, moe=moe)
        stored, scales, self.values = matrix(rng, dims.hidden, dims.q_width, dims.fp8_attention, 16)
        fold = rng.standard_normal((dims.experts, dims.q_width + dims.slice_width), np.float32)
        self.fold = fold if moe else None
        self.weights = gpu.array(repack.tiles(stored))
        self.scales = None if scales is None else gpu.array(scales)
        self.device_fold = gpu.array(fold) if moe else None

    def args(self, attended, attended32, residual, outputs, slice_start=0, rows=ROWS, live=None, inverse=None):
        return OProjArgs(
            fault=self.gpu.fault.address,
            live=0 if live is None else live.data.ptr,
            layer=6,
            rows=rows,
            attended=attended.data.ptr,
            attended32=attended32.data.ptr,
            residual=residual.data.ptr,
            weights=self.weights.data.ptr,
            scales=0 if self.scales is None else self.scales.data.ptr,
            fold=0 if self.fold is None else self.device_fold.data.ptr,
            out=outputs[0].data.ptr,
            router_attended=outputs[1].data.ptr,
            router_residual=outputs[2].data.ptr,
            slice_start=slice_start,
            inverse=0 if inverse is None else inverse.data.ptr,
        )

    def buffers(self):
        dims = self.dims
        return [self.gpu.poison((ROWS, width), np.float32) for width in (dims.hidden, dims.experts, dims.experts)]

    def check(self, rng, rows, live=None, patch=None, dead=np.nan, inverse=False):
        gpu, dims = self.gpu, self.dims
        alive = rows if live is None else min(rows, live)
        by = rng.uniform(0.5, 2.0, ROWS).astype(np.float32)
        attended32 = rng.standard_normal((ROWS, dims.q_width), np.float32)
        residual = rng.standard_normal((ROWS, dims.hidden), np.float32)
        attended32[alive:], residual[alive:] = dead, dead
        attended = attended32.astype(np.float16)
        start = int(rng.integers(dims.hidden // dims.slice_width)) * dims.slice_width
        outputs = self.buffers()
        held = [gpu.array(x) for x in (attended, attended32, residual, np.array([live or 0], np.int32), by)]
        args = self.args(
            *held[:3], outputs, start, rows, None if live is None else held[3], held[4] if inverse else None
        )
        gpu.run(self.kernel, args, patch)
        found = [x.get() for x in outputs]
        used = found if self.fold is not None else found[:1]
        assert all(np.isnan(x[alive:]).all() for x in used), "a dead row was written"
        assert all(np.isnan(x).all() for x in found[len(used) :]), "a dense layer has no router"
        if alive == 0:
            return
        expected = [twin.o_proj(attended[:alive], self.values)]
        if self.fold is not None:
            part = residual[:alive, start : start + dims.slice_width]
            part = part.astype(np.float64) * (by[:alive, None] if inverse else 1.0)
            expected += twin.router(attended32[:alive].astype(np.float64), part, self.fold)
        for ours, theirs, name in zip(used, expected, ("out", "attended", "residual")[: len(used)], strict=True):
            for row in range(alive):
                off = error(ours[row], theirs[row])
                assert off < SUM_TOLERANCE, f"relative error {off:.2e} in {name}, row {row}"


@pytest.mark.gpu
@pytest.mark.parametrize("moe", [True, False], ids=["moe", "dense"])
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("name", DIMS)
def test_o_proj(gpu, name, rows, moe):
    rng = fresh()
    layer = OProj(gpu, DIMS[name], rng, moe)
    layer.check(rng, rows)
    layer.check(rng, rows, inverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("live", [0, 1, 5, 8])
def test_o_proj_computes_live_rows_only(gpu, live):
    rng = fresh()
    OProj(gpu, shapes.RELEASED, rng).check(rng, 6, live=live)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("FP8 ? a.scales[", "FP8 && false ? a.scales["),
        ("if (token < rows) {", "if (token < ROWS) {"),
        ("which < 2 && token < rows", "which < 2"),
        ("a.slice_start + slice_column", "a.slice_start + slice_column + 2"),
        ("for (int w = 0; w < WARPS; ++w) sum", "for (int w = 1; w < WARPS; ++w) sum"),
        ("for (int p = 0; p < K_PARTS", "for (int p = 1; p < K_PARTS"),
        ("sum += w.y * __uint_as_float(attended[token][j].y)", ""),
    ],
    ids=["no scale", "dead rows", "dead rows of the router", "slice", "a warp's share", "half of K", "a column"],
)
def test_o_proj_check_rejects(gpu, patch):
    rng = fresh()
    layer = OProj(gpu, shapes.NANO2, rng)
    with pytest.raises((AssertionError, DeviceError)):
        layer.check(rng, 5, live=3, patch=patch, dead=2.5)


@pytest.mark.gpu
@pytest.mark.parametrize("where", [0, 1, 2], ids=["attended", "attended32", "residual"])
def test_o_proj_reports_what_is_not_finite(gpu, where):
    rng = fresh()
    layer = OProj(gpu, shapes.NANO2, rng)
    dims = layer.dims
    shapes_of = (
        ((ROWS, dims.q_width), np.float16),
        ((ROWS, dims.q_width), np.float32),
        ((ROWS, dims.hidden), np.float32),
    )
    given = [rng.standard_normal(shape).astype(dtype) for shape, dtype in shapes_of]
    given[where][2, 7] = np.nan
    held = [gpu.array(x) for x in given]
    outputs = layer.buffers()
    gpu.run(layer.kernel, layer.args(*held, outputs, rows=2))
    with pytest.raises(DeviceError, match="not finite in o_proj, layer 6"):
        gpu.run(layer.kernel, layer.args(*held, outputs, rows=3))


LAYERS = 60


@pytest.mark.gpu
def test_speed(gpu):
    """Prints microseconds of a launch in a chain of dependent ones, with and without the weights in L2."""
    rng, dims, ceiling = fresh(), shapes.RELEASED, gpu.read_ceiling()
    xp = gpu.cupy
    first, second = Qkv(gpu, dims, rng), OProj(gpu, dims, rng)
    # other layers have copies of the weights elsewhere
    copies = [[xp.array(x) for x in (first.weights, second.weights, second.device_fold)] for _ in range(LAYERS)]
    normed = gpu.array(rng.standard_normal((ROWS, dims.hidden)).astype(np.float16))
    attended32 = rng.standard_normal((ROWS, dims.q_width), np.float32)
    attended = gpu.array(attended32.astype(np.float16)), gpu.array(attended32)
    residual = gpu.array(rng.standard_normal((ROWS, dims.hidden), np.float32))
    positions = gpu.array(4155 + np.arange(ROWS, dtype=np.int32))
    buffers, outputs = first.buffers(), second.buffers()
    print(f"\nread ceiling {ceiling:.0f} GB/s")

    def calls(rows, cold, which):
        found = []
        kernels = projections.qkv(dims), projections.o_proj(dims), projections.o_proj(dims, moe=False)
        for weights in copies if cold else copies[:1] * LAYERS:
            a = first.args(normed, positions, *buffers, rows=rows, live=live)
            b = second.args(*attended, residual, outputs, rows=rows, live=live)
            a.weights, b.weights, b.fold = (x.data.ptr for x in weights)
            pairs = dict(zip(sizes, zip(kernels, (a, b, b), strict=True), strict=True))
            found += [pairs[name] for name in which]
        return found

    sizes = {"qkv": copies[0][0].nbytes, "o_proj": copies[0][1].nbytes + copies[0][2].nbytes}
    sizes["o_proj dense"] = copies[0][1].nbytes
    live = gpu.array(np.array([ROWS], np.int32))
    for which in (["qkv"], ["o_proj"], ["o_proj dense"], ["qkv", "o_proj"]):
        size = sum(sizes[name] for name in which)
        for rows in (1, 8):
            cold, spread = gpu.median_us(calls(rows, True, which))
            warm, _ = gpu.median_us(calls(rows, False, which))
            cold, warm = cold / LAYERS, warm / LAYERS
            rate = size / cold / 1e3
            print(
                f"{' + '.join(which)}, rows {rows}: {cold:.2f} us ({spread[0] / LAYERS:.2f} to "
                f"{spread[1] / LAYERS:.2f}), {rate:.0f} GB/s, {rate / ceiling:.0%}; weights in L2 {warm:.2f} us"
            )
    live[0] = 0
    for which in (["qkv"], ["o_proj"]):
        print(f"skipped {which[0]}: {gpu.median_us(calls(8, True, which))[0] / LAYERS:.2f} us")
