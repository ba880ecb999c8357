"""Dequantisation, against a scalar evaluation of the format's definition in float64."""

import math
import time

import ml_dtypes
import numpy as np
import pytest

from cuq1.checkpoint import Checkpoint, Linear
from cuq1.checkpoint.shares import leaves
from cuq1.errors import CheckpointError
from tests.paths import NANO

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def e4m3(code):
    """OCP FP8 E4M3: 1 sign, 4 exponent (bias 7), 3 mantissa bits; only the all-ones code is NaN."""
    sign, exponent, mantissa = (-1) ** (code >> 7), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def quantized(rows, cols, scale_dtype=np.float32, seed=None):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, (rows, cols), dtype=np.uint8)
    codes[(codes & 127) == 127] = 0
    grid = (-(-rows // 128), -(-cols // 128))
    return Linear("x", codes.view(E4M3), (random.uniform(0.01, 2, grid)).astype(scale_dtype))


def by_definition(linear, rows, cols):
    """float32 [rows, cols] of slices into an unsplit linear, element by element."""
    codes = linear.weight.view(np.uint8)
    return np.array(
        [
            [e4m3(int(codes[i, j])) * float(linear.scale_inv[i // 128, j // 128]) for j in range(codes.shape[1])[cols]]
            for i in range(codes.shape[0])[rows]
        ]
    ).astype(np.float32)


WHOLE = slice(None)


@pytest.mark.parametrize("scale_dtype", [np.float32, BF16])
@pytest.mark.parametrize(
    ("size", "rows", "cols"),
    [
        ((1, 1), WHOLE, WHOLE),
        ((128, 128), WHOLE, WHOLE),
        ((130, 257), WHOLE, WHOLE),
        ((384, 130), slice(192, 384), WHOLE),  # a share of 192 rows begins and ends half-way
        ((130, 384), WHOLE, slice(192, 384)),
        ((256, 140), slice(64, 128), WHOLE),  # half a block
        ((140, 256), WHOLE, slice(64, 128)),
        ((300, 300), slice(101, 299), slice(3, 290)),
        ((129, 5), slice(128, 129), slice(1, 4)),
    ],
)
def test_dequantize_matches_the_definition(size, rows, cols, scale_dtype):
    linear = quantized(*size, scale_dtype)
    share = linear.part(rows, cols)
    np.testing.assert_array_equal(share.dequantize(), by_definition(linear, rows, cols))
    # and a share of a share
    inner = share.part(slice(share.shape[0] // 2, None), slice(share.shape[1] // 3, None))
    np.testing.assert_array_equal(inner.dequantize(), share.dequantize()[share.shape[0] // 2 :, share.shape[1] // 3 :])


def test_a_wrong_position_would_be_noticed():
    linear = quantized(256, 256)
    share = linear.part(slice(64, 192))
    moved = Linear("x", share.weight, share.scale_inv, 0, 0)
    assert not np.array_equal(moved.dequantize(), share.dequantize())


def test_every_code():
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 127) != 127].reshape(2, 127)
    got = Linear("x", codes.view(E4M3), np.ones((1, 1), np.float32)).dequantize()
    np.testing.assert_array_equal(got, [[e4m3(int(code)) for code in row] for row in codes])


def test_plain_dtypes_are_exact():
    values = np.random.default_rng().standard_normal((70, 30), dtype=np.float32)
    np.testing.assert_array_equal(Linear("x", values).dequantize(), values)
    rounded = values.astype(BF16)
    np.testing.assert_array_equal(Linear("x", rounded).part(slice(3, 60), slice(2, 9)).dequantize(), rounded[3:60, 2:9])


def test_wide_rows_cross_piece_borders():
    linear = quantized(3, 70_000)
    expected = linear.weight.astype(np.float64) * np.repeat(linear.scale_inv, 128, axis=1)[:, :70_000].astype(float)
    np.testing.assert_array_equal(linear.dequantize(), expected.astype(np.float32))


def test_out_is_filled_whatever_it_held():
    linear = quantized(130, 140)
    whole = np.full((200, 300), np.nan, np.float32)
    out = whole[10:140, 100:240]  # not contiguous
    assert linear.dequantize(out) is out
    np.testing.assert_array_equal(out, linear.dequantize())
    assert np.isnan(whole[:10]).all()
    assert np.isnan(whole[10:140, :100]).all()
    for wrong in (np.empty((130, 141), np.float32), np.empty((130, 140), np.float64)):
        with pytest.raises(ValueError, match="needs float32"):
            linear.dequantize(wrong)


def test_the_scale_of_a_block_of_zeros_may_be_zero():
    linear = Linear("x", np.zeros((4, 4), E4M3), np.zeros((1, 1), np.float32))
    assert not linear.dequantize().any()


@pytest.mark.parametrize(
    "linear",
    [
        Linear("the.tensor", np.full((300, 4), 0x7F, np.uint8).view(E4M3), np.ones((3, 1), np.float32)),
        Linear("the.tensor", np.full((300, 4), 448).astype(E4M3), np.full((3, 1), 1e38, np.float32)),
        Linear("the.tensor", np.full((300, 4), np.inf).astype(BF16)),
        Linear("the.tensor", np.full((300, 4), np.nan, np.float32)),
    ],
    ids=["nan code", "overflow", "inf", "nan"],
)
@pytest.mark.filterwarnings("error")
def test_values_that_are_not_finite_are_refused(linear):
    with pytest.raises(CheckpointError, match=r"the\.tensor holds values that are not finite, in rows 0 to 127"):
        linear.dequantize()


def test_nbytes_counts_the_scales_that_are_used():
    linear = quantized(384, 256)
    assert linear.nbytes == 384 * 256 + 3 * 2 * 4
    assert linear.part(slice(192, 384)).nbytes == 192 * 256 + 2 * 2 * 4
    assert Linear("x", np.zeros((3, 5), BF16)).nbytes == 30


def test_nano_opens_and_dequantizes_fast():
    """The first token is due 2 s after the process starts; measured 10 and 50 ms, so ten times that is a defect."""
    start = time.perf_counter()
    checkpoint = Checkpoint.open(NANO)
    shares = checkpoint.target(), checkpoint.draft()
    opened = time.perf_counter()
    for share in shares:
        for _, leaf in leaves(share):
            if isinstance(leaf, Linear):
                leaf.dequantize()
    assert opened - start < 0.2
    assert time.perf_counter() - opened < 0.5
