"""One launch: geometry, cluster, programmatic serialisation, and the arguments' structure by value."""

from ctypes import Structure, addressof, c_void_p
from typing import Any

from cuq1.cuda.driver import bindings, check
from cuq1.cuda.module import Function
from cuq1.errors import DeviceError


class Call:
    """A kernel and its arguments, to be launched any number of times; the structure's fields may change between.

    Raises TypeError for arguments of another kernel.
    """

    def __init__(self, function: Function, args: Structure) -> None:
        kernel = function.kernel
        if type(args) is not kernel.args:
            raise TypeError(f"{kernel.entry} takes {kernel.args.__name__}, not {type(args).__name__}")
        self.args = args
        self._kernel = kernel
        self._driver = driver = bindings()
        self._handle = driver.CUfunction(function.handle)
        self._config = config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._grid = kernel.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.block, 1, 1
        config.sharedMemBytes = kernel.smem
        self._stream = -1
        self._attributes = _attributes(driver, cluster=kernel.cluster, pdl=kernel.pdl)
        config.attrs = self._attributes
        config.numAttrs = len(self._attributes)
        self._parameters = (c_void_p * 1)(addressof(args))

    def issue(self, stream: int, grid: tuple[int, int, int] | None = None) -> None:
        """Enqueues the kernel on `stream` (a CUstream), with another grid than its own where one is given.

        In a stream that is captured, it becomes a node. The driver copies the arguments before it returns. Raises
        DeviceError for what the driver refuses.
        """
        config, wanted = self._config, self._kernel.grid if grid is None else grid
        if wanted != self._grid:
            config.gridDimX, config.gridDimY, config.gridDimZ = self._grid = wanted
        if stream != self._stream:
            config.hStream = self._driver.CUstream(stream)
            self._stream = stream
        try:
            check(self._driver.cuLaunchKernelEx(config, self._handle, addressof(self._parameters), 0))
        except DeviceError as error:
            kernel = self._kernel
            raise DeviceError(
                f"{kernel.entry} cannot be launched with grid {'x'.join(map(str, wanted))}, block {kernel.block}, "
                f"cluster {kernel.cluster} and {kernel.smem} bytes of shared memory: {error}"
            ) from None


def launch(function: Function, args: Structure, stream: int) -> None:
    """Enqueues a kernel once: see Call."""
    Call(function, args).issue(stream)


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
