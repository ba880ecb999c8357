"""An engine in a process of its own, as an Engine.

A device that has failed cannot be used again by the process that used it, and ranks are processes anyway. So the server
starts the engine's process (cuq1.serve.engine_process), and can start it once more. Every call is a message and its
answer over a socket that only this user reaches; a request's rounds are asked for one by one, and its mask stays here.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cuq1 import errors
from cuq1.errors import Cuq1Error, DeviceError
from cuq1.sampling import DecodeParams, DecodeStream, FinishReason, Mask, Round

PROGRAM = (sys.executable, "-m", "cuq1.serve.engine_process")
SOCKET, SECRET = "CUQ1_ENGINE_SOCKET", "CUQ1_ENGINE_SECRET"
END_SECONDS = 10.0  # for a process to end by itself once its engine is closed


@dataclass(frozen=True)
class EngineOptions:
    """What `open_engine` takes, as JSON."""

    model: str
    device: str
    tp: int = 1
    activations: str = "f16"
    loop: str = "device"
    context: int | None = None


class RemoteEngine:
    """The engine of `options`. Opening it raises what the engine raises, DeviceError where its process ends."""

    def __init__(self, options: EngineOptions, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        self._stream = 0  # counts what supersedes a running request
        self._tokens: list[int] = []
        with tempfile.TemporaryDirectory(prefix="cuq1-") as folder:
            address, secret = str(Path(folder) / "engine"), secrets.token_bytes(32)
            with Listener(address, "AF_UNIX", authkey=secret) as listener:
                self.process = subprocess.Popen(
                    [*PROGRAM, json.dumps(asdict(options))],
                    env=os.environ | {SOCKET: address, SECRET: secret.hex()},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # the terminal's Ctrl-C is the server's to act on
                )
                self._connection = self._accept(listener, address, secret)
        try:
            while (message := self._receive())[0] == "progress":
                progress(*message[1])
        except BaseException:
            self._end()
            raise
        opened: dict[str, Any] = message[1]
        self.default_params: DecodeParams = opened["default_params"]
        self.vocab_size: int = opened["vocab_size"]
        self.context: int = opened["context"]
        self.device: str = opened["device"]
        self.device_name: str = opened["device_name"]
        self.memory: int = opened["memory"]
        """Bytes, of the device where it has memory of its own."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """As Engine.tokens."""
        return tuple(self._tokens)

    def prefill(self, ids: Sequence[int], *, chunk: int | None = None) -> int:
        """As Engine.prefill."""
        kept: int = self._call("prefill", list(ids), chunk=chunk)
        self._tokens = list(ids)
        return kept

    def held(self, ids: Sequence[int]) -> int:
        """As Engine.held."""
        count: int = self._call("held", list(ids))
        return count

    def keep_snapshots(self, first: int, second: int = 0) -> None:
        """As Engine.keep_snapshots."""
        self._call("keep_snapshots", first, second)

    def remember(self, hint: str = "", *, turn: bool = True) -> None:
        """As Engine.remember."""
        self._call("remember", hint, turn=turn)

    def rewind(self, length: int) -> None:
        """As Engine.rewind."""
        self._call("rewind", length)
        self._tokens = self._tokens[:length]

    def score(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """As Engine.score."""
        logits: NDArray[np.float32] = self._call("score", list(ids))
        return logits

    def decode(self, params: DecodeParams | None = None, *, mask: Mask | None = None) -> DecodeStream:
        """As Engine.decode."""
        seed: int = self._call("decode", params, masked=mask is not None)
        return DecodeStream(seed, self._rounds(mask, self._stream))

    def _rounds(self, mask: Mask | None, stream: int) -> Generator[Round, None, FinishReason]:
        try:
            while True:
                if stream != self._stream:
                    raise errors.RequestError("this request ended when the engine was given something else to do")
                self._connection_send(("next",))
                step: Round | FinishReason = self._result(mask)
                if isinstance(step, str):
                    return step
                self._tokens += step.tokens
                yield step
        finally:
            if stream == self._stream:
                with suppress(DeviceError):
                    self._call("end")

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._stream += 1
        self._connection_send((name, arguments, options))
        return self._result(None)

    def _connection_send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._gone() from None

    def _receive(self) -> Any:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if message[0] == "error":
            kind, text = message[1:]
            raise getattr(errors, kind, DeviceError)(text)
        return message

    def _result(self, mask: Mask | None) -> Any:
        """What a call returns; meanwhile the engine may ask for its mask."""
        while True:
            message = self._receive()
            if message[0] == "result":
                return message[1]
            assert mask is not None
            self._connection_send(_masked(mask, *message[1:]))

    def _gone(self) -> DeviceError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        status = self.process.poll()
        how = "does not answer" if status is None else f"ended with status {status}"
        return DeviceError(f"the engine's process {how}: see what it said before")

    def _accept(self, listener: Listener, address: str, secret: bytes) -> Connection:
        """The process' connection. Where that ends before, a connection of our own ends the wait."""

        def watch() -> None:
            self.process.wait()
            with suppress(Exception), Client(address, "AF_UNIX", authkey=secret) as last:
                last.send(("error", "DeviceError", f"the engine's process ended with status {self.process.returncode}"))

        Thread(target=watch, daemon=True).start()
        return listener.accept()

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost`, on a thread of its own, when the engine's process has ended."""

        def wait() -> None:
            self.process.wait()
            lost()

        Thread(target=wait, daemon=True).start()

    def close(self) -> None:
        """Give memory and devices back: the process ends."""
        with suppress(OSError):
            self._connection.send(("close",))
        self._end()

    def _end(self) -> None:
        end = time.monotonic() + END_SECONDS
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        if self.process.poll() is None or time.monotonic() > end:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _masked(mask: Mask, what: str, value: int) -> tuple[str, Any, int]:
    """A mask's answer as the engine's process takes it: ("allowed", bits or None, their number), or an error's text."""
    try:
        if what == "push":
            mask.push(value)
        elif what == "pop":
            mask.pop(value)
        else:
            allowed = mask.allowed()
            if allowed is not None:
                return "allowed", np.packbits(allowed).tobytes(), len(allowed)
    except Cuq1Error as error:
        return "error", str(error), 0
    return "allowed", None, 0
