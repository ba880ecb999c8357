"""What the HTTP dialects and the engine's worker say to each other: an answer asked for, and the events of it.

A dialect turns its request into a `Generation`, gives it to `Service.generate`, and renders the events that come
back. They come in this order: Queued, once at least; Started, once; Piece and CallPiece as they are settled; Finished,
last and always. Queued(0) stands between them wherever a few seconds pass without anything else. An answer that fails,
or is cut off by the server's end, has a Finished with an error, also before it was started.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from cuq1.sampling import DecodeParams
from cuq1.text import Prompt

if TYPE_CHECKING:
    from cuq1.serve.structured import Constraint, Grammars

ErrorKind = Literal["invalid", "too_long", "too_large", "busy", "auth", "not_found", "failed", "shutting_down"]
Reason = Literal["stop", "length", "tool_calls", "stop_string", "error", "cancelled"]

STATUS: Mapping[ErrorKind, int] = {
    "invalid": 400,
    "too_long": 400,
    "too_large": 413,
    "busy": 503,
    "auth": 401,
    "not_found": 404,
    "failed": 500,
    "shutting_down": 503,
}


class ApiError(Exception):
    """A request that cannot be served, before a dialect gives it its shape.

    kind: what is wrong; message: one sentence for whoever sent it; param: the field at fault, where there is one;
    status: the HTTP status that fits it where a dialect's agents want no other.
    """

    def __init__(self, kind: ErrorKind, message: str, param: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message.encode("utf-8", "replace").decode()  # a name that was sent may be no Unicode
        self.param = param
        self.status = STATUS[kind] if status is None else status


@dataclass(frozen=True)
class Generation:
    """One answer asked for.

    prompt: rendered by the service's Renderer, or of raw tokens; params: max_tokens is cut to what the context leaves;
    stops: stop strings; tools: as `check_tools` returns them, for reading calls out of the answer, () where none are to
    be read; constraint: the grammar of the answer; logprobs: None for none, n for the chosen token's and the n most
    likely; hint: which conversation this is, where the client says so; echo: the prompt is part of the answer
    (/v1/completions).
    """

    prompt: Prompt
    params: DecodeParams
    stops: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    constraint: "Constraint | None" = None
    logprobs: int | None = None
    hint: str = ""
    echo: bool = False


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most likely tokens: its id, its bytes, its natural logarithm of probability."""

    id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token of the answer, with the most likely ones at its place, most likely first."""

    id: int
    bytes: bytes
    logprob: float
    top: tuple[TopToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Queued:
    """`position` requests are before this one; 0 where it is computed, and there is nothing new to say.

    Repeated every few seconds, for a dialect to keep the connection alive with.
    """

    position: int


@dataclass(frozen=True, slots=True)
class Started:
    """Computing has begun; of the prompt's tokens, `cached_tokens` need not be computed again."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of text, never empty; `tokens` where logprobs were asked for.

    completion_tokens, reasoning_tokens, accepted: tokens so far, and accepted drafts a round so far.
    """

    kind: Literal["reasoning", "content"]
    text: str
    tokens: tuple[TokenInfo, ...] = ()
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted: float = 0.0


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A complete tool call: `arguments` is the text of a JSON object, `raw` what the model wrote."""

    index: int
    id: str
    name: str | None
    arguments: str
    raw: str
    tokens: tuple[TokenInfo, ...] = ()
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end: why, how many tokens (those of the reasoning among them), accepted drafts a round.

    ids: the answer's tokens, control tokens included, without a stop token that ended it.
    """

    reason: Reason
    stop_string: str | None = None
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted: float = 0.0
    error: ApiError | None = None
    ids: tuple[int, ...] = ()


Event: TypeAlias = Queued | Started | Piece | CallPiece | Finished


class Renderer(Protocol):
    """From messages and tools to a prompt's tokens, by the checkpoint's chat template."""

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] = {},
    ) -> Prompt:
        """The prompt of messages in the form that `cuq1.text.check_messages` takes; None is the template's default.

        Raises ApiError("invalid") for what is malformed or what the template refuses. It may take long: call it in
        a thread (`asyncio.to_thread`).
        """

    def count(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] = {},
    ) -> int:
        """The number of the prompt's tokens."""


class Answer(Protocol):
    """The events of one answer, an asynchronous iterator. Whoever has it must read it to its end or close it."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None:
        """Cancel what is still to come; at any time, any number of times."""


class Service(Protocol):
    """What a dialect gets (`request.app.state.service`)."""

    @property
    def model_name(self) -> str:
        """The name that answers give and /v1/models lists."""

    @property
    def context(self) -> int:
        """The most tokens that prompt and answer can have together."""

    @property
    def defaults(self) -> DecodeParams:
        """The checkpoint's sampling defaults, stop tokens included: what a request leaves out."""

    @property
    def grammars(self) -> "Grammars":
        """Compiles what a request asks of its answer. It may take long: call it in a thread."""

    @property
    def renderer(self) -> Renderer:
        """The chat template."""

    def generate(self, generation: Generation) -> "Answer":
        """Queue an answer, at once. Raises ApiError where the queue is full or the server is stopping."""
