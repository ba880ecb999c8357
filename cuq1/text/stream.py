"""Token ids to text while they arrive, and stop strings over that text."""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cuq1.errors import TextError
from cuq1.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of output: ordinary text, or one control token in its literal spelling. Never empty."""

    text: str
    control: bool = False


def append_event(events: list[Event], text: str, control: bool = False) -> None:
    """Adds a piece to `events`, joining neighbouring text and dropping the empty piece."""
    if not text:
        return
    if events and not control and not events[-1].control:
        events[-1] = Event(events[-1].text + text)
    else:
        events.append(Event(text, control))


class Detokenizer:
    """Turns ids into events, one pass, constant work a token.

    A character is emitted when its last byte has arrived, never before. The
    texts of all events, joined, equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Events completed by `ids`; text between two control tokens is one event."""
        events: list[Event] = []
        pending = bytearray()
        for token_id in ids:
            control = self._tokenizer.control_text(token_id)
            if control is None:
                pending += self._tokenizer.token_bytes(token_id)
                continue
            # A control token ends whatever character was under way.
            append_event(events, self._decoder.decode(bytes(pending), True))
            pending.clear()
            append_event(events, control, True)
        append_event(events, self._decoder.decode(bytes(pending)))
        return events

    def flush(self) -> list[Event]:
        """Ends the stream: an unfinished character becomes U+FFFD. The object may then be fed anew."""
        events: list[Event] = []
        append_event(events, self._decoder.decode(b"", True))
        return events


class _Needle:
    """Knuth-Morris-Pratt: `length` is how much of the pattern the text read so far ends with."""

    __slots__ = ("_fallback", "length", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.length = 0
        self._fallback = [0] * len(pattern)
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._fallback[length - 1]
            length += pattern[i] == pattern[length]
            self._fallback[i] = length

    def step(self, character: str) -> bool:
        """Reads one character; True where it completes the pattern (no further step is then allowed)."""
        length, pattern = self.length, self.pattern
        while length and pattern[length] != character:
            length = self._fallback[length - 1]
        self.length = length = length + (pattern[length] == character)
        return length == len(pattern)


class StopFilter:
    """Ends a stream of events at the first stop string.

    Stop strings are looked for in the literal text of the stream, control
    tokens included, so '</think>' may be one. Text before the stop string is
    kept; the stop string and everything after it are dropped. The stop string
    that is complete first wins, and of several complete at the same character
    the longest: generation ends as early as it can, and the result does not
    depend on how the stream was cut.

    Held back is only the longest tail that could begin a stop string; a
    control token that overlaps that tail is held whole, and where a match
    begins inside it what precedes the match is kept as text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises TextError for a stop string that is empty or no string."""
        if isinstance(stops, str):
            raise TextError("stop strings come as a list: put the single stop string into one")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise TextError(f"stop string {index} is {stop!r}: give a string of at least one character")
        # Longest first, so that of several complete at one character the longest is met first.
        self._needles = [_Needle(stop) for stop in sorted(set(stops), key=lambda s: (-len(s), s))]
        self._held: deque[Event] = deque()
        self._held_length = 0
        self.matched: str | None = None

    def feed(self, events: Iterable[Event]) -> list[Event]:
        """Events that no stop string can reach any more; none once `matched` is set."""
        out: list[Event] = []
        for event in events:
            if self.matched is not None:
                break
            if not self._needles:
                append_event(out, event.text, event.control)
                continue
            position = self._held_length
            self._held.append(event)
            self._held_length += len(event.text)
            for character in event.text:
                position += 1
                hits = [needle.pattern for needle in self._needles if needle.step(character)]
                if hits:
                    self.matched = hits[0]
                    self._release(out, position - len(self.matched), cut_control=True)
                    self._held.clear()
                    break
            else:
                self._release(out, self._held_length - max(needle.length for needle in self._needles))
        return out

    def flush(self) -> list[Event]:
        """Ends the stream: what was held back, as no stop string can complete it now."""
        out: list[Event] = []
        if self.matched is None:
            self._release(out, self._held_length)
        return out

    def _release(self, out: list[Event], length: int, *, cut_control: bool = False) -> None:
        """Moves the first `length` held characters to `out`, control tokens whole unless `cut_control`."""
        while length > 0:
            event = self._held.popleft()
            if len(event.text) > length:
                if event.control and not cut_control:
                    self._held.appendleft(event)
                    return
                append_event(out, event.text[:length])
                self._held.appendleft(Event(event.text[length:], event.control))
                self._held_length -= length
                return
            append_event(out, event.text, event.control)
            length -= len(event.text)
            self._held_length -= len(event.text)
