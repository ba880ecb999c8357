"""A command line of several ranks without a GPU: python follow_rank.py FOLDER MODE [VICTIM].

Rank 0 leads requests on engines that the others' follow; within one of them, rank VICTIM does what MODE says. Every
rank writes its process id into FOLDER.
"""

import os
import signal
import sys
import time
from pathlib import Path

from cuq1.cli import INTERRUPTED, guarded
from cuq1.errors import DeviceError, PeerError, RequestError
from cuq1.parallel.follow import Leader, follow
from cuq1.parallel.rank import as_rank
from cuq1.sampling import DecodeParams
from tests.unit.dummy_rank import misbehave, note
from tests.unit.fake_ranks import FakeEngine

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
VICTIM = int(sys.argv[3]) if len(sys.argv) > 3 else -1


def prepared(meeting):
    """An engine whose sixth round is the victim's last."""
    engine = FakeEngine(meeting.rank, meeting.world)
    compute, rounds = engine.compute, []

    def wrapped(name, *values):
        compute(name, *values)
        time.sleep(0.01)
        if name != "round" or meeting.rank != VICTIM:
            return
        rounds.append(values)
        if len(rounds) == 6:
            if MODE == "device error":
                raise DeviceError("the GPU fell off")
            if MODE == "peer error":
                raise PeerError("a part never came", 3, (4,))
            misbehave(MODE, FOLDER, meeting.rank)

    engine.compute = wrapped
    return engine


def run(part):
    """What all ranks run."""
    meeting = part.meeting
    note(FOLDER, f"rank{meeting.rank}", os.getpid())
    if not part.channel.leads:
        if MODE == "no device":
            raise DeviceError(f"GPU {meeting.rank} does not exist")
        follow(prepared(meeting), meeting)
        return 0
    if MODE == "refused":
        time.sleep(0.5)
        raise RequestError("the prompt is empty")
    if MODE == "help":
        sys.exit(0)
    if MODE in ("alone", "status"):
        print("alone")
        return 5 if MODE == "status" else 0
    part.begin()
    with Leader(prepared(meeting), meeting) as leader:
        leader.prefill([1, 2, 3])
        tokens = []
        try:
            for step in leader.decode(DecodeParams(max_tokens=20 if MODE == "whole" else 2000, seed=1)):
                tokens += step.tokens
                if len(tokens) == 3:
                    note(FOLDER, "begun", os.getpid())
        except KeyboardInterrupt:
            print(len(tokens) >= 3)
            return INTERRUPTED
    print(tokens)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(guarded("follow_rank", lambda: as_rank(run)))
