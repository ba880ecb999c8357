"""Memory of all ranks behind one multicast address: NVLink SHARP, for those who ask for it.

    with Multicast(meeting, nbytes) as shared:  # after `wanted(meeting, asked=...)` says so
        ...  # kernels store at shared.own, and load sums at shared.address (kernels_cu/exchange_multicast.cu)

It is off unless every rank asks. Nothing falls back in silence: where it is asked for and cannot be had, all ranks
have the same error.
"""

import json
import math
import os
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from cuq1.cuda.driver import bindings, check
from cuq1.errors import DeviceError, LaunchError
from cuq1.parallel import descriptors
from cuq1.parallel.rendezvous import Rendezvous
from cuq1.parallel.wire import name_ranks

# By these, libraries are told that a machine's multicast is not to be used. Read before NCCL is set up, which sets the
# first (cuq1/parallel/nccl.py).
SIGNS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
NAME = "the multicast object"


def wanted(meeting: Rendezvous, *, asked: bool) -> bool:
    """Whether ranks are to use multicast: `asked` of all of them. Called by all ranks, with a GPU opened.

    No multicast object is made. Raises the same LaunchError on all ranks where some ask and some do not, and
    the same DeviceError where all ask and it cannot be had: it is switched off on the machine, a GPU has none, or ranks
    share a GPU.
    """
    own = {"asked": asked, **(_report() if asked else {})}
    ranks = [json.loads(one) for one in meeting.gather("multicast wanted", json.dumps(own).encode())]
    yes = [rank for rank, one in enumerate(ranks) if one["asked"]]
    no = [rank for rank, one in enumerate(ranks) if not one["asked"]]
    if not yes:
        return False
    if no:
        raise LaunchError(
            f"multicast is asked for on {name_ranks(yes)} and not on {name_ranks(no)}: ask for it on all or on none"
        )
    if len(ranks) < 2:
        raise DeviceError("multicast needs two ranks or more, and there is one: leave it off")
    for rank, one in enumerate(ranks):
        if one["problem"]:
            raise DeviceError(f"multicast cannot be used: on rank {rank}, {one['problem']}")
    gpus = [one["gpu"] for one in ranks]
    for rank, gpu in enumerate(gpus):
        if gpus.index(gpu) != rank:
            raise DeviceError(
                f"multicast cannot be used: ranks {gpus.index(gpu)} and {rank} share GPU {gpu}, and each needs its own"
            )
    return True


def switched_off() -> str | None:
    """Why no multicast object may be made on this machine, or None."""
    for name, value in SIGNS.items():
        if os.environ.get(name) == value:
            return f"{name}={value} says that this machine's NVLink multicast is not to be used: leave it off"
    return None


def _report() -> dict[str, Any]:
    """This rank's GPU, and why it has no multicast, or None."""
    off = switched_off()
    if off is not None:
        return {"problem": off, "gpu": ""}
    driver = bindings()
    device = check(driver.cuCtxGetDevice())
    gpu = check(driver.cuDeviceGetPCIBusId(32, device)).decode().partition("\0")[0]
    needed = {"MULTICAST": "NVLink multicast", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": "memory shared by file descriptor"}
    for suffix, what in needed.items():
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{suffix}_SUPPORTED")
        if not check(driver.cuDeviceGetAttribute(attribute, device)):
            return {"problem": f"GPU {gpu} has no {what}: leave it off", "gpu": gpu}
    return {"problem": None, "gpu": gpu}


class Multicast:
    """`nbytes` of each rank's GPU, mapped at `own`; and all ranks' together, at the multicast address `address`.

    nbytes is rounded up to what the driver maps. When it is there, every rank's memory is bound, and has all bits set.
    Only multimem instructions may be used on `address`. Made by all ranks together, after `wanted`.

    Use as a context manager, or call close, on all ranks. Raises DeviceError where the machine's multicast is switched
    off, or the driver fails, naming rank and call; that rank keeps nothing then, and nor do the others, which have a
    LaunchError.
    """

    def __init__(self, meeting: Rendezvous, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"a multicast object has {nbytes} bytes")
        off = switched_off()
        if off is not None:
            raise DeviceError(off)
        self._meeting, self._driver = meeting, bindings()
        self._undo: list[tuple[str, tuple[Any, ...]]] = []
        self._device = check(self._driver.cuCtxGetDevice())
        self._granularity = self._agree(nbytes)
        self.nbytes = -(-nbytes // self._granularity) * self._granularity
        self.own = self.address = 0
        try:
            self._make()
        except BaseException:
            with suppress(DeviceError):  # the first failure is the one to tell
                self._release()
            raise

    def reset(self) -> None:
        """Sets all bits of this rank's memory; returns when that is done. No rank may store or load meanwhile."""
        driver = self._driver
        self._call("cuMemsetD8", driver.CUdeviceptr(self.own), 0xFF, self.nbytes)
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Gives everything back, on all ranks together: raises LaunchError where one does not come, or has failed.

        Then everything stays until the process ends, since a kernel of that rank may still load from this one's memory.
        """
        if not self._undo:
            return
        self._call("cuCtxSynchronize")
        self._meeting.barrier("multicast unused")  # no kernel of any rank loads from the object any more
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        # After a failure nobody is waited for, so everything goes with the process: see close.

    def _agree(self, nbytes: int) -> int:
        """What sizes and addresses are multiples of, on all ranks alike, in bytes."""
        driver = self._driver
        recommended = driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED
        granules = [self._call("cuMulticastGetGranularity", self._object(nbytes), recommended)]
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granules.append(self._call("cuMemGetAllocationGranularity", self._allocation(), least))
        own = json.dumps([nbytes, math.lcm(*map(int, granules))]).encode()
        sizes, granularities = zip(*map(json.loads, self._meeting.gather("multicast sizes", own)), strict=True)
        if len(set(sizes)) > 1:
            raise LaunchError(f"ranks ask for multicast objects of {list(sizes)} bytes: start all of them alike")
        return math.lcm(*granularities)

    def _make(self) -> None:
        driver, meeting = self._driver, self._meeting
        posix = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        if meeting.rank == 0:
            team = self._call("cuMulticastCreate", self._object(self.nbytes))
            self._later("cuMemRelease", team)
            descriptor = int(self._call("cuMemExportToShareableHandle", team, posix, 0))
            try:
                descriptors.hand_out(meeting, NAME, descriptor)
            finally:
                os.close(descriptor)
        else:
            descriptor = descriptors.fetch(meeting, NAME)
            try:
                team = self._call("cuMemImportFromShareableHandle", descriptor, posix)
            finally:
                os.close(descriptor)
            self._later("cuMemRelease", team)
        self._call("cuMulticastAddDevice", team, self._device)
        # Binding and mapping wait without a limit until all devices are in: a rank that has failed is found here.
        meeting.barrier("multicast devices")
        memory = self._call("cuMemCreate", self.nbytes, self._allocation(), 0)
        self._later("cuMemRelease", memory)
        self._call("cuMulticastBindMem", team, 0, memory, 0, self.nbytes, 0)
        self._later("cuMulticastUnbind", team, self._device, 0, self.nbytes)
        self.own = self._map(memory)
        self.reset()
        self.address = self._map(team)
        meeting.barrier("multicast mapped")  # a load before that would miss a rank's memory

    def _map(self, handle: Any) -> int:
        """The address at which an allocation, or a multicast object, is mapped for this rank's GPU."""
        driver = self._driver
        address = self._call("cuMemAddressReserve", self.nbytes, self._granularity, driver.CUdeviceptr(0), 0)
        self._later("cuMemAddressFree", address, self.nbytes)
        self._call("cuMemMap", address, self.nbytes, 0, handle, 0)
        self._later("cuMemUnmap", address, self.nbytes)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._device)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, self.nbytes, [access], 1)
        return int(address)

    def _object(self, nbytes: int) -> Any:
        driver = self._driver
        found = driver.CUmulticastObjectProp()
        found.numDevices = self._meeting.world
        found.size = nbytes
        found.handleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.value
        found.flags = 0
        return found

    def _allocation(self) -> Any:
        """Of this GPU's memory. It has to be shareable, since the object that it is bound to is."""
        driver = self._driver
        found = driver.CUmemAllocationProp()
        found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        found.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        found.location.id = int(self._device)
        return found

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return check(getattr(self._driver, name)(*arguments))
        except DeviceError as error:
            raise DeviceError(f"multicast fails on rank {self._meeting.rank} in {name}: {error}") from None

    def _later(self, name: str, *arguments: Any) -> None:
        """A call that undoes the last one, when its turn comes."""
        self._undo.append((name, arguments))

    def _release(self) -> None:
        """Undoes everything, last first, whatever fails of it; raises DeviceError for the first that does."""
        problem: DeviceError | None = None
        self.own = self.address = 0
        while self._undo:
            name, arguments = self._undo.pop()
            try:
                self._call(name, *arguments)
            except DeviceError as error:
                problem = problem or error
        if problem is not None:
            raise problem
