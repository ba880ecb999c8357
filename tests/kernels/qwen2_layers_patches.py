"""Replacements in the source of qwen2_layers, which its tests are to notice; and delays, which are to change nothing.

Each is (old, new), and old is short: of what it changes, and of little else.
"""

import re

from tests.kernels import qwen2_attend_patches
from tests.kernels.harness import inclusion, replaced
from tests.paths import ROOT

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
    "phase_resumed", "phase_ended", "await_clearing", "entered", "merge", "Row::enter", "take_inner",
    "stream\\.multiply", "const int unit = k", "store_pieces", "store_o", "store_inner",
    "if \\(threadIdx\\.x < WARP\\)",  # adds up
    "const Input in", "softmax\\.end", "shared\\.merge\\.sums\\[0\\]", "float sum = 0",  # before what is shared
    "barrier_wait\\(&shared\\.entered", "__threadfence",  # before and behind clearing
)  # fmt: skip
PLACES = re.compile(rf"^(?= +(?:{'|'.join(CALLS)})\W)", re.MULTILINE)


def delayed(text):
    """The source with delays of random length, warp by warp, about every phase and what is stored and cleared there."""
    before, own = BEGIN.split(text)
    pieces = PLACES.split(own)
    for call in CALLS:
        assert any(re.match(rf" +{call}", piece) for piece in pieces[1:]), f"no place for delays: {call}"
    return before + DELAYS + pieces[0] + "".join(f"delay({i}); {piece}" for i, piece in enumerate(pieces[1:]))


OWN = re.compile(r'#include "(common/(?:layers_\w+|qwen2_attend)\.cuh)"')


def inlined(text, seen):
    """The source with the headers that are its own in the places of their includes."""

    def header(found):
        if found[1] in seen:
            return ""
        seen.add(found[1])
        return inlined(inclusion(found[1])[1], seen)

    return OWN.sub(header, text)


def patched(*pairs, delays=False):
    """A patch for Gpu.run of several replacements, in the source or its own headers; ValueError for one that fits
    nowhere, or in several places."""
    whole = (ROOT / "kernels_cu/qwen2_layers.cu").read_text()
    text = replaced(inlined(whole, set()), *pairs)
    return whole, delayed(text) if delays else text


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


# Pages whose copies begin when they are to be read.
SEND = "void send_first(const Qwen2LayersArgs& a, Shared& shared, int i) {"
ON_TIME = (
    (SEND, f"{SEND}}}\n__device__ __forceinline__ {SEND.replace('first', 'late')}"),
    ("attend(a, shared, copies, i,", "copies.send_late(a, shared, i); attend(a, shared, copies, i,"),
)
PART = "part.number * (phase != "  # none, in one phase
# Entries of the page table that a warp has had already.
SAME_ENTRIES = (
    "known = entry(a.page_table, shared.span, known_from + int",
    "known = entry(a.page_table, shared.span, int",
)
WAITS = {part: f"barrier_wait(&shared.{part}_full[warp], parity, a.fault, KERNEL_ATTENTION, layer);" for part in "kv"}
# The same, and values only when keys have been waited for, behind which they would be there in any case.
LATE_PAGES = {
    "k": ON_TIME,
    "v": (
        *ON_TIME,
        ("        send(a, shared, i, 0, true);\n", ""),
        (WAITS["v"], f"if (turn == 0) copies.send(a, shared, i, 0, true); {WAITS['v']}"),
    ),
}
# A wait for a page behind its reads, so that none is on its way when the next one is sent, or the block ends.
BEHIND = {"k": "const bool more = page + SLOTS", "v": "parity ^= 1;\n            if (more)"}
NOT_WAITED_FOR = {part: ((wait, ""), (BEHIND[part], f"{wait} {BEHIND[part]}")) for part, wait in WAITS.items()}

NEXT = "(i + 1) % a.layers"
# Each with the position where it shows, and replacements.
WRONG = {
    "results not waited for": (700, ("if (__all_sync(0xffffffffu, ready)) return false;", "return false;")),
    **qwen2_attend_patches.WRONG,
    "one beyond": (34, ("if (g > last) s", "if (g > last + 1) s")),
    "garbage behind the token": (
        50,
        ("PAGE_BYTES + at) = make_uint4(0u, 0u", "PAGE_BYTES + at) = make_uint4(0x7e007e00u, 0u"),
    ),
    "a page left out": (1000, ("begin = place.span * pages / spans,", "begin = place.span * pages / spans + 1,")),
    "another page": (700, ("__ldcg(table + span.first - i)", "__ldcg(table + max_int(span.first - i - 1, 0))")),
    "another page for the token": (50, ("__ldcg(table + first) : -1", "__ldcg(table + first - 1) : -1")),
    "not appended": (50, ("span.page < 0 ? nullptr : cached, span.own, in.dim, x", "nullptr, span.own, in.dim, x")),
    "no bias": (50, ("x[half] = unpacked(bias[half]);", "x[half] = unpacked(make_uint2(0u, 0u));")),
    "another layer's bias": (50, ("a.bias[i], x, polling", "a.bias[0], x, polling")),
    "another layer's keys": (50, (": a.k_pages[i]) + from", f": a.k_pages[{NEXT}]) + from")),
    "another layer's values": (50, ("(values ? a.v_pages[i] :", f"(values ? a.v_pages[{NEXT}] :")),
    "another layer's input norm": (50, ("a.input_norm[i], polling", "a.input_norm[0], polling")),
    "another layer's post norm": (50, ("a.post_norm[i], polling", "a.post_norm[0], polling")),
    "a norm's mean": (50, ("sum * (1.0f / HIDDEN)", "sum * (1.01f / HIDDEN)")),
    "no weight of a page": (16_383, ("factor[n] = exp2_fast(top[n] - largest);", "factor[n] = 1.0f;")),
    "no weight of a warp": (700, ("exp2_fast(one.x - all.x), exp2_fast(one.z - all.z)", "1.0f, 1.0f")),
    "no weight of a span": (700, ("weight = exp2_fast(other - larger) * ", "weight = ")),
    "no weight of the spans before": (4100, ("factor = exp2_fast(top - larger)", "factor = 1.0f")),
    "no weight of a set of spans": (700, ("weight = exp2_fast(of[s].x - largest)", "weight = 1.0f")),
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
    "units that there are not": (50, ("scales = t < left ? ", "scales = true ? ")),
    "units held that do not count": (50, ("if (held) take(slot, left);", "if (held) take(slot, 1);")),
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


FEW_POLLS = ("POLLS = 1 << 20", "POLLS = 1 << 14")
STORE = "*reinterpret_cast<float4*>(out + column) ="
# A block's first word that never comes, and where it may be given up first: phases, and layers, from 0.
MISSING = {
    "q, k and v": (
        "attention|o_proj",
        (0,),
        ("out[at] = result(", "if (i > 0 || kernel != KERNEL_QKV) out[at] = result("),
    ),
    "a span": ("o_proj", (0,), ("if (threadIdx.x < HEAD_PIECES) rec", "if (threadIdx.x - 1u < HEAD_PIECES - 1u) rec")),
    "o_proj": ("gate_up", (0,), ("out[i] = result(", "if (i > 0) out[i] = result(")),
    "the row before the MLP": ("gate_up", (0,), (STORE, f"if (kernel != KERNEL_GATE_UP || q > 0) {STORE}")),
    "inner": ("down", (0,), ("out[at] = ready_half(", "if (at > 0) out[at] = ready_half(")),
    # By who adds up, or by those who wait for the next layer's row.
    "down": ("qkv", (0, 1), ("out[at] = result(", "if (i > 0 || kernel != KERNEL_DOWN) out[at] = result(")),
    "the row behind it": ("qkv", (1,), (STORE, f"if (kernel != KERNEL_QKV || q > 0) {STORE}")),
}
