"""Parts of an assistant's message as the tokens that the model wrote, in place of what a template makes of them.

A template writes a tool call from its parsed arguments, and so with other whitespace, numbers and JSON than the model's
own; and text can be spelled with other tokens than the tokenizer's. Where the tokens are known, the next prompt can
repeat them exactly, so that what an engine holds of the last turn stays a prefix of it.

The template is given a placeholder as the message's content, no calls, and the tokens are put where it stands.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cuq1.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Written:
    """What the model wrote of one message: token ids of its reasoning (None: as the message says) and of all else."""

    reasoning: tuple[int, ...] | None
    answer: tuple[int, ...]


class Placeholders:
    """Stand-ins of one prompt's written parts: `mark`, which no input has, around the message's index and the part."""

    def __init__(self, mark: str, written: Mapping[int, Written]) -> None:
        self._mark = mark
        self._parts: dict[str, tuple[int, ...]] = {}
        self._answers: set[str] = set()
        for index, turn in written.items():
            self._answers.add(self._name(index, "a"))
            self._parts[self._name(index, "a")] = turn.answer
            if turn.reasoning is not None:
                self._parts[self._name(index, "r")] = turn.reasoning
        self._pattern = re.compile(f"({mark}[0-9]+[ar]{mark})")

    def put(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages` with placeholders for what was written."""
        out = []
        for index, given in enumerate(messages):
            message = given
            answer, reasoning = self._name(index, "a"), self._name(index, "r")
            if answer in self._parts:
                message = {key: value for key, value in given.items() if key != "tool_calls"} | {"content": answer}
                if reasoning in self._parts:
                    message |= {key: reasoning for key in ("reasoning_content", "reasoning") if key in given}
            out.append(message)
        return out

    def found(self, text: str) -> bool:
        """Whether a rendering holds each answer once, and each reasoning once at most, as templates drop some."""
        names = self._pattern.findall(text)
        return len(names) == len(set(names)) and self._answers <= set(names) <= self._parts.keys()

    def encode(self, text: str, tokenizer: Tokenizer) -> Iterable[int]:
        """Ids of a stretch of rendered text without control tokens: the text's, and those that were written."""
        pieces = self._pattern.split(text)  # text at even places, placeholders at odd ones
        parts = [self._parts[name] for name in pieces[1::2]]
        before = ""
        for i, part in enumerate([*parts, ()]):
            after = tokenizer.decode(part)
            yield from tokenizer.encode(_without_repeated_space(before, pieces[2 * i], after), control=False)
            yield from part
            before = after

    def _name(self, index: int, part: str) -> str:
        return f"{self._mark}{index}{part}{self._mark}"


def _without_repeated_space(before: str, text: str, after: str) -> str:
    """`text` without the whitespace at its ends that the model wrote `before` and `after` it.

    A template that strips what it is given, and puts whitespace of its own around it, writes what the model wrote.
    """
    space = len(text) - len(text.lstrip())
    head = next((n for n in range(space, 0, -1) if before.endswith(text[:n])), 0)
    text = text[head:]
    space = len(text) - len(text.rstrip())
    tail = next((n for n in range(space, 0, -1) if after.startswith(text[-n:])), 0)
    return text[: len(text) - tail]
