"""Candidates among ranks, emulated on one GPU: top_k, accept and draft_sample against the whole vocabulary's twins."""

import time
from contextlib import contextmanager
from ctypes import sizeof
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cuq1.cuda import abi
from cuq1.cuda.abi import AcceptArgs, DraftSampleArgs, TopKArgs
from cuq1.cuda.graph import synchronize
from cuq1.cuda.kernels import head, sampling
from cuq1.cuda.launch import launch
from cuq1.cuda.memory import Mapped, MappedFault
from cuq1.cuda.module import build
from cuq1.plan.dims import ROWS
from tests.kernels import emulated
from tests.kernels.emulated import NOT_READY, Ranks
from tests.kernels.shapes import EXCHANGED, RELEASED
from tests.kernels.test_sampling_kernels import Batch, assert_same, random_logits, random_states, with_drafts
from tests.kernels.twins import sampling as twin

SMALL = replace(RELEASED, ranks=8, vocab=40, vocab_total=320)
DIMS = {"8 ranks": SMALL, "2 ranks": EXCHANGED["nano, 2 ranks"]}
TURN = 5
STATE = twin.STATE
PEER_FAULT, NOT_FINITE = abi.constant("FAULT_PEER"), abi.constant("FAULT_NOT_FINITE")
QUICK_MS = 20


def fresh():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@cache
def built(kernel, arch, patch=None):
    """module.build, which looks at the source each time."""
    return build(kernel, arch, patch)


@cache
def quick(kernel):
    """The kernel with a short patience for peers."""
    return replace(kernel, defines=(*kernel.defines, ("PEER_TIMEOUT_MS", QUICK_MS)))


class World:
    """Ranks on one GPU: inboxes, and of each rank a State, a Loop, a Mirror, a Fault and its rows of the logits."""

    def __init__(self, gpu, dims):
        self.gpu, self.dims = gpu, dims
        self.inboxes = Ranks(gpu, dims)
        self.places = self.inboxes.places
        self.faults = [MappedFault() for _ in self.places]
        self.mirrors = [Mapped(sizeof(abi.Mirror)) for _ in self.places]
        self.state = gpu.cupy.zeros((dims.ranks, STATE.itemsize), np.uint8)
        self.loop = gpu.cupy.zeros((dims.ranks, sizeof(abi.Loop)), np.uint8)
        self.logits = gpu.cupy.zeros((dims.ranks, ROWS, dims.vocab), np.float32)

    def close(self):
        for mapped in (*self.faults, *self.mirrors):
            mapped.close()

    def mirror(self, place):
        return abi.Mirror.from_address(self.mirrors[place].address)

    def set_states(self, state):
        """One state, the same on all ranks."""
        self.state[:] = self.gpu.array(np.frombuffer(state.tobytes(), np.uint8))

    def states(self):
        return self.state.get().view(STATE)[:, 0]

    def set_logits(self, rows):
        """float32 [rows, ranks * vocab]; rows beyond are NaN, which none may read."""
        whole = np.full((ROWS, self.dims.ranks * self.dims.vocab), np.nan, np.float32)
        whole[: len(rows)] = rows
        self.logits[:] = self.gpu.array(whole.reshape(ROWS, self.dims.ranks, -1).swapaxes(0, 1))

    def at(self, array, place):
        return array.data.ptr + place * array.strides[0]

    def live(self, place, depth):
        """Where depth_rows[depth] lies, or null for all rows."""
        return 0 if depth is None else self.at(self.state, place) + abi.State.depth_rows.offset + 4 * depth

    def top_k(self, place, rows, depth=None, *, told=False):
        to = (self.inboxes.own(place, name, TURN) for name in ("values", "ids"))
        args = TopKArgs(
            self.faults[place].address, self.live(place, depth), 7, rows, self.at(self.logits, place), *to,
            place * self.dims.vocab, 0, self.inboxes.peers(place),
        )  # fmt: skip
        args.mirror = self.mirrors[place].address if told else 0
        args.status = self.inboxes.own(place, "status", TURN)
        return head.top_k(self.dims), args

    def _lists(self, place):
        names = ("values", "ids")
        return self.at(self.state, place), *(self.inboxes.whole(place, name, TURN) for name in names), self.dims.ranks

    def accept(self, place, rows, *, first=False, told=False):
        args = AcceptArgs(self.faults[place].address, 0, 7, rows, *self._lists(place), int(first))
        args.statuses = self.inboxes.whole(place, "status", TURN)
        args.loop = self.at(self.loop, place) if told else 0
        return quick(sampling.accept(self.dims)), args

    def draft_sample(self, place, depth):
        args = DraftSampleArgs(self.faults[place].address, self.live(place, depth), -1, 1, *self._lists(place), depth)
        return quick(sampling.draft_sample(self.dims)), args

    def issue(self, calls, patch=None, stream=None):
        """Enqueues [(kernel, args)]. patch: (entry, old, new) of the kernels of that name."""
        for kernel, args in calls:
            own = tuple(patch[1:]) if patch is not None and patch[0] == kernel.entry else None
            launch(built(kernel, self.gpu.device.arch, own), args, stream or self.gpu.stream)

    def wait(self):
        """What each rank's kernels reported, (what, kernel, detail), by its place."""
        for stream in (*emulated.streams(self.gpu), self.gpu.stream):
            synchronize(stream)
        found = {}
        for place, fault in enumerate(self.faults):
            if (record := fault.read()) is not None:
                found[place] = record.what, abi.KERNELS[record.kernel], record.detail
                fault.clear()
        return found

    def run(self, calls, patch=None):
        self.gpu.cupy.cuda.Device().synchronize()
        self.issue(calls, patch)
        return self.wait()


@contextmanager
def world_of(gpu, dims):
    world = World(gpu, dims)
    try:
        yield world
    finally:
        world.close()


def some_rows(rng, dims):
    """Logits of a round's target and draft, [ROWS, whole vocabulary] each: unlike, alike, tied, or on few ranks."""
    shape = ROWS, dims.ranks * dims.vocab
    target = rng.standard_normal(shape, np.float32) * rng.choice([1, 3, 10])
    draft = target + rng.standard_normal(shape, np.float32) * rng.choice([0, 0.05, 1])
    kind = rng.integers(5)
    if kind == 0:  # ties within ranks and across them
        target, draft = np.round(target / 3), np.round(draft / 3)
    elif kind == 1:
        target[:] = draft[:] = -1.5
    elif kind == 2:
        owner = int(rng.integers(dims.ranks))
        for rows in (target, draft):
            rows[:, owner * dims.vocab : (owner + 1) * dims.vocab] += 50
    elif kind == 3:
        target = np.where(rng.random(shape) < 0.9, -np.inf, target)
        target[:, rng.permutation(shape[1])[:3]] = 0
    return target.astype(np.float32), draft.astype(np.float32)


def judge(world, expected, before, faults):
    """All ranks' states are the twin's, and nothing is left in the inboxes."""
    assert not faults, f"reported: {faults}"
    found = world.states()
    for name in STATE.names:
        if name != "log_verified":
            assert (found[name] == found[name][:1]).all(), f"ranks differ in {name}: {found[name]}"
    same = np.repeat(expected[None], len(found))
    same["log_verified"] = found["log_verified"]
    assert_same(found, same, np.repeat(before[None], len(found)))
    assert world.inboxes.ready_words() == 0, f"{world.inboxes.ready_words()} words are left in inboxes"


def play(world, rng, rounds=2, patch=None, limit=None, wide=False):
    """A request from its first token on: each launch's states against the twin's.

    wide: one that draws from many candidates, so that every rank's count.
    """
    state = random_states(rng, 1)[0]
    state["top_k"] = rng.choice([1, 20, 32])
    if wide:
        state["top_k"], state["temperature"], state["top_p"] = 32, 2, 1
    if limit is not None:
        state["draft_limit"] = limit
    places = world.places
    world.set_states(state)
    target, draft = some_rows(rng, world.dims)

    def step(rows, logits, before, depth, consumers):
        world.set_logits(logits)
        calls = [world.top_k(place, rows, depth) for place in places]
        judge(world, state, before, world.run([*calls, *map(consumers, places)], patch))

    before = state.copy()
    twin.first(state, target)
    step(1, target[:1], before, None, lambda place: world.accept(place, 1, first=True))
    for _ in range(rounds):
        for depth in range(abi.MAX_DRAFTS):  # also those that are not wanted: nothing is pushed then
            before = state.copy()
            if state["depth_rows"][depth] > 0:
                twin.draft_sample(state, draft[depth], depth)
            step(1, draft[depth : depth + 1], before, depth, lambda place, d=depth: world.draft_sample(place, d))
        target, draft = some_rows(rng, world.dims) if rng.random() < 0.2 else (target, draft)
        rows = min(ROWS, int(state["drafts"]) + 1 + int(rng.integers(3)))  # a row without a draft is read as well
        before = state.copy()
        twin.accept(state, target, rows)
        step(rows, target[:rows], before, None, lambda place, n=rows: world.accept(place, n))


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_all_ranks_draw_what_one_would(gpu, name):
    rng = fresh()
    with world_of(gpu, DIMS[name]) as world:
        for _ in range(8):
            play(world, rng)
        play(world, rng, limit=0)  # the draft only takes in what was committed, and still has candidates


@pytest.mark.gpu
def test_a_vocabulary_of_the_released_size(gpu):
    with world_of(gpu, EXCHANGED["released, 8 ranks"]) as world:
        play(world, fresh(), rounds=1, limit=3)


PATCHES = {
    "ids of its own": ("top_k", "a.first_id + v", "v"),
    "a row's place": ("top_k", "a.values + row * RANKS", "a.values + row"),
    "ids are left": ("draft_sample", "make_unready(ids + rank * MAX_TOP_K + lane);", ""),
    "values are left": ("accept", "make_unready(values + rank * MAX_TOP_K + lane);", ""),
    "rows without a draft are left": ("accept", "RANKS > 1 ? row < rows : row <= drafted", "row <= drafted"),
    "one list's keys": ("accept", "keys[i] = is ?", "keys[i] = is && rank != RANKS - 1 ?"),
    "not to the last rank": ("top_k", "if (warp >= RANKS) return;", "if (warp >= RANKS - 1) return;"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES.keys())
def test_the_check_rejects(gpu, patch):
    rng = fresh()
    with world_of(gpu, EXCHANGED["nano, 2 ranks"]) as world, pytest.raises(AssertionError):
        play(world, rng, rounds=12, patch=patch, limit=5, wide=True)


@pytest.mark.gpu
def test_the_check_rejects_what_an_early_end_leaves(gpu):
    rng, early = fresh(), ("draft_sample", "rows <= 0 || (RANKS == 1 && !wanted)", "rows <= 0 || !wanted")
    with world_of(gpu, EXCHANGED["nano, 2 ranks"]) as world, pytest.raises(AssertionError, match="words are left"):
        play(world, rng, patch=early, limit=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_hundreds_of_requests(gpu, name):
    """accept against the twin, lists as they lie in a rank's inbox: live rows are read, others stay as they are."""
    dims = DIMS[name]
    for rows, first in ((ROWS, 0), (5, 0), (2, 0), (1, 1)):
        rng = fresh()
        target, draft = random_logits(rng, 200)
        before = with_drafts(rng, random_states(rng, 200), draft)
        expected = before.copy()
        for state, logits in zip(expected, target, strict=True):
            if first:
                twin.first(state, logits)
            else:
                twin.accept(state, logits, rows)
        batch = Batch(gpu, before, target, dims.ranks, dims)
        given = [part.get() for part in (batch.values, batch.ids)]
        batch.accept(rows, first)
        found = batch.states()
        expected["log_verified"] = found["log_verified"]
        assert_same(found, expected, before)
        for part, was in zip((batch.values, batch.ids), given, strict=True):
            words = part.get().view(np.uint32)
            assert (words[:, :rows] == NOT_READY).all()
            assert (words[:, rows:] == was[:, rows:].view(np.uint32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_who_comes_first_waits(gpu, name):
    """Samplers that are there before any list has come."""
    rng = fresh()
    with world_of(gpu, DIMS[name]) as world:
        state = random_states(rng, 1)[0]
        target, _ = some_rows(rng, world.dims)
        world.set_states(state)
        world.set_logits(target[:1])
        before = state.copy()
        twin.first(state, target)
        pushes = [world.top_k(place, 1) for place in world.places]
        patient = [(sampling.accept(world.dims), world.accept(place, 1, first=True)[1]) for place in world.places]
        world.run([*pushes, *patient])  # kernels are loaded: that may wait for those that run
        world.set_states(before)
        gpu.cupy.cuda.Device().synchronize()
        for call, stream in zip(patient, emulated.streams(gpu), strict=False):
            world.issue([call], stream=stream)
        time.sleep(2 * QUICK_MS / 1e3)
        assert world.states()["log_rounds"].tolist() == [before["log_rounds"]] * world.dims.ranks
        world.issue(pushes)
        judge(world, state, before, world.wait())


def first_token(world, logits):
    """A request's first token from one row on all ranks, not greedy: what was reported, and the state before."""
    state = random_states(fresh(), 1)[0]
    state["temperature"], state["top_k"], state["top_p"] = 1, 32, 1
    world.set_states(state)
    world.set_logits(logits[None])
    calls = [world.top_k(place, 1) for place in world.places]
    return world.run([*calls, *(world.accept(place, 1, first=True) for place in world.places)]), state


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_every_legal_logit_passes(gpu, name):
    dims = DIMS[name]
    width = dims.ranks * dims.vocab
    largest, least = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    with world_of(gpu, dims) as world:
        for some in ([0.0, -0.0], [-0.0, least, -least, 0.0], [largest, -largest, 1.0], [-largest, -np.inf]):
            logits = fresh().choice(np.array(some, np.float32), width)
            faults, before = first_token(world, logits)
            state = before.copy()
            twin.first(state, logits[None])
            judge(world, state, before, faults)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_what_is_no_logit_is_reported_and_nobody_waits(gpu, name):
    dims = DIMS[name]
    with world_of(gpu, dims) as world:
        for bad, others in ((np.nan, {}), (np.inf, dict.fromkeys(world.places, (NOT_FINITE, "accept", 0)))):
            logits = fresh().standard_normal(dims.ranks * dims.vocab, np.float32)
            logits[dims.vocab + 7] = bad
            assert first_token(world, logits)[0] == {**others, 1: (NOT_FINITE, "top_k", 0)}
            assert world.inboxes.ready_words() == 0
            found = world.states()
            assert len({(*state["log_tokens"][:1], state["tokens"][0], state["done"]) for state in found}) == 1
            assert 0 <= found["tokens"][0, 0] < dims.ranks * dims.vocab


def missing(world, kind, lacking, patch=None):
    """What is reported where one rank's candidates never come, or with a patch of its top_k do not come everywhere."""
    state = random_states(fresh(), 1)[0]
    state["depth_rows"], state["draft_limit"] = 1, 7
    world.set_states(state)
    world.set_logits(np.zeros((1, world.dims.ranks * world.dims.vocab), np.float32))
    depth = 2 if kind == "draft_sample" else None
    for place in world.places:
        if place != lacking or patch is not None:
            world.run([world.top_k(place, 1, depth)], patch if place == lacking else None)
    calls = [
        world.draft_sample(place, 2) if kind == "draft_sample" else world.accept(place, 1, first=True)
        for place in world.places
    ]
    built(calls[0][0], world.gpu.device.arch)  # which takes longer than they do
    begun = time.monotonic()
    found = world.run(calls)
    assert time.monotonic() - begun < 1 + world.dims.ranks * 10 * QUICK_MS / 1e3
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["accept", "draft_sample"])
@pytest.mark.parametrize("name", DIMS)
def test_a_missing_rank_is_named(gpu, name, kind):
    dims = DIMS[name]
    for lacking in (0, dims.ranks - 1):
        with world_of(gpu, dims) as world:
            assert missing(world, kind, lacking) == dict.fromkeys(world.places, (PEER_FAULT, kind, lacking))
    with world_of(gpu, dims) as world:
        assert missing(world, kind, None) == {}


@pytest.mark.gpu
def test_one_push_that_is_missing_is_named(gpu):
    dims = DIMS["8 ranks"]
    with world_of(gpu, dims) as world:
        skips = ("top_k", "if (warp >= RANKS) return;", "if (warp >= RANKS || warp == 6) return;")
        assert missing(world, "accept", 3, skips) == {6: (PEER_FAULT, "accept", 3)}


@pytest.mark.gpu
def test_speed(gpu):
    """Prints what a round's sampling costs with lists of one rank and of several, in chains of eight launches."""
    rng = fresh()
    for ranks in (1, 2, 8):
        dims = replace(RELEASED, ranks=ranks)
        with world_of(gpu, dims) as world:
            state = random_states(rng, 1)[0]
            state["temperature"], state["top_k"], state["top_p"], state["draft_limit"] = 1, 20, 0.95, 7
            state["auto_depth"], state["depth_rows"], state["done"] = 1, 1, 10
            state["q_count"], state["q_ids"], state["q_probs"] = 1, -1, 0  # of drafts that nobody has drawn here
            state["q_ids"][:, 0], state["q_probs"][:, 0], state["tokens"] = 5, 1, 5
            state["served"], state["entropy"] = 0.9, 0.1
            world.set_states(state)
            world.set_logits(rng.standard_normal((ROWS, ranks * dims.vocab), np.float32) * 3)
            for place in world.places:
                world.mirror(place).taken = 10
            some = [place % ranks for place in range(8)]
            for told in (False, True) if ranks > 1 else (False,):
                tops = [world.top_k(place, ROWS, told=told) for place in some]
                accepts = [world.accept(place, ROWS, told=told) for place in some]
                draws = [world.draft_sample(place, 4) for place in some]
                singles = [world.top_k(place, 1) for place in some]
                for _, args in draws:
                    args.live = 0
                alone, single = (gpu.median_us(calls, copies=8) for calls in (tops, singles))
                each = [call for i in range(0, 8, ranks) for call in (*tops[i : i + ranks], *accepts[i : i + ranks])]
                both = gpu.median_us(each, copies=8)
                each = [call for i in range(0, 8, ranks) for call in (*singles[i : i + ranks], *draws[i : i + ranks])]
                drawn = gpu.median_us(each, copies=8)
                assert world.wait() == {}
                print(
                    f"\n{ranks} ranks{', statuses' * told}: top_k of 8 rows {alone[0] / 8:.2f} us, of 1 row "
                    f"{single[0] / 8:.2f}, accept {(both[0] - alone[0]) / 8:.2f}, "
                    f"draft_sample {(drawn[0] - single[0]) / 8:.2f} (10th to 90th of 8: {both[1]}, {drawn[1]})"
                )
