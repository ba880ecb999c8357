"""eh_proj against float64."""

from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda.kernels import draft as family
from cuq1.cuda.repack import f16_tiles
from cuq1.errors import DeviceError
from cuq1.plan.dims import ROWS
from tests.kernels.shapes import DIMS, NANO, RELEASED
from tests.kernels.twins import draft as twin

TOLERANCE = 3e-4  # the operand rounds to halves as the twin's does, but for FP32's last bits before it
TOKENS = 1000


@pytest.fixture
def rng():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # shown where a test fails
    return np.random.default_rng(seed)


def inputs_of(rng, dims, rows):
    """Rows of very different size, so that a scale that belongs to another row shows."""
    hidden = dims.hidden
    sizes = np.exp(rng.uniform(-3, 3, (ROWS, 1)))
    table = rng.standard_normal((dims.vocab_total, hidden)) * np.exp(rng.uniform(-4, 1, (dims.vocab_total, 1)))
    tokens = np.full(ROWS, 1 << 30, np.int32)  # beyond the live rows: not read
    tokens[:rows] = rng.integers(0, dims.vocab_total, rows)
    before = rng.permutation(ROWS).astype(np.int32)
    return {
        "tokens": tokens,
        "hidden_rows": before,
        "table": (table.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "hidden": (rng.standard_normal((ROWS, hidden)) * sizes).astype(np.float32),
        "draft_hidden": (rng.standard_normal((ROWS, hidden)) * 5).astype(np.float32),
        "enorm": rng.uniform(0.5, 1.5, hidden).astype(np.float32),
        "hnorm": rng.uniform(0.5, 1.5, hidden).astype(np.float32),
    }


def check(gpu, rng, dims, rows, *, live=None, own=False, patch=None, first_row=0, change=None):
    count = rows if live is None else live
    x = inputs_of(rng, dims, count)
    if own:
        x["hidden_rows"][:] = -1
    if change is not None:
        change(x)
    weight = (rng.standard_normal((dims.eh_rows, 2 * dims.hidden)) * 0.02).astype(np.float16)
    kernel, splits = family.eh_proj(dims), family.eh_splits(dims)
    arrays = {name: gpu.array(value) for name, value in x.items()}
    arrays["weights"] = gpu.array(f16_tiles(weight))
    arrays["out"] = out = gpu.poison((splits, ROWS, dims.hidden), np.float32)
    limit = gpu.array(np.array([count], np.int32))
    args = kernel.args(fault=gpu.fault.address, rows=rows, first_row=first_row, layer=-1)
    for name, array in arrays.items():
        setattr(args, name, array.data.ptr)
    if live is not None:
        args.live = limit.data.ptr
    gpu.run(kernel, args, patch)
    got = out.get()
    if count:
        known = {name: value[:count] if name in ("tokens", "hidden_rows") else value for name, value in x.items()}
        expected = twin.eh_proj(twin.operand(**known, eps=dims.eps), weight)
        written = got[:, :count, first_row : first_row + dims.eh_rows].astype(np.float64).sum(axis=0)
        errors = np.linalg.norm(written - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert errors.max() <= TOLERANCE, f"relative errors {errors}"
    got[:, :count, first_row : first_row + dims.eh_rows] = np.nan
    assert np.isnan(got).all(), "written beyond the live rows"


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_eh_proj(gpu, rng, name):
    dims = replace(DIMS[name], vocab_total=TOKENS)
    for rows in range(1, ROWS + 1):
        check(gpu, rng, dims, rows)
        check(gpu, rng, dims, ROWS, live=rows, first_row=dims.hidden - dims.eh_rows)
    check(gpu, rng, dims, 1, own=True)
    check(gpu, rng, dims, ROWS, live=0)


@pytest.mark.gpu
def test_it_tells_broken_kernels(gpu, rng):
    for name, patch in (
        ("released", ("parts[i % PIECES][g]", "parts[0][g]")),
        ("nano", ("squares[i % WARPS][g]", "squares[i % WARPS][0]")),
        ("released", ("table = a.draft_hidden;", "table = a.hidden;")),
        ("released", ("i < WARPS; ++i) out +=", "i < WARPS - 1; ++i) out +=")),
        ("nano", ("embedded ? a.enorm : a.hnorm", "a.hnorm")),
    ):
        with pytest.raises(AssertionError, match="relative errors"):
            check(gpu, rng, replace(DIMS[name], vocab_total=TOKENS), 5, own="draft_hidden" in patch[0], patch=patch)


@pytest.mark.gpu
@pytest.mark.parametrize("token", [-1, TOKENS])
def test_it_reports_a_foreign_token(gpu, rng, token):
    with pytest.raises(DeviceError, match="token outside the vocabulary in eh_proj, layer -1"):
        check(gpu, rng, replace(RELEASED, vocab_total=TOKENS), 2, change=lambda x: x["tokens"].__setitem__(1, token))


@pytest.mark.gpu
def test_it_reports_what_is_not_finite(gpu, rng):
    with pytest.raises(DeviceError, match="not finite in eh_proj, layer -1"):
        check(gpu, rng, replace(NANO, vocab_total=TOKENS), 8, change=lambda x: x["hidden"].__setitem__((3, 7), np.inf))


@pytest.mark.parametrize("name", DIMS)
def test_pieces_share_the_chunks_evenly(name):
    dims = DIMS[name]
    pieces = family.eh_splits(dims) // 2
    assert dims.hidden % (pieces * family.CHUNK * family.WARPS) == 0
    assert dims.hidden // (pieces * family.CHUNK * family.WARPS) <= family.MAX_CHUNKS


def test_a_hidden_size_that_warps_cannot_share_is_refused():
    with pytest.raises(ValueError, match="not a multiple"):
        family.eh_splits(replace(NANO, hidden=192))
