"""The result log's host side: records of rounds, as the device leaves them in host memory. Needs no GPU.

A record's words each stand beside its number, written together (kernels_cu/abi_loop.cuh, Mirror): all numbers as
expected, and the record is there whole. The device stops rather than overwrite a record that has not been read.
"""

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda import abi


class ResultLog:
    """Reads records in order. mirror: shared with the device, which writes its `log` and nothing else."""

    def __init__(self, mirror: abi.Mirror) -> None:
        self._mirror = mirror
        self._slots: NDArray[np.uint64] = np.ctypeslib.as_array(mirror.log)
        self.read = 0  # records, since the memory was zeroed

    def next(self) -> abi.Record | None:
        """The next record, or None where it has not come, or not whole. Its place is then free."""
        words = self._slots[self.read % abi.LOG_RECORDS].copy()
        number = (self.read + 1) & 0xFFFFFFFF
        if not ((words >> np.uint64(32)) == number).all():
            return None
        self.read += 1
        self._mirror.read = self.read & 0xFFFFFFFF
        return abi.Record.from_buffer_copy((words & np.uint64(0xFFFFFFFF)).astype(np.uint32).tobytes())

    def begin(self, taken: int) -> None:
        """Before a request: no cancellation, and a reader that has the first `taken` tokens of the sequence."""
        self._mirror.cancel = 0
        self.take(taken)

    def take(self, length: int) -> None:
        """Says that a reader has the sequence's first `length` tokens, and will not ask for what lies before."""
        self._mirror.taken = length

    def cancel(self) -> None:
        """Asks the device to end after the round that it is in."""
        self._mirror.cancel = 1


def decided(record: abi.Record) -> bytes:
    """All of a record but its clocks. Ranks that exchange have the same: what they decide follows from equal inputs."""
    return bytes(record)[: abi.Record.launched.offset]


def describe(record: abi.Record | None) -> str:
    """A record as part of a sentence."""
    if record is None:
        return "no round has been logged"
    return (
        f"the last record is round {record.index}: {record.rows} rows, {record.accepted} of {record.drafted} drafts "
        f"accepted, {record.count} tokens committed, {record.done} positions held"
    )
