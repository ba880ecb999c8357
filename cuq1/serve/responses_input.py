"""OpenAI Responses, from the wire: items to messages, tools of every type to those that the model can be given."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cuq1.serve import body as fields
from cuq1.serve.agents import function_tool, objects, opened, required, schema_of
from cuq1.serve.body import Body
from cuq1.serve.history import NO_FILE, NO_IMAGE, History, blocks
from cuq1.serve.http import invalid, refuse, without_lone_surrogates
from cuq1.serve.settings import MAX_MESSAGES
from cuq1.serve.structured import Choice
from cuq1.text.jsontext import json_kind

# Fields that name something which is kept on a server, or ask for it to be: nothing is kept here.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **fields.NEUTRAL,
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
}
ROLES = ("system", "developer", "user", "assistant")
# Items of tools that this server doesn't have: what they say of themselves is for whoever ran them.
LEFT_OUT = (
    *("web_search_call", "file_search_call", "computer_call", "image_generation_call", "code_interpreter_call"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call", "tool_search_call"),
    *("tool_search_output", "compaction", "compaction_summary", "context_compaction", "ghost_snapshot", "other"),
)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a surrogate pair, or both


@dataclass
class Names:
    """Tools by the names that the model knows, and by those that the client knows: (namespace, name)."""

    _shown: dict[tuple[str | None, str], str] = field(default_factory=dict)
    _told: dict[str, tuple[str | None, str]] = field(default_factory=dict)

    def add(self, namespace: str | None, name: str) -> str:
        """The name for the model: the tool's own, unless another tool has it."""
        shown = name
        while shown in self._told and namespace is not None:
            shown = f"{namespace}__{shown}"
        self._shown[namespace, name] = shown
        self._told[shown] = namespace, name
        return shown

    def shown(self, namespace: str | None, name: str) -> str:
        return self._shown.get((namespace, name), name)

    def told(self, shown: str) -> tuple[str | None, str]:
        return self._told.get(shown, (None, shown))


def read_tools(body: Body) -> tuple[list[dict[str, Any]], Names]:
    """The functions among the tools, also those in namespaces, as `check_tools` returns them; others are left out."""
    found: list[dict[str, Any]] = []
    names = Names()
    for where, tool in objects(body.get("tools"), "tools"):
        kind = tool.get("type", "function")
        if kind == "function":
            found.append(_function(tool, None, where, names))
        elif kind == "namespace":
            namespace = required(tool, "name", where)
            found += [
                _function(inner, namespace, place, names)
                for place, inner in objects(tool.get("tools"), f"{where}.tools")
                if inner.get("type", "function") == "function"
            ]
        elif not isinstance(kind, str):
            refuse(f"{where}.type", "must be a string")
    return fields.tools({"tools": found}), names


def _function(tool: Mapping[str, Any], namespace: str | None, where: str, names: Names) -> dict[str, Any]:
    inner = tool.get("function")
    flat = inner if isinstance(inner, dict) else tool
    name = required(flat, "name", where)
    if (namespace, name) in names._shown:
        refuse(f"{where}.name", "is that of an earlier tool: give each its own")
    return function_tool(names.add(namespace, name), flat, flat.get("parameters"))


def read_input(body: Body, names: Names) -> list[dict[str, Any]]:
    """Instructions and input as messages of `check_messages`."""
    history = History()
    instructions = fields.string(body, "instructions")
    if instructions:
        history.message("system", instructions)
    given = body.get("input")
    if isinstance(given, str):
        history.message("user", given)
        return history.end()
    if not isinstance(given, list) or not given:
        refuse("input", "must be a string, or a list of at least one item")
    if len(given) > MAX_MESSAGES:
        refuse("input", f"has {len(given)} items, and at most {MAX_MESSAGES} are taken")
    for where, item in objects(given, "input"):
        _item(history, item, where, names)
    messages = history.end()
    if not messages:
        refuse("input", "holds nothing that the model can read: add a message")
    return messages


def _item(history: History, item: Mapping[str, Any], where: str, names: Names) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        if role == "assistant":
            history.text("".join(_parts(item.get("content"), f"{where}.content")))
        else:
            history.message(role, blocks(_parts(item.get("content"), f"{where}.content")))
    elif kind == "reasoning":
        if reasoning := _reasoning(item, where):
            history.reasoning(reasoning)
    elif kind == "function_call":
        namespace = item.get("namespace")
        if namespace is not None and not isinstance(namespace, str):
            refuse(f"{where}.namespace", "must be a string")
        name = names.shown(namespace, required(item, "name", where))
        history.call(required(item, "call_id", where), name, _arguments(item, where))
    elif kind == "custom_tool_call":
        arguments = {"input": required(item, "input", where, empty=True)}
        history.call(required(item, "call_id", where), required(item, "name", where), arguments)
    elif kind == "local_shell_call":
        action = item.get("action")
        history.call(required(item, "call_id", where), "local_shell", action if isinstance(action, dict) else {})
    elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        call_id = required(
            item, "id" if kind == "local_shell_call_output" and "call_id" not in item else "call_id", where
        )
        history.result(call_id, blocks(_parts(item.get("output"), f"{where}.output")))
    elif kind == "item_reference":
        refuse(where, "refers to an item on a server, and this one keeps none: send the item itself")
    elif kind not in LEFT_OUT:
        refuse(f"{where}.type", "names no type of item that is known here")


def _arguments(item: Mapping[str, Any], where: str) -> Any:
    """A call's arguments, byte for byte; text that is no JSON object, which a model may have written, as one field."""
    arguments = required(item, "arguments", where, empty=True)
    if not arguments.strip():
        return {}
    if json_kind(arguments) != "object":
        return {"arguments": arguments}
    return without_lone_surrogates(json.loads(arguments)) if _HALF.search(arguments) else arguments


def _parts(content: Any, where: str) -> list[str]:
    """The texts of a content: a string, or a list of parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    texts = []
    for place, part in objects(content, where):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
            texts.append(required(part, "text", place, empty=True))
        elif kind == "refusal":
            texts.append(required(part, "refusal", place, empty=True))
        elif kind in ("input_image", "image_url", "computer_screenshot"):
            texts.append(NO_IMAGE)
        elif kind in ("input_file", "input_audio", "file"):
            texts.append(NO_FILE)
        elif kind != "encrypted_content":
            refuse(f"{place}.type", "must be input_text, output_text, refusal, input_image or input_file")
    return texts


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item: its content, else what we have put into it, else its summary."""
    content = "".join(_parts(item.get("content"), f"{where}.content"))
    return content or opened(item.get("encrypted_content")) or "".join(_parts(item.get("summary"), f"{where}.summary"))


def read_choice(
    body: Body, tools: list[dict[str, Any]], names: Names
) -> tuple[Choice | dict[str, str], list[dict[str, Any]]]:
    """tool_choice as Grammars.constraint takes it, and the tools that it leaves."""
    value = body.get("tool_choice")
    if value is None:
        return "auto", tools
    if value in ("auto", "required"):
        return value, tools
    if value == "none":
        return value, []
    if not isinstance(value, dict):
        raise invalid("tool_choice", "must be auto, none, required, or an object that names a function")
    kind = value.get("type")
    if kind == "function":
        return {"name": _chosen(value, "tool_choice", tools, names)}, tools
    if kind == "allowed_tools":
        mode = value.get("mode", "auto")
        if mode not in ("auto", "required"):
            refuse("tool_choice.mode", "must be auto or required")
        allowed = {
            _chosen(tool, where, tools, names) for where, tool in objects(value.get("tools"), "tool_choice.tools")
        }
        return mode, [tool for tool in tools if tool["function"]["name"] in allowed]
    raise invalid("tool_choice.type", "must be function or allowed_tools: tools of other types are not run here")


def _chosen(value: Mapping[str, Any], where: str, tools: list[dict[str, Any]], names: Names) -> str:
    inner = value.get("function")
    name = required(inner if isinstance(inner, dict) else value, "name", where)
    namespace = value.get("namespace")
    shown = names.shown(namespace if isinstance(namespace, str) else None, name)
    if shown not in {tool["function"]["name"] for tool in tools}:
        refuse(f"{where}.name", "names no function among tools")
    return shown


def read_schema(body: Body) -> Mapping[str, Any] | None:
    """The schema that text.format asks for; None for free text."""
    format_ = fields.mapping(fields.mapping(body, "text"), "format")
    return schema_of(format_, "text.format")
