"""Log-probabilities of tokens, as the model gives them: before temperature, filters and masks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprob(NamedTuple):
    """A committed token's natural logarithm of probability, and the most likely tokens with theirs.

    top: (id, logarithm) pairs, most likely first, equal ones by lower id. The token itself is among them only where
    it is one of the most likely.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprob:
    """The logarithms of softmax(logits [vocab]) at `token` and at the `count` largest logits, summed in float64."""
    peak = float(np.max(logits))
    total = peak + float(np.log(np.sum(np.exp(logits.astype(np.float64) - peak))))
    ids = np.empty(0, np.int64)
    if count:
        count = min(count, len(logits))
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        ids = np.flatnonzero(logits >= least)  # ascending, so that a stable sort breaks ties by id
        ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
    top = tuple((int(i), float(logits[i]) - total) for i in ids)
    return TokenLogprob(float(logits[token]) - total, top)


def token_logprobs(logits: NDArray[np.float32], tokens: Sequence[int], count: int | None) -> tuple[TokenLogprob, ...]:
    """`token_logprob` of each token and its row of logits [at least as many, vocab]; none where count is None."""
    if count is None:
        return ()
    return tuple(token_logprob(row, token, count) for row, token in zip(logits, tokens, strict=False))
