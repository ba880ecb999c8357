"""What happens to rows between the matrices: embedding, norms, residuals, routing (kernels_cu/{rows,tails}.cu)."""

from ctypes import Structure

from cuq1.cuda.abi import AttnTailArgs, EmbedArgs, MlpTailArgs
from cuq1.cuda.kernels import defines
from cuq1.plan.dims import ROWS, Dims
from cuq1.plan.kernel import Define, Kernel

PARTS = 4  # blocks that share a row, as far as it has columns
WARP = 32


def parts_of(dims: Dims) -> int:
    """The blocks that share a row: a warp of float4 at least in each. ValueError where two of them can't."""
    for parts in (PARTS, PARTS // 2):
        if dims.hidden % (parts * 4 * WARP) == 0:
            return parts
    raise ValueError(f"hidden {dims.hidden} is not a multiple of {8 * WARP}")


def embed(dims: Dims, rows: int = ROWS) -> Kernel:
    """Up to `rows` rows of the embedding table, and the first layer's input norm: twins.rows.embed."""
    return _kernel("rows.cu", "embed", EmbedArgs, dims, rows)


def attn_tail(dims: Dims, rows: int = ROWS, *, moe: bool = True) -> Kernel:
    """o's sum over ranks, its norm, the residual, the MLP's input norm, routing: twins.rows.attn_tail.

    moe: with routing, at most 8 rows; else expert ids and weights are not written. Where dims.ranks exchange, it polls
    their inbox, which has no more than 8 rows either: ValueError; a prompt's chunks have dims of one rank.
    """
    routed: tuple[tuple[str, Define], ...] = (("ROUTED", 1),) if moe else ()
    return _kernel("tails.cu", "attn_tail", AttnTailArgs, dims, rows, routed, dims.experts if moe else 0)


def mlp_tail(dims: Dims, rows: int = ROWS) -> Kernel:
    """The MLP's sum over ranks, its norm, the residual, the next layer's input norm: twins.rows.mlp_tail."""
    return _kernel("tails.cu", "mlp_tail", MlpTailArgs, dims, rows)


def _kernel(
    source: str,
    entry: str,
    args: type[Structure],
    dims: Dims,
    rows: int,
    own: tuple[tuple[str, Define], ...] = (),
    more_threads: int = 0,
) -> Kernel:
    if dims.ranks > 1 and rows > ROWS and source == "tails.cu":
        raise ValueError(f"{entry}: an inbox has {ROWS} rows, not {rows}")
    parts = parts_of(dims)
    return Kernel(
        source,
        entry,
        args,
        (*defines.common(dims), ("PARTS", parts), *own),
        (rows * parts, 1, 1),
        dims.hidden // parts // 4 + more_threads,
        cluster=parts,
        max_registers=80,
    )


def kernels(dims: Dims) -> list[Kernel]:
    """All of the family, for a pass of 8 rows."""
    return [embed(dims), attn_tail(dims), attn_tail(dims, moe=False), mlp_tail(dims)]
