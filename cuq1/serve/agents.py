"""What the dialects of coding agents share: reading nested objects, tools for the model, ids, one call at a time."""

import base64
import binascii
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from cuq1.serve.http import refuse
from cuq1.serve.request import CallPiece, Event, Finished

ENVELOPE = "cuq1:"  # of reasoning that goes to a client and back unread


def new_id(prefix: str) -> str:
    """An id that nothing else has, in this process or any other."""
    return f"{prefix}_{os.urandom(16).hex()}"


async def until_first_call(answer: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """The events of an answer that ends with its first call; whoever has the answer still has to close it."""
    async for event in answer:
        yield event
        if isinstance(event, CallPiece):
            yield Finished("tool_calls", None, event.completion_tokens, event.reasoning_tokens, event.accepted)
            return


def function_tool(name: str, source: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """A tool of the Chat Completions shape, with what the model can use."""
    function = {"name": name}
    if source.get("description") is not None:
        function["description"] = source["description"]
    if parameters is not None:
        function["parameters"] = parameters
    if source.get("strict") is True:
        function["strict"] = source["strict"]
    return {"type": "function", "function": function}


def plain(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as a template shows them: that arguments are held to their schema is not for the model to read."""
    return [
        {"type": "function", "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in tools
    ]


def schema_of(format_: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """The schema of a format: {type: text}, {type: json_object} or {type: json_schema, schema}."""
    kind = format_.get("type", "text" if not format_ else None)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        refuse(f"{where}.type", "must be text, json_object or json_schema")
    inner = format_.get("json_schema")
    schema = (inner if isinstance(inner, dict) else format_).get("schema")
    if not isinstance(schema, dict):
        refuse(f"{where}.schema", "must be a JSON schema, as an object")
    return schema


def objects(value: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """(path, object) of a list of objects; none where it is null or absent."""
    if value is None:
        return []
    if not isinstance(value, list):
        refuse(where, "must be a list")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            refuse(f"{where}[{index}]", "must be an object")
    return [(f"{where}[{index}]", item) for index, item in enumerate(value)]


def required(value: Mapping[str, Any], name: str, where: str, *, empty: bool = False) -> str:
    """A string that has to be there."""
    text = value.get(name)
    if not isinstance(text, str) or not (text or empty):
        refuse(f"{where}.{name}", "must be a string" + ("" if empty else " of at least one character"))
    return text


def sealed(reasoning: str) -> str:
    """Reasoning for a field that clients send back as it is. It is no secret, and not meant to be one."""
    return ENVELOPE + base64.b64encode(reasoning.encode()).decode()


def opened(envelope: Any) -> str:
    """What `sealed` was given; empty for what it has not returned."""
    if not isinstance(envelope, str) or not envelope.startswith(ENVELOPE):
        return ""
    try:
        return base64.b64decode(envelope.removeprefix(ENVELOPE), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
