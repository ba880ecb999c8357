"""How often two engines that sample with the same seeds part by rounding."""

import numpy as np
import pytest

from cuq1.sampling.filter import filtered
from cuq1.sampling.speculative import accept, draw, residual
from tools.seeded import Draft, Request, differing, verdicts

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
