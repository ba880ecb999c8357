"""All layers of a Qwen2 token in one launch against the twin, and against itself: split, repeated, and disturbed."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cuq1.cuda import compile as jit
from cuq1.cuda.abi import BandwidthArgs, Qwen2EmbedArgs
from cuq1.cuda.graph import stream, synchronize
from cuq1.cuda.kernels import bandwidth, qwen2_rows
from cuq1.cuda.kernels import qwen2_layers as family
from cuq1.cuda.launch import launch
from cuq1.cuda.module import build
from cuq1.errors import DeviceError
from cuq1.plan.qwen2_dims import PAGE
from tests.kernels.harness import tells
from tests.kernels.qwen2_layers_case import FIRST, SHAPES, Case, Handed, Model, assert_same
from tests.kernels.qwen2_shapes import ODD
from tests.kernels.twins import qwen2_layers as twin
from tests.paths import ROOT

SIZES = {  # with layers
    "7b-tiny": 4, "32b-tiny": 3, "four parts": 3, "1.5b-tiny": 3, "14b-tiny": 3,
    "0.5b": 3, "1.5b": 2, "3b": 2, "7b": 2, "14b": 2, "32b": 2,
}  # fmt: skip
TINY = ("7b-tiny", "32b-tiny", "four parts")  # columns whole, in two parts, and in four
LONG, FAR = 4114, 32_768  # positions of a model's caches
LATE = (4095, 4096, 4097, 4103, 4104, 4111, 4112, 4113)


@cache
def made(gpu, size, layers, most):
    return Model(gpu, SHAPES[size], layers, most)


def model(gpu, size, layers=None, most=LONG):
    """The same one each time, or its first layers."""
    layers = layers or SIZES[size]
    return made(gpu, size, max(layers, SIZES[size]), most).first(layers)


def borders(dims):
    """Positions about those from which one span more attends, up to where all do, and beyond."""
    step, most = family.SPAN_PAGES * PAGE, family.spans(dims)
    counts = (1, 2, 3, most // 2, most - 1, most, most + 1, 2 * most)
    return sorted({count * step + off for count in counts for off in (-1, 0, 1) if count * step + off < LONG})


# --- what a launch leaves


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_layers(gpu, size):
    for position in (0, 1, 16, 65, 575, 1000, 4100):
        Case(model(gpu, size), position).check()


@pytest.mark.gpu
@pytest.mark.parametrize("size", TINY)
def test_lengths(gpu, size):
    """Partial pages."""
    for position in (*range(18), 31, 32, 33, *range(63, 66), *range(511, 514), 575, 576, 1000, *LATE):
        Case(model(gpu, size), position).check()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*TINY, "0.5b", "7b", "14b"])
def test_spans(gpu, size):
    for position in borders(SHAPES[size]):
        Case(model(gpu, size), position).check()


@pytest.mark.gpu
def test_far(gpu):
    """RoPE's angles are of thousands of turns; a span's pages come in many turns."""
    for position in (8191, 16_383, 32_752, 32_767):
        Case(model(gpu, "7b-tiny", 2, FAR), position).check()


@pytest.mark.gpu
@pytest.mark.parametrize("size", TINY)
def test_any_number_of_layers(gpu, size):
    for layers in (1, 2, 7):
        for position in (3, 700):
            Case(model(gpu, size, layers, 1000), position).check()


def kept(call):
    """What the launch's clearing warp does to an array, which then stays."""
    return f"clear({call}", f"if (false) clear({call}"


TURNS = {  # that layers have in turns
    "the row before the MLP": kept("middle_of(a, i - 1)"),
    "the row behind it": kept("end_of(a, i - 1)"),
    "inner": kept("inner_of(a, i - 1)"),
    "down_pieces": ("down[at] = word;", ";"),
}
KEPT = {
    "qkv_pieces": ("(a.qkv_pieces)[at] = word;", "(a.qkv_pieces);"),
    "partials": kept("a.partials,"),
    "o_pieces": kept("a.o_pieces"),
    **TURNS,
}


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_steps_of_layers(gpu, size):
    """Each from what the launch itself has stored for it, which a kernel that clears nothing leaves."""
    dims = SHAPES[size]
    many = (0, 15, 16, 130, 1000, 64 * family.spans(dims) + 5, 4100)
    for layers, changes, positions in ((1, KEPT, many), (2, TURNS, (0, 130, 1000))):
        patch = patched(dims, *changes.values())
        for position in positions:
            case = Case(model(gpu, size, layers), position)
            case.judge_steps(case.run(patch))


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["7b-tiny", "1.5b"])
def test_in_place(gpu, size):
    """residual_out may be where residual lies."""
    case = Case(model(gpu, size), 700)
    expected = case.run()
    case.prepare()
    handed = Handed(gpu, SHAPES[size])
    gpu.run(family.layers(SHAPES[size]), case.arguments(handed, residual_out=case.buffers["residual"]))
    assert_same(case.buffers["residual"].get(), expected.residual, "residual")


@pytest.mark.gpu
@pytest.mark.parametrize("size", TINY)
def test_two_launches_are_one(gpu, size):
    """Of a model that has more layers than a launch takes: the second one has memory of its own to hand over in."""
    whole, kernel = model(gpu, size), family.layers(SHAPES[size])
    for position in (5, 900):
        case = Case(whole, position)
        expected = case.run()
        for cut in range(1, len(whole)):
            case.prepare()
            between = gpu.poison(whole.dims.hidden, np.float32)
            handed = [Handed(gpu, whole.dims) for _ in range(2)]
            calls = (
                case.arguments(handed[0], range(cut), residual_out=between),
                case.arguments(handed[1], range(cut, len(whole)), residual=between),
            )
            assert [args.layer for args in calls] == [FIRST, FIRST + cut]
            function = build(kernel, gpu.device.arch)
            gpu.cupy.cuda.Device().synchronize()
            for args in calls:
                launch(function, args, gpu.stream)
            gpu.wait()
            case.found(handed[1], len(whole) - cut).same(expected)


@pytest.mark.gpu
def test_no_page(gpu):
    """Embedding has found no page: nothing is written to any, and nothing else breaks."""
    for position in (0, 32, 400):
        case = Case(model(gpu, "7b-tiny"), position)
        case.places[-1] = -1
        found = case.run()
        assert np.isfinite(found.residual).all()
        for name, pages in case.pages.items():
            for before, after in zip(pages, getattr(found, name), strict=True):
                assert_same(after, before, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_reports_what_is_not_finite(gpu, name):
    """With the kernel and the layer that it came from."""
    case, layer = Case(model(gpu, "7b-tiny"), 50), 2
    units = case.model.layers[layer].units[f"{name}_weights"].copy()
    units[3, 0, 1024:] = gpu.array(np.full(16, np.nan, np.float16).view(np.uint8))
    kernel = {"o": "o_proj"}.get(name, name)
    with pytest.raises(DeviceError, match=f"not finite in {kernel}, layer {FIRST + layer}"):
        case.run(**{f"{name}_weights": (layer, units)})


@pytest.mark.gpu
def test_reports_what_attention_finds(gpu):
    case, layer = Case(model(gpu, "7b-tiny"), 50), 1
    case.pages["v_pages"][layer][case.places[1], 0, 3] = np.inf
    with pytest.raises(DeviceError, match=f"not finite in attention, layer {FIRST + layer}"):
        case.run()


# --- the same again


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*TINY, "0.5b", "7b"])
def test_equal_inputs_give_equal_bits(gpu, size):
    for position in (37, 4100):
        case = Case(model(gpu, size), position)
        first = case.run()
        for _ in range(5):
            case.run().same(first)


DELAYS = """
__device__ __forceinline__ void delay(uint32_t place) {
    uint32_t x = uint32_t(clock64()) + (blockIdx.x * 32u + threadIdx.x / 32u) * 2654435761u + place * 40503u;
    x = (x ^ x >> 15) * 2246822519u;
    x ^= x >> 13;
    const uint32_t whole = __shfl_sync(0xffffffffu, x, 0);
    if (whole % 3 == 0) __nanosleep(whole / 3 % 20000);
}
"""
BEGIN = re.compile(r"^(?=constexpr int Q_WIDTH)", re.MULTILINE)
CALLS = (  # where whole warps come by, and each is a statement of its own
    "phase_resumed", "phase_ended", "await_clearing", "entered", "merge", "row\\.enter", "take_inner",
    "stream\\.multiply", "store_pieces", "store_o", "store_inner",
    "if \\(threadIdx\\.x < WARP\\)",  # adds up
    "const Input in", "softmax\\.end", "shared\\.merge\\.sums\\[0\\]", "float sum = 0",  # before what is shared
    "barrier_wait\\(&shared\\.entered", "__threadfence",  # before and behind clearing
)  # fmt: skip
PLACES = re.compile(rf"^(?= +(?:{'|'.join(CALLS)})\W)", re.MULTILINE)


def delayed(text):
    """The source with delays of random length, warp by warp, about every phase and what is stored and cleared there."""
    pieces = PLACES.split(BEGIN.sub(DELAYS, text))
    for call in CALLS:
        assert any(re.match(rf" +{call}", piece) for piece in pieces[1:]), f"no place for delays: {call}"
    return pieces[0] + "".join(f"delay({place}); {piece}" for place, piece in enumerate(pieces[1:]))


def inlined(text, header):
    """The source with a header in the place of its include."""
    include = f'#include "{header}"'
    assert text.count(include) == 1
    return text.replace(include, (ROOT / "kernels_cu" / header).read_text().replace("#pragma once", ""))


def patched(dims, *pairs, delays=False):
    """A patch for Gpu.run of several replacements, in the source or in qwen2_attend.cuh; ValueError for one that fits
    nowhere, or in several places."""
    whole = jit.source_text(family.layers(dims))
    text = inlined(whole, "common/qwen2_attend.cuh")
    for old, new in pairs:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} occurs {text.count(old)} times")
        text = text.replace(old, new)
    return whole, delayed(text) if delays else text


TOKENS = ((7, 17), (301, 64), (7, 511), (99, 512), (100, 1000), (499, 2113), (7, 4096))  # and their positions
LAUNCHES = 200


def many_tokens(gpu, size, patch=None, meanwhile=lambda _: None):
    """LAUNCHES tokens one after the other, each with the launch that embeds it and clears what the next hands over: all
    residuals [LAUNCHES, hidden]."""
    dims = replace(SHAPES[size], vocab=512)
    whole = model(gpu, size)
    case = Case(whole, TOKENS[-1][1])
    case.prepare()
    handed = Handed(gpu, dims, 0, guarded=False)
    table = gpu.array(np.random.default_rng(3).standard_normal((dims.vocab, dims.hidden)).astype(np.float16))
    tokens, positions = (gpu.array(np.array(column, np.int32)) for column in zip(*TOKENS, strict=True))
    out = gpu.poison((LAUNCHES, dims.hidden), np.float32)
    pages = gpu.array(np.zeros(4, np.int32))  # none is free: all are there
    calls = []
    for number in range(LAUNCHES):
        which = number % len(TOKENS)
        embed = Qwen2EmbedArgs(
            fault=gpu.fault.address, rows=1, tokens=tokens[which:].data.ptr, positions=positions[which:].data.ptr,
            table=table.data.ptr, residual=case.buffers["residual"].data.ptr, pages=pages.data.ptr,
            page_table=case.buffers["page_table"].data.ptr, free_pages=pages.data.ptr, max_pages=case.count,
            unready_pieces=handed.bytes.nbytes // 16, unready=handed.bytes.data.ptr,
        )  # fmt: skip
        layers = case.arguments(handed, positions=positions[which:], residual_out=out[number])
        calls.append((embed, layers))
    functions = (
        build(qwen2_rows.embed(dims), gpu.device.arch),
        build(family.layers(SHAPES[size]), gpu.device.arch, patch),
    )
    gpu.cupy.cuda.Device().synchronize()
    for number, pair in enumerate(calls):
        meanwhile(number)
        for function, args in zip(functions, pair, strict=True):
            launch(function, args, gpu.stream)
    gpu.wait()
    return out.get()


def assert_all_the_same(found):
    """Tokens of one position, whose older positions are the same, too: the first ones wrote them."""
    assert np.isfinite(found).all()
    for number, residual in enumerate(found):
        assert_same(residual, found[number % len(TOKENS)], f"token {number}")
    distinct = {residual.tobytes() for residual in found[: len(TOKENS)]}
    assert len(distinct) == len(TOKENS)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*TINY, "0.5b", "7b"])
def test_many_tokens_in_a_row(gpu, size):
    assert_all_the_same(many_tokens(gpu, size))


@pytest.mark.gpu
@pytest.mark.parametrize("size", TINY)
def test_blocks_and_warps_may_be_late(gpu, size):
    """The same bits, whoever is late: with delays, and without."""
    expected = many_tokens(gpu, size)
    found = many_tokens(gpu, size, patched(SHAPES[size], delays=True))
    assert_same(found, expected, "with delays")


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["7b-tiny", "0.5b"])
def test_beside_another_stream(gpu, size):
    """Which takes multiprocessors, L2 and memory in its turns."""
    expected = many_tokens(gpu, size)
    words = (256 << 20) // 16 // bandwidth.WORDS * bandwidth.WORDS
    data, out = gpu.cupy.zeros(words * 16, np.uint8), gpu.cupy.zeros(bandwidth.BLOCKS, np.uint32)
    function = build(bandwidth.read_once(), gpu.device.arch)
    beside = stream()

    def meanwhile(number):
        if number % 3 == 0:
            launch(function, BandwidthArgs(data.data.ptr, out.data.ptr, words), beside)

    found = many_tokens(gpu, size, meanwhile=meanwhile)
    synchronize(beside)
    assert_same(found, expected, "beside another stream")


@pytest.mark.gpu
@pytest.mark.parametrize("size", TINY)
def test_delayed_layers_are_right(gpu, size):
    for position in (48, 700, 4100):
        Case(model(gpu, size), position).check(patched(SHAPES[size], delays=True))


# --- what would be noticed


@pytest.mark.gpu
def test_old_values_would_be_taken(gpu):
    """The control of clearing before the launch: what is polled for must not look as if it had come."""
    with tells():
        Case(model(gpu, "7b-tiny"), 100, fill=0).check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", KEPT)
def test_values_of_the_layer_before_would_be_taken(gpu, name):
    """Of each array that is not cleared in the launch: the residual tells, whatever lies there in the end."""
    dims = SHAPES["7b-tiny"]
    case = Case(model(gpu, "7b-tiny"), 700)
    expected = case.expected().end[-1]
    assert twin.distance(case.run(patched(dims, delays=True)).residual, expected) < 1
    with tells():
        found = case.run(patched(dims, KEPT[name], delays=True))
        assert twin.distance(found.residual, expected) < 1


def again(call, to):
    return call, f"{to} {call}"


# Pages whose copies begin when they are to be read.
ON_TIME = (
    ("    copies.send_first(a, shared, 0);\n", ""),
    ("if (i + 1 < a.layers) copies.send_first(a, shared, i + 1);", ""),
    again("attend(a, shared, copies, i, page_parity);", "copies.send_first(a, shared, i);"),
)
PART = "part.number * (c.phase != "  # none, in one phase
WAITS = {part: f"barrier_wait(&shared.{part}_full[warp], parity, a.fault, KERNEL_ATTENTION, layer);" for part in "kv"}

# Each with the position where it shows, and replacements.
WRONG = {
    "results not waited for": (700, ("if (__all_sync(0xffffffffu, ready)) return false;", "return false;")),
    "without itself": (50, ("if (g > last) s", "if (g >= last) s")),
    "without itself, upper keys": (60, ("if (g + 8 > last) s", "if (g + 8 >= last) s")),
    "one beyond": (34, ("if (g > last) s", "if (g > last + 1) s")),
    "garbage behind the token": (50, ("if (span.tail()) {  // values", "if (false) {  // values")),
    "a page left out": (1000, ("begin = place.span * pages / spans,", "begin = place.span * pages / spans + 1,")),
    "another page": (700, ("__ldcg(table + span.first - i)", "__ldcg(table + max_int(span.first - i - 1, 0))")),
    "another page for the token": (50, ("__ldcg(table + first) : -1", "__ldcg(table + first - 1) : -1")),
    "not appended": (50, ("span.page < 0 ? nullptr : cached, span.own, in.dim, x", "nullptr, span.own, in.dim, x")),
    "no bias": (50, ("x[half] = unpacked(bias[half]);", "x[half] = unpacked(make_uint2(0u, 0u));")),
    "another layer's bias": (50, ("a.bias[i], x, polling", "a.bias[0], x, polling")),
    "another layer's pages": (50, (": a.k_pages[i]) + from", ": a.k_pages[0]) + from")),
    "the input norm of the layer before": (50, ("load_norm(a.input_norm[i + 1])", "load_norm(a.input_norm[i])")),
    "another layer's post norm": (50, ("load_norm(a.post_norm[i])", "load_norm(a.post_norm[0])")),
    "a norm's mean": (50, ("sum * (1.0f / HIDDEN)", "sum * (1.01f / HIDDEN)")),
    "the other way round": (50, ("lo.x * cosine.x - hi.x * sine.x", "lo.x * cosine.x + hi.x * sine.x")),
    "turns in float": (32_767, ("return float(turns - rint(turns));", "return float(turns);")),
    "no weight of a page": (16_383, ("factor[n] = exp2_fast(top[n] - largest);", "factor[n] = 1.0f;")),
    "no weight of a warp": (700, ("exp2_fast(one.x - all.x), exp2_fast(one.z - all.z)", "1.0f, 1.0f")),
    "no weight of a span": (700, ("weight = exp2_fast(other - larger) * ", "weight = ")),
    "no weight of the spans before": (4100, ("factor = exp2_fast(top - larger)", "factor = 1.0f")),
    "no weight of a set of spans": (
        700,
        ("const float weight = exp2_fast(of[s].x - largest)", "const float weight = 1.0f"),
    ),
    "a span left out": (700, ("from + n * SETS + set < spans)", "from + n * SETS + set < spans - 1)")),
    "o_proj's columns of another part": (50, ("part.number) * groups + group", f"{PART}O_PROJ)) * groups + group")),
    "down's columns of another part": (50, ("part.number) * groups + group", f"{PART}DOWN)) * groups + group")),
    "inner's columns of another part": (50, ("part.number * DOWN_COLUMNS", "part.number % 1")),
    "a piece of o_proj left out": (50, ("there(int, int) { return true; }", "there(int, int n) { return n > 0; }")),
    "a piece of down left out": (50, ("PARTS < DownSplit::of_row(row)", "PARTS < DownSplit::of_row(row) - 1")),
    "a part's pieces of down left out": (50, ("PARTS < DownSplit", "PARTS < (number % PARTS > 0) * DownSplit")),
    "pieces that not all lanes add": (50, ("offset = ACROSS; offset < WARP;", "offset = ACROSS; offset < WARP / 2;")),
    "a sum forgotten": (50, ("shared.x[q] = x;", ";")),
    "down as it is": (50, ("HIDDEN, 1.0f / INNER_SCALE,", "HIDDEN, 1.0f,")),
    "units that there are not": (50, ("counts = unit + t < block.units", "counts = true")),
    "units of the next tile": (50, ("sums + (tile + 1) * TILE_ROWS", "sums + tile * TILE_ROWS")),
    "half of a quad": (50, ("offset = 1; offset < 4;", "offset = 1; offset < 2;")),
    "silu of another sign": (50, ("silu(gate) * up", "gate / (1.0f + __expf(gate)) * up")),
}
# That show where warps come late: barriers that are missing.
EARLY = {
    "sums of warps": "        meet();  // every warp's sums are there, and none needs the token\n",
    "the norm's token": "        meet();  // all of the token is there\n",
    "queries": "    meet();  // queries, and this token's key and value, are there\n",
    "warps that attend": "    meet();  // all warps' sums are there\n",
    "sets of spans": "    meet();  // all sets' sums are there\n",
}
IN_PARTS = {why for why in WRONG if "part" in why or "a piece of o_proj" in why}  # show where columns are in parts


def check_wrong(gpu, size, position, right, wrong):
    """What `right` replaces is right, and noticed with `wrong` as well."""
    most = FAR if position >= LONG else LONG
    case = Case(model(gpu, size, 2 if most == FAR else None, most), position)
    case.check(right)
    with tells():
        for _ in range(3):  # a race may go well
            case.check(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_kernel_is_noticed(gpu, why):
    position, *pairs = WRONG[why]
    size = "32b-tiny" if why in IN_PARTS else "7b-tiny"
    check_wrong(gpu, size, position, None, patched(SHAPES[size], *pairs))


@pytest.mark.gpu
@pytest.mark.parametrize("why", EARLY)
def test_a_missing_barrier_is_noticed(gpu, why):
    dims = SHAPES["7b-tiny"]
    wrong = patched(dims, (EARLY[why], ""), delays=True)
    check_wrong(gpu, "7b-tiny", 700, patched(dims, delays=True), wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("part", WAITS)
def test_a_page_that_is_not_waited_for_is_noticed(gpu, part):
    """A tail page, those of a span, and those that come in turns."""
    dims = SHAPES["7b-tiny"]
    for position in (12, 700, 16_383):
        check_wrong(gpu, "7b-tiny", position, patched(dims, *ON_TIME), patched(dims, *ON_TIME, (WAITS[part], "")))


# --- without a GPU


def test_replacements_have_their_places():
    """Each control's, in the source as it is now; and it compiles."""
    dims = SHAPES["32b-tiny"]
    kernel = family.layers(dims)
    found = [patched(dims, *pairs) for _, *pairs in WRONG.values()]
    found += [patched(dims, (old, ""), delays=True) for old in EARLY.values()]
    found += [patched(dims, *ON_TIME, (wait, "")) for wait in WAITS.values()]
    found += [patched(dims, *KEPT.values()), patched(dims, delays=True)]
    texts = {text for _, text in found}
    assert len(texts) == len(found)
    jit.compile_kernel(kernel, patch=found[-1])


@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_fit(size):
    dims = SHAPES[size]
    assert family.fits(dims)
    assert family.kernels(dims) == [family.layers(dims)]
    assert dims.kv_heads % family.parts(dims) == 0
    assert family.spans(dims) * dims.kv_heads <= 132


@pytest.mark.parametrize("dims", [*ODD.values(), SHAPES["0.5b-tiny"]])
def test_sizes_that_do_not(dims):
    assert not family.fits(dims)
    assert family.kernels(dims) == []
    with pytest.raises(ValueError, match="without work in a phase"):
        family.layers(dims)
