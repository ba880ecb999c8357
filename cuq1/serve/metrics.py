"""What /metrics says, in Prometheus' text format."""

from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cuq1.serve.job import Measures

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Watched(Protocol):
    """What is read at each scrape."""

    @property
    def state(self) -> str: ...

    @property
    def worker(self) -> "WatchedWorker": ...


class WatchedWorker(Protocol):
    @property
    def waiting(self) -> int: ...

    @property
    def busy(self) -> bool: ...


class Metrics:
    """Counters of one service, in a registry of its own, so that several services can stand in one process."""

    def __init__(self, service: Watched) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("cuq1_http_requests", "HTTP requests", ["path", "status"], registry=registry)
        self._answers = Counter("cuq1_answers", "Answers by how they ended", ["reason"], registry=registry)
        self._tokens = {
            kind: Counter(f"cuq1_{kind}_tokens", help_, registry=registry)
            for kind, help_ in (
                ("prompt", "Tokens of prompts, cached ones included"),
                ("cached", "Tokens of prompts that were held already"),
                ("completion", "Tokens generated"),
                ("reasoning", "Tokens of reasoning among those generated"),
            )
        }
        self._rounds = Counter("cuq1_rounds", "Speculative rounds", registry=registry)
        self._drafted = Counter("cuq1_drafted_tokens", "Drafts verified", registry=registry)
        self._accepted = Counter("cuq1_accepted_tokens", "Drafts accepted", registry=registry)
        self._restarts = Counter(
            "cuq1_engine_restarts", "Times that a failed engine was opened again", registry=registry
        )
        self._queue_seconds = self._histogram("queue", "From arrival to the prompt's start")
        self._first_seconds = self._histogram("time_to_first_token", "From arrival to the first token")
        self._answer_seconds = self._histogram("answer", "From arrival to the end of the answer")
        self._gauge("cuq1_engine_up", "1 where the engine can compute", lambda: service.state == "ready")
        self._gauge("cuq1_requests_waiting", "Requests in the queue", lambda: service.worker.waiting)
        self._gauge("cuq1_requests_running", "Requests being computed", lambda: service.worker.busy)

    def _histogram(self, name: str, help_: str) -> Histogram:
        return Histogram(f"cuq1_{name}_seconds", help_, buckets=_SECONDS, registry=self._registry)

    def _gauge(self, name: str, help_: str, value: "object") -> None:
        Gauge(name, help_, registry=self._registry).set_function(value)  # type: ignore[arg-type]

    def request(self, path: str, status: int) -> None:
        """An HTTP request was answered; `path` is a route's, never what was sent."""
        self._requests.labels(path, str(status)).inc()

    def restarted(self) -> None:
        self._restarts.inc()

    def count(self, measures: Measures) -> None:
        """An answer has ended."""
        self._answers.labels(measures.reason).inc()
        self._tokens["completion"].inc(measures.completion_tokens)
        self._tokens["reasoning"].inc(measures.reasoning_tokens)
        self._rounds.inc(measures.rounds)
        self._drafted.inc(measures.drafted)
        self._accepted.inc(measures.accepted)
        if measures.started is not None:
            self._tokens["prompt"].inc(measures.prompt_tokens)
            self._tokens["cached"].inc(measures.cached_tokens)
            self._queue_seconds.observe(measures.started - measures.queued)
        if measures.seconds_to_first_token is not None:
            self._first_seconds.observe(measures.seconds_to_first_token)
        if measures.finished is not None:
            self._answer_seconds.observe(measures.finished - measures.queued)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
