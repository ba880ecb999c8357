"""The bytes of a round: the published table, counts by hand, and what a real checkpoint holds."""

import dataclasses

import pytest

from cuq1.checkpoint import Checkpoint, DenseShare, Linear, MoeShare
from cuq1.checkpoint.shares import leaves
from cuq1.config import load_config, parse_draft, parse_target
from cuq1.plan import cost
from tests.paths import NANO, RELEASED
from tools.make_checkpoint import tiny_config

BANDWIDTH = 4.5e12


@pytest.fixture(scope="module")
def released():
    return load_config(RELEASED)


@pytest.mark.parametrize(
    ("distinct", "target", "round_", "ms"),
    [(8, 1.96, 2.70, 0.60), (11, 2.42, 3.16, 0.70), (37.7, 6.53, 7.27, 1.62), (48, 8.11, 8.86, 1.97)],
)
def test_the_floor_of_the_released_model_at_eight_ranks(released, distinct, target, round_, ms):
    config, draft = released
    one_pass = cost.target_cost(config, 8, distinct).total
    whole = one_pass + 5 * cost.draft_depth_bytes(draft, 8)
    assert round(one_pass / 1e9, 2) == target
    assert round(whole / 1e9, 2) == round_
    assert round(whole / BANDWIDTH * 1e3, 2) == ms


@pytest.mark.parametrize(("context", "ms"), [(1, 0.01), (16, 0.08), (64, 0.22), (128, 0.40), (192, 0.59)])
def test_the_kv_rows_of_the_released_model(released, context, ms):
    assert round(cost.kv_bytes(released[0], 8, context * 1024) / BANDWIDTH * 1e3, 2) == ms


def test_the_parts_of_the_released_model(released):
    config, draft = released
    parts = {
        cost.attention_bytes(config, 8): 5.5e6,
        cost.expert_bytes(config, 8): 1.77e6,
        cost.router_bytes(config, 8): 1.18e6,
        cost.router_bytes(config, 1): 3.15e6,  # unfolded: the folded form would be larger
        cost.dense_bytes(config, 8): 14.2e6,
        cost.lm_head_bytes(config, 8): 123e6,
        cost.draft_depth_bytes(draft, 8): 149e6,
        cost.kv_row_bytes(config, 8): 512,
        cost.kv_row_bytes(config, 16): 512,  # a KV head is not divided
        cost.kv_row_bytes(config, 2): 2048,
    }
    for got, expected in parts.items():
        assert got == pytest.approx(expected, rel=5e-3)
    assert cost.distinct_levels(config) == [8, 11, 37.7, 48]
    assert cost.parameters(config) == pytest.approx(320.3e9, rel=1e-3)
    assert cost.parameters(config, active=True) == pytest.approx(14.9e9, rel=1e-3)


def test_bf16_weights_are_twice_as_long():
    target, draft = tiny_config()
    fp8 = parse_target(target)
    bf16 = dataclasses.replace(fp8, fp8_block=None)
    for part in (cost.attention_bytes, cost.expert_bytes, cost.dense_bytes):
        assert part(bf16, 2) == 2 * part(fp8, 2)
    assert cost.lm_head_bytes(bf16, 2) == cost.lm_head_bytes(fp8, 2)
    assert cost.router_bytes(bf16, 2) == cost.router_bytes(fp8, 2)
    assert parse_draft(draft, fp8).layer.fp8_block == (128, 128)


def test_a_short_context_shortens_the_windows(released):
    config, draft = released
    assert cost.kv_bytes(config, 8, 100) == 88 * 100 * 512
    assert cost.kv_bytes(config, 8, 5000) == (25 * 5000 + 63 * 4096) * 512
    assert cost.draft_depth_bytes(draft, 8) - cost.draft_depth_bytes(draft, 8, 12) == 500 * 512


def matrix_bytes(share):
    """Bytes of the linears' weights, without scales."""
    return sum(leaf.weight.nbytes for _, leaf in leaves(share) if isinstance(leaf, Linear))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_config_alone_gives_what_a_checkpoint_holds(tp):
    checkpoint = Checkpoint.open(NANO)
    config, draft = checkpoint.config, checkpoint.draft_config
    target, small = checkpoint.target(tp), checkpoint.draft(tp)
    dense, moe = target.layers[0], target.layers[1]
    assert isinstance(dense.mlp, DenseShare)
    assert isinstance(moe.mlp, MoeShare)
    assert cost.attention_bytes(config, tp) == matrix_bytes(moe.attention)
    assert cost.dense_bytes(config, tp) == matrix_bytes(dense.mlp)
    assert cost.expert_bytes(config, tp) == sum(
        part[0].weight.nbytes for part in (moe.mlp.gate, moe.mlp.up, moe.mlp.down)
    )
    assert cost.lm_head_bytes(config, tp) == target.lm_head.weight.nbytes
    routers = moe.mlp.router.nbytes
    assert cost.resident_bytes(config, tp) == matrix_bytes(target) + 5 * routers
    assert cost.draft_resident_bytes(draft, tp) == matrix_bytes(small) + routers


def test_parameters_are_those_of_the_files():
    checkpoint = Checkpoint.open(NANO)

    def elements(index):
        total = 0
        for name in index.names:
            if not name.endswith("_scale_inv") and name != "target_final_norm.weight":
                size = 1
                for dimension in index.entry(name).shape:
                    size *= dimension
                total += size
        return total

    assert cost.parameters(checkpoint.config) == elements(checkpoint.target_index)
    assert cost.draft_parameters(checkpoint.draft_config) == elements(checkpoint.draft_index)
