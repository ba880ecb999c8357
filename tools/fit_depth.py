"""Fit the draft-depth stop rule on nano traces, and report what it gains on held-out ones.

    python tools/fit_depth.py --out cuq1/sampling/depth_rule.json --log
    python tools/fit_depth.py --bench 10 --log

Traces are rounds with all seven drafts, so that every shorter round can be read
off them: a round cut at depth k would have accepted min(accepted, k). For each
decision a logistic regression estimates whether the next draft would be
committed. The threshold is the one that maximises tokens per second of the
training traces, under round times measured on this machine at each depth. What
is reported comes from other prompts and seeds. --bench decodes held-out prompts
for real instead, the shipped rule and the best fixed depth alternating.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if not __package__:  # run as a script, whose folder is on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuq1.cli import Parser, guarded
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import MAX_DRAFTS, MIN_AUTO_DRAFTS, DecodeParams
from cuq1.sampling.depth import FEATURES, DepthRule, default_rule, features
from tools.bench import ROOT, append_row, at_least_one, nano

F64 = NDArray[np.float64]
DECISIONS = range(MIN_AUTO_DRAFTS, MAX_DRAFTS)
RIDGE = 1e-2
TRAIN, HELD_OUT = 1, 2  # seeds of the prompt sets
RULE = ROOT / "cuq1" / "sampling" / "depth_rule.json"


@dataclass
class Trace:
    """One round with all drafts: what the rule sees after each draft, and how many were accepted."""

    served: list[float]
    entropies: list[float]
    accepted: int


class Recorder(DepthRule):
    """A rule that always goes on and remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__((), 0.0)
        object.__setattr__(self, "seen", ([], []))

    seen: tuple[list[float], list[float]]

    def more(self, served: Sequence[float], entropies: Sequence[float]) -> bool:
        object.__setattr__(self, "seen", (list(served), list(entropies)))
        return True


def params(seed: int, greedy: bool, **more: Any) -> DecodeParams:
    return DecodeParams(
        temperature=0.0 if greedy else 1.0, top_k=20, top_p=0.95, seed=seed, max_tokens=200, stop_tokens=(0,), **more
    )


def collect(model: Path, prompts: list[list[int]], seed: int) -> list[Trace]:
    """Traces of each prompt, greedy for every fourth and sampled for the others."""
    recorder = Recorder()
    traces = []
    with ReferenceEngine(model, depth_rule=recorder) as engine:
        for i, ids in enumerate(prompts):
            engine.prefill(ids)
            for step in engine.decode(params(seed + i, i % 4 == 0)):
                if step.drafted == MAX_DRAFTS:
                    traces.append(Trace(*recorder.seen, step.accepted))
    return traces


def round_times(model: Path, prompts: list[list[int]]) -> F64:
    """Median seconds of a round at each fixed depth; index 0 is MIN_AUTO_DRAFTS."""
    times: list[list[float]] = [[] for _ in range(MIN_AUTO_DRAFTS, MAX_DRAFTS + 1)]
    with ReferenceEngine(model) as engine:
        for ids in prompts:
            for depth in range(MIN_AUTO_DRAFTS, MAX_DRAFTS + 1):
                engine.prefill(ids)
                clock = time.perf_counter()
                for step in engine.decode(params(1, False, draft=depth)):
                    now = time.perf_counter()
                    if not step.from_prompt:
                        times[depth - MIN_AUTO_DRAFTS].append(now - clock)
                    clock = now
    return np.array([statistics.median(each) for each in times])


def logistic(x: F64, y: F64) -> F64:
    """Ridge logistic regression by Newton's method; the bias, column 0, is not penalised."""
    penalty = np.full(x.shape[1], RIDGE * len(x) ** 0.5)
    penalty[0] = 0
    w = np.zeros(x.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-(x @ w)))
        gradient = x.T @ (p - y) + penalty * w
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.diag(penalty + 1e-9)
        step = np.linalg.solve(hessian, gradient)
        w -= step
        if np.abs(step).max() < 1e-9:
            break
    return w


def fit(traces: list[Trace]) -> tuple[tuple[float, ...], ...]:
    """Coefficients of each decision."""
    rows = []
    for made in DECISIONS:
        x = np.array([features(trace.served[:made], trace.entropies[:made]) for trace in traces])
        y = np.array([float(trace.accepted > made) for trace in traces])
        rows.append(tuple(round(float(w), 5) for w in logistic(x, y)))
    return tuple(rows)


def rate(traces: list[Trace], times: F64, depth_of: Callable[[Trace], int]) -> float:
    """Tokens a second if each round is cut at depth_of(trace)."""
    tokens = seconds = 0.0
    for trace in traces:
        depth = depth_of(trace)
        tokens += min(trace.accepted, depth) + 1
        seconds += times[depth - MIN_AUTO_DRAFTS]
    return tokens / seconds


def chosen_depth(rule: DepthRule, trace: Trace) -> int:
    """Where the rule would have stopped."""
    for made in DECISIONS:
        if not rule.more(trace.served[:made], trace.entropies[:made]):
            return made
    return MAX_DRAFTS


def best_fixed(traces: list[Trace], times: F64) -> tuple[int, float]:
    """The fixed depth that would have been best on these traces, and its tokens a second."""

    def speed(depth: int) -> float:
        return rate(traces, times, lambda _: depth)

    best = max(range(MIN_AUTO_DRAFTS, MAX_DRAFTS + 1), key=speed)
    return best, speed(best)


def best_threshold(coefficients: tuple[tuple[float, ...], ...], traces: list[Trace], times: F64) -> float:
    """The threshold under which the traces yield most tokens a second."""

    def speed(threshold: float) -> float:
        rule = DepthRule(coefficients, threshold)
        return rate(traces, times, lambda trace: chosen_depth(rule, trace))

    return max((round(0.01 * i, 2) for i in range(1, 90)), key=speed)


def bench(model: Path, rule: DepthRule, fixed: int, prompts: list[list[int]], seeds: int) -> dict[str, Any]:
    """Decode held-out prompts with the rule and at the best fixed depth, alternating; time per token."""
    gains = []
    with ReferenceEngine(model, depth_rule=rule) as engine:
        for seed in range(seeds):
            spent = {"auto": 0.0, "fixed": 0.0}
            tokens = {"auto": 0, "fixed": 0}
            for i, ids in enumerate(prompts):
                arms: list[tuple[str, Any]] = [("auto", "auto"), ("fixed", fixed)]
                for name, draft in arms if (i + seed) % 2 else arms[::-1]:
                    engine.prefill(ids)
                    start = time.perf_counter()
                    count = sum(len(step) for step in engine.decode(params(1000 * seed + i, i % 4 == 0, draft=draft)))
                    spent[name] += time.perf_counter() - start
                    tokens[name] += count
            gains.append(1 - (spent["auto"] / tokens["auto"]) / (spent["fixed"] / tokens["fixed"]))
    error = statistics.stdev(gains) / len(gains) ** 0.5
    return {
        "fixed_depth": fixed,
        "seeds": seeds,
        "measured_gain": round(statistics.mean(gains), 4),
        "standard_error": round(error, 4),
        "least": round(min(gains), 4),
        "most": round(max(gains), 4),
    }


def fit_and_report(
    model: Path, prompts: Callable[..., list[list[int]]], count: int
) -> tuple[DepthRule, dict[str, Any]]:
    """A rule fitted on `count` prompts, and how it does on half as many others."""
    train_prompts, held_prompts = prompts(count, TRAIN), prompts(count // 2, HELD_OUT)
    times = round_times(model, train_prompts[:12])
    train, held = collect(model, train_prompts, 10_000), collect(model, held_prompts, 20_000)
    coefficients = fit(train)
    rule = DepthRule(coefficients, best_threshold(coefficients, train, times))
    fixed, fixed_rate = best_fixed(held, times)

    def gain(depth_of: Callable[[Trace], int]) -> float:
        """The share of time per token saved against the fixed depth that is best on these very traces."""
        return round(1 - fixed_rate / rate(held, times, depth_of), 4)

    return rule, {
        "rounds_train": len(train),
        "rounds_held_out": len(held),
        "round_ms_by_depth": [round(1e3 * t, 2) for t in times.tolist()],
        "best_fixed_depth": fixed,
        "replayed_gain": gain(lambda trace: chosen_depth(rule, trace)),
        "replayed_gain_of_oracle": gain(lambda trace: max(MIN_AUTO_DRAFTS, trace.accepted)),
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
    parser.add_argument(
        "--bench", type=at_least_one, metavar="SEEDS", help="time the shipped rule instead of fitting one"
    )
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/")
    options = parser.parse_args()
    model, _, prompts = nano()
    if options.bench:
        fixed = json.loads(RULE.read_text(encoding="utf-8"))["fit"]["best_fixed_depth"]
        report = bench(model, default_rule(), fixed, prompts(18, HELD_OUT), options.bench)
    else:
        rule, report = fit_and_report(model, prompts, options.prompts)
        if options.out:
            data = {"features": FEATURES, "coefficients": rule.coefficients, "threshold": rule.threshold, "fit": report}
            options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    if options.log:
        append_row("depth", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
