"""Decode attention over pages, both forms, against float64 softmax over all positions up to the token's."""

from functools import cache

import numpy as np
import pytest

from cuq1.cuda import abi
from cuq1.cuda import compile as jit
from cuq1.cuda.kernels import qwen2_attention as family
from cuq1.cuda.kernels import qwen2_gemv
from cuq1.errors import DeviceError
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.qwen2_dims import PAGE, Qwen2Dims, padded
from tests.kernels import qwen2_attend_patches
from tests.kernels.harness import inclusion, replaced, tells
from tests.kernels.qwen2_shapes import ALL
from tests.kernels.told import TELL, run_chain, tell
from tests.kernels.twins import qwen2 as twin
from tests.kernels.twins.qwen2_gemv import written

TOLERANCE = 6e-4  # relative, of a token: probabilities and results are halves
SPARE = 5  # pages that belong to no position
THETA = 1e6


def sizes(head_size, group, kv_heads=2):
    heads = group * kv_heads
    return Qwen2Dims(192, heads, kv_heads, head_size, inner=200, vocab=512, eps=1e-6)


GROUPS = {f"{size}x{group}": sizes(size, group) for size in (64, 128) for group in (5, 6, 7, 8)}
FORMS = ("short", "long")
SHORT_LENGTHS, LONG_LENGTHS = range(1, 66), range(4095, 4114)


@cache
def history(kv_heads, dim, count):
    """Keys and values float16 [kv_heads, count, dim]; keys differ in length, so that some positions stand out."""
    rng = np.random.default_rng(count)
    keys = rng.standard_normal((kv_heads, count, dim), np.float32) * rng.uniform(0.2, 1.5, (1, count, 1))
    values = rng.standard_normal((kv_heads, count, dim), np.float32) + np.float32(0.5)
    return keys.astype(np.float16), values.astype(np.float16)


def patched(kernel, *pairs):
    """A patch for Gpu.run that makes several replacements, in the source or what it shares with the launch of all
    layers; ValueError where one has not one place."""
    whole = jit.source_text(kernel)
    return whole, replaced(whole, inclusion("common/qwen2_attend.cuh"), *pairs)


def assert_same_bits(after, before, what):
    np.testing.assert_array_equal(after.view(np.uint16), before.view(np.uint16), err_msg=what)


class Case:
    """The token at `position`: what attention reads, and what it should write.

    Pages lie in any order, among others; what no earlier token has written of them is NaN.
    """

    def __init__(self, gpu, dims, position, splits=None, scale=1.0):
        self.gpu, self.dims, self.position = gpu, dims, position
        self.splits = splits or family.splits_for(dims)
        self.seed = int(np.random.default_rng().integers(1 << 31))
        rng = np.random.default_rng(self.seed)
        most = LONG_LENGTHS[-1] if position < LONG_LENGTHS[-1] else position
        keys, values = history(dims.kv_heads, dims.head_size, most)
        self.keys, self.values = keys[:, :position], values[:, :position]
        there = written(dims.qkv_rows, dims.hidden, MULTIPROCESSORS)
        self.pieces = np.where(there, rng.standard_normal(there.shape, np.float32), np.float32(np.nan))
        self.pieces *= np.float32(scale)
        self.qkv = np.where(there, self.pieces, 0).astype(np.float64).sum(axis=0)
        self.bias = rng.standard_normal(dims.qkv_rows, np.float32).astype(np.float16)
        self.frequencies = THETA ** (-2 * np.arange(dims.head_size // 2) / dims.head_size)
        pages = position // PAGE + 1
        self.places = rng.permutation(pages + SPARE)[:pages].astype(np.int32)
        shape = (pages + SPARE, dims.kv_heads, PAGE, dims.head_size)
        self.pages = [self._paged(vectors, shape) for vectors in (self.keys, self.values)]

    def _paged(self, vectors, shape):
        pages = np.full(shape, np.nan, np.float16)
        whole = self.position // PAGE
        cut = vectors[:, : whole * PAGE].reshape(shape[1], whole, PAGE, shape[3])
        pages[self.places[:whole]] = cut.transpose(1, 0, 2, 3)
        pages[self.places[whole], :, : self.position % PAGE] = vectors[:, whole * PAGE :]
        return twin.swizzled(pages)

    def arguments(self):
        gpu, dims = self.gpu, self.dims
        statistics = (dims.kv_heads, dims.group, self.splits)
        self.buffers = {
            "pieces": gpu.array(self.pieces),
            "bias": gpu.array(self.bias),
            "positions": gpu.array(np.array([self.position], np.int32)),
            "inverse_frequencies": gpu.array(self.frequencies),
            "page_table": gpu.array(np.append(self.places, -1).astype(np.int32)),
            "k_pages": gpu.array(self.pages[0]),
            "v_pages": gpu.array(self.pages[1]),
            "attended": gpu.poison(padded(dims.q_width) + 128, np.float16),
            "partial_out": gpu.poison((dims.kv_heads, self.splits, dims.group, dims.head_size), np.float32),
            "partial_max": gpu.poison(statistics, np.float32),
            "partial_sum": gpu.poison(statistics, np.float32),
        }
        return [self._filled(kind) for kind in (abi.Qwen2AttentionArgs, abi.Qwen2CombineArgs)]

    def _filled(self, kind):
        args = kind(fault=self.gpu.fault.address, layer=3, rows=1, splits=self.splits)
        for name, _ in kind._fields_:
            if name in self.buffers:
                setattr(args, name, self.buffers[name].data.ptr)
        return args

    def launch(self, form, *patches, patch_combine=None):
        attention, combine = self.arguments()
        kernel = family.attention_short(self.dims) if form == "short" else family.attention(self.dims, self.splits)
        self.gpu.run(kernel, attention, patched(kernel, *patches) if patches else None)
        if form == "long":
            self.gpu.run(family.combine(self.dims), combine, patch_combine)

    def run(self, form, *patches, patch_combine=None):
        """Launches a form; returns attended, float64 [q_heads * head_size], checked but for its values."""
        self.launch(form, *patches, patch_combine=patch_combine)
        if form == "long":
            for name in ("partial_out", "partial_max", "partial_sum"):
                assert not np.isnan(self.buffers[name].get()).any(), f"{name} is not written everywhere: {self.where}"
        out = self.buffers["attended"].get()
        width = padded(self.dims.q_width)
        assert np.isnan(out[width:]).all(), "written beyond attended"
        np.testing.assert_array_equal(out[self.dims.q_width : width], 0, err_msg="no zeros beyond q_width")
        return out[: self.dims.q_width].astype(np.float64)

    def check(self, form, *patches, patch_combine=None):
        """Runs a form and checks all that it wrote; returns attended."""
        out = self.run(form, *patches, patch_combine=patch_combine)
        expected, k, v = twin.attention(self.qkv, self.bias, self.position, self.frequencies, self.keys, self.values)
        error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
        assert error < TOLERANCE, f"attended: relative error {error:.3g}, {self.where}"
        place, row = self.places[-1], self.position % PAGE
        for name, pages, own in (("k_pages", self.pages[0], k), ("v_pages", self.pages[1], v)):
            before, after = twin.swizzled(pages), twin.swizzled(self.buffers[name].get())
            # FP32 may round to the other neighbour of a half, of a number that is small beside those it is the sum of.
            close = np.abs(after[place, :, row].astype(np.float64) - own) <= 2.0**-10 * np.abs(own) + 1e-5
            assert close.all(), f"{name}: the token's own, {self.where}"
            after[place, :, row] = before[place, :, row]
            assert_same_bits(after, before, f"{name}, {self.where}")
        return out

    @property
    def where(self):
        return f"seed {self.seed}, position {self.position}, {self.dims}"


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GROUPS)
def test_every_length(gpu, name, form):
    for length in (*SHORT_LENGTHS, *LONG_LENGTHS):
        Case(gpu, GROUPS[name], length - 1).check(form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_family(gpu, name, form):
    for position in (0, 15, 16, 100, 575, 576, 1000):
        Case(gpu, ALL[name], position).check(form)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["64x7", "128x7"])
def test_far(gpu, name):
    """RoPE's angles are of tens of thousands of turns; the rings of stages wrap many times."""
    for position in (16_383, 16_384, 32_752, 32_767):
        case = Case(gpu, GROUPS[name], position)
        outs = [case.check(form) for form in FORMS]
        assert np.linalg.norm(outs[0] - outs[1]) < TOLERANCE * np.linalg.norm(outs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 31])
def test_few_splits(gpu, splits):
    for position in (0, 20, 500, 2500):
        Case(gpu, GROUPS["128x7"], position, splits).check("long")


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_large_scores(gpu, form):
    """One key takes all; queries' low parts count, as an error of a score is one of its probability."""
    for scale in (5, 30):
        Case(gpu, GROUPS["128x7"], 300, scale=scale).check(form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_same_bits(gpu, form):
    for position in (37, 4100):
        case = Case(gpu, GROUPS["128x7"], position)
        first = case.run(form)
        for _ in range(10):
            np.testing.assert_array_equal(case.run(form), first)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_no_page(gpu, form):
    """Embedding has found no page: nothing is written to any, and nothing else breaks."""
    for position in (0, 32, 400):
        case = Case(gpu, GROUPS["128x7"], position)
        case.places[-1] = -1
        case.launch(form)
        for name, before in zip(("k_pages", "v_pages"), case.pages, strict=True):
            assert_same_bits(case.buffers[name].get(), before, name)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", [0, 7 * 128 * 2, -1], ids=["q", "k", "v"])
def test_reports_what_is_not_finite(gpu, form, row):
    case = Case(gpu, GROUPS["128x7"], 50)
    case.pieces[0, row] = np.nan
    with pytest.raises(DeviceError, match="not finite in attention, layer 3"):
        case.launch(form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_pieces_that_come_late(gpu, form):
    """The predecessor writes pieces long after this launch's prologue; a form that does not wait is seen."""

    def attended(*patches):
        case = Case(gpu, GROUPS["128x7"], 130)
        attention, combine = case.arguments()
        source, target = gpu.array(case.pieces), gpu.array(np.zeros_like(case.pieces))
        attention.pieces = target.data.ptr
        kernel = family.attention_short(case.dims) if form == "short" else family.attention(case.dims)
        calls = [(TELL, tell(source, target, pause=30_000), None)]
        calls.append((kernel, attention, patched(kernel, *patches) if patches else None))
        if form == "long":
            calls.append((family.combine(case.dims), combine, None))
        run_chain(gpu, calls)
        out = case.buffers["attended"].get()[: case.dims.q_width].astype(np.float64)
        expected, _, _ = twin.attention(case.qkv, case.bias, 130, case.frequencies, case.keys, case.values)
        return np.linalg.norm(out - expected) / np.linalg.norm(expected)

    assert attended() < TOLERANCE
    assert not attended(("    pdl_wait();\n    pdl_trigger();\n\n    const int page", "    const int page")) < TOLERANCE


# Copies that begin long after the warps that compute, into stages that hold NaN.
POSITION = "    const int position = __ldcg(a.positions);"
POISONED = f"""    for (Stage& stage : shared.stages) {{
        uint32_t* const words = reinterpret_cast<uint32_t*>(stage.k);
        for (int i = threadIdx.x; i < 2 * PAGE_BYTES / 4; i += THREADS) words[i] = 0xffffffffu;
    }}
    reads_before_copies();
    __syncthreads();
{POSITION}"""
SLEEPS = [(f"bulk_load(stage.{part},", f"__nanosleep(30000); bulk_load(stage.{part},") for part in "kv"]
NONE_EARLY = ("for (int i = 0; i < min_int(EARLY, share.count); ++i) producer.load(i);", "")
ALL_AFTER = (
    "for (int i = min_int(EARLY, share.count); i < share.count; ++i) {",
    "for (int i = 0; i < share.count; ++i) {",
)
LATE = ((POSITION, POISONED), *SLEEPS, NONE_EARLY, ALL_AFTER)
WAITS = {part: f"barrier_wait(&barriers.{part}_full, parity, a.fault, KERNEL_ATTENTION, a.layer);" for part in "kv"}
# A wait behind what it is for: a block must not end before its copies have come.
BEHIND = {"k": WAITS["v"], "v": "if (i + STAGES < share.count) {"}
NOT_WAITED_FOR = {part: ((wait, ""), (BEHIND[part], f"{wait} {BEHIND[part]}")) for part, wait in WAITS.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", NOT_WAITED_FOR)
def test_would_notice_a_missing_barrier(gpu, form, part):
    """Warps that do not wait for copies: of tail pages too, whose copies come late here."""
    for position in (48, 200, 4100):
        case = Case(gpu, GROUPS["128x7"], position)
        case.check(form, *LATE)
        with tells():
            case.check(form, *LATE, *NOT_WAITED_FOR[part])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_would_notice_a_page_given_back_early(gpu, form):
    """Before its values are read; the page that follows into its stage then comes at once."""
    given_back = "            reads_before_copies();\n            barrier_arrive(&barriers.empty);"
    early = f"{WAITS['v']} if (i + STAGES < share.count) barrier_arrive(&barriers.empty); __nanosleep(5000);"
    case = Case(gpu, GROUPS["128x7"], 4100, splits=2)
    case.check(form)
    with tells():
        case.check(form, (given_back, ""), (WAITS["v"], early))


@pytest.mark.gpu
def test_scores_are_of_queries_in_full(gpu):
    """The largest score of each query, in base 2, is right to FP32's rounding; of a query's halves alone it is not."""
    case = Case(gpu, GROUPS["128x7"], 300, splits=1, scale=5)

    def error(*patches):
        case.run("long", *patches)
        found = case.buffers["partial_max"].get()[:, :, 0]
        expected = twin.scores(case.qkv, case.bias, case.position, case.frequencies, case.keys).max(axis=2) * np.log2(
            np.e
        )
        return np.linalg.norm(found - expected) / np.linalg.norm(expected)

    assert error() < 3e-6
    assert error(("make_uint2(high, low)", "make_uint2(high, 0 * low)")) > 2e-5


# Each with the position where it shows, and replacements.
BROKEN = {
    **qwen2_attend_patches.WRONG,
    "one beyond": (34, ("if (g > last) s", "if (g > last + 1) s"), (POSITION, POISONED)),
    "garbage behind the token": (50, ("if (tail) {  // values", "if (false) {  // values"), (POSITION, POISONED)),
    "the tail page as it lies": (50, ("(i == 0 ? share.own : PAGE)", "PAGE"), NONE_EARLY, ALL_AFTER),
    "no bias": (50, ("in[r].x[half] = plus(in[r].x[half], unpacked", "(void)(unpacked")),
    "a piece less": (50, ("QkvPieces::of_row(row + half * (HEAD_SIZE / 2)) : 0", "1 : 0")),
    "pieces that are not there": (50, ("QkvPieces::of_row(row + half * (HEAD_SIZE / 2)) : 0", "QKV_PIECES : 0")),
    "pairs": (50, ("threadIdx.x % HEAD_THREADS * 4 + i)", "threadIdx.x % HEAD_THREADS * 4 + (i ^ 1))")),
    "another page for the token": (
        50,
        ("__ldcg(a.page_table + share.first) : 0", "__ldcg(a.page_table + max_int(share.first - 1, 0)) : 0"),
    ),
    "another page": (
        50,
        ("__ldcg(a.page_table + share.first - i)", "__ldcg(a.page_table + max_int(share.first - i - 1, 0))"),
    ),
    "another stretch of the table": (9000, ("known_from += WARP;", "")),
    "operands": (130, ("mma_f16(sums, v[0], v[2], v[1], v[3]", "mma_f16(sums, v[0], v[1], v[2], v[3]")),
    "no rescaling": (3000, ("factor[n] = exp2_fast(top[n] - largest);", "factor[n] = 1.0f;")),
    "no weights of warps": (600, ("exp2_fast(statistics[i].x - base.x)", "1.0f")),
    "not appended": (50, ("page < 0 ? nullptr : cached, share.own, dim, in", "nullptr, share.own, dim, in")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("broken", BROKEN)
def test_would_notice(gpu, form, broken):
    position, *patches = BROKEN[broken]
    dims = ALL["0.5b"] if "Pieces" in patches[0][0] else GROUPS["64x7" if position > 30_000 else "128x7"]
    case = Case(gpu, dims, position, splits=2 if position > 500 else None)
    case.check(form)
    with tells():
        case.check(form, *patches)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("const float weight = exp2_fast(found[block].x - top);", "const float weight = 1.0f;"),
        ("lines % 8 + half * 8;", "lines % 8 + (1 - half) * 8;"),
        ("for (int i = Q_WIDTH + int(threadIdx.x);", "for (int i = PADDED_Q;"),
    ],
    ids=["no weights of blocks", "dimensions", "no zeros"],
)
def test_would_notice_of_short(gpu, patch):
    case = Case(gpu, ALL["odd"], 600)
    case.check("short")
    with tells():
        case.check("short", patch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("weight[i] = exp2_fast(top[i] - peak);", "weight[i] = 1.0f;"),
        ("split + i * WARP < a.splits", "split + i * WARP < a.splits - 1"),
        ("for (int i = Q_WIDTH + lane;", "for (int i = PADDED_Q;"),
    ],
    ids=["no weights", "a split less", "no zeros"],
)
def test_would_notice_of_combine(gpu, patch):
    case = Case(gpu, ALL["odd"], 3000)
    case.check("long")
    with tells():
        case.check("long", patch_combine=patch)


# --- without a GPU


def test_replacements_have_their_places():
    """Each control's, in the source as it is now, of either form."""
    dims = GROUPS["128x7"]
    replacements = [patches for _, *patches in BROKEN.values()] + [(*LATE, *pair) for pair in NOT_WAITED_FOR.values()]
    for kernel in (family.attention(dims, 2), family.attention_short(dims)):
        texts = {patched(kernel, *patches)[1] for patches in replacements}
        assert len(texts) == len(replacements)


def test_twin_by_hand():
    """One head of two dimensions, RoPE by a quarter turn a position, and one older position."""
    qkv = np.array([0.0, 1, 0, 2, 3, 4])
    keys, values = np.array([[[0.0, 1]]], np.float16), np.array([[[1.0, 0]]], np.float16)
    out, k, v = twin.attention(qkv, np.array([1.0, 0, 0, 0, 0, 0]), 1, np.array([np.pi / 2]), keys, values)
    # q = (1, 1) turned is (-1, 1), k = (0, 2) is (-2, 0): scores 1 / sqrt(2) and sqrt(2)
    np.testing.assert_allclose(k, [[-2, 0]], atol=1e-6)
    np.testing.assert_array_equal(v, [[3, 4]])
    weights = np.exp([0.5**0.5, 2**0.5])
    np.testing.assert_allclose(out, (weights @ [[1, 0], [3, 4]]) / weights.sum())


def test_more_queries_than_the_products_take():
    with pytest.raises(ValueError, match="attention takes 1 to 8"):
        family.attention(sizes(64, 9))


def room(kernels):
    """Registers and bytes of shared memory that a block of each takes together, as a multiprocessor gives them."""
    cubins = [jit.compile_kernel(kernel) for kernel in kernels]
    registers = sum(-(-cubin.registers // 8) * 8 * kernel.block for kernel, cubin in zip(kernels, cubins, strict=True))
    return registers, sum(kernel.smem + cubin.smem + 1024 for kernel, cubin in zip(kernels, cubins, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_attention_and_the_chain_share_a_multiprocessor(name):
    """A prologue runs beside its predecessor where there is room for both; 32B's token takes what would be left."""
    dims = ALL[name]
    for attention in (family.attention_short(dims), family.attention(dims)):
        assert attention.grid[0] * attention.grid[1] <= MULTIPROCESSORS
        registers, shared = room((attention, qwen2_gemv.chain(dims)))
        assert registers <= 64 << 10
        assert (shared <= 228 << 10) == (name != "32b")
