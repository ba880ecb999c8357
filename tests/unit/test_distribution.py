"""Sampled tokens of whole requests follow the exact filtered distribution, and broken rules do not."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cuq1.reference import engine as engine_module
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import DecodeParams, Distribution, accept, draw, filtered, residual, uniform
from cuq1.sampling import speculative as rules
from cuq1.sampling.rng import Purpose
from cuq1.sampling.speculative import Verdict
from tools.check_distribution import FALSE_ALARM, chi_square, p_values
from tools.make_checkpoint import tiny_config, write_checkpoint

IDS = [1, 2, 3, 4, 5]
PARAMS = DecodeParams(temperature=1.0, top_k=20, top_p=0.95, draft=1)
ROUNDS = 20_000


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Small enough for tens of thousands of requests; random weights, so draft and target disagree widely."""
    raw = tiny_config(
        num_hidden_layers=2,
        num_hybrid_layers_block=1,
        last_layers_types=[],
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        vocab_size=32,
    )
    folder = write_checkpoint(tmp_path_factory.mktemp("distribution") / "model", *raw, seed=3)
    with ReferenceEngine(folder) as opened:
        yield opened


def test_first_two_tokens_follow_the_exact_distribution(engine):
    found = p_values(engine, IDS, replace(PARAMS, draft="auto"), range(ROUNDS))
    assert min(found.values()) > FALSE_ALARM, found


def test_the_bonus_token_follows_too(engine):
    """With one draft the third token is the bonus, or the next round's first: both must fit."""
    found = p_values(engine, IDS, PARAMS, range(ROUNDS), length=3)
    assert min(found.values()) > FALSE_ALARM, found


def judged_with(accepts, rest, bonus_from_q=False):
    """`verify` with other rules in its place."""

    def verify(drafts, q, p, seed, position):
        for i, token in enumerate(drafts):
            if not accepts(token, p[i], q[i], uniform(seed, position + i, Purpose.ACCEPT)):
                other = rest(p[i], q[i])
                return Verdict(i, draw_raw(other, uniform(seed, position + i, Purpose.TARGET)))
        last = q[-1] if bonus_from_q and q else p[len(drafts)]
        return Verdict(len(drafts), draw(last, uniform(seed, position + len(drafts), Purpose.TARGET)))

    return verify


def draw_raw(distribution, u):
    """Inverse of the cumulative sum as it stands, without its total: what an unnormalised residual meets."""
    index = int(np.searchsorted(np.cumsum(distribution.probs), u, side="right"))
    return int(distribution.ids[min(index, len(distribution.ids) - 1)])


def unnormalised(p, q):
    q_of = dict(zip(q.ids.tolist(), q.probs.tolist(), strict=True))
    rest = np.maximum(p.probs - [q_of.get(token, 0.0) for token in p.ids.tolist()], 0.0)
    return Distribution(p.ids, rest)


BROKEN = {
    "accept with probability p": (judged_with(lambda d, p, q, u: u < p.prob(d), residual), 2),
    "residual not renormalised": (judged_with(accept, unnormalised), 2),
    "bonus drawn from q": (judged_with(accept, residual, bonus_from_q=True), 3),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_rejected(engine, monkeypatch, name):
    verify, length = BROKEN[name]
    monkeypatch.setattr(engine_module, "verify", verify)
    assert min(p_values(engine, IDS, PARAMS, range(ROUNDS // 4), length=length).values()) < FALSE_ALARM


def test_q_of_another_filter_is_rejected(engine, monkeypatch):
    """Drafts drawn from one distribution, judged by another: the fault that biases silently."""
    verify = engine_module.verify

    def misjudged(drafts, q, p, seed, position):
        fewer = [Distribution(each.ids[:5], each.probs[:5] / each.probs[:5].sum()) for each in q]
        return verify(drafts, fewer, p, seed, position)

    monkeypatch.setattr(engine_module, "verify", misjudged)
    assert min(p_values(engine, IDS, PARAMS, range(ROUNDS // 4)).values()) < FALSE_ALARM


def test_the_harness_itself_is_fair(engine, monkeypatch):
    """The stand-in for `verify` passes with the right rules, so the controls fail for their rules alone."""
    monkeypatch.setattr(engine_module, "verify", judged_with(accept, residual))
    assert min(p_values(engine, IDS, PARAMS, range(ROUNDS // 4)).values()) > FALSE_ALARM


def test_chi_square_false_alarms_are_rare_and_faults_are_seen():
    rng = np.random.default_rng()
    p = filtered(rng.standard_normal(64).astype(np.float32), 1.0, 20, 0.95)
    expected = dict(zip(p.ids.tolist(), p.probs.tolist(), strict=True))
    values = []
    for seed in range(200):
        tokens = (rules.draw(p, uniform(seed, i, Purpose.TARGET)) for i in range(2_000))
        values.append(chi_square(Counter(tokens), expected))
    assert min(values) > 1e-5
    assert 0.3 < float(np.mean(values)) < 0.7
    assert chi_square(Counter({10_000: 1}), expected) == 0.0
