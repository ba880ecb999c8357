"""Errors in the shapes that clients of each interface parse."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from cuq1.serve.request import ApiError, ErrorKind

RETRY_SECONDS = 5

_OPENAI_TYPES: Mapping[ErrorKind, str] = {
    "invalid": "invalid_request_error",
    "too_long": "invalid_request_error",
    "too_large": "invalid_request_error",
    "busy": "server_error",
    "auth": "authentication_error",
    "not_found": "invalid_request_error",
    "failed": "server_error",
    "shutting_down": "server_error",
}
_OPENAI_CODES: Mapping[ErrorKind, str] = {
    "too_long": "context_length_exceeded",
    "auth": "invalid_api_key",
    "busy": "server_is_overloaded",
    "shutting_down": "server_is_overloaded",
}
_ANTHROPIC_TYPES: Mapping[ErrorKind, str] = {
    "invalid": "invalid_request_error",
    "too_long": "invalid_request_error",
    "too_large": "request_too_large",
    "busy": "overloaded_error",
    "auth": "authentication_error",
    "not_found": "not_found_error",
    "failed": "api_error",
    "shutting_down": "overloaded_error",
}


def openai_body(error: ApiError) -> dict[str, Any]:
    """The body of an error of the OpenAI interfaces, also as an event of a stream."""
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI_TYPES[error.kind],
            "param": error.param,
            "code": _OPENAI_CODES.get(error.kind),
        }
    }


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The body of an error of Anthropic Messages, also as an event of a stream."""
    where = f"{error.param}: " if error.param is not None and not error.message.startswith(error.param) else ""
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPES[error.kind], "message": where + error.message}}


def error_headers(error: ApiError) -> dict[str, str]:
    """Retry-After where trying again helps."""
    if error.kind == "auth":
        return {"WWW-Authenticate": "Bearer"}
    if error.kind == "too_large":
        return {"Connection": "close"}  # what is left of the body is not read
    return {"Retry-After": str(RETRY_SECONDS)} if error.kind in ("busy", "shutting_down") else {}


def error_response(error: ApiError, path: str) -> JSONResponse:
    """An error in the shape of the interface that `path` belongs to."""
    body = anthropic_body(error) if path.startswith("/v1/messages") else openai_body(error)
    return JSONResponse(body, status_code=error.status, headers=error_headers(error))
