"""What the stop rule gains over a fixed number of drafts on the GPU, and that a skipped depth runs no kernel."""

import argparse
import statistics
from dataclasses import replace
from typing import Any
from unittest import mock

from cuq1.cuda import abi
from cuq1.plan.dims import DRAFT
from cuq1.sampling import MAX_DRAFTS, MIN_AUTO_DRAFTS, DecodeParams
from tools.bench import nano
from tools.loop_common import Report, finished, opened, timed, traced
from tools.tracing import spans

FITTED, HELD_OUT = 1, 2  # seeds of the prompts that tools/fit_depth.py trained on, and did not
FIXED = (3, 4, 5, 7)  # drafts a round to compare with: a depth's cost grows evenly, so 6 lies between


def chat(seed: int, number: int, draft: Any) -> DecodeParams:
    """As tools/fit_depth.py asks: greedy for every fourth prompt."""
    return DecodeParams(
        temperature=0.0 if number % 4 == 0 else 1.0,
        top_k=20,
        top_p=0.95,
        seed=1000 * (seed + 1) + number,
        max_tokens=200,
        stop_tokens=(0,),
        draft=draft,
    )


def check_drafting(options: argparse.Namespace) -> Report:
    """Time per token with the stop rule and at each fixed depth, alternating, on held-out prompts."""
    prompts = nano()[2](18, HELD_OUT)
    arms: tuple[Any, ...] = ("auto", *FIXED)
    each: dict[Any, list[float]] = {arm: [] for arm in arms}
    with opened("device") as engine:
        for arm in arms:  # graphs are captured where they are first asked for
            timed(engine, prompts[0], chat(-1, 0, arm))
        for seed in range(options.seeds):
            spent, tokens = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
            for i, ids in enumerate(prompts):
                order = arms[(i + seed) % len(arms) :] + arms[: (i + seed) % len(arms)]
                for arm in order:
                    seconds, count = timed(engine, ids, chat(seed, i, arm))
                    spent[arm] += seconds
                    tokens[arm] += count
            for arm in arms:
                each[arm].append(1e6 * spent[arm] / tokens[arm])
    means = {str(arm): statistics.mean(values) for arm, values in each.items()}
    fixed = min(arms[1:], key=lambda arm: means[str(arm)])
    gains = [1 - auto / other for auto, other in zip(each["auto"], each[fixed], strict=True)]
    error = statistics.stdev(gains) / len(gains) ** 0.5
    return {
        "seeds": options.seeds,
        "us_per_token": {arm: round(value, 2) for arm, value in means.items()},
        "best_fixed_depth": fixed,
        "gain": round(statistics.mean(gains), 4),
        "standard_error": round(error, 4),
        "least": round(min(gains), 4),
        "most": round(max(gains), 4),
        "skipped": check_skipped(),
        "failed": int(statistics.mean(gains) < 2 * error),
    }


def check_threshold(options: argparse.Namespace) -> Report:
    """Time per token under several thresholds of the stop rule, on the prompts that its weights were fitted on."""
    prompts = nano()[2](18, FITTED)
    each: dict[float, list[float]] = {}
    with opened("device") as engine:
        rule = engine._runtime._rule
        timed(engine, prompts[0], chat(-1, 0, "auto"))
        for seed in range(options.seeds):
            for threshold in (0.1, 0.18, 0.26, 0.34, 0.42, 0.5, 0.58, 0.66):
                engine._runtime._rule = replace(rule, threshold=threshold)
                spent, tokens = 0.0, 0
                for i, ids in enumerate(prompts):
                    seconds, count = timed(engine, ids, chat(seed, i, "auto"))
                    spent, tokens = spent + seconds, tokens + count
                each.setdefault(threshold, []).append(1e6 * spent / tokens)
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
