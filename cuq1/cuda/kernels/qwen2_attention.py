"""Decode attention of Qwen2 models over pages: in one launch, or in splits of the sequence and their combination."""

from cuq1.cuda.abi import Qwen2AttentionArgs, Qwen2CombineArgs
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.kernel import Define, Kernel
from cuq1.plan.qwen2_dims import PAGE, Qwen2Dims, pieces

MAX_GROUP = 8  # query heads of a KV head: N of the MMA
_WARPS = 3  # that compute; one more copies
_STAGES = 6  # pages in a block: as many for each of those warps
_EARLY = 3  # of them, those that the long form copies before its predecessor ends
_REGISTERS = 88


def splits_for(dims: Qwen2Dims) -> int:
    """Splits of the sequence for each KV head in the long form: as many as fill the GPU, evenly shared by combine."""
    whole = 1
    while 2 * whole * dims.kv_heads <= MULTIPROCESSORS:
        whole *= 2
    return whole


def cluster_for(dims: Qwen2Dims) -> int:
    """Blocks of the short form that share a KV head.

    Of clusters of 16, a GPU holds seven at once beside the launches before and after.
    """
    return 16 if dims.kv_heads <= 4 else 8


def short_positions(dims: Qwen2Dims) -> int:
    """Positions up to which the short form is the faster one, as timed at 7B (decision 018)."""
    return 4096 if dims.kv_heads <= 4 else 1536


def attention_short(dims: Qwen2Dims) -> Kernel:
    """attended float16 [padded q_width], zeros beyond q_width, in one launch; appends K and V to their page.

    pieces: float32 [pieces, qkv_rows]; k_pages and v_pages: float16 [pages, kv_heads, PAGE, head_size], rows swizzled
    (kernels_cu/abi_qwen2.cuh). Right for any position; args.splits and partial_* are not used. Twin: tests'
    `qwen2.attention`. ValueError for more query heads of a KV head than MAX_GROUP.
    """
    return _attention(dims, "qwen2_attention_short", cluster_for(dims), cluster_for(dims))


def attention(dims: Qwen2Dims, splits: int | None = None) -> Kernel:
    """The same as partials, which `combine` finishes: partial_out float32 [kv_heads, splits, group, head_size],
    partial_max and partial_sum float32 [kv_heads, group, splits]. args.splits must be `splits` (default: splits_for).
    """
    return _attention(dims, "qwen2_attention", splits_for(dims) if splits is None else splits, 1)


def combine(dims: Qwen2Dims) -> Kernel:
    """attended float16 [padded q_width], zeros beyond q_width, of the partials of args.splits: splits_for at most."""
    grid = (dims.q_heads, dims.head_size // 32, 1)
    return Kernel("qwen2_attention.cu", "qwen2_combine", Qwen2CombineArgs, _defines(dims), grid, 256, max_registers=64)


def _attention(dims: Qwen2Dims, entry: str, blocks: int, cluster: int) -> Kernel:
    return Kernel(
        "qwen2_attention.cu",
        entry,
        Qwen2AttentionArgs,
        _defines(dims),
        (blocks, dims.kv_heads, 1),
        (_WARPS + 1) * 32,
        cluster=cluster,
        smem=_smem(dims),
        max_registers=_REGISTERS,
    )


def _smem(dims: Qwen2Dims) -> int:
    """Stages of a page's keys and values with their mbarriers, queries, and what warps and blocks exchange."""
    stage = 2 * PAGE * dims.head_size * 2 + 32
    exchanged = dims.head_size * 2 * 16 + cluster_for(dims) * 64 + _WARPS * 64 + 16
    return _STAGES * stage + dims.head_size // 16 * 528 + exchanged


def _defines(dims: Qwen2Dims) -> tuple[tuple[str, Define], ...]:
    if dims.group > MAX_GROUP or dims.group * dims.kv_heads != dims.q_heads:
        raise ValueError(
            f"{dims.q_heads} query heads and {dims.kv_heads} KV heads: attention takes 1 to {MAX_GROUP} of a KV head"
        )
    return (
        ("HIDDEN", dims.hidden),
        ("Q_HEADS", dims.q_heads),
        ("KV_HEADS", dims.kv_heads),
        ("GROUP", dims.group),
        ("HEAD_SIZE", dims.head_size),
        ("GEMV_BLOCKS", MULTIPROCESSORS),
        ("QKV_PIECES", pieces(dims.qkv_rows, dims.hidden)),
        ("WARPS", _WARPS),
        ("STAGES", _STAGES),
        ("CLUSTER", cluster_for(dims)),
        ("EARLY_PAGES", _EARLY),
        ("SPLITS", splits_for(dims)),
        ("SMEM", _smem(dims)),
        ("MIN_BLOCKS", 5),
    )


def kernels(dims: Qwen2Dims) -> list[Kernel]:
    """All of the family."""
    return [attention_short(dims), attention(dims), combine(dims)]
