"""Fit the draft-depth stop rule on texts that nano writes, and report what it gains on held-out ones.

    python tools/fit_depth.py --out cuq1/sampling/depth_rule.json --log     # a quarter of an hour on one core
    python tools/fit_depth.py --bench 10 --log

tools/depth_rounds.py makes the data: texts that the target wrote, and for every position of each a round of all seven
drafts from there, distributed as any engine's would be, whatever rounds came before. A policy is then scored by
walking through the texts with it, which is exact where replaying finished rounds is not: cut short, a round is
followed by other rounds than it was.

For each decision a logistic regression estimates whether the next draft would be committed. It is fitted on the rounds
that the rule itself comes to: fit, walk, weigh the positions by the walk, fit again. The threshold is the one with the
least time a token on the training texts, under round times measured on this machine at each depth. What is reported
comes from other prompts and seeds. --bench decodes held-out prompts for real instead, the shipped rule and the best
fixed depth alternating.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if not __package__:  # run as a script, whose folder is on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuq1.cli import Parser, guarded
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import MAX_DRAFTS, MIN_AUTO_DRAFTS
from cuq1.sampling.depth import DECISIONS, FEATURES, DepthRule, default_rule
from tools.bench import ROOT, append_row, at_least_one, nano
from tools.depth_rounds import Rounds, collect, params

F64 = NDArray[np.float64]
Depths = NDArray[np.int64]  # drafts of the round from each position
RIDGE = 1e-2
REFITS = 4
ELSEWHERE = 0.03  # weight of rounds that the rule does not come to, so that none is a case never seen
DECIDING = range(MIN_AUTO_DRAFTS, MAX_DRAFTS)  # drafts after which the rule decides
TRAIN, HELD_OUT = 1, 2  # seeds of the prompt sets
RULE = ROOT / "cuq1" / "sampling" / "depth_rule.json"


def round_times(model: Path, prompts: list[list[int]]) -> F64:
    """Median seconds of a round by its drafts, 1 to MAX_DRAFTS; index 0 is not used."""
    times: list[list[float]] = [[0.0], *([] for _ in range(MAX_DRAFTS))]
    with ReferenceEngine(model) as engine:
        for ids in prompts:
            for depth in range(1, MAX_DRAFTS + 1):
                engine.prefill(ids)
                clock = time.perf_counter()
                for step in engine.decode(params(1, greedy=False, draft=depth)):
                    now = time.perf_counter()
                    if not step.from_prompt:
                        times[depth].append(now - clock)
                    clock = now
    return np.array([statistics.median(each) for each in times])


def logistic(x: F64, y: F64, weight: F64) -> F64:
    """Weighted ridge logistic regression of y in [0, 1] by Newton's method; the bias, column 0, is not penalised."""
    penalty = np.full(x.shape[1], RIDGE * weight.sum() ** 0.5)
    penalty[0] = 0
    w = np.zeros(x.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-(x @ w)))
        gradient = x.T @ (weight * (p - y)) + penalty * w
        hessian = (x * (weight * p * (1 - p))[:, None]).T @ x + np.diag(penalty + 1e-9)
        step = np.linalg.solve(hessian, gradient)
        w -= step
        if np.abs(step).max() < 1e-9:
            break
    return w


def stands(rounds: Rounds, made: int) -> F64:
    """1 where the draft after so many would be committed, else 0."""
    return (rounds.accepted > made).astype(np.float64)


def chosen(rule: DepthRule, rounds: Rounds) -> Depths:
    """How many drafts the rule makes from each position."""
    depths = fixed(rounds, MIN_AUTO_DRAFTS)
    on = np.ones(depths.shape, bool)
    for made in DECIDING:
        on &= estimates(rule, rounds, made) > rule.threshold
        depths[on] = made + 1
    return depths


def estimates(rule: DepthRule, rounds: Rounds, made: int) -> F64:
    """What the rule estimates after so many drafts: DepthRule.probability of every round."""
    greedy, sampled = (np.array(rule.weights(made - MIN_AUTO_DRAFTS, greedy=each)) for each in (True, False))
    x = rounds.features(made)
    score: F64 = np.where(rounds.greedy[:, None], x @ greedy, x @ sampled)
    return 1 / (1 + np.exp(-np.clip(score, -60, 60)))


def next_start(rounds: Rounds, depths: Depths | int) -> Depths:
    """The position from which the next round starts, for each position and its drafts."""
    ends: Depths = np.arange(rounds.width) + np.minimum(rounds.accepted, depths) + 1
    inside: Depths = np.minimum(ends, rounds.lengths[:, None])
    return inside


def to_go(rounds: Rounds, depths: Depths, times: F64) -> F64:
    """Time from each position [texts, width + 1] to the end of its text."""
    left = np.zeros((len(rounds.lengths), rounds.width + 1))
    following = next_start(rounds, depths)
    rows = np.arange(len(left))
    for i in range(rounds.width - 1, -1, -1):
        inside = i < rounds.lengths
        left[:, i] = np.where(inside, times[depths[:, i]] + left[rows, following[:, i]], 0.0)
    return left


def visits(rounds: Rounds, depths: Depths) -> F64:
    """1 where a walk from the start begins a round, else 0."""
    seen = np.zeros((len(rounds.lengths), rounds.width + 1))
    seen[:, 0] = 1
    following = next_start(rounds, depths)
    rows = np.arange(len(seen))
    for i in range(rounds.width):
        inside = i < rounds.lengths
        np.maximum.at(seen, (rows[inside], following[inside, i]), seen[inside, i])
    return seen[:, :-1] * rounds.valid


def per_token(rounds: Rounds, depths: Depths, times: F64) -> float:
    """Time a token of a policy: from the first token to the end of all texts."""
    return float(to_go(rounds, depths, times)[:, 0].sum() / rounds.lengths.sum())


def fixed(rounds: Rounds, depth: int) -> Depths:
    return np.full(rounds.accepted.shape, depth)


def best_fixed(rounds: Rounds, times: F64) -> tuple[int, float]:
    """The fixed number of drafts that takes the least time a token, and that time."""
    return min(
        ((depth, per_token(rounds, fixed(rounds, depth), times)) for depth in range(1, MAX_DRAFTS + 1)),
        key=lambda pair: pair[1],
    )


def with_hindsight(rounds: Rounds, times: F64) -> float:
    """Time a token of the best choice among all of 1 to MAX_DRAFTS by one who knows what will be accepted."""
    left = np.zeros((len(rounds.lengths), rounds.width + 1))
    rows = np.arange(len(left))
    following = [next_start(rounds, depth) for depth in range(MAX_DRAFTS + 1)]
    for i in range(rounds.width - 1, -1, -1):
        best = np.min([times[k] + left[rows, following[k][:, i]] for k in range(1, MAX_DRAFTS + 1)], axis=0)
        left[:, i] = np.where(i < rounds.lengths, best, 0.0)
    return float(left[:, 0].sum() / rounds.lengths.sum())


def fit_once(rounds: Rounds, weight: F64, depths: Depths) -> DepthRule:
    """Coefficients from rounds that count by `weight`, each decision from those that come to it."""
    coefficients, greedy = [], []
    for made in DECIDING:
        here = rounds.whole & (depths >= made)
        flag = np.broadcast_to(rounds.greedy[:, None], here.shape)[here]
        x = np.column_stack((rounds.features(made)[here], flag))
        *w, added = (round(float(v), 5) for v in logistic(x, stands(rounds, made)[here], weight[here]))
        coefficients.append(tuple(w))
        greedy.append(added)
    return DepthRule(tuple(coefficients), 0.5, tuple(greedy))


def best_threshold(rule: DepthRule, rounds: Rounds, times: F64) -> DepthRule:
    """The rule with the threshold under which these texts take the least time, the middle of those as good."""
    rules = [DepthRule(rule.coefficients, round(0.01 * i, 2), rule.greedy, rule.worth) for i in range(1, 96)]
    spent = [per_token(rounds, chosen(each, rounds), times) for each in rules]
    good = [each for each, time_ in zip(rules, spent, strict=True) if time_ <= 1.0005 * min(spent)]
    return good[len(good) // 2]


def fit(rounds: Rounds, times: F64) -> DepthRule:
    """A rule fitted on the rounds that it comes to itself."""
    depths = fixed(rounds, MAX_DRAFTS)
    weight = rounds.valid.astype(float)
    for _ in range(REFITS):
        rule = best_threshold(fit_once(rounds, weight, depths), rounds, times)
        depths = chosen(rule, rounds)
        weight = np.maximum(visits(rounds, depths), ELSEWHERE)
    return DepthRule(rule.coefficients, rule.threshold, rule.greedy, worth(rule, rounds, times))


def worth(rule: DepthRule, rounds: Rounds, times: F64) -> float:
    """What a committed token more saves where the rule decides, as a share of a round with the fewest drafts.

    The time from where a round would go on without the next draft less that from where it would with it, over the
    tokens between.
    """
    depths = chosen(rule, rounds)
    left, seen = to_go(rounds, depths, times), visits(rounds, depths)
    rows = np.arange(len(left))[:, None]
    saved = extra = 0.0
    for made in DECIDING:
        here = seen * (depths >= made)
        near, far = next_start(rounds, made), next_start(rounds, made + 1)
        saved += float((here * (left[rows, near] - left[rows, far])).sum())
        extra += float((here * (far - near)).sum())
    return round(saved / extra / float(times[MIN_AUTO_DRAFTS]), 3)


def calibration(rule: DepthRule, rounds: Rounds) -> list[dict[str, Any]]:
    """Estimates against shares, of the rounds that the rule comes to, by fifths of the estimate."""
    depths = chosen(rule, rounds)
    seen = visits(rounds, depths) > 0
    found = []
    for made in DECIDING:
        here = seen & rounds.whole & (depths >= made)
        said, was = estimates(rule, rounds, made)[here], stands(rounds, made)[here]
        order = np.array_split(np.argsort(said), 5)
        found.append(
            {
                "drafts": made,
                "rounds": len(said),
                "estimated": [round(float(said[part].mean()), 3) for part in order],
                "committed": [round(float(was[part].mean()), 3) for part in order],
            }
        )
    return found


def bench(model: Path, rule: DepthRule, depth: int, prompts: list[list[int]], seeds: int) -> dict[str, Any]:
    """Decode held-out prompts with the rule and at the best fixed depth, alternating; time per token."""
    gains = []
    with ReferenceEngine(model, depth_rule=rule) as engine:
        for seed in range(seeds):
            spent = {"auto": 0.0, "fixed": 0.0}
            tokens = {"auto": 0, "fixed": 0}
            for i, ids in enumerate(prompts):
                arms: list[tuple[str, Any]] = [("auto", "auto"), ("fixed", depth)]
                for name, draft in arms if (i + seed) % 2 else arms[::-1]:
                    engine.prefill(ids)
                    start = time.perf_counter()
                    asked = params(1000 * seed + i, greedy=i % 4 == 0, draft=draft)
                    count = sum(len(step) for step in engine.decode(asked))
                    spent[name] += time.perf_counter() - start
                    tokens[name] += count
            gains.append(1 - (spent["auto"] / tokens["auto"]) / (spent["fixed"] / tokens["fixed"]))
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
    return {
        "fixed_depth": depth,
        "seeds": seeds,
        "measured_gain": round(statistics.mean(gains), 4),
        "standard_error": round(error, 4),
        "least": round(min(gains), 4),
        "most": round(max(gains), 4),
    }


def fit_and_report(
    model: Path, prompts: Callable[..., list[list[int]]], count: int, seeds: int
) -> tuple[DepthRule, dict[str, Any]]:
    """A rule fitted on `count` prompts, and how it does on half as many others."""
    train_prompts, held_prompts = prompts(count, TRAIN), prompts(max(2, count // 2), HELD_OUT)
    times = round_times(model, train_prompts[:12])
    train, held = (
        Rounds(collect(model, *each)) for each in ((train_prompts, 10_000, seeds), (held_prompts, 20_000, 1))
    )
    rule = fit(train, times)
    depth, _ = best_fixed(train, times)
    base = per_token(held, fixed(held, depth), times)
    depths = chosen(rule, held)
    begun = visits(held, depths) > 0
    return rule, {
        "tokens_train": int(train.lengths.sum()),
        "tokens_held_out": int(held.lengths.sum()),
        "round_ms_by_depth": [round(1e3 * t, 2) for t in times[1:].tolist()],
        "best_fixed_depth": depth,
        "gain_held_out": round(1 - per_token(held, depths, times) / base, 4),
        "gain_with_hindsight": round(1 - with_hindsight(held, times) / base, 4),
        "rounds_by_drafts": {k: int((begun & (depths == k)).sum()) for k in (*DECIDING, MAX_DRAFTS)},
        "calibration": calibration(rule, held),
    }


def main() -> int:
    """Run the command line; returns the exit status."""
    return guarded("fit_depth", _main)


def _main() -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the rule here")
    parser.add_argument(
        "--prompts", type=at_least_one, default=180, help="prompts to train on, and half as many held out"
    )
    parser.add_argument("--texts", type=at_least_one, default=3, help="sampled texts of each prompt to train on")
    parser.add_argument(
        "--bench", type=at_least_one, metavar="SEEDS", help="time the shipped rule instead of fitting one"
    )
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/")
    options = parser.parse_args()
    model, _, prompts = nano()
    if options.bench:
        depth = json.loads(RULE.read_text(encoding="utf-8"))["fit"]["best_fixed_depth"]
        report = bench(model, default_rule(), depth, prompts(18, HELD_OUT), options.bench)
    else:
        rule, report = fit_and_report(model, prompts, options.prompts, options.texts)
        if options.out:
            options.out.write_text(json.dumps(as_json(rule, report), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    if options.log:
        append_row("depth", report)
    return 0


def as_json(rule: DepthRule, report: dict[str, Any]) -> dict[str, Any]:
    """What cuq1.sampling.depth.parse_rule reads, and where it came from."""
    assert len(rule.coefficients) == DECISIONS
    return {
        "features": FEATURES,
        "coefficients": rule.coefficients,
        "greedy": rule.greedy,
        "threshold": rule.threshold,
        "worth": rule.worth,
        "fit": report,
    }


if __name__ == "__main__":
    sys.exit(main())
