"""attention with combine, and attention_short, against float64 softmax over the positions that each row sees."""

from functools import cache

import numpy as np
import pytest

from cuq1.cuda.abi import AttentionArgs, CombineArgs, ShortAttentionArgs
from cuq1.cuda.kernels import attention as family
from cuq1.errors import DeviceError
from cuq1.plan.dims import HEAD_DIM, KV_TILE, ROWS
from tests.kernels.shapes import DIMS, NANO, RELEASED
from tests.kernels.twins import attention as twin

TOLERANCE = 4e-4  # probabilities reach the tensor cores as halves
GARBAGE = 60000.0  # what slots that nothing was written to hold: large, but finite
WINDOWS = {"released": (4096, 512), "nano": (256, 64), "nano2": (256, 64)}


@cache
def history(kv_heads, count):
    """Random keys and values float16 [kv_heads, count, 128] of positions 0 onwards; keys differ in length."""
    rng = np.random.default_rng(count)
    keys = rng.standard_normal((kv_heads, count, HEAD_DIM), np.float32) * rng.uniform(0.3, 3, (1, count, 1))
    values = rng.standard_normal((kv_heads, count, HEAD_DIM), np.float32) + np.float32(0.5)
    return keys.astype(np.float16), values.astype(np.float16)


class Case:
    """One pass: what `attention` and `combine` read, and what they should write.

    positions: of the rows, dead ones included; live: rows to compute, None for all; capacity: slots beyond what
    positions need, where the cache is not a ring; rows: the first of `positions` alone, the others being settled only.
    """

    def __init__(self, gpu, dims, window, positions, live=None, capacity=0, splits=None, rows=None):
        self.gpu, self.dims, self.window, self.live = gpu, dims, window, live
        self.seed = int(np.random.default_rng().integers(1 << 31))
        rng = np.random.default_rng(self.seed)
        self.written = len(positions)
        self.rows = self.written if rows is None else rows
        self.computed = self.rows if live is None else min(self.rows, live)
        self.positions = np.full(ROWS, 1 << 28, np.int32)
        self.positions[: self.written] = positions
        newest = int(self.positions[: self.written if live is None else min(self.written, live)].max(initial=0))
        # A pass writes all of its positions before attention reads any, also those that lie above a row's own.
        self.slots = window + KV_TILE if window else (newest // KV_TILE + 1) * KV_TILE + capacity
        self.splits = family.splits_for(dims) if splits is None else splits
        self.keys, self.values = history(dims.kv_heads, newest + 1)
        self.q = rng.standard_normal((ROWS, dims.q_heads, HEAD_DIM), np.float32).astype(np.float16)
        self.q[self.computed :] = np.nan
        self.sink = rng.standard_normal((dims.kv_heads, HEAD_DIM), np.float32) * np.float32(0.8)
        self.scale = HEAD_DIM**-0.5

    def expected(self):
        """Of the live rows: float64 [rows, q_heads * 128]."""
        alive = self.positions[: self.computed]
        start = max(0, int(alive.min()) - self.window - 100) if self.window else 0
        labels = np.arange(start, self.keys.shape[1])
        keys, values = self.keys[:, start:], self.values[:, start:]
        return twin.attended(
            self.q[: self.computed], keys, values, labels, self.sink, alive.tolist(), self.window, self.scale
        )

    def arguments(self):
        gpu, dims = self.gpu, self.dims
        labels = np.arange(self.keys.shape[1])
        ring = self.window > 0
        m = ROWS * dims.group
        statistics = (dims.kv_heads, m, self.splits)
        self.buffers = {
            "q": gpu.array(self.q),
            "k_cache": gpu.array(twin.filled(self.keys, labels, self.slots, ring, GARBAGE)),
            "v_cache": gpu.array(twin.filled(self.values, labels, self.slots, ring, GARBAGE)),
            "positions": gpu.array(self.positions),
            "partial_out": gpu.poison((dims.kv_heads, self.splits, m, HEAD_DIM), np.float32),
            "partial_max": gpu.poison(statistics, np.float32),
            "partial_sum": gpu.poison(statistics, np.float32),
            "sink_k": gpu.array(self.sink),
            "attended32": gpu.poison((ROWS, dims.q_width), np.float32),
            "attended": gpu.poison((ROWS, dims.q_width), np.float16),
            "live": gpu.array(np.array([0 if self.live is None else self.live], np.int32)),
        }
        return [self._filled(kind) for kind in (AttentionArgs, CombineArgs, ShortAttentionArgs)]

    def _filled(self, kind):
        scalars = {
            "fault": self.gpu.fault.address,
            "live": 0 if self.live is None else self.buffers["live"].data.ptr,
            "layer": 3,
            "rows": self.rows,
            "window": self.window,
            "splits": self.splits,
            "scale": self.scale,
            "slots": self.slots,
            "written": self.written,
        }
        args = kind()
        for name, _ in kind._fields_:
            if name in scalars:
                setattr(args, name, scalars[name])
            elif name in self.buffers:
                setattr(args, name, self.buffers[name].data.ptr)
        return args

    def run(self, patch=None, patch_combine=None):
        """Launches attention and combine, and attention_short where the extent allows it; checks what they wrote."""
        self.split(patch, patch_combine)
        if patch is None and patch_combine is None and (self.window > 0 or len(self.keys[0]) <= family.SHORT_CONTEXT):
            self.short()

    def split(self, patch=None, patch_combine=None):
        first, second, _ = self.arguments()
        self.gpu.run(family.attention(self.dims, self.splits), first, patch)
        self.gpu.run(family.combine(self.dims, self.splits), second, patch_combine)
        dead = self.buffers["partial_sum"].get()[:, self.computed * self.dims.group :]
        assert np.isnan(dead).all(), f"a dead row's partials were written: {self.where}"
        self._check()

    def short(self, patch=None, cluster=None):
        args = self.arguments()[2]
        self.gpu.run(family.attention_short(self.dims, self.window, self.rows, cluster), args, patch)
        self._check()

    @property
    def where(self):
        return f"seed {self.seed}, window {self.window}, positions {self.positions[: self.rows].tolist()}"

    def _check(self):
        ours, halves = self.buffers["attended32"].get(), self.buffers["attended"].get()
        for dead in (ours[self.computed :], halves[self.computed :]):
            assert np.isnan(dead).all(), f"a dead row was written: {self.where}"
        if self.computed == 0:
            return
        expected = self.expected()
        for row in range(self.computed):
            error = np.linalg.norm(ours[row] - expected[row]) / np.linalg.norm(expected[row])
            assert error < TOLERANCE, f"row {row}: relative error {error:.3g}, {self.where}"
        np.testing.assert_array_equal(halves[: self.computed], ours[: self.computed].astype(np.float16))


def ascending(first, rows):
    return list(range(first, first + rows))


def around(window):
    """First positions at which something begins or ends, for a layer with this window."""
    slots = window + KV_TILE
    yield from (0, 1, 55, 56, 57, 62, 63, 64, 65, 66)
    if window == 0:
        yield from (127, 1000, 4095, 4096, 4097, 4159, 4160, 4161)
    else:
        edges = (window, slots, 2 * slots, 5 * slots)
        yield from (edge + offset for edge in edges for offset in (-9, -8, -1, 0, 1, 63))


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_full(gpu, name, order):
    for first in around(0):
        rows = ROWS if first % 2 else 6
        positions = ascending(first, rows)
        Case(gpu, DIMS[name], 0, positions if order == "ascending" else positions[::-1]).run()


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_windows(gpu, name, order):
    for window in WINDOWS[name]:
        firsts = list(around(window))
        if window == 4096:
            firsts = [*firsts[::2], 20_000]
        for first in firsts:
            positions = ascending(first, ROWS)
            Case(gpu, DIMS[name], window, positions if order == "ascending" else positions[::-1]).run()


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_up_to_the_last_short_position(gpu, name):
    for rows in (1, 5, ROWS):
        Case(gpu, DIMS[name], 0, ascending(family.SHORT_CONTEXT - rows, rows)).run()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 64, 512])
def test_one_row_after_older_ones(gpu, window):
    """The draft's depth 0: keys and values of several positions are new, the newest alone is computed."""
    for written in (1, 2, 5, ROWS):
        Case(gpu, RELEASED, window, ascending(700, written)[::-1], rows=1).run()


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [8, 16])
@pytest.mark.parametrize("name", DIMS)
def test_clusters(gpu, name, cluster):
    for window in (512, 256, 64):
        for first in (0, 30, window, 3 * window + 60):
            Case(gpu, DIMS[name], window, ascending(first, ROWS)).short(cluster=cluster)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize("window", [0, 256])
def test_rows(gpu, name, window):
    for rows in range(1, ROWS + 1):
        Case(gpu, DIMS[name], window, ascending(1020 + rows, rows)).run()


@pytest.mark.gpu
def test_rows_in_any_order(gpu):
    for positions in ([700, 705, 701, 704], [129, 127, 128, 126, 130], [64, 60, 67, 61, 66, 62, 65, 63]):
        for window in (0, 64, 512):
            Case(gpu, RELEASED, window, positions).run()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 512])
def test_dead_rows(gpu, window):
    for live in (0, 1, 2, 3, 5, 7, 8):
        Case(gpu, RELEASED, window, ascending(900, ROWS), live=live).run()
    Case(gpu, RELEASED, window, ascending(900, 3), live=8).run()


@pytest.mark.gpu
def test_long(gpu):
    Case(gpu, RELEASED, 0, ascending(20_000, ROWS)).run()
    Case(gpu, RELEASED, 0, ascending(20_000, 2), splits=7).run()
    Case(gpu, NANO, 0, ascending(9_000, 5), splits=3).run()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 33])
def test_few_splits(gpu, splits):
    """Any number of splits gives the same: the ring's stages wrap."""
    for window, first in ((0, 1500), (512, 1500), (4096, 9000)):
        Case(gpu, RELEASED, window, ascending(first, ROWS), splits=splits).split()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("window", "first", "attention", "combine"),
    [
        (512, 2000, ("newest - a.window :", "newest - a.window - 1 :"), None),
        (512, 2000, ("newest - a.window :", "newest - a.window + 1 :"), None),
        (0, 300, ("key > newest || ", ""), None),
        (512, 2000, ("share.first % share.slot_units;", "(share.first + 1) % share.slot_units;"), None),
        (0, 300, ("key <= hidden || unit >= share.units", "key <= hidden"), None),
        (0, 300, ("UNIT_BYTES + piece,", "UNIT_BYTES + (piece ^ 16),"), None),
        (0, 300, None, ("warp_sum(total) + exp2f(z - peak)", "warp_sum(total)")),
        (0, 3000, None, ("ROUND + mine < active);", "ROUND + mine < active - 1);")),
    ],
    ids=[
        "window + 1",
        "window - 1",
        "not causal",
        "another slot",
        "a short tile",
        "this pass's rows elsewhere",
        "no sink",
        "a split less",
    ],
)
def test_would_notice(gpu, window, first, attention, combine):
    case = Case(gpu, RELEASED, window, ascending(first, ROWS))
    case.run()
    with pytest.raises((AssertionError, DeviceError)):
        case.run(attention, combine)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("first", "splits", "patch"),
    [
        (2016, 3, ("from, (units - straight)", "from + UNIT_BYTES, (units - straight)")),
        (2016, 3, ("int(blockIdx.x);", "max_int(blockIdx.x, 1);")),
    ],
    ids=["the ring's end in a tile", "no last split"],
)
def test_would_notice_of_shares(gpu, first, splits, patch):
    """A tile in two pieces, and blocks in the opposite order of their splits."""
    case = Case(gpu, RELEASED, 512, ascending(first, ROWS), splits=splits)
    case.split()
    with pytest.raises((AssertionError, DeviceError)):
        case.split(patch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("window", "first", "patch"),
    [
        (512, 2000, ("newest - a.window :", "newest - a.window - 1 :")),
        (512, 2000, ("newest - a.window :", "newest - a.window + 1 :")),
        (0, 300, ("key > newest || ", "")),
        (512, 2000, ("share.first % slot_units;", "(share.first + 1) % slot_units;")),
        (512, 600, ("(i - share.before) * UNIT_BYTES", "(i - share.before + 1) * UNIT_BYTES")),
        (0, 300, ("denominator = exp2f(z - peak)", "denominator = 0.0f")),
        (0, 3000, ("weight[block] = exp2_fast(found[block].x - peak)", "weight[block] = 1.0f")),
        (0, 3000, ("* (8 * ROW_BYTES)", "* (8 * ROW_BYTES - 16)")),
    ],
    ids=["window + 1", "window - 1", "not causal", "another slot", "wrap", "no sink", "no weights", "another row"],
)
def test_would_notice_of_short(gpu, window, first, patch):
    case = Case(gpu, RELEASED, window, ascending(first, ROWS))
    case.short()
    with pytest.raises((AssertionError, DeviceError)):
        case.short(patch)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["split", "short"])
def test_reports_what_is_not_finite(gpu, form):
    case = Case(gpu, RELEASED, 0, ascending(300, 2))
    case.q[1, 2, 5] = np.nan
    with pytest.raises(DeviceError, match="not finite in attention, layer 3"):
        getattr(case, form)()


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "position"), [("split", 5000), ("short", 4000)])
def test_same_bits(gpu, form, position):
    case = Case(gpu, RELEASED, 0, ascending(position, ROWS))
    getattr(case, form)()
    first = case.buffers["attended32"].get()
    for _ in range(10):
        getattr(case, form)()
        np.testing.assert_array_equal(case.buffers["attended32"].get(), first)


@pytest.mark.gpu
def test_capacity_costs_nothing(gpu):
    """The time follows from positions: four times the cache, or thirty-two, changes nothing."""
    times = []
    for capacity in (0, 3 * 16_384, 31 * 16_384):
        case = Case(gpu, RELEASED, 0, ascending(16_380 - ROWS, ROWS), capacity=capacity)
        case.run()
        calls = [(family.attention(RELEASED), case.arguments()[0])]
        times.append(min(gpu.median_us(calls)[0] for _ in range(3)))
    assert max(times) < 1.1 * min(times) + 0.2, times


def test_twin_by_hand():
    q = np.ones((1, 2, 2))
    keys, values = np.array([[[1.0, 0], [2, 0], [3, 0]]]), np.array([[[1.0, 0], [0, 1], [5, 5]]])
    sink = np.array([[0.0, 0]])
    weights = np.exp([1.0, 2.0])
    expected = np.tile(weights / (weights.sum() + 1), 2)
    np.testing.assert_allclose(twin.attended(q, keys, values, [7, 8, 9], sink, [8], 0, 1.0)[0], expected)
    expected = np.tile([0, np.exp(2) / (np.exp(2) + 1)], 2)
    np.testing.assert_allclose(twin.attended(q, keys, values, [7, 8, 9], sink, [8], 1, 1.0)[0], expected)


def test_twin_cache():
    """The whole-array layout equals the one written vector by vector; a ring keeps the newest."""
    vectors = np.random.default_rng(0).standard_normal((2, 300, HEAD_DIM)).astype(np.float16)
    made = twin.filled(vectors, np.arange(300), 128, ring=True, garbage=1.0)
    slow = np.full((2, 2, 64, HEAD_DIM), 1.0, np.float16)
    for position in range(300):
        for head in range(2):
            twin.place(slow, position % 128, head, vectors[head, position])
    np.testing.assert_array_equal(made, slow)


@pytest.mark.parametrize("window", [64, 256, 512, 4096])
def test_units_cover_a_window(window):
    """Eight rows never see more units than the cluster's blocks have room for, and at worst as many."""
    units = [(low + ROWS - 1) // family.UNIT + 1 - max(0, low - window + 1) // family.UNIT for low in range(3 * window)]
    assert max(units) == family.units_for(window)
    room = family.attention_short(RELEASED, window).defines
    assert max(units) <= dict(room)["UNITS"] * dict(room)["CLUSTER"]


def test_units_cover_a_short_context():
    room = dict(family.attention_short(RELEASED, 0).defines)
    assert room["UNITS"] * room["CLUSTER"] * family.UNIT == family.SHORT_CONTEXT
