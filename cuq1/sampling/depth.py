"""The stop rule: whether drafting one token more is worth its cost.

Three drafts are always made. After the third and each later one the rule
estimates, from the drafts so far, the probability that the next draft would be
committed, which needs every earlier one to be accepted too, and goes on while
that exceeds a threshold: the time of a draft over the time that a committed token
more saves there. The rule looks at a draft's probability only to decide about the
next one; it never withdraws a draft.

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
FEATURE_TOP_K = 20  # what the rule sees of a greedy request's draft
UNSURE = 0.4  # a draft that was proposed with less than this is as doubtful as can be


def features(served: Sequence[float], entropies: Sequence[float]) -> tuple[float, ...]:
    """FEATURES of the drafts so far.

    served: the probability with which each drafted token was proposed; entropies:
    of the distributions that they were drawn from, in nats. For greedy requests
    both describe the draft's distribution at temperature 1, since the one that is
    drawn from says nothing.
    """
    logs = [math.log(max(p, UNSURE)) for p in served]
    return (1.0, sum(logs), logs[-1], min(logs), entropies[-1], sum(entropies) / len(entropies))


@dataclass(frozen=True)
class DepthRule:
    """A logistic estimate for each decision.

    coefficients[i]: weights of FEATURES once MIN_AUTO_DRAFTS + i drafts are made;
    greedy[i]: what a greedy request adds to the bias, since its drafts need only be the
    target's first choice; threshold: the least probability of being committed that pays
    for one more draft; worth: what a committed token more saves where the rule decides,
    as a share of the time of a round with MIN_AUTO_DRAFTS drafts. It is less than a token's part of such a round,
    as tokens that can be foreseen are cheap ones. Thresholds of other machines follow from it.
    """

    coefficients: tuple[tuple[float, ...], ...]
    threshold: float
    greedy: tuple[float, ...] = (0.0,) * DECISIONS
    worth: float = 1.0

    def weights(self, decision: int, *, greedy: bool) -> tuple[float, ...]:
        """Weights of FEATURES at one decision, for a greedy request or one that is sampled."""
        bias, *others = self.coefficients[decision]
        return (bias + self.greedy[decision] if greedy else bias, *others)

    def probability(self, served: Sequence[float], entropies: Sequence[float], *, greedy: bool) -> float:
        """Estimated probability that the next draft and all before it are accepted."""
        weights = self.weights(len(served) - MIN_AUTO_DRAFTS, greedy=greedy)
        score = sum(w * x for w, x in zip(weights, features(served, entropies), strict=True))
        return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, score))))

    def more(self, served: Sequence[float], entropies: Sequence[float], *, greedy: bool) -> bool:
        """Whether to draft another token after these."""
        if len(served) < MIN_AUTO_DRAFTS:
            return True
        return len(served) < MAX_DRAFTS and self.probability(served, entropies, greedy=greedy) > self.threshold


def parse_rule(text: str, where: str) -> DepthRule:
    """A rule from its JSON text; ConfigError where it does not fit this version's features."""
    try:
        raw = json.loads(text)
        rule = DepthRule(
            tuple(tuple(float(w) for w in row) for row in raw["coefficients"]),
            float(raw["threshold"]),
            tuple(float(w) for w in raw["greedy"]),
            float(raw["worth"]),
        )
        fits = tuple(raw["features"]) == FEATURES
    except (ValueError, KeyError, TypeError):
        fits = False
    if (
        not fits
        or {len(rule.coefficients), len(rule.greedy)} != {DECISIONS}
        or any(len(row) != len(FEATURES) for row in rule.coefficients)
    ):
        raise ConfigError(f"{where} does not hold a draft-depth rule for this version: fit it with tools/fit_depth.py")
    return rule


def default_rule() -> DepthRule:
    """The rule that was fitted on nano's texts and ships with the package."""
    text = resources.files("cuq1.sampling").joinpath("depth_rule.json").read_text(encoding="utf-8")
    return parse_rule(text, "cuq1/sampling/depth_rule.json")
