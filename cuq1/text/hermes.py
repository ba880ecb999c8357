"""Qwen2.5's block of one tool call, which Hermes models began with.

    <tool_call>{"name": NAME, "arguments": {K: V, …}}</tool_call>

Whitespace around the object is ignored. A block is a call only where this is JSON, NAME is one of the request's tools,
the object has these two members and no other, and no K is given twice; otherwise the caller shows its text. Arguments
are passed on as they were written.

A tag inside a JSON string belongs to the string: this tokenizer makes one token of a tag wherever a text has it, so a
model that writes a file with such tags has no other way.
"""

import json
import re

from cuq1.text.jsontext import JSON_WHITESPACE, json_kind, json_members
from cuq1.text.markup import HERMES_CLOSE, HERMES_MARKUP, HERMES_OPEN
from cuq1.text.stream import Event
from cuq1.text.toolcalls import Block, BlockStatus, ToolCatalog

_AROUND = re.compile(f"[{JSON_WHITESPACE}]*+")  # the object
_BETWEEN = re.compile(f"[{JSON_WHITESPACE}0-9A-Za-z.+:,-]*+")  # strings and brackets
_STRING = re.compile(r'[^"\\\x00-\x1f]*+')


class HermesBlock(Block):
    """A text that soon proves to be no JSON is malformed then; what is left is found out at the block's end."""

    def __init__(self, catalog: ToolCatalog) -> None:
        super().__init__(catalog, HERMES_OPEN)
        self._begun = self._in_string = self._escaped = False
        self._depth = 0  # brackets that are open
        self._arguments = ""

    @property
    def arguments(self) -> str:
        return self._arguments

    def _take(self, event: Event) -> BlockStatus:
        if event.control and event.text in HERMES_MARKUP and not self._in_string:
            closes = event.text == HERMES_CLOSE and self._begun and self._depth == 0
            return BlockStatus.COMPLETE if closes and self._is_call() else BlockStatus.MALFORMED
        return BlockStatus.OPEN if self._may_go_on(event.text) else BlockStatus.MALFORMED

    def _may_go_on(self, text: str) -> bool:
        """Follows strings and brackets; False where they rule out that this is one JSON object."""
        position = 0
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            pattern = _STRING if self._in_string else _BETWEEN if self._depth else _AROUND
            run = pattern.match(text, position)
            assert run is not None  # it may be empty
            if run.end() == len(text):
                break
            character, position = text[run.end()], run.end() + 1
            if self._in_string:
                if character not in ('"', "\\"):
                    return False
                self._escaped = character == "\\"
                self._in_string = self._escaped
            elif self._depth == 0:
                if character != "{" or self._begun:
                    return False
                self._begun, self._depth = True, 1
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            else:
                return False
        return True

    def _is_call(self) -> bool:
        members = json_members("".join(event.text for event in self.events[1:])) or []
        parts = dict(members)
        if len(members) != 2 or parts.keys() != {"name", "arguments"}:
            return False
        arguments = json_members(parts["arguments"])
        if arguments is None or len(dict(arguments)) != len(arguments):
            return False
        if json_kind(parts["name"]) != "string" or (name := json.loads(parts["name"])) not in self._catalog:
            return False
        self.name, self._arguments = name, parts["arguments"]
        return True
