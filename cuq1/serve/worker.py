"""The engine's thread: it opens the engine, computes the answers one by one, and opens the engine again if it fails."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol, runtime_checkable

from cuq1.engine import Engine
from cuq1.errors import Cuq1Error
from cuq1.sampling import DecodeStream, Round
from cuq1.serve.answering import Answering
from cuq1.serve.failures import EngineFailure, Refused, engine_calls
from cuq1.serve.job import Job
from cuq1.serve.log import log, where
from cuq1.serve.prompt import PromptSteps
from cuq1.serve.request import ApiError, Finished, Reason, Started

State = Literal["loading", "ready", "restarting", "failed", "closed"]


@runtime_checkable
class Watched(Protocol):
    """An engine that can end by itself."""

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost` when it has, on whatever thread."""


class Worker:
    """Answers are computed in the order of `put`. Everything but the thread's own methods may be called from anywhere.

    open_engine: called on the thread, also after a failure, at most `restarts` times. answering: makes what reads a
    job's tokens. snapshots: bytes, as for Engine.keep_snapshots. finished: called once for each job, when it has ended.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        answering: Callable[[Job], Answering],
        *,
        restarts: int = 1,
        snapshots: tuple[int, int] = (0, 0),
        finished: Callable[[Job], None] = lambda job: None,
        changed: Callable[[State], None] = lambda state: None,
    ) -> None:
        self._open_engine, self._answering = open_engine, answering
        self._restarts, self._finished, self._changed = restarts, finished, changed
        self._snapshots = snapshots
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closing = False
        self._lost = False  # the engine has ended by itself
        self._opened = threading.Event()
        self._engine: Engine | None = None
        self._prompts = PromptSteps()
        self.state: State = "loading"
        self.error: Exception | None = None  # why the engine is not there
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> Engine:
        """Open the engine; raises what that raises."""
        self._thread.start()
        self._opened.wait()
        if self._engine is None:
            assert self.error is not None
            raise self.error
        return self._engine

    def put(self, job: Job, bound: int) -> None:
        """Queue a job, where at most `bound` wait then beside the one that is computed. Raises ApiError."""
        with self._lock:
            if self._closing or self.state in ("failed", "closed"):
                raise self._refusal()
            if self.state == "restarting":
                raise ApiError("busy", "the engine failed and is starting again: try again in a while")
            if len(self._waiting) + (self._running is not None) > bound:
                raise ApiError("busy", f"{bound} requests are waiting already, and no more are taken: try again later")
            self._waiting.append(job)
            self._lock.notify_all()

    def drop(self, job: Job) -> None:
        """Nobody wants this job any more: it leaves the queue, or stops at the engine's next sign of life."""
        job.cancel()
        with self._lock:
            if job not in self._waiting:
                return
            self._waiting.remove(job)
        self._end(job, "cancelled")

    def position(self, job: Job) -> int:
        """How many jobs are computed before this one, the running one among them; 0 for that itself."""
        with self._lock:
            if job is self._running or job.done:
                return 0
            with suppress(ValueError):
                return self._waiting.index(job) + (self._running is not None)
        return 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def stopping(self) -> bool:
        """Whether nothing more is taken."""
        return self._closing

    @property
    def busy(self) -> bool:
        return self._running is not None

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take nothing more, finish what is queued or, without `drain`, end it with an error; then close the engine.

        False where that took longer than `timeout` seconds.
        """
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if not drain:
            self.abort(ApiError("shutting_down", "the server is shutting down: try again later"))
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def abort(self, error: ApiError) -> None:
        """End all jobs with an error."""
        with self._lock:
            jobs = list(self._waiting)
            self._waiting.clear()
            running = self._running
        for job in jobs:
            self._end(job, "error", error)
        if running is not None:
            running.put([_ended(running, "error", error)])
            running.cancel()

    def refuse(self) -> None:
        """Take nothing more, but finish what is queued."""
        with self._lock:
            self._closing = True

    def _refusal(self) -> ApiError:
        if self._closing:
            return ApiError("shutting_down", "the server is shutting down: try again later")
        return ApiError("failed", "the engine has failed, and the server has to be started again", status=503)

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            self._enter("ready", self._open_engine())
        except Exception as error:
            self.error, self.state = error, "failed"  # which `start` raises
            self._opened.set()
            return
        self._opened.set()
        while self._serve_next():
            pass
        self._leave("failed" if self.state == "failed" else "closed")

    def _serve_next(self) -> bool:
        """Compute the next answer; False at the end. Nothing of it is held afterwards."""
        job = self._next()
        try:
            if job is None:
                if self._lost and self._engine is not None:
                    self._recover(EngineFailure("it ended while nothing was asked of it"))
                return not self._ended
            self._answer(job)
        except EngineFailure as failure:
            self._recover(failure)
        except Exception as error:  # a defect outside of the engine costs this answer alone
            log.error("defect: %s", where(error))
            assert job is not None
            self._end(job, "error", _defect(error))
        finally:
            with self._lock:
                self._running = None
        return True

    def _enter(self, state: State, engine: Engine) -> None:
        engine.keep_snapshots(*self._snapshots)
        self._engine, self._lost = engine, False
        self._set(state)
        if isinstance(engine, Watched):
            engine.watch(lambda: self._lose(engine))

    def _lose(self, engine: Engine) -> None:
        """The engine has ended. Where it computes, that is seen there as well."""
        with self._lock:
            if engine is self._engine:
                self._lost = True
                self._lock.notify_all()

    def _leave(self, state: State) -> None:
        engine, self._engine = self._engine, None
        self._set(state)
        if engine is not None:
            with suppress(Exception):  # it may be what failed
                engine.close()

    def _set(self, state: State) -> None:
        if state != self.state:
            self.state = state
            self._changed(state)

    def _next(self) -> Job | None:
        """The next job that somebody wants; None at the end, and where the engine has to be seen to."""
        with self._lock:
            while not self._waiting and not self._closing and not self._lost:
                self._lock.wait()
            if not self._waiting or self._engine is None or self._lost:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _answer(self, job: Job) -> None:
        """Compute one answer."""
        engine = self._engine
        assert engine is not None
        generation = job.generation
        job.measures.started = time.monotonic()
        answering = self._answering(job)
        stream: DecodeStream | None = None
        try:
            length = len(generation.prompt.ids)
            if not self._prompts.run(
                engine,
                generation,
                begun=lambda kept: job.put([Started(length, kept)]),
                wanted=lambda: not job.cancelled,
            ):
                self._end(job, "cancelled", answering=answering)
                return
            with engine_calls():
                constraint = generation.constraint
                mask = None if constraint is None else constraint.mask(generation.prompt.in_reasoning)
                stream = engine.decode(generation.params, mask=mask)
            while (step := self._round(stream)) is not None:
                if job.measures.first_token is None:
                    job.measures.first_token = time.monotonic()
                job.put(answering.feed(step))
                if job.cancelled or answering.stopped:
                    break
            reason: Reason = "cancelled" if job.cancelled else stream.finish_reason or "stop"
            self._end(job, reason, answering=answering)
        except Refused as refused:
            self._end(job, "error", refused.error, answering)
        finally:
            if stream is not None:
                with suppress(Exception):  # where it failed, it has been said
                    stream.close()

    def _round(self, stream: DecodeStream) -> Round | None:
        with engine_calls():
            return next(stream, None)

    @property
    def _ended(self) -> bool:
        """Whether nothing more is to be done."""
        return self._engine is None or (self._closing and not self._waiting)

    def _recover(self, failure: EngineFailure) -> None:
        """All pending answers end with an error, and the engine is opened again if that may help."""
        log.error("the engine failed: %s", failure)
        self._set("restarting" if self._restarts else "failed")
        self.error = failure
        error = ApiError("failed", "the engine failed while it computed: try again")
        if self._running is not None:
            self._end(self._running, "error", error)
        self.abort(error)
        self._leave(self.state)
        if not self._restarts or self._closing:
            self._set("failed")
            return
        self._restarts -= 1
        try:
            self._enter("ready", self._open_engine())
        except Exception as again:
            log.error("the engine does not start again: %s", again if isinstance(again, Cuq1Error) else where(again))
            self.error = again
            self._set("failed")
            self.abort(error)

    def _end(self, job: Job, reason: Reason, error: ApiError | None = None, answering: Answering | None = None) -> None:
        """The job's last event."""
        if job.measures.finished is not None:
            return
        job.measures.finished = time.monotonic()
        job.measures.reason = reason
        if answering is None:
            job.put([_ended(job, reason, error)])
        else:
            events = answering.finish(reason, error)
            end = events[-1]
            assert isinstance(end, Finished)
            job.measures.reason = end.reason
            job.put(events)
        self._finished(job)


def _ended(job: Job, reason: Reason, error: ApiError | None) -> Finished:
    measures = job.measures
    return Finished(reason, None, measures.completion_tokens, measures.reasoning_tokens, measures.mean_accepted, error)


def _defect(error: Exception) -> ApiError:
    return ApiError("failed", f"the server has a defect ({type(error).__name__}): report it, with the request")
