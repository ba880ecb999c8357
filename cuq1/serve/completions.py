"""/v1/completions: text from a raw prompt, in which control tokens count; /tokenize and /detokenize beside it.

The prompt is a string, or token ids. `logprobs` are of the raw distribution, as in chat.py.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cuq1.errors import Cuq1Error
from cuq1.sampling.params import check_prompt
from cuq1.serve import body as fields
from cuq1.serve.agents import plain
from cuq1.serve.errors import openai_body
from cuq1.serve.http import COMMENT, invalid, read_json, refuse, sse
from cuq1.serve.openai import FINISH, Counts, Plan, envelope, respond, response_schema, stream_options
from cuq1.serve.request import Answer, ApiError, Finished, Generation, Piece, Queued, Service, Started, TokenInfo
from cuq1.serve.service import EngineService
from cuq1.serve.settings import MAX_LOGPROBS
from cuq1.text import Prompt

DEFAULT_TOKENS = 16
"""Of an answer, as the interface has it: raw text seldom comes to an end of its own."""


def _plan(body: Mapping[str, Any], service: EngineService) -> Plan:
    fields.check_model(body)
    fields.check_neutral(body)
    stream, usage, running = stream_options(body)
    echo = fields.boolean(body, "echo")
    logprobs = fields.integer(body, "logprobs", 0, MAX_LOGPROBS)
    if echo and logprobs is not None:
        refuse("logprobs", "is not supported together with echo: the prompt's tokens are not scored")
    params = fields.params(body, replace(service.defaults, max_tokens=DEFAULT_TOKENS), "max_tokens")
    generation = Generation(
        prompt=raw_prompt(body, service),
        params=params,
        stops=fields.stops(body),
        constraint=service.grammars.constraint(schema=response_schema(body)),
        logprobs=logprobs,
        hint=fields.string(body, "user") or "",
        echo=echo,
    )
    return Plan(f"cmpl-{uuid.uuid4().hex}", generation, stream, usage, running)


def raw_prompt(body: Mapping[str, Any], service: EngineService) -> Prompt:
    """`prompt`: a string, token ids, or a list of one of these. Raises ApiError."""
    value = body.get("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        try:
            ids = service.tokenizer.encode(value, control=True)
        except Cuq1Error as error:
            raise ApiError("invalid", f"prompt: {error}", "prompt") from None
        if not ids:
            refuse("prompt", "is empty: give at least one token")
        return Prompt(ids, value, False)
    if isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        try:
            ids = check_prompt(value, service.tokenizer.vocab_size, len(value), room=0)
        except Cuq1Error as error:
            raise ApiError("invalid", f"prompt: {error}", "prompt") from None
        return Prompt(ids, service.tokenizer.decode(ids), False)
    raise invalid("prompt", "must be a string or a list of token ids, and one only")


async def create(request: Request) -> Response:
    """The route's handler."""
    return await respond(request, _plan, _frames, _whole)


async def _whole(answer: Answer, planned: Plan, model: str) -> dict[str, Any]:
    texts = [planned.generation.prompt.text] if planned.generation.echo else []
    infos: list[TokenInfo] = []
    counts = Counts()
    end: Finished | None = None
    try:
        async for event in answer:
            counts.see(event)
            if isinstance(event, Piece):
                texts.append(event.text)
                infos += event.tokens
            elif isinstance(event, Finished):
                end = event
    finally:
        await answer.aclose()
    assert end is not None
    if end.error is not None:
        raise end.error
    return _envelope(planned, model, "".join(texts), FINISH[end.reason], _logprobs(infos, planned, 0)) | {
        "usage": counts.usage()
    }


async def _frames(answer: Answer, planned: Plan, model: str) -> AsyncIterator[bytes]:
    counts = Counts()
    offset = 0
    async for event in answer:
        counts.see(event)
        match event:
            case Queued():
                yield COMMENT
            case Started() if planned.generation.echo:
                yield sse(
                    _envelope(planned, model, planned.generation.prompt.text, None, None) | counts.running(planned)
                )
            case Piece():
                logprobs = _logprobs(event.tokens, planned, offset)
                offset += len(event.text)
                yield sse(_envelope(planned, model, event.text, None, logprobs) | counts.running(planned))
            case Finished(error=None):
                yield sse(_envelope(planned, model, "", FINISH[event.reason], None) | counts.running(planned))
            case Finished():
                assert event.error is not None
                yield sse(openai_body(event.error))
                return
    if planned.usage:
        yield sse(_envelope(planned, model, "", None, None) | {"choices": []} | counts.final())
    yield b"data: [DONE]\n\n"


def _envelope(
    planned: Plan, model: str, text: str, finish: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
    return envelope(planned, model, "text_completion", [choice])


def _logprobs(infos: list[TokenInfo] | tuple[TokenInfo, ...], planned: Plan, offset: int) -> dict[str, Any] | None:
    """Parallel lists, as this interface has them; of tokens with the same text the likelier one stays."""
    if planned.generation.logprobs is None:
        return None
    texts = [info.bytes.decode("utf-8", "replace") for info in infos]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [info.logprob for info in infos],
        "top_logprobs": [
            {one.bytes.decode("utf-8", "replace"): one.logprob for one in reversed(info.top)} for info in infos
        ],
        "text_offset": offsets,
    }


async def tokenize(request: Request) -> Response:
    """Token ids of a `prompt`, in which control tokens count unless `parse_special` is false, or of a chat's prompt."""
    service: EngineService = request.app.state.service
    body = await read_json(request)
    ids = await asyncio.to_thread(_tokens, body, service)
    return JSONResponse({"count": len(ids), "max_model_len": service.context, "tokens": ids})


def _tokens(body: Mapping[str, Any], service: EngineService) -> list[int]:
    if body.get("messages") is not None:
        fields.check_neutral(body)
        thinking, variables = fields.thinking(body)
        messages, tools = fields.messages(body), plain(fields.tools(body))
        return service.renderer.prompt(messages, tools, enable_thinking=thinking, template_kwargs=variables).ids
    text = fields.string(body, "prompt")
    if text is None:
        refuse("prompt", "must be a string, or messages be given")
    try:
        return service.tokenizer.encode(text, control=fields.boolean(body, "parse_special", True))
    except Cuq1Error as error:
        raise ApiError("invalid", f"prompt: {error}", "prompt") from None


async def detokenize(request: Request) -> Response:
    """The text of `tokens`."""
    service: EngineService = request.app.state.service
    ids = (await read_json(request)).get("tokens")
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        refuse("tokens", "must be a list of token ids")
    try:
        return JSONResponse({"prompt": service.tokenizer.decode(ids)})
    except Cuq1Error as error:
        raise ApiError("invalid", f"tokens: {error}", "tokens") from None


def routes(_service: Service) -> list[Route]:
    """These interfaces'."""
    return [
        Route("/v1/completions", create, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
