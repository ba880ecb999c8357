"""All layers of a Qwen2 model's token in one launch: kernels_cu/qwen2_layers.cu."""

from cuq1.cuda.abi import Qwen2LayersArgs
from cuq1.cuda.kernels.qwen2_gemv import common
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.kernel import Kernel
from cuq1.plan.qwen2_dims import GROUP, PAGE, TILE, UNIT_BYTES, Qwen2Dims, padded, pieces, tiles

WARPS = 16  # that multiply
BATCH = 4  # units that a warp multiplies together
UNITS = 32  # of a stage of the ring
TEAMS = WARPS * BATCH // UNITS  # of warps, which take turns with stages
MAX_STAGES = 5
# Stages that may be on their way at once: in the MLP, in q, k, v and o_proj, and while others' results are awaited.
AHEAD, MIDST, EARLY = 3, 1, 1
LEAST_AHEAD = 2  # where the ring has no room for more
SPACING = 960  # ns between a block's stages in the MLP: all blocks' together are 4.65 TB/s, just above an H200's memory
SLACK = 1000  # ns that a block which was slow may catch up
SLOTS, LONG_SLOTS = 4, 8  # pages that a block holds at once, at the most, each a warp's: the second in a long context
SPAN_PAGES = 4  # of a block in attention, where there are blocks enough
MAX_SPANS = 33  # of a KV head's positions
AT_ONCE = 3  # spans whose results a thread waits for together
PARTS = 4  # of o_proj's and down's columns, at the most
SHARED = 232448  # bytes that a block may have
STATISTICS = 64  # bytes behind a partial result's halves: eight queries' maximum and sum


def parts(dims: Qwen2Dims) -> int:
    """Parts of o_proj's and down's columns, each some KV heads' queries, that blocks share out; 0 where these are no
    whole groups."""
    groups = dims.q_width / GROUP, padded(dims.inner) // GROUP
    fit = (n for n in (4, 2, 1) if n <= min(PARTS, dims.kv_heads) and dims.kv_heads % n == 0)
    return next((n for n in fit if all(count % n == 0 and count // n >= BATCH for count in groups)), 0)


def spans(dims: Qwen2Dims) -> int:
    """The most blocks that share a KV head's positions."""
    return min(MAX_SPANS, MULTIPROCESSORS // parts(dims) // (dims.kv_heads // parts(dims)))


def record_bytes(dims: Qwen2Dims) -> int:
    """Of a partial result of attention."""
    return dims.group * dims.head_size * 2 + STATISTICS


def down_pieces(dims: Qwen2Dims) -> int:
    """The most blocks of a part that share a tile of down's columns of it."""
    return pieces(dims.hidden, padded(dims.inner) // parts(dims), MULTIPROCESSORS // parts(dims))


def handed(dims: Qwen2Dims) -> dict[str, int]:
    """Bytes of what blocks hand to one another, by the names of the arguments: NOT_READY before a launch."""
    row = dims.hidden * 4
    return {
        "qkv_pieces": pieces(dims.qkv_rows, dims.hidden) * dims.qkv_rows * 4,
        "partials": dims.kv_heads * spans(dims) * record_bytes(dims),
        "o_pieces": parts(dims) * row,
        "rows_handed": 4 * row,
        "inner": 2 * padded(dims.inner) * 2,
        "down_pieces": 2 * parts(dims) * down_pieces(dims) * row,
    }


def fits(dims: Qwen2Dims) -> bool:
    """Whether a model's layers can be one launch: every block adds up some of the residual's columns, which is how
    blocks hear of each other, and has units of q, k and v; o_proj's and down's columns can be shared out, those of a
    part among a block's threads; there is a block for each KV head; and the ring has room for enough stages."""
    groups = dims.hidden // GROUP
    enough = dims.hidden // 4 >= MULTIPROCESSORS and tiles(dims.qkv_rows) * groups >= MULTIPROCESSORS
    whole = dims.hidden % GROUP == 0 and groups >= BATCH and dims.group <= 8 and parts(dims) > 0
    if not enough or not whole or dims.q_width // parts(dims) > WARPS * 32 * 8 or spans(dims) == 0:
        return False
    return all(_rooms(dims, slots)[1] >= _least() for slots in (SLOTS, LONG_SLOTS))


def short_positions(dims: Qwen2Dims) -> int:
    """Positions up to which every page of a span has a place of its own in the form for short contexts, where there is
    room for SLOTS of them; beyond, and elsewhere, pages take turns."""
    return spans(dims) * SLOTS * PAGE


def layers(dims: Qwen2Dims, *, short: bool = False) -> Kernel:
    """residual_out float32 [hidden] = residual float32 [hidden] behind a run of layers; K and V of the position.

    args: at most QWEN2_LAYERS layers' weights, norms, biases and pages, in order. What blocks hand to one another
    (`handed`) must be NOT_READY in every word, 0xffffffff; rows_handed, inner and down_pieces are not in the end. All
    blocks have to be resident together: the GPU must have MULTIPROCESSORS of them. Right for any position; short: with
    more room for weights and less for pages. Twin: tests' `qwen2_layers`.
    ValueError for a model that does not fit.
    """
    if not fits(dims):
        raise ValueError(f"these sizes leave a block without work in a phase, cut groups, or are too large: {dims}")
    slots, stages = _rooms(dims, SLOTS if short else LONG_SLOTS)
    smem = _fixed_smem(dims, slots) + stages * UNITS * UNIT_BYTES
    merging = dims.kv_heads // parts(dims) * dims.group * dims.head_size // 8  # threads that have all columns of a part
    rounds = -(-spans(dims) // (WARPS * 32 // merging))
    own = (
        ("GROUP", dims.group),
        ("WARPS", WARPS),
        ("STAGE_UNITS", UNITS),
        ("STAGES", stages),
        ("AHEAD", min(AHEAD, stages - TEAMS)),
        ("MIDST", MIDST),
        ("EARLY", EARLY),
        ("SPACING", SPACING),
        ("SLACK", SLACK),
        ("TOKEN", "Digits"),
        ("SLOTS", slots),
        ("AT_ONCE", min(AT_ONCE, rounds)),
        ("SPAN_PAGES", SPAN_PAGES),
        ("SPANS", spans(dims)),
        ("PARTS", parts(dims)),
        ("DOWN_PIECES", down_pieces(dims)),
        ("SMEM", smem),
    )
    return Kernel(
        "qwen2_layers.cu",
        "qwen2_layers",
        Qwen2LayersArgs,
        (*(d for d in common(dims) if d[0] not in ("O_PIECES", "DOWN_PIECES")), *own),
        (MULTIPROCESSORS, 1, 1),
        (WARPS + 4) * 32,
        smem=smem,
        max_registers=112,
    )


_BARRIERS = 1280  # bytes, with what the block has, and what aligns them


def _least() -> int:
    """Stages of the ring, so that none is taken for an older one (kernels_cu/common/layers_block.cuh)."""
    return LEAST_AHEAD + TEAMS


def _token_bytes(k: int) -> int:
    return padded(k) // GROUP * (2 * GROUP + 16)


def _rooms(dims: Qwen2Dims, slots: int) -> tuple[int, int]:
    """Places for pages, so many at the most, and stages of the ring: enough of these come first."""
    while True:
        stages = min(MAX_STAGES, (SHARED - _fixed_smem(dims, slots)) // (UNITS * UNIT_BYTES))
        if stages >= _least() or slots == 1:
            return slots, stages
        slots -= 1


def _fixed_smem(dims: Qwen2Dims, slots: int) -> int:
    """All but the ring: kernels_cu/qwen2_layers.cu's Shared."""
    most = MULTIPROCESSORS
    turns = max(slots * 2 * PAGE * dims.head_size * 2, WARPS * 32 * 40, _token_bytes(padded(dims.inner) // parts(dims)))
    token = max(_token_bytes(max(dims.hidden, dims.q_width // parts(dims))), dims.head_size // 16 * 33 * 16)

    def touched(rows: int, k: int, blocks: int) -> int:
        groups = padded(k) // GROUP
        return (-(-tiles(rows) * groups // min(blocks, tiles(rows) * groups)) + groups - 2) // groups + 1

    sums = max(
        touched(dims.qkv_rows, dims.hidden, most),
        touched(dims.hidden, padded(dims.inner) // parts(dims), most // parts(dims)),
        -(-dims.gate_up_tiles // most),
        -(-tiles(dims.hidden) // (most // parts(dims))),
    )
    return (
        turns
        + token
        + WARPS * sums * TILE * 4
        + slots * 64
        + dims.head_size * 4
        + WARPS * 4
        + -(-dims.hidden // 4 // most) * 16
        + _BARRIERS
    )


def kernels(dims: Qwen2Dims) -> list[Kernel]:
    """All of the family that the model's sizes allow."""
    return [layers(dims, short=short) for short in (False, True)] if fits(dims) else []
