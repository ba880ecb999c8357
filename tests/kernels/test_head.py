"""lm_head and top_k against NumPy."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cuq1.cuda import repack
from cuq1.cuda.abi import LmHeadArgs, TopKArgs
from cuq1.cuda.kernels import head
from cuq1.errors import DeviceError
from cuq1.plan.dims import MAX_TOP_K, ROWS
from tests.kernels.shapes import DIMS, NANO, NANO2, RELEASED
from tests.kernels.twins import head as twin

TOLERANCE = 2e-6  # FP32 accumulation of exact products
SCALE = 0.375


def packed(weights):
    """float16 [vocab, hidden] as tiles, with zeros up to a whole one."""
    return repack.f16_tiles(np.pad(weights, ((0, -len(weights) % 16), (0, 0))))


@pytest.fixture(scope="module")
def matrices():
    """Random lm_heads by sizes, made once."""
    made = {}

    def get(dims, rng):
        key = dims.vocab, dims.hidden
        if key not in made:
            values = rng.standard_normal(key, np.float32) * np.float32(dims.hidden**-0.5)
            made[key] = values.astype(np.float16)
        return made[key]

    return get


def check_lm_head(gpu, dims, weights, rows, rng, live=None, patch=None, kept=0, *, fp8=False):
    normed = rng.standard_normal((ROWS, dims.hidden), np.float32).astype(np.float16)
    computed = rows if live is None else min(rows, live)
    normed[computed:] = np.nan  # what dead rows hold must reach no live one
    x, scales = gpu.array(normed), None
    if fp8:
        padding = -len(weights) % 16
        codes, steps = repack.quantised(weights.astype(np.float32))
        weights = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * steps
        w = gpu.array(repack.fp8_tiles(np.pad(codes, ((0, padding), (0, 0)))))
        scales = gpu.array(np.pad(steps[:, 0], (0, padding), constant_values=np.nan))
    else:
        w = gpu.array(packed(weights))
    out = gpu.poison((ROWS, dims.vocab), np.float32)
    alive = gpu.array(np.array([live if live is not None else 0], np.int32))
    args = LmHeadArgs(
        gpu.fault.address,
        alive.data.ptr if live is not None else 0,
        7,
        rows,
        x.data.ptr,
        w.data.ptr,
        out.data.ptr,
        SCALE,
        0,
        0 if scales is None else scales.data.ptr,
    )
    gpu.run(head.lm_head(dims, kept, fp8=fp8), args, patch)
    ours = out.get()
    assert np.isnan(ours[computed:]).all(), "a dead row was written"
    expected = twin.logits(normed[:computed], weights, SCALE)
    assert np.isfinite(ours[:computed]).all()
    error = np.linalg.norm(ours[:computed] - expected) / np.linalg.norm(expected) if computed else 0.0
    print(f"relative error {error:.2e}")
    assert error < TOLERANCE, f"relative error {error:.2e}"
    return ours[:computed]


def fresh():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("name", DIMS)
def test_lm_head(gpu, matrices, name, rows):
    rng = fresh()
    for kept in (0, head.KEPT):
        for fp8 in (False, True):
            check_lm_head(gpu, DIMS[name], matrices(DIMS[name], rng), rows, rng, kept=kept, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1003, 17, 9 * 132 * 16 + 1])
def test_lm_head_of_odd_sizes(gpu, matrices, vocab):
    rng, dims = fresh(), replace(NANO, vocab=vocab)
    for fp8 in (False, True):
        check_lm_head(gpu, dims, matrices(dims, rng), 3, rng, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("live", [0, 1, 5, 8])
def test_lm_head_computes_live_rows_only(gpu, matrices, live):
    rng = fresh()
    check_lm_head(gpu, RELEASED, matrices(RELEASED, rng), 6, rng, live=live)


@pytest.mark.gpu
def test_lm_head_repeats_itself(gpu, matrices):
    seed = int(np.random.default_rng().integers(1 << 32))
    weights = matrices(RELEASED, np.random.default_rng(seed))
    runs = [check_lm_head(gpu, RELEASED, weights, ROWS, np.random.default_rng(seed)) for _ in range(10)]
    assert all(np.array_equal(runs[0], run) for run in runs[1:]), f"seed {seed}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("sum += sums[w * WARP * 4]", "sum += w == 3 ? 0.0f : sums[w * WARP * 4]"),
        ("row < rows && tile", "row < ROWS && tile"),
        ("a.scale * (FP8", "(FP8"),
    ],
    ids=["a warp's share is lost", "dead rows are written", "no scale"],
)
def test_lm_head_check_rejects(gpu, matrices, patch):
    rng = fresh()
    with pytest.raises(AssertionError):
        check_lm_head(gpu, NANO, matrices(NANO, rng), 5, rng, patch=patch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("step * sum", "sum"),
        ("a.scales[tile * 16 + ", "a.scales[16 + "),
        ("w, x.k[0], x.k[1]", "w, x.k[1], x.k[0]"),
    ],
    ids=["no row's scale", "another row's scale", "halves of K change places"],
)
def test_lm_head_check_rejects_in_e4m3(gpu, matrices, patch):
    rng = fresh()
    with pytest.raises(AssertionError):
        check_lm_head(gpu, NANO, matrices(NANO, rng), 5, rng, patch=patch, fp8=True)


@pytest.mark.gpu
def test_lm_head_reports_what_is_not_finite(gpu, matrices):
    rng = fresh()
    weights = matrices(NANO2, rng).copy()
    weights[77, 3] = np.inf
    with pytest.raises(DeviceError, match="not finite in lm_head, layer 7"):
        check_lm_head(gpu, NANO2, weights, 2, rng)


def some_logits(rng, kind, vocab):
    logits = rng.standard_normal((ROWS, vocab), np.float32) * 3
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "all equal":
        logits[:] = -1.5
    elif kind == "ascending":
        logits = np.sort(logits, axis=1)
    elif kind == "descending":
        logits = -np.sort(logits, axis=1)
    elif kind == "signed zeros":
        logits = np.where(rng.random(logits.shape) < 0.5, 0.0, -0.0).astype(np.float32)
        logits[:, rng.permutation(vocab)[:5]] = -1
    elif kind == "few finite":
        logits[:, rng.permutation(vocab)[20:]] = -np.inf
    elif kind == "one thread has them":
        logits[:, 40::256][:, :8] += 50
    return logits


def check_top_k(gpu, dims, logits, rows, first_id=0, live=None, patch=None, pieces=head.PIECES):
    data = gpu.array(logits)
    values = gpu.poison((ROWS, pieces, MAX_TOP_K), np.float32)
    ids = gpu.poison((ROWS, pieces, MAX_TOP_K), np.int32)
    alive = gpu.array(np.array([live if live is not None else 0], np.int32))
    args = TopKArgs(
        gpu.fault.address, alive.data.ptr if live is not None else 0, -1, rows, data.data.ptr, values.data.ptr,
        ids.data.ptr, first_id,
    )  # fmt: skip
    gpu.run(head.top_k(dims, pieces=pieces), args, patch)
    computed = rows if live is None else min(rows, live)
    width = 8 * -(-dims.vocab // (8 * pieces))
    for piece in range(pieces):
        part = logits[:computed, piece * width : (piece + 1) * width]
        expected_values, expected_ids = twin.largest(part, first_id + piece * width)
        assert np.array_equal(ids.get()[:computed, piece], expected_ids)
        assert np.array_equal(values.get()[:computed, piece], expected_values)
    assert (ids.get()[computed:] == 0x7F7F7F7F).all()


KINDS = [
    "random", "ties", "all equal", "ascending", "descending", "signed zeros", "few finite", "one thread has them"
]  # fmt: skip


def check_kinds(gpu, dims, kinds, rows, **more):
    rng = fresh()
    for kind in kinds:
        check_top_k(gpu, dims, some_logits(rng, kind, dims.vocab), rows, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_top_k(gpu, name):
    rng, dims = fresh(), DIMS[name]
    for rows in (1, 5, 8):
        check_kinds(gpu, dims, KINDS, rows, first_id=3 * dims.vocab)
    for live in (0, 3):
        check_top_k(gpu, dims, some_logits(rng, "random", dims.vocab), 4, live=live)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [257, 4099, 151936, 152064])
def test_top_k_in_pieces(gpu, vocab):
    dims = replace(NANO, vocab=vocab)
    rng = fresh()
    for kind in ("random", "ties", "all equal", "ascending"):
        check_top_k(gpu, dims, some_logits(rng, kind, vocab), 1, pieces=8 if vocab > 4096 else 2)
    pieces = ("int(blockIdx.x) * PART, end", "rank * PART, end")
    with pytest.raises(AssertionError):  # every piece looks at the first one
        check_top_k(gpu, dims, some_logits(rng, "random", vocab), 1, patch=pieces, pieces=2)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32, 33, 257, 2049, 4099])
def test_top_k_of_odd_sizes(gpu, vocab):
    check_kinds(gpu, replace(NANO, vocab=vocab), KINDS[:5], 8)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("larger += candidates[j] > key ? 1 : 0", "larger += (candidates[j] >> 32) > (key >> 32) ? 1 : 0"),
        ("if (ahead == MAX_TOP_K - 1)", "if (ahead == MAX_TOP_K / 2)"),
        ("key_id(key);", "key_id(key) + 1;"),
    ],
    ids=["ties in any order", "the bound is too high", "ids are off"],
)
def test_top_k_check_rejects(gpu, patch):
    with pytest.raises(AssertionError):
        check_kinds(gpu, NANO, KINDS, 8, patch=patch)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_top_k_reports_what_is_not_a_number(gpu, bad):
    logits = some_logits(fresh(), "random", NANO.vocab)
    logits[1, 1234] = bad
    check_top_k(gpu, NANO, logits, 1)  # a row that is not live
    with pytest.raises(DeviceError, match="not finite in top_k"):
        check_top_k(gpu, NANO, logits, 2)


@pytest.mark.gpu
def test_speed(gpu, matrices):
    """Prints microseconds; fails below the share of the read ceiling that lm_head is built for."""
    rng, ceiling = fresh(), gpu.read_ceiling()
    one = packed(matrices(RELEASED, rng))
    weights = [gpu.array(one) for _ in range(4)]
    normed = gpu.array(rng.standard_normal((ROWS, RELEASED.hidden), np.float32).astype(np.float16))
    out = gpu.array(rng.standard_normal((ROWS, RELEASED.vocab), np.float32))
    values = gpu.poison((ROWS, head.PIECES, MAX_TOP_K), np.float32)
    ids = gpu.poison((ROWS, head.PIECES, MAX_TOP_K), np.int32)
    kernel, top = head.lm_head(RELEASED), head.top_k(RELEASED)
    print(f"\nread ceiling {ceiling:.0f} GB/s")
    best = 0.0
    for rows in (1, 8):
        heads = [(kernel, LmHeadArgs(0, 0, 0, rows, normed.data.ptr, w.data.ptr, out.data.ptr, 1.0)) for w in weights]
        tops = (top, TopKArgs(0, 0, 0, rows, out.data.ptr, values.data.ptr, ids.data.ptr, 0))
        alone, spread = gpu.median_us(heads)
        both, _ = gpu.median_us([call for pair in heads for call in (pair, tops)])
        only, _ = gpu.median_us([tops] * 8)
        rate = one.nbytes / (alone / 4) / 1e3
        best = max(best, rate / ceiling)
        print(
            f"rows {rows}: lm_head {alone / 4:.2f} us ({spread[0] / 4:.2f} to {spread[1] / 4:.2f}), {rate:.0f} GB/s, "
            f"{rate / ceiling:.1%}; with top_k {both / 4:.2f} us; top_k alone {only / 8:.2f} us"
        )
    zero = gpu.array(np.zeros(1, np.int32))
    skipped = [
        (kernel, LmHeadArgs(0, zero.data.ptr, 0, 1, normed.data.ptr, w.data.ptr, out.data.ptr, 1.0)) for w in weights
    ]
    print(f"skipped lm_head {gpu.median_us(skipped)[0] / 4:.2f} us")
    assert best >= 0.85
