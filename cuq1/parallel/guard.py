"""Run by the launcher as a process of its own: kills the ranks' process groups when the launcher is killed.

The kernel kills a rank's own process then (processes.py), but not what that has started in turn,
such as the program that a shell script runs. stdin is a pipe that only the launcher holds: a line
for each group, and `done` at an orderly end. It ends with the launcher, however that ends.
"""

import os
import signal
import sys


def main() -> None:
    """Wait for the launcher's end."""
    groups = sys.stdin.read().split()
    if groups[-1:] != ["done"]:
        for group in groups:
            try:  # noqa: SIM105  (nothing more to import: this process should be small)
                os.killpg(int(group), signal.SIGKILL)
            except OSError:
                pass  # it has ended


if __name__ == "__main__":
    main()
