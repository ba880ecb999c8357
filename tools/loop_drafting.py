"""What the stop rule gains over a fixed number of drafts on the GPU, and that a skipped depth runs no kernel."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from cuq1.cuda import abi
from cuq1.plan.dims import DRAFT
from cuq1.sampling import MAX_DRAFTS, MIN_AUTO_DRAFTS, DecodeParams
from tools.bench import nano
from tools.depth_rounds import params
from tools.fit_depth import HELD_OUT, TRAIN
from tools.loop_common import Report, finished, opened, timed, traced
from tools.tracing import spans

FIXED = range(1, MAX_DRAFTS + 1)
PROMPTS = 18  # of each seed: its own
ALL_ARMS, KEPT = 10, 2  # seeds that measure every fixed number of drafts, and how many of the best go on


def chat(seed: int, number: int, draft: Any) -> DecodeParams:
    """As tools/fit_depth.py asks: greedy for every fourth prompt."""
    return params(1000 * (seed + 1) + number, greedy=number % 4 == 0, draft=draft)


def check_drafting(options: argparse.Namespace) -> Report:
    """Time per token with the stop rule and at each fixed number of drafts, alternating, on held-out prompts.

    Each seed has prompts of its own. After the first seeds only the fixed numbers that did best go on.
    """
    prompts = nano()[2](PROMPTS * options.seeds, HELD_OUT)
    each: dict[Any, list[tuple[float, int]]] = {arm: [] for arm in ("auto", *FIXED)}
    arms = list(each)
    with opened("device") as engine:
        rule = engine._runtime._rule
        for arm in arms:  # graphs are captured where they are first asked for
            timed(engine, prompts[0], chat(-1, 0, arm))
        for seed in range(options.seeds):
            if seed == ALL_ARMS:
                arms = ["auto", *sorted(FIXED, key=lambda arm: ratio(each[arm]))[:KEPT]]
            found: dict[Any, list[tuple[float, int]]] = {arm: [] for arm in arms}
            for i in range(PROMPTS):
                first = (i + seed) % len(arms)
                for arm in arms[first:] + arms[:first]:
                    found[arm].append(timed(engine, prompts[PROMPTS * seed + i], chat(seed, i, arm)))
            for arm, runs in found.items():
                each[arm].append((sum(s for s, _ in runs), sum(count for _, count in runs)))
    best = min(FIXED, key=lambda arm: (len(each[arm]) < options.seeds, ratio(each[arm])))
    gain, error = saved(each["auto"], each[best])
    by_seed = [1 - ratio([one]) / ratio([other]) for one, other in zip(each["auto"], each[best], strict=True)]
    return {
        "seeds": options.seeds,
        "prompts_a_seed": PROMPTS,
        "threshold": round(rule.threshold, 3),
        "us_per_token": {str(arm): round(1e6 * ratio(runs[:ALL_ARMS]), 2) for arm, runs in each.items()},
        "us_per_token_of_all_seeds": {str(arm): round(1e6 * ratio(each[arm]), 2) for arm in arms},
        "best_fixed_depth": best,
        "gain": round(gain, 4),
        "standard_error": round(error, 4),
        "gain_over_each": {str(arm): [round(x, 4) for x in saved(each["auto"], each[arm])] for arm in FIXED},
        "least": round(min(by_seed), 4),
        "most": round(max(by_seed), 4),
        "skipped": check_skipped(),
        "failed": int(gain < 2 * error),
    }


def ratio(runs: Sequence[tuple[float, int]]) -> float:
    """Seconds a token."""
    return sum(seconds for seconds, _ in runs) / sum(count for _, count in runs)


def saved(ours: Sequence[tuple[float, int]], theirs: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """The share of time a token that `ours` saves, and its standard error: leaving out one seed after the other."""
    pairs = list(zip(ours, theirs, strict=False))  # an arm that was given up has fewer

    def gain(chosen: Sequence[tuple[tuple[float, int], tuple[float, int]]]) -> float:
        return 1 - ratio([one for one, _ in chosen]) / ratio([other for _, other in chosen])

    if len(pairs) < 2:
        return gain(pairs), float("nan")
    without = [gain(pairs[:i] + pairs[i + 1 :]) for i in range(len(pairs))]
    mean = statistics.mean(without)
    return gain(pairs), ((len(pairs) - 1) / len(pairs) * sum((x - mean) ** 2 for x in without)) ** 0.5


def check_threshold(options: argparse.Namespace) -> Report:
    """Time per token under several thresholds of the stop rule, on the prompts that its weights were fitted on."""
    prompts = nano()[2](18, TRAIN)
    each: dict[float, list[float]] = {}
    with opened("device") as engine:
        rule = engine._runtime._rule
        timed(engine, prompts[0], chat(-1, 0, "auto"))
        for seed in range(options.seeds):
            for threshold in (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75):
                engine._runtime._rule = replace(rule, threshold=threshold)
                runs = [timed(engine, ids, chat(seed, i, "auto")) for i, ids in enumerate(prompts)]
                each.setdefault(threshold, []).append(1e6 * ratio(runs))
    means = {threshold: round(statistics.mean(values), 2) for threshold, values in each.items()}
    return {"seeds": options.seeds, "shipped": round(rule.threshold, 3), "us_per_token": means, "failed": 0}


def check_skipped() -> Report:
    """Launches of a depth's first and last kernel, counted by themselves, against the drafts that records tell of."""
    prompts = nano()[2](9, HELD_OUT)
    expected = [0] * (MAX_DRAFTS + 1)
    with traced("device", ("eh_proj", "draft_sample", "control")) as (engine, tracer):
        assert engine._loop is not None
        seen: list[abi.Record] = []
        following = engine._loop.next

        def noted() -> abi.Record:
            seen.append(following())
            return seen[-1]

        with mock.patch.object(engine._loop, "next", noted):
            for i, ids in enumerate(prompts):
                finished(engine, ids, DecodeParams(temperature=1.0, top_k=20, top_p=0.95, seed=i, max_tokens=150))
        found = spans(tracer.read(), tracer.labels)
    for record in seen:
        expected[record.next_rows - 1] += 1
    depths = sum(depth * count for depth, count in enumerate(expected))
    ran = {label: sum(span.label == label for span in found) for label in tracer.labels}
    controls = sum((depth - MIN_AUTO_DRAFTS + 1) * count for depth, count in enumerate(expected) if count)
    right = ran["eh_proj"] == ran["draft_sample"] == depths and ran["control"] == controls
    return {
        "rounds_by_drafts": expected,
        "depths": depths,
        "of_at_most": MAX_DRAFTS * len(seen),
        "launches": ran,
        "draft_layer_only": all(span.layer == DRAFT for span in found),
        "failed": int(not right or depths == MAX_DRAFTS * len(seen)),
    }
