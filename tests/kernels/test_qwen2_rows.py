"""A Qwen2 token's embedding with its page, and the norm before the logits, against float64."""

from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda import abi
from cuq1.cuda.kernels import qwen2_rows as family
from cuq1.errors import DeviceError
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.qwen2_dims import PAGE, padded
from tests.kernels.harness import tells
from tests.kernels.qwen2_shapes import ALL, DIMS
from tests.kernels.twins import qwen2 as twin
from tests.kernels.twins.qwen2_gemv import written

NOT_READY = 0xFFFFFFFF
HALF = 4e-4  # relative: half a step of 2^-11 at most
VOCAB = 1000
SEVEN = DIMS["7b"]
GUARD = [77, 78, 79]  # what lies behind Pages.free, and behind the tables


@pytest.fixture
def rng():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # shown where a test fails
    return np.random.default_rng(seed)


def check_embed(gpu, rng, dims, token, position, places, free, expected, patch=None, unready=0):
    """places: the page table; free: free pages, the last one next; expected: both afterwards; unready: pieces of 16
    bytes that are cleared."""
    dims = replace(dims, vocab=VOCAB)
    table = rng.standard_normal((VOCAB, dims.hidden), np.float32).astype(np.float16)
    buffers = {
        "tokens": gpu.array(np.array([token], np.int32)),
        "positions": gpu.array(np.array([position], np.int32)),
        "table": gpu.array(table),
        "residual": gpu.poison(dims.hidden + 8, np.float32),
        "pages": gpu.array(np.array([len(free), *GUARD], np.int32)),
        "page_table": gpu.array(np.array([*places, -1], np.int32)),
        "free_pages": gpu.array(np.array([*free, *GUARD], np.int32)),
        "unready": gpu.array(np.full(4 * unready + 4, 7, np.uint32)),
    }
    args = abi.Qwen2EmbedArgs(fault=gpu.fault.address, layer=2, rows=1, max_pages=len(places), unready_pieces=unready)
    for name, buffer in buffers.items():
        setattr(args, name, buffer.data.ptr)
    try:
        gpu.run(family.embed(dims), args, patch)
    finally:
        residual = buffers["residual"].get()
        row = twin.embed(table, token if 0 <= token < VOCAB else 0)
        np.testing.assert_array_equal(residual[: dims.hidden], row, err_msg="residual")
        assert np.isnan(residual[dims.hidden :]).all(), "residual"
        assert buffers["page_table"].get().tolist() == [*expected[0], -1], "page_table"
        assert buffers["pages"].get().tolist() == [expected[1], *GUARD], "pages"
        assert buffers["free_pages"].get().tolist() == [*free, *GUARD], "free_pages"
        words = buffers["unready"].get()
        assert (words[:-4] == NOT_READY).all(), "unready"
        assert (words[-4:] == 7).all(), "unready: written beyond"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_embed(gpu, rng, name):
    for token, position in ((0, 0), (VOCAB - 1, PAGE - 1), (int(rng.integers(VOCAB)), PAGE)):
        there = [4, 9, 2]
        check_embed(gpu, rng, ALL[name], token, position, there, [5, 6], (there, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("unready", [1, 127, 64 * 128, 64 * 128 + 1, 50_000])
def test_what_is_to_be_polled_is_cleared(gpu, rng, unready):
    check_embed(gpu, rng, SEVEN, 5, 0, [1], [], ([1], 0), unready=unready)


@pytest.mark.gpu
def test_a_page_is_taken_once(gpu, rng):
    for position in (0, 7, PAGE - 1):  # also where an older position of the page was never embedded
        check_embed(gpu, rng, SEVEN, 3, position, [-1, -1], [8, 5, 6], ([6, -1], 2))
        check_embed(gpu, rng, SEVEN, 3, position, [6, -1], [8, 5], ([6, -1], 2))
    check_embed(gpu, rng, SEVEN, 3, 2 * PAGE, [6, 0, -1], [8], ([6, 0, 8], 0))
    check_embed(gpu, rng, SEVEN, 3, 2 * PAGE - 1, [6, 0, -1], [], ([6, 0, -1], 0))


@pytest.mark.gpu
@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 30])
def test_a_foreign_token_is_reported(gpu, rng, token):
    with pytest.raises(DeviceError, match="token outside the vocabulary in embed, layer 2"):
        check_embed(gpu, rng, SEVEN, token, 0, [1], [], ([1], 0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("position", "free"), [(PAGE, []), (2 * PAGE, [4]), (1 << 30, [4]), (-1, [4])], ids=["none", "end", "far", "before"]
)
def test_a_position_without_a_page_is_reported(gpu, rng, position, free):
    with pytest.raises(DeviceError, match="without a free page of the KV cache in embed, layer 2"):
        check_embed(gpu, rng, SEVEN, 5, position, [1, -1], free, ([1, -1], len(free)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("patch", "what"),
    [
        (("__ldcg(a.page_table + place) < 0", "position % PAGE == 0"), "page"),
        (("a.pages->free = free - 1;", ""), "pages"),
        (("a.free_pages + free - 1)", "a.free_pages + free)"), "page_table"),
        (("to[1] = make_float4(x2.x, x2.y,", "to[1] = make_float4(x2.y, x2.x,"), "residual"),
        (("i < a.unready_pieces; i += int(gridDim.x)", "i < a.unready_pieces; i += 2 * int(gridDim.x)"), "unready"),
        (("i < a.unready_pieces;", "i <= a.unready_pieces;"), "unready: written beyond"),
    ],
    ids=["taken again", "not taken", "the next one", "columns", "every other turn", "one more"],
)
def test_embed_tells_broken_kernels(gpu, rng, patch, what):
    given = (3, PAGE, [4, -1], [7, 6], ([4, 6], 1))
    if what == "page":
        given = (3, PAGE, [4, 9], [7, 6], ([4, 9], 2))
    check_embed(gpu, rng, SEVEN, *given, unready=20_000)
    with pytest.raises(AssertionError, match=what):
        check_embed(gpu, rng, SEVEN, *given, patch=patch, unready=20_000)


def check_norm(gpu, rng, dims, *, pieces=True, bad=None, patch=None, scale=1.0):
    residual = rng.standard_normal(dims.hidden, np.float32) * np.float32(scale)
    weight = rng.uniform(0.5, 1.5, dims.hidden).astype(np.float16)
    there = written(dims.hidden, dims.inner, MULTIPROCESSORS)
    parts = np.where(there, rng.standard_normal(there.shape, np.float32), np.float32(np.nan))
    if bad is not None:
        (residual if bad == "residual" else parts[0])[5] = np.inf
    normed = gpu.poison(padded(dims.hidden) + 128, np.float16)
    buffers = {"residual": gpu.array(residual), "pieces": gpu.array(parts), "norm": gpu.array(weight), "normed": normed}
    args = abi.Qwen2NormArgs(fault=gpu.fault.address, layer=3, rows=1)
    for name, buffer in buffers.items():
        if pieces or name != "pieces":
            setattr(args, name, buffer.data.ptr)
    gpu.run(family.norm(dims), args, patch)
    x = residual.astype(np.float64) + (np.where(there, parts, 0).astype(np.float64).sum(axis=0) if pieces else 0)
    expected = twin.norm(x, weight, np.float64(np.float32(dims.eps)), padded(dims.hidden))
    out = normed.get().astype(np.float64)
    assert np.isnan(out[padded(dims.hidden) :]).all(), "written beyond"
    error = np.linalg.norm(out[: len(expected)] - expected) / np.linalg.norm(expected)
    assert error < HALF, f"relative error {error:.2e}"
    np.testing.assert_array_equal(out[dims.hidden : len(expected)], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_norm(gpu, rng, name):
    check_norm(gpu, rng, ALL[name])
    check_norm(gpu, rng, ALL[name], pieces=False)
    check_norm(gpu, rng, ALL[name], pieces=False, scale=1e-3)  # eps counts


@pytest.mark.gpu
@pytest.mark.parametrize("bad", ["residual", "pieces"])
def test_norm_reports_what_is_not_finite(gpu, rng, bad):
    with pytest.raises(DeviceError, match="not finite in norm, layer 3"):
        check_norm(gpu, rng, SEVEN, bad=bad)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("DownPieces::of_row(column) : 0", "1 : 0"),
        ("DownPieces::of_row(column) : 0", "DOWN_PIECES : 0"),
        ("(1.0f / HIDDEN) + EPS", "(1.0f / HIDDEN)"),
        ("(1.0f / HIDDEN)", "(1.0f / PADDED)"),
        ("if (column < PADDED)", "if (column < HIDDEN)"),
        ("* n1.y)", "* n1.x)"),
    ],
    ids=["a piece less", "pieces that are not there", "no eps", "the mean", "no zeros", "another weight"],
)
def test_norm_tells_broken_kernels(gpu, rng, patch):
    dims = ALL["7b-tiny" if "Pieces" in patch[0] else "odd"]
    scale = 1e-3 if "EPS" in patch[0] else 1.0
    check_norm(gpu, rng, dims, pieces=scale == 1, scale=scale)
    with tells():
        check_norm(gpu, rng, dims, pieces=scale == 1, scale=scale, patch=patch)


def test_twins_by_hand():
    np.testing.assert_allclose(
        twin.norm(np.array([3.0, 4.0]), np.array([2.0, 1.0]), 0.5, 3), [6 / 13**0.5, 4 / 13**0.5, 0]
    )
    x = np.array([[1.0, 2, 3, 4]])
    turned = twin.turned(x, 2, np.array([np.pi / 4, np.pi / 2]))
    np.testing.assert_allclose(turned, [[-3, -2, 1, -4]], atol=1e-15)
