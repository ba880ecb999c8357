"""What every dialect does with HTTP: read a JSON body, stream events, notice that the client has gone."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cuq1.serve.request import Answer, ApiError
from cuq1.text.jsontext import refuse_constant

T = TypeVar("T")

SEND_SECONDS = 120.0
"""A client that takes nothing for so long is gone: its answer is let go of."""


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object that a request's body is; raises ApiError."""
    body = await request.body()
    try:
        value: Any = json.loads(body, parse_constant=refuse_constant, parse_float=_finite)
        if b"\\ud" in body.lower() or b"\xed" in body:
            value = without_lone_surrogates(value)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "a number, its encoding or its depth"
        raise ApiError("invalid", f"the body is no JSON that can be read ({reason})") from None
    if not isinstance(value, dict):
        raise ApiError("invalid", "the body must be a JSON object")
    return value


def without_lone_surrogates(value: Any) -> Any:
    """A JSON value with U+FFFD for every half of a surrogate pair.

    Agents written in JavaScript cut texts between the halves of a character, and then send them with every turn.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {without_lone_surrogates(key): without_lone_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_lone_surrogates(item) for item in value]
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is beyond the range of floats")
    return value


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects: ClientDisconnect then.

    For answers that are not streamed, once the body has been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        for each in (task, watch):
            with suppress(BaseException):
                await each


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events from `frames`, whose answer is closed whatever ends the response.

    A frame is the bytes of a whole event or comment (`sse`, `COMMENT`).
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], answer: Answer, headers: dict[str, str] | None = None) -> None:
        super().__init__(frames, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def bounded(message: Any) -> None:
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError:
                raise ClientDisconnect from None

        try:
            await super().__call__(scope, receive, bounded)
        finally:
            await self._answer.aclose()
            if hasattr(self.body_iterator, "aclose"):
                await self.body_iterator.aclose()


COMMENT = b": waiting\n\n"


def sse(data: Any, event: str | None = None) -> bytes:
    """A server-sent event with JSON data."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {compact(data)}\n\n".encode()


def compact(value: Any) -> str:
    """JSON text without spaces; non-ASCII stays."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def invalid(field: str, problem: str) -> ApiError:
    """The error that names a field."""
    return ApiError("invalid", f"{field} {problem}", field)


def refuse(field: str, problem: str) -> NoReturn:
    """Raises `invalid`."""
    raise invalid(field, problem)
