"""INT4 codes and words, against arithmetic that is written out element by element."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuq1.checkpoint import int4
from cuq1.errors import CheckpointError

# as the format says, and not as the module does
BIT_OF_LANE = {0: 0, 1: 16, 2: 4, 3: 20, 4: 8, 5: 24, 6: 12, 7: 28}


def half(value):
    """The nearest FP16, ties to even, as Python's struct has it."""
    return struct.unpack("<e", struct.pack("<e", value))[0]


def single(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def expected(row):
    """Codes and scales of one row of float32 numbers, in Python's own arithmetic."""
    codes, scales = [], []
    for start in range(0, len(row), 128):
        group = [float(value) for value in row[start : start + 128]]
        scale = half(single(max(map(abs, group)) / 7))
        scales.append(scale)
        for value in group:
            code = round(single(value / scale)) if scale else 0  # Python rounds ties to even, too
            codes.append(min(7, max(-7, code)))
        codes += [0] * (128 - len(group))
    return codes, scales


def words_of(codes):
    """One row's words, a code at a time."""
    words = []
    for start in range(0, len(codes), 8):
        word = 0
        for lane, code in enumerate(codes[start : start + 8]):
            word |= (code & 15) << BIT_OF_LANE[lane]
        words.append(word)
    return words


def matrix(seed, rows, cols, scale=0.02):
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32) * np.float32(scale)


def agree(weights):
    codes, scales = int4.quantise(weights)
    words = int4.pack(codes)
    wanted = [expected(row) for row in weights]
    return (
        codes.tolist() == [row for row, _ in wanted]
        and scales.astype(float).tolist() == [row for _, row in wanted]
        and words.tolist() == [words_of(row) for row, _ in wanted]
    )


@pytest.mark.parametrize("cols", [1, 7, 64, 127, 128, 129, 192, 896, 4864])
def test_codes_scales_and_words_element_by_element(cols):
    assert agree(matrix(cols, 5, cols))
    assert agree(matrix(cols, 5, cols, 1e-5))  # scales among FP16's subnormals
    assert agree(matrix(cols, 5, cols, 1e-8))  # scales that round to 0


@pytest.mark.parametrize("wrong", ["a sixteenth of the range", "ties away from zero", "FP32 scales", "lanes in order"])
def test_the_comparison_rejects_other_arithmetic(wrong, monkeypatch):
    weights = matrix(3, 4, 256)
    weights[:, 0], weights[:, 1] = 7, 2.5  # a tie
    weights[:, 130] = 0.3
    assert agree(weights)
    if wrong == "a sixteenth of the range":
        monkeypatch.setattr(int4, "LARGEST", 8)
    elif wrong == "ties away from zero":
        monkeypatch.setattr(int4.np, "rint", lambda x, out: np.trunc(x + np.copysign(np.float32(0.5), x), out=out))
    elif wrong == "FP32 scales":
        monkeypatch.setattr(int4.np, "float16", np.float32)
    else:
        monkeypatch.setattr(int4, "_LOW", (0, 2, 4, 6))
        monkeypatch.setattr(int4, "_HIGH", (1, 3, 5, 7))
    assert not agree(weights)


def test_a_large_matrix_is_worked_on_in_pieces():
    weights = matrix(1, 700, 320)
    codes, scales = int4.quantise(weights)
    for row in (0, 340, 341, 699):
        alone = int4.quantise(weights[row : row + 1])
        np.testing.assert_array_equal(codes[row], alone[0][0])
        np.testing.assert_array_equal(scales[row], alone[1][0])
    values = int4.dequantise(int4.pack(codes), scales, 320)
    np.testing.assert_array_equal(
        values, (codes.reshape(700, -1, 128) * scales[..., None].astype(np.float32)).reshape(700, -1)[:, :320]
    )


def test_values_lie_within_half_a_scale():
    weights = matrix(8, 64, 896)
    codes, scales = int4.quantise(weights)
    error = np.abs(int4.dequantise(int4.pack(codes), scales, 896) - weights).reshape(64, -1, 128)
    assert (error <= scales[..., None].astype(np.float32) * 0.5004).all()


@given(st.lists(st.integers(-8, 7), min_size=8, max_size=64).map(lambda codes: codes[: len(codes) // 8 * 8]))
def test_words_hold_every_code(codes):
    array = np.array([codes], np.int8)
    words = int4.pack(array)
    assert words.tolist() == [words_of(codes)]
    np.testing.assert_array_equal(int4.unpack(words), array)


@given(st.lists(st.floats(-1e5, 1e5, width=32, allow_subnormal=True), min_size=1, max_size=130))
def test_any_finite_row(row):
    assert agree(np.array([row], np.float32))


def test_padding_is_zero_and_not_of_the_group():
    weights = np.full((3, 130), -2.0, np.float32)
    codes, scales = int4.quantise(weights)
    assert codes.shape == (3, 256)
    assert scales.shape == (3, 2)
    assert not codes[:, 130:].any()
    assert (codes[:, :130] == -7).all()
    np.testing.assert_array_equal(
        int4.dequantise(int4.pack(codes), scales, 130), np.float32(half(2 / 7)) * -7 + weights * 0
    )


def test_weights_of_zero_have_scale_zero():
    codes, scales = int4.quantise(np.zeros((2, 128), np.float32))
    assert not codes.any()
    assert not scales.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (2, 129), (4, 199)])
def test_weights_that_are_not_finite_are_refused(value, place):
    weights = matrix(2, 5, 200)
    int4.quantise(weights)
    weights[place] = value
    with pytest.raises(CheckpointError, match=r"^'q' holds values that are not finite: copy"):
        int4.quantise(weights, "'q'")


def test_scales_beyond_fp16_are_refused():
    weights = np.full((1, 128), 7 * 65504.0, np.float32)
    assert int4.quantise(weights)[1][0, 0] == 65504
    with pytest.raises(CheckpointError, match=r"^'q' holds a weight of 4\.9e\+05, whose INT4 scale exceeds FP16"):
        int4.quantise(weights * np.float32(-1.0686), "'q'")
