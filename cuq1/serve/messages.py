"""/v1/messages and /v1/messages/count_tokens: Anthropic Messages, as Claude Code and the official client speak it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cuq1.serve import body as fields
from cuq1.serve.agents import plain, until_first_call
from cuq1.serve.body import Body
from cuq1.serve.http import EventStream, invalid, read_json, sse, unless_gone
from cuq1.serve.messages_input import (
    NEUTRAL,
    conversation,
    hides_thinking,
    read_choice,
    read_messages,
    read_schema,
    read_thinking,
    read_tools,
)
from cuq1.serve.messages_output import MessageWriter
from cuq1.serve.request import Answer, ApiError, Event, Finished, Generation, Service

OVERLOADED = 529  # what this interface's clients know for a server that is busy
ASKED_AGAIN = 4000
"""Claude Code, told that prompt and max_tokens exceed the context, leaves a thousand tokens of it free and asks again,
if that makes three thousand; if not, its turn ends with the error."""


async def create(request: Request) -> Response:
    """The handler of /v1/messages."""
    service: Service = request.app.state.service
    body = await read_json(request)
    asked = await asyncio.to_thread(read_request, body, request.headers, service)
    answer = queued(asked.generation, service)
    events: AsyncIterator[Event] = until_first_call(answer) if asked.one_call else answer
    writer = MessageWriter(asked.model, hide_thinking=asked.hide_thinking)
    if asked.stream:
        return EventStream(streamed(events, writer), answer)
    try:
        await unless_gone(request, collect(events, writer))
    finally:
        await answer.aclose()
    return JSONResponse(writer.message)


async def count_tokens(request: Request) -> Response:
    """The handler of /v1/messages/count_tokens: the prompt that the same body would have at /v1/messages."""
    service: Service = request.app.state.service
    body = await read_json(request)

    def count() -> int:
        fields.check_model(body)
        _, tools, _ = read_choice(body, read_tools(body))
        thinking, variables = read_thinking(body)
        return service.renderer.count(
            read_messages(body), plain(tools), enable_thinking=thinking, template_kwargs=variables
        )

    return JSONResponse({"input_tokens": await asyncio.to_thread(count)})


def routes(_service: Service) -> list[Route]:
    """This interface's."""
    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


@dataclass(frozen=True)
class Asked:
    """A request, read."""

    generation: Generation
    model: str
    stream: bool
    one_call: bool
    hide_thinking: bool


def read_request(body: Body, headers: Mapping[str, str], service: Service) -> Asked:
    """The whole body; raises ApiError. It renders the prompt and compiles grammars, which takes a while."""
    fields.check_model(body)
    fields.check_neutral(body, NEUTRAL)
    messages = read_messages(body)
    if messages[-1]["role"] == "assistant":
        raise invalid(
            "messages", "must not end with the assistant's: an answer that was begun is not gone on with here"
        )
    choice, tools, parallel = read_choice(body, read_tools(body))
    thinking, variables = read_thinking(body)
    if fields.integer(body, "max_tokens", 1) is None:
        raise invalid("max_tokens", "is missing: say how long the answer may become")
    params = fields.params(body, service.defaults, "max_tokens")
    constraint = service.grammars.constraint(
        schema=read_schema(body), tools=tools, choice=choice, parallel=parallel, param="output_config.format"
    )
    prompt = service.renderer.prompt(messages, plain(tools), enable_thinking=thinking, template_kwargs=variables)
    generation = Generation(
        prompt,
        replace(params, max_tokens=_room(len(prompt.ids), params.max_tokens or 1, service.context)),
        stops=fields.stops(body, "stop_sequences"),
        tools=tuple(tools),
        constraint=constraint,
        hint=conversation(body, headers),
    )
    return Asked(
        generation,
        fields.string(body, "model") or service.model_name,
        stream=fields.boolean(body, "stream"),
        one_call=not parallel,
        hide_thinking=hides_thinking(body),
    )


def _room(prompt: int, asked: int, context: int) -> int:
    """max_tokens for a prompt; ApiError, in the words that agents look for, where it or the prompt is too long.

    With so little room left that nobody asks again, the answer gets what there is: most calls fit.
    """
    room = context - prompt
    if room < 1:
        raise ApiError("too_long", f"prompt is too long: {prompt} tokens > {context - 1} maximum")
    if asked > room >= ASKED_AGAIN:
        raise ApiError(
            "invalid",
            f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {context}, "
            "decrease input length or `max_tokens` and try again",
        )
    return min(asked, room)


def queued(generation: Generation, service: Service) -> Answer:
    """The answer; a queue without room is refused as this interface's clients expect."""
    try:
        return service.generate(generation)
    except ApiError as error:
        if error.kind == "busy":
            error.status = OVERLOADED
        raise


async def collect(events: AsyncIterator[Event], writer: MessageWriter) -> None:
    """The whole answer, into the message. Raises the ApiError that ended it, where one did."""
    async for event in events:
        if isinstance(event, Finished) and event.error is not None:
            raise event.error
        writer.feed(event)


async def streamed(events: AsyncIterator[Event], writer: MessageWriter) -> AsyncIterator[bytes]:
    """The message, as server-sent events."""
    async for event in events:
        for data in writer.feed(event):
            yield sse(data, data["type"])
