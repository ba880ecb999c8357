"""A server in this process, and one as a process of its own. CUQ1_TEST_DEVICE names their device: cpu, or cuda."""

import asyncio
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import httpx
import uvicorn

from cuq1.description import Description
from cuq1.engine import open_engine
from cuq1.serve.app import create_app
from cuq1.serve.run import IDLE_SECONDS
from cuq1.serve.service import EngineService
from cuq1.serve.settings import Settings
from tests.paths import NANO, ROOT

DEVICE = os.environ.get("CUQ1_TEST_DEVICE", "cpu")
ON_CPU = DEVICE == "cpu"
LIMIT = 30.0 if ON_CPU else 90.0  # seconds that anything here may take; on a GPU, to compile kernels among it
PAUSE = 0.0 if ON_CPU else 0.05  # for Watched: on a GPU, nano has said all before anybody can interrupt it


NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # to read all that there are takes longer than an answer


def open_nano():
    """An engine of nano. On a GPU, the thread that opens it is the one that may use it."""
    return open_engine(NANO, DEVICE)


def nano_service(open_one=open_nano, **options):
    """A service on nano that has been started."""
    model = Description.open(NANO)
    service = EngineService(
        open_one,
        model.text,
        model.vocab_size,
        **{"model_name": "nano", "keep_alive": 0.2} | options,
    )
    service.start()
    return service


class Url(str):
    """Where a server answers; `server` is uvicorn's."""

    server: uvicorn.Server


@contextmanager
def serving(service, settings=None, *, send_buffer=None):
    """The service over HTTP at a free port of loopback; yields the URL. The service stays its owner's.

    send_buffer: bytes that the kernel holds of what a client does not read.
    """
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:  # asyncio sends small pieces at once on such alone
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            create_app(service, settings or Settings()),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=IDLE_SECONDS,
        )
        server = uvicorn.Server(config)
        loop = asyncio.new_event_loop()
        server.capture_signals = _no_signals
        thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])), daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        try:
            url = Url(f"http://127.0.0.1:{port}")
            url.server = server
            yield url
        finally:
            server.should_exit = server.force_exit = True
            thread.join(LIMIT)
            loop.close()


@contextmanager
def _no_signals():
    yield


@contextmanager
def endless(service):
    """Meanwhile, an answer ends at its bound alone, or when it is left."""
    service.defaults, kept = replace(service.defaults, stop_tokens=()), service.defaults
    try:
        yield
    finally:
        service.defaults = kept


def wait_for(condition, seconds=LIMIT):
    """Until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


class Process:
    """python -m cuq1.serve. `url` once it is ready; `log` is what it has said so far."""

    def __init__(self, *options, key=None):
        environment = {k: v for k, v in os.environ.items() if k != "CUQ1_API_KEY"} | {"OPENBLAS_NUM_THREADS": "1"}
        if key is not None:
            environment["CUQ1_API_KEY"] = key
        command = [sys.executable, "-m", "cuq1.serve", "--port", "0", "--device", DEVICE, *options]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        self._lines = []
        self._ready = threading.Event()
        self.url = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self._lines.append(line)
            if found := re.search(r"ready: (http://\S+)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    @property
    def log(self):
        return "".join(self._lines)

    def __enter__(self):
        assert self._ready.wait(LIMIT)
        assert self.url is not None, self.log
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def wait(self):
        """The exit status."""
        status = self.process.wait(LIMIT)
        self._reader.join(LIMIT)
        return status


def post(url, path, body, **options):
    """A JSON answer, which has to be a good one."""
    response = httpx.post(url + path, json=body, timeout=LIMIT, verify=NO_CERTIFICATES, **options)
    assert response.status_code == 200, response.text
    return response.json()
