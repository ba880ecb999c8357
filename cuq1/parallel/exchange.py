"""A rank's inbox and its peers', mapped: where kernels of other processes store (kernels_cu/common/exchange.cuh)."""

import json
from ctypes import memmove, string_at
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda.abi import MAX_RANKS
from cuq1.cuda.driver import bindings, check
from cuq1.errors import DeviceError, LaunchError
from cuq1.parallel.rendezvous import Rendezvous

HANDLE_BYTES = 64  # of a CUipcMemHandle
GRANULE = 2 << 20  # the driver exports whole pieces of this size: nothing else is to lie in them


class SharedInbox:
    """`nbytes` of the current GPU's memory that every rank of the rendezvous maps, all bits set.

    address: of this rank's own. distances: int64 [MAX_RANKS], for each rank the bytes from an address in the own inbox
    to the same place in that rank's, as it is mapped here; 0 for the own one and for ranks that there are none of.
    Made by all ranks together; when it is there, every rank's is mapped and filled.

    Use as a context manager, or call close, on all ranks. Ranks may share a GPU. Raises LaunchError where sizes differ
    or there are too many ranks, and DeviceError where a rank's memory cannot be had or mapped.
    """

    def __init__(self, meeting: Rendezvous, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"an inbox has {nbytes} bytes")
        self._meeting, self.nbytes = meeting, nbytes
        self._mapped: list[int] = []
        self.address = 0
        if meeting.world > MAX_RANKS:
            raise LaunchError(f"{meeting.world} ranks cannot exchange: start at most {MAX_RANKS}")
        driver = bindings()
        try:
            self.address = int(check(driver.cuMemAlloc(-(-nbytes // GRANULE) * GRANULE)))
        except DeviceError as error:
            raise DeviceError(f"rank {meeting.rank}'s inbox of {nbytes} bytes cannot be had: {error}") from None
        try:
            self.reset()  # before any peer can have it
            self.distances = self._open_all()
        except BaseException:
            self._unmap()  # the memory goes with the process: peers may have mapped it
            raise

    def reset(self) -> None:
        """Makes every word NOT_READY, and returns when that is done. No rank may push meanwhile."""
        driver = bindings()
        check(driver.cuMemsetD8(driver.CUdeviceptr(self.address), 0xFF, self.nbytes))
        check(driver.cuCtxSynchronize())

    def close(self) -> None:
        """Ends the sharing, on all ranks together: raises LaunchError where one does not come, or has failed.

        Then this rank's memory stays until the process ends, since that peer may have it mapped still.
        """
        if not self.address:
            return
        # Its own kernels store into what is unmapped next; the peers' into what is freed after the barrier.
        check(bindings().cuCtxSynchronize())
        self._unmap()
        address, self.address = self.address, 0
        self._meeting.barrier("inboxes unmapped")
        check(bindings().cuMemFree(bindings().CUdeviceptr(address)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        # After a failure nobody is waited for: mappings and memory go with the process.

    def _open_all(self) -> NDArray[np.int64]:
        """Hands out the own handle and opens the others': the distances."""
        driver, meeting = bindings(), self._meeting
        handle = check(driver.cuIpcGetMemHandle(driver.CUdeviceptr(self.address)))
        device = check(driver.cuCtxGetDevice())
        bus = check(driver.cuDeviceGetPCIBusId(32, device)).decode().partition("\0")[0]
        own = {"handle": string_at(handle.getPtr(), HANDLE_BYTES).hex(), "bus": bus, "bytes": self.nbytes}
        ranks = [json.loads(one) for one in meeting.gather("inboxes", json.dumps(own).encode())]
        sizes = [one["bytes"] for one in ranks]
        if len(set(sizes)) > 1:
            raise LaunchError(f"ranks have inboxes of different sizes, {sizes} bytes: start all of them alike")
        distances = np.zeros(MAX_RANKS, np.int64)
        for rank, one in enumerate(ranks):
            if rank != meeting.rank:
                self._mapped.append(self._open(rank, one, device, bus))
                distances[rank] = self._mapped[-1] - self.address
        meeting.barrier("inboxes mapped")  # nobody pushes, or gives up, before all have what they need
        return distances

    def _open(self, rank: int, one: dict[str, Any], device: Any, bus: str) -> int:
        """The address at which a peer's inbox is mapped here."""
        driver = bindings()
        between = f"GPU {bus} of rank {self._meeting.rank} and GPU {one['bus']} of rank {rank}"
        status, peer = driver.cuDeviceGetByPCIBusId(one["bus"].encode())
        # A GPU that this process does not see cannot be asked about; opening still may work.
        if int(status) == 0 and one["bus"] != bus and not check(driver.cuDeviceCanAccessPeer(device, peer)):
            raise DeviceError(
                f"{between} cannot access each other's memory (no NVLink or peer-to-peer): choose GPUs that can"
            )
        handle = driver.CUipcMemHandle()
        memmove(handle.getPtr(), bytes.fromhex(one["handle"]), HANDLE_BYTES)
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        try:
            return int(check(driver.cuIpcOpenMemHandle(handle, flags)))
        except DeviceError as error:
            raise DeviceError(f"{between} cannot share an inbox: {error}") from None

    def _unmap(self) -> None:
        driver = bindings()
        while self._mapped:
            check(driver.cuIpcCloseMemHandle(driver.CUdeviceptr(self._mapped.pop())))
