"""Plans of a decode round, from configs alone."""

from collections import Counter

import pytest

from cuq1.config import load_config
from cuq1.cuda.weights import weights_plan
from cuq1.models import decode, q1
from cuq1.plan import cost
from cuq1.plan.dims import DRAFT
from tests.paths import NANO, RELEASED


@pytest.fixture(scope="module")
def configs():
    return load_config(RELEASED)


def test_a_round_reads_what_the_cost_model_counts(configs):
    config, draft = configs
    plan = decode.round_plan(config, draft, tp=8, rank=0, rows=6, drafts=5, context=1024, distinct=37.7)
    expected = cost.target_cost(config, 8, 37.7).total + cost.kv_bytes(config, 8, 1024)
    # The draft's lm_head, BF16 in the checkpoint, is E4M3 on the GPU.
    expected += 5 * (cost.draft_depth_bytes(draft, 8, 1024) - cost.lm_head_bytes(draft.layer, 8) / 2)
    assert plan.read_bytes() == pytest.approx(expected, rel=0.01)


def model_of(configs, tp, ranks, rank=0, **options):
    """A rank of `tp` that exchanges with `ranks` of them, itself included."""
    config, draft = configs
    layout = weights_plan(config, draft, tp, rank)
    return q1.resolve(config, draft, layout, tp=tp, rank=rank, ranks=ranks, place=rank % ranks, **options)


@pytest.mark.parametrize(("ranks", "tails"), [(1, 2), (2, 88), (8, 88)])
def test_every_layer_has_its_kernels(configs, ranks, tails):
    """Where ranks exchange, each layer has a tail that adds their parts of the MLP."""
    plan = decode.round_of(model_of(configs, 8, ranks, 3, capacity=1024), 4, 3, short=True)
    counts = Counter((launch.label, launch.layer >= 0) for launch in plan.launches)
    for label in ("qkv", "attention", "o_proj", "attn_tail", "gate_up", "down"):
        assert counts[label, True] == 88
        assert counts[label, False] == 3
    assert counts["combine", True] == counts["combine", False] == 0
    assert (counts["mlp_tail", True], counts["mlp_tail", False]) == (tails, 3)
    assert counts["lm_head", True] == counts["accept", True] == 1
    assert counts["draft_sample", False] == 3


def test_long_full_layers_combine_splits(configs):
    config, draft = configs
    layout = weights_plan(config, draft, 8, 0)
    model = q1.resolve(config, draft, layout, tp=8, capacity=65536)
    for context, combines in ((model.short_context - 8, 0), (model.short_context - 7, 25)):
        plan = decode.round_plan(config, draft, tp=8, rank=0, context=context)
        assert sum(launch.label == "combine" for launch in plan.launches) == combines


@pytest.mark.parametrize(("tp", "labels"), [(1, ["eh_proj", "qkv"]), (2, ["eh_proj", "qkv", "rearm"])])
def test_without_drafts_the_draft_only_takes_in_what_was_committed(tp, labels):
    config, draft = load_config(NANO)
    plan = decode.round_plan(config, draft, tp=tp, rank=0, rows=1, drafts=0)
    assert [launch.label for launch in plan.launches if launch.layer == DRAFT] == labels


def test_a_model_without_a_draft():
    config, _ = load_config(NANO)
    plan = decode.round_plan(config, None, tp=1, rank=0, rows=1, drafts=0)
    assert all(launch.layer != DRAFT for launch in plan.launches)


def test_capacity_changes_buffers_and_nothing_else(configs):
    config, draft = configs
    layout = weights_plan(config, draft, 8, 0)
    small, large = (q1.resolve(config, draft, layout, tp=8, capacity=size) for size in (4096, 65536))
    plans = [decode.round_of(model, 8, 5) for model in (small, large)]
    assert plans[0].read_bytes() == plans[1].read_bytes()
    assert [one.kernel for one in plans[0].launches] == [one.kernel for one in plans[1].launches]
    assert plans[0].total_bytes() < plans[1].total_bytes()


def test_rings_have_a_tile_of_slack():
    assert [q1.ring_slots(window) for window in (4096, 512, 256, 64, 100)] == [4160, 576, 320, 128, 192]


def test_a_rank_adds_its_own_slice_of_the_residual_to_the_router(configs):
    config, draft = configs
    starts = set()
    for rank in range(8):
        plan = decode.round_plan(config, draft, tp=8, rank=rank, rows=1, drafts=0)
        starts |= {one.args["slice_start"] for one in plan.launches if one.label == "o_proj"}
    assert starts == {384 * rank for rank in range(8)}


def test_what_is_polled_was_made_unready_by_the_layer_before(configs):
    """On one rank, whose layers take turns with one buffer; several ranks': tests/unit/test_exchange_plan.py."""
    plan = decode.round_of(model_of(configs, 8, 1), 8, 5)
    unready: set[str] = set()
    for one in plan.launches:
        if one.label == "attn_tail":
            assert (one.args["polled"] != 0) == ("o" in unready), one.layer
            unready.discard("o")
        if one.label == "down":
            unready |= {ref.buffer for name, ref in one.refs() if name == "unready"}
    assert not unready


def test_one_rank_alone_exchanges_nothing(configs):
    alone = decode.round_of(model_of(configs, 8, 1), 8, 5)
    assert not {"inbox", "peers"} & {buffer.name for buffer in alone.buffers}
    assert all(launch.args.get("peers", 0) == 0 for launch in alone.launches)
    assert not any(name == "RANKS" for kernel in alone.kernels() for name, _ in kernel.defines)


def test_what_ranks_exchange_lies_in_their_inboxes(configs):
    plan = decode.round_of(model_of(configs, 8, 2), 8, 5)
    pushing = {"o_proj", "down", "eh_proj", "top_k"}
    assert {launch.label for launch in plan.launches if launch.args.get("peers", 0) != 0} == pushing
    assert {launch.label for launch in plan.launches if "inbox" in {ref.buffer for _, ref in launch.refs()}} == {
        *pushing,
        *("attn_tail", "mlp_tail", "qkv", "accept", "draft_sample"),
    }
    # What one rank writes for itself is then nobody's.
    assert not {"o", "y", "eh_pieces", "top_values", "top_ids"} & {buffer.name for buffer in plan.buffers}


def test_an_inbox_holds_three_buffers_of_every_piece(configs):
    inbox = model_of(configs, 8, 8, 5).inbox
    names = ["o", "router_attended", "router_residual", "eh", "y", "values", "ids", "status"]
    sizes = [8 * 8 * 3072, 8 * 8 * 256, 8 * 8 * 256, 6 * 8 * 3072, 8 * 8 * 3072, 8 * 8 * 32, 8 * 8 * 32, 8 * 4]
    assert [inbox.pieces(name, name) for name in names] == [size // 4 for size in sizes]
    starts = [inbox.whole(name, 0).offset for name in names]
    assert starts == [4 * sum(sizes[:i]) for i in range(len(names))]
    assert inbox.bytes == 3 * inbox.whole("o", 1).offset == sum(buffer.bytes for buffer in inbox.buffers()[:1])
    assert inbox.whole("y", 4) == inbox.whole("y", 1) != inbox.whole("y", 2)
    assert inbox.own("o", 0).offset - inbox.whole("o", 0).offset == 5 * 8 * 3072 * 4
    assert inbox.own("ids", 2).offset - inbox.whole("ids", 2).offset == 5 * 32 * 4
    assert inbox.own("status", 0).offset - inbox.whole("status", 0).offset == 5 * 16


@pytest.mark.parametrize(("ranks", "place"), [(2, 2), (2, -1), (0, 0), (4, 0)])
def test_a_place_is_one_of_those_that_exchange(ranks, place):
    config, draft = load_config(NANO)
    with pytest.raises(ValueError, match=f"place {place} is none of {ranks} ranks' of 2"):
        q1.resolve(config, draft, weights_plan(config, draft, 2, 0), tp=2, ranks=ranks, place=place)
