"""The reference's operations against float64 loops and closed forms, and their independence of the row count."""

import math

import numpy as np
import pytest

from cuq1.reference import ops
from cuq1.reference.cache import FullCache, RingCache, ring_slots

RNG = np.random.default_rng()


def normal(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def test_rms_norm_by_hand():
    x = np.array([[3.0, 4.0]], np.float32)  # mean square 12.5
    got = ops.rms_norm(x, np.array([1.0, 2.0], np.float32), 0.0)
    assert got[0] == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)], rel=1e-6)
    zero = ops.rms_norm(np.zeros((1, 4), np.float32), np.ones(4, np.float32), 1e-6)
    assert (zero == 0).all()  # an all-zero row is not 0 / 0


def test_silu_closed_form():
    x = np.array([-200.0, -88, -1, 0, 1, 200], np.float32)
    expected = [v / (1 + math.exp(-v)) if v > -700 else 0.0 for v in x.tolist()]
    assert ops.silu(x) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_rope_rotates_split_half_pairs():
    x = normal(3, 2, 10)
    positions = np.array([0, 5, 1000])
    cos, sin = ops.rope_tables(positions, 10_000.0, 6)
    got = ops.apply_rope(x, cos, sin)
    for row, position in enumerate(positions.tolist()):
        for i in range(3):
            angle = position * 10_000.0 ** (-2 * i / 6)
            a, b = x[row, :, i].astype(float), x[row, :, i + 3].astype(float)
            assert got[row, :, i] == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-5)
            assert got[row, :, i + 3] == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=1e-5)
    assert (got[..., 6:] == x[..., 6:]).all()
    assert (got[0] == x[0]).all()


def test_rope_scores_depend_on_distance_alone():
    q, k = normal(1, 1, 8), normal(1, 1, 8)

    def score(i, j):
        a = ops.apply_rope(q, *ops.rope_tables(np.array([i]), 1e4, 8))
        b = ops.apply_rope(k, *ops.rope_tables(np.array([j]), 1e4, 8))
        return float((a * b).sum())

    assert score(107, 100) == pytest.approx(score(7, 0), abs=1e-4)
    assert abs(score(108, 100) - score(7, 0)) > 1e-4


def test_route_ties_take_the_lower_index():
    logits = np.array([[1, 5, 5, 0, 5, 2]], np.float32)
    ids, weights = ops.route(logits, 3)
    assert ids.tolist() == [[1, 2, 4]]
    assert weights[0] == pytest.approx([1 / 3] * 3)
    ids, weights = ops.route(np.log(np.array([[1.0, 3.0, 2.0]], np.float32)), 2)
    assert ids.tolist() == [[1, 2]]
    assert weights[0] == pytest.approx([0.6, 0.4], rel=1e-5)


def naive_attention(q, k, v, sink, start, window, scale):
    """float64, one query, head and key at a time; k, v: [positions, kv_heads, dim]."""
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros(q.shape)
    for row in range(rows):
        i = start + row
        for head in range(heads):
            kv = head // group
            query = q[row, head].astype(float)
            total = weight = math.exp(scale * float(query @ sink[kv].astype(float)))
            mixed = np.zeros(dim)
            for j in range(i + 1):
                if window is not None and i - j >= window:
                    continue
                weight = math.exp(scale * float(query @ k[j, kv].astype(float)))
                total += weight
                mixed += weight * v[j, kv].astype(float)
            out[row, head] = mixed / total
    return out


def cached_attention(q, k, v, sink, start, window, scale, cache):
    """Write all positions in order, then attend, as a layer does."""
    rows = len(q)
    for position in range(start):
        cache.write(position, k[position : position + 1], v[position : position + 1])
    cache.write(start, k[start : start + rows], v[start : start + rows])
    first = 0 if window is None else max(0, start - window + 1)
    keys, values, k_start = cache.read(first, start + rows - 1)
    return ops.attention(q, keys, values, sink, start + np.arange(rows), k_start, window, scale)


@pytest.mark.parametrize("window", [None, 1, 7, 63, 64, 65, 130])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 8), (6, 3), (62, 8), (129, 5), (200, 8)])
def test_attention_matches_a_naive_sum(window, start, rows):
    heads, kv_heads, dim = 6, 2, 16
    q, sink = normal(rows, heads, dim), normal(kv_heads, dim)
    k, v = normal(start + rows, kv_heads, dim), normal(start + rows, kv_heads, dim)
    cache = FullCache(kv_heads, dim, 256) if window is None else RingCache(kv_heads, dim, window)
    got = cached_attention(q, k, v, sink, start, window, 0.3, cache)
    expected = naive_attention(q, k, v, sink, start, window, 0.3)
    assert np.abs(got - expected).max() < 2e-5
    # Controls: one key more or less, and a sink that was rotated away, are far outside the tolerance.
    if window is not None and start + 1 > window:
        for other in {window - 1, window + 1} - {0}:
            assert np.abs(got - naive_attention(q, k, v, sink, start, other, 0.3)).max() > 1e-3
    assert np.abs(got - naive_attention(q, k, v, -sink, start, window, 0.3)).max() > 1e-3


@pytest.mark.parametrize("window", [1, 24, 57, 64, 256])
def test_ring_slack_keeps_what_eight_rows_still_need(window):
    heads, kv_heads, dim = 4, 2, 8
    start = 3 * window + 61  # wrapped, and not on a tile
    q, sink = normal(8, heads, dim), normal(kv_heads, dim)
    k, v = normal(start + 8, kv_heads, dim), normal(start + 8, kv_heads, dim)
    expected = naive_attention(q, k, v, sink, start, window, 0.5)
    got = cached_attention(q, k, v, sink, start, window, 0.5, RingCache(kv_heads, dim, window))
    assert np.abs(got - expected).max() < 2e-5
    # Control: the article's defect, a ring without slack, whose later rows overwrite what the first ones read.
    tight = cached_attention(q, k, v, sink, start, window, 0.5, RingCache(kv_heads, dim, window, slots=window))
    wrong = np.abs(tight - expected).max(axis=(1, 2)) > 1e-3
    assert wrong[:7].all()
    assert not wrong[7]


def test_ring_slots_of_the_released_model():
    assert ring_slots(4096) == 4160
    assert ring_slots(512) == 576


SHAPES = [(256, 1536), (1536, 256), (256, 256), (128, 256), (64, 256), (256, 4096), (512, 256), (256, 32), (96, 40)]


def invariant(function, rows):
    """Whether each row of function(x) has the same bits alone, and in any company, as among all rows."""
    x = function.inputs(rows)
    whole = function(x)
    for size in (1, 2, 3, 5, 7, 8, 9):
        for first in range(0, rows - size + 1, 3):
            if not np.array_equal(function(x[first : first + size]), whole[first : first + size]):
                return False
    return True


class Rows:
    def __init__(self, width, call):
        self.width, self.call = width, call

    def inputs(self, rows):
        return normal(rows, self.width)

    def __call__(self, x):
        return self.call(x)


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_linear_does_not_depend_on_the_row_count(width, out):
    weight = normal(out, width)
    assert invariant(Rows(width, lambda x: ops.linear(x, weight)), 21)
    assert ops.linear(normal(5, width), weight).shape == (5, out)
    x = normal(11, width)
    assert ops.linear(x, weight) == pytest.approx(x.astype(float) @ weight.T.astype(float), abs=1e-3)


def test_tiles_of_one_row_compute_the_same_up_to_rounding():
    """What the draft uses; its bits may differ from a tile of eight, never with the company."""
    weight, x = normal(256, 512), normal(9, 512)
    assert invariant(Rows(512, lambda rows: ops.linear(rows, weight, 1)), 9)
    assert ops.linear(x, weight, 1) == pytest.approx(ops.linear(x, weight), abs=1e-3)
    q, sink = normal(1, 6, 16), normal(2, 16)
    k, v = normal(2, 3, ops.TILE_KEYS, 16), normal(2, 3, ops.TILE_KEYS, 16)
    arguments = (q, k, v, sink, np.array([150]), 0, 70, 0.3)
    assert ops.attention(*arguments, 1) == pytest.approx(ops.attention(*arguments), abs=1e-5)


def test_row_check_rejects_a_row_that_sees_its_company():
    weight = normal(64, 128)
    shifted = Rows(128, lambda x: ops.linear(x, weight) + np.float32(1e-7) * np.float32(len(x)))
    assert not invariant(shifted, 21)


def test_norm_and_route_do_not_depend_on_the_row_count():
    weight = normal(256)
    assert invariant(Rows(256, lambda x: ops.rms_norm(x, weight, 1e-6)), 21)
    assert invariant(Rows(32, lambda x: ops.route(x, 8)[1]), 21)
    assert invariant(Rows(256, ops.silu), 21)


@pytest.mark.parametrize("window", [None, 100])
def test_attention_does_not_depend_on_the_row_count(window):
    heads, kv_heads, dim, end = 6, 2, 128, 331
    sink, q = normal(kv_heads, dim), normal(8, heads, dim)
    k, v = normal(end, kv_heads, dim), normal(end, kv_heads, dim)
    start = end - 8

    def rows(first, count):
        cache = FullCache(kv_heads, dim, end) if window is None else RingCache(kv_heads, dim, window)
        kv = slice(0, start + first + count)
        return cached_attention(q[first : first + count], k[kv], v[kv], sink, start + first, window, 0.1, cache)

    whole = rows(0, 8)
    for first, count in [(0, 1), (0, 3), (2, 4), (5, 3), (7, 1), (1, 7)]:
        assert np.array_equal(rows(first, count), whole[first : first + count])
