"""The products of decoding with INT4 matrices against their twins."""

from dataclasses import replace

import numpy as np
import pytest

from cuq1.checkpoint import int4
from cuq1.cuda.abi import Qwen2GateUpArgs, Qwen2HeadArgs, Qwen2ProjectionArgs, Qwen2QkvArgs
from cuq1.cuda.graph import synchronize
from cuq1.cuda.kernels import qwen2_gemv
from cuq1.cuda.launch import launch
from cuq1.cuda.module import build
from cuq1.cuda.repack import int4_units
from cuq1.errors import DeviceError
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.qwen2_dims import GROUP, padded, pieces
from tests.kernels.harness import in_header, inclusion, replaced, tells
from tests.kernels.qwen2_shapes import ALL, DIMS, ODD, RELEASED, SMALL
from tests.kernels.twins import qwen2_gemv as twin

# Of a result's root mean square.
SUM_TOLERANCE = 3e-6  # FP32 sums of exact products
HALF_TOLERANCE = 4e-4  # the norm's halves may round otherwise than float64's
DEVIATIONS = 6.5  # of what rounding a token to digits explains, row by row
BIG = 1 << 22  # elements of a matrix whose twin runs in CuPy

pytestmark = pytest.mark.gpu


def fresh():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # pytest shows it with a failure
    return np.random.default_rng(seed)


class Matrix:
    """Random words with all sixteen nibbles, and scales that make products of order 1: on both sides."""

    def __init__(self, gpu, rng, rows, k, *, scales=None):
        self.gpu, self.rows, self.k = gpu, rows, k
        width = padded(k)
        self.words = rng.integers(0, 1 << 32, (rows, width // 8), np.uint32)
        if width > k:  # padding is codes 0
            self.words[:, k // 8 :] = 0
        self.scales = (
            (rng.uniform(0.1, 1.0, (rows, width // GROUP)) * 0.25 * k**-0.5).astype(np.float16)
            if scales is None
            else scales
        )

    def times(self, x, power=1):
        """The twin's product with x [padded k]."""
        if self.rows * self.k < BIG:
            return twin.product(self.words, self.scales, x, power=power)
        cupy = self.gpu.cupy
        return twin.product(*map(self.gpu.array, (self.words, self.scales, x)), cupy, power).get()

    def spread(self, kernel, x):
        """What a product with x may differ by for its digits, [rows]; nothing where the kernel takes halves."""
        if not has_digits(kernel):
            return 0.0
        return DEVIATIONS * np.sqrt(self.times(twin.digit_variance(x), power=2))

    def units(self):
        return self.gpu.array(int4_units([(self.words, self.scales)]))


def error(found, expected, allowed=0.0):
    """The largest difference, of what is `allowed` and FP32's sums explain."""
    assert np.isfinite(found).all()
    allowed = allowed + SUM_TOLERANCE * np.sqrt(np.square(expected).mean())
    return (np.abs(found.astype(np.float64) - expected) / allowed).max()


def mlp(kernel, gate, up, normed):
    """INNER_SCALE * silu(gate x) * up x [rows], and what it may differ by, its rounding to halves included."""
    g, u = (m.times(token_of(kernel, normed)) for m in (gate, up))
    expected = twin.gate_up(g, u)
    if has_digits(kernel):
        of_g, of_u = (m.spread(kernel, token_of(kernel, normed)) for m in (gate, up))
    else:
        of_g, of_u = (HALF_TOLERANCE * np.sqrt(np.square(x).mean()) for x in (g, u))
    # silu's slope is 1.1 at most
    differ = (1.1 * np.abs(u) * of_g + np.abs(twin.gate_up(g, np.ones(1))) * 16 * of_u) / 16
    return expected, differ + 2.0**-11 * np.abs(expected) + 2.0**-25


def has_digits(kernel):
    return ("TOKEN", "Digits") in kernel.defines


def token_of(kernel, normed):
    """normed float64 as the kernel multiplies it, padded; digits are held against what they round."""
    token = normed if has_digits(kernel) else normed.astype(np.float16)
    return np.pad(token, (0, padded(len(token)) - len(token)))


def total(found, rows, k, blocks=MULTIPROCESSORS):
    """Pieces float32 [n, rows] added as a reader adds them; checks that those and no others are written."""
    there = twin.written(rows, k, blocks)
    assert there.shape == found.shape
    np.testing.assert_array_equal(np.isnan(found), ~there)
    return np.where(there, found, 0).astype(np.float64).sum(axis=0)


def random_entry(rng, dims, k, *, given=True):
    """residual, pieces of a matrix [hidden, k] (NaN where there is none) or None, and a norm."""
    residual = (rng.standard_normal(dims.hidden) * 3).astype(np.float32)
    there = twin.written(dims.hidden, k, MULTIPROCESSORS)
    some = np.where(there, rng.standard_normal(there.shape), np.nan).astype(np.float32)
    return residual, some if given else None, rng.uniform(0.5, 1.5, dims.hidden).astype(np.float16)


def check_qkv(gpu, dims, rng, patch=None, *, given=True, kernel=None):
    matrix = Matrix(gpu, rng, dims.qkv_rows, dims.hidden)
    residual, some, norm = random_entry(rng, dims, dims.inner, given=given)
    arrays = [gpu.array(x) for x in (residual, norm)] + [matrix.units(), gpu.array(some) if given else None]
    out_x = gpu.poison(dims.hidden, np.float32)
    out = gpu.poison((pieces(dims.qkv_rows, dims.hidden), dims.qkv_rows), np.float32)
    args = Qwen2QkvArgs(
        fault=gpu.fault.address, layer=3, rows=1,
        residual=arrays[0].data.ptr, pieces=arrays[3].data.ptr if given else 0, norm=arrays[1].data.ptr,
        weights=arrays[2].data.ptr, residual_out=out_x.data.ptr, out=out.data.ptr,
    )  # fmt: skip
    kernel = kernel or qwen2_gemv.qkv(dims)
    gpu.run(kernel, args, patch)
    x, normed = twin.entry(residual, some, norm, dims.eps)
    found = total(out.get(), dims.qkv_rows, dims.hidden)
    assert error(out_x.get(), x) < 1
    token = token_of(kernel, normed)
    expected = matrix.times(token)
    halves = 0.0 if has_digits(kernel) else HALF_TOLERANCE * np.sqrt(np.square(expected).mean())
    return error(found, expected, matrix.spread(kernel, token) + halves)


def check_gate_up(gpu, dims, rng, patch=None, *, given=True, kernel=None):
    gate, up = (Matrix(gpu, rng, dims.inner, dims.hidden) for _ in range(2))
    units = gpu.array(int4_units([(m.words, m.scales) for m in (gate, up)], dims.gate_up_tiles))
    residual, some, norm = random_entry(rng, dims, dims.q_width, given=given)
    arrays = [gpu.array(x) for x in (residual, norm)] + [gpu.array(some) if given else None]
    out_x, inner = gpu.poison(dims.hidden, np.float32), gpu.poison(padded(dims.inner), np.float16)
    args = Qwen2GateUpArgs(
        fault=gpu.fault.address, layer=3, rows=1,
        residual=arrays[0].data.ptr, pieces=arrays[2].data.ptr if given else 0, norm=arrays[1].data.ptr,
        weights=units.data.ptr, residual_out=out_x.data.ptr, inner=inner.data.ptr,
    )  # fmt: skip
    kernel = kernel or qwen2_gemv.gate_up(dims)
    gpu.run(kernel, args, patch)
    x, normed = twin.entry(residual, some, norm, dims.eps)
    found = inner.get()
    assert not found[dims.inner :].any()
    assert error(out_x.get(), x) < 1
    return error(found[: dims.inner], *mlp(kernel, gate, up, normed))


def check_projection(gpu, dims, rng, name, patch=None, *, scales=None, kernel=None):
    k = dims.q_width if name == "o_proj" else dims.inner
    scale = 1.0 if name == "o_proj" else 1 / qwen2_gemv.INNER_SCALE
    matrix = Matrix(gpu, rng, dims.hidden, k, scales=scales)
    x = rng.standard_normal(padded(k)).astype(np.float16)  # what is beyond k does not count
    arrays = gpu.array(x), matrix.units()
    out = gpu.poison((pieces(dims.hidden, k), dims.hidden), np.float32)
    args = Qwen2ProjectionArgs(
        fault=gpu.fault.address, layer=3, rows=1,
        **{"in": arrays[0].data.ptr}, weights=arrays[1].data.ptr, out=out.data.ptr, scale=scale,
    )  # fmt: skip
    kernel = kernel or getattr(qwen2_gemv, name)(dims)
    gpu.run(kernel, args, patch)
    return error(total(out.get(), dims.hidden, k), matrix.times(x) * scale, matrix.spread(kernel, x) * scale)


def check_lm_head(gpu, dims, rng, patch=None, *, kernel=None):
    matrix = Matrix(gpu, rng, dims.vocab, dims.hidden)
    x = rng.standard_normal(padded(dims.hidden)).astype(np.float16)
    arrays = gpu.array(x), matrix.units()
    logits = gpu.poison(dims.vocab + 16, np.float32)
    args = Qwen2HeadArgs(
        fault=gpu.fault.address, layer=3, rows=1,
        normed=arrays[0].data.ptr, weights=arrays[1].data.ptr, logits=logits.data.ptr,
    )  # fmt: skip
    kernel = kernel or qwen2_gemv.lm_head(dims)
    gpu.run(kernel, args, patch)
    found = logits.get()
    assert np.isnan(found[dims.vocab :]).all()
    return error(found[: dims.vocab], matrix.times(x), matrix.spread(kernel, x))


def check(gpu, name, dims, rng, patch=None, **more):
    """The kernel's error, of what it may be."""
    if name in ("o_proj", "down"):
        return check_projection(gpu, dims, rng, name, patch, **more)
    return {"qkv": check_qkv, "gate_up": check_gate_up, "lm_head": check_lm_head}[name](gpu, dims, rng, patch, **more)


NAMES = ("qkv", "o_proj", "gate_up", "down", "lm_head")


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("name", NAMES)
def test_small(gpu, name, size):
    assert check(gpu, name, SMALL[size], fresh()) < 1


# Of lm_head the smallest: others are as wide as gate_up, and as high.
RELEASED_CASES = [(name, size) for name in NAMES for size in RELEASED if name != "lm_head" or size == "0.5b"]


@pytest.mark.parametrize(("name", "size"), RELEASED_CASES)
def test_released(gpu, name, size):
    assert check(gpu, name, RELEASED[size], fresh()) < 1


@pytest.mark.parametrize("name", ["qkv", "gate_up"])
def test_the_first_layer_has_no_pieces(gpu, name):
    for dims in (*ODD.values(), DIMS["1.5b-tiny"]):
        assert check(gpu, name, dims, fresh(), given=False) < 1


@pytest.mark.parametrize(
    "ring",
    [
        qwen2_gemv.Ring(1, 2, qwen2_gemv.AT_ONCE, 8),
        qwen2_gemv.Ring(3, 2, qwen2_gemv.AFTER_WAIT, 4),
        qwen2_gemv.Ring(4, 1, qwen2_gemv.AFTER_COPIES, 12),
    ],
)
def test_other_rings(gpu, ring):
    for name in NAMES:
        for dims in (ODD["odd"], DIMS["0.5b"]):
            if name != "lm_head" or dims.vocab < 1000:
                assert check(gpu, name, dims, fresh(), kernel=getattr(qwen2_gemv, name)(dims, ring)) < 1, name


def test_scales_from_nothing_to_the_largest(gpu):
    """Groups with scale 0, with subnormal scales and with large ones, each alone in rows of their own."""
    rng, dims = fresh(), DIMS["1.5b-tiny"]
    for values in ([0.0], [6e-8, 5e-7, 6e-5], [0.0, 6e-8, 1e-3], [9000.0, 6e-8]):
        scales = rng.choice(np.array(values, np.float16), (dims.hidden, padded(dims.q_width) // GROUP))
        if values == [0.0]:
            with pytest.warns(RuntimeWarning, match="divide|invalid"):
                found = check_projection(gpu, dims, rng, "o_proj", scales=scales)
            assert np.isnan(found)  # 0 of 0
        else:
            assert check_projection(gpu, dims, rng, "o_proj", scales=scales) < 1


@pytest.mark.parametrize("digits", [False, True])
def test_every_code_in_every_place(gpu, digits):
    """A row for each code and place in a word, in which one column of the token counts; halves give it exactly."""
    dims = DIMS["1.5b-tiny"]
    codes = np.zeros((dims.hidden, padded(dims.q_width)), np.int8)
    rows = np.arange(120)
    codes[rows, rows % 8 + 8 * (rows // 8)] = rows // 8 - 7
    matrix = int4_units([(int4.pack(codes), np.ones((dims.hidden, codes.shape[1] // GROUP), np.float16))])
    arrays = gpu.array(np.arange(1, codes.shape[1] + 1).astype(np.float16)), gpu.array(matrix)
    out = gpu.poison((pieces(dims.hidden, dims.q_width), dims.hidden), np.float32)
    args = Qwen2ProjectionArgs(
        fault=gpu.fault.address, layer=0, rows=1,
        **{"in": arrays[0].data.ptr}, weights=arrays[1].data.ptr, out=out.data.ptr, scale=1.0,
    )  # fmt: skip
    gpu.run(qwen2_gemv.o_proj(dims, replace(qwen2_gemv.O_PROJ, digits=digits)), args)
    expected = codes.astype(np.float64) @ arrays[0].get().astype(np.float64)
    step = 128 / 32600 if digits else 0.0  # the rows' columns are of the first group, whose largest is 128
    found = total(out.get(), dims.hidden, dims.q_width)
    assert (np.abs(found - expected) <= step / 2 * 7 + 1e-6 * np.abs(expected)).all()


def test_equal_inputs_give_equal_bits(gpu):
    dims, rng = DIMS["0.5b"], fresh()
    matrix, x = (
        Matrix(gpu, rng, dims.hidden, dims.inner),
        gpu.array(rng.standard_normal(padded(dims.inner), np.float32)),
    )
    x, units, found = x.astype(np.float16), matrix.units(), []
    for _ in range(3):
        out = gpu.poison((pieces(dims.hidden, dims.inner), dims.hidden), np.float32)
        args = Qwen2ProjectionArgs(rows=1, weights=units.data.ptr, out=out.data.ptr, scale=1.0, **{"in": x.data.ptr})
        gpu.run(qwen2_gemv.down(dims), args)
        found.append(out.get().view(np.uint32))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


# A high lm_head is the same as gate_up.
SOME = ["odd", "least", "7b-tiny", "32b", "0.5b"]
SOME_CASES = [(name, size) for name in NAMES for size in SOME if name != "lm_head" or ALL[size].vocab <= 1000]


@pytest.mark.parametrize(("name", "size"), SOME_CASES)
@pytest.mark.parametrize("digits", [False, True])
def test_halves_and_digits(gpu, name, size, digits):
    dims, ring = ALL[size], qwen2_gemv.Ring(2, 3, qwen2_gemv.AFTER_WAIT, digits=digits)
    assert check(gpu, name, dims, fresh(), kernel=getattr(qwen2_gemv, name)(dims, ring)) < 1


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_reported(gpu, name):
    dims, rng = DIMS["0.5b-tiny"], fresh()
    patch = in_stream(("float total = 0.0f;", "float total = __int_as_float(0x7f800000);"))
    with pytest.raises(DeviceError, match=f"not finite in {name}, layer 3"):
        check(gpu, name, dims, rng, patch)


def in_stream(*pairs):
    """A patch of int4_stream.cuh and what it includes of int4's, where a kernel's source includes it: replacements;
    ValueError for one that has not one place."""
    include, text = inclusion("common/int4_stream.cuh")
    text = replaced(text, inclusion("common/int4_ring.cuh"), inclusion("common/int4.cuh"))
    return include, replaced(text, *pairs)


WAIT = "barrier_wait(&full[slot], parity, fault, kernel, layer);"
BEHIND_READS = "if (left > STAGES * STAGE_UNITS) {"
# Of a ring of one stage: copies that begin when they are to be read.
SENT = "if (lane == 0) copy(stage + STAGES, slot);"
LATE = [(SENT, ""), (WAIT, f"if (stage > 0 && lane == 0) copy(stage, slot); {WAIT}")]
WRONG = {
    "nibbles in each other's place": [("const uint32_t upper = word >> 8;", "const uint32_t upper = word;")],
    "rows in each other's place": [("mma_f16(c, a[0], b[0], a[1], b[1]", "mma_f16(c, b[0], a[0], b[1], a[1]")],
    "codes without a sign": [("LESS = 0x64086408", "LESS = 0x64006400")],
    "no scale": [("low += f16_to_float(scale[u][0]) * c[u].x", "low += c[u].x")],
    "a unit left out": [("low += f16_to_float", "if (blockIdx.x != 7 || stage > 0) low += f16_to_float")],
    "a warp's sums left out": [("if (tile >= tiles.x && tile", "if (w < 7 && tile >= tiles.x && tile")],
    # But behind their reads: a block must not end before its copies have come.
    "copies not waited for": [*LATE, (WAIT, ""), (BEHIND_READS, f"{WAIT} {BEHIND_READS}")],
    "sums a thousandth too large": [("low += f16_to_float(", "low += 1.001f * f16_to_float(")],
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_kernel_is_noticed(gpu, why):
    dims = DIMS["0.5b"]
    ring = qwen2_gemv.Ring(1, 1, qwen2_gemv.AFTER_WAIT)
    late = "waited" in why  # o_proj's warps have a unit at most here: none of a second stage
    for name in ("down",) if late else ("o_proj", "down"):
        kernel = getattr(qwen2_gemv, name)(dims, ring)
        assert check(gpu, name, dims, fresh(), in_stream(*LATE) if late else None, kernel=kernel) < 1
        with tells():
            assert check(gpu, name, dims, fresh(), in_stream(*WRONG[why]), kernel=kernel) < 1


@pytest.mark.parametrize("name", ["qkv", "gate_up"])
@pytest.mark.parametrize(
    "patch",
    [
        ("half, p < count)", "half, p < PIECES)"),
        ("squares * (1.0f / HIDDEN)", "squares * (1.01f / HIDDEN)"),
        ("x[2] += y[0].z, ", ""),
        ("        __syncthreads();  // all of the token is there\n", ""),
    ],
)
def test_a_wrong_entry_is_noticed(gpu, name, patch):
    entry = in_header("common/qwen2_entry.cuh", *patch)
    dims = DIMS["7b-tiny"]
    with tells():
        for _ in range(3):  # a race may go well
            assert check(gpu, name, dims, fresh(), entry) < 1


def after_gate_up(gpu, dims, rng, patch):
    """down launched behind a gate_up that triggers at once: its error."""
    gate, up = (Matrix(gpu, rng, dims.inner, dims.hidden) for _ in range(2))
    matrix = Matrix(gpu, rng, dims.hidden, dims.inner)
    residual, _, norm = random_entry(rng, dims, dims.q_width, given=False)
    arrays = [gpu.array(x) for x in (residual, norm)]
    arrays += [gpu.array(int4_units([(m.words, m.scales) for m in (gate, up)], dims.gate_up_tiles)), matrix.units()]
    x, inner = gpu.poison(dims.hidden, np.float32), gpu.poison(padded(dims.inner), np.float16)
    out = gpu.poison((pieces(dims.hidden, dims.inner), dims.hidden), np.float32)
    first = Qwen2GateUpArgs(
        rows=1, residual=arrays[0].data.ptr, norm=arrays[1].data.ptr, weights=arrays[2].data.ptr,
        residual_out=x.data.ptr, inner=inner.data.ptr,
    )  # fmt: skip
    second = Qwen2ProjectionArgs(
        rows=1, weights=arrays[3].data.ptr, out=out.data.ptr, scale=1.0, **{"in": inner.data.ptr}
    )
    early = build(qwen2_gemv.gate_up(dims, qwen2_gemv.Ring(1, 1, qwen2_gemv.AT_ONCE, 1)), gpu.device.arch)
    late = build(qwen2_gemv.down(dims), gpu.device.arch, patch)
    gpu.cupy.cuda.Device().synchronize()
    launch(early, first, gpu.stream)
    launch(late, second, gpu.stream)
    synchronize(gpu.stream)
    found = out.get()
    token = inner.get()
    spread = matrix.spread(qwen2_gemv.down(dims), token)
    return error(total(found, dims.hidden, dims.inner), matrix.times(token), spread)


def test_a_successor_waits(gpu):
    dims = DIMS["1.5b"]
    assert after_gate_up(gpu, dims, fresh(), None) < 1
    wrong = "    pdl_wait();       // `in`\n", ""
    with pytest.raises(AssertionError):
        assert after_gate_up(gpu, dims, fresh(), wrong) < 1


def test_all_sizes_fit_side_by_side():
    """Kernels that follow each other find room on one multiprocessor: see Ring."""
    for dims in ALL.values():
        sizes = {name: getattr(qwen2_gemv, name)(dims).smem for name in NAMES}
        assert sizes["qkv"] <= 80 << 10
        assert sizes["o_proj"] <= 72 << 10
        assert sizes["gate_up"] <= 92 << 10
        assert sizes["down"] <= 136 << 10
