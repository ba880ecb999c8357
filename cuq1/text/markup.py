"""The models' output markup, IQuest-Q1's and Qwen2.5's, and finding it in plain text."""

import re
from collections.abc import Collection

from cuq1.text.stream import Event, append_event

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
CALL_OPEN = "<iquest_tool_call>"
CALL_CLOSE = "</iquest_tool_call>"
KEY_OPEN = "<arg_key>"
KEY_CLOSE = "</arg_key>"
VALUE_OPEN = "<arg_value>"
VALUE_CLOSE = "</arg_value>"

CALL_MARKUP = frozenset({CALL_OPEN, CALL_CLOSE, KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE})
HERMES_OPEN = "<tool_call>"
HERMES_CLOSE = "</tool_call>"
HERMES_MARKUP = frozenset({HERMES_OPEN, HERMES_CLOSE})
MARKUP = CALL_MARKUP | HERMES_MARKUP | {THINK_OPEN, THINK_CLOSE}


def ends_in_reasoning(prompt: str) -> bool:
    """True where the last think tag of `prompt` opens, so that the model's output starts as reasoning."""
    return prompt.rfind(THINK_OPEN) > prompt.rfind(THINK_CLOSE)


class MarkupScanner:
    """Splits text that arrives in pieces into text and markup events.

    Held back between pieces is only a tail that could begin a markup literal.
    """

    def __init__(self, literals: Collection[str]) -> None:
        """`literals` are members of MARKUP: each has '<' as its first character and nowhere else."""
        self._literals = tuple(literals)
        self._pattern = re.compile("|".join(map(re.escape, self._literals))) if literals else None
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        """Events settled by `text`; markup has `control` set."""
        events: list[Event] = []
        if self._pattern is None:
            append_event(events, text)
            return events
        text = self._held + text
        start = 0
        for match in self._pattern.finditer(text):
            append_event(events, text[start : match.start()])
            append_event(events, match[0], True)
            start = match.end()
        # Only the last '<' can begin an unfinished literal: another one would end it.
        tail = text.rfind("<", start)
        if tail < 0 or not any(literal.startswith(text[tail:]) for literal in self._literals):
            tail = len(text)
        append_event(events, text[start:tail])
        self._held = text[tail:]
        return events

    def flush(self) -> list[Event]:
        """Ends the text: a held tail is text after all."""
        events: list[Event] = []
        append_event(events, self._held)
        self._held = ""
        return events
