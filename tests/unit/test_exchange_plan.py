"""What ranks push into each other's inboxes is polled once, and never overtaken: checked of whole plans.

Each control breaks a plan in one way, and has to be refused for it.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from cuq1.config import load_config
from cuq1.cuda import abi
from cuq1.cuda.kernels import exchange
from cuq1.cuda.weights import weights_plan
from cuq1.models import decode, inbox_use, loop, q1, successions
from cuq1.models.order import Graph, check
from cuq1.plan.types import Launch, Plan, Ref
from tests.paths import NANO, RELEASED

NEVER = "pushes words that another rank may not have made NOT_READY yet"


def models(folder=NANO, tp=2, *, ranks=None, draft=True, **options):
    """Of each rank that exchanges, by place."""
    config, drafting = load_config(folder)
    drafting = drafting if draft else None
    places = range(tp if ranks is None else ranks)
    return [
        q1.resolve(
            config,
            drafting,
            weights_plan(config, drafting, tp, rank),
            tp=tp,
            rank=rank,
            ranks=len(places),
            place=rank,
            **options,
        )
        for rank in places
    ]


def edited(plan, label, layer, **changes):
    """The plan with other arguments of the launches of a layer that have a label; a function makes one of the old."""
    launches = []
    for one in plan.launches:
        if (one.label, one.layer) == (label, layer):
            made = {name: new(one.args[name]) if callable(new) else new for name, new in changes.items()}
            one = replace(one, args={**one.args, **made})  # noqa: PLW2901
        launches.append(one)
    return Plan(plan.buffers, tuple(launches))


def rounds(rows=5, drafts=3, run=None, change=lambda plan: plan, **options):
    """A round of nano's two ranks that follows itself."""
    live = [int(depth < (drafts if run is None else run)) for depth in range(8)]
    live[0] = rows
    plans = tuple(change(loop.round_of(model, rows, drafts, short=False)) for model in models(**options))
    return {"round": Graph(plans, tuple(live))}, [("round", "round")]


def refused(match, change, **options):
    graphs, follows = rounds(**options)
    check(graphs, follows)
    with pytest.raises(ValueError, match=match) as caught:
        check(*rounds(change=change, **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("draft", [True, False])
def test_all_that_two_ranks_of_nano_launch(draft):
    assert successions.check_all(models(draft=draft)) > (400 if draft else 15)


@pytest.mark.parametrize("draft", [True, False])
def test_what_eight_ranks_of_the_released_model_launch(draft):
    assert successions.check_all(models(RELEASED, 8, draft=draft), rows=(4,) if draft else (1,), most=3) > 3


def test_two_ranks_of_eight():
    assert successions.check_all(models(RELEASED, 8, ranks=2), rows=(8,), most=7) > 50


@pytest.mark.parametrize("options", [{"fp8_activations": True}, {"folded": False}])
def test_laboratory_plans(options):
    check(*rounds(**options))


def test_ranks_need_not_be_the_first_ones():
    config, draft = load_config(RELEASED)
    chosen = [
        q1.resolve(config, draft, weights_plan(config, draft, 8, rank), tp=8, rank=rank, ranks=2, place=place)
        for place, rank in enumerate((2, 5))
    ]
    plans = tuple(decode.round_of(model, 6, 5) for model in chosen)
    check({"round": Graph(plans, (6, 1, 1, 1, 1))}, [("round", "round")])


# What is said of places and of data.


def test_two_ranks_in_one_place():
    first, second = models()
    with pytest.raises(ValueError, match="pushes to one place from ranks 0 and 1"):
        successions.check_all([first, replace(second, place=0)], rows=(2,), most=1)


def test_ranks_that_do_not_launch_the_same():
    plans = tuple(decode.round_of(model, rows, 1) for rows, model in zip((2, 3), models(), strict=True))
    with pytest.raises(ValueError, match="elsewhere than another's"):
        check({"round": Graph(plans, (2,))}, [])
    plans = (plans[0], Plan(plans[1].buffers, plans[1].launches[:-1]))
    with pytest.raises(ValueError, match="ranks launch"):
        check({"round": Graph(plans, (2,))}, [])


def moved(ref, turns=1):
    size = models()[0].inbox.buffer_bytes
    return Ref(ref.buffer, (ref.offset + turns * size) % (size * abi.INBOXES))


@pytest.mark.parametrize(
    ("label", "layer", "field", "match"),
    [
        ("o_proj", 2, "out", "attn_tail of layer 2 polls words that no rank has pushed"),
        ("o_proj", 2, "router_residual", "attn_tail of layer 2 polls words that no rank has pushed"),
        ("attn_tail", 2, "o", "attn_tail of layer 2 polls words that no rank has pushed"),
        ("down", 3, "out", "mlp_tail of layer 3 polls words that no rank has pushed"),
        ("down", 3, "unready", f"o_proj of layer 4 {NEVER}"),
        ("mlp_tail", 3, "y", "mlp_tail of layer 3 polls words that no rank has pushed"),
        ("eh_proj", -1, "out", "qkv of the draft polls words that no rank has pushed"),
        ("qkv", -1, "pieces", "qkv of the draft polls words that no rank has pushed"),
        ("down", -1, "unready", "what o_proj of the draft pushes is not NOT_READY again"),
        ("top_k", 6, "ids", "accept of layer 6 polls words that no rank has pushed"),
        ("top_k", 6, "status", "accept of layer 6 polls words that no rank has pushed"),
        ("draft_sample", -1, "values", "draft_sample of the draft polls words that no rank has pushed"),
    ],
)
def test_the_wrong_turn(label, layer, field, match):
    refused(match, lambda plan: edited(plan, label, layer, **{field: moved}))


@pytest.mark.parametrize("layer", [0, 2, 5, -1])
def test_what_nobody_makes_ready_again(layer):
    refused("not made NOT_READY since|is not NOT_READY again", lambda plan: edited(plan, "down", layer, unready=0))


def test_too_little_is_made_ready_again():
    refused(
        "what eh_proj of the draft pushes is not NOT_READY again",
        lambda plan: edited(plan, "down", -1, unready_pieces=lambda pieces: pieces - 1),
        rows=8,
        drafts=7,
    )


def test_too_much_is_made_ready_again():
    refused(
        f"down of layer 1 {NEVER}",  # of its own layer's y, which lies behind
        lambda plan: edited(plan, "down", 1, unready_pieces=models()[0].inbox.pieces("o", "y")),
    )


def test_a_graph_that_settles_clears_up_after_itself():
    def without(plan):
        return Plan(plan.buffers, tuple(one for one in plan.launches if one.label != "rearm"))

    refused("what eh_proj of the draft pushes is not NOT_READY again", without, drafts=0)


def test_status_that_nobody_asks_for():
    refused("top_k of layer 6 pushes is not NOT_READY again", lambda plan: edited(plan, "accept", 6, loop=0))


def test_what_lies_outside_the_inbox_or_is_not_known():
    size = models()[0].inbox.bytes
    refused("reaches bytes", lambda plan: edited(plan, "o_proj", 3, out=Ref("inbox", size - 16)))
    refused(
        "embed.*normed lies in the inbox, where it has no part",
        lambda plan: edited(plan, "embed", 0, normed=Ref("inbox", 0)),
    )
    refused(
        "down of layer 2 writes into the inbox of its own rank alone", lambda plan: edited(plan, "down", 2, peers=0)
    )
    refused("out lies in h, not in the inbox", lambda plan: edited(plan, "down", 2, out=Ref("h")))
    refused("without polling", lambda plan: edited(plan, "qkv", -1, polled=0))


# What is said of the order.


def test_how_many_buffers_it_takes(monkeypatch):
    monkeypatch.setattr(abi, "INBOXES", 2)
    successions.check_all(models(), rows=(4, 8))
    monkeypatch.setattr(abi, "INBOXES", 1)
    with pytest.raises(ValueError, match=NEVER):
        successions.check_all(models(), rows=(4, 8))


def with_rearm(plan, after, ref, pieces):
    """The plan with a launch behind `after` (label, layer) that makes pieces NOT_READY."""
    args = {"fault": Ref("fault"), "live": 0, "layer": after[1], "rows": 5, "target": ref, "pieces": pieces}
    rearm = Launch(exchange.rearm(), "rearm", after[1], args, 0, 0)
    launches = []
    for one in plan.launches:
        launches += [one, rearm] if (one.label, one.layer) == after else [one]
    return Plan(plan.buffers, tuple(launches))


@pytest.mark.parametrize(("layer", "late"), [(1, False), (2, False), (3, True)])
def test_how_late_a_buffer_may_be_made_ready(layer, late):
    """Of layer 1's, which layer 4 uses again: behind layer 2 at the latest, as layer 3's exchange is between them."""

    def change(plan):
        (down,) = (one for one in plan.launches if (one.label, one.layer) == ("down", 1))
        cleared = down.args["unready"], down.args["unready_pieces"]
        return with_rearm(edited(plan, "down", 1, unready=0), ("mlp_tail", layer), *cleared)

    refusal = pytest.raises(ValueError, match=f"o_proj of layer 4 {NEVER}") if late else nullcontext()
    with refusal:
        check(*rounds(change=change))


def test_the_same_layers_exchange_does_not_help():
    """down stores beside gate_up and whatever comes after the attention tail."""
    inbox = models()[0].inbox
    words = inbox.whole("y", 4), inbox.pieces("y", "y")
    check(*rounds(change=lambda plan: with_rearm(plan, ("attention", 4), *words)))
    with pytest.raises(ValueError, match=f"down of layer 4 {NEVER}"):
        check(*rounds(change=lambda plan: with_rearm(plan, ("o_proj", 4), *words)))


def test_a_skipped_depth_touches_nothing(monkeypatch):
    """Peers do not wait for it, and may have pushed the next round's first layer already."""
    graphs, follows = rounds(rows=5, drafts=4, run=1)
    check(graphs, follows)
    fields, down = inbox_use._DESCRIBED[abi.DownArgs]

    def regardless(launch, rows):
        pushes, polls, clears = down(launch, max(rows, 1))
        return pushes if rows > 0 else (), polls, clears

    monkeypatch.setitem(inbox_use._DESCRIBED, abi.DownArgs, (fields, regardless))
    with pytest.raises(ValueError, match=f"round after round: o_proj of layer 0 {NEVER}"):
        check(graphs, follows)


def test_what_the_hosts_have_to_wait_for():
    """The logits of all ranks between two steps of sampling on the host, a prompt before a request's first token."""
    two = models()
    graphs = {
        "depth": Graph(tuple(decode.depth_of(model, 6) for model in two), (1,) * 7),
        "target": Graph(tuple(decode.target_of(model, 4) for model in two)),
        "first": Graph(tuple(decode.first_of(model, 0) for model in two), (1,)),
        "three": Graph(tuple(decode.round_of(model, 4, 3) for model in two), (4, 1, 1)),
        "round": Graph(tuple(decode.round_of(model, 8, 7) for model in two), (8, *(1,) * 6)),
    }
    check(graphs, [("target", "target"), ("round", "target"), ("round", "round"), ("first", "round")])
    for first, second in (("depth", "target"), ("three", "first")):
        with pytest.raises(ValueError, match=f"{second} after {first}: .* {NEVER}"):
            check(graphs, [(first, second)])


def test_a_graph_without_an_exchange_passes_on_what_came_before():
    two = models()
    graphs = {
        "depth": Graph(tuple(decode.depth_of(model, 6) for model in two), (1,) * 7),
        "logits": Graph(tuple(decode.logits_of(model) for model in two)),
        "target": Graph(tuple(decode.target_of(model, 4) for model in two)),
    }
    with pytest.raises(ValueError, match="target after logits"):
        check(graphs, [("logits", "target"), ("depth", "logits")])


def test_one_rank_has_no_inbox():
    config, draft = load_config(NANO)
    model = q1.resolve(config, draft, weights_plan(config, draft, 1, 0))
    plan = decode.round_of(model, 4, 3)
    check({"round": Graph((plan,), (4, 1, 1))}, [("round", "round")])
    assert not any(use.pushes or use.polls or use.clears for use in inbox_use.uses_of(plan, (4, 1, 1)))
