"""What OpenAI's Chat Completions and its older completions share: options, envelopes, usage."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cuq1 import __version__
from cuq1.serve import body as fields
from cuq1.serve.http import EventStream, invalid, read_json, refuse, unless_gone
from cuq1.serve.request import Answer, CallPiece, Finished, Generation, Piece, Started

FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls", "cancelled": "stop"}
FINGERPRINT = f"cuq1-{__version__}"


@dataclass
class Plan:
    """A request, read: what to generate and how to show it. one_call: the answer ends with its first tool call."""

    id: str
    generation: Generation
    stream: bool
    usage: bool
    running_usage: bool
    one_call: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


def stream_options(body: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """`stream`, `include_usage` and `continuous_usage_stats`, which puts the usage so far into every chunk."""
    stream = fields.boolean(body, "stream")
    options = fields.mapping(body, "stream_options")
    return stream, fields.boolean(options, "include_usage"), fields.boolean(options, "continuous_usage_stats")


def response_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The JSON schema that `response_format` asks for; None for text."""
    form = fields.mapping(body, "response_format")
    if not form:
        return None
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            schema = fields.mapping(form, "json_schema").get("schema")
            if not isinstance(schema, dict):
                refuse("response_format", "needs an object in json_schema.schema")
            return schema
    raise invalid("response_format", "must have the type text, json_object or json_schema")


async def respond(
    request: Request,
    plan: Callable[[Mapping[str, Any], Any], Plan],
    frames: Callable[[Answer, Plan, str], AsyncIterator[bytes]],
    whole: Callable[[Answer, Plan, str], Coroutine[Any, Any, dict[str, Any]]],
) -> Response:
    """A request's answer: the events of `frames` where it is streamed, else the object of `whole`."""
    service = request.app.state.service
    body = await read_json(request)
    planned = await asyncio.to_thread(plan, body, service)
    answer = service.generate(planned.generation)
    if planned.stream:
        return EventStream(frames(answer, planned, service.model_name), answer)
    return JSONResponse(await unless_gone(request, whole(answer, planned, service.model_name)))


def envelope(planned: Plan, model: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": planned.id,
        "object": kind,
        "created": planned.created,
        "model": model,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
    }


class Counts:
    """Tokens of an answer as its events come, and `usage` of them."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.completion = self.reasoning = 0
        self.accepted = 0.0

    def see(self, event: object) -> None:
        """Take note of an event."""
        match event:
            case Started():
                self.prompt, self.cached = event.prompt_tokens, event.cached_tokens
            case Piece() | CallPiece():
                self.completion, self.accepted = event.completion_tokens, event.accepted
                self.reasoning = event.reasoning_tokens
            case Finished():
                self.completion, self.accepted = event.completion_tokens, event.accepted
                self.reasoning = event.reasoning_tokens

    def end(self, reason: Any) -> Finished:
        """The end of an answer that is left here."""
        return Finished(reason, None, self.completion, self.reasoning, self.accepted)

    def usage(self) -> dict[str, Any]:
        """As the official client parses it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def final(self) -> dict[str, Any]:
        """Fields of the last chunk; accepted drafts a round are no part of `usage`."""
        return {"usage": self.usage(), "accepted_per_round": round(self.accepted, 3)}

    def running(self, planned: Plan) -> dict[str, Any]:
        """Fields of the chunks before."""
        if planned.running_usage:
            return self.final()
        return {"usage": None} if planned.usage else {}
