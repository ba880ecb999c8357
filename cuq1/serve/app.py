"""The application: every dialect's routes over one service, behind the gate."""

import time
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cuq1.serve import chat, completions, messages, responses
from cuq1.serve.errors import error_response
from cuq1.serve.gate import Gate
from cuq1.serve.openapi import description
from cuq1.serve.page import page
from cuq1.serve.request import ApiError
from cuq1.serve.service import EngineService
from cuq1.serve.settings import Settings

_METHOD_NOT_ALLOWED = 405


def create_app(service: EngineService, settings: Settings) -> Starlette:
    """The application of a service that has been started."""
    routes = [
        Route("/", page, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
        Route("/openapi.json", _openapi, methods=["GET"]),
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/models/{name:path}", _model, methods=["GET"]),
        *chat.routes(service),
        *completions.routes(service),
        *responses.routes(service),
        *messages.routes(service),
    ]
    paths = frozenset(route.path for route in routes)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, settings=settings, metrics=service.metrics, paths=paths)],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.started = int(time.time())
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, in the dialect's shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == _METHOD_NOT_ALLOWED:
        refusal = ApiError("invalid", "this path takes another method", status=error.status_code)
    else:
        refusal = ApiError("not_found", "there is nothing at this path", status=error.status_code)
    response = error_response(refusal, request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _health(request: Request) -> Response:
    """200 where the engine computes; 503, with its state, where it doesn't."""
    service: EngineService = request.app.state.service
    state = "stopping" if service.worker.stopping else service.state
    body = {
        "status": "ok" if state == "ready" else state,
        "model": service.model_name,
        "running": int(service.worker.busy),
        "waiting": service.worker.waiting,
    }
    return JSONResponse(body, status_code=200 if state == "ready" else 503)


async def _metrics(request: Request) -> Response:
    service: EngineService = request.app.state.service
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _openapi(_request: Request) -> Response:
    return JSONResponse(description())


async def _models(request: Request) -> Response:
    """The one model, in a list that clients of both vendors parse."""
    entry = _entry(request, request.app.state.service.model_name)
    return JSONResponse(
        {"object": "list", "data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]}
    )


async def _model(request: Request) -> Response:
    """Any name is served, and it is the same model."""
    name = request.path_params["name"]
    if not name:
        raise HTTPException(404)
    return JSONResponse(_entry(request, name))


def _entry(request: Request, name: str) -> dict[str, Any]:
    service: EngineService = request.app.state.service
    started = request.app.state.started
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "cuq1",
        "max_model_len": service.context,
        "type": "model",
        "display_name": service.model_name,
        "lifecycle": "active",
        "max_input_tokens": service.context,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat().replace("+00:00", "Z"),
    }
