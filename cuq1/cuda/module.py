"""Compiled kernels on the GPU."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuq1.cuda.compile import compile_kernel
from cuq1.cuda.driver import bindings, check, require
from cuq1.errors import DeviceError
from cuq1.plan.kernel import Kernel

PORTABLE_CLUSTER = 8  # blocks; a larger cluster has to be asked for


@dataclass(frozen=True)
class Function:
    """A loaded kernel: its handle in the current context, and the module that it lives in."""

    kernel: Kernel
    handle: int
    module: Any


@cache
def _module(path: Path) -> Any:
    """CuPy's module of a .cubin or .ptx file."""
    return require("cupy").RawModule(path=str(path)).module


def load(path: Path, kernel: Kernel) -> Function:
    """The kernel from a .cubin or .ptx file, ready to be launched with its dynamic shared memory.

    Raises DeviceError where the file has no such kernel, or the GPU has no room for a block of it.
    """
    driver, cupy = bindings(), require("cupy")
    try:
        module = _module(path)
        handle = module.get_function(kernel.entry).ptr
    except cupy.cuda.driver.CUDADriverError as error:
        raise DeviceError(f"{kernel.entry} cannot be loaded from {path}: {error}") from None
    # All kernels with the same, largest share for shared memory: a multiprocessor changes it only when it is empty, and
    # a kernel that waited for that could not start beside its predecessor.
    carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check(driver.cuFuncSetAttribute(driver.CUfunction(handle), carveout, 100))
    if kernel.smem:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        try:
            check(driver.cuFuncSetAttribute(driver.CUfunction(handle), attribute, kernel.smem))
        except DeviceError as error:
            raise DeviceError(f"{kernel.entry} asks for {kernel.smem} bytes of shared memory: {error}") from None
    if kernel.cluster > PORTABLE_CLUSTER:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        check(driver.cuFuncSetAttribute(driver.CUfunction(handle), attribute, 1))
    return Function(kernel, int(handle), module)


def build(kernel: Kernel, arch: str = "sm_90a", patch: tuple[str, str] | None = None) -> Function:
    """The kernel, compiled (see compile_kernel) and loaded."""
    return load(compile_kernel(kernel, arch, patch).path, kernel)
