"""The stop rule: whether drafting one token more is worth its cost.

Three drafts are always made. After the third and each later one the rule
estimates, from the drafts so far, the probability that the next draft would be
committed, which needs every earlier one to be accepted too, and goes on while
that exceeds a threshold: the cost of one depth more, in tokens that the same
time would otherwise yield. The rule looks at a draft's probability only to
decide about the next one; it never withdraws a draft.

The coefficients are data, written by tools/fit_depth.py.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from cuq1.errors import ConfigError
from cuq1.sampling.params import MAX_DRAFTS, MIN_AUTO_DRAFTS

FEATURES = ("bias", "sum_log_served", "last_log_served", "min_log_served", "last_entropy", "mean_entropy")
DECISIONS = MAX_DRAFTS - MIN_AUTO_DRAFTS


def features(served: Sequence[float], entropies: Sequence[float]) -> tuple[float, ...]:
    """FEATURES of the drafts so far.

    served: the probability with which each drafted token was proposed; entropies:
    of the distributions that they were drawn from, in nats. For greedy requests
    both describe the draft's distribution at temperature 1, since the one that is
    drawn from says nothing.
    """
    logs = [math.log(max(p, 1e-9)) for p in served]
    return (1.0, sum(logs), logs[-1], min(logs), entropies[-1], sum(entropies) / len(entropies))


@dataclass(frozen=True)
class DepthRule:
    """A logistic estimate for each decision.

    coefficients[i]: weights of FEATURES once MIN_AUTO_DRAFTS + i drafts are made;
    threshold: the least probability of being committed that pays for one more draft.
    """

    coefficients: tuple[tuple[float, ...], ...]
    threshold: float

    def probability(self, served: Sequence[float], entropies: Sequence[float]) -> float:
        """Estimated probability that the next draft and all before it are accepted."""
        weights = self.coefficients[len(served) - MIN_AUTO_DRAFTS]
        score = sum(w * x for w, x in zip(weights, features(served, entropies), strict=True))
        return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, score))))

    def more(self, served: Sequence[float], entropies: Sequence[float]) -> bool:
        """Whether to draft another token after these."""
        if len(served) < MIN_AUTO_DRAFTS:
            return True
        return len(served) < MAX_DRAFTS and self.probability(served, entropies) > self.threshold


def parse_rule(text: str, where: str) -> DepthRule:
    """A rule from its JSON text; ConfigError where it does not fit this version's features."""
    try:
        raw = json.loads(text)
        rule = DepthRule(
            tuple(tuple(float(w) for w in row) for row in raw["coefficients"]),
            float(raw["threshold"]),
        )
        fits = tuple(raw["features"]) == FEATURES
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits or len(rule.coefficients) != DECISIONS or any(len(row) != len(FEATURES) for row in rule.coefficients):
        raise ConfigError(f"{where} does not hold a draft-depth rule for this version: fit it with tools/fit_depth.py")
    return rule


def default_rule() -> DepthRule:
    """The rule that was fitted on nano's traces and ships with the package."""
    text = resources.files("cuq1.sampling").joinpath("depth_rule.json").read_text(encoding="utf-8")
    return parse_rule(text, "cuq1/sampling/depth_rule.json")
