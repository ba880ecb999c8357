"""The plan of a round whose routing is not folded: the laboratory's other side of a comparison."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from cuq1.config import load_config
from cuq1.cuda.weights import weights_plan
from cuq1.models import decode, q1
from cuq1.models.order import Graph, check
from cuq1.plan.types import Ref
from tests.paths import NANO, RELEASED


def plans(folder=RELEASED, tp=8, ranks=1, *, rows=8, drafts=5, **how):
    """The folded round and the other one."""
    config, draft = load_config(folder)
    layout = weights_plan(config, draft, tp, 0)
    how_of = {"tp": tp, "ranks": ranks, "capacity": 1024}
    models = [q1.resolve(config, draft, layout, **how_of, folded=form) for form in (True, False)]
    return [decode.round_of(model, rows, drafts, **how) for model in models]


def routed_layers(plan):
    return [one.layer for one in plan.launches if one.label == "gate_up" and one.args["routed"]]


@pytest.mark.parametrize(("folder", "tp", "ranks"), [(RELEASED, 8, 1), (RELEASED, 8, 2), (NANO, 1, 1), (NANO, 2, 2)])
def test_every_routed_layer_has_a_router_of_its_own(folder, tp, ranks):
    folded, unfolded = plans(folder, tp, ranks)
    assert not {"router", "route"} & {one.label for one in folded.launches}
    layers = routed_layers(folded)
    assert layers == routed_layers(unfolded)
    for label in ("router", "route"):
        assert [one.layer for one in unfolded.launches if one.label == label] == layers
    others = [[(one.label, one.layer) for one in plan.launches] for plan in (folded, unfolded)]
    assert others[0] == [one for one in others[1] if one[0] not in ("router", "route")]
    for one, following in pairwise(unfolded.launches):
        expected = {"router": "route", "route": "gate_up"}.get(one.label)
        assert expected in (None, following.label)


def test_who_routes_is_told_and_nobody_else():
    for plan, who in zip(plans(), ("attn_tail", "route"), strict=True):
        tells = Counter(one.label for one in plan.launches if one.args.get("routed"))
        layers = len(routed_layers(plan))
        assert tells == {who: layers, "gate_up": layers, "down": layers}


def test_what_is_not_folded_reads_nothing_of_the_fold():
    folded, unfolded = plans()
    assert any(name.endswith(".fold") for name in (buffer.name for buffer in folded.buffers))
    names = {buffer.name for buffer in unfolded.buffers}
    assert not any(name.endswith(".fold") for name in names)
    assert {"ffn_normed32", "router_logits", "layers.87.router", "draft.router"} <= names
    layers = len(routed_layers(unfolded))
    read = unfolded.read_bytes() - folded.read_bytes()
    assert read == layers * 256 * 4 * (3072 - 768 - 384)  # the router, instead of the rank's fold
    for one in unfolded.launches:
        if one.label == "o_proj":
            assert one.args["fold"] == 0
            assert ("MOE", 0) in one.kernel.defines
        if one.label == "attn_tail":
            assert ("ROUTED", 1) not in one.kernel.defines
            assert (one.args["normed32"] == 0) == (one.layer == 0)


def test_forced_routing_reaches_who_routes():
    for plan, who in zip(plans(forced=True), ("attn_tail", "route"), strict=True):
        found = {
            one.layer: one.args["forced_ids"] for one in plan.launches if one.label == who and one.args["forced_ids"]
        }
        assert found == {
            layer: Ref("forced_ids", (88 if layer < 0 else layer) * 8 * 8 * 4) for layer in routed_layers(plan)
        }


def test_folded_is_what_a_plan_is_without_being_asked():
    config, draft = load_config(NANO)
    layout = weights_plan(config, draft)
    model = q1.resolve(config, draft, layout)
    assert model.folded
    assert decode.round_of(model, 8, 3) == decode.round_of(replace(model, folded=True), 8, 3)


def test_ranks_lose_nothing_of_an_exchange_that_has_no_router_parts():
    config, draft = load_config(NANO)
    models = [
        q1.resolve(
            config, draft, weights_plan(config, draft, 2, rank), tp=2, rank=rank, ranks=2, place=rank, folded=False
        )
        for rank in range(2)
    ]
    check({"round": Graph(tuple(decode.round_of(one, 8, 5) for one in models), (6, 1, 1, 1, 1))}, [("round", "round")])
