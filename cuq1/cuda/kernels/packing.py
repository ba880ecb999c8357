"""Kernels of loading: packing rows as tiles, checking tables, folding the router, and random weights.

Sizes are arguments, not constants: each runs a few times a layer, once.
"""

from cuq1.cuda.abi import FillArgs, FoldArgs, PackArgs
from cuq1.plan.dims import Dims
from cuq1.plan.kernel import Kernel

_MOST_BLOCKS = 132 * 8  # blocks then stride: eight of 256 threads fill an H200's multiprocessor


def pack(tiles: int) -> Kernel:
    """Staged rows as tiles, checked. Twin: HostArena.pack."""
    return Kernel("pack.cu", "pack", PackArgs, (), (min(tiles, 4 * _MOST_BLOCKS), 1, 1), 256, pdl=False)


def quantise(tiles: int) -> Kernel:
    """Staged rows as E4M3 tiles with a scale a row, checked. Twin: HostArena.quantise."""
    return Kernel("pack.cu", "quantise", PackArgs, (), (min(tiles, _MOST_BLOCKS), 1, 1), 256, pdl=False)


def check_table(rows: int) -> Kernel:
    """Reports BF16 values that are not finite. Twin: HostArena.table."""
    return Kernel("pack.cu", "check_table", PackArgs, (), (min(rows, _MOST_BLOCKS), 1, 1), 256, pdl=False)


def fold_router(q_heads: int, slice_width: int, experts: int) -> Kernel:
    """Folded routing, from a packed W_o. Twin: HostArena.fold."""
    grid = (q_heads + -(-slice_width // 128), -(-experts // 8), 1)
    return Kernel("pack.cu", "fold_router", FoldArgs, (), grid, 128, pdl=False)


def fill(words: int) -> Kernel:
    """Random numbers; `words` of 16 bytes, or of 4 where they are FP32."""
    return Kernel("fill.cu", "fill", FillArgs, (), (min(-(-words // 256), _MOST_BLOCKS), 1, 1), 256, pdl=False)


def kernels(dims: Dims) -> list[Kernel]:
    """The same code for all sizes."""
    return [
        pack(dims.experts * dims.inner // 8),
        quantise(-(-dims.vocab // 16)),
        check_table(dims.vocab_total),
        fold_router(dims.q_heads, dims.slice_width, dims.experts),
        fill(1 << 20),
    ]
