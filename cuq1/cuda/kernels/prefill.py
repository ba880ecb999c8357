"""Prompt processing: a chunk of tokens at once on the tensor cores, from the weights as decoding reads them.

Every function takes `rows`, the chunk's tokens, which decides the grid and nothing else: one compilation serves all.
Activations are halves in every precision: FP8 activations are a decoding option, since here bytes don't decide.
"""

from dataclasses import replace
from math import gcd

from cuq1.cuda.abi import (
    PrefillAttentionArgs,
    PrefillCombineArgs,
    PrefillDownArgs,
    PrefillEntryArgs,
    PrefillGateUpArgs,
    PrefillGroupArgs,
    PrefillLinearArgs,
    PrefillMergeArgs,
    PrefillNormArgs,
    PrefillQkvArgs,
    PrefillRingArgs,
    PrefillRopeArgs,
    PrefillRouteArgs,
    PrefillRouterArgs,
)
from cuq1.cuda.kernels.defines import common
from cuq1.plan.dims import HEAD_DIM, KV_TILE, Dims
from cuq1.plan.kernel import Define, Kernel

CHUNK = 2048  # tokens of a chunk, at most
TILE_TOKENS = 64  # tokens of an expert that a block takes
MAX_SPLITS = 32  # of the keys, among blocks of attention

_ROWS = 128  # weight rows of a block
_TOKENS = 128  # tokens of a block of a projection
_STAGES = 4


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _gemm_smem(tokens: int, k: int, *, fp8: bool, scale_k: int) -> int:
    """PrefillGemm::SMEM of kernels_cu/common/prefill_gemm.cuh."""
    scaled = scale_k if fp8 else k
    step = next(n for n in (64, 32, 16) if scaled % n == 0)
    chunks = step // (32 if fp8 else 16)
    return _STAGES * (_ROWS // 16 * chunks * 512 + tokens * (step * 2 + 32))


def router_splits(dims: Dims) -> int:
    """Parts of K whose sums `route` adds: enough blocks for the GPU."""
    return next(n for n in (4, 2, 1) if dims.hidden % (n * 16) == 0 and dims.hidden // n >= 256)


def tiles_bound(dims: Dims, rows: int) -> int:
    """Tiles that `rows` tokens can fill, at most."""
    pairs = rows * dims.top_k
    return pairs // TILE_TOKENS + min(dims.experts, pairs)


def rope(dims: Dims, rows: int = CHUNK) -> Kernel:
    """table float32 [rows, rotary / 2, 2], cos and sin of each position; twin: cuq1.reference.ops.rope_tables."""
    grid = (max(1, _ceil(rows * dims.rotary // 2, 256)), 1, 1)
    return Kernel("prefill_qkv.cu", "prefill_rope", PrefillRopeArgs, common(dims), grid, 256, max_registers=48)


def qkv(dims: Dims, rows: int = CHUNK, *, kv_only: bool = False) -> Kernel:
    """q float16 [rows, q_heads, 128], and K and V into a cache; twin: tests/kernels/twins/prefill.py `qkv`.

    kv_only: keys and values alone (first_head = q_heads).
    """
    heads = 2 * dims.kv_heads + (0 if kv_only else dims.q_heads)
    smem = _gemm_smem(_TOKENS, dims.hidden, fp8=dims.fp8_attention, scale_k=128)
    grid = (heads, _ceil(rows, _TOKENS), 1)
    return Kernel("prefill_qkv.cu", "prefill_qkv", PrefillQkvArgs, common(dims), grid, 256, smem=smem)


def ring(dims: Dims, rows: int = CHUNK) -> Kernel:
    """Copies K and V of `rows` positions between a ring and the staging buffer; twin: `ring`."""
    grid = (_ceil(rows, 16), dims.kv_heads, 2)
    source = "prefill_attention.cu"
    return Kernel(source, "prefill_ring", PrefillRingArgs, common(dims), grid, 256, max_registers=40)


def splits_for(dims: Dims, rows: int, keys: int, multiprocessors: int) -> int:
    """Splits of the `keys` that a chunk of few rows sees: two blocks a multiprocessor, eight tiles at least in each."""
    blocks = _ceil(rows, 64) * dims.q_heads
    return max(1, min(2 * multiprocessors // blocks, keys // (8 * KV_TILE), MAX_SPLITS))


def attention(dims: Dims, rows: int = CHUNK, splits: int = 1) -> Kernel:
    """attended float16 [rows, q_heads * 128], or its parts; twin: tests/kernels/twins/prefill.py `attention`."""
    grid = (_ceil(rows, 64), dims.q_heads, splits)
    smem = 2 * 2 * KV_TILE * HEAD_DIM * 2
    source = "prefill_attention.cu"
    return Kernel(source, "prefill_attention", PrefillAttentionArgs, common(dims), grid, 128, smem=smem, min_blocks=2)


def merge(dims: Dims, rows: int = CHUNK) -> Kernel:
    """attended from the splits' parts; twin: `attention`."""
    grid = (_ceil(rows * dims.q_heads, 8), 1, 1)
    source = "prefill_attention.cu"
    return Kernel(source, "prefill_merge", PrefillMergeArgs, common(dims), grid, 256, max_registers=64)


def linear(in_width: int, out_rows: int, rows: int = CHUNK, *, fp8: bool) -> Kernel:
    """out float32 [rows, ...] = scale * in float16 [rows, in_width] @ W.T [out_rows, in_width]; twin: matmul."""
    defines: tuple[tuple[str, Define], ...] = (("IN", in_width), ("OUT_ROWS", out_rows), ("LINEAR_FP8", int(fp8)))
    smem = _gemm_smem(_TOKENS, in_width, fp8=fp8, scale_k=128)
    grid = (_ceil(out_rows, _ROWS), _ceil(rows, _TOKENS), 1)
    return Kernel("prefill_linear.cu", "prefill_linear", PrefillLinearArgs, defines, grid, 256, smem=smem)


def o_proj(dims: Dims, rows: int = CHUNK) -> Kernel:
    """The rank's part of the O projection: float32 [rows, hidden]."""
    return linear(dims.q_width, dims.hidden, rows, fp8=dims.fp8_attention)


def eh_proj(dims: Dims, rows: int = CHUNK) -> Kernel:
    """The draft's entry projection: float32 [rows, eh_rows] from `entry`'s operand."""
    return linear(2 * dims.hidden, dims.eh_rows, rows, fp8=False)


def lm_head(dims: Dims, rows: int = CHUNK) -> Kernel:
    """Logits float32 [rows, vocab] of every row, for scoring."""
    return linear(dims.hidden, dims.vocab, rows, fp8=False)


def _route_defines(dims: Dims) -> tuple[tuple[str, Define], ...]:
    tile = next(n for n in (128, 64, 32, 16, 8, 4) if dims.experts % n == 0)
    return (*common(dims), ("EXPERT_TILE", tile), ("ROUTER_SPLITS", router_splits(dims)))


def router(dims: Dims, rows: int = CHUNK) -> Kernel:
    """logits float32 [router_splits, rows, experts], parts of normed32 @ router.T in FP32; twin: float64 matmul."""
    defines = _route_defines(dims)
    tile = int(dict(defines)["EXPERT_TILE"])
    grid = (_ceil(rows, 64), dims.experts // tile, router_splits(dims))
    return Kernel("prefill_route.cu", "prefill_router", PrefillRouterArgs, defines, grid, tile * 2, max_registers=128)


def route(dims: Dims, rows: int = CHUNK) -> Kernel:
    """expert_ids int32, expert_weights float32 [rows, top_k]; twin: cuq1.reference.ops.route."""
    grid = (_ceil(rows, 8), 1, 1)
    source = "prefill_route.cu"
    return Kernel(source, "prefill_route", PrefillRouteArgs, _route_defines(dims), grid, 256, max_registers=64)


def _dense(dims: Dims, groups: int) -> Dims:
    """A dense layer's sizes: its pseudo-experts, all of which every row chose."""
    return replace(dims, experts=groups, top_k=groups) if groups else dims


def group(dims: Dims, rows: int = CHUNK, *, dense_groups: int = 0) -> Kernel:
    """pairs int32 [rows * top_k], tiles int32 [tiles_bound, 4], tile_count int32 [1]; twin: `group`."""
    sizes = _dense(dims, dense_groups)
    grid = (sizes.experts, 1, 1)
    source = "prefill_group.cu"
    return Kernel(source, "prefill_group", PrefillGroupArgs, common(sizes), grid, 256, max_registers=64)


def _moe_defines(dims: Dims, scale_k: int) -> tuple[tuple[str, Define], ...]:
    return (*common(dims), ("DOWN_SCALE_K", scale_k))


def gate_up(dims: Dims, rows: int = CHUNK, *, dense_groups: int = 0) -> Kernel:
    """inner float16 [rows * top_k, inner] in the order of `pairs`; twin: `gate_up`."""
    sizes = _dense(dims, dense_groups)
    grid = (_ceil(sizes.inner, 64), tiles_bound(sizes, rows), 1)
    smem = _gemm_smem(TILE_TOKENS, sizes.hidden, fp8=sizes.fp8_experts, scale_k=128)
    defines = _moe_defines(sizes, gcd(sizes.inner, 128))
    source = "prefill_moe.cu"
    return Kernel(
        source, "prefill_gate_up", PrefillGateUpArgs, defines, grid, 256, smem=smem, max_registers=128, min_blocks=2
    )


def down(dims: Dims, rows: int = CHUNK, *, dense_groups: int = 0) -> Kernel:
    """out float32 [rows, top_k, hidden], each choice's result apart; twin: `down`."""
    sizes = _dense(dims, dense_groups)
    scale_k = gcd(sizes.inner, 128)
    grid = (_ceil(sizes.hidden, _ROWS), tiles_bound(sizes, rows), 1)
    smem = _gemm_smem(TILE_TOKENS, sizes.inner, fp8=sizes.fp8_experts, scale_k=scale_k)
    defines = _moe_defines(sizes, scale_k)
    source = "prefill_moe.cu"
    return Kernel(
        source, "prefill_down", PrefillDownArgs, defines, grid, 256, smem=smem, max_registers=128, min_blocks=2
    )


def combine(dims: Dims, rows: int = CHUNK, *, dense_groups: int = 0) -> Kernel:
    """y float32 [rows, hidden], the weighted sum over a row's choices in their order; twin: `combine`."""
    sizes = _dense(dims, dense_groups)
    defines = _moe_defines(sizes, gcd(sizes.inner, 128))
    grid = (max(rows, 1), 1, 1)
    return Kernel("prefill_moe.cu", "prefill_combine", PrefillCombineArgs, defines, grid, 256, max_registers=64)


def entry(dims: Dims, rows: int = CHUNK) -> Kernel:
    """out float16 [rows, 2 * hidden], the operand of the draft's eh_proj; twin: `entry`."""
    grid = (max(rows, 1), 1, 1)
    return Kernel("prefill_entry.cu", "prefill_entry", PrefillEntryArgs, common(dims), grid, 256, max_registers=64)


def norm(dims: Dims, rows: int = CHUNK) -> Kernel:
    """normed float16 [rows, hidden] = rms(in, norm); twin: cuq1.reference.ops.rms_norm."""
    grid = (max(rows, 1), 1, 1)
    return Kernel("prefill_entry.cu", "prefill_norm", PrefillNormArgs, common(dims), grid, 256, max_registers=64)


def kernels(dims: Dims) -> list[Kernel]:
    """All of a share's, the dense layer's variants apart (they differ in constants only)."""
    return [
        rope(dims),
        qkv(dims),
        qkv(dims, kv_only=True),
        ring(dims),
        attention(dims),
        merge(dims),
        o_proj(dims),
        eh_proj(dims),
        lm_head(dims),
        router(dims),
        route(dims),
        group(dims),
        gate_up(dims),
        down(dims),
        combine(dims),
        entry(dims),
        norm(dims),
    ]
