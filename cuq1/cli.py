"""What the command lines share.

Bad input is one sentence on stderr and status 2, Ctrl-C is 130, and a closed
pipe is quiet.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from cuq1.errors import Cuq1Error, RequestError

BAD_INPUT = 2
INTERRUPTED = 130  # as the shell reports a process that SIGINT ended
BROKEN_PIPE = 141  # and one that SIGPIPE ended


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are those of `guarded`, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        """Raises RequestError."""
        raise RequestError(f"{message} (--help lists the options)")


def guarded(program: str, run: Callable[[], int]) -> int:
    """The exit status of `run()`, whose errors, Ctrl-C and closed pipe become a user's outcome."""
    _open_missing_streams()
    try:
        status = run()
        sys.stdout.flush()  # here, where a full disk can still be reported
        return status
    except Cuq1Error as error:
        problem = str(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()  # the reader has what it wanted
        return BROKEN_PIPE
    except MemoryError:
        problem = "this machine's memory does not suffice: use a smaller model or context"
    except OSError as error:
        _discard_stdout()
        place = error.filename if error.filename is not None else "the output"
        problem = f"{place}: {error.strerror or error}; check the path, its permissions and the free space"
    print(f"{program}: {problem}", file=sys.stderr)
    return BAD_INPUT


def _open_missing_streams() -> None:
    """A process can be started with stdout or stderr closed, and Python then has None in their place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115  (kept open to the end)


def _discard_stdout() -> None:
    """Python flushes stdout once more at exit, which must not complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
