"""The device loop of several ranks: what its plans exchange, and that all ranks end and pause at the same round."""

import random

import pytest

from cuq1.config import load_config
from cuq1.cuda import abi
from cuq1.cuda.kernels import sampling
from cuq1.cuda.log import decided
from cuq1.cuda.weights import weights_plan
from cuq1.models import decode, loop, q1
from cuq1.plan.dims import DRAFT
from tests.kernels.twins import control
from tests.paths import NANO

RANKS = 2
FAULT_PEER, FAULT_NOT_FINITE = abi.constant("FAULT_PEER"), abi.constant("FAULT_NOT_FINITE")


def models(ranks, drafting=True):
    config, draft = load_config(NANO)
    draft = draft if drafting else None
    layouts = [weights_plan(config, draft, ranks, rank) for rank in range(ranks)]
    return [
        q1.resolve(config, draft, layout, tp=ranks, rank=rank, capacity=1024, ranks=ranks, place=rank)
        for rank, layout in enumerate(layouts)
    ]


def plans_of(model, of):
    """(name, plan) of each kind that ends a round, as `of` makes them."""
    most = 7 if model.draft is not None else 0
    short = {"short": True}
    yield "first", of.first_of(model, most and 3)
    yield "round", of.round_of(model, most + 1, most and 3, **short)
    yield "settling", of.round_of(model, 1, 0, **short)


def told(plan):
    """Launches that say something beside candidates, and those that hear it: [(label, what they are given)]."""
    names = {"top_k": ("mirror", "status"), "accept": ("loop", "statuses")}
    found = []
    for launch in plan.launches:
        given = [name for name in names.get(launch.label, ()) if launch.args[name] != 0]
        if len(given) == 2:
            found.append((launch.label, launch.layer, [launch.args[name] for name in given]))
    return found


@pytest.mark.parametrize("drafting", [True, False])
def test_a_rounds_plan_tells_and_hears_statuses_once(drafting):
    for place, model in enumerate(models(RANKS, drafting)):
        turn = len(model.layers) - 1
        for name, plan in plans_of(model, loop):
            (said, layer, (mirror, status)), (heard, _, (where, statuses)) = told(plan)
            assert (said, heard, layer != DRAFT) == ("top_k", "accept", True), name
            assert (mirror.buffer, where.buffer) == ("mirror", "loop"), name
            assert status == model.inbox.own("status", turn), name
            assert status.offset - statuses.offset == place * abi.STATUS_WORDS * 4
            names = [buffer.name for buffer in plan.buffers]
            assert sorted(names) == sorted(set(names))
            assert {ref.buffer for launch in plan.launches for _, ref in launch.refs()} <= set(names)


def test_plans_that_hosts_step_tell_nothing():
    for model in models(RANKS):
        for name, plan in plans_of(model, decode):
            assert told(plan) == [], name
        assert told(loop.depth_of(model, 3)) == []


def test_one_rank_tells_nothing():
    (model,) = models(1)
    for name, plan in plans_of(model, loop):
        assert told(plan) == [], name


def test_all_that_is_pushed_of_a_row_is_read_by_the_same_launches():
    """top_k and what follows it have the same live rows, on all ranks: else words would be left, or waited for."""
    every = [plans_of(model, loop) for model in models(RANKS)]
    for ranks in zip(*every, strict=True):
        seen = []
        for _, plan in ranks:
            rows = []
            for one, after in zip(plan.launches, plan.launches[1:], strict=False):
                if one.label != "top_k":
                    continue
                assert after.label in ("accept", "draft_sample")
                assert (one.args["live"], one.args["rows"]) == (after.args["live"], after.args["rows"])
                assert after.args["pieces"] == RANKS
                rows.append((after.label, one.args["live"], one.args["rows"]))
            seen.append(rows)
        assert seen[0] == seen[1]
        assert seen[0]


def test_samplers_have_a_list_from_each_rank():
    dims = models(RANKS)[0].dims
    assert sampling.accept(dims) == sampling.accept(dims, RANKS)
    for kernel in (sampling.accept, sampling.draft_sample):
        with pytest.raises(ValueError, match="2 ranks have as many lists of a row, not 8"):
            kernel(dims, 8)


def test_qkv_polls_what_the_entry_pushes():
    for model in models(RANKS):
        for _, plan in plans_of(model, loop):
            launches = list(plan.launches)
            entries = [i for i, one in enumerate(launches) if one.label == "eh_proj"]
            assert entries
            for i in entries:
                pushed, polled = launches[i].args, launches[i + 1].args
                assert (pushed["live"], pushed["rows"]) == (polled["live"], polled["rows"])
                assert (polled["pieces"], polled["polled"]) == (pushed["out"], 1)
                assert pushed["peers"] != 0


class Rank:
    """A rank's State, Loop and Mirror, and what its control decides."""

    def __init__(self):
        self.state, self.loop, self.mirror = abi.State(), abi.Loop(), abi.Mirror()
        self.fault = 0
        self.loop.budget, self.loop.room, self.loop.short_context = 10_000, 64, 4096
        self.state.done = self.mirror.taken = 100
        for i in range(abi.MAX_STOPS):
            self.loop.stops[i] = -1
        self.reported = 0

    def accept(self, accepted):
        state = self.state
        state.done += accepted + 1
        state.log_count, state.log_accepted, state.log_drafted = accepted + 1, accepted, state.drafts
        for depth in range(abi.ROWS):
            state.depth_rows[depth] = int(depth < 5)
        state.drafts = 3
        for i in range(abi.ROWS):
            state.log_tokens[i] = state.done + i

    def decide(self, agreed):
        for made in range(3, 6):
            self.state.drafts = made
            next_one, record = control.decide(self.loop, self.state, self.mirror, made, self.fault, agreed=agreed)
            if record is not None:
                record.ended = random.getrandbits(60)  # clocks differ
                return next_one, record
        raise AssertionError


def walk(seed, *, agreeing):
    """Rounds of two ranks whose hosts do as they like, until both end: reasons, or None where they differ."""
    rng = random.Random(seed)
    ranks = [Rank() for _ in range(RANKS)]
    reasons = []
    for _ in range(500):
        accepted = rng.randrange(4)
        for rank in ranks:
            rank.accept(accepted)
        agreed = control.agree([rank.mirror for rank in ranks], [rank.fault for rank in ranks]) if agreeing else None
        for rank in ranks:  # too late for this round
            rank.mirror.cancel |= int(rng.random() < 0.01)
            rank.fault |= int(rng.random() < 0.003)
        found = [rank.decide(agreed) for rank in ranks]
        if len({next_one for next_one, _ in found}) > 1 or len({decided(record) for _, record in found}) > 1:
            return None
        reason = found[0][1].reason
        for rank in ranks:  # readers, of whom one may be slow, and both have read all where they have to launch again
            if rng.random() < 0.3 or reason == abi.END_PAUSED:
                rank.mirror.taken, rank.mirror.read = rank.state.done, rank.loop.written
        if reason != abi.END_NONE:
            reasons.append(reason)
        if reason not in (abi.END_NONE, abi.END_PAUSED):
            return reasons
    return reasons


def test_ranks_end_and_pause_at_the_same_round():
    walks = [walk(seed, agreeing=True) for seed in range(200)]
    assert None not in walks
    assert {reason for reasons in walks for reason in reasons} == {abi.END_CANCELLED, abi.END_PAUSED, abi.END_FAULT}


def test_ranks_that_do_not_agree_part():
    """The control."""
    assert sum(walk(seed, agreeing=False) is None for seed in range(200)) > 150


def test_a_rank_without_its_peer_ends_alone():
    rank = Rank()
    rank.accept(1)
    rank.fault = FAULT_PEER
    assert rank.decide((0, 1000, 0))[1].reason == abi.END_FAULT
    rank.accept(1)
    rank.fault = FAULT_NOT_FINITE  # which the next round's statuses tell
    assert rank.decide((0, 1000, 0))[1].reason == abi.END_NONE


def test_counts_of_records_wrap():
    for written in (5, control.COUNT - 3, control.COUNT + 100, 2 * control.COUNT - 1, 2 * control.COUNT + 7):
        mirrors = [abi.Mirror() for _ in range(3)]
        for mirror, unread in zip(mirrors, (0, 250, 17), strict=True):
            mirror.read = (written - unread) % (2 * control.COUNT)
        assert control.agree(mirrors, [0, 0, 0]) == (0, 0, (written - 250) % control.COUNT)


def test_what_was_decided_leaves_out_clocks():
    one, other = abi.Record(), abi.Record()
    for name, _ in abi.Record._fields_:
        if name in ("launched", "verified", "drafted_first", "ended"):
            setattr(other, name, 7)
    assert decided(one) == decided(other)
    for name in ("index", "rows", "reason", "done", "status"):
        changed = abi.Record()
        setattr(changed, name, 1)
        assert decided(changed) != decided(one)
    other.tokens[7] = 1
    assert decided(other) != decided(one)
