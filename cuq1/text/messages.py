"""Checks what a caller sends to a chat: messages and tools of the Chat Completions shape.

What comes back is a normalised copy, so that a template meets one shape only.
Every refusal names the index and the field.
"""

import json
from typing import Any, NoReturn

from cuq1.errors import TextError

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A non-empty list of messages, checked and normalised.

    A message has a `role` of ROLES and `content`: a string or a list of text
    parts, which are joined; an assistant's may also be null or absent. An
    assistant may have `reasoning_content` (or `reasoning`) and `tool_calls`,
    whose function may stand bare. Arguments are an object, or a string with
    one; absent, null and blank are no arguments. Other fields are kept.
    """
    if not isinstance(messages, list) or not messages:
        _refuse("messages", f"must be a list of at least one message, not {_shown(messages)}")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


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
    return checked


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        _refuse(where, f"must be an object with role and content, not {_shown(message)}")
    role = message.get("role")
    if role not in ROLES:
        found = _shown(role) if "role" in message else "absent"
        _refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {found}")
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
        parsed = json.loads(arguments, parse_int=str, parse_float=str, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        _refuse(where, f"must be a string with a JSON object, and this is not one: {error}")
    if not isinstance(parsed, dict):
        _refuse(where, f"must be a string with a JSON object, not with {_shown(parsed)}")
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


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> str:
    """A value as JSON would name it, strings quoted and shortened."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return "a number"
    return "an object" if isinstance(value, dict) else "an empty list" if value == [] else "a list"


def _refuse(where: str, problem: str) -> NoReturn:
    raise TextError(f"{where} {problem}")
