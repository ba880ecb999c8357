"""What memory delivers: the ceiling that other kernels' times are judged by."""

from cuq1.cuda.abi import BandwidthArgs
from cuq1.plan.dims import Dims
from cuq1.plan.kernel import Kernel

BLOCK = 512
BLOCKS = 132 * 4  # four blocks on each of an H200's multiprocessors
WORDS = 8 * BLOCK * BLOCKS  # of 16 bytes; a multiple of this can be read


def read_once() -> Kernel:
    """Reads 16-byte words once; its result, a sum, is for nothing."""
    return _kernel("read_once")


def fill_random() -> Kernel:
    """Fills 16-byte words with numbers that look random."""
    return _kernel("fill_random")


def _kernel(entry: str) -> Kernel:
    return Kernel("bandwidth.cu", entry, BandwidthArgs, (), (BLOCKS, 1, 1), BLOCK, max_registers=64, min_blocks=2)


def kernels(dims: Dims) -> list[Kernel]:
    """The same for all sizes."""
    return [read_once(), fill_random()]
