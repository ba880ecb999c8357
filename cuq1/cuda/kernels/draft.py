"""The draft's own matrix, eh_proj (kernels_cu/draft.cu)."""

from cuq1.cuda.abi import EhProjArgs
from cuq1.cuda.kernels import defines
from cuq1.plan.dims import Dims
from cuq1.plan.kernel import Kernel

WARPS = 8
CHUNK = 16  # columns
MAX_CHUNKS = 8  # of a warp: what it holds in registers


def eh_splits(dims: Dims) -> int:
    """Pieces of K, half of them in the embedding's half of it: as few as leave a warp at most 8 chunks.

    Raises ValueError where no number of pieces shares the chunks evenly.
    """
    chunks = dims.hidden // CHUNK
    for pieces in range(1, chunks // WARPS + 1):
        if chunks % (pieces * WARPS) == 0 and chunks // (pieces * WARPS) <= MAX_CHUNKS:
            return 2 * pieces
    raise ValueError(f"hidden {dims.hidden} is not a multiple of {CHUNK * WARPS}")


def eh_proj(dims: Dims) -> Kernel:
    """The rank's rows of eh_proj([rms(embed(token), enorm) ; rms(hidden, hnorm)]): twins.draft.eh_proj.

    out float32 [eh_splits, 8, hidden], columns first_row onwards; where ranks exchange, in the inbox of each.
    """
    splits = eh_splits(dims)
    return Kernel(
        "draft.cu",
        "eh_proj",
        EhProjArgs,
        (*defines.common(dims), ("EH_SPLITS", splits)),
        (dims.eh_rows // 16 * splits, 1, 1),
        WARPS * 32,
        cluster=splits // 2,
        max_registers=128,
        min_blocks=2,
    )


def kernels(dims: Dims) -> list[Kernel]:
    """All of the family."""
    return [eh_proj(dims)]
