"""A request's mask on several ranks: rank 0 has the grammar, and tells the others what it allows.

All ranks ask at the same places of a request, in the same order, so what is told needs no name of the place. Where the
grammar fails, all have the same error there.
"""

from base64 import b85decode, b85encode

import numpy as np

from cuq1.errors import Cuq1Error, LaunchError, RequestError
from cuq1.parallel.commands import Channel
from cuq1.sampling.mask import Allowed, Mask


class ToldMask:
    """On rank 0: a mask whose answers all ranks get."""

    def __init__(self, mask: Mask, channel: Channel) -> None:
        self._mask = mask
        self._channel = channel

    def allowed(self) -> Allowed | None:
        try:
            allowed = self._mask.allowed()
        except Cuq1Error as error:
            self._channel.send("mask", error=str(error))
            raise
        bits = None if allowed is None else b85encode(np.packbits(allowed).tobytes()).decode()
        self._channel.send("mask", bits=bits)
        return allowed

    def push(self, token: int) -> None:
        self._mask.push(token)

    def pop(self, count: int) -> None:
        self._mask.pop(count)


class HeardMask:
    """On another rank: what rank 0 said. `vocab` tokens."""

    def __init__(self, channel: Channel, vocab: int) -> None:
        self._channel = channel
        self._vocab = vocab

    def allowed(self) -> Allowed | None:
        command = self._channel.receive()
        if command["command"] != "mask":
            raise LaunchError(
                f"rank {self._channel.meeting.rank} was given {command['command']!r} where it needs a mask: "
                "start the program again, and report this"
            )
        if "error" in command:
            raise RequestError(command["error"])
        if command["bits"] is None:
            return None
        packed = np.frombuffer(b85decode(command["bits"]), np.uint8)
        return np.unpackbits(packed, count=self._vocab).astype(np.bool_)

    def push(self, token: int) -> None:
        """Rank 0 knows it."""

    def pop(self, count: int) -> None:
        """Rank 0 knows it."""
