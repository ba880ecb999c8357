"""Hold the engine's sampled tokens against the exact filtered distribution.

    python tools/check_distribution.py [--model DIR] [--rounds 20000] [--draft auto] [--prompt TEXT]

Each of the rounds is a request of its own seed after the same prompt. The first
two tokens (the prompt's own, and the first that a draft proposed) are counted
as pairs and compared by chi-square with probabilities computed here from the
engine's scores, in float64 and token by token, without the sampler's code. The
false alarm rate is that of a p-value below 1e-7.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy import stats

if not __package__:  # run as a script, whose folder is on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuq1.cli import Parser, guarded
from cuq1.engine import Engine, open_engine
from cuq1.sampling import DecodeParams, Mask
from cuq1.text import Tokenizer
from tools.bench import NANO, append_row, at_least_one

FALSE_ALARM = 1e-7
LEAST_EXPECTED = 10.0  # cells below it are pooled, as the chi-square approximation needs


def exact(logits: Sequence[float], params: DecodeParams) -> dict[int, float]:
    """The filtered distribution of one row of logits: temperature, then top-k, then top-p on the rest."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: params.top_k or None]
    weights = [math.exp((logits[i] - logits[ranked[0]]) / params.temperature) for i in ranked]
    total, mass, kept = sum(weights), 0.0, {}
    for token, weight in zip(ranked, weights, strict=True):
        if mass >= params.top_p * total:
            break
        kept[token] = weight
        mass += weight
    return {token: weight / mass for token, weight in kept.items()}


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """The p-value of counts under expected probabilities; 0.0 where something impossible was seen."""
    total = sum(counts.values())
    if any(key not in expected for key in counts):
        return 0.0
    observed, means, pooled, pooled_mean = [], [], 0, 0.0
    for key, probability in expected.items():
        if probability * total < LEAST_EXPECTED:
            pooled += counts[key]
            pooled_mean += probability * total
        else:
            observed.append(counts[key])
            means.append(probability * total)
    if pooled_mean > 0:
        observed.append(pooled)
        means.append(pooled_mean)
    statistic = sum((o - m) ** 2 / m for o, m in zip(observed, means, strict=True))
    return float(stats.chi2.sf(statistic, max(1, len(observed) - 1)))


def p_values(
    engine: Engine,
    ids: Sequence[int],
    params: DecodeParams,
    seeds: Iterable[int],
    length: int = 2,
    mask: Callable[[], Mask] | None = None,
) -> dict[str, float]:
    """p-values of the first token, of the first `length` together and of the last of those, over one request a seed.

    mask: makes each request's.
    """
    firsts: Counter[int] = Counter()
    tuples: Counter[tuple[int, ...]] = Counter()
    engine.prefill(ids)
    for seed in seeds:
        engine.rewind(len(ids))
        request = replace(params, seed=seed, max_tokens=length, stop_tokens=())
        tokens = tuple(token for step in engine.decode(request, mask=mask and mask()) for token in step)
        firsts[tokens[0]] += 1
        tuples[tokens] += 1
    first = exact(_next_logits(engine, ids, (), mask), params)
    expected: dict[tuple[int, ...], float] = {(token,): p for token, p in first.items()}
    for _ in range(length - 1):
        expected = {
            (*before, token): p * q
            for before, p in expected.items()
            for token, q in exact(_next_logits(engine, ids, before, mask), params).items()
        }
    last: dict[int, float] = {}
    for key, probability in expected.items():
        last[key[-1]] = last.get(key[-1], 0.0) + probability
    lasts: Counter[int] = Counter()
    for key, count in tuples.items():
        lasts[key[-1]] += count
    return {
        "token 1": chi_square(firsts, first),
        f"tokens 1 to {length}": chi_square(tuples, expected),
        f"token {length}": chi_square(lasts, last),
    }


def _next_logits(
    engine: Engine, ids: Sequence[int], before: Sequence[int], mask: Callable[[], Mask] | None
) -> list[float]:
    """Logits after `ids` and then `before`, the answer so far; -inf where the mask allows no token."""
    logits: list[float] = engine.score([*ids, *before])[-1].tolist()
    if mask is None:
        return logits
    walk = mask()
    for token in before:
        walk.push(token)
    allowed = walk.allowed()
    return logits if allowed is None else [x if a else -math.inf for x, a in zip(logits, allowed, strict=True)]


def main() -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_distribution", _main)


def _main() -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--rounds", type=at_least_one, default=20_000)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompt", default="def parse_", help="raw prompt after which the model has a choice")
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/")
    options = parser.parse_args()
    draft = int(options.draft) if options.draft.isdecimal() else options.draft
    with open_engine(options.model) as engine:
        ids = Tokenizer.load(options.model, engine.vocab_size).encode(options.prompt, control=True)
        params = DecodeParams(temperature=1.0, top_k=20, top_p=0.95, draft=draft)
        found = p_values(engine, ids, params, range(options.rounds))
    passed = min(found.values()) > FALSE_ALARM
    report = {"rounds": options.rounds, "draft": options.draft, "p_values": found, "passed": passed}
    print(json.dumps(report))
    if options.log:
        append_row("distribution", report)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
