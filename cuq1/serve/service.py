"""The service behind every dialect: one engine, a queue in front of it, answers as streams of events."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import replace

from cuq1.engine import Engine
from cuq1.sampling import DecodeParams
from cuq1.serve.answering import Answering
from cuq1.serve.job import Job, Measures
from cuq1.serve.metrics import Metrics
from cuq1.serve.render import ChatRenderer
from cuq1.serve.request import ApiError, Event, Finished, Generation, Queued
from cuq1.serve.structured import Grammars
from cuq1.serve.turns import TurnMemory
from cuq1.serve.worker import State, Worker
from cuq1.text import TextSource, Tokenizer

KEEP_ALIVE_SECONDS = 5.0

answers_of_request: ContextVar[list[Measures] | None] = ContextVar("answers_of_request", default=None)
"""Where `generate` leaves the measures of the answers of the HTTP request that is being served."""


class EngineService:
    """A Service over an engine that is opened on a thread of its own.

    open_engine: called on that thread. context: the most tokens, where it is less than the engine's; max_queue: how
    many requests may wait beside the one that is computed; restarts: how often a failed engine is opened again;
    snapshots: bytes for what other conversations can be taken up from, as for Engine.keep_snapshots;
    keep_alive: seconds between the events of a request that waits; changed: told the engine's state, on the thread.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        text: TextSource,
        vocab_size: int,
        *,
        model_name: str,
        context: int | None = None,
        max_queue: int = 64,
        restarts: int = 1,
        snapshots: tuple[int, int] = (0, 0),
        keep_alive: float = KEEP_ALIVE_SECONDS,
        changed: Callable[[State], None] = lambda state: None,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = Tokenizer.load(text, vocab_size)
        self.turns = TurnMemory(self.tokenizer)
        self.renderer = ChatRenderer(text, self.tokenizer, self.turns)
        self.metrics = Metrics(self)
        self.max_queue, self.keep_alive = max_queue, keep_alive
        self.context = 0 if context is None else context
        self.defaults = DecodeParams()
        self._changed = changed
        self.worker = Worker(
            open_engine,
            lambda job: Answering(self.tokenizer, job.generation, job.measures, self.renderer.calls, self.turns),
            restarts=restarts,
            snapshots=snapshots,
            finished=lambda job: self.metrics.count(job.measures),
            changed=self._note,
        )

    def _note(self, state: State) -> None:
        if state == "restarting":
            self.metrics.restarted()
        self._changed(state)

    def start(self) -> None:
        """Open the engine; raises what that raises. Blocks until it is there."""
        self.engine = engine = self.worker.start()
        self.context = min(self.context, engine.context) if self.context else engine.context
        self.defaults = engine.default_params
        self.grammars = Grammars(self.tokenizer, self.defaults.stop_tokens, self.renderer.calls)

    @property
    def state(self) -> State:
        return self.worker.state

    def generate(self, generation: Generation) -> "JobAnswer":
        """Queue an answer, at once. Raises ApiError where the queue is full or the server is stopping."""
        room = self.context - len(generation.prompt.ids)
        if room < 1:
            raise ApiError(
                "too_long",
                f"this model's context has {self.context} tokens, and the prompt has {len(generation.prompt.ids)}, "
                "which leaves no room for an answer: shorten it",
            )
        asked = generation.params.max_tokens
        params = replace(
            generation.params,
            max_tokens=room if asked is None else min(asked, room),
            logprobs=generation.logprobs,
        )
        job = Job(replace(generation, params=params), asyncio.get_running_loop())
        self.worker.put(job, self.max_queue)
        measures = answers_of_request.get()
        if measures is not None:
            measures.append(job.measures)
        return JobAnswer(self, job)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """As Worker.close."""
        return self.worker.close(drain=drain, timeout=timeout)


class JobAnswer(AsyncIterator[Event]):
    """The events of one job (see Answer)."""

    def __init__(self, service: EngineService, job: Job) -> None:
        self._service, self._job = service, job
        self._ready: deque[Event] = deque([Queued(service.worker.position(job))])
        self._ended = False

    @property
    def measures(self) -> Measures:
        return self._job.measures

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        while not self._ready:
            self._ready = self._job.take()
            if not self._ready and not await self._job.wait(self._service.keep_alive):
                return Queued(self._service.worker.position(self._job))
        event = self._ready.popleft()
        self._ended = isinstance(event, Finished)
        return event

    async def aclose(self) -> None:
        """Cancel what is still to come."""
        self._cancel()

    def _cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._ready.clear()
            self._service.worker.drop(self._job)

    def __del__(self) -> None:
        """An answer that nobody holds is an answer that nobody reads."""
        self._cancel()
