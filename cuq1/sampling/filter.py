"""From logits to the distribution that a token is drawn from.

The order is the ecosystem's: temperature, then the k most likely, then the
smallest set of those that reaches probability p after renormalising. Target and
draft go through the same function, since rejection sampling is exact only for
the p and q that tokens are really drawn from.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuq1.errors import Cuq1Error


class Distribution(NamedTuple):
    """A finite distribution over token ids.

    ids: int64 [m], most likely first, equal probabilities by lower id; probs: float64 [m], summing to 1.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token: int) -> float:
        """The probability of one token; 0.0 where the filter left it out."""
        return float(self.probs[self.ids == token].sum())

    def entropy(self) -> float:
        """Shannon entropy in nats."""
        return float(-(self.probs * np.log(self.probs)).sum())


def filtered(logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float) -> Distribution:
    """The distribution of the next token.

    logits: float32 [vocab]. Temperature 0 puts everything on the largest logit
    (the lowest id among equals). top_k 0 keeps every token; with ties at the
    k-th place exactly k are kept, lower ids first. top_p keeps the token that
    crosses p. Raises Cuq1Error where the logits hold a NaN or +Inf.
    """
    peak = np.max(logits)
    if not np.isfinite(peak):
        raise Cuq1Error("the model computed a logit that is not a number: the checkpoint's values are damaged")
    if temperature == 0:
        return Distribution(np.array([int(np.argmax(logits))]), np.ones(1))
    vocab = logits.shape[0]
    if 0 < top_k < vocab:
        threshold = np.partition(logits, vocab - top_k)[vocab - top_k]
        ids = np.flatnonzero(logits >= threshold)
    else:
        top_k = vocab
        ids = np.arange(vocab)
    kept = logits[ids]
    order = np.argsort(-kept, kind="stable")[:top_k]  # ids ascend, so a stable sort breaks ties by id
    ids, kept = ids[order], kept[order]
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends the rest to -inf, which is right
        weights = np.exp((kept.astype(np.float64) - float(peak)) / temperature)
    if top_p < 1:
        cumulative = np.cumsum(weights)
        count = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left")) + 1
        ids, weights = ids[:count], weights[:count]
    alive = int(np.count_nonzero(weights))  # sorted: what underflowed is the tail
    ids, weights = ids[:alive], weights[:alive]
    return Distribution(ids, weights / weights.sum())
