"""How a kernel is compiled and launched: description and geometry, apart from any buffer."""

from ctypes import Structure
from dataclasses import dataclass

Define = int | float | str


@dataclass(frozen=True)
class Kernel:
    """One compiled entry point with its launch geometry.

    source: a file of kernels_cu/; entry: its extern "C" function, which takes one `args` structure by value;
    defines: its -D constants; grid in blocks, block in threads; cluster: blocks of a cluster along x;
    smem: dynamic shared memory in bytes; pdl: launched with programmatic stream serialisation;
    max_registers: the budget that CI holds the compiler to (spills are never allowed);
    min_blocks: blocks that must fit on a multiprocessor together;
    device_runtime: it launches graphs, so it is linked with CUDA's device runtime.
    """

    source: str
    entry: str
    args: type[Structure]
    defines: tuple[tuple[str, Define], ...]
    grid: tuple[int, int, int]
    block: int
    cluster: int = 1
    smem: int = 0
    pdl: bool = True
    max_registers: int = 255
    min_blocks: int = 1
    device_runtime: bool = False
