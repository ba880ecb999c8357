"""python -m cuq1.serve.engine_process OPTIONS: the process of a RemoteEngine, or of each of its ranks.

Started by cuq1.serve.remote alone. It ends with its engine, or with the server; signals are the server's to act on.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from typing import Any, cast

import numpy as np

from cuq1.cli import guarded
from cuq1.cuda.driver import open_device
from cuq1.engine import Activations, Device, Engine, Loop, open_engine, usable_gpu
from cuq1.errors import Cuq1Error, DeviceError, RequestError
from cuq1.parallel.rendezvous import RANK, WORLD
from cuq1.sampling import Allowed, DecodeStream
from cuq1.serve.remote import PROGRAM, SECRET, SOCKET, EngineOptions


class _AskedMask:
    """The server's mask. What is pushed and popped is told together with the next question."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def allowed(self) -> Allowed | None:
        bits, count = self._ask("allowed", 0)
        return None if bits is None else np.unpackbits(np.frombuffer(bits, np.uint8), count=count).view(np.bool_)

    def push(self, token: int) -> None:
        self._ask("push", token)

    def pop(self, count: int) -> None:
        self._ask("pop", count)

    def _ask(self, what: str, value: int) -> tuple[bytes | None, int]:
        self._connection.send(("mask", what, value))
        kind, value_or_text, count = self._connection.recv()
        if kind == "error":
            raise RequestError(value_or_text)
        return value_or_text, count


def _serve(engine: Engine, connection: Connection, device: str) -> None:
    """Answer calls until the server closes the engine, or is gone."""
    opened = {
        "default_params": engine.default_params,
        "vocab_size": engine.vocab_size,
        "context": engine.context,
        "device": device,
        "device_name": _device_name(device),
        "memory": _memory(engine),
    }
    connection.send(("opened", opened))
    stream: DecodeStream | None = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        try:
            match message:
                case ("close",):
                    return
                case ("next",):
                    assert stream is not None
                    step = next(stream, None)
                    result: Any = stream.finish_reason if step is None else step
                case ("decode", (params,), options):
                    mask = _AskedMask(connection) if options["masked"] else None
                    stream = engine.decode(params, mask=mask)
                    result = stream.seed
                case ("end", _, _):
                    if stream is not None:
                        stream.close()
                    stream = result = None
                case (name, arguments, options):
                    result = getattr(engine, name)(*arguments, **options)
        except Cuq1Error as error:
            connection.send(("error", type(error).__name__, str(error)))
        else:
            connection.send(("result", result))


def _device_name(device: str) -> str:
    """As people know it."""
    with suppress(DeviceError):
        return open_device().name if device == "cuda" else device
    return device


def _memory(engine: Engine) -> int:
    """Bytes that the engine takes: of the device where it says so, else of this process."""
    parts = getattr(engine, "memory", None)
    if isinstance(parts, dict):
        return sum(parts.values())
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _open(options: EngineOptions, connection: Connection | None) -> Engine:
    def progress(done: int, total: int) -> None:
        if connection is not None:
            connection.send(("progress", (done, total)))

    return open_engine(
        options.model,
        cast(Device, options.device),
        options.tp,
        progress=progress,
        activations=cast(Activations, options.activations),
        loop=cast(Loop, options.loop),
        context=options.context,
    )


def _run(text: str) -> int:
    options = EngineOptions(**json.loads(text))
    if options.device == "auto" and options.tp == 1:
        options = replace(options, device="cuda" if usable_gpu() else "cpu")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.device == "cuda" and options.tp > 1 and not os.environ.get(WORLD):
        from cuq1.parallel.launch import Launch  # noqa: PLC0415  (few need it)

        return Launch([*PROGRAM, text], options.tp, program="cuq1.serve").run()
    if os.environ.get(RANK, "0") != "0":
        with _open(options, None):
            raise AssertionError("a rank that follows has no engine to call")
    try:
        with Client(os.environ[SOCKET], "AF_UNIX", authkey=bytes.fromhex(os.environ[SECRET])) as connection:
            return _answer(options, connection)
    except (ConnectionError, EOFError):  # the server is gone, and with it whoever would read of it
        return 1


def _answer(options: EngineOptions, connection: Connection) -> int:
    try:
        engine = _open(options, connection)
    except Cuq1Error as error:
        connection.send(("error", type(error).__name__, str(error)))
        return 0 if options.tp == 1 else 2
    with engine:
        _serve(engine, connection, options.device)
    return 0


def main() -> int:
    """Run the command line; returns the exit status."""
    return guarded("cuq1.serve", lambda: _run(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
