"""A command line that every rank of a run executes, led by rank 0. What goes wrong is said once."""

import os
import signal
import sys
from collections.abc import Callable

from cuq1.cli import BAD_INPUT
from cuq1.errors import Cuq1Error, LaunchError, PeerError
from cuq1.parallel.commands import Channel
from cuq1.parallel.rendezvous import WORLD, Rendezvous

BEGIN, NOTHING = "begin", "nothing"


def launched() -> bool:
    """Whether this process is a rank that cuq1-launch has started."""
    return bool(os.environ.get(WORLD))


class Part:
    """This rank's part of a run.

    begin: called on rank 0 once all that can be refused has been checked, before it opens an engine of several ranks:
    the others start then.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        self.meeting = meeting
        self.channel = Channel(meeting)
        self.begun = False

    def begin(self) -> None:
        self.channel.send(BEGIN)
        self.begun = True


def as_rank(run: Callable[[Part], int]) -> int:
    """The exit status of a command line that every rank of a run executes.

    `run` is called on rank 0 at once, and on the others when that calls `begin` or, where it never does, not at all.
    So what rank 0 refuses is said by itself alone, in its `guarded`, and what another rank cannot do by the launcher.
    """
    meeting = Rendezvous()
    part = Part(meeting)
    try:
        return _lead(run, part) if part.channel.leads else _follow(run, part)
    finally:
        meeting.close()


def _lead(run: Callable[[Part], int], part: Part) -> int:
    meeting = part.meeting
    try:
        status = run(part)
        sys.stdout.flush()  # here, where what goes wrong can still be told
    except (LaunchError, PeerError) as error:
        meeting.fail_of(error)  # unless another rank was first; the launcher says it
        return BAD_INPUT
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            meeting.fail(str(error) or type(error).__name__, told=True)
        elif not part.begun:
            part.channel.send(NOTHING)
        raise
    if status != 0:
        meeting.fail(f"it ended with status {status}", told=True)
    elif not part.begun:
        part.channel.send(NOTHING)
    return status


def _follow(run: Callable[[Part], int], part: Part) -> int:
    # Ctrl-C reaches rank 0 as well, which ends its request in order, on all ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return run(part) if part.channel.receive()["command"] == BEGIN else 0
    except Cuq1Error as error:
        part.meeting.fail_of(error)
        return BAD_INPUT
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            part.meeting.fail_of(error)
        raise
