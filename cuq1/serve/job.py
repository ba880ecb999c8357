"""One answer between the engine's thread and the event loop: its events, its cancellation, its measures.

The engine's thread never waits for a reader: what it hands over is kept, neighbouring pieces of text joined, so that
the memory of an answer that nobody reads is bounded by the answer's own length.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from cuq1.serve.request import Event, Finished, Generation, Piece, Started

JOINED = 4096  # characters: a joined piece of that length goes on in another, so that joining costs no more than this


@dataclass
class Measures:
    """What one answer took; clock readings are of time.monotonic, None where that point was not reached."""

    queued: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reason: str = ""

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts a round, over the rounds that could have had some."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def seconds_to_first_token(self) -> float | None:
        """From the request's arrival, the time in the queue included."""
        return None if self.first_token is None else self.first_token - self.queued

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding: from the first round on; None of a single token, which says nothing of it."""
        if self.first_token is None or self.finished is None or self.finished <= self.first_token:
            return None
        if self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / (self.finished - self.first_token)


class Job:
    """An answer that was asked for. `put` is for the engine's thread, the rest for the event loop's."""

    def __init__(self, generation: Generation, loop: asyncio.AbstractEventLoop) -> None:
        self.generation = generation
        self.measures = Measures(prompt_tokens=len(generation.prompt.ids))
        self.done = False  # Finished was put
        self._loop = loop
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Nobody reads this answer any more."""
        self._cancelled = True

    def put(self, events: Iterable[Event]) -> None:
        """Hand events over; nothing comes after Finished."""
        with self._lock:
            for event in events:
                if self.done:
                    break
                self._append(event)
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            self._loop.call_soon_threadsafe(self._news.set)

    def _append(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Piece) and isinstance(last, Piece) and event.kind == last.kind and len(last.text) < JOINED:
            self._events[-1] = replace(event, text=last.text + event.text, tokens=last.tokens + event.tokens)
        else:
            self._events.append(event)
        if isinstance(event, Started):
            self.measures.cached_tokens = event.cached_tokens
        self.done = isinstance(event, Finished)

    def take(self) -> deque[Event]:
        """The events that have come since the last call."""
        with self._lock:
            self._news.clear()
            taken, self._events = self._events, deque()
        return taken

    async def wait(self, seconds: float) -> bool:
        """Wait for events; False where none came in that time."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True
