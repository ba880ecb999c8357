"""/v1/chat/completions: OpenAI's Chat Completions, streamed and not.

`logprobs` are of the raw distribution: what the model gives before temperature, filters and grammars. `usage` counts
the stop token among the completion's, and of the prompt's tokens says how many were held already.
"""

import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cuq1.serve import body as fields
from cuq1.serve.agents import plain
from cuq1.serve.errors import openai_body
from cuq1.serve.http import COMMENT, invalid, sse
from cuq1.serve.openai import FINISH, Counts, Plan, envelope, respond, response_schema, stream_options
from cuq1.serve.request import (
    Answer,
    CallPiece,
    Finished,
    Generation,
    Piece,
    Queued,
    Service,
    Started,
    TokenInfo,
)


def plan(body: Mapping[str, Any], service: Service) -> Plan:
    """Read a request's body, and render its prompt. Raises ApiError."""
    fields.check_model(body)
    fields.check_neutral(body)
    stream, usage, running = stream_options(body)
    messages, tools = fields.messages(body), fields.tools(body)
    choice = _tool_choice(body)
    if choice == "none":
        tools = []
    thinking, variables = fields.thinking(body)
    parallel = fields.boolean(body, "parallel_tool_calls", True)
    prompt = service.renderer.prompt(messages, plain(tools), enable_thinking=thinking, template_kwargs=variables)
    generation = Generation(
        prompt=prompt,
        params=fields.params(body, service.defaults, "max_completion_tokens", "max_tokens"),
        stops=fields.stops(body),
        tools=tuple(tools),
        constraint=service.grammars.constraint(
            schema=response_schema(body), tools=tools, choice=choice, parallel=parallel
        ),
        logprobs=fields.top_logprobs(body),
        hint=fields.string(body, "prompt_cache_key") or fields.string(body, "user") or "",
    )
    return Plan(f"chatcmpl-{uuid.uuid4().hex}", generation, stream, usage, running, one_call=not parallel)


def _tool_choice(body: Mapping[str, Any]) -> Any:
    """auto, none, required, or {"name": NAME}."""
    choice = body.get("tool_choice")
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return {"name": name}
    raise invalid("tool_choice", "must be auto, none, required, or name a function of tools")


async def create(request: Request) -> Response:
    """The route's handler."""
    return await respond(request, plan, _frames, _whole)


async def _whole(answer: Answer, planned: Plan, model: str) -> dict[str, Any]:
    """The answer as one object; raises the ApiError that ended it, where one did."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    infos: list[TokenInfo] = []
    calls: list[dict[str, Any]] = []
    counts = Counts()
    end: Finished | None = None
    try:
        async for event in answer:
            counts.see(event)
            match event:
                case Piece():
                    texts[event.kind].append(event.text)
                    infos += event.tokens if event.kind == "content" else ()
                case CallPiece():
                    calls.append(_call(event))
                    if planned.one_call:
                        end = counts.end("tool_calls")
                        break
                case Finished():
                    end = event
    finally:
        await answer.aclose()
    assert end is not None
    if end.error is not None:
        raise end.error
    content, reasoning = "".join(texts["content"]), "".join(texts["reasoning"])
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    message["refusal"] = None
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None if planned.generation.logprobs is None else _logprobs(infos),
        "finish_reason": FINISH[end.reason],
    }
    return envelope(planned, model, "chat.completion", [choice]) | {"usage": counts.usage()}


def _call(event: CallPiece) -> dict[str, Any]:
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": event.arguments}}


async def _frames(answer: Answer, planned: Plan, model: str) -> AsyncIterator[bytes]:
    """The answer as chunks; keep-alives are comments."""
    counts = Counts()

    def chunk(delta: dict[str, Any], finish: str | None = None, infos: tuple[TokenInfo, ...] = ()) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": _logprobs(infos) if infos else None, "finish_reason": finish}
        return sse(envelope(planned, model, "chat.completion.chunk", [choice]) | counts.running(planned))

    async for event in answer:
        counts.see(event)
        match event:
            case Queued():
                yield COMMENT
            case Started():
                yield chunk({"role": "assistant", "content": ""})
            case Piece(kind="reasoning"):
                yield chunk({"reasoning_content": event.text})
            case Piece():
                yield chunk({"content": event.text}, infos=event.tokens)
            case CallPiece():
                call = _call(event)
                begun = call | {"function": call["function"] | {"arguments": ""}}
                yield chunk({"tool_calls": [{"index": event.index, **begun}]})
                arguments = {"index": event.index, "function": {"arguments": event.arguments}}
                yield chunk({"tool_calls": [arguments]})
                if planned.one_call:
                    yield chunk({}, "tool_calls")
                    break
            case Finished(error=None):
                yield chunk({}, FINISH[event.reason])
            case Finished():
                assert event.error is not None
                yield sse(openai_body(event.error))
                return
    if planned.usage:
        yield sse(envelope(planned, model, "chat.completion.chunk", []) | counts.final())
    yield b"data: [DONE]\n\n"


def _logprobs(infos: list[TokenInfo] | tuple[TokenInfo, ...]) -> dict[str, Any]:
    return {
        "content": [_token(info) | {"top_logprobs": [_token(one) for one in info.top]} for info in infos],
        "refusal": None,
    }


def _token(one: Any) -> dict[str, Any]:
    return {"token": one.bytes.decode("utf-8", "replace"), "logprob": one.logprob, "bytes": list(one.bytes)}


def routes(_service: Service) -> list[Route]:
    """This interface's."""
    return [Route("/v1/chat/completions", create, methods=["POST"])]
