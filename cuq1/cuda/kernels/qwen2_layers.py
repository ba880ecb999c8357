"""All layers of a Qwen2 model's token in one launch: kernels_cu/qwen2_layers.cu."""

from cuq1.cuda.abi import Qwen2LayersArgs
from cuq1.cuda.kernels.qwen2_gemv import common
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.kernel import Kernel
from cuq1.plan.qwen2_dims import GROUP, PAGE, TILE, UNIT_BYTES, Qwen2Dims, padded, tiles

WARPS = 16  # that multiply
UNITS = 2  # of a warp in a stage of the ring
MAX_STAGES = 4
AHEAD = 2  # stages that may be on their way at once
SLOTS = 7  # pages that a block holds at once, each a warp's
SPAN_PAGES = 4  # of a block in attention, where there are blocks enough
MAX_SPANS = 33  # of a KV head's positions
PARTS = 4  # of o_proj's columns, at the most
SHARED = 232448  # bytes that a block may have
STATISTICS = 64  # bytes behind a partial result's halves: eight queries' maximum and sum


def parts(dims: Qwen2Dims) -> int:
    """Parts of o_proj's columns, each some KV heads' queries, that blocks share out; 0 where they are no whole groups."""
    fit = (n for n in range(min(PARTS, dims.kv_heads), 0, -1) if dims.kv_heads % n == 0)
    return next((n for n in fit if dims.q_width % (n * GROUP) == 0), 0)


def spans(dims: Qwen2Dims) -> int:
    """The most blocks that share a KV head's positions."""
    return min(MAX_SPANS, MULTIPROCESSORS // parts(dims) // (dims.kv_heads // parts(dims)))


def record_bytes(dims: Qwen2Dims) -> int:
    """Of a partial result of attention."""
    return dims.group * dims.head_size * 2 + STATISTICS


def fits(dims: Qwen2Dims) -> bool:
    """Whether a model's layers can be one launch: every block has units of q, k and v, of gate and up, and of down,
    which is how blocks know that all have read what is cleared; and o_proj's columns can be shared out."""
    units = (tiles(dims.qkv_rows) * (padded(dims.hidden) // GROUP), tiles(dims.hidden) * (padded(dims.inner) // GROUP))
    enough = min(*units, dims.gate_up_tiles) >= MULTIPROCESSORS
    return enough and parts(dims) > 0 and dims.hidden % GROUP == 0 and dims.group <= 8


def layers(dims: Qwen2Dims) -> Kernel:
    """residual_out float32 [hidden] = residual float32 [hidden] behind a run of layers; K and V of the position.

    args: at most QWEN2_LAYERS layers' weights, norms, biases and pages, in order. qkv_pieces float32 [pieces, qkv_rows],
    partials [kv_heads, spans, record_bytes], o_pieces float32 [parts, hidden], inner float16 [padded inner] and
    down_pieces float32 [pieces, hidden] must be NOT_READY in every word, 0xffffffff; the last two are not in the end.
    All blocks have to be resident together: the GPU must have MULTIPROCESSORS of them. Twin: tests' `qwen2_layers`.
    ValueError for a model that does not fit.
    """
    if not fits(dims):
        raise ValueError(f"these sizes leave a block without work in a phase, or cut groups: {dims}")
    fixed = _fixed_smem(dims)
    stages = min(MAX_STAGES, (SHARED - fixed) // _STAGE_BYTES)
    own = (
        ("GROUP", dims.group),
        ("WARPS", WARPS),
        ("STAGE_UNITS", UNITS),
        ("STAGES", stages),
        ("AHEAD", min(AHEAD, stages)),
        ("TOKEN", "Digits"),
        ("SLOTS", SLOTS),
        ("SPAN_PAGES", SPAN_PAGES),
        ("SPANS", spans(dims)),
        ("PARTS", parts(dims)),
        ("SMEM", fixed + stages * _STAGE_BYTES),
    )
    return Kernel(
        "qwen2_layers.cu",
        "qwen2_layers",
        Qwen2LayersArgs,
        (*common(dims), *own),
        (MULTIPROCESSORS, 1, 1),
        (WARPS + 4) * 32,
        smem=fixed + stages * _STAGE_BYTES,
        max_registers=112,
    )


_STAGE_BYTES = WARPS * UNITS * UNIT_BYTES
_BARRIERS = 512  # bytes, with what the block has, and what aligns them


def _token_bytes(k: int) -> int:
    return padded(k) // GROUP * (2 * GROUP + 16)


def _fixed_smem(dims: Qwen2Dims) -> int:
    """All but the ring: kernels_cu/qwen2_layers.cu's Shared."""
    most = MULTIPROCESSORS
    turns = max(SLOTS * 2 * PAGE * dims.head_size * 2, WARPS * 32 * 40, _token_bytes(dims.inner))
    token = _token_bytes(max(dims.hidden, dims.q_width // parts(dims)))

    def touched(rows: int, k: int) -> int:
        groups = padded(k) // GROUP
        return (-(-tiles(rows) * groups // most) + groups - 2) // groups + 1

    sums = max(
        touched(dims.qkv_rows, dims.hidden),
        touched(dims.hidden, dims.inner),
        -(-dims.gate_up_tiles // most),
        -(-tiles(dims.hidden) // (most // parts(dims))),
    )
    queries = dims.head_size // 16 * 33 * 16
    return turns + token + WARPS * sums * TILE * 4 + queries + SLOTS * 64 + dims.head_size * 4 + WARPS * 4 + _BARRIERS


def kernels(dims: Qwen2Dims) -> list[Kernel]:
    """All of the family that the model's sizes allow."""
    return [layers(dims)] if fits(dims) else []
