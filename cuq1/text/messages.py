"""Checks what a caller sends to a chat: messages and tools of the Chat Completions shape.

What comes back is a normalised copy, so that a template meets one shape only.
Every refusal names the index and the field.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from cuq1.errors import TextError
from cuq1.text.jsontext import refuse_constant
from cuq1.text.markup import THINK_CLOSE, THINK_OPEN

ROLES = ("system", "developer", "user", "assistant", "tool")

# Reasoning in front of an answer, as clients that keep the two in one text send it back.
_LEADING_REASONING = re.compile(rf"\s*{THINK_OPEN}(.*?){THINK_CLOSE}(.*)", re.DOTALL)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A non-empty list of messages, checked and normalised.

    A message has a `role` of ROLES and `content`: a string or a list of text
    parts, which are joined; an assistant's may also be null or absent. An
    assistant may have `reasoning_content` (or `reasoning`); without it, a
    `<think>…</think>` that begins its content is taken for it, exactly as it
    stands, and leaves the content. An assistant may have `tool_calls`, whose
    function may stand bare. Arguments are an object, or a string with one;
    absent, null and blank are no arguments. Other fields are kept.

    Everything is JSON: numbers are finite, and strings hold no lone surrogate.
    """
    if not isinstance(messages, list) or not messages:
        _refuse("messages", f"must be a list of at least one message, not {_shown(messages)}")
    checked = [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    _check_json(checked, "messages")
    return checked


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """A list of tools, checked, each as {"type": "function", "function": {name, description, parameters}}.

    A function object that stands bare, or flat beside its `type` as in the
    Responses API, is wrapped.
    """
    if not isinstance(tools, list):
        _refuse("tools", f"must be a list of tools, not {_shown(tools)}")
    checked = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    first_with: dict[str, int] = {}
    for index, tool in enumerate(checked):
        first = first_with.setdefault(tool["function"]["name"], index)
        if first != index:
            _refuse(f"tools[{index}].function.name", f"must differ from that of tools[{first}]")
    _check_json(checked, "tools")
    return checked


def check_variables(variables: Mapping[str, Any], taken: Iterable[str]) -> dict[str, Any]:
    """Variables for a template beside those that the prompt itself sets, which `taken` names beyond the usual ones."""
    reserved = {"messages", "tools", "add_generation_prompt", *taken}
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name in reserved:
            _refuse(f"chat_template_kwargs.{name}", "is no variable that a request can set: leave it out")
    checked = dict(variables)
    _check_json(checked, "chat_template_kwargs")
    return checked


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        _refuse(where, f"must be an object with role and content, not {_shown(message)}")
    role = message.get("role")
    if role not in ROLES:
        found = _shown(role) if "role" in message else "absent"
        _refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {found}")
    if message.get("function_call") is not None:
        _refuse(f"{where}.function_call", "is not read: write tool_calls, and tool messages for the results")
    checked = dict(message)
    checked["content"] = _check_content(message.get("content"), f"{where}.content", nullable=role == "assistant")
    if role != "assistant":
        if message.get("tool_calls"):
            _refuse(f"{where}.tool_calls", f"belongs to assistant messages only, and this role is {role}")
        return checked
    for field in ("reasoning_content", "reasoning"):
        reasoning = message.get(field)
        if reasoning is not None and not isinstance(reasoning, str):
            _refuse(f"{where}.{field}", f"must be a string or null, not {_shown(reasoning)}")
    if checked.get("reasoning_content") is None and checked.get("reasoning") is not None:
        checked["reasoning_content"] = checked["reasoning"]
    if checked.get("reasoning_content") is None and (lifted := _LEADING_REASONING.fullmatch(checked["content"] or "")):
        checked["reasoning_content"], checked["content"] = lifted.groups()
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            _refuse(f"{where}.tool_calls", f"must be a list or null, not {_shown(calls)}")
        checked["tool_calls"] = [_check_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return checked


def _check_content(content: Any, where: str, *, nullable: bool) -> str | None:
    if isinstance(content, str) or (content is None and nullable):
        return content
    if not isinstance(content, list):
        _refuse(where, f"must be a string or a list of text parts, not {_shown(content)}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            found = f"type {kind!r}" if isinstance(kind, str) else _shown(part)
            _refuse(
                f"{where}[{index}]", f"must be a part of type 'text', the only one that the model reads, not {found}"
            )
        if not isinstance(part.get("text"), str):
            _refuse(f"{where}[{index}].text", f"must be a string, not {_shown(part.get('text'))}")
        texts.append(part["text"])
    return "".join(texts)


def _check_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        _refuse(where, f"must be an object with a function, not {_shown(call)}")
    if call.get("type", "function") != "function":
        _refuse(f"{where}.type", f"must be 'function', not {_shown(call['type'])}")
    function = call.get("function", call)
    if not isinstance(function, dict):
        _refuse(f"{where}.function", f"must be an object with name and arguments, not {_shown(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        _refuse(f"{where}.function.name", f"must be a non-empty string, not {_shown(name)}")
    arguments = _check_arguments(function.get("arguments"), f"{where}.function.arguments")
    kept = {"id": call["id"]} if "id" in call else {}
    return {**kept, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_arguments(arguments: Any, where: str) -> str | dict[str, Any]:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return "{}"
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        _refuse(where, f"must be a JSON object or a string with one, not {_shown(arguments)}")
    try:
        # Numbers are read as text: their digits are no concern here, and Python limits them.
        parsed = json.loads(arguments, parse_int=str, parse_float=str, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        _refuse(where, f"must be a string with a JSON object, and this is not one: {error}")
    if not isinstance(parsed, dict):
        _refuse(where, f"must be a string with a JSON object, not with {_shown(parsed)}")
    _check_json(parsed, where)
    return arguments


def _check_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        _refuse(where, f"must be an object with a function, not {_shown(tool)}")
    if tool.get("type", "function") != "function":
        _refuse(f"{where}.type", f"must be 'function', not {_shown(tool['type'])}")
    if "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool.get("function")
    if not isinstance(function, dict):
        found = _shown(function) if "function" in tool else "absent"
        _refuse(f"{where}.function", f"must be an object with name and parameters, not {found}")
    name = function.get("name")
    if not isinstance(name, str) or not name or any(c.isspace() or c in "<>" for c in name):
        _refuse(f"{where}.function.name", f"must be a string without spaces, '<' and '>', not {_shown(name)}")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        _refuse(f"{where}.function.description", f"must be a string, not {_shown(description)}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        _refuse(f"{where}.function.parameters", f"must be a JSON Schema object, not {_shown(parameters)}")
    properties = (parameters or {}).get("properties")
    if properties is not None and not isinstance(properties, dict):
        _refuse(f"{where}.function.parameters.properties", f"must be an object, not {_shown(properties)}")
    return tool if "type" in tool else {"type": "function", **tool}


def _check_json(value: Any, where: str) -> None:
    """Refuses what JSON, or UTF-8, cannot express anywhere inside `value`."""
    try:
        _check_value(value, where)
    except RecursionError:
        _refuse(where, "must not be nested this deeply: flatten arguments or schemas")


def _check_value(value: Any, where: str) -> None:
    if isinstance(value, str):
        _check_string(value, where)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_value(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                _refuse(where, f"has the key {key!r}, and the keys of a JSON object are strings: quote it")
            _check_string(key, where)
            _check_value(item, f"{where}.{key}" if key.isidentifier() else f"{where}[{_shown(key)}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            _refuse(where, f"is {value!r}, which is no JSON number: write a finite one, or a string")
    elif value is not None and not isinstance(value, bool | int):
        _refuse(where, f"is a {type(value).__name__}: use JSON values only")


def _check_string(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        _refuse(
            where,
            f"holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
            "which is no Unicode text: decode its source as UTF-8",
        )


def _shown(value: Any) -> str:
    """A value as JSON would name it, strings quoted and shortened."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return f"a {type(value).__name__}"


def _refuse(where: str, problem: str) -> NoReturn:
    raise TextError(f"{where} {problem}")
