"""Acceptance by depth: of rounds that the GPU ran, and of the same drafts when the reference judges them.

Two engines that sample go different ways after the first token that differs, so that their rates differ by chance: by
about a point over 2,000 rounds. So the reference judges the very drafts that the GPU made, after the same tokens and
with the same random numbers, by its own distributions of both the draft and the target.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda.engine import CudaEngine
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import MAX_DRAFTS, DecodeParams
from cuq1.sampling.filter import Distribution

F64 = NDArray[np.float64]


class Judged(NamedTuple):
    """A round: the tokens before it, the pending one last; its drafts, what they were drawn from, how many stood."""

    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    shapes: tuple[Distribution, ...]
    accepted: int


def rounds_of(engine: CudaEngine, ids: Sequence[int], params: DecodeParams) -> list[Judged]:
    """Rounds of a request, whose loop the host steps: that of the device does not say what was rejected."""
    engine.prefill(ids)
    found: list[Judged] = []
    before: tuple[tuple[int, ...], tuple[int, ...], tuple[Distribution, ...]] | None = None
    for step in engine.decode(params):
        if before is not None:
            found.append(Judged(*before, step.accepted))
        state = engine._runtime.state
        counts = state.q_count[: state.drafts]
        shapes = tuple(
            Distribution(np.array(state.q_ids[i][:n], np.int64), np.array(state.q_probs[i][:n]))
            for i, n in enumerate(counts)
        )
        before = engine.tokens, tuple(state.tokens[1 : state.drafts + 1]), shapes
    return found


def judge(reference: ReferenceEngine, tokens: Sequence[int], drafts: Sequence[int], params: DecodeParams) -> Judged:
    """The same round by the reference: its own distributions, the rejection rule's own random numbers."""
    assert reference._draft is not None
    assert params.seed is not None
    tokens, pending = tuple(tokens), len(tokens) - 1
    reference.prefill(tokens[:-1])
    reference._commit(tokens[-1:])
    with reference._change():
        reference._settle(reference._draft)
        hidden, token, q = reference._hidden[-1:], tokens[-1], []
        for depth, draft in enumerate(drafts):
            hidden, logits = reference._draft.forward(np.array([token]), hidden, pending - 1 + depth)
            q.append(reference._distribution(logits[0], params))
            token = draft
        *_, verdict = reference._verified(drafts, q, params, params.seed)
    reference.rewind(pending)
    return Judged(tokens, tuple(drafts), tuple(q), verdict.accepted)


def variation(one: Distribution, other: Distribution) -> float:
    """Total variation distance, half the sum of differences."""
    a, b = (dict(zip(d.ids.tolist(), d.probs.tolist(), strict=True)) for d in (one, other))
    return float(sum(abs(a.get(token, 0.0) - b.get(token, 0.0)) for token in a.keys() | b.keys()) / 2)


def variations(ours: Sequence[Judged], theirs: Sequence[Judged]) -> F64:
    """Distances [rounds, depths] between the distributions that both draw drafts from; rounds are of equal length."""
    return np.array(
        [
            [variation(a, b) for a, b in zip(one.shapes, other.shapes, strict=True)]
            for one, other in zip(ours, theirs, strict=True)
        ]
    )


def rates(requests: Sequence[Sequence[int]]) -> tuple[F64, F64]:
    """Shares [MAX_DRAFTS] of all rounds that accept more than 0, 1, … drafts, and their standard errors.

    requests: accepted drafts of each one's rounds. Rounds of one request are alike, so the error is a ratio
    estimator's over clusters: Cochran, Sampling Techniques (1977), equation 6.9.
    """
    held = [np.asarray(counts) for counts in requests if len(counts)]
    sizes = np.array([len(counts) for counts in held], np.float64)
    more = np.array([[np.sum(counts > depth) for depth in range(MAX_DRAFTS)] for counts in held], np.float64)
    found = more.sum(axis=0) / sizes.sum()
    residual = more - found * sizes[:, None]
    n = len(held)
    return found, np.sqrt(n / max(n - 1, 1) * np.square(residual).sum(axis=0)) / sizes.sum()
