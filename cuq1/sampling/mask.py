"""Masks: which tokens may come next, where an answer has to follow a grammar.

A mask removes tokens before anything else is done to the logits. Target and draft are masked alike, each at a place
by what stands before that place, so rejection sampling stays exact: the committed tokens are distributed as if each
had been drawn from the target's masked and filtered distribution.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cuq1.errors import Cuq1Error

Allowed = NDArray[np.bool_]


class Mask(Protocol):
    """One request's grammar, and where in it the tokens so far have led.

    The engine tells it every token, drafted ones too, and takes back those that were not committed.
    """

    def allowed(self) -> Allowed | None:
        """bool [vocab], at least one of them true: the tokens that may come next. None for all of them."""

    def push(self, token: int) -> None:
        """`token`, which was allowed, comes next."""

    def pop(self, count: int) -> None:
        """Take the last `count` tokens back."""


class MaskPath:
    """A request's mask, and the tokens that it was told beyond the committed ones. Without a mask all is allowed."""

    def __init__(self, mask: Mask | None = None) -> None:
        self._mask = mask
        self._ahead: list[int] = []
        self._found: dict[int, Allowed | None] = {}  # by the number of tokens ahead

    def __bool__(self) -> bool:
        return self._mask is not None

    def after(self, tokens: Sequence[int]) -> Allowed | None:
        """What may follow the committed tokens and then these."""
        if self._mask is None:
            return None
        count = len(tokens)
        if count not in self._found or self._ahead[:count] != list(tokens):
            self._go(self._mask, tokens)
            if count not in self._found:
                self._found[count] = self._mask.allowed()
        return self._found[count]

    def commit(self, tokens: Sequence[int]) -> None:
        """These are committed, and whatever else was ahead is not."""
        if self._mask is not None:
            self._go(self._mask, tokens)
            self._found = {0: self._found[len(tokens)]} if len(tokens) in self._found else {}
            self._ahead = []

    def _go(self, mask: Mask, tokens: Sequence[int]) -> None:
        """Take back what is ahead until it is how `tokens` begin, and go on to their end."""
        same = 0
        for ours, theirs in zip(self._ahead, tokens, strict=False):
            if ours != theirs:
                break
            same += 1
        if same < len(self._ahead):
            mask.pop(len(self._ahead) - same)
            del self._ahead[same:]
            self._found = {count: allowed for count, allowed in self._found.items() if count <= same}
        for token in tokens[same:]:
            mask.push(token)
            self._ahead.append(token)


def masked(logits: NDArray[np.float32], allowed: Allowed | None) -> NDArray[np.float32]:
    """Logits float32 [vocab], -inf where a token is not allowed. Cuq1Error where none is."""
    if allowed is None:
        return logits
    if not allowed.any():
        raise Cuq1Error("the answer's grammar allows no token here: report this, with the schema")
    return np.where(allowed, logits, np.float32(-np.inf))
