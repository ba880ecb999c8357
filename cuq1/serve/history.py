"""A conversation as agents send it, block by block, to the messages that a chat template takes.

Agents of both dialects send the parts of one assistant's turn as items of their own, and results of parallel calls in
the order in which tools ended. A prompt that is to begin with the last one has to put both together as they were.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

NO_IMAGE = "[An image was here. This model reads text only and cannot see it.]"
NO_FILE = "[A file was here that is no text. This model reads text only and cannot see it.]"
"""An agent sends its whole history every turn: to refuse a picture would refuse every later turn as well."""

BETWEEN_BLOCKS = "\n\n"


class History:
    """Messages in the form of `check_messages`, from parts in the order of the conversation."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._assistant: dict[str, Any] | None = None  # the turn that may go on
        self._last_was_text = False
        self._order: dict[str, int] = {}  # of the calls of the latest turn, by id
        self._results: list[tuple[int, dict[str, Any]]] = []

    def message(self, role: str, text: str) -> None:
        """A message of anybody but the assistant."""
        self._end_turn()
        self._messages.append({"role": role, "content": text})

    def begin_turn(self) -> None:
        """What comes next is a new turn, though the assistant may have spoken last."""
        self._end_assistant()

    def reasoning(self, text: str) -> None:
        """Reasoning begins a turn, unless nothing but reasoning has come."""
        if self._assistant is not None and (self._assistant["content"] or self._assistant["tool_calls"]):
            self._end_turn()
        turn = self._turn()
        turn["reasoning_content"] = (turn["reasoning_content"] or "") + text
        self._last_was_text = False

    def text(self, text: str, *, joined: bool = False) -> None:
        """Text of the assistant: two in a row are two turns, unless they are `joined`."""
        if self._last_was_text and not joined:
            self._end_turn()
        self._turn()["content"] += text
        self._last_was_text = True

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """A tool call of the assistant, arguments as an object or as the text of one."""
        calls = self._turn()["tool_calls"]
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self._order[call_id] = len(calls)
        self._last_was_text = False

    def result(self, call_id: str, text: str) -> None:
        """What a call brought. Results that come together are put into the order of their calls."""
        self._end_assistant()
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        self._results.append((self._order.get(call_id, len(self._order) + 1), message))

    def end(self) -> list[dict[str, Any]]:
        """All messages."""
        self._end_turn()
        return self._messages

    def _turn(self) -> dict[str, Any]:
        if self._assistant is None:
            self._end_turn()
            self._order = {}
            self._assistant = {"content": "", "reasoning_content": None, "tool_calls": []}
        return self._assistant

    def _end_turn(self) -> None:
        self._end_assistant()
        self._messages += [message for _, message in sorted(self._results, key=lambda result: result[0])]
        self._results = []

    def _end_assistant(self) -> None:
        turn, self._assistant = self._assistant, None
        self._last_was_text = False
        if turn is not None:
            fields = {name: turn[name] for name in ("reasoning_content", "tool_calls") if turn[name]}
            self._messages.append({"role": "assistant", "content": turn["content"], **fields})


def blocks(texts: list[str]) -> str:
    """Blocks of one message as one text."""
    return BETWEEN_BLOCKS.join(texts)


def in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of `check_messages`, with the results of one turn's calls in the order of the calls.

    A template shows results without ids: in another order, each would be taken for that of another call.
    """
    ordered: list[dict[str, Any]] = []
    places: dict[str, int] = {}  # of the latest turn's calls, by id
    for results, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if results:
            ordered += sorted(run, key=lambda result: _place(result.get("tool_call_id"), places))
            continue
        for message in run:
            ordered.append(message)
            if message["role"] == "assistant":
                ids = [call.get("id") for call in message.get("tool_calls") or ()]
                places = {id_: place for place, id_ in enumerate(ids) if isinstance(id_, str)}
    return ordered


def _place(call_id: Any, places: dict[str, int]) -> int:
    return places.get(call_id, len(places)) if isinstance(call_id, str) else len(places)
