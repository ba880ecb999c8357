"""From a command line that has been checked to a server that answers, and to its orderly end."""

import argparse
import asyncio
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn

from cuq1.cuda.driver import require_devices
from cuq1.description import Description
from cuq1.engine import Device, check_qwen2, has_gpus
from cuq1.serve.app import create_app
from cuq1.serve.log import log, to_stderr
from cuq1.serve.remote import EngineOptions, RemoteEngine
from cuq1.serve.request import ApiError
from cuq1.serve.service import EngineService
from cuq1.serve.settings import Settings
from cuq1.serve.worker import State

MAX_CONNECTIONS = 1000
# Longer than clients keep an idle connection: where the server ends one, it may meet their next request.
IDLE_SECONDS = 75
FORCE_SECONDS = 5.0  # from the end of the drain to the end of connections that still stand


def serve(
    options: argparse.Namespace,
    model: Description,
    model_path: Path,
    name: str,
    settings: Settings,
    listener: socket.socket,
    begun: float,
) -> int:
    """Load the model, answer until a signal comes; returns the exit status."""
    to_stderr()
    device = pick_device(options, model)
    log.info("loading %s", name)
    note_unapplied(model)
    engine_options = EngineOptions(
        model=str(model_path),
        device=device,
        tp=options.tp,
        activations=options.activations,
        context=options.context,
    )
    progress = Progress()

    def open_one() -> RemoteEngine:
        """The engine, and where it fails the same one again: not another device's."""
        nonlocal engine_options
        engine = RemoteEngine(engine_options, progress)
        engine_options = replace(engine_options, device=engine.device)
        return engine

    service = EngineService(
        open_one,
        model.text,
        model.vocab_size,
        model_name=name,
        context=options.context,
        max_queue=options.max_queue,
        restarts=options.engine_restarts,
        snapshots=(int(options.snapshots * 2**30), int(options.host_snapshots * 2**30)),
        keep_alive=options.keep_alive,
        changed=_note,
    )
    service.start()
    engine = service.engine
    assert isinstance(engine, RemoteEngine)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    log.info(
        "model %s, device %s, memory %.2f GiB, context %d",
        name,
        engine.device_name if options.tp == 1 else f"{options.tp} x {engine.device_name}",
        engine.memory / 2**30,
        service.context,
    )
    config = uvicorn.Config(
        create_app(service, settings),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        http="h11",
        loop="asyncio",
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(options.drain + FORCE_SECONDS),
    )
    server = Server(config, service, options.drain, f"ready: {url} ({time.monotonic() - begun:.1f} s)")
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        service.close(drain=False, timeout=FORCE_SECONDS)
    log.info("stopped")
    return 0


def note_unapplied(model: Description) -> None:
    """Says what the checkpoint asks of sampling and no engine computes."""
    if model.unapplied:
        log.warning("not applied, though the checkpoint asks for it: %s", ", ".join(model.unapplied))


def pick_device(options: argparse.Namespace, model: Description) -> Device:
    """What the engine is asked for; raises what a number of ranks cannot do, before anything is loaded."""
    if model.is_qwen2:
        check_qwen2(options.tp, options.activations)
    else:
        model.check_ranks(options.tp)
    given: Device = options.device
    if given == "cuda" and options.tp > 1:
        require_devices(options.tp)
    if given != "auto" or options.tp == 1:
        return given  # one device is for the engine's process to pick: to look for it is to open it
    return "cuda" if has_gpus(options.tp) else "cpu"


class Progress:
    """Layers as they are loaded: a line that is overwritten in a terminal, a few lines elsewhere."""

    def __init__(self) -> None:
        self._said = 0.0

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\rloading layers: {done}/{total}" if done < total else "\r\x1b[K")
            sys.stderr.flush()
        elif done == total or done / total >= self._said + 0.25:
            self._said = done / total if done < total else 0.0
            log.info("loading layers: %d/%d", done, total)


def _note(state: State) -> None:
    if state in ("restarting", "failed"):
        log.error("engine %s", state)
    elif state == "ready":
        log.info("engine ready")


class Server(uvicorn.Server):
    """Uvicorn's server with an end of its own: a first signal drains, a second one ends what is left."""

    def __init__(self, config: uvicorn.Config, service: EngineService, drain: float, ready: str) -> None:
        super().__init__(config)
        self._service, self._drain, self._ready = service, drain, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info(self._ready)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handlers while the server runs; the signal isn't raised again after it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, loop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        worker = self._service.worker
        if self.should_exit:
            self.force_exit = True
            self._abort()
            return
        log.info("stopping: %d running, %d waiting", worker.busy, worker.waiting)
        worker.refuse()
        self.should_exit = True
        loop.call_later(self._drain, self._abort)

    def _abort(self) -> None:
        self._service.worker.abort(ApiError("shutting_down", "the server is shutting down: try again later"))
