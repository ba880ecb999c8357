"""Tool calls, and IQuest-Q1's block of one: its grammar, and its arguments as JSON.

    <iquest_tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</iquest_tool_call>

Whitespace between the parts, around NAME and around K is ignored. A block is a
call only where all of this holds; otherwise the caller shows its text:
- NAME is one of the request's tools;
- only whitespace stands between the parts, each key is followed by its value,
  no key is empty or given twice;
- none of the block's own markup occurs inside a key or a value. A value whose
  end is missing must not swallow the next argument and be executed.
"""

import enum
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuq1.text.jsontext import JSON_WHITESPACE, json_kind, quote
from cuq1.text.markup import CALL_CLOSE, CALL_MARKUP, CALL_OPEN, KEY_CLOSE, KEY_OPEN, VALUE_CLOSE, VALUE_OPEN
from cuq1.text.schema import ANY_TYPE, ParameterTypes
from cuq1.text.stream import Event


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `arguments` is the text of a JSON object, `index` counts the calls of one output from 0.

    raw: the block as the model wrote it, markup included; calls are equal without it.
    """

    index: int
    id: str
    name: str
    arguments: str
    raw: str = field(default="", compare=False)

    def to_openai(self) -> dict[str, Any]:
        """The element of a Chat Completions message's `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCatalog:
    """The request's tools by name, and how their arguments are read."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """`tools` as `check_tools` returns them."""
        functions = [tool["function"] for tool in tools]
        self._types = {function["name"]: ParameterTypes(function.get("parameters")) for function in functions}

    def __contains__(self, name: str) -> bool:
        return name in self._types

    def argument_name(self, tool: str, text: str) -> str:
        """The argument that a key names: the text where the schema declares it, else without outer whitespace."""
        return text if self._types[tool].declares(text) else text.strip()

    def argument_json(self, tool: str, key: str, text: str) -> str:
        """A value's JSON.

        Where the schema allows strings, the text is a string, exactly, unless
        it is JSON of another type that the schema allows too: the model writes
        strings bare, so quotes are part of them. Elsewhere, or where the schema
        does not say, JSON stays the JSON that was written, and any other text
        is a string.
        """
        allowed = self._types[tool].of(key)
        strings = "string" in allowed and allowed != ANY_TYPE
        if strings and len(allowed) == 1:
            return quote(text)
        kind = json_kind(text)
        if kind is None or (strings and (kind == "string" or kind not in allowed)):
            return quote(text)
        return text.strip(JSON_WHITESPACE)


class BlockStatus(enum.Enum):
    """What a block is after the latest event."""

    OPEN = enum.auto()
    COMPLETE = enum.auto()
    MALFORMED = enum.auto()


class Block(ABC):
    """The events of one block, from its opening tag on.

    name: the tool's; arguments: the text of a JSON object; both of use once the block is complete.
    """

    def __init__(self, catalog: ToolCatalog, opening: str) -> None:
        self._catalog = catalog
        self.events = [Event(opening, True)]  # without the one that made the block malformed
        self.name = ""

    @property
    @abstractmethod
    def arguments(self) -> str: ...

    def feed(self, event: Event) -> BlockStatus:
        """Takes the next event. After COMPLETE or MALFORMED the block takes no more."""
        status = self._take(event)
        if status is not BlockStatus.MALFORMED:
            self.events.append(event)
        return status

    @abstractmethod
    def _take(self, event: Event) -> BlockStatus: ...


class _Part(enum.Enum):
    NAME = enum.auto()
    KEY = enum.auto()
    BEFORE_VALUE = enum.auto()
    VALUE = enum.auto()
    AFTER_VALUE = enum.auto()


_PART_AFTER = {
    KEY_OPEN: _Part.KEY,
    KEY_CLOSE: _Part.BEFORE_VALUE,
    VALUE_OPEN: _Part.VALUE,
    VALUE_CLOSE: _Part.AFTER_VALUE,
}


class ToolBlock(Block):
    """IQuest-Q1's."""

    def __init__(self, catalog: ToolCatalog) -> None:
        super().__init__(catalog, CALL_OPEN)
        self._part = _Part.NAME
        self._text: list[str] = []
        self._key = ""
        self._arguments: dict[str, str] = {}

    @property
    def arguments(self) -> str:
        return "{" + ", ".join(f"{quote(key)}: {value}" for key, value in self._arguments.items()) + "}"

    def _take(self, event: Event) -> BlockStatus:
        markup = event.text if event.control and event.text in CALL_MARKUP else None
        return self._take_text(event.text) if markup is None else self._take_markup(markup)

    def _take_text(self, text: str) -> BlockStatus:
        if self._part in (_Part.BEFORE_VALUE, _Part.AFTER_VALUE):
            return BlockStatus.OPEN if text.isspace() else BlockStatus.MALFORMED
        self._text.append(text)
        return BlockStatus.OPEN

    def _take_markup(self, markup: str) -> BlockStatus:
        text = "".join(self._text)
        accepted = False
        if self._part is _Part.NAME and markup in (KEY_OPEN, CALL_CLOSE):
            self.name = text if text in self._catalog else text.strip()
            accepted = self.name in self._catalog
        elif self._part is _Part.KEY and markup == KEY_CLOSE:
            self._key = self._catalog.argument_name(self.name, text)
            accepted = self._key != "" and self._key not in self._arguments
        elif self._part is _Part.VALUE and markup == VALUE_CLOSE:
            self._arguments[self._key] = self._catalog.argument_json(self.name, self._key, text)
            accepted = True
        elif self._part is _Part.BEFORE_VALUE:
            accepted = markup == VALUE_OPEN
        elif self._part is _Part.AFTER_VALUE:
            accepted = markup in (KEY_OPEN, CALL_CLOSE)
        if not accepted:
            return BlockStatus.MALFORMED
        self._text.clear()
        if markup == CALL_CLOSE:
            return BlockStatus.COMPLETE
        self._part = _PART_AFTER[markup]
        return BlockStatus.OPEN


def new_call_id() -> str:
    """An id that no other call has, in this process or any other."""
    return f"call_{os.urandom(16).hex()}"
