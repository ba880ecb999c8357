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
    """The exit status of `run()`, whose Cuq1Error, Ctrl-C and closed pipe become a user's outcome."""
    try:
        return run()
    except Cuq1Error as error:
        print(f"{program}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has what it wanted; Python flushes stdout once more at exit, which must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
