"""Keeps control tokens that somebody typed apart from those that a template writes.

Before rendering, every string of the messages and tools gets an invisible mark
inside each spelling of a control token, and at an end, outer whitespace aside,
where a neighbour could complete one. A control token that is still whole in the
rendered text was written by the template. Strings without such spellings stay
as they are, so ordinary prompts render as everywhere else.

What holds: a control token typed in one string, or split over several that the
template joins as they are, trimmed, in another letter case or through JSON, is
text. What does not: a template that edits strings otherwise, say replaces,
drops or reverses characters, can make a control token of input that spelled
none, and is trusted as the rest of the checkpoint is. And a template that looks
for markup in a string does not find what was typed there.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from cuq1.errors import TextError

# Noncharacters first: no text in interchange holds them. Private-use characters are the reserve.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))


def strings_in(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


class ControlSpellings:
    """Where strings spell control tokens, or parts of one at an end.

    Letter case is ignored, as a template's filters may change it.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        """`literals` are two characters or longer: a mark must fit inside."""
        literals = sorted(literals)
        # First characters are matched and the rest looked ahead at: overlapping spellings are all found, and a text is
        # scanned for first characters, which are rare, at the speed of a search for one character.
        rests: dict[str, list[str]] = {}
        for literal in literals:
            rests.setdefault(literal[0], []).append(re.escape(literal[1:]))
        branches = (f"{re.escape(first)}(?={'|'.join(tails)})" for first, tails in rests.items())
        self._first = re.compile("|".join(branches) or r"(?!)", re.IGNORECASE)
        self._beginnings = {literal[:i].lower() for literal in literals for i in range(1, len(literal))}
        self._endings = {literal[i:].lower() for literal in literals for i in range(1, len(literal))}
        self._longest = max(map(len, literals), default=0)

    def mark(self, text: str, mark: str) -> str:
        """`text` with `mark` put wherever it, or its neighbours' text, could spell a control token.

        A template may trim before it joins, so that ends are looked for inside outer whitespace too.
        """
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        marked = self._first.sub(rf"\g<0>{mark}", text)
        head, tail = len(marked) - len(marked.lstrip()), len(marked.rstrip())
        if self._ends_one(text[start:]):
            marked, tail = marked[:head] + mark + marked[head:], tail + 1
        if self._begins_one(text[:end]):
            marked = marked[:tail] + mark + marked[tail:]
        # the outermost ends, where whitespace is itself part of a token's spelling
        if start and self._ends_one(text):
            marked = mark + marked
        if end < len(text) and self._begins_one(text):
            marked += mark
        return marked

    def _ends_one(self, text: str) -> bool:
        """True where `text` begins with the end of a control token."""
        return any(text[:i].lower() in self._endings for i in range(1, min(self._longest, len(text) + 1)))

    def _begins_one(self, text: str) -> bool:
        """True where `text` ends with the beginning of a control token."""
        return any(text[-i:].lower() in self._beginnings for i in range(1, min(self._longest, len(text) + 1)))


class InputGuard:
    """The marks of one rendering."""

    def __init__(self, spellings: ControlSpellings, inputs: Any, template: str) -> None:
        """`inputs` is a JSON value with every string that the template will be given."""
        self._spellings = spellings
        # A character is taken where it occurs, and where a JSON escape in a string would decode to it.
        texts = [template, *strings_in(inputs)]
        lowered = [text.lower() for text in texts if "\\u" in text or "\\U" in text]
        free = (
            chr(code)
            for code in _MARKS
            if not any(chr(code) in text for text in texts) and not any(f"\\u{code:04x}" in text for text in lowered)
        )
        self.mark, self.number_mark = next(free, ""), next(free, "")
        self.place_mark = next(free, "")  # for placeholders (written.py); a prompt can do without
        if not self.number_mark:
            raise TextError(
                "the messages use every private-use character of Unicode, so that none is left to tell typed "
                "control tokens from the template's: remove the private-use characters"
            )

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value with every string marked."""
        if isinstance(value, str):
            return self._spellings.mark(value, self.mark)
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        # A string inside a type that is not looked into would reach the template unmarked.
        raise TextError(f"the messages or tools hold a {type(value).__name__}: use JSON values only")

    def strip(self, text: str) -> str:
        """`text` as typed, without marks."""
        return text.replace(self.mark, "").replace(self.number_mark, "")
