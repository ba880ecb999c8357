"""All layers of a Qwen2 token in one launch against the twin, and against itself: split, repeated, and disturbed."""

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
from tests.kernels.qwen2_layers_patches import (
    EARLY,
    FEW_POLLS,
    IN_PARTS,
    KEPT,
    LATE_PAGES,
    MISSING,
    NOT_WAITED_FOR,
    SAME_ENTRIES,
    TURNS,
    WRONG,
    patched,
)
from tests.kernels.qwen2_shapes import ODD
from tests.kernels.twins import qwen2_layers as twin

SIZES = {  # with layers
    "7b-tiny": 4, "32b-tiny": 3, "four-parts": 3, "1.5b-tiny": 3, "14b-tiny": 3,
    "0.5b": 3, "1.5b": 2, "3b": 2, "7b": 2, "14b": 2, "32b": 2,
}  # fmt: skip
TINY = ("7b-tiny", "32b-tiny", "four-parts")  # columns whole, in two parts, and in four
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
    assert family.short_positions(dims) == family.spans(dims) * 64
    step, most = family.SPAN_PAGES * PAGE, family.spans(dims)
    counts = (1, 2, 3, most // 2, most - 1, most, most + 1, 2 * most)
    return sorted({count * step + off for count in counts for off in (-1, 0, 1) if count * step + off < LONG})


# --- what a launch leaves


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_layers(gpu, size):
    """Either form is right for any position."""
    for position in (0, 16, 65, 1000, 4100):
        for short in (False, True):
            Case(model(gpu, size), position, short=short).check()


@pytest.mark.gpu
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("size", TINY)
def test_lengths(gpu, size, short):
    """Partial pages."""
    for position in (*range(18), 31, 32, 33, *range(63, 66), *range(511, 514), 575, 576, 1000, *LATE):
        Case(model(gpu, size), position, short=short).check()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*TINY, "0.5b", "7b", "14b"])
def test_spans(gpu, size):
    for position in borders(SHAPES[size]):
        for short in (False, True):
            Case(model(gpu, size), position, short=short).check()


@pytest.mark.gpu
def test_far(gpu):
    """RoPE's angles are of thousands of turns; a span's pages come in many turns."""
    for position in (8191, 16_383, 32_752, 32_767):
        Case(model(gpu, "7b-tiny", 2, FAR), position).check()


@pytest.mark.gpu
@pytest.mark.parametrize("short", [False, True])
def test_more_pages_than_entries_that_a_warp_keeps(gpu, short):
    """A warp keeps 32 entries of the page table: here it has pages for one more, and for a few."""
    dims = SHAPES["many-heads"]
    slots = dict(family.layers(dims, short=short).defines)["SLOTS"]
    first = family.spans(dims) * 32 * slots * PAGE
    whole = Model(gpu, dims, 2, first + 700)
    for position in (first - 1, first, first + 699):
        Case(whole, position, short=short).check()
    with tells():
        Case(whole, first, short=short).check(patched(SAME_ENTRIES))


@pytest.mark.gpu
@pytest.mark.parametrize("size", TINY)
def test_any_number_of_layers(gpu, size):
    for layers in (1, 2, 7):
        for position in (3, 700):
            Case(model(gpu, size, layers, 1000), position).check()


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_steps_of_layers(gpu, size):
    """Each from what the launch itself has stored for it, which a kernel that clears nothing leaves."""
    many = (0, 15, 16, 130, 1000, family.short_positions(SHAPES[size]) + 5, 4100)
    for layers, changes, positions in ((1, KEPT, many), (2, TURNS, (0, 130, 1000))):
        patch = patched(*changes.values())
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
    gpu.run(case.kernel, case.arguments(handed, residual_out=case.buffers["residual"]))
    assert_same(case.buffers["residual"].get(), expected.residual, "residual")


@pytest.mark.gpu
@pytest.mark.parametrize("size", TINY)
def test_two_launches_are_one(gpu, size):
    """Of a model that has more layers than a launch takes: the second one has memory of its own to hand over in."""
    whole = model(gpu, size)
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
            function = build(case.kernel, gpu.device.arch)
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


@pytest.mark.gpu
@pytest.mark.parametrize("what", MISSING)
def test_what_never_comes_ends_the_launch(gpu, what):
    """With the layer, and the phase that waited for it."""
    case = Case(model(gpu, "7b-tiny"), 700)
    case.check(patched(FEW_POLLS))
    phase, layers, missing = MISSING[what]
    numbers = "|".join(str(FIRST + layer) for layer in layers)
    with pytest.raises(DeviceError, match=rf"a result that did not arrive in ({phase}), layer ({numbers})\b"):
        case.run(patched(FEW_POLLS, missing))


# --- the same again


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*TINY, "0.5b", "7b"])
def test_equal_inputs_give_equal_bits(gpu, size):
    for position in (37, 4100):
        case = Case(model(gpu, size), position)
        first = case.run()
        for _ in range(5):
            case.run().same(first)


TOKENS = ((7, 17), (301, 64), (7, 511), (99, 512), (100, 1000), (499, 2113), (7, 4096))  # and their positions
LAUNCHES = 200


def many_tokens(gpu, size, patch=None, meanwhile=lambda _: None, *, short=False):
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
        build(family.layers(SHAPES[size], short=short), gpu.device.arch, patch),
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
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("size", TINY)
def test_blocks_and_warps_may_be_late(gpu, size, short):
    """The same bits, whoever is late: with delays, and without."""
    expected = many_tokens(gpu, size, short=short)
    found = many_tokens(gpu, size, patched(delays=True), short=short)
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
@pytest.mark.parametrize("size", [*TINY, "7b"])
def test_delayed_layers_are_right(gpu, size):
    for position in (48, 700, 4100):
        Case(model(gpu, size), position).check(patched(delays=True))


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
    case = Case(model(gpu, "7b-tiny"), 700)
    expected = case.expected().end[-1]
    assert twin.distance(case.run(patched(delays=True)).residual, expected) < 1
    with tells():
        found = case.run(patched(KEPT[name], delays=True))
        assert twin.distance(found.residual, expected) < 1


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
    check_wrong(gpu, size, position, None, patched(*pairs))


@pytest.mark.gpu
@pytest.mark.parametrize("why", EARLY)
def test_a_missing_barrier_is_noticed(gpu, why):
    wrong = patched((EARLY[why], ""), delays=True)
    check_wrong(gpu, "7b-tiny", 700, patched(delays=True), wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("part", NOT_WAITED_FOR)
def test_a_page_that_is_not_waited_for_is_noticed(gpu, part):
    """A tail page, those of a span, and those that come in turns."""
    for position in (12, 700, 16_383):
        check_wrong(
            gpu, "7b-tiny", position, patched(*LATE_PAGES[part]), patched(*LATE_PAGES[part], *NOT_WAITED_FOR[part])
        )


# --- without a GPU


def test_replacements_have_their_places():
    """Each control's, in the source as it is now; and it compiles."""
    found = [patched(*pairs) for _, *pairs in WRONG.values()]
    found += [patched((old, ""), delays=True) for old in EARLY.values()]
    found += [patched(*LATE_PAGES[part], *late) for part, late in NOT_WAITED_FOR.items()]
    found += [patched(FEW_POLLS, missing) for *_, missing in MISSING.values()]
    found += [patched(SAME_ENTRIES), patched(*KEPT.values()), patched(delays=True)]
    texts = {text for _, text in found}
    assert len(texts) == len(found)
    jit.compile_kernel(family.layers(SHAPES["32b-tiny"]), patch=found[-1])


@pytest.mark.parametrize("size", [*SIZES, "many-heads"])
def test_sizes_that_fit(size):
    dims = SHAPES[size]
    assert family.fits(dims)
    assert family.kernels(dims) == [family.layers(dims, short=short) for short in (False, True)]
    assert dims.kv_heads % family.parts(dims) == 0
    assert family.spans(dims) * dims.kv_heads <= 132


# More columns of a part than the block's threads take; too little room for a ring; a row of o_proj that ends within a
# group; more KV heads than blocks.
LARGE = {"hidden": 8192, "q_heads": 64, "kv_heads": 8, "head_size": 128, "inner": 29568}
HUGE = {**LARGE, "hidden": 32768, "q_heads": 16, "kv_heads": 4, "inner": 131072}
CUT = {"q_heads": 11, "kv_heads": 11, "head_size": 64}
HEADS = {**LARGE, "hidden": 8704, "q_heads": 136, "kv_heads": 136, "head_size": 64, "inner": 1024}


@pytest.mark.parametrize(
    "dims",
    [*ODD.values(), SHAPES["0.5b-tiny"], *(replace(SHAPES["7b"], **sizes) for sizes in (LARGE, HUGE, CUT, HEADS))],
)
def test_sizes_that_do_not(dims):
    assert not family.fits(dims)
    assert family.kernels(dims) == []
    with pytest.raises(ValueError, match="without work in a phase"):
        family.layers(dims)
