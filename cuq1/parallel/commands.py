"""Rank 0's commands to the other ranks of a run: JSON objects, each with its name under "command".

The others wait for them for as long as rank 0 lives: it may be waiting for its user.
"""

import json
from typing import Any

from cuq1.parallel.rendezvous import Rendezvous
from cuq1.parallel.wire import LEADER, MAX_PAYLOAD

PIECE = MAX_PAYLOAD // 2  # bytes of a command that go at once

Command = dict[str, Any]


class Channel:
    """Commands over a rendezvous. They are among its calls, which come in the same order on every rank."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.meeting = meeting

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.meeting.rank == LEADER

    def send(self, name: str, **values: Any) -> None:
        """On rank 0: give a command, of any size; returns when all ranks have it. Raises LaunchError."""
        text = json.dumps({"command": name, **values}).encode()
        for end in range(PIECE, len(text) + PIECE, PIECE):
            more = b"+" if end < len(text) else b"."
            self.meeting.command(more + text[end - PIECE : end])

    def receive(self) -> Command:
        """On another rank: the next command. Raises LaunchError."""
        text, more = b"", True
        while more:
            piece = self.meeting.command()
            text, more = text + piece[1:], piece[:1] == b"+"
        found: Command = json.loads(text)
        return found
