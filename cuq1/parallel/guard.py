"""Run by the launcher as a process of its own: kills the ranks' process groups when the launcher is killed.

The kernel kills a rank's own process then (processes.py), but not what that has started in turn,
such as the program that a shell script runs; and shared memory stays (leftovers.py). stdin is a pipe that only the
launcher holds: a line for each group, and `done` at an orderly end. It ends with the launcher, however that ends.
Arguments: the shared memory that is not the ranks'.
"""

import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

END_SECONDS = 5.0  # for what was killed to let go of its files


def main() -> None:
    """Wait for the launcher's end."""
    groups = sys.stdin.read().split()
    if groups[-1:] == ["done"]:
        return
    _signal(groups, signal.SIGKILL)
    limit = time.monotonic() + END_SECONDS
    while _signal(groups, 0) and time.monotonic() < limit:
        time.sleep(0.05)
    # By its file: importing the package would make this process large.
    runpy.run_path(str(Path(__file__).with_name("leftovers.py")))["Leftovers"](set(sys.argv[1:])).clear()


def _signal(groups: Sequence[str], number: int) -> bool:
    """Whether there was anything left to send it to."""
    found = False
    for group in groups:
        try:
            os.killpg(int(group), number)
            found = True
        except OSError:
            pass  # it has ended
    return found


if __name__ == "__main__":
    main()
