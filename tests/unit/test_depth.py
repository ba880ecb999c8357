"""The stop rule, the data that it is fitted on, and the fit, against enumeration, plain loops and known answers."""

import json
from dataclasses import replace

import numpy as np
import pytest

from cuq1.config import load_config
from cuq1.cuda import abi
from cuq1.cuda.weights import weights_plan
from cuq1.errors import ConfigError
from cuq1.models.loop import draft_threshold
from cuq1.models.q1 import resolve
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import MAX_DRAFTS, MIN_AUTO_DRAFTS, Distribution, accept, residual
from cuq1.sampling.depth import DECISIONS, FEATURES, UNSURE, DepthRule, default_rule, features, parse_rule
from tests.paths import NANO, ROOT
from tools import depth_rounds, fit_depth, loop_drafting

SOURCE = (ROOT / "cuq1" / "sampling" / "depth_rule.json").read_text(encoding="utf-8")


def test_sizes_of_host_and_device():
    assert (MIN_AUTO_DRAFTS, MAX_DRAFTS, len(FEATURES)) == (abi.MIN_AUTO_DRAFTS, abi.MAX_DRAFTS, abi.FEATURES)


def test_features_of_three_drafts():
    served, entropies = [0.5, 1e-12, 0.8], [0.1, 2.0, 0.3]
    assert features(served, entropies) == pytest.approx(
        (1, np.log(0.5) + np.log(UNSURE) + np.log(0.8), np.log(0.8), np.log(UNSURE), 0.3, 0.8)
    )


def test_the_rule_decides_from_the_third_draft_on():
    never = DepthRule(((-50.0, *(0.0,) * 5),) * DECISIONS, 0.5)
    always = DepthRule(((50.0, *(0.0,) * 5),) * DECISIONS, 0.5)
    for made in range(1, MAX_DRAFTS + 1):
        seen = [0.9] * made, [0.1] * made
        assert always.more(*seen, greedy=False) == (made < MAX_DRAFTS)
        assert never.more(*seen, greedy=False) == (made < MIN_AUTO_DRAFTS)


def test_a_greedy_request_has_a_bias_of_its_own():
    rule = DepthRule(((-1.0, 0.2, 0.3, 0.4, 0.5, 0.6),) * DECISIONS, 0.5, (2.0, *(0.0,) * (DECISIONS - 1)))
    assert rule.weights(0, greedy=True) == (1.0, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert rule.weights(0, greedy=False) == rule.weights(1, greedy=True) == rule.coefficients[0]
    seen = [1.0] * MIN_AUTO_DRAFTS, [0.0] * MIN_AUTO_DRAFTS
    assert rule.probability(*seen, greedy=True) == pytest.approx(1 / (1 + np.exp(-1)))
    assert rule.more(*seen, greedy=True)
    assert not rule.more(*seen, greedy=False)


def test_the_shipped_rule_is_read_whole():
    rule, raw = default_rule(), json.loads(SOURCE)
    assert [list(row) for row in rule.coefficients] == raw["coefficients"]
    assert (list(rule.greedy), rule.threshold, rule.worth) == (raw["greedy"], raw["threshold"], raw["worth"])


@pytest.mark.parametrize(
    "change",
    [
        {"features": FEATURES[:-1]},
        {"coefficients": [[0.0] * 6]},
        {"coefficients": [[0.0] * 5] * DECISIONS},
        {"greedy": [0.0]},
        {"threshold": None},
        {"worth": "much"},
    ],
    ids=str,
)
def test_a_rule_of_another_version_is_refused(change):
    with pytest.raises(ConfigError, match=r"rule\.json does not hold .*: fit it with tools/fit_depth\.py"):
        parse_rule(json.dumps(json.loads(SOURCE) | change), "rule.json")


def model(name, tp):
    configs = load_config(NANO.parent / name)
    return resolve(*configs, weights_plan(*configs, tp, 0), tp=tp, rank=0, capacity=4096)


def test_thresholds_of_other_models_follow_from_costs():
    nano, released = model("iquest-q1-nano", 1), model("iquest-q1", 8)
    assert draft_threshold(replace(nano, draft=None), 0.33) == 1.0
    for each in (nano, released):
        assert draft_threshold(each, 0.2) == pytest.approx(1.5 * draft_threshold(each, 0.3))
        assert 0.2 < draft_threshold(each, default_rule().worth) < 0.75
        assert draft_threshold(each, 1e-3) == 1.0
    # Where a round is long, a draft is cheap; it would be cheaper still if its row read no experts of its own.
    assert draft_threshold(released, 0.33) < draft_threshold(nano, 0.33)


# The distribution of drafts given the text, against the joint one that the rejection rule makes.
P = Distribution(np.array([3, 0, 1]), np.array([0.5, 0.3, 0.2]))
Q = Distribution(np.array([0, 3, 2]), np.array([0.6, 0.3, 0.1]))
FINE = (np.arange(20_000) + 0.5) / 20_000


def joint():
    """P(text's token, accepted, draft) as `accept` and `residual` make it."""
    found = {}
    for draft, q in zip(Q.ids.tolist(), Q.probs, strict=True):
        share = np.mean([accept(draft, P, Q, u) for u in FINE])
        found[draft, True, draft] = q * share
        rest = residual(P, Q)
        for token, r in zip(rest.ids.tolist(), rest.probs, strict=True):
            found[token, False, draft] = found.get((token, False, draft), 0) + q * (1 - share) * r
    return found


def given_text(stands=depth_rounds.stands, rest=None):
    """The same from the text's token on, as tools/depth_rounds.py draws it."""
    rest = rest or residual(Q, P)
    found = {}
    for token, p in zip(P.ids.tolist(), P.probs, strict=True):
        share = np.mean([stands(token, P, Q, u) for u in FINE])
        found[token, True, token] = p * share
        for draft, r in zip(rest.ids.tolist(), rest.probs, strict=True):
            found[token, False, draft] = p * (1 - share) * r
    return found


def distance(one, two):
    return sum(abs(one.get(key, 0) - two.get(key, 0)) for key in one.keys() | two.keys())


def test_drafts_given_the_text_are_those_of_the_rejection_rule():
    assert distance(joint(), given_text()) < 1e-3


def test_other_ways_to_draw_them_are_noticed():
    assert distance(joint(), given_text(stands=accept)) > 0.05
    assert distance(joint(), given_text(rest=Q)) > 0.05


@pytest.fixture(scope="module")
def engine():
    with ReferenceEngine(NANO) as opened:
        yield opened


def test_rounds_of_a_text_are_those_of_an_engine(engine):
    """A greedy request leaves nothing to chance: each round accepts what it accepts in the engine, from there."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8] * 9  # longer than the draft's window
    asked = depth_rounds.params(1, greedy=True, draft=MAX_DRAFTS)
    engine.rewind(0)
    engine.prefill(ids)
    steps = list(engine.decode(replace(asked, max_tokens=40)))
    text = depth_rounds.rounds_of(engine, engine.tokens, len(ids), asked, np.random.default_rng(1))
    at = 0
    compared = []
    for step in steps[1:]:
        if at + MAX_DRAFTS < len(text.accepted):
            compared.append((step.accepted, int(text.accepted[at])))
        at += len(step)
    assert at == len(text.accepted)
    assert len(compared) > 3
    assert all(one == two for one, two in compared), compared


def some_rounds(seed=0, texts=200):
    """Texts whose drafts stand with probabilities that the first draft tells."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(texts):
        length = int(rng.integers(20, 90))
        chance = rng.choice([0.3, 0.75, 0.97], length)
        stand = rng.random((length, MAX_DRAFTS)) < chance[:, None]
        left = np.arange(length, 0, -1)
        accepted = np.minimum(np.cumprod(stand, axis=1).sum(axis=1), left)
        served = np.repeat(chance[:, None], MAX_DRAFTS, axis=1)
        made.append(depth_rounds.Text(i % 4 == 0, accepted, served, 1 - served))
    return depth_rounds.Rounds(made)


TIMES = np.array([0.0, 12, 14, 16, 18, 20, 22, 24])


def test_features_of_rounds_are_the_rules():
    rounds = some_rounds()
    for drafts in fit_depth.DECIDING:
        found = rounds.features(drafts)
        for t, i in ((0, 0), (3, 11), (7, 5)):
            seen = rounds.served[t, i, :drafts].tolist(), rounds.entropies[t, i, :drafts].tolist()
            assert found[t, i] == pytest.approx(features(*seen), abs=1e-14)


def test_what_a_rule_chooses_in_rounds_is_what_it_says():
    rounds, rule = some_rounds(), replace(default_rule(), threshold=0.45)
    depths = fit_depth.chosen(rule, rounds)
    assert {MIN_AUTO_DRAFTS, MAX_DRAFTS} < set(depths.ravel().tolist())
    for t in range(0, 40, 3):
        for i in range(0, int(rounds.lengths[t]), 7):
            served, entropies = [], []
            while True:
                made = len(served)
                served.append(rounds.served[t, i, made])
                entropies.append(rounds.entropies[t, i, made])
                if not rule.more(served, entropies, greedy=bool(rounds.greedy[t])):
                    break
            assert len(served) == depths[t, i]


def plainly(rounds, depths, times):
    """Time a token, and the number of rounds at each position."""
    spent, begun = 0.0, np.zeros(depths.shape)
    for t, length in enumerate(rounds.lengths):
        at = 0
        while at < length:
            begun[t, at] += 1
            spent += times[depths[t, at]]
            at += min(rounds.accepted[t, at], depths[t, at]) + 1
    return spent / rounds.lengths.sum(), begun


def test_time_per_token_is_that_of_a_plain_walk():
    rounds = some_rounds(texts=30)
    depths = np.random.default_rng(1).integers(1, MAX_DRAFTS + 1, rounds.accepted.shape)
    spent, begun = plainly(rounds, depths, TIMES)
    assert fit_depth.per_token(rounds, depths, TIMES) == pytest.approx(spent)
    assert (fit_depth.visits(rounds, depths) == begun).all()


def test_hindsight_beats_everything():
    rounds = some_rounds(texts=50)
    best = fit_depth.with_hindsight(rounds, TIMES)
    rng = np.random.default_rng(2)
    policies = [rng.integers(1, MAX_DRAFTS + 1, rounds.accepted.shape), np.clip(rounds.accepted, 1, None)]
    policies += [fit_depth.fixed(rounds, depth) for depth in range(1, MAX_DRAFTS + 1)]
    assert all(fit_depth.per_token(rounds, depths, TIMES) > best for depths in policies)


def test_a_fitted_rule_tells_the_cases_apart():
    train, held = some_rounds(seed=3), some_rounds(seed=4)
    rule = fit_depth.fit(train, TIMES)
    depths = fit_depth.chosen(rule, held)
    chance = held.served[..., 0]
    assert (depths[held.valid & (chance == 0.3)] == MIN_AUTO_DRAFTS).all()
    assert (depths[held.valid & (chance == 0.97)] == MAX_DRAFTS).all()
    _, best = fit_depth.best_fixed(held, TIMES)
    assert fit_depth.per_token(held, depths, TIMES) < 0.97 * best
    assert np.abs(rule.greedy).max() < 0.4  # these greedy texts are no different
    # A token is worth less than its part of a round, and a rule with its features mixed up is worth nothing.
    assert 0.1 < rule.worth < 0.5
    shuffled = some_rounds(seed=3)
    shuffled.served[:] = (
        np.random.default_rng(5).permutation(shuffled.served.reshape(-1, MAX_DRAFTS)).reshape(shuffled.served.shape)
    )
    shuffled.entropies[:] = 1 - shuffled.served
    blind = fit_depth.chosen(fit_depth.fit(shuffled, TIMES), held)
    assert fit_depth.per_token(held, blind, TIMES) > 0.99 * best


def test_estimates_are_calibrated_where_the_rule_comes():
    rule = fit_depth.fit(some_rounds(seed=6, texts=400), TIMES)
    for each in fit_depth.calibration(rule, some_rounds(seed=7, texts=400)):
        assert each["estimated"] == pytest.approx(each["committed"], abs=0.08)
    wrong = replace(rule, coefficients=tuple((row[0] + 1, *row[1:]) for row in rule.coefficients))
    each = fit_depth.calibration(wrong, some_rounds(seed=7, texts=400))[0]
    assert each["estimated"] != pytest.approx(each["committed"], abs=0.08)


def test_a_written_rule_is_read_again(tmp_path):
    rule = replace(default_rule(), threshold=0.31)
    text = json.dumps(fit_depth.as_json(rule, {}))
    assert parse_rule(text, "rule.json") == rule


def test_what_is_saved_and_how_surely():
    rng = np.random.default_rng(8)
    theirs = [(float(t), 100) for t in rng.normal(1, 0.02, 400)]
    ours = [(0.97 * t + float(e), 100) for (t, _), e in zip(theirs, rng.normal(0, 0.02, 400), strict=True)]
    gain, error = loop_drafting.saved(ours, theirs)
    assert error == pytest.approx(0.02 / 400**0.5, rel=0.15)
    assert gain == pytest.approx(0.03, abs=3 * error)
    alone, wider = loop_drafting.saved(ours[::4], theirs[::4])
    assert wider == pytest.approx(2 * error, rel=0.3)
    assert alone == pytest.approx(gain, abs=4 * error)
    others = [(float(t), 100) for t in rng.normal(1, 0.02, 400)]
    nothing, error = loop_drafting.saved(others, theirs)
    assert abs(nothing) < 4 * error
