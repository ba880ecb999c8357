"""What ranks tell each other beside candidates, emulated on one GPU: all chains end, pause or go on together."""

from ctypes import sizeof
from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda import abi
from cuq1.cuda.abi import ControlArgs, RearmArgs
from cuq1.cuda.graph import capture, synchronize
from cuq1.cuda.kernels import control as family
from cuq1.cuda.kernels import exchange
from cuq1.cuda.log import ResultLog, decided
from cuq1.plan.dims import DRAFT, ROWS
from tests.kernels.shapes import EXCHANGED, RELEASED
from tests.kernels.test_exchange_sampling import PEER_FAULT, World, built, fresh
from tests.kernels.test_sampling_kernels import random_states
from tests.kernels.twins import control as twin

DIMS = {"8 ranks": replace(RELEASED, ranks=8, vocab=40, vocab_total=320), "2 ranks": EXCHANGED["nano, 2 ranks"]}
DONE, ROOM = 1000, 64
BEHIND = DONE + 2 * ROWS - ROOM - 1  # the most that a reader has taken who is too far behind
NOT_FINITE = abi.constant("FAULT_NOT_FINITE")


class Chains(World):
    """Of each rank also a log, and a graph that its control launches next, which leaves a mark."""

    def __init__(self, gpu, dims, written):
        super().__init__(gpu, dims)
        self.marks = gpu.cupy.zeros((dims.ranks, 4), np.uint32)
        self.log = gpu.cupy.zeros((dims.ranks, abi.LOG_RECORDS * sizeof(abi.Record)), np.uint8)
        marking = [(exchange.rearm(), RearmArgs(0, 0, 0, 0, self.at(self.marks, place), 1)) for place in self.places]
        self.graphs = [self.captured(call) for call in marking]
        self.readers = [ResultLog(self.mirror(place)) for place in self.places]
        self.loops = [abi.Loop() for _ in self.places]
        for loop, graph, reader in zip(self.loops, self.graphs, self.readers, strict=True):
            loop.graphs[:] = [graph.handle] * abi.GRAPHS
            loop.stops[:] = [-1] * abi.MAX_STOPS
            loop.short_context, loop.budget, loop.room, loop.written = 4096, 100, ROOM, written
            reader.read = written
        for place in self.places:
            self.mirror(place).taken, self.mirror(place).read = DONE, written
        self.loop[:] = gpu.array(np.stack([np.frombuffer(bytes(loop), np.uint8) for loop in self.loops]))
        state = random_states(fresh(), 1)[0]
        state["done"], state["draft_limit"], state["auto_depth"], state["temperature"] = DONE, 0, 0, 0
        self.set_states(state)
        self.set_logits(fresh().standard_normal((1, dims.ranks * dims.vocab), np.float32))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for graph in self.graphs:
            graph.close()
        self.close()

    def captured(self, call, patch=None):
        """A graph of one launch, which kernels may launch."""
        built(call[0], self.gpu.device.arch, tuple(patch[1:]) if patch and patch[0] == call[0].entry else None)
        with capture(self.gpu.stream) as found:
            self.issue([call], patch)
        graph = found.instantiate(device=True)
        graph.upload(self.gpu.stream)
        synchronize(self.gpu.stream)
        return graph

    def reported(self):
        return [fault.view().what for fault in self.faults]

    def tell(self, patch=None, silent=None):
        """The first token's candidates and statuses of all ranks; of `silent` no status. What each makes of them."""
        calls = [self.top_k(place, 1, told=place != silent) for place in self.places]
        calls += [self.accept(place, 1, first=True, told=True) for place in self.places]
        self.gpu.cupy.cuda.Device().synchronize()
        self.issue(calls, patch)
        synchronize(self.gpu.stream)  # faults are left as they are: they are what is told
        return [tuple(abi.Loop.from_buffer_copy(loop.tobytes()).agreed[:3]) for loop in self.loop.get()]

    def end(self, patch=None):
        """What each rank's control makes of it: its record, and whether it launched another graph."""
        self.gpu.cupy.cuda.Device().synchronize()
        for place in self.places:
            where = (self.at(array, place) for array in (self.state, self.loop, self.log))
            args = ControlArgs(self.faults[place].address, 0, DRAFT, ROWS, *where, self.mirrors[place].address, 0, 1)
            with self.captured((family.control(self.dims), args), patch) as graph:
                graph.launch(self.gpu.stream)
                synchronize(self.gpu.stream)
        return [reader.next() for reader in self.readers], self.marks.get().any(axis=1).tolist()

    def expected(self, place, agreed):
        """The twin's record."""
        state = abi.State.from_buffer_copy(self.state.get()[place].tobytes())
        mirror = abi.Mirror.from_buffer_copy(bytes(self.mirror(place)))
        return twin.decide(self.loops[place], state, mirror, 0, self.reported()[place], agreed=agreed)[1]


def check(gpu, name, reason, change=None, *, late=None, patch=None, written=7):
    """All ranks end for `reason`, or go on. change, late: of (world, place), done to the last rank before and after it
    tells the others."""
    with Chains(gpu, DIMS[name], written % (1 << 32)) as world:
        last = world.places[-1]
        if change is not None:
            change(world, last)
        agreed = twin.agree([world.mirror(place) for place in world.places], world.reported())
        assert world.tell(patch) == [agreed] * world.dims.ranks
        assert world.inboxes.ready_words() == 0
        if late is not None:
            late(world, last)
        records, launched = world.end(patch)
        assert [record.reason for record in records] == [reason] * world.dims.ranks
        assert launched == [reason == abi.END_NONE] * world.dims.ranks
        assert len({decided(record) for record in records}) == 1
        assert decided(records[0]) == decided(world.expected(0, agreed))


def cancel(world, place):
    world.mirror(place).cancel = 1


def slow(world, place):
    world.mirror(place).taken = BEHIND


def unread(count):
    def change(world, place):
        world.mirror(place).read = (world.loops[place].written - count) % (1 << 32)

    return change


def fault(what):
    def change(world, place):
        world.faults[place].view().what = what

    return change


def all_of(*changes):
    def change(world, place):
        for one in changes:
            one(world, place)

    return change


FULL = abi.LOG_RECORDS - 1  # unread records that leave no room for another beyond the next
CASES = {
    "nothing": (abi.END_NONE, None),
    "cancelled": (abi.END_CANCELLED, cancel),
    "a slow reader": (abi.END_PAUSED, slow),
    "a full log": (abi.END_PAUSED, unread(FULL)),
    "almost a full log": (abi.END_NONE, unread(FULL - 1)),
    "a fault": (abi.END_FAULT, fault(NOT_FINITE)),
    "a fault that is being reported": (abi.END_FAULT, fault(-1)),
    "cancelled and slow": (abi.END_CANCELLED, all_of(cancel, slow)),
    "all": (abi.END_FAULT, all_of(cancel, slow, unread(FULL), fault(NOT_FINITE))),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DIMS)
def test_what_the_last_rank_says_holds_for_all(gpu, name, case):
    check(gpu, name, *CASES[case])


@pytest.mark.gpu
@pytest.mark.parametrize("written", [0, 3, (1 << 31) - 1, (1 << 31) + 100, (1 << 32) - 1])
def test_counts_of_records_wrap(gpu, written):
    for count, reason in ((FULL, abi.END_PAUSED), (FULL - 1, abi.END_NONE)):
        check(gpu, "2 ranks", reason, unread(count), written=written)


@pytest.mark.gpu
def test_what_comes_too_late_is_for_the_next_round(gpu):
    check(gpu, "2 ranks", abi.END_NONE, late=all_of(cancel, slow, unread(FULL), fault(NOT_FINITE)))


@pytest.mark.gpu
def test_a_rank_that_misses_its_peer_ends_alone(gpu):
    with Chains(gpu, DIMS["2 ranks"], 7) as world:
        world.tell()
        world.faults[1].view().what = PEER_FAULT
        records, launched = world.end()
        assert [record.reason for record in records] == [abi.END_NONE, abi.END_FAULT]
        assert launched == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_a_rank_that_says_nothing_is_named(gpu, name):
    with Chains(gpu, DIMS[name], 7) as world:
        silent = world.dims.ranks - 1
        agreed = world.tell(silent=silent)
        assert {ended for ended, _, _ in agreed} == {3}
        for place in world.places:
            found = world.faults[place].read()
            assert (found.what, abi.KERNELS[found.kernel], found.detail) == (PEER_FAULT, "accept", silent)
        records, _ = world.end()
        assert {record.reason for record in records} == {abi.END_FAULT}


PATCHES = {
    "cancel of its own": (
        "cancelled",
        "control",
        "const int cancel = ended & 1,",
        "const int cancel = a.mirror->cancel,",
    ),
    "fault of its own": ("a fault", "control", "broken = ended > 1 ||", "broken = fault != 0 ||"),
    "a fault is not told": ("a fault", "top_k", "(fault != FAULT_NONE ? 2 : 0)", "0"),
    "a cancellation is not told": ("cancelled", "top_k", "(cancel != 0 ? 1 : 0)", "0"),
    "taken of the first rank": ("a slow reader", "accept", "kind == STATUS_TAKEN ? x", "lane == STATUS_TAKEN ? x"),
    "read of the first rank": ("a full log", "accept", "(one + least) & MOST", "one"),
    "ended of the first rank": ("cancelled", "accept", "kind == STATUS_ENDED ?", "lane == STATUS_ENDED ?"),
    "statuses are left": ("nothing", "accept", "if (mine) make_unready(a.statuses + lane);", ""),
}


@pytest.mark.gpu
@pytest.mark.parametrize("patch", PATCHES)
def test_the_check_rejects(gpu, patch):
    case, *broken = PATCHES[patch]
    with pytest.raises(AssertionError):
        check(gpu, "2 ranks", *CASES[case], patch=broken)
