"""How often two engines that sample with the same seeds part by rounding."""

from types import SimpleNamespace

import numpy as np
import pytest

from cuq1.cuda import abi
from cuq1.sampling import DecodeParams, DecodeStream, Round
from cuq1.sampling.depth import default_rule
from cuq1.sampling.filter import filtered
from cuq1.sampling.rng import Purpose, uniform
from cuq1.sampling.speculative import accept, draw, residual, verify
from tools.seeded import Draft, Request, compare, differing, verdicts

U = (np.arange(20_000) + 0.5) / 20_000
PARAMS = type("Params", (), {"temperature": 1.0, "top_k": 12, "top_p": 0.95})


def pairs(seed, error):
    """Two rows of logits that differ by an error."""
    rng = np.random.default_rng(seed)
    row = rng.normal(size=40).astype(np.float32) * 2
    return row, row + rng.normal(size=40).astype(np.float32) * np.float32(error)


def rows(seed, error):
    return [filtered(row, 1.0, 12, 0.95) for row in pairs(seed, error)]


@pytest.mark.parametrize("error", [0.0, 1e-3, 0.05, 3.0])
def test_the_share_of_numbers_that_draw_other_tokens(error):
    for seed in range(6):
        one, other = rows(seed, error)
        counted = np.mean([draw(one, u) != draw(other, u) for u in U])
        assert differing(one, other) == pytest.approx(counted, abs=2e-3)
    assert (differing(*rows(0, error)) == 0) == (error == 0)


def test_two_tokens_that_change_places_move_far():
    one, other = (filtered(np.log(np.float32(p)), 1.0, 3, 1.0) for p in ([0.4, 0.399, 0.201], [0.399, 0.4, 0.201]))
    assert differing(one, other) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("rejected", [False, True])
def test_the_target_s_decisions_about_a_draft(rejected):
    """Against counting, with independent numbers for acceptance and for the replacement."""
    logits = pairs(3, 0.05)
    p = [filtered(row, 1.0, 12, 0.95) for row in logits]
    q = [filtered(row * np.float32(1.3), 1.0, 12, 0.95) for row in pairs(3, 0.07)]
    token = next(t for t in q[0].ids.tolist() if 0.1 < p[0].prob(t) / q[0].prob(t) < 0.9)
    found = Request([1, 2, token + 1 if rejected else token], {2: Draft(token, tuple(q))})
    accepts = np.mean([accept(token, p[0], q[0], u) != accept(token, p[1], q[1], u) for u in U])
    draws = np.mean([draw(residual(p[0], q[0]), u) != draw(residual(p[1], q[1]), u) for u in U])
    chance = verdicts(found, [1, 2], (logits[0][None], logits[1][None]), PARAMS)
    assert chance == pytest.approx(accepts + draws * rejected, abs=3e-3)


def test_without_a_draft_it_is_a_draw():
    logits = pairs(5, 0.05)
    found = Request([1, 2, 3])
    chance = verdicts(found, [1, 2], (logits[0][None], logits[1][None]), PARAMS)
    assert chance == differing(*(filtered(row, 1.0, 12, 0.95) for row in logits))


class Synthetic:
    """An engine with a random distribution after each two tokens, which its own rounding moves a little."""

    def __init__(self, name, error, fault=False):
        self.name, self.error, self.fault = name, error, fault
        self.state = abi.State()
        self._runtime = SimpleNamespace(state=self.state, _rule=default_rule())

    def logits(self, kind, before):
        exact = np.random.default_rng([kind, *before[-2:]]).normal(size=30) * 2
        other = np.random.default_rng([7, *before[-2:]]).normal(size=30)
        rounding = np.random.default_rng([self.name, kind, *before[-2:]]).normal(size=30)
        return (exact + (other if kind == 2 else 0) + self.error * rounding).astype(np.float32)

    def distribution(self, kind, before):
        return filtered(self.logits(1, before) + (kind == 2) * self.logits(2, before) / 4, 1.0, 12, 0.95)

    def rewind(self, length):
        self.whole = []

    def prefill(self, ids):
        self.whole = list(ids)

    def decode(self, params):
        return DecodeStream(params.seed, self._rounds(params))

    def _rounds(self, params):
        budget, drafts, q = params.max_tokens, [], []
        while budget > 0:
            start = len(self.whole)
            p = [self.distribution(1, self.whole + drafts[:i]) for i in range(len(drafts) + 1)]
            accepted, token = verify(drafts, q, p, params.seed + self.fault, start)
            tokens = tuple([*drafts[:accepted], token][:budget])
            budget -= len(tokens)
            self.whole += tokens
            drafts, q = [], []
            for depth in range(4):
                q.append(self.distribution(2, self.whole + drafts))
                drafts.append(draw(q[-1], uniform(params.seed, len(self.whole) + depth, Purpose.DRAFT)))
                self.state.q_count[depth] = len(q[-1].ids)
                for i, (token, probability) in enumerate(zip(q[-1].ids, q[-1].probs, strict=True)):
                    self.state.q_ids[depth][i], self.state.q_probs[depth][i] = int(token), float(probability)
                self.state.tokens[1 + depth] = drafts[-1]
            self.state.drafts = 4
            yield Round(tokens, len(drafts), accepted)
        return "length"

    def rows(self, ids, whole):
        return np.stack([self.logits(1, whole[:at]) for at in range(len(ids), len(whole))])


def compared(error, fault=False, requests=60):
    one, several = Synthetic(1, error), Synthetic(2, error, fault)
    asked = [
        ([number % 30, 3], DecodeParams(temperature=1.0, top_k=12, top_p=0.95, seed=number, max_tokens=40))
        for number in range(requests)
    ]
    sequences = []
    for ids, params in asked:
        several.prefill(ids)
        list(several.decode(params))
        sequences.append(list(several.whole))
    return compare(one, several, asked, sequences, lambda engine, ids, whole: engine.rows(ids, whole))


def test_partings_are_as_many_as_the_distributions_make():
    for error in (0.002, 0.02):
        found = compared(error)
        assert found["failed"] == 0
        assert len(found["parted"]) > 0
        assert abs(len(found["parted"]) - found["expected"]) < 4 * found["expected"] ** 0.5 + 2, found
    assert compared(0.0, requests=10)["parted"] == []


def test_an_engine_that_draws_from_other_numbers_is_found_out():
    """The control."""
    assert compared(0.002, fault=True, requests=20)["failed"] > 0
