"""One launch: geometry, cluster, programmatic serialisation, and the arguments' structure by value."""

from ctypes import Structure, addressof, c_void_p
from typing import Any

from cuq1.cuda.driver import bindings, check
from cuq1.cuda.module import Function
from cuq1.errors import DeviceError


def launch(function: Function, args: Structure, stream: int) -> None:
    """Enqueues a kernel on `stream` (a CUstream); in a stream that is captured, it becomes a node.

    The driver copies `args` before it returns. Raises TypeError for arguments of another kernel, and DeviceError for
    what the driver refuses.
    """
    kernel = function.kernel
    if type(args) is not kernel.args:
        raise TypeError(f"{kernel.entry} takes {kernel.args.__name__}, not {type(args).__name__}")
    driver = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.block, 1, 1
    config.sharedMemBytes = kernel.smem
    config.hStream = driver.CUstream(stream)
    attributes = _attributes(driver, cluster=kernel.cluster, pdl=kernel.pdl)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    parameters = (c_void_p * 1)(addressof(args))
    try:
        check(driver.cuLaunchKernelEx(config, driver.CUfunction(function.handle), addressof(parameters), 0))
    except DeviceError as error:
        grid = "x".join(map(str, kernel.grid))
        raise DeviceError(
            f"{kernel.entry} cannot be launched with grid {grid}, block {kernel.block}, cluster {kernel.cluster} and "
            f"{kernel.smem} bytes of shared memory: {error}"
        ) from None


def _attributes(driver: Any, *, cluster: int, pdl: bool) -> list[Any]:
    ids = driver.CUlaunchAttributeID
    found = []
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        found.append(attribute)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        found.append(attribute)
    return found
