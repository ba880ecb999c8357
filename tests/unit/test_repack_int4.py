"""Units of INT4 weights, read element by element as kernels_cu/abi_qwen2.cuh states their order."""

import numpy as np
import pytest

from cuq1.checkpoint import int4
from cuq1.cuda.repack import int4_units
from cuq1.plan.qwen2_dims import UNIT_BYTES, matrix_bytes


def quantised(seed, rows, width):
    return int4.quantise(np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32))


def values_of(units):
    """float32 [16 * tiles, 128 * groups] of units uint8 [tiles, groups, 1056], by the words' places in the header."""
    tiles, groups, _ = units.shape
    values = np.empty((16 * tiles, 128 * groups), np.float32)
    for tile in range(tiles):
        for group in range(groups):
            unit = units[tile, group]
            words = int4.unpack(unit[:1024].copy().view(np.uint32)[None])[0].reshape(2, 32, 4, 8)
            scales = unit[1024:].copy().view(np.float16).astype(np.float32)
            for c, lane, word in np.ndindex(2, 32, 4):
                g, t = divmod(lane, 4)
                row = g + 8 * (word % 2)
                k = 128 * group + 64 * c + 32 * (word // 2) + 8 * t
                values[16 * tile + row, k : k + 8] = words[c, lane, word] * scales[row]
    return values


@pytest.mark.parametrize(("rows", "width"), [(16, 128), (48, 200), (64, 384), (40, 130)])
def test_one_matrix(rows, width):
    codes, scales = quantised(rows, rows, width)
    words = int4.pack(codes)
    units = int4_units([(words, scales)])
    assert units.shape == (-(-rows // 16), int4.padded(width) // 128, UNIT_BYTES)
    assert units.nbytes == matrix_bytes(rows, width)
    values = values_of(units)
    np.testing.assert_array_equal(values[:rows, :width], int4.dequantise(words, scales, width))
    assert not values[rows:].any()
    assert not values[:, width:].any()


@pytest.mark.parametrize(("inner", "width"), [(128, 128), (200, 192), (60, 130)])
def test_gate_and_up_share_tiles(inner, width):
    matrices = [(int4.pack(codes), scales) for codes, scales in (quantised(seed, inner, width) for seed in (1, 2))]
    tiles = int4.padded(inner) // 8
    out = np.full((tiles, int4.padded(width) // 128, UNIT_BYTES), 255, np.uint8)
    assert int4_units(matrices, tiles, out) is out
    parts = values_of(out).reshape(tiles, 2, 8, -1).swapaxes(0, 1).reshape(2, 8 * tiles, -1)
    for part, (words, scales) in zip(parts, matrices, strict=True):
        np.testing.assert_array_equal(part[:inner, :width], int4.dequantise(words, scales, width))
        assert not part[inner:].any()


def test_a_long_matrix_is_cut_where_no_value_shows_it():
    codes, scales = quantised(3, 16 * 300, 256)
    words = int4.pack(codes)
    whole = int4_units([(words, scales)])
    for tile in (0, 150, 299):
        rows = slice(16 * tile, 16 * tile + 16)
        np.testing.assert_array_equal(whole[tile], int4_units([(words[rows], scales[rows])])[0])


def test_swapped_words_are_noticed():
    """The control: rows g and g + 8 in each other's place."""
    codes, scales = quantised(4, 16, 128)
    words = int4.pack(codes)
    units = int4_units([(words, scales)])
    units[:, :, :1024] = units[:, :, :1024].reshape(-1, 4, 4)[:, [1, 0, 3, 2]].reshape(1, 1, 1024)
    assert not np.array_equal(values_of(units), int4.dequantise(words, scales, 128))
