"""NCCL among the ranks, through CuPy's binding: what prefill sums with, and what the exchange is measured beside."""

import os
from types import TracebackType
from typing import Any, Self

from cuq1.cuda.driver import require
from cuq1.errors import DeviceError
from cuq1.parallel.rendezvous import Rendezvous

# Multicast is used where a user asks for it, and not because a library found it.
NVLS = "NCCL_NVLS_ENABLE"


class Communicator:
    """All ranks of the rendezvous, each on its current GPU. Made by all of them together.

    Addresses are of device memory; a call enqueues on `stream` (a CUstream), and may be captured. Use as a context
    manager, or call close. Raises DeviceError where NCCL is missing, or fails.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        os.environ.setdefault(NVLS, "0")  # read when NCCL is used first
        cupy = require("cupy")
        self._nccl = nccl = require("cupy.cuda.nccl")
        if not nccl.available:
            raise DeviceError(
                "several GPUs need NCCL, which cannot be loaded: install it with pip install 'cuq1[cuda12]' or, for a "
                "driver of CUDA 13, 'cuq1[cuda13]'"
            )
        self._handle: Any = None
        self.world = meeting.world
        own = nccl.get_unique_id() if meeting.rank == 0 else None
        # CuPy has it as bytes from 14 on, and as a tuple of signed ones before.
        given = meeting.broadcast("NCCL", None if own is None else bytes(one & 0xFF for one in own))
        as_bytes = int(cupy.__version__.partition(".")[0]) >= 14
        unique = given if as_bytes else tuple(one - 256 * (one > 127) for one in given)
        try:
            self._handle = nccl.NcclCommunicator(meeting.world, unique, meeting.rank)
        except nccl.NcclError as error:
            raise DeviceError(
                f"rank {meeting.rank} cannot join NCCL's {meeting.world} ranks, each of which needs a GPU of its own "
                f"({error}): NCCL_DEBUG=WARN tells more"
            ) from None

    def all_reduce(self, address: int, count: int, stream: int) -> None:
        """Sums `count` FP32 numbers over the ranks, in place."""
        nccl = self._nccl
        self._call("all_reduce", "allReduce", address, address, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

    def all_gather(self, source: int, target: int, count: int, stream: int) -> None:
        """Every rank's `count` FP32 numbers at source, in the order of ranks, at target: [ranks, count]."""
        self._call("all_gather", "allGather", source, target, count, self._nccl.NCCL_FLOAT32, stream)

    def check(self) -> None:
        """Raises DeviceError for what has failed since, such as a peer that has gone."""
        self._call("check", "check_async_error")

    def close(self) -> None:
        """Ends it, when all that was enqueued has run; graphs that hold calls are void afterwards."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.destroy()

    def abort(self) -> None:
        """Ends it, and whatever of it still runs, without waiting for a peer."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _call(self, name: str, method: str, *arguments: int) -> None:
        if self._handle is None:
            raise DeviceError(f"NCCL's {name} is called after the communicator was closed")
        try:
            getattr(self._handle, method)(*arguments)
        except self._nccl.NcclError as error:
            raise DeviceError(f"NCCL's {name} failed ({error}): NCCL_DEBUG=WARN tells more") from None
