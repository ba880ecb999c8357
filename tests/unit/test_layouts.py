"""One random checkpoint in every layout, and as ranks' shares, computes the same logits."""

import numpy as np
import pytest

from cuq1 import DecodeParams, open_engine
from tests.fixtures.float64 import Evaluator, relative
from tools.make_checkpoint import Layout, tiny_config, write_checkpoint

LAYOUTS = {
    "per-expert FP8": (Layout(), 1),
    "per-expert FP8 in shards": (Layout(), 3),
    "fused FP8": (Layout(fused_experts=True), 1),
    "fused FP8 in shards, BF16 scales": (Layout(fused_experts=True, scale_dtype="BF16"), 2),
    "BF16": (Layout(fp8=False), 1),
    "fused BF16 in shards": (Layout(fused_experts=True, fp8=False), 4),
    "other names": (Layout(router_name="gate", sink_leading_one=True, training_draft=True), 1),
}
# Two KV heads for eight ranks, and expert and dense shares of 192 rows at eight ranks, 1.5 scale blocks.
WIDE = tiny_config(intermediate_size=1536, dense_intermediate_size=1536, num_experts=4, hidden_size=128)
IDS = np.random.default_rng(0).integers(0, 96, 70).tolist()


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    return {
        name: write_checkpoint(root / name.replace(" ", "-"), *WIDE, layout, seed=9, shards=shards)
        for name, (layout, shards) in LAYOUTS.items()
    }


def computed(folder, tp=1):
    """Target logits, and tokens that also depend on the draft's weights."""
    with open_engine(folder, tp=tp) as engine:
        scores = engine.score(IDS)
        engine.prefill(IDS)
        steps = list(engine.decode(DecodeParams(seed=1, draft=4, max_tokens=40)))
    return scores, [(step.tokens, step.accepted) for step in steps]


@pytest.fixture(scope="module")
def whole(copies):
    return computed(copies["per-expert FP8"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_bits(copies, whole, name):
    scores, steps = computed(copies[name])
    assert np.array_equal(scores, whole[0])
    assert steps == whole[1]


def test_the_layout_comparison_notices_other_values(tmp_path, whole):
    other = write_checkpoint(tmp_path / "other", *WIDE, Layout(), seed=10)
    assert relative(computed(other)[0], whole[0]) > 0.1


def test_the_common_logits_are_right(copies, whole):
    """Against an evaluation that reads the file itself, so that the layouts do not agree on a mistake."""
    for name in ("per-expert FP8", "BF16"):
        assert relative(whole[0], Evaluator(copies[name]).logits(IDS)) < 1e-5


@pytest.mark.parametrize("name", ["per-expert FP8", "fused FP8", "BF16"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_shares_add_up(copies, whole, name, tp):
    scores, _ = computed(copies[name], tp)
    assert relative(scores, whole[0]) < 1e-5


def test_shares_of_64_rows_add_up(tmp_path):
    """Half a scale block a rank."""
    folder = write_checkpoint(tmp_path / "model", *tiny_config(intermediate_size=512), seed=2)
    whole, _ = computed(folder)
    scores, _ = computed(folder, tp=8)
    assert relative(scores, whole) < 1e-5
