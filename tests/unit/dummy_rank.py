"""A rank without a GPU that behaves as test_launch asks: python dummy_rank.py FOLDER MODE [VICTIM].

Every rank writes its process id into FOLDER, joins, and meets the others once. Then rank VICTIM
does what MODE says, and the others wait for it.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cuq1.errors import LaunchError
from cuq1.parallel import Rendezvous


def note(folder, name, pid):
    """Write a process id where the test reads it, in one piece."""
    draft = folder / f"{name}.new"
    draft.write_text(str(pid))
    draft.rename(folder / f"{name}.pid")


def misbehave(mode, folder, rank):
    """What the victim does."""
    if mode.startswith("exit"):
        os._exit(int(mode.removeprefix("exit")))
    if mode.startswith("signal"):
        os.kill(os.getpid(), int(mode.removeprefix("signal")))
    if mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "raise":
        raise RuntimeError("no such layer")
    if mode == "memory":  # as NCCL, killed before the others have mapped it
        while not (folder / "shm" / "other").exists():
            time.sleep(0.02)
        os.close(os.open(folder / "shm" / "nccl-mine00", os.O_CREAT))
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note(folder, f"child{rank}", child.pid)
        os._exit(0)
    time.sleep(600)


def main():
    folder, mode, victim = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None
    rank = int(os.environ["CUQ1_RANK"])
    if mode.startswith("stubborn"):
        mode = mode.removeprefix("stubborn ")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if mode == "absent" and rank == victim:
        time.sleep(600)
    with Rendezvous() as meeting:
        meeting.barrier("met")
        note(folder, f"rank{rank}", os.getpid())
        if mode == "print":
            print("first\nsecond")
            print("problem", end="", file=sys.stderr)
            return 0
        meeting.barrier("noted")
        if rank == victim:
            misbehave(mode, folder, rank)
        try:
            meeting.barrier("never")
        except LaunchError as error:
            (folder / f"rank{rank}.heard").write_text(str(error))
            if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
                time.sleep(600)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
