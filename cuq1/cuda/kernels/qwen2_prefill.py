"""Prompt processing of Qwen2 models: a chunk of tokens at once on the tensor cores, from the INT4 weights of decoding.

Every function takes `rows`, the chunk's tokens, which decides the grid and nothing else: one compilation serves all.

Activations between these kernels are halves in the tiles of kernels_cu/common/activations.cuh, which
`tile_bytes` counts and tests/kernels/twins/qwen2_prefill.py reads.
"""

from cuq1.cuda.abi import (
    Qwen2PrefillAttentionArgs,
    Qwen2PrefillEmbedArgs,
    Qwen2PrefillGateUpArgs,
    Qwen2PrefillNormArgs,
    Qwen2PrefillProjectionArgs,
    Qwen2PrefillQkvArgs,
)
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.kernel import Define, Kernel
from cuq1.plan.qwen2_dims import GROUP, TILE, UNIT_BYTES, Qwen2Dims, padded

CHUNK = 2048  # tokens of a chunk, at most
ROW_STEP = 8  # rows of activations are kept in whole steps

_BLOCK_ROWS = 128  # weight rows of a block
_BLOCK_TOKENS = 128  # tokens of a block, at most
_LEAST_TOKENS = 32  # tokens of a block where there are few
_THREADS = 384  # two groups of four warps that multiply, and one of which a lane copies

Defines = tuple[tuple[str, Define], ...]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def tile_bytes(rows: int, width: int) -> int:
    """Of activations [rows, width] in tiles: `normed`, `attended`, `inner`."""
    return _ceil(rows, ROW_STEP) * ROW_STEP * padded(width) * 2


def _float(value: float) -> str:
    return f"{value!r}f"


def _heads(dims: Qwen2Dims) -> Defines:
    return (("Q_HEADS", dims.q_heads), ("KV_HEADS", dims.kv_heads), ("HEAD_SIZE", dims.head_size))


def _gemm(
    source: str, entry: str, args: type, out_rows: int, k: int, rows: int, *, stages: int, staged: int, defines: Defines
) -> Kernel:
    """A product of all weight rows and the chunk's tokens by blocks that take output tiles in turn."""
    weights = 2 * 4 * (_BLOCK_ROWS // TILE) * UNIT_BYTES  # two stages of four groups
    smem = stages * _BLOCK_TOKENS * GROUP * 2 + weights + staged + 128  # and the barriers
    tiles = _ceil(out_rows, _BLOCK_ROWS) * _ceil(rows, _LEAST_TOKENS)
    grid = (max(1, min(MULTIPROCESSORS, tiles)), 1, 1)
    sizes: Defines = (("OUT_ROWS", out_rows), ("K", padded(k)), ("STAGES", stages))
    return Kernel(source, entry, args, (*sizes, *defines), grid, _THREADS, smem=smem, max_registers=168)


def embed(dims: Qwen2Dims, rows: int = CHUNK) -> Kernel:
    """residual float32 [rows, hidden], and pages for the chunk's positions; twin: `embed`."""
    defines: Defines = (("HIDDEN", dims.hidden), ("VOCAB", dims.vocab), ("EPS", _float(dims.eps)))
    grid = (max(rows, 1), 1, 1)
    source = "qwen2_prefill_rows.cu"
    return Kernel(source, "qwen2_prefill_embed", Qwen2PrefillEmbedArgs, defines, grid, 256, max_registers=64)


def norm(dims: Qwen2Dims, rows: int = CHUNK, *, tiled: bool = True) -> Kernel:
    """normed float16 = rms(residual, norm), in tiles, or else as [rows, padded(hidden)]; twin: `norm`."""
    defines: Defines = (("HIDDEN", dims.hidden), ("VOCAB", dims.vocab), ("EPS", _float(dims.eps)))
    grid = (max(rows, 1), 1, 1)
    entry = "qwen2_prefill_norm" if tiled else "qwen2_prefill_norm_rows"
    return Kernel("qwen2_prefill_rows.cu", entry, Qwen2PrefillNormArgs, defines, grid, 256, max_registers=64)


def qkv(dims: Qwen2Dims, rows: int = CHUNK) -> Kernel:
    """q float16 [rows, q_heads, head_size], K and V into their pages, from normed in tiles; twin: `qkv`."""
    return _gemm(
        "qwen2_prefill_qkv.cu", "qwen2_prefill_qkv", Qwen2PrefillQkvArgs, dims.qkv_rows, dims.hidden, rows,
        stages=4, staged=64 * (_BLOCK_ROWS + 8) * 2, defines=_heads(dims),
    )  # fmt: skip


def attention(dims: Qwen2Dims, rows: int = CHUNK, *, split: bool | None = None) -> Kernel:
    """attended float16 [rows, q_width] in tiles, from q and the pages; twin: `attention`.

    split: blocks of 16 rows, among whose warps the keys are split, instead of 64; by default where those would leave
    multiprocessors idle. 16 rows and fewer are always split.
    """
    if split is None:
        split = _ceil(rows, 64) * dims.q_heads < MULTIPROCESSORS
    grid = (_ceil(max(rows, 1), 16 if split else 64), dims.q_heads, 1)
    smem = 2 * 2 * 64 * dims.head_size * 2  # two stages of 64 keys and values
    source = "qwen2_prefill_attention.cu"
    return Kernel(
        source, "qwen2_prefill_attention", Qwen2PrefillAttentionArgs, _heads(dims), grid, 128, smem=smem, min_blocks=2
    )


def _projection(dims: Qwen2Dims, k: int, rows: int) -> Kernel:
    return _gemm(
        "qwen2_prefill_projection.cu", "qwen2_prefill_projection", Qwen2PrefillProjectionArgs, dims.hidden, k, rows,
        stages=5, staged=0, defines=(),
    )  # fmt: skip


def o_proj(dims: Qwen2Dims, rows: int = CHUNK) -> Kernel:
    """residual float32 [rows, hidden] += scale * attended @ W.T, attended in tiles; twin: `projection`."""
    return _projection(dims, dims.q_width, rows)


def gate_up(dims: Qwen2Dims, rows: int = CHUNK) -> Kernel:
    """inner float16 [rows, inner] in tiles, INNER_SCALE * silu(gate) * up, from normed in tiles; twin: `gate_up`."""
    return _gemm(
        "qwen2_prefill_gate_up.cu", "qwen2_prefill_gate_up", Qwen2PrefillGateUpArgs, dims.gate_up_tiles * TILE,
        dims.hidden, rows, stages=4, staged=_BLOCK_TOKENS * _BLOCK_ROWS, defines=(),
    )  # fmt: skip


def down(dims: Qwen2Dims, rows: int = CHUNK) -> Kernel:
    """residual float32 [rows, hidden] += scale * inner @ W.T, inner in tiles; twin: `projection`."""
    return _projection(dims, dims.inner, rows)


def kernels(dims: Qwen2Dims) -> list[Kernel]:
    """All of a model's."""
    return [
        embed(dims),
        norm(dims),
        norm(dims, tiled=False),
        qkv(dims),
        attention(dims),
        o_proj(dims),
        gate_up(dims),
        down(dims),
    ]
