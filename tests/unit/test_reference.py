"""The reference model against float64: an evaluator of its own, and logits that came with the checkpoint."""

import json

import numpy as np
import pytest

from cuq1 import open_engine
from cuq1.reference.engine import ReferenceEngine
from tests.fixtures.float64 import Evaluator, relative
from tests.paths import NANO

# FP32 gives about 4e-7; a wrong model is at least ten times outside.
TOLERANCE = 1e-5
# Where two experts' router logits lie closer than this, rounding may choose the other one, and the row differs by
# percents though nothing is wrong. FP32's error in a router logit is about 1e-6.
CLEAR_MARGIN = 3e-5


@pytest.fixture(scope="module")
def engine():
    with ReferenceEngine(NANO) as opened:
        yield opened


@pytest.fixture(scope="module")
def golden():
    return np.load(NANO / "golden.npz")


def draft_logits(engine, ids):
    """The engine's own first-depth drafts over a whole prompt: row t predicts token t + 2."""
    hidden = engine._target.__class__(engine._target_weights, engine.config, len(ids)).forward(np.asarray(ids), 0)
    rows = np.asarray(ids)
    engine.rewind(0)
    return engine._draft.forward(rows[1:], hidden[:-1], 0)[1]


@pytest.mark.parametrize("name", ["code", "chat", "run"])
def test_golden_logits(engine, golden, name):
    ids = golden[f"{name}_ids"]
    scores = engine.score(ids)
    assert scores.dtype == np.float32
    assert scores.shape == (len(ids), engine.config.vocab_size)
    # looser than above: one router margin of the longest prompt is of the order of FP32's rounding
    assert relative(scores[golden[f"{name}_positions"]], golden[f"{name}_logits"]) < 1e-3
    drafts = draft_logits(engine, ids)
    assert relative(drafts[golden[f"{name}_draft_positions"]], golden[f"{name}_draft_logits"]) < 1e-3


def clear_prompt(length, compute):
    """Random tokens whose routing is not a matter of rounding, and compute(evaluator, ids) in float64."""
    rng = np.random.default_rng()
    while True:
        ids = rng.integers(0, 4096, length).tolist()
        evaluator = Evaluator(NANO)
        expected = compute(evaluator, ids)
        if evaluator.margin > CLEAR_MARGIN:
            return ids, expected


@pytest.mark.parametrize("length", [1, 2, 65, 257, 600])
def test_score_matches_float64(engine, length):
    """Random tokens, beyond the draft's window of 64 and the target's of 256."""
    ids, expected = clear_prompt(length, Evaluator.logits)
    assert relative(engine.score(ids), expected) < TOLERANCE
    if length > 1:
        ids, expected = clear_prompt(length, Evaluator.draft_logits)
        assert relative(draft_logits(engine, ids), expected) < TOLERANCE


@pytest.mark.parametrize("fault", ["sink", "window", "residual", "ffn_scale", "experts"])
def test_float64_comparison_notices_a_wrong_target(engine, golden, fault):
    ids = golden["code_ids"]
    assert relative(engine.score(ids), Evaluator(NANO, frozenset([fault])).logits(ids)) > 10 * TOLERANCE


@pytest.mark.parametrize("fault", ["sink", "window", "halves"])
def test_float64_comparison_notices_a_wrong_draft(engine, golden, fault):
    ids = golden["code_ids"]
    broken = Evaluator(NANO, frozenset([fault]))
    broken.hidden = Evaluator(NANO).hidden  # the fault is the draft's alone
    assert relative(draft_logits(engine, ids), broken.draft_logits(ids)) > 10 * TOLERANCE


def test_ranks_shares_add_up():
    """Two ranks hold half a scale block of each expert; four also share the KV heads."""
    ids, _ = clear_prompt(300, Evaluator.logits)
    with open_engine(NANO) as one:
        whole = one.score(ids)
    for tp in (2, 4):
        with open_engine(NANO, tp=tp) as split:
            assert relative(split.score(ids), whole) < TOLERANCE


def test_golden_prompts_are_the_golden_ids(golden):
    prompts = json.loads((NANO / "golden_prompts.json").read_text())
    assert set(prompts) == {"code", "chat", "run"}
    assert all(len(golden[f"{name}_ids"]) for name in prompts)
