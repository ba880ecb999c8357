"""The draft's entry among ranks, emulated on one GPU: eh_proj's columns in every rank's inbox, and qkv's polls."""

import time
from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda.kernels import draft, projections
from cuq1.cuda.repack import f16_tiles
from cuq1.plan.dims import ROWS
from tests.kernels import emulated
from tests.kernels.emulated import NOT_READY
from tests.kernels.shapes import EXCHANGED
from tests.kernels.test_draft import TOKENS, TOLERANCE, inputs_of
from tests.kernels.test_exchange_sampling import NOT_FINITE, PEER_FAULT, World, built, fresh, quick
from tests.kernels.test_projections import Qkv
from tests.kernels.twins import draft as twin

DIMS = {name: replace(dims, vocab_total=TOKENS) for name, dims in EXCHANGED.items()}
TURN = 4


class Entry(World):
    """Inputs and weights of all ranks' eh_proj, and a draft layer's qkv, the same on all ranks."""

    def __init__(self, gpu, dims, rng):
        super().__init__(gpu, dims)
        self.rng, self.whole_rows = rng, dims.ranks * dims.eh_rows
        self.splits = draft.eh_splits(dims)
        self.kernel = draft.eh_proj(dims)
        self.weight = (rng.standard_normal((self.whole_rows, 2 * dims.hidden)) * 0.02).astype(np.float16)
        shares = self.weight.reshape(dims.ranks, dims.eh_rows, -1)
        self.weights = [gpu.array(f16_tiles(share)) for share in shares]
        self.layer = Qkv(gpu, dims, rng)
        self.norm = gpu.array(rng.uniform(0.5, 1.5, dims.hidden).astype(np.float32))
        self.positions = gpu.array(int(rng.integers(4000)) + np.arange(ROWS, dtype=np.int32))
        self.live_rows = gpu.cupy.zeros(1, np.int32)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def prepare(self, count, rows):
        """Inputs of `count` live rows of `rows`."""
        self.count, self.rows = count, rows
        self.x = inputs_of(self.rng, self.dims, count)
        self.arrays = {name: self.gpu.array(value) for name, value in self.x.items()}
        self.live_rows[:] = count
        self.inboxes.memory[:] = NOT_READY

    def eh(self, place):
        args = self.kernel.args(
            fault=self.faults[place].address, live=self.live_rows.data.ptr, rows=self.rows, layer=-1,
            first_row=place * self.dims.eh_rows, weights=self.weights[place].data.ptr,
            out=self.inboxes.whole(place, "eh", TURN), peers=self.inboxes.peers(place),
        )  # fmt: skip
        for name, array in self.arrays.items():
            setattr(args, name, array.data.ptr)
        return self.kernel, args

    def qkv(self, place, pieces=None):
        """The launch and its results q, k, v, residual; pieces: of one rank, in a buffer of its own."""
        results = [*self.layer.buffers(), self.gpu.poison((ROWS, self.dims.hidden), np.float32)]
        args = self.layer.args(self.norm, self.positions, *results[:3], self.rows, self.live_rows)
        args.fault, args.normed, args.layer = self.faults[place].address, 0, -1
        args.norm, args.residual, args.entry_scale = self.norm.data.ptr, results[3].data.ptr, 1.0
        args.pieces = self.inboxes.whole(place, "eh", TURN) if pieces is None else pieces.data.ptr
        args.polled = int(pieces is None)
        dims = self.dims if pieces is None else replace(self.dims, ranks=1)
        return (projections.qkv(dims, pieces=self.splits), args), results

    def pieces(self):
        """uint32 [owner, splits, ROWS, hidden]."""
        first = self.inboxes.inboxes[0].whole("eh", TURN).offset // 4
        words = self.inboxes.memory.get()[:, first : first + self.splits * ROWS * self.dims.hidden]
        return words.reshape(self.dims.ranks, self.splits, ROWS, self.dims.hidden)

    def judge_pieces(self):
        found = self.pieces()
        assert (found == found[:1]).all(), "ranks differ"
        ready = np.zeros(found.shape[1:], bool)
        ready[:, : self.count, : self.whole_rows] = True
        assert ((found[0] != NOT_READY) == ready).all(), "not all that was to come came, or more"
        assert self.inboxes.ready_words() == self.dims.ranks * ready.sum(), "written elsewhere"
        if self.count:
            live = {name: v[: self.count] if name in ("tokens", "hidden_rows") else v for name, v in self.x.items()}
            expected = twin.eh_proj(twin.operand(**live, eps=self.dims.eps), self.weight)
            got = found[0, :, : self.count, : self.whole_rows].view(np.float32).astype(np.float64).sum(axis=0)
            errors = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert errors.max() <= TOLERANCE, f"relative errors {errors}"

    def expected(self):
        """What qkv of one rank makes of the same pieces; what does not come is zero."""
        pieces = self.pieces()[0].copy()
        pieces[pieces == NOT_READY] = 0
        call, results = self.qkv(0, self.gpu.array(pieces.view(np.float32)))
        assert self.run([call]) == {}
        return [x.get() for x in results]

    def judge(self, results):
        expected = self.expected()
        for place, found in zip(self.places, results, strict=True):
            for name, x, y in zip(("q", "k", "v", "residual"), found, expected, strict=True):
                same = x.get().view(np.uint8) == y.view(np.uint8)
                assert same.all(), f"{name} of rank {place}: {(~same).sum()} bytes differ"


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_columns_of_all_ranks_meet(gpu, name):
    with Entry(gpu, DIMS[name], fresh()) as world:
        for count, rows in ((1, 1), (2, 8), (5, 5), (8, 8), (3, 8), (0, 8)):
            world.prepare(count, rows)
            calls, results = zip(*map(world.qkv, world.places), strict=True)
            assert world.run([*map(world.eh, world.places), *calls]) == {}
            world.judge_pieces()
            world.judge(results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_qkv_waits_for_its_peers(gpu, name):
    with Entry(gpu, DIMS[name], fresh()) as world:
        for attempt in range(2):  # the first one loads the kernels
            world.prepare(5, 8)
            calls, results = zip(*map(world.qkv, world.places[:1]), strict=True)  # which leaves room for the others
            pushes = [world.eh(place) for place in world.places]
            gpu.cupy.cuda.Device().synchronize()
            if attempt == 0:
                world.issue([*pushes, *calls])
            else:
                for call, stream in zip(calls, emulated.streams(gpu), strict=False):
                    world.issue([call], stream=stream)
                time.sleep(0.05)
                world.issue(pushes)
            assert world.wait() == {}
        expected = world.expected()
        for found in results:
            for x, y in zip(found, expected, strict=True):
                assert np.array_equal(x.get(), y, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_a_missing_rank_is_named(gpu, name):
    with Entry(gpu, DIMS[name], fresh()) as world:
        for lacking in (0, world.dims.ranks - 1):
            world.prepare(3, 8)
            calls = [(quick(kernel), args) for (kernel, args), _ in map(world.qkv, world.places)]
            pushes = [world.eh(place) for place in world.places if place != lacking]
            for kernel, _ in (pushes[0], calls[0]):
                built(kernel, gpu.device.arch)
            begun = time.monotonic()
            found = world.run([*pushes, *calls])
            assert time.monotonic() - begun < 4
            assert found == dict.fromkeys(world.places, (PEER_FAULT, "qkv", lacking))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", DIMS)
def test_what_is_not_finite_is_reported_and_nobody_waits(gpu, name, bad):
    with Entry(gpu, DIMS[name], fresh()) as world:
        world.prepare(2, 8)
        world.x["hidden"][:, 5] = bad
        world.arrays["hidden"][:] = gpu.array(world.x["hidden"])
        calls = [(quick(kernel), args) for (kernel, args), _ in map(world.qkv, world.places)]
        assert world.run([*map(world.eh, world.places), *calls]) == dict.fromkeys(
            world.places, (NOT_FINITE, "eh_proj", 0)
        )
        assert (world.pieces()[:, :, :2, : world.whole_rows] != NOT_READY).all()


@pytest.mark.gpu
def test_opposite_infinities_are_reported(gpu):
    with Entry(gpu, DIMS["nano, 2 ranks"], fresh()) as world:
        world.prepare(2, 8)
        assert world.run(list(map(world.eh, world.places))) == {}
        first = world.inboxes.inboxes[0].whole("eh", TURN).offset // 4
        for piece, value in enumerate((np.inf, -np.inf)):
            world.inboxes.memory[:, first + piece * ROWS * world.dims.hidden] = np.float32(value).view(np.uint32).item()
        found = world.run([(quick(kernel), args) for (kernel, args), _ in map(world.qkv, world.places)])
        assert set(found) == set(world.places)
        assert {(what, kernel) for what, kernel, _ in found.values()} <= {(NOT_FINITE, "eh_proj"), (NOT_FINITE, "qkv")}


def broken(world, patch):
    world.prepare(5, 8)
    calls, results = zip(*map(world.qkv, world.places), strict=True)
    calls = [(quick(kernel), args) for kernel, args in calls]
    assert world.run([*map(world.eh, world.places), *calls], patch) == {}
    world.judge_pieces()
    world.judge(results)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("eh_proj", "peers.push(to, out);", "*to = out;"),
        ("eh_proj", "a.first_row + tile", "tile"),
        ("eh_proj", "if (row >= rows) return;", "if (row >= ROWS) return;"),
        ("qkv", "return token < (a.live != nullptr ? min_int(live, a.rows) : a.rows)", "return token < a.rows"),
        ("qkv", "x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);", "x[j].x += 1.0f;"),
        ("qkv", "/ EH_ROWS < RANKS", "/ EH_ROWS < RANKS + 1"),
    ],
    ids=[
        "to itself only",
        "another's columns",
        "dead rows",
        "polls dead rows",
        "what does not come",
        "of who is not there",
    ],
)
def test_the_check_rejects(gpu, patch):
    with Entry(gpu, DIMS["released, 2 ranks"], fresh()) as world:
        broken(world, None)
        with pytest.raises(AssertionError):
            broken(world, patch)


@pytest.mark.gpu
def test_speed(gpu):
    """Prints microseconds of eh_proj and of the draft's qkv, of one rank and of several, where all pieces are there."""
    rng = fresh()
    for name in ("released, 8 ranks", "released, 2 ranks"):
        with Entry(gpu, DIMS[name], rng) as world:
            for rows in (1, 8):
                world.prepare(rows, rows)
                pushes = [world.eh(0) for _ in range(8)]
                held = [gpu.array(f16_tiles(world.weight[: world.dims.eh_rows])) for _ in pushes]
                for (_, args), weights in zip(pushes, held, strict=True):
                    args.weights = weights.data.ptr
                alone = [(draft.eh_proj(replace(world.dims, ranks=1)), args) for _, args in pushes]
                pieces = gpu.array(rng.standard_normal((world.splits, ROWS, world.dims.hidden), np.float32))
                own = [world.qkv(0, pieces) for _ in range(8)]
                world.run([world.eh(place) for place in world.places])
                polled = [world.qkv(0) for _ in range(8)]
                chains = {"eh_proj": (alone, pushes), "qkv": ([call for call, _ in own], [call for call, _ in polled])}
                for kernel, (one, several) in chains.items():
                    (a, low), (b, high) = (gpu.median_us(calls) for calls in (one, several))
                    print(f"\n{name}, {rows} rows: {kernel} {a / 8:.2f} us alone, {b / 8:.2f} pushed or polled", end="")
                    print(f" (10th to 90th of 8: {low}, {high})")
                assert world.wait() == {}
