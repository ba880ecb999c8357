"""Memory of the GPU, taken once; and host memory that kernels write, which outlives a dead context."""

from collections.abc import Mapping
from ctypes import memset, sizeof

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda.abi import Fault
from cuq1.cuda.driver import bindings, check
from cuq1.errors import DeviceError

ALIGNMENT = 256


def round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def free_memory() -> int:
    """Bytes of the current GPU that nobody has taken."""
    return int(check(bindings().cuMemGetInfo())[0])


class Arena:
    """Named pieces of one allocation, each 256-byte aligned. sizes: {name: bytes}.

    Raises DeviceError, saying what takes how much, where free memory is too small.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} has {size} bytes")
        self.sizes = dict(sizes)
        self.total = sum(map(round_up, sizes.values()))
        self._base: int | None = None
        driver = bindings()
        free, whole = check(driver.cuMemGetInfo())
        if self.total > free:
            raise DeviceError(shortage(self.sizes, free, whole))
        self._base = base = int(check(driver.cuMemAlloc(self.total)))
        self.addresses: dict[str, int] = {}
        for name, size in sizes.items():
            self.addresses[name] = base
            base += round_up(size)

    def __getitem__(self, name: str) -> int:
        """The device address of a piece."""
        return self.addresses[name]

    def clear(self) -> None:
        """Fills everything with zero bytes; returns when it is done."""
        driver = bindings()
        check(driver.cuMemsetD8(driver.CUdeviceptr(self._base), 0, self.total))
        check(driver.cuCtxSynchronize())

    def close(self) -> None:
        """Gives the memory back; addresses are void afterwards."""
        if self._base is not None:
            driver = bindings()
            check(driver.cuMemFree(driver.CUdeviceptr(self._base)))
            self._base = None


def copy_in(address: int, values: NDArray[np.generic]) -> None:
    """Copies an array to device memory; the bytes are there when it returns.

    cuMemcpyHtoD alone may return before bytes from pageable memory have arrived, and our streams do not wait for the
    default one: on a busy GPU, kernels would read what lay there before.
    """
    driver = bindings()
    values = np.ascontiguousarray(values)
    check(driver.cuMemcpyHtoD(driver.CUdeviceptr(address), values.ctypes.data, values.nbytes))
    check(driver.cuCtxSynchronize())


def shortage(sizes: Mapping[str, int], free: int, whole: int) -> str:
    """Why an Arena does not fit: its largest pieces first."""
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    parts = [f"{name} {_gib(size)}" for name, size in largest[:6]]
    rest = sum(size for _, size in largest[6:])
    return (
        f"the model needs {_gib(sum(map(round_up, sizes.values())))} of GPU memory ({', '.join(parts)}"
        f"{f', {len(largest) - 6} more {_gib(rest)}' if rest else ''}), but {_gib(free)} of {_gib(whole)} are free: "
        "free some, choose a shorter context, or use more GPUs"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


class Mapped:
    """Host memory that the GPU reads and writes at the same address, zeroed."""

    def __init__(self, size: int) -> None:
        driver = bindings()
        self._size = size
        # Portable: the same record serves all contexts of the process. Unified addressing makes both addresses one.
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        self.address = int(check(driver.cuMemHostAlloc(size, flags)))
        device = int(check(driver.cuMemHostGetDevicePointer(self.address, 0)))
        if device != self.address:
            raise DeviceError("this GPU has no unified addressing, which cuq1 needs")
        self.clear()

    def clear(self) -> None:
        memset(self.address, 0, self._size)

    def close(self) -> None:
        """Gives the memory back, also after the context has died."""
        if self.address:
            bindings().cuMemFreeHost(self.address)
            self.address = 0


class MappedFault(Mapped):
    """A Fault record in mapped memory."""

    def __init__(self) -> None:
        super().__init__(sizeof(Fault))

    def view(self) -> Fault:
        """The record itself, as it changes."""
        return Fault.from_address(self.address)

    def read(self) -> Fault | None:
        """A copy of what was reported, or None. `what` is -1 where a kernel died while it reported."""
        record = Fault.from_buffer_copy(self.view()) if self.address else Fault()
        return record if record.what else None
