"""One connection at the launcher: bytes in and out on a selector, never waiting for the other end."""

import secrets
import selectors
import socket
import time
from collections.abc import Callable

from cuq1.parallel.wire import MAX_HELLO, Decoder


class Peer:
    """A stranger, until `rank` is set. `heard`: when it was last heard of, by time.monotonic.

    `serve` is called with itself and the bytes that came, none at the connection's end.
    """

    def __init__(
        self, selector: selectors.BaseSelector, sock: socket.socket, serve: Callable[["Peer", bytes], None]
    ) -> None:
        self.challenge = secrets.token_hex(16)
        self.heard = time.monotonic()
        self.rank: int | None = None
        self.decoder = Decoder(MAX_HELLO, 0)
        self.closed = False
        self._selector, self._socket, self._serve = selector, sock, serve
        self._outgoing = bytearray()
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self._event)

    def send(self, data: bytes) -> None:
        """Send now, or when the other end reads again."""
        if not self.closed:
            self._outgoing += data
            self._flush()

    def close(self) -> None:
        """Drop the connection; what it has not read is lost."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._socket)
            self._socket.close()

    def _event(self, mask: int) -> None:
        if self.closed:
            return  # by what another connection did in the same round of events
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ:
            try:
                data = self._socket.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            self._serve(self, data)

    def _flush(self) -> None:
        try:
            if self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._outgoing.clear()  # reading will find the connection's end
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if self._selector.get_key(self._socket).events != events:
            self._selector.modify(self._socket, events, self._event)
