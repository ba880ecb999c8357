"""The order of packed weights, unpacked element by element as kernels_cu/common/mma.cuh and experts.cuh state it."""

import ml_dtypes
import numpy as np
import pytest

from cuq1.checkpoint import Linear
from cuq1.cuda import repack
from tests.fixtures.unpack import gate_up_of, matrix_of


def random_codes(*shape):
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


def random_halves(*shape):
    return np.random.default_rng(2).standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("make", [random_codes, random_halves])
@pytest.mark.parametrize(("rows", "k"), [(16, 32), (48, 192), (128, 256)])
def test_tiles(make, rows, k):
    matrix = make(rows, k)
    fp8 = matrix.dtype == np.uint8
    packed = repack.tiles(matrix)
    assert packed.shape == (rows // 16, k // (32 if fp8 else 16), 512)
    np.testing.assert_array_equal(matrix_of(packed, fp8=fp8), matrix if fp8 else matrix.view(np.uint16))


@pytest.mark.parametrize("make", [random_codes, random_halves])
def test_a_swapped_half_is_noticed(make):
    """The control: rows g and g + 8 in each other's place."""
    matrix = make(32, 64)
    fp8 = matrix.dtype == np.uint8
    packed = repack.tiles(matrix)
    wrong = packed.reshape(-1, 4, 4)[:, [1, 0, 3, 2]].reshape(packed.shape)
    assert not np.array_equal(matrix_of(wrong, fp8=fp8), matrix if fp8 else matrix.view(np.uint16))


def test_untile_is_the_inverse():
    halves = random_halves(32, 64)
    np.testing.assert_array_equal(repack.untile(repack.tiles(halves), 32, 64, fp8=False), halves)
    codes = random_codes(32, 64) & 0x7E
    linear = Linear("codes", codes.view(ml_dtypes.float8_e4m3fn), np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(repack.untile(repack.tiles(codes), 32, 64, fp8=True), linear.dequantize())


@pytest.mark.parametrize("rotary", [0, 16, 32, 128])
def test_rotary_pairs_lie_eight_rows_apart(rotary):
    rows = repack.head_rows(rotary)
    assert sorted(rows) == list(range(128))
    for i in range(rotary // 2):
        first, second = (int(np.flatnonzero(rows == row)[0]) for row in (i, i + rotary // 2))
        assert second == first + 8
        assert first // 16 == second // 16
    placed = np.full(128, -1)
    for place, row, count in repack.head_runs(rotary):
        placed[place : place + count] = np.arange(row, row + count)
    np.testing.assert_array_equal(placed, rows)


@pytest.mark.parametrize(("inner", "hidden"), [(64, 256), (192, 3072), (128, 128)])
def test_gate_up_units(inner, hidden):
    codes = random_codes(2 * inner, hidden)
    scales = np.random.default_rng(3).random((inner // 8, hidden // 128, 2), np.float32)
    units = repack.gate_up_units(codes, scales)
    assert units.shape == (inner // 8, repack.unit_bytes(hidden, fp8=True))
    assert units.shape[1] % 128 == 0
    gate, up, found = gate_up_of(units, hidden, fp8=True)
    np.testing.assert_array_equal(gate, codes[:inner])
    np.testing.assert_array_equal(up, codes[inner:])
    np.testing.assert_array_equal(found, scales)
    halves = random_halves(2 * inner, hidden)
    gate, up, found = gate_up_of(repack.gate_up_units(halves, None), hidden, fp8=False)
    np.testing.assert_array_equal(np.concatenate((gate, up)), halves.view(np.uint16))
    assert found is None


def test_block_scales_are_those_of_the_unsplit_matrix():
    grid = np.arange(12, dtype=np.float32).reshape(4, 3)
    weight = np.zeros((192, 256), ml_dtypes.float8_e4m3fn)
    share = Linear("w", weight, grid, row0=192, col0=128)
    found = repack.block_scales([share, share], 8, 128)
    assert found.shape == (2, 24, 2)
    for unit in range(24):
        for block in range(2):
            assert found[1, unit, block] == grid[(192 + 8 * unit) // 128, 1 + block]


@pytest.mark.parametrize(("row0", "row_step", "col_step"), [(4, 8, 128), (0, 8, 192), (64, 128, 128)])
def test_pieces_across_blocks_are_refused(row0, row_step, col_step):
    share = Linear("w", np.zeros((384, 384), ml_dtypes.float8_e4m3fn), np.ones((9, 9), np.float32), row0=row0)
    with pytest.raises(ValueError, match="cross a block's border"):
        repack.block_scales([share], row_step, col_step)
