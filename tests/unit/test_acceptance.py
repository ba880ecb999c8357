"""Acceptance by depth, and the judgement of another engine's drafts."""

import numpy as np
import pytest

from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import DecodeParams
from cuq1.sampling.filter import Distribution
from tests.paths import NANO
from tools.acceptance import Judged, judge, rates, variation, variations
from tools.bench import nano

PARAMS = DecodeParams(temperature=1.0, top_k=20, top_p=0.95, seed=5, draft=7, max_tokens=40)


class Recorder(ReferenceEngine):
    """Keeps what it drafted."""

    def _drafts(self, params, seed):
        drafts, q = super()._drafts(params, seed)
        self.seen = self.tokens, tuple(drafts), tuple(q)
        return drafts, q


@pytest.fixture(scope="module")
def rounds():
    found = []
    with Recorder(NANO) as engine:
        for ids in nano()[2](3, 11):
            engine.prefill(ids)
            found += [Judged(*engine.seen, step.accepted) for step in engine.decode(PARAMS) if not step.from_prompt]
    return found


def test_the_reference_judges_its_own_drafts_as_it_did(rounds):
    with ReferenceEngine(NANO) as engine:
        again = [judge(engine, one.tokens, one.drafts, PARAMS) for one in rounds]
    assert [one.accepted for one in again] == [one.accepted for one in rounds]
    assert (variations(rounds, again) == 0).all()


def test_a_draft_with_other_weights_is_noticed(rounds):
    with ReferenceEngine(NANO) as engine:
        engine._draft.weights.hnorm[:] *= 0.5
        again = [judge(engine, one.tokens, one.drafts, PARAMS) for one in rounds]
    assert (variations(rounds, again).mean(axis=0) > 0.02).all()
    assert [one.accepted for one in again] != [one.accepted for one in rounds]


def test_total_variation():
    one = Distribution(np.array([3, 5]), np.array([0.75, 0.25]))
    other = Distribution(np.array([5, 7]), np.array([0.5, 0.5]))
    assert variation(one, other) == 0.75
    assert variation(one, one) == 0.0


def test_rates_by_hand():
    found, error = rates([[0, 2], [7], []])
    assert found.tolist() == pytest.approx([2 / 3, 2 / 3, *[1 / 3] * 5])
    assert error[0] == pytest.approx(np.sqrt(2 * ((1 - 4 / 3) ** 2 + (1 - 2 / 3) ** 2)) / 3)


def test_the_error_grows_where_rounds_of_a_request_are_alike():
    rng = np.random.default_rng(1)
    mixed = [rng.integers(0, 8, 30).tolist() for _ in range(100)]
    alike = [[int(rng.integers(0, 8))] * 30 for _ in range(100)]
    assert (rates(alike)[1][1:6] > 3 * rates(mixed)[1][1:6]).all()
