"""Rounds of seven drafts from every position of texts that nano wrote: what the draft-depth rule is fitted on.

Rejection sampling makes the committed text independent of how many drafts its rounds make. So a text that was sampled
once serves for every policy, and what is left to chance are the drafts, given the text. Where the text has token x
next, drawn from p, and the draft proposes from q, then by the rule of `cuq1.sampling.verify`

    P(draft accepted | x) = min(1, q(x) / p(x)), and the draft is then x itself;
    a rejected draft is distributed as normalize(max(0, q - p)), whatever x is,

since the draft is x and accepted with probability min(p(x), q(x)), and x comes out with p(x). After a rejected draft
others follow, which count for their cost and for what the rule sees of them. A draft's state depends on the committed
text alone: each round overwrites what the one before drafted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.reference.engine import ReferenceEngine
from cuq1.reference.mtp import DraftForward
from cuq1.reference.q1 import TargetForward
from cuq1.sampling import MAX_DRAFTS, DecodeParams, Distribution, draw, filtered, residual
from cuq1.sampling.depth import FEATURE_TOP_K, UNSURE
from cuq1.sequence import PREFILL_CHUNK

F64 = NDArray[np.float64]


def params(seed: int, *, greedy: bool, **more: Any) -> DecodeParams:
    return DecodeParams(
        temperature=0.0 if greedy else 1.0, top_k=20, top_p=0.95, seed=seed, max_tokens=200, stop_tokens=(0,), **more
    )


@dataclass(frozen=True)
class Text:
    """A text after its prompt and first token; arrays have a row for each position where a round can begin.

    accepted: int64 [positions], drafts that would stand; served, entropies: float64 [positions, MAX_DRAFTS], what the
    rule sees of the drafts.
    """

    greedy: bool
    accepted: NDArray[np.int64]
    served: F64
    entropies: F64


class Rounds:
    """Texts side by side: arrays [texts, width, ...], of which row t has `lengths[t]` positions."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self.greedy = np.array([text.greedy for text in texts])
        self.lengths = np.array([len(text.accepted) for text in texts])
        self.width = int(self.lengths.max())
        shape = (len(texts), self.width)
        self.accepted = np.zeros(shape, np.int64)
        self.served, self.entropies = np.ones((*shape, MAX_DRAFTS)), np.zeros((*shape, MAX_DRAFTS))
        for t, text in enumerate(texts):
            rows = slice(len(text.accepted))
            self.accepted[t, rows], self.served[t, rows], self.entropies[t, rows] = (
                text.accepted,
                text.served,
                text.entropies,
            )
        self._seen: dict[int, F64] = {}

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        """Where a round can begin."""
        return np.arange(self.width) < self.lengths[:, None]

    @cached_property
    def whole(self) -> NDArray[np.bool_]:
        """Where the text goes on for as many tokens as a round can draft."""
        return np.arange(self.width) + MAX_DRAFTS <= self.lengths[:, None]

    def features(self, drafts: int) -> F64:
        """cuq1.sampling.depth.features of each round's first drafts, float64 [texts, width, features]."""
        if drafts not in self._seen:
            logs = np.log(np.maximum(self.served[..., :drafts], UNSURE))
            entropies = self.entropies[..., :drafts]
            columns = (
                np.ones(self.accepted.shape),
                logs.sum(-1),
                logs[..., -1],
                logs.min(-1),
                entropies[..., -1],
                entropies.mean(-1),
            )
            self._seen[drafts] = np.stack(columns, -1)
        return self._seen[drafts]


def collect(model: Path, prompts: Sequence[Sequence[int]], seed: int, texts: int) -> list[Text]:
    """Texts of each prompt, `texts` where it is sampled and one, of every fourth, where it is greedy."""
    found = []
    with ReferenceEngine(model) as engine:
        for i, ids in enumerate(prompts):
            greedy = i % 4 == 0
            for number in range(1 if greedy else texts):
                asked = params(seed + len(prompts) * number + i, greedy=greedy, draft=5)
                engine.rewind(0)
                engine.prefill(ids)
                for _ in engine.decode(asked):
                    pass
                rng = np.random.default_rng((seed, i, number))
                if len(engine.tokens) > len(ids) + 1:
                    found.append(rounds_of(engine, engine.tokens, len(ids), asked, rng))
    return found


def rounds_of(
    engine: ReferenceEngine, tokens: Sequence[int], prompt: int, asked: DecodeParams, rng: np.random.Generator
) -> Text:
    """A round from every position of a text whose first `prompt` tokens were given."""
    with engine._computing():
        rows = list(_rounds(engine, np.asarray(tokens, np.int64), prompt, asked, rng))
    accepted, served, entropies = zip(*rows, strict=True)
    return Text(asked.temperature == 0, np.array(accepted), np.array(served), np.array(entropies))


def _rounds(
    engine: ReferenceEngine, tokens: NDArray[np.int64], prompt: int, asked: DecodeParams, rng: np.random.Generator
) -> Iterator[tuple[int, list[float], list[float]]]:
    assert engine._draft_weights is not None
    assert engine._draft_config is not None
    target = TargetForward(engine._target_weights, engine.config, len(tokens))
    draft = DraftForward(engine._draft_weights, engine._draft_config)
    chunks = range(0, len(tokens), PREFILL_CHUNK)
    hidden = np.concatenate([target.forward(tokens[at : at + PREFILL_CHUNK], at) for at in chunks])
    following = [  # of the token at position prompt + i
        filtered(row, asked.temperature, asked.top_k, asked.top_p) for row in target.logits(hidden[prompt - 1 :])
    ]
    settled = max(0, prompt - 1 - draft.slots)
    for pending in range(prompt, len(tokens) - 1):
        if settled < pending - 1:
            draft.settle(tokens[settled + 1 : pending], hidden[settled : pending - 1], settled)
            settled = pending - 1
        yield _round(
            draft, tokens, hidden[pending - 1 : pending], pending, following[pending + 1 - prompt :], asked, rng
        )


def _round(
    draft: DraftForward,
    tokens: NDArray[np.int64],
    state: NDArray[np.float32],
    pending: int,
    target: Sequence[Distribution],
    asked: DecodeParams,
    rng: np.random.Generator,
) -> tuple[int, list[float], list[float]]:
    """How many drafts after the pending token stand, and what the rule sees of them. target[i]: of draft i's place."""
    token, accepted, standing = int(tokens[pending]), 0, True
    served, entropies = [], []
    for depth in range(MAX_DRAFTS):
        state, logits = draft.forward(np.asarray([token], np.int64), state, pending - 1 + depth)
        q = filtered(logits[0], asked.temperature, asked.top_k, asked.top_p)
        place = pending + 1 + depth
        standing = standing and place < len(tokens)
        if standing and stands(int(tokens[place]), target[depth], q, rng.random()):
            token, accepted = int(tokens[place]), accepted + 1
        else:
            token = draw(residual(q, target[depth]) if standing else q, rng.random())
            standing = False
        shape = q if asked.temperature > 0 else filtered(logits[0], 1.0, FEATURE_TOP_K, 1.0)
        served.append(shape.prob(token))
        entropies.append(shape.entropy())
    return accepted, served, entropies


def stands(token: int, p: Distribution, q: Distribution, u: float) -> bool:
    """Whether a draft from q is the text's `token`, which was drawn from p and stands."""
    return u * p.prob(token) < q.prob(token)
