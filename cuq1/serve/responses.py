"""/v1/responses: the OpenAI Responses interface, as Codex and the official client speak it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cuq1.sampling import DecodeParams
from cuq1.serve import body as fields
from cuq1.serve.agents import plain, until_first_call
from cuq1.serve.body import Body
from cuq1.serve.http import EventStream, read_json, refuse, sse, unless_gone
from cuq1.serve.request import ApiError, Event, Finished, Generation, Service
from cuq1.serve.responses_input import (
    NEUTRAL,
    Names,
    read_choice,
    read_input,
    read_schema,
    read_tools,
)
from cuq1.serve.responses_output import ResponseWriter
from cuq1.serve.settings import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
ENVELOPE = "reasoning.encrypted_content"


async def create(request: Request) -> Response:
    """The route's handler."""
    service: Service = request.app.state.service
    body = await read_json(request)
    asked = await asyncio.to_thread(read_request, body, request.headers, service)
    writer = ResponseWriter(asked.echo, asked.names, summary=asked.summary, envelope=asked.envelope)
    try:
        answer = service.generate(asked.generation)
    except ApiError as error:
        if error.kind != "too_long" or not asked.stream:
            raise
        # Agents show this plainly as the code of a failed response, and a status of 400 as raw JSON.
        refused = [*writer.begin(), *writer.fail(error)]
        return Response(b"".join(sse(data, data["type"]) for data in refused), media_type=EventStream.media_type)
    events: AsyncIterator[Event] = until_first_call(answer) if asked.one_call else answer
    if asked.stream:
        return EventStream(streamed(events, writer), answer)
    try:
        return JSONResponse(await unless_gone(request, collected(events, writer)))
    finally:
        await answer.aclose()


def routes(_service: Service) -> list[Route]:
    """This interface's."""
    return [Route("/v1/responses", create, methods=["POST"])]


@dataclass(frozen=True)
class Asked:
    """A request, read: what to generate, and how to say it."""

    generation: Generation
    names: Names
    echo: Mapping[str, Any]
    stream: bool
    summary: bool
    envelope: bool
    one_call: bool


def read_request(body: Body, headers: Mapping[str, str], service: Service) -> Asked:
    """The whole body; raises ApiError. It renders the prompt and compiles grammars, which takes a while."""
    fields.check_model(body)
    fields.check_neutral(body, NEUTRAL)
    tools, names = read_tools(body)
    messages = read_input(body, names)
    choice, tools = read_choice(body, tools, names)
    schema = read_schema(body)
    params = fields.params(body, service.defaults, "max_output_tokens")
    reasoning = fields.mapping(body, "reasoning")
    enabled, variables = read_thinking(body, reasoning)
    include = body.get("include") or []
    if not isinstance(include, list):
        refuse("include", "must be a list of strings")
    logprobs = fields.integer(body, "top_logprobs", 0, MAX_LOGPROBS)
    if logprobs is None and LOGPROBS in include:
        logprobs = 0
    parallel = fields.boolean(body, "parallel_tool_calls", True)
    constraint = service.grammars.constraint(
        schema=schema, tools=tools, choice=choice, parallel=parallel, param="text.format"
    )
    prompt = service.renderer.prompt(messages, plain(tools), enable_thinking=enabled, template_kwargs=variables)
    generation = Generation(
        prompt,
        params,
        stops=fields.stops(body),
        tools=tuple(tools),
        constraint=constraint,
        logprobs=logprobs,
        hint=_hint(body, headers),
    )
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    return Asked(
        generation,
        names,
        _echo(body, params, reasoning, service),
        stream=fields.boolean(body, "stream"),
        summary=summary is not None and summary != "none",
        envelope=ENVELOPE in include,
        one_call=not parallel,
    )


def read_thinking(body: Body, reasoning: Mapping[str, Any]) -> tuple[bool | None, dict[str, Any]]:
    """Whether to reason first, None for the template's default, and the template's further variables."""
    return fields.thinking({"reasoning": reasoning, "chat_template_kwargs": body.get("chat_template_kwargs")})


def _hint(body: Body, headers: Mapping[str, str]) -> str:
    """Which conversation this is, as far as the client says so."""
    key = fields.string(body, "prompt_cache_key")
    return key or headers.get("session-id") or headers.get("thread-id") or ""


def _echo(body: Body, params: DecodeParams, reasoning: Mapping[str, Any], service: Service) -> dict[str, Any]:
    """What a response repeats of its request."""
    format_ = fields.mapping(body, "text").get("format") or {"type": "text"}
    choice = body.get("tool_choice")
    return {
        "model": body.get("model") or service.model_name,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": fields.mapping(body, "metadata"),
        "parallel_tool_calls": fields.boolean(body, "parallel_tool_calls", True),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.get("safety_identifier"),
        "temperature": params.temperature,
        "text": {"format": format_},
        "tool_choice": "auto" if choice is None else choice,
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.get("user"),
    }


async def collected(events: AsyncIterator[Event], writer: ResponseWriter) -> dict[str, Any]:
    """The response, whole. Raises the ApiError that ended it, where one did."""
    async for event in events:
        if isinstance(event, Finished) and event.error is not None:
            raise event.error
        writer.feed(event)
    return writer.response


async def streamed(events: AsyncIterator[Event], writer: ResponseWriter) -> AsyncIterator[bytes]:
    """The response, as server-sent events."""
    for data in writer.begin():
        yield sse(data, data["type"])
    async for event in events:
        for data in writer.feed(event):
            yield sse(data, data["type"])
