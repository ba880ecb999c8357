"""The attention's projections: q, k and v with norm, RoPE and the cache's write; O with the folded router."""

from cuq1.cuda.abi import OProjArgs, QkvArgs
from cuq1.cuda.kernels.defines import common
from cuq1.cuda.kernels.draft import eh_splits
from cuq1.plan.dims import Dims
from cuq1.plan.kernel import Kernel

CLUSTER = 8  # blocks of a head in qkv: each has an eighth of K, and finishes one row
_QKV_PINNED = 2  # tiles of a warp, of 4, that are halves before the wait: more take longer than the predecessor lasts
_O_TILES = 2  # tiles of a block in o_proj
_ROUTER_EXPERTS = 4  # of a router block: what fits into registers


def qkv(dims: Dims, *, pieces: int = 0, base: bool = False) -> Kernel:
    """q float16 [rows, q_heads, 128], and k and v float16 into the cache's slots; twin: tests' `projections.heads`.

    normed: float16 [rows, hidden]; weights: heads of q, k and v as tiles, q's and k's rows in `repack.head_rows` order.
    With pieces, the norm before the projection is the kernel's: x = base + entry_scale * (the sum of pieces float32
    [pieces, 8, hidden]), where base float32 [rows, hidden] is left out unless asked for; residual float32
    [rows, hidden] and inverse float32 [rows] are written. Twin: `projections.entry`.
    """
    heads = dims.q_heads + 2 * dims.kv_heads
    return Kernel(
        "qkv.cu",
        "qkv",
        QkvArgs,
        (
            *common(dims),
            ("PINNED", _QKV_PINNED if pieces < 2 else 0),
            ("ENTRY_PIECES", pieces),
            ("ENTRY_BASE", int(base)),
        ),
        (CLUSTER * heads, 1, 1),
        288,
        cluster=CLUSTER,
        max_registers=176,
    )


def o_proj(dims: Dims, *, moe: bool = True) -> Kernel:
    """out float32 [rows, hidden]; for a MoE layer also the two parts of the router's logits float32 [rows, experts].

    attended: float16 and float32 [rows, q_heads * 128]; fold: float32 [experts, q_heads * 128 + slice], null where
    `moe` is false. Twins: tests' `projections.o_proj`, `projections.router`.
    """
    narrow = dims.q_width <= 768
    blocks = dims.hidden // 16 // _O_TILES + (dims.experts // _ROUTER_EXPERTS if moe else 0)
    fit = 3 if narrow else 1  # blocks of a multiprocessor: two launches' side by side, but for nano at one rank
    defines = (
        *common(dims),
        ("MOE", int(moe)),
        ("TILES", _O_TILES),
        ("ROUTER_EXPERTS", _ROUTER_EXPERTS),
        ("BLOCKS", fit),
    )
    return Kernel(
        "o_proj.cu",
        "o_proj",
        OProjArgs,
        defines,
        (blocks, 1, 1),
        256,
        max_registers=80 if narrow else 168,
        min_blocks=fit,
    )


def kernels(dims: Dims) -> list[Kernel]:
    """qkv with all that may come before it, and o_proj for both kinds of layers."""
    entries = [qkv(dims), qkv(dims, pieces=1, base=True), qkv(dims, pieces=eh_splits(dims))]
    return [*entries, o_proj(dims), o_proj(dims, moe=False)]
