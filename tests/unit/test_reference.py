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
    assert relative(scores[golden[f"{name}_positions"]], golden[f"{name}_logits"]) < TOLERANCE
    drafts = draft_logits(engine, ids)
    assert relative(drafts[golden[f"{name}_draft_positions"]], golden[f"{name}_draft_logits"]) < TOLERANCE


def random_prompt(length):
    rng = np.random.default_rng()
    return rng.integers(0, 4096, length).tolist()


@pytest.mark.parametrize("length", [1, 2, 65, 257, 600])
def test_score_matches_float64(engine, length):
    """Random tokens, beyond the draft's window of 64 and the target's of 256."""
    ids = random_prompt(length)
    assert relative(engine.score(ids), Evaluator(NANO).logits(ids)) < TOLERANCE
    if length > 1:
        assert relative(draft_logits(engine, ids), Evaluator(NANO).draft_logits(ids)) < TOLERANCE


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


def test_ranks_shares_add_up(golden):
    """Two ranks hold half a scale block of each expert; four also share the KV heads."""
    ids = golden["code_ids"][:300]
    with open_engine(NANO) as one:
        whole = one.score(ids)
    for tp in (2, 4):
        with open_engine(NANO, tp=tp) as split:
            assert relative(split.score(ids), whole) < TOLERANCE


def test_golden_prompts_are_the_golden_ids(golden):
    prompts = json.loads((NANO / "golden_prompts.json").read_text())
    assert set(prompts) == {"code", "chat", "run"}
    assert all(len(golden[f"{name}_ids"]) for name in prompts)
