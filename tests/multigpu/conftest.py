"""Runs on several GPUs, a process on each: tests skip, saying so, where there are fewer."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from cuq1.cuda.driver import bindings, check
from cuq1.errors import DeviceError
from tests.paths import ROOT

LAUNCH = [sys.executable, "-m", "cuq1.parallel.launch"]


class Done(NamedTuple):
    """A launcher's exit status, what it wrote, and how long it ran."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self):
        """The JSON values that rank 0 printed, one a line."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith(("{", "["))]


def gpus():
    """How many GPUs there are, and why none where there are none."""
    try:
        return int(check(bindings().cuDeviceGetCount())), ""
    except DeviceError as error:
        return 0, f" ({error})"


class Ranks:
    """Starts commands as ranks, each on the GPU of its number."""

    def __init__(self, world):
        self.world = world

    @contextmanager
    def started(self, *command, launch=()):
        """The launcher's process, its streams piped; it is ended with the block. launch: options of cuq1-launch."""
        process = subprocess.Popen(
            [*LAUNCH, "-n", str(self.world), *map(str, launch), "--", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=15)
            except (subprocess.TimeoutExpired, ValueError):
                process.kill()
                process.wait()

    def run(self, *command, timeout=120, launch=()):
        """Runs a command as ranks to its end: Done."""
        begun = time.monotonic()
        with self.started(*command, launch=launch) as process:
            out, err = process.communicate(timeout=timeout)
        return Done(process.returncode, out.decode(), err.decode(), time.monotonic() - begun)

    def command(self, function, *arguments):
        """What runs `function(meeting, *arguments)`, of a module of tests, with JSON's arguments."""
        where = [sys.executable, "-m", "tests.multigpu.rank_main", function.__module__, function.__name__]
        return [*where, json.dumps(arguments)]

    def call(self, function, *arguments, timeout=120):
        """What `function(meeting, *arguments)` returns on each rank, as JSON has it."""
        done = self.run(*self.command(function, *arguments), timeout=timeout)
        assert done.status == 0, done.err
        return done.lines[-1]


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    found, why = gpus()
    if found < 2:
        pytest.skip(f"needs two GPUs, and there {'is one' if found == 1 else 'are none'}{why}")
    return Ranks(2)
