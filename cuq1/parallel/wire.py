"""What travels on a rendezvous connection: frames, and the proof that both ends know the secret.

A frame is two big-endian 32-bit lengths, a JSON object of the first and a payload of the second.
Both are bounded, so that a stranger on the port can neither fill the memory nor hold the run up.
"""

import hashlib
import hmac
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = struct.Struct(">II")
MAX_HELLO = 1 << 10  # bytes of a header before the other end has shown that it knows the secret
MAX_HEADER = 64 << 10
MAX_PAYLOAD = 1 << 20  # what one rank may contribute to one call
MAX_NAME = 200  # characters
MAX_MESSAGE = 4096  # characters; a character is at most 12 bytes of JSON, which MAX_HEADER holds
MAX_WORLD = 64

CALLS = ("barrier", "gather", "agree", "broadcast", "command")  # where ranks wait for each other
LEADER = 0  # the rank whose commands the others wait for, for as long as it has none


class FrameError(Exception):
    """Bytes that are no frame, or a frame that may not come now."""


@dataclass(frozen=True)
class Frame:
    """A header, and the bytes that it describes."""

    header: dict[str, Any]
    payload: bytes

    def text(self, key: str, limit: int) -> str:
        """The header's string `key`, of at most `limit` characters; raises FrameError."""
        value = self.header.get(key)
        if not isinstance(value, str) or len(value) > limit:
            raise FrameError(f"{key} is no text of at most {limit} characters")
        return value

    def number(self, key: str) -> int:
        """The header's integer `key`; raises FrameError."""
        value = self.header.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise FrameError(f"{key} is no integer")
        return value


def pack(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """The bytes of one frame."""
    text = json.dumps(header).encode()
    return PREFIX.pack(len(text), len(payload)) + text + payload


class Decoder:
    """Frames out of a stream of bytes, however it was cut up."""

    def __init__(self, max_header: int, max_payload: int) -> None:
        self._buffer = bytearray()
        self.allow(max_header, max_payload)

    def allow(self, max_header: int, max_payload: int) -> None:
        """Take frames up to these sizes, in bytes, from the next one on."""
        self._max_header = max_header
        self._max_payload = max_payload

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes, one at a time; raises FrameError."""
        self._buffer += data
        while (frame := self._take()) is not None:
            yield frame

    def _take(self) -> Frame | None:
        if len(self._buffer) < PREFIX.size:
            return None
        header, payload = PREFIX.unpack_from(self._buffer)
        if header > self._max_header or payload > self._max_payload:
            raise FrameError(f"a frame of {header} + {payload} bytes is too large")
        start, end = PREFIX.size + header, PREFIX.size + header + payload
        if len(self._buffer) < end:
            return None
        try:
            content = json.loads(bytes(self._buffer[PREFIX.size : start]))
        except (ValueError, RecursionError):
            raise FrameError("a frame's header is not JSON") from None
        if not isinstance(content, dict):
            raise FrameError("a frame's header is no JSON object")
        frame = Frame(content, bytes(self._buffer[start:end]))
        del self._buffer[:end]
        return frame


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1 and 3`."""
    *most, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def proof(secret: str, role: str, challenge: str, answer: str, rank: int, world: int) -> str:
    """HMAC-SHA256 over both ends' fresh numbers, in hex: shows the secret without sending it.

    `role` is who proves ("rank" or "launcher"), so that neither's proof serves as the other's.
    """
    text = json.dumps(["cuq1 rendezvous 1", role, challenge, answer, rank, world])
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def proven(given: str, expected: str) -> bool:
    """Whether two proofs are equal, in a time that does not tell how far they agree."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())
