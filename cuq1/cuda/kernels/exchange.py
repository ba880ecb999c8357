"""What an exchange among ranks needs besides its producers and consumers (kernels_cu/rearm.cu)."""

from cuq1.cuda.abi import RearmArgs
from cuq1.plan.dims import Dims
from cuq1.plan.kernel import Kernel

BLOCKS, THREADS = 64, 256


def rearm() -> Kernel:
    """Makes a piece of an inbox NOT_READY: twins.exchange.rearm."""
    return Kernel("rearm.cu", "rearm", RearmArgs, (), (BLOCKS, 1, 1), THREADS, max_registers=32)


def kernels(dims: Dims) -> list[Kernel]:
    """All of the family."""
    return [rearm()]
