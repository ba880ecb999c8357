"""Rejection sampling of drafted tokens.

A draft d drawn from q is accepted with probability min(1, p(d)/q(d)); the first
rejected one is replaced by a draw from normalize(max(0, p - q)); where all are
accepted the target's next row gives one token more. The committed tokens are
then distributed exactly as if each had been drawn from p.

Source: Leviathan, Kalman, Matias, "Fast inference from transformers via
speculative decoding" (ICML 2023), theorem 3.5; Chen et al. (2023), theorem 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cuq1.sampling.filter import Distribution
from cuq1.sampling.rng import Purpose, uniform


class Verdict(NamedTuple):
    """How many drafts were accepted, and the token that follows them."""

    accepted: int
    token: int


def draw(distribution: Distribution, u: float) -> int:
    """The token at u in [0, 1) of the cumulative distribution, in the order of `ids`."""
    cumulative = np.cumsum(distribution.probs)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    # u * total can round up to the total itself
    return int(distribution.ids[min(index, len(cumulative) - 1)])


def accept(draft: int, p: Distribution, q: Distribution, u: float) -> bool:
    """Whether a draft drawn from q stands, for u in [0, 1).

    Strictly below, so that u = 0 does not accept a token that p excludes.
    """
    return u * q.prob(draft) < p.prob(draft)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """normalize(max(0, p - q)), over the ids of p.

    A rejection implies that some token has p > q; where rounding leaves none, p equals q and is returned.
    """
    q_of = dict(zip(q.ids.tolist(), q.probs.tolist(), strict=True))
    rest = np.maximum(p.probs - [q_of.get(token, 0.0) for token in p.ids.tolist()], 0.0)
    total = rest.sum()
    if total <= 0:
        return p
    keep = rest > 0
    return Distribution(p.ids[keep], rest[keep] / total)


def verify(
    drafts: Sequence[int],
    q: Sequence[Distribution],
    p: Sequence[Distribution],
    seed: int,
    position: int,
) -> Verdict:
    """Judge the drafts for positions `position`, `position + 1`, … in order.

    q has one distribution for each draft, the one that it was drawn from; p has
    one more: row i is the target's for the token at `position + i`.
    """
    for i, draft in enumerate(drafts):
        if not accept(draft, p[i], q[i], uniform(seed, position + i, Purpose.ACCEPT)):
            return Verdict(i, draw(residual(p[i], q[i]), uniform(seed, position + i, Purpose.TARGET)))
    count = len(drafts)
    return Verdict(count, draw(p[count], uniform(seed, position + count, Purpose.TARGET)))
