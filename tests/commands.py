"""cuq1.generate as a process of its own."""

import subprocess
import sys

from tests.paths import ROOT

COMMAND = [sys.executable, "-m", "cuq1.generate"]


def run(*args, status=0, stdin=b"", cwd=ROOT):
    """stdout and stderr of one process."""
    done = subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, cwd=cwd, check=False, timeout=120)
    assert done.returncode == status, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()
