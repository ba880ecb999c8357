"""The exchange's order, walked in all interleavings of a model (tests/unit/exchange_model.py).

The ranks' programs are written for it, or those of real plans.

Each control is one rule broken, and an order has to be found in which that goes wrong.
"""

from dataclasses import dataclass
from itertools import product

import pytest

from cuq1.cuda import abi
from cuq1.models import decode, inbox_use, loop
from cuq1.models.order import Graph, check
from tests.unit.exchange_model import Writer, Wrong, walk
from tests.unit.test_exchange_plan import edited, models, with_rearm


@dataclass(frozen=True)
class Rules:
    """How layers and draft depths exchange. buffers: of each kind; words: that a rank pushes of an exchange.

    late: down makes the o of so many layers before NOT_READY. waits_for_all: mlp_tail does, else for its own rank's
    part alone. skipped: a rank that leaves out its part of layer 1's y. hasty: o_proj stores before mlp_tail has ended.
    """

    ranks: int = 2
    layers: int = 2
    depths: int = 1
    rounds: int = 2
    buffers: tuple[int, int, int, int] = (3, 3, 3, 3)
    words: int = 1
    late: int = 0
    waits_for_all: bool = True
    skipped: int | None = None
    hasty: bool = False


def program(rules: Rules, rank: int):
    """Rounds of layers, candidates and draft depths, as decode plans launch them."""
    w = Writer()
    buffers = dict(zip("OMEC", rules.buffers, strict=True))
    owed = []  # o's of earlier layers, to be made NOT_READY

    def words(kind, turn, ranks):
        return [f"{kind}, buffer {turn % buffers[kind]}, rank {r}, word {i}" for r in ranks for i in range(rules.words)]

    def whole(kind, turn):
        return words(kind, turn, range(rules.ranks))

    def layer(turn, entry):
        w.launch(f"o_proj {turn}", ended=w.launches - int(rules.hasty and turn > 0), pushes=words("O", turn, [rank]))
        w.launch(f"attn_tail {turn}", ended=w.launches - 1, polls=whole("O", turn))
        owed.append(whole("O", turn) + entry)
        cleared = owed.pop(0) if len(owed) > rules.late else []
        pushed = [] if rules.skipped == rank and turn == 1 else words("M", turn, [rank])
        w.launch(f"down {turn}", clears=cleared, pushes=pushed)
        polled = whole("M", turn) if rules.waits_for_all else words("M", turn, [rank])
        w.launch(f"mlp_tail {turn}", ended=w.launches - 1, polls=polled, clears=whole("M", turn))

    def candidates(turn):
        w.launch(f"top_k {turn}", pushes=words("C", turn, [rank]))
        w.launch(f"sampler {turn}", ended=w.launches - 1, polls=whole("C", turn), clears=whole("C", turn))

    for _ in range(rules.rounds):
        for number in range(rules.layers):
            layer(number, [])
        candidates(rules.layers - 1)
        for turn in range(rules.layers, rules.layers + rules.depths):
            w.launch(f"eh_proj {turn}", pushes=words("E", turn, [rank]))
            w.launch(f"qkv {turn}", polls=whole("E", turn))
            layer(turn, whole("E", turn))
            candidates(turn)
    for left in owed:
        w.launch("the end", clears=left)
    return w.program


def programs(rules):
    return [program(rules, rank) for rank in range(rules.ranks)]


@pytest.mark.parametrize(
    ("rules", "states"),
    [
        (Rules(), 1000),
        (Rules(layers=4, depths=2), 2000),
        (Rules(layers=3, depths=0, rounds=3), 1000),
        (Rules(words=2, rounds=1), 10_000),
        (Rules(ranks=3, rounds=1), 50_000),
        (Rules(buffers=(2, 1, 1, 1)), 1000),  # what would do
    ],
)
def test_no_order_goes_wrong(rules, states):
    assert walk(programs(rules)) > states


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        (Rules(buffers=(1, 1, 1, 1)), "a push of O.* arrives before rank . has cleared it"),
        (Rules(buffers=(1, 3, 3, 3)), "a push of O.* arrives before"),
        (Rules(buffers=(1, 3, 3, 3), ranks=3, rounds=1), "a push of O.* arrives before"),
        (Rules(layers=6, depths=0, late=2), "a push of O.* arrives before"),
        (Rules(layers=6, depths=0, buffers=(2, 3, 3, 3), late=1), "a push of O.* arrives before"),
        (
            Rules(layers=4, late=1),
            "a push of O.* arrives before",
        ),  # the draft's turn is the one but one before layer 1's
        (
            Rules(hasty=True, buffers=(3, 1, 3, 3)),
            "a push of M.* arrives before|mlp_tail . of rank . reads what is not",
        ),
        (Rules(waits_for_all=False), "clears what it has not polled|arrives before"),
        (Rules(skipped=1), "nothing can happen any more, and mlp_tail 1 of rank . is left to poll"),
    ],
)
def test_a_broken_rule_goes_wrong_in_some_order(rules, match):
    with pytest.raises(Wrong, match=match):
        walk(programs(rules))


def test_how_late_down_may_be():
    """A layer later is still in time with three buffers: the layer between has an exchange of its own."""
    walk(programs(Rules(layers=6, depths=0, late=1)))


def test_two_ranks_in_one_place():
    rules = Rules(rounds=1)
    with pytest.raises(Wrong, match=r"a push of .* arrives before"):
        walk([program(rules, 0), program(rules, 0)])


# Programs of real plans.


def planned(two, graphs):
    """The ranks' programs: (plans, rows of the draft's depths), and None where the hosts meet.

    Of what a launch pushes, the model has the first word.
    """
    written = [Writer() for _ in two]
    uses = [None if graph is None else [inbox_use.uses_of(p, graph[1]) for p in graph[0]] for graph in graphs]
    kept = {use.pushes[0][0] for graph in uses if graph for rank in graph for use in rank if use.pushes}

    def within(spans):
        return sorted(word for word in kept for begin, end in spans if begin <= word < end)

    for graph in uses:
        for rank, writer in enumerate(written):
            if graph is None:
                writer.meet()
                continue
            before = writer.launches
            for use in graph[rank]:
                writer.launch(
                    f"{use.label} {use.layer}",
                    ended=before + use.stored,
                    polls=within(use.polls),
                    clears=within(use.clears),
                    pushes=within(use.pushes),
                )
    return [writer.program for writer in written]


def plans(two, make, *args, **options):
    return tuple(make(model, *args, **options) for model in two)


def walked(*graphs, two=None):
    two = models() if two is None else two
    made = [None if graph is None else (plans(two, graph[0], *graph[1]), graph[2]) for graph in graphs]
    return walk(planned(two, made))


def host_round(model, rows, drafts):
    return decode.round_of(model, rows, drafts)


def device_round(model, rows, drafts):
    return loop.round_of(model, rows, drafts, short=True)


def settling(model):
    return decode.depth_of(model, 0, settle_only=True)


FIRST = (loop.first_of, (3,), (1, 1, 1))
ROUND = (device_round, (4, 3), (4, 1, 1))
DEPTH = (loop.depth_of, (3,), (1, 1, 1, 1))
SKIPS = (host_round, (2, 5), (2, 1, 0, 0, 0))
TARGET = (decode.target_of, (3,), ())
LOGITS = (decode.depth_of, (6,), (1,) * 7)
SETTLES = (settling, (), (3,))


@pytest.mark.parametrize(
    "graphs",
    [
        (FIRST, ROUND, DEPTH, ROUND),
        (SKIPS, SKIPS),
        (ROUND, TARGET),
        ((device_round, (1, 0), (1,)), (device_round, (1, 0), (1,))),
        (TARGET, None, SETTLES, TARGET),
        (LOGITS, None, TARGET, None, LOGITS),
        (ROUND, None, FIRST),
    ],
    ids=lambda graphs: " ".join("meet" if g is None else g[0].__name__ for g in graphs),
)
def test_real_plans_in_all_orders(graphs):
    assert walked(*graphs) > 500


def test_three_ranks_of_a_real_plan():
    assert walked((loop.first_of, (1,), (1,)), two=models(tp=4, ranks=3)) > 10_000


def test_a_skipped_depth_that_clears_goes_wrong(monkeypatch):
    fields, down = inbox_use._DESCRIBED[abi.DownArgs]

    def regardless(launch, rows):
        pushes, polls, clears = down(launch, max(rows, 1))
        return pushes if rows > 0 else (), polls, clears

    monkeypatch.setitem(inbox_use._DESCRIBED, abi.DownArgs, (fields, regardless))
    with pytest.raises(Wrong, match=r"down -1 of rank . clears what it has not polled"):
        walked(SKIPS, SKIPS)


@pytest.mark.parametrize("graphs", [(LOGITS, TARGET), (ROUND, FIRST)], ids=["logits", "requests"])
def test_hosts_that_do_not_meet(graphs):
    with pytest.raises(Wrong, match=r"arrives before|reads what is not of its exchange"):
        walked(*graphs)


@pytest.mark.parametrize(("inboxes", "layer"), list(product((1, 2, 3), (None, 1, 2, 3))), ids=lambda value: f"{value}")
def test_the_checker_says_what_the_model_finds(monkeypatch, inboxes, layer):
    """For so many buffers, and layer 1's o made NOT_READY behind a later layer instead of by its own down."""
    monkeypatch.setattr(abi, "INBOXES", inboxes)
    two = models()

    def change(plan):
        if layer is None:
            return plan
        (down,) = (one for one in plan.launches if (one.label, one.layer) == ("down", 1))
        cleared = down.args["unready"], down.args["unready_pieces"]
        return with_rearm(edited(plan, "down", 1, unready=0), ("mlp_tail", layer), *cleared)

    changed = tuple(change(decode.round_of(model, 2, 1)) for model in two)
    graph = Graph(changed, (2,))
    refused = found = False
    try:
        check({"round": graph}, [("round", "round")])
    except ValueError:
        refused = True
    try:
        walk(planned(two, [(changed, (2,)), (changed, (2,))]))
    except Wrong:
        found = True
    assert refused == found == (inboxes == 1 or (layer or 0) > inboxes - 1)
