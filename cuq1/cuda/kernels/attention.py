"""Decode attention: of splits of a long sequence, and their combination; of a short one, in one launch."""

from cuq1.cuda.abi import AttentionArgs, CombineArgs, ShortAttentionArgs
from cuq1.cuda.kernels.defines import common
from cuq1.plan.dims import HEAD_DIM, KV_TILE, MULTIPROCESSORS, ROWS, Dims
from cuq1.plan.kernel import Kernel

UNIT = 16  # keys that blocks of a cluster are dealt
SHORT_CONTEXT = 17 * 16 * UNIT  # positions from 0 that a full layer's kernel for short contexts may see
_STAGES = 8  # of attention: keys or values of 64 positions
_WARPS = 4  # of a block of attention_short
WINDOWS = (0, 4096, 512, 256, 64)  # of the released model's layers and draft, then of nano's


def splits_for(dims: Dims, sms: int = MULTIPROCESSORS) -> int:
    """Splits of the sequence for each KV head: as many as fill the GPU."""
    return max(1, sms // dims.kv_heads)


def attention(dims: Dims, splits: int | None = None) -> Kernel:
    """Partials of softmax(scale q k^T) v over each split; with `combine`, twin: tests' `attended`.

    q: float16 [rows, q_heads, 128]; caches float16 [kv_heads, slots / 64, 64, 128]. Writes, for active splits and live
    rows, partial_out float32 [kv_heads, splits, ROWS * group, 128], the dimensions in the kernel's own order, and
    partial_max (in base 2) and partial_sum without the last axis. args.splits must be `splits` (default: `splits_for`).
    """
    splits = splits_for(dims) if splits is None else splits
    m_rows = -(-ROWS * dims.group // 16) * 16
    smem = _STAGES * KV_TILE * HEAD_DIM * 2 + m_rows * HEAD_DIM * 2 + 2 * m_rows * KV_TILE * 2  # and q, probabilities
    smem += 5 * m_rows * 4 + (2 * _STAGES + 1) * 8  # statistics, barriers
    defines = (*common(dims), ("STAGES", _STAGES), ("SMEM", smem))
    grid = (splits, dims.kv_heads, 1)
    return Kernel("attention.cu", "attention", AttentionArgs, defines, grid, 160, smem=smem, max_registers=208)


def combine(dims: Dims, splits: int) -> Kernel:
    """attended32 float32 and attended float16 [rows, q_heads * 128] of `splits` partials and the sink.

    Twin: tests' `attended`.
    """
    defines = (*common(dims), ("SPLITS", splits))
    return Kernel("combine.cu", "combine", CombineArgs, defines, (dims.q_heads, ROWS, 4), 256, max_registers=64)


def units_for(window: int) -> int:
    """Units of 16 keys that eight rows of a layer with this window see at most."""
    return (window + ROWS - 2 + UNIT - 1) // UNIT + 1


def attention_short(dims: Dims, window: int, rows: int = ROWS, cluster: int | None = None) -> Kernel:
    """attended32 float32 and attended float16 [rows, q_heads * 128] where the live rows see few positions.

    q: float16 [rows, q_heads, 128]; caches float16 [kv_heads, slots / 64, 64, 128]; sink_k float32 [kv_heads, 128].
    A full layer (window 0) may see `SHORT_CONTEXT` positions. cluster: blocks that share the keys, 8 or 16; by default
    what the window needs. Twin: tests' `attended`.
    """
    if cluster is None:
        cluster = 8 if 0 < window <= 512 else 16
    units = -(-(units_for(window) if window else SHORT_CONTEXT // UNIT) // cluster)
    tiles = _WARPS * 3  # of eight keys, that the block's warps compute together
    p_units = -(-2 * units // tiles) * tiles // 2
    smem = units * 2 * UNIT * HEAD_DIM * 2 + 16 * HEAD_DIM * 2 + 16 * (p_units * UNIT * 2 + 16)  # keys and values, q, p
    smem += 16 * HEAD_DIM * 4 + cluster * 16 * 8 + 2 * 16 * _WARPS * 4 + 32  # what blocks and warps exchange
    return Kernel(
        "attention_short.cu",
        "attention_short",
        ShortAttentionArgs,
        (*common(dims), ("WARPS", _WARPS), ("CLUSTER", cluster), ("UNITS", units), ("SMEM", smem)),
        (cluster, dims.kv_heads, -(-rows * dims.group // 16)),
        _WARPS * 32,
        cluster=cluster,
        smem=smem,
        max_registers=144,
    )


def kernels(dims: Dims) -> list[Kernel]:
    """All, for every window."""
    short = dict.fromkeys(attention_short(dims, window) for window in WINDOWS)
    return [attention(dims), combine(dims, splits_for(dims)), *short]
