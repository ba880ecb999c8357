"""What every request passes before it reaches a dialect: errors caught, a line in the log, who may ask, how much.

Nothing that a client sent is logged: neither bodies nor keys, nor paths that are no route's, nor the texts of
exceptions, which may quote a request.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Collection, Mapping
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cuq1.serve.errors import error_response
from cuq1.serve.job import Measures
from cuq1.serve.log import access, log, where
from cuq1.serve.metrics import Metrics
from cuq1.serve.request import ApiError
from cuq1.serve.service import answers_of_request
from cuq1.serve.settings import Settings

PUBLIC = frozenset({"/", "/health", "/openapi.json"})
GONE = 499  # what is logged where the client left before the response


class Gate:
    """Around the whole application. paths: those of its routes, the only ones that are logged."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics, paths: Collection[str]) -> None:
        self._app, self._settings, self._metrics, self._paths = app, settings, metrics, paths
        self._key = None if settings.api_key is None else _digest(settings.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        measures: list[Measures] = []
        answers_of_request.set(measures)
        begun, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        left = False
        try:
            await self._serve(scope, receive, noting, lambda: status)
        except ClientDisconnect:
            left = True
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            shown = GONE if left else status
            self._metrics.request(path, shown)
            access(scope["method"], path, shown, time.monotonic() - begun, measures)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, status: Callable[[], int]) -> None:
        """The application behind the checks; an exception becomes an error, unless a response has begun."""
        try:
            headers = _headers(scope)
            self._check_browser(headers)
            self._check_key(headers, scope["path"])
            await self._app(scope, self._bounded(receive, headers), send)
        except ApiError as error:
            refusal = error
        except ClientDisconnect:
            raise
        except Exception as error:
            log.error("defect in %s: %s", scope["path"] if scope["path"] in self._paths else "other", where(error))
            refusal = ApiError("failed", f"the server has a defect ({type(error).__name__}): report it")
        else:
            return
        if status():  # too late for another status: the connection ends without the stream's end
            raise ClientDisconnect
        await error_response(refusal, scope["path"])(scope, receive, send)

    def _check_browser(self, headers: Mapping[str, str]) -> None:
        """Without a key, pages of other sites must not reach the server through a browser on this machine."""
        if self._key is not None:
            return
        host = headers.get("host", "")
        name = (urlsplit(f"//{host}").hostname or "") if _splits(host) else ""
        if self._settings.hosts and name not in self._settings.hosts:
            raise ApiError(
                "auth",
                "this server has no API key, and answers on this machine's own names alone: start it with one",
                status=403,
            )
        origin = headers.get("origin")
        if origin is not None and (not _splits(origin) or urlsplit(origin).netloc != host):
            raise ApiError("auth", "this server has no API key, and answers no pages of other sites", status=403)

    def _check_key(self, headers: Mapping[str, str], path: str) -> None:
        if self._key is None or path in PUBLIC:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        if not hmac.compare_digest(_digest(given.strip().encode("latin-1")), self._key):
            raise ApiError("auth", "the API key is missing or wrong: send it as a Bearer token or as x-api-key")

    def _bounded(self, receive: Receive, headers: Mapping[str, str]) -> Receive:
        """`receive`, for a body of limited size and slowness."""
        limit, seconds = self._settings.max_body, self._settings.body_seconds
        too_large = ApiError("too_large", f"the body is larger than {limit} bytes")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        deadline = time.monotonic() + seconds
        size, complete = 0, False

        async def bounded() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise ApiError("invalid", f"the body did not arrive within {seconds:g} seconds", status=408) from None
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if size > limit:
                    raise too_large
            return message

        return bounded


def _splits(text: str) -> bool:
    """Whether this can be taken apart as an address."""
    try:
        urlsplit(text if "//" in text else f"//{text}").port  # noqa: B018  (parsing is what fails)
    except ValueError:
        return False
    return True


def _headers(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name; of several with one name the first counts."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found


def _digest(key: bytes) -> bytes:
    """Keys of any length are compared in the same time."""
    return hashlib.sha256(key).digest()
