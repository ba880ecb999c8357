"""What the model wrote in turns that called tools, kept under the calls' ids.

Agents send a call back as they read it: its arguments parsed, tidied and written anew, the text around it trimmed.
Rendered from that, the next prompt would part from what the engine holds at the first space that differs. So a message
whose calls have ids that are known here, and that still says the same, is rendered as the model wrote it. A message
that an agent has changed in a way that can be seen is rendered as it is.

What counts as tidying was seen of Claude Code: it puts members into another order, adds those that are false by
default, parses strings that should have been JSON, takes whitespace from the ends of lines that are to be written and
one backslash of two from a command, and leaves out a leading `cd` to the folder where it is anyway.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cuq1.text.markup import CALL_MARKUP, HERMES_MARKUP
from cuq1.text.tokenizer import Tokenizer
from cuq1.text.written import Written

LIMIT = 32 << 20
_OVERHEAD = 500  # bytes of a turn beside its tokens and texts, roughly
_CHANGES_FOLDER = re.compile(r"cd[^;&|]+&&")  # before a command, both without whitespace


@dataclass(frozen=True, slots=True)
class Call:
    """id, name, and the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer with calls: its texts as parsed, and the ids of its tokens, without the one that ended it.

    reasoning_ids is None where the answer has none: `answer_ids` are what follows, content and calls.
    """

    calls: tuple[Call, ...]
    content: str
    reasoning: str
    reasoning_ids: "array[int] | None"
    answer_ids: "array[int]"
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        texts = [self.content, self.reasoning, *(call.id + call.name + call.arguments for call in self.calls)]
        tokens = len(self.answer_ids) + len(self.reasoning_ids or ())
        object.__setattr__(self, "size", _OVERHEAD * len(self.calls) + 4 * tokens + sum(map(len, texts)))

    @property
    def written(self) -> Written:
        return Written(None if self.reasoning_ids is None else tuple(self.reasoning_ids), tuple(self.answer_ids))


class TurnMemory:
    """The latest turns, up to `limit` bytes; those that were longest not asked for go first. For any thread."""

    def __init__(self, tokenizer: Tokenizer, limit: int = LIMIT) -> None:
        self._limit = limit
        self._size = 0
        self._turns: OrderedDict[str, Turn] = OrderedDict()  # by the first call's id
        self._first: dict[str, str] = {}  # of each call's id
        self._lock = threading.Lock()
        tokens = tokenizer.control_tokens
        self._markup = {tokens[tag] for tag in CALL_MARKUP | HERMES_MARKUP if tag in tokens}
        self._control = set(tokens.values()) - self._markup
        self._think_close = tokens.get("</think>")

    @property
    def size(self) -> int:
        return self._size

    def remember(
        self, calls: Sequence[Call], content: str, reasoning: str, ids: Sequence[int], *, in_reasoning: bool
    ) -> None:
        """Keep an answer's tokens under its calls' ids; `in_reasoning` where its prompt ended inside `<think>`.

        Tokens that would begin another turn are not kept: only a template may write those.
        """
        reasoning_ids: array[int] | None = None
        if in_reasoning:
            if self._think_close not in ids:
                return
            close = ids.index(self._think_close)
            reasoning_ids, ids = array("I", ids[:close]), ids[close + 1 :]
        if not calls or not self._control.isdisjoint(ids) or not self._control.isdisjoint(reasoning_ids or ()):
            return
        turn = Turn(tuple(calls), content, reasoning, reasoning_ids, array("I", ids))
        keys = [_key(call.id) for call in turn.calls]
        with self._lock:
            self._turns[keys[0]] = turn
            self._first.update(dict.fromkeys(keys, keys[0]))
            self._size += turn.size
            while self._size > self._limit:
                _, oldest = self._turns.popitem(last=False)
                self._size -= oldest.size
                for call in oldest.calls:
                    self._first.pop(_key(call.id), None)

    def restore(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, Written]]:
        """Messages as `check_messages` returns them, with the arguments that the model wrote, and for
        `ChatTemplate.prompt` what it wrote of those that are whole."""
        restored: list[dict[str, Any]] = []
        written: dict[int, Written] = {}
        for index, message in enumerate(messages):
            turn = self._turn(message)
            if turn is None:
                restored.append(message)
                continue
            ours = {_key(call.id): call for call in turn.calls}
            calls = [_restored(call, ours.get(_key(call["id"]))) for call in message["tool_calls"]]
            restored.append(message | {"tool_calls": calls})
            if _is_whole(message, calls, turn):
                exact = turn.written
                same_reasoning = _bare(message.get("reasoning_content") or "") == _bare(turn.reasoning)
                written[index] = exact if same_reasoning else Written(None, exact.answer)
        return restored, written

    def _turn(self, message: dict[str, Any]) -> Turn | None:
        calls = message.get("tool_calls")
        if not calls or not all(isinstance(call.get("id"), str) for call in calls):
            return None
        with self._lock:
            first = self._first.get(_key(calls[0]["id"]))
            if first is None:
                return None
            self._turns.move_to_end(first)
            return self._turns[first]


def _key(call_id: str) -> str:
    """What a call's id is in every dialect: each puts its own word before it."""
    return call_id.rpartition("_")[2]


def _restored(call: dict[str, Any], ours: Call | None) -> dict[str, Any]:
    """`call` with the arguments that were written for it, where they still say the same."""
    function = call["function"]
    if ours is None or function["name"] != ours.name or not resembles(function["arguments"], ours.arguments):
        return call
    return call | {"function": function | {"arguments": ours.arguments}}


def _is_whole(message: dict[str, Any], calls: list[dict[str, Any]], turn: Turn) -> bool:
    """Whether a message, its calls restored, is the turn, but for whitespace around its text."""
    told = [(_key(call["id"]), call["function"]["name"], call["function"]["arguments"]) for call in calls]
    ours = [(_key(call.id), call.name, call.arguments) for call in turn.calls]
    return told == ours and _bare(message.get("content") or "") == _bare(turn.content)


def resembles(theirs: Any, ours: str) -> bool:
    """Whether arguments that came back, as a JSON value or the text of one, are those that were written, tidied."""
    try:
        text = theirs if isinstance(theirs, str) else json.dumps(theirs)
        return _resembles(_read(text), _read(ours))
    except (ValueError, RecursionError):
        return False


def _resembles(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(_resembles(value, ours[name]) if name in ours else not value for name, value in theirs.items())
    if isinstance(theirs, list) and isinstance(ours, list):
        return len(theirs) == len(ours) and all(map(_resembles, theirs, ours))
    if isinstance(theirs, str) and isinstance(ours, str):
        shown, written = _bare(theirs), _bare(ours)
        if shown == written:
            return True
        return written.endswith(shown) and _CHANGES_FOLDER.fullmatch(written[: len(written) - len(shown)]) is not None
    if isinstance(ours, str):
        return _resembles(theirs, _read(ours))
    return type(theirs) is type(ours) and bool(theirs == ours)


def _bare(text: str) -> str:
    """A text without whitespace and backslashes."""
    return "".join(text.split()).replace("\\", "")


def _read(text: str) -> Any:
    """JSON as a reader has it that knows numbers as doubles."""
    return json.loads(text, parse_int=float, parse_float=float)
