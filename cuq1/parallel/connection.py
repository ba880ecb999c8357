"""A rank's connection to the launcher: the secret shown, heartbeats, and one answer to each call."""

import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cuq1.errors import LaunchError
from cuq1.parallel.wire import (
    LEADER,
    MAX_HEADER,
    MAX_MESSAGE,
    MAX_PAYLOAD,
    Decoder,
    Frame,
    FrameError,
    pack,
    proof,
    proven,
)

CONNECT_SECONDS = 10.0
ACCUSED_SECONDS = 3.0  # for the launcher to have heard all ranks that miss something of each other
END_SECONDS = 3.0  # from SIGTERM to SIGKILL, for a process that has lost its launcher


def end_process(reason: str) -> None:
    """End this process, which nobody looks after any more: SIGTERM, then SIGKILL."""
    with suppress(OSError, ValueError):  # stderr may have gone with the launcher
        sys.stderr.write(f"cuq1: {reason}; this rank ends\n")
        sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


class Connection:
    """`rank` of `world`, connected to the launcher at `host`:`port`.

    A thread sends heartbeats and takes what comes. `on_lost` is called on it when the launcher
    dies, or falls silent for twice the heartbeat limit. Raises LaunchError where nobody answers,
    or does not know the secret, or the launcher refuses this rank.
    """

    def __init__(
        self, rank: int, world: int, host: str, port: int, secret: str, on_lost: Callable[[str], None]
    ) -> None:
        self._rank, self._world, self._on_lost = rank, world, on_lost
        self._decoder = Decoder(MAX_HEADER, world * MAX_PAYLOAD)
        self._frames: list[Frame] = []  # what came in one piece with the frame before it
        try:
            self._socket = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except OSError as error:
            reason = error.strerror or error
            raise LaunchError(f"no rendezvous at {host}:{port} ({reason}): is the launcher running?") from None
        try:
            self._timeout, self._limit = self._authenticate(secret)
        except (FrameError, OSError, LookupError, TypeError, ValueError):
            self._socket.close()
            raise LaunchError(
                f"the rendezvous at {host}:{port} and rank {rank} do not share a secret: "
                "give the rank the launcher's address and secret"
            ) from None
        except BaseException:
            self._socket.close()
            raise
        self._socket.settimeout(self._limit)
        self._sending, self._calling = threading.Lock(), threading.Lock()
        self._changed = threading.Condition()
        self._call = 0
        self._result: list[bytes] | None = None
        self._failure: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="cuq1 rendezvous", daemon=True)
        self._thread.start()

    def call(self, kind: str, name: str, data: bytes) -> list[bytes]:
        """Every rank's data at this call, in the order of ranks; raises LaunchError."""
        with self._calling:
            self._begin()
            self._send({"kind": kind, "name": name, "call": self._call}, data)
            # the launcher's limit comes first, as it knows who is missing; this one is for a launcher that hangs
            limit = self._timeout + 2 * self._limit
            if kind == "command" and self._rank != LEADER:
                limit = threading.TIMEOUT_MAX  # heartbeats go on, so that a launcher that hangs is found out
            with self._changed:
                self._changed.wait_for(self._settled, limit)
                result = self._result
                if result is not None:
                    return result
                if self._failure is not None:
                    raise LaunchError(self._failure)
                if self._closed:
                    raise LaunchError(f"rank {self._rank} is at {kind} {name!r} after it left the rendezvous")
                raise LaunchError(f"rank {self._rank} had no answer at {kind} {name!r} within {limit:g} s")

    def fail(self, message: str, *, told: bool = False) -> None:
        """Tell the launcher that this rank cannot go on, unless the run has ended already."""
        with self._changed:
            if self._failure is not None or self._closed:
                return
        self._send({"kind": "fail", "message": message[:MAX_MESSAGE], "told": told})

    def accuse(self, message: str, place: int, after: Sequence[int]) -> None:
        """The same where it is not clear yet whose fault it is; returns when the launcher has decided."""
        with self._changed:
            if self._failure is not None or self._closed:
                return
        self._send({"kind": "accuse", "message": message[:MAX_MESSAGE], "place": place, "after": list(after)})
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, ACCUSED_SECONDS)

    def close(self) -> None:
        """Leave, and end the thread."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._send({"kind": "leave"})
        with suppress(OSError):  # the launcher may be faster
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()

    def _begin(self) -> None:
        with self._changed:
            self._call += 1
            self._result = None

    def _settled(self) -> bool:
        return self._result is not None or self._failure is not None or self._closed

    def _authenticate(self, secret: str) -> tuple[float, float]:
        """Both ends show that they know the secret; returns the limits of waits and of silence, in seconds."""
        answer = secrets.token_hex(16)
        challenge = self._receive().text("challenge", 64)
        mine = proof(secret, "rank", challenge, answer, self._rank, self._world)
        self._socket.sendall(pack({"answer": answer, "rank": self._rank, "world": self._world, "proof": mine}))
        reply = self._receive()
        if reply.header.get("kind") == "refused":
            raise LaunchError(f"the launcher refuses this rank: {reply.text('message', MAX_MESSAGE)}")
        if not proven(reply.text("proof", 64), proof(secret, "launcher", challenge, answer, self._rank, self._world)):
            raise FrameError("the other end does not know the secret")
        return float(reply.header["timeout"]), float(reply.header["heartbeat"])

    def _receive(self) -> Frame:
        while not self._frames:
            data = self._socket.recv(1 << 16)
            if not data:
                raise FrameError("the connection ended")
            self._frames.extend(self._decoder.feed(data))
        return self._frames.pop(0)

    def _send(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        with suppress(OSError), self._sending:  # the thread finds out why, and says it
            self._socket.sendall(pack(header, payload))

    def _listen(self) -> None:
        """Until the connection ends: send heartbeats, and hand on what comes."""
        reason = "the launcher closed the connection"
        try:
            reason = self._exchange()
        except (OSError, ValueError):
            pass  # as at the connection's end
        except (FrameError, LookupError, TypeError):
            reason = "the launcher broke the protocol"
        with self._changed:
            lost = not self._closed  # after a failure too: the launcher stays until all ranks have ended
            if lost:
                self._failure = self._failure or reason
            self._changed.notify_all()
        if lost:
            self._on_lost(reason)

    def _exchange(self) -> str:
        interval = min(1.0, self._limit / 5)
        heard = beat = time.monotonic()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        for frame in self._frames:
            self._take(frame)
        while True:
            # what has come is read before silence is judged
            if poll.poll(max(0.0, beat - time.monotonic()) * 1000):
                data = self._socket.recv(1 << 16)
                if not data:
                    return "the launcher closed the connection"
                heard = time.monotonic()
                for frame in self._decoder.feed(data):
                    self._take(frame)
            elif time.monotonic() - heard > 2 * self._limit:
                return f"the launcher stopped answering for {2 * self._limit:g} s"
            if time.monotonic() >= beat:
                self._send({"kind": "beat"})
                beat = time.monotonic() + interval

    def _take(self, frame: Frame) -> None:
        with self._changed:
            match frame.header["kind"]:
                case "failed":
                    self._failure = frame.text("message", MAX_MESSAGE)
                case "result" if frame.number("call") == self._call:
                    result, end = [], 0
                    for size in frame.header["sizes"]:
                        result.append(frame.payload[end : end + size])
                        end += size
                    self._result = result
            self._changed.notify_all()
