"""Anthropic Messages, from the wire: content blocks to messages, tools to those that the model can be given."""

import json
import re
from collections.abc import Mapping
from typing import Any

from cuq1.serve import body as fields
from cuq1.serve.agents import function_tool, objects, opened, required, schema_of
from cuq1.serve.body import Body
from cuq1.serve.history import NO_FILE, NO_IMAGE, History, blocks
from cuq1.serve.http import invalid, refuse
from cuq1.serve.settings import MAX_MESSAGES
from cuq1.serve.structured import Choice

NEUTRAL: Mapping[str, tuple[Any, ...]] = {**fields.NEUTRAL, "container": (), "mcp_servers": ([],)}
EFFORTS = ("low", "medium", "high", "xhigh", "max")

# A line that Claude Code puts before its system text, other in every request: no prompt with it would have a prefix.
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
# Blocks about tools that run at the provider, and marks for its context management: there is nothing in them to read.
_LEFT_OUT = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "mcp_tool_use"),
    *("mcp_tool_result", "tool_search_tool_result", "container_upload", "redacted_thinking", "compaction"),
    "fallback",
)


def read_messages(body: Body) -> list[dict[str, Any]]:
    """System and messages as those of `check_messages`."""
    history = History()
    system = _system(body.get("system"))
    if system:
        history.message("system", system)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages", "must be a list of at least one message")
    if len(given) > MAX_MESSAGES:
        refuse("messages", f"has {len(given)} messages, and at most {MAX_MESSAGES} are taken")
    for where, message in objects(given, "messages"):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            refuse(f"{where}.content", "must be a string or a list of content blocks")
        parts = objects(content, f"{where}.content")
        if role == "user":
            _user(history, parts)
        elif role == "assistant":
            _assistant(history, parts)
        elif role == "system":
            history.message("system", blocks(_texts(parts)))
        else:
            refuse(f"{where}.role", "must be user or assistant")
    return history.end()


def _system(value: Any) -> str:
    """The system text, without the billing line."""
    if value is None:
        return ""
    texts = [value] if isinstance(value, str) else _texts(objects(value, "system"))
    kept = [_BILLING.sub("", text, count=1) if _BILLING.match(text) else text for text in texts]
    return blocks([text for text, before in zip(kept, texts, strict=True) if text or not before])


def _user(history: History, parts: list[tuple[str, dict[str, Any]]]) -> None:
    """A user's message: results first, as calls wait for them, then its text."""
    results = [(where, part) for where, part in parts if part.get("type") == "tool_result"]
    others = [(where, part) for where, part in parts if part.get("type") != "tool_result"]
    for where, part in results:
        history.result(required(part, "tool_use_id", where), _result(part, where))
    if texts := _texts(others):
        history.message("user", blocks(texts))
    elif not results:
        history.message("user", "")


def _result(part: Mapping[str, Any], where: str) -> str:
    """The text of a tool's result; one that failed says so."""
    content = part.get("content")
    if content is not None and not isinstance(content, str | list):
        refuse(f"{where}.content", "must be a string or a list of content blocks")
    text = content if isinstance(content, str) else blocks(_texts(objects(content, f"{where}.content")))
    failed = part.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        refuse(f"{where}.is_error", "must be true or false")
    return f"Error: {text}" if failed and "error" not in text[:200].lower() else text


def _texts(parts: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What a model that reads text can read of blocks; `cache_control` says nothing to it."""
    texts = []
    for where, part in parts:
        kind = part.get("type")
        if kind == "text":
            texts.append(required(part, "text", where, empty=True))
        elif kind == "image":
            texts.append(NO_IMAGE)
        elif kind == "document":
            texts.append(_document(part, where))
        elif kind == "search_result":
            texts += [str(part.get("title") or ""), *_texts(objects(part.get("content"), f"{where}.content"))]
        elif kind == "tool_reference":
            texts.append(required(part, "tool_name", where))
        elif kind not in _LEFT_OUT:
            refuse(f"{where}.type", "must be text, image, document, tool_use, tool_result or thinking, where it fits")
    return texts


def _document(part: Mapping[str, Any], where: str) -> str:
    source = part.get("source")
    if not isinstance(source, dict):
        raise invalid(f"{where}.source", "must be an object")
    kind, content = source.get("type"), source.get("content")
    if kind == "text":
        text = required(source, "data", f"{where}.source", empty=True)
    elif kind == "content" and isinstance(content, str):
        text = content
    elif kind == "content":
        text = blocks(_texts(objects(content, f"{where}.source.content")))
    else:
        text = NO_FILE
    heads = [str(part[name]) for name in ("title", "context") if part.get(name)]
    return blocks([*heads, text])


def _assistant(history: History, parts: list[tuple[str, dict[str, Any]]]) -> None:
    """A turn of the assistant; blocks of text next to each other are one text."""
    history.begin_turn()
    for where, part in parts:
        kind = part.get("type")
        if kind == "text":
            history.text(required(part, "text", where, empty=True), joined=True)
        elif kind == "thinking":
            history.reasoning(required(part, "thinking", where, empty=True) or opened(part.get("signature")))
        elif kind == "tool_use":
            arguments = part.get("input", {})
            if not isinstance(arguments, dict):
                refuse(f"{where}.input", "must be an object")
            history.call(required(part, "id", where), required(part, "name", where), arguments)
        elif kind not in _LEFT_OUT:
            refuse(f"{where}.type", "must be text, thinking or tool_use in a message of the assistant")


def read_tools(body: Body) -> list[dict[str, Any]]:
    """The client's own tools, as `check_tools` returns them; those that run at a provider are left out."""
    found = []
    for where, tool in objects(body.get("tools"), "tools"):
        if tool.get("type", "custom") not in (None, "custom"):
            continue
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise invalid(f"{where}.input_schema", "must be a JSON schema, as an object")
        # Which version of JSON Schema it is written in is nothing that a model needs to know.
        schema = {name: value for name, value in schema.items() if name != "$schema"}
        found.append(function_tool(required(tool, "name", where), tool, schema))
    return fields.tools({"tools": found})


def read_choice(body: Body, tools: list[dict[str, Any]]) -> tuple[Choice | dict[str, str], list[dict[str, Any]], bool]:
    """tool_choice as Grammars.constraint takes it, the tools that it leaves, and whether calls may be several."""
    value = fields.mapping(body, "tool_choice")
    kind = value.get("type", "auto" if not value else None)
    parallel = not fields.boolean(value, "disable_parallel_tool_use")
    if kind == "auto":
        return "auto", tools, parallel
    if kind == "any":
        return "required", tools, parallel
    if kind == "none":
        return "none", [], parallel
    if kind != "tool":
        refuse("tool_choice.type", "must be auto, any, tool or none")
    name = required(value, "name", "tool_choice")
    if name not in {tool["function"]["name"] for tool in tools}:
        refuse("tool_choice.name", "names none of the tools")
    return {"name": name}, tools, parallel


def hides_thinking(body: Body) -> bool:
    """Whether the client wants thinking blocks without their text: it gets that sealed, as the block's signature."""
    return fields.mapping(body, "thinking").get("display") == "omitted"


def read_thinking(body: Body) -> tuple[bool, dict[str, Any]]:
    """Whether to reason first, and further variables of the template.

    Reasoning has to be asked for. How long it gets is the model's own matter: a budget is a wish, also at the provider.
    """
    thinking = fields.mapping(body, "thinking")
    kind = thinking.get("type", "disabled" if not thinking else None)
    if kind not in ("enabled", "adaptive", "disabled"):
        refuse("thinking.type", "must be enabled, adaptive or disabled")
    fields.integer(thinking, "budget_tokens", 1)
    effort = fields.mapping(body, "output_config").get("effort")
    if effort is not None and effort not in EFFORTS:
        refuse("output_config.effort", f"must be one of {', '.join(EFFORTS)}")
    given, variables = fields.thinking({"chat_template_kwargs": body.get("chat_template_kwargs")})
    return kind != "disabled" if given is None else given, variables


def read_schema(body: Body) -> Mapping[str, Any] | None:
    """The schema that the answer's text has to follow; None for free text."""
    for where, holder in (("output_config.format", fields.mapping(body, "output_config")), ("output_format", body)):
        name = where.rpartition(".")[2]
        if holder.get(name) is not None:
            return schema_of(fields.mapping(holder, name), where)
    return None


def conversation(body: Body, headers: Mapping[str, str]) -> str:
    """Which conversation a request belongs to: sub-agents and titles share their session's user, and nothing else."""
    user = fields.mapping(body, "metadata").get("user_id")
    session = user if isinstance(user, str) else headers.get("x-claude-code-session-id", "")
    if not session:
        return ""
    return json.dumps([session, headers.get("x-claude-code-agent-id", ""), body.get("model")])
