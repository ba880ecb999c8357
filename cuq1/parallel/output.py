"""The output of ranks other than 0, on the launcher's stderr, each line with its rank in front."""

import os
import select
import selectors
from typing import IO

MAX_LINE = 64 << 10  # bytes; a longer line is cut
MAX_PENDING = 1 << 20  # bytes that stderr has not taken, beyond which ranks are not read


class Relay:
    """Reads pipes on `selector`, and writes whole lines to `descriptor`, never waiting for its reader."""

    def __init__(self, selector: selectors.BaseSelector, descriptor: int) -> None:
        self._selector, self._descriptor = selector, descriptor
        self._pipes: dict[IO[bytes], tuple[bytes, bytearray]] = {}  # prefix, and the line that has begun
        self._pending = bytearray()
        self._paused = False

    @property
    def idle(self) -> bool:
        """Whether every pipe has ended and every line is written."""
        return not self._pipes and not self._pending

    @property
    def waiting(self) -> bool:
        """Whether `flush` has something to do."""
        return bool(self._pending)

    def follow(self, pipe: IO[bytes], rank: int) -> None:
        """Relay what comes out of `pipe`, to its end."""
        self._pipes[pipe] = (f"[rank {rank}] ".encode(), bytearray())
        self._watch(pipe)

    def flush(self) -> None:
        """Write what stderr takes now."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while self._pending and poll.poll(0):
            # a pipe that is ready takes this much without waiting, and in one piece
            end = self._pending.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
            try:
                del self._pending[: os.write(self._descriptor, self._pending[:end])]
            except BlockingIOError:
                break
            except OSError:
                self._pending.clear()  # nobody reads, and the ranks must not wait for that
        if self._paused and len(self._pending) < MAX_PENDING:
            self._paused = False
            for pipe in self._pipes:
                self._watch(pipe)

    def close(self) -> None:
        """Give up what has not been read."""
        for pipe in list(self._pipes):
            self._end(pipe)
        self.flush()

    def _watch(self, pipe: IO[bytes]) -> None:
        self._selector.register(pipe, selectors.EVENT_READ, lambda _mask: self._read(pipe))

    def _read(self, pipe: IO[bytes]) -> None:
        if self._paused:
            return  # it was ready in the same round of events
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            self._end(pipe)
            return
        prefix, line = self._pipes[pipe]
        for piece in _lines(data):
            line += piece
            if line.endswith(b"\n") or len(line) >= MAX_LINE:
                self._pending += prefix + line + (b"" if line.endswith(b"\n") else b"\n")
                line.clear()
        if len(self._pending) >= MAX_PENDING:
            self._paused = True
            for other in self._pipes:
                self._selector.unregister(other)

    def _end(self, pipe: IO[bytes]) -> None:
        prefix, line = self._pipes.pop(pipe)
        if line:
            self._pending += prefix + line + b"\n"
        if not self._paused:
            self._selector.unregister(pipe)
        pipe.close()


def _lines(data: bytes) -> list[bytes]:
    """Lines that end at a line feed alone: a carriage return redraws one."""
    *whole, rest = data.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])
