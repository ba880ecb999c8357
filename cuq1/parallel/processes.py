"""Ranks as processes: each in a session of its own, and none that outlives its launcher."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from cuq1.errors import LaunchError

PR_SET_PDEATHSIG = 1
GUARD_SECONDS = 0.5  # for the guard to end when it is told to


def bound_to_this_process() -> Callable[[], None]:
    """For between fork and exec: the kernel kills the child when the calling thread ends, however it does.

    Covers the rank's own process; what that starts in turn is `Guard`'s. Raises LaunchError where
    the system is not Linux.
    """
    if sys.platform != "linux":
        raise LaunchError(f"cuq1-launch needs Linux, and this is {sys.platform}")
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # found before the fork, as little should happen after it
    parent = os.getpid()

    def bind() -> None:
        if prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        if os.getppid() != parent:  # it died before the line above, which then had nothing to watch
            os.kill(os.getpid(), signal.SIGKILL)

    return bind


class Guard:
    """The process that kills ranks' groups when this one is killed, and clears their shared memory, except `before`.

    Raises LaunchError where it cannot start.
    """

    def __init__(self, before: Iterable[str]) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), *before],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # not reached by what ends the launcher's group
            )
        except OSError as error:
            raise LaunchError(
                f"{sys.executable} cannot be started ({error.strerror}): check the installation"
            ) from None

    def watch(self, process: "Process") -> None:
        """Look after the process group of a rank."""
        self._tell(f"{process.group}\n")

    def close(self) -> None:
        """After an orderly end of all ranks: end it too."""
        self._tell("done\n")
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(GUARD_SECONDS)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # somebody has killed it: the kernel still binds ranks to the launcher
                self._process.stdin.write(line.encode())


class Process:
    """One rank. `status` is its exit status as a shell gives it, None while it runs.

    Rank 0 has the launcher's own streams; of the others, `outputs` are stdout and stderr.
    Raises LaunchError where the command cannot be started.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.status: int | None = None
        piped = subprocess.PIPE if rank else None
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL if rank else None,
                stdout=piped,
                stderr=piped,
                bufsize=0,
                start_new_session=True,
                preexec_fn=bound_to_this_process(),  # noqa: PLW1509  (the launcher has one thread)
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise LaunchError(f"{command[0]!r} cannot be started ({reason}): name a program") from None

    @property
    def group(self) -> int:
        """The number of the rank's process group, which is its own process's."""
        return self._process.pid

    @property
    def outputs(self) -> list[IO[bytes]]:
        """What the launcher has to read."""
        return [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe is not None]

    @property
    def ended(self) -> str:
        """How it ended, in words."""
        if self.status is not None and self.status > 128:
            try:
                return f"was ended by {signal.Signals(self.status - 128).name}"
            except ValueError:
                pass  # a status that the program chose
        return f"exited with status {self.status}"

    def poll(self) -> bool:
        """Whether it has ended since the last call."""
        if self.status is not None:
            return False
        # It stays a zombie until `close`: while it does, its number, which `signal` uses, is nobody else's.
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return False
        self.status = found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status
        return True

    def signal(self, number: int) -> None:
        """Send a signal to everything in the rank's process group."""
        with suppress(ProcessLookupError, PermissionError):  # nothing is left, or only a zombie
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """After its end: kill what it left behind in its group, and free its number."""
        self.signal(signal.SIGKILL)
        if self.status is not None:
            self._process.wait()
