"""Sampling on the device: the rejection rule, and the drafts."""

from ctypes import Structure

from cuq1.cuda.abi import AcceptArgs, DraftSampleArgs
from cuq1.cuda.kernels.defines import common
from cuq1.plan.dims import ROWS, Dims
from cuq1.plan.kernel import Kernel


def accept(dims: Dims, pieces: int = 1) -> Kernel:
    """Judges the drafts and draws the token after them, or the request's first token; twin: cuq1.sampling.verify.

    pieces: candidate lists of a row. It decides how many warps merge them; the kernel is right for any number.
    """
    warps = _row_warps(pieces)
    return _kernel(dims, "accept", AcceptArgs, warps, ROWS * warps)


def draft_sample(dims: Dims, pieces: int = 1) -> Kernel:
    """Draws a draft and decides about the next one; twin: the reference engine's draft loop. pieces: as in `accept`."""
    warps = _row_warps(pieces)
    return _kernel(dims, "draft_sample", DraftSampleArgs, warps, warps + 1)  # one for the stop rule


def _row_warps(pieces: int) -> int:
    """Warps that merge a row's lists."""
    return 1 if pieces == 1 else 2


def _kernel(dims: Dims, entry: str, args: type[Structure], row_warps: int, warps: int) -> Kernel:
    block = warps * 32
    defines = (*common(dims), ("ROW_WARPS", row_warps))
    return Kernel("sampling.cu", entry, args, defines, (1, 1, 1), block, max_registers=min(128, 65536 // block))


def kernels(dims: Dims) -> list[Kernel]:
    """Those of one rank and of eight."""
    return [kernel(dims, pieces) for kernel in (accept, draft_sample) for pieces in (1, 8)]
