"""Sampling on the device: the rejection rule, and the drafts."""

from ctypes import Structure

from cuq1.cuda.abi import AcceptArgs, DraftSampleArgs
from cuq1.cuda.kernels.defines import common
from cuq1.plan.dims import ROWS, Dims
from cuq1.plan.kernel import Kernel


def accept(dims: Dims, pieces: int | None = None) -> Kernel:
    """Judges the drafts and draws the token after them, or the request's first token; twin: cuq1.sampling.verify.

    pieces: candidate lists of a row, one a rank if not given. It decides how many warps merge them; the kernel is right
    for any number where dims.ranks is 1, and for dims.ranks of them else.
    """
    warps = _row_warps(dims, pieces)
    return _kernel(dims, "accept", AcceptArgs, warps, ROWS * warps)


def draft_sample(dims: Dims, pieces: int | None = None) -> Kernel:
    """Draws a draft and decides about the next one; twin: the reference engine's draft loop. pieces: as in `accept`."""
    warps = _row_warps(dims, pieces)
    return _kernel(dims, "draft_sample", DraftSampleArgs, warps, warps + 1)  # one for the stop rule


def _row_warps(dims: Dims, pieces: int | None) -> int:
    """Warps that merge a row's lists. Raises ValueError for what dims.ranks ranks do not have."""
    if pieces is None:
        pieces = dims.ranks
    if dims.ranks > 1 and pieces != dims.ranks:
        raise ValueError(f"{dims.ranks} ranks have as many lists of a row, not {pieces}")
    return 1 if pieces == 1 else 2


def _kernel(dims: Dims, entry: str, args: type[Structure], row_warps: int, warps: int) -> Kernel:
    block = warps * 32
    defines = (*common(dims), ("ROW_WARPS", row_warps))
    return Kernel("sampling.cu", entry, args, defines, (1, 1, 1), block, max_registers=min(128, 65536 // block))


def kernels(dims: Dims) -> list[Kernel]:
    """Those of one list a row and of eight, or of the ranks'."""
    lists = (1, 8) if dims.ranks == 1 else (dims.ranks,)
    return [kernel(dims, pieces) for kernel in (accept, draft_sample) for pieces in lists]
