"""Symmetric INT4 with one FP16 scale for each group of 128 inputs of a row, and how eight codes share a word.

    scale = FP16(absmax of the group / 7)      code = round(weight / scale), from -7 to 7      value = code x scale

Weights and scales are divided and multiplied in float32, and a tie goes to the even code. A width that is no multiple
of 128 is padded with codes 0 to one that is, so that a kernel reads whole groups; the last group's absmax is that of
the inputs it has.

A word holds the codes w0 to w7 of eight neighbouring inputs, in two's complement, at the bit offsets of OFFSETS. Both
codes of a pair (w0, w1), (w2, w3), ... are 16 bits apart: one shift and one mask give a pair as two halves.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from cuq1.errors import CheckpointError

Codes = npt.NDArray[np.int8]
Words = npt.NDArray[np.uint32]
Scales = npt.NDArray[np.float16]
Float32 = npt.NDArray[np.float32]

GROUP = 128
LARGEST = 7
CODES_A_WORD = 8
OFFSETS = (0, 16, 4, 20, 8, 24, 12, 28)

# The lanes whose codes are the low and the high half of a word's bytes 0 to 3.
_LOW = tuple(OFFSETS.index(8 * byte) for byte in range(4))
_HIGH = tuple(OFFSETS.index(8 * byte + 4) for byte in range(4))
_VALUES = np.array([code - 16 if code > LARGEST else code for code in range(16)], np.int8)
_WORD = np.dtype("<u4")
# Elements that are worked on at once: their float32 copies stay in the L2 cache.
_PIECE = 1 << 17


def padded(width: int) -> int:
    """The inputs that a row of `width` is stored with: whole groups."""
    return -(-width // GROUP) * GROUP


def quantise(weights: npt.NDArray[Any], source: str = "the matrix") -> tuple[Codes, Scales]:
    """Codes int8 [rows, padded(cols)] and scales float16 [rows, padded(cols) / 128] of weights [rows, cols].

    Raises CheckpointError, with `source` naming the matrix, for a weight that is not finite or too large for an FP16
    scale.
    """
    rows, cols = weights.shape
    width = padded(cols)
    codes, scales = np.empty((rows, width), np.int8), np.empty((rows, width // GROUP), np.float16)
    height = max(1, _PIECE // max(width, 1))
    piece = np.zeros((min(height, rows), width), np.float32)
    for top in range(0, rows, height):
        part = piece[: min(height, rows - top)]
        part[:, :cols] = weights[top : top + height]
        part[:, cols:] = 0
        groups = part.reshape(len(part), -1, GROUP)
        largest = np.maximum(groups.max(2), -groups.min(2))
        check_finite(largest, source)
        with np.errstate(over="ignore"):  # reported below, by name
            half = (largest / np.float32(LARGEST)).astype(np.float16)
        if not np.isfinite(half).all():
            raise CheckpointError(
                f"{source} holds a weight of {largest.max():.4g}, whose INT4 scale exceeds FP16: use another checkpoint"
            )
        # A group whose scale rounds to 0 has codes 0: its weights are below FP16's smallest number.
        divisors = half.astype(np.float32)
        divisors[half == 0] = np.inf
        np.divide(groups, divisors[:, :, None], out=groups)
        np.rint(part, out=part)
        # only where the scale is among FP16's subnormals, and so coarse that absmax / scale may exceed 7.5
        np.clip(part, -LARGEST, LARGEST, out=part)
        codes[top : top + height] = part
        scales[top : top + height] = half
    return codes, scales


def check_finite(values: npt.NDArray[Any], source: str) -> None:
    """CheckpointError, with `source` naming the tensor, where a value is NaN or infinite."""
    if not np.isfinite(values).all():
        raise CheckpointError(f"{source} holds values that are not finite: copy the checkpoint again")


def pack(codes: Codes) -> Words:
    """Words [rows, cols / 8] of codes [rows, cols] from -8 to 7."""
    nibbles = np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1, CODES_A_WORD)
    low, high = nibbles & 15, nibbles << 4
    packed = np.empty((*nibbles.shape[:2], 4), np.uint8)
    for byte in range(4):
        np.bitwise_or(low[..., _LOW[byte]], high[..., _HIGH[byte]], out=packed[..., byte])
    return packed.view(_WORD)[..., 0]


def unpack(words: Words) -> Codes:
    """Codes int8 [rows, 8 x cols] of words [rows, cols]."""
    packed = np.ascontiguousarray(words, _WORD).view(np.uint8).reshape(*words.shape, 4)
    low, high = packed & 15, packed >> 4
    codes = np.empty((*words.shape, CODES_A_WORD), np.int8)
    for byte in range(4):
        codes[..., _LOW[byte]] = _VALUES[low[..., byte]]
        codes[..., _HIGH[byte]] = _VALUES[high[..., byte]]
    return codes.reshape(len(words), -1)


def dequantise(words: Words, scales: Scales, cols: int) -> Float32:
    """Values float32 [rows, cols] of words [rows, padded(cols) / 8] and scales [rows, padded(cols) / 128]."""
    rows = len(words)
    values = np.empty((rows, cols), np.float32)
    height = max(1, _PIECE // max(cols, 1))
    for top in range(0, rows, height):
        groups = unpack(words[top : top + height]).reshape(-1, scales.shape[1], GROUP)
        products = groups * scales[top : top + height, :, None].astype(np.float32)
        values[top : top + height] = products.reshape(len(groups), -1)[:, :cols]
    return values
