"""One output from its tokens: detokenised, cut at stop strings, parsed."""

from collections.abc import Mapping, Sequence
from typing import Any

from cuq1.text.formats import CallFormat, call_format
from cuq1.text.parser import Delta, OutputParser, ParsedMessage, collect
from cuq1.text.stream import Detokenizer, Event, StopFilter
from cuq1.text.tokenizer import Tokenizer


class OutputStream:
    """Feed it tokens one by one; it says what became visible.

    text: the literal text so far, control tokens included, up to a stop string;
    stopped: the stop string that ended it, after which nothing should be fed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: bool = False,
        calls: CallFormat | None = None,
    ) -> None:
        """`tools` as `check_tools` returns them; `reasoning` where the prompt ended inside `<think>`.

        calls: the chat template's, by default the tokenizer's.
        """
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopFilter(stops)
        control = tokenizer.control_tokens
        self._parser = OutputParser(
            tools=tools, reasoning=reasoning, control_tokens=control, calls=calls or call_format(control)
        )
        self._deltas: list[Delta] = []
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stopped(self) -> str | None:
        return self._stops.matched

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token is still part of the reasoning."""
        return self._parser.in_reasoning

    def feed(self, token: int) -> tuple[str, list[Delta]]:
        """The text and the parsed pieces that this token settled."""
        events = self._stops.feed(self._detokenizer.feed([token]))
        return self._take(events, self._parser.feed(events))

    def finish(self) -> tuple[str, list[Delta]]:
        """As `feed`, for what was held back until the end."""
        events = self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
        return self._take(events, self._parser.feed(events) + self._parser.finish())

    def message(self) -> ParsedMessage:
        """All parsed pieces together."""
        return collect(self._deltas)

    def _take(self, events: list[Event], deltas: list[Delta]) -> tuple[str, list[Delta]]:
        text = "".join(event.text for event in events)
        self._pieces.append(text)
        self._deltas += deltas
        return text, deltas
