"""cuq1.serve.engine_process on several ranks without a GPU: with engines that have no model, and follow rank 0's."""

import os
import sys
import time

from cuq1.parallel.follow import Leader, follow
from cuq1.parallel.rendezvous import Rendezvous
from cuq1.serve import engine_process
from tests.unit.fake_ranks import FakeEngine

PROGRAM = (sys.executable, "-m", "tests.serve.fake_rank")


class Slow(FakeEngine):
    def compute(self, name, *values):
        super().compute(name, *values)
        time.sleep(0.005)


def opened(model, device, tp, *, progress, **options):
    meeting = Rendezvous()
    assert (device, tp) == ("cuda", meeting.world)
    engine = Slow(meeting.rank, meeting.world)
    print(f"rank {meeting.rank} is {os.getpid()}", file=sys.stderr, flush=True)
    if meeting.rank:
        follow(engine, meeting)
        raise SystemExit(0)
    progress(1, 1)
    return Leader(engine, meeting, owned=True)


if __name__ == "__main__":
    engine_process.open_engine, engine_process.PROGRAM = opened, PROGRAM
    sys.exit(engine_process.main())
