"""A model's output as reasoning, content and tool calls, while it streams.

The core reads events, where markup is a control event and the rest is text.
Output arrives in one of two ways:
- `feed` takes the events of a Detokenizer. Markup that is a control token of
  the tokenizer counts only as that token, so its spelling in ordinary tokens,
  say inside a file that the model writes, stays text.
- `feed_text` takes plain text, where markup is known by its spelling.

Rules: with `reasoning`, everything up to the first `</think>` is reasoning,
calls included; later think tags are content. Without tools nothing but that is
parsed. A tool-call block is held until it ends: complete, it is a call (see
toolcalls.py and hermes.py); else it is content, byte for byte and in order. A
block opened inside one that is no call may itself become a call. Text around
calls, whitespace included, is content.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cuq1.text.formats import IQUEST, CallFormat
from cuq1.text.markup import MARKUP, THINK_CLOSE, MarkupScanner
from cuq1.text.stream import Event
from cuq1.text.toolcalls import Block, BlockStatus, ToolCall, ToolCatalog, new_call_id


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a parsed output: reasoning or content text, or one complete tool call (`text` is empty)."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    tool_call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A whole output. `content` and `reasoning` are empty where the output has none."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


class OutputParser:
    """Parses one output, fed in pieces through one of `feed` and `feed_text`.

    The pieces' boundaries do not matter: deltas joined by `collect` are equal
    for every way of cutting the same output (but for the calls' ids).
    """

    def __init__(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        reasoning: bool,
        control_tokens: Collection[str] = MARKUP,
        calls: CallFormat = IQUEST,
    ) -> None:
        """`tools` as `check_tools` returns them.

        `reasoning`: the prompt ended inside `<think>`, so the output begins there.
        `control_tokens`: the tokenizer's control tokens; markup that is not among
        them is looked for in the text of the events given to `feed`.
        `calls`: how the model writes them (see formats.py).
        """
        self._catalog = ToolCatalog(tools) if tools else None
        self._in_reasoning = reasoning
        self._format = calls
        self._block: Block | None = None
        self._calls = 0
        wanted = (calls.markup if tools else frozenset()) | ({THINK_CLOSE} if reasoning else frozenset())
        self._event_scanner = MarkupScanner(wanted.difference(control_tokens))
        self._text_scanner = MarkupScanner(wanted)

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is still reasoning."""
        return self._in_reasoning

    def feed(self, events: Iterable[Event]) -> list[Delta]:
        """Deltas settled by the next events, neighbouring text joined."""
        deltas: list[Delta] = []
        for event in events:
            if event.control:
                # A control token ends any spelling of markup that was under way.
                self._step_all(self._event_scanner.flush(), deltas)
                self._step(event, deltas)
            else:
                self._step_all(self._event_scanner.feed(event.text), deltas)
        return deltas

    def feed_text(self, text: str) -> list[Delta]:
        """Deltas settled by the next piece of plain text, neighbouring text joined."""
        deltas: list[Delta] = []
        self._step_all(self._text_scanner.feed(text), deltas)
        return deltas

    def finish(self) -> list[Delta]:
        """Ends the output: what was held back, an unfinished block being content."""
        deltas: list[Delta] = []
        self._step_all(self._event_scanner.flush() + self._text_scanner.flush(), deltas)
        while self._block is not None:
            self._abandon_block(deltas)
        return deltas

    def _step_all(self, events: Iterable[Event], deltas: list[Delta]) -> None:
        for event in events:
            self._step(event, deltas)

    def _step(self, event: Event, deltas: list[Delta]) -> None:
        if self._in_reasoning:
            if event.control and event.text == THINK_CLOSE:
                self._in_reasoning = False
            else:
                _append(deltas, "reasoning", event.text)
            return
        if self._block is not None:
            status = self._block.feed(event)
            if status is BlockStatus.COMPLETE:
                raw = "".join(event.text for event in self._block.events)
                call = ToolCall(self._calls, new_call_id(), self._block.name, self._block.arguments, raw)
                deltas.append(Delta("tool_call", tool_call=call))
                self._calls += 1
                self._block = None
            if status is not BlockStatus.MALFORMED:
                return
            self._abandon_block(deltas)
            self._step(event, deltas)  # which a block that was found inside this one may still take
            return
        if self._catalog is not None and self._opens(event):
            self._block = self._format.block(self._catalog)
        else:
            _append(deltas, "content", event.text)

    def _opens(self, event: Event) -> bool:
        return event.control and event.text == self._format.opening

    def _abandon_block(self, deltas: list[Delta]) -> None:
        """Content up to an opening tag inside the block, if there is one; from there on everything is read anew.

        That happens to a character twice at most: what is inside a string for one block is outside of strings for the
        next, which the third tag therefore ends.
        """
        events, self._block = self._block.events if self._block is not None else [], None
        end = next((i for i, event in enumerate(events) if i > 0 and self._opens(event)), len(events))
        _append(deltas, "content", "".join(event.text for event in events[:end]))
        for event in events[end:]:
            self._step(event, deltas)


def _append(deltas: list[Delta], kind: Literal["reasoning", "content"], text: str) -> None:
    if deltas and deltas[-1].kind == kind:
        deltas[-1] = Delta(kind, deltas[-1].text + text)
    elif text:
        deltas.append(Delta(kind, text))


def collect(deltas: Iterable[Delta]) -> ParsedMessage:
    """All deltas of one output as one message."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.tool_call is not None:
            calls.append(delta.tool_call)
        else:
            texts[delta.kind].append(delta.text)
    return ParsedMessage("".join(texts["content"]), "".join(texts["reasoning"]), tuple(calls))


def parse_output(
    output: str | Iterable[Event],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    reasoning: bool,
    control_tokens: Collection[str] = MARKUP,
    calls: CallFormat = IQUEST,
) -> ParsedMessage:
    """A whole output, as plain text or as events, parsed at once; arguments as for OutputParser."""
    parser = OutputParser(tools=tools, reasoning=reasoning, control_tokens=control_tokens, calls=calls)
    deltas = parser.feed_text(output) if isinstance(output, str) else parser.feed(output)
    return collect(deltas + parser.finish())
