"""Two engines that sample with the same seeds: where they part, and how often rounding makes them.

Their distributions differ by rounding. A decision goes another way where its number falls between the two engines'
bounds, so its probability to do so is known from the distributions: what share of numbers draws other tokens, or
accepts a draft of one engine and not of the other; and of the stop rule's estimates, how often the threshold lies
between them. Over many requests these add up to the number of partings to expect.
Bounds are in the order of probability, and two tokens that change places there move far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda.engine import CudaEngine
from cuq1.parallel.follow import Leader
from cuq1.sampling import DecodeParams
from cuq1.sampling.filter import Distribution, filtered
from cuq1.sampling.params import MAX_DRAFTS, MIN_AUTO_DRAFTS
from cuq1.sampling.speculative import residual

DENSITY = 2.0  # of the stop rule's estimates about its threshold: they are spread over most of 0 to 1

F32 = NDArray[np.float32]
Report = dict[str, Any]
Rows = Callable[[CudaEngine | Leader, Sequence[int], Sequence[int]], F32]


def differing(one: Distribution, other: Distribution) -> float:
    """The share of numbers in [0, 1) from which the two draw different tokens."""
    bounds = []
    for each in (one, other):
        ends = np.cumsum(each.probs) / each.probs.sum()
        bounds.append(dict(zip(each.ids.tolist(), zip([0.0, *ends[:-1]], ends, strict=True), strict=True)))
    same = sum(
        max(0.0, min(end, bounds[1][token][1]) - max(begin, bounds[1][token][0]))
        for token, (begin, end) in bounds[0].items()
        if token in bounds[1]
    )
    return max(0.0, 1.0 - float(same))


@dataclass
class Draft:
    """A draft that was verified: its token, and what each engine drew it from."""

    token: int
    q: tuple[Distribution, Distribution]


@dataclass
class Request:
    """A request on both engines, up to where they part. drafts: the last ones at each position; chances: of drafts."""

    whole: list[int]
    drafts: dict[int, Draft] = field(default_factory=dict)
    chances: list[float] = field(default_factory=list)
    parted: str = ""


def state_of(engine: CudaEngine | Leader) -> Any:
    """The state that the last round of a host's loop has left."""
    runtime = (engine._engine if isinstance(engine, Leader) else engine)._runtime  # type: ignore[attr-defined]
    return runtime.state, runtime._rule


def _drawn_from(state: Any, depth: int) -> Distribution:
    count = state.q_count[depth]
    return Distribution(np.array(state.q_ids[depth][:count]), np.array(state.q_probs[depth][:count]))


def together(one: CudaEngine, several: Leader, ids: Sequence[int], params: DecodeParams) -> Request:
    """Steps both through a request, a round at a time."""
    engines = (one, several)
    for engine in engines:
        engine.rewind(0)
        engine.prefill(ids)
    streams = [engine.decode(params) for engine in engines]
    found = Request(list(ids))
    try:
        while not found.parted:
            rounds = [next(stream, None) for stream in streams]
            if rounds[0] is None or rounds[1] is None:
                found.parted = "end" if rounds[0] is not rounds[1] else ""
                break
            tokens, others = rounds[0].tokens, rounds[1].tokens
            equal = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), len(tokens))
            found.whole += tokens[: equal + 1]
            if tokens != others:
                found.parted = "verdict"
                break
            _compare_drafts(found, *(state_of(engine) for engine in engines))
    finally:
        for stream in streams:
            stream.close()
    return found


def _compare_drafts(found: Request, one: Any, other: Any) -> None:
    """Takes in the drafts that follow a round."""
    (first, rule), (second, _) = one, other
    for position in [position for position in found.drafts if position >= len(found.whole)]:
        del found.drafts[position]  # it was behind one that was rejected
    made = min(first.drafts, second.drafts)
    for depth in range(made):
        q = _drawn_from(first, depth), _drawn_from(second, depth)
        found.chances.append(differing(*q))
        token, theirs = first.tokens[1 + depth], second.tokens[1 + depth]
        if token != theirs:
            found.parted = "draft"
            return
        found.drafts[len(found.whole) + depth] = Draft(token, q)
    for count in range(MIN_AUTO_DRAFTS, min(made, MAX_DRAFTS - 1) + 1):
        estimates = [
            rule.probability(list(state.served[:count]), list(state.entropy[:count]), greedy=False)
            for state in (first, second)
        ]
        found.chances.append(DENSITY * abs(estimates[0] - estimates[1]))
    if first.drafts != second.drafts:
        found.parted = "rule"


def verdicts(found: Request, ids: Sequence[int], rows: tuple[F32, F32], params: DecodeParams) -> float:
    """Adds up how probable it was that the target's decisions differed. rows: both engines' logits after `ids`."""
    total = 0.0
    for at, (mine, theirs) in enumerate(zip(*rows, strict=True)):
        position = len(ids) + at
        p = [filtered(row, params.temperature, params.top_k, params.top_p) for row in (mine, theirs)]
        draft = found.drafts.get(position)
        if draft is None:
            total += differing(*p)
            continue
        bounds = [min(1.0, a.prob(draft.token) / q.prob(draft.token)) for a, q in zip(p, draft.q, strict=True)]
        total += abs(bounds[0] - bounds[1])
        if found.whole[position] != draft.token:
            total += differing(*(residual(a, q) for a, q in zip(p, draft.q, strict=True)))
    return total


def compare(
    one: CudaEngine, several: Leader, requests: Sequence[tuple[list[int], DecodeParams]], sequences: Any, rows: Rows
) -> Report:
    """All requests on both engines, whose loops are the host's; sequences: what `several` has given for them.

    rows(engine, ids, whole): the logits from which a request with the prompt `ids` chose its tokens.
    """
    parted: list[Report] = []
    expected, unnoticed = 0.0, 0
    for number, ((ids, params), whole) in enumerate(zip(requests, sequences, strict=True)):
        found = together(one, several, ids, params)
        logits = rows(one, ids, found.whole), rows(several, ids, found.whole)
        expected += sum(found.chances) + verdicts(found, ids, logits, params)
        if found.parted:
            parted.append({"prompt": number, "position": len(found.whole), "decision": found.parted})
        elif found.whole != whole:
            unnoticed += 1
        if number < 3:  # the control: another seed must be found different at once
            other = together_with_seeds(one, several, ids, params)
            unnoticed += int(not other.parted)
    allowed = expected + 4 * expected**0.5 + 2
    failed = int(len(parted) > allowed) + unnoticed
    return {"parted": parted, "expected": expected, "allowed": allowed, "failed": failed}


def together_with_seeds(one: CudaEngine, several: Leader, ids: Sequence[int], params: DecodeParams) -> Request:
    """One engine's request with another seed than the other's, compared token by token."""
    found = Request(list(ids))
    texts = []
    for engine, seed in ((one, params.seed), (several, 1000 + (params.seed or 0))):
        engine.rewind(0)
        engine.prefill(ids)
        texts.append([token for step in engine.decode(replace(params, seed=seed)) for token in step])
    found.parted = "seed" if texts[0] != texts[1] else ""
    return found
