"""Weights in the order in which the kernels' lanes consume them (kernels_cu/common/mma.cuh, experts.cuh).

Done once at load, so that every load in a kernel is 16 contiguous bytes a lane and 512 a warp.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.plan.dims import HEAD_DIM

Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]

TILE = 16  # weight rows of an MMA


def fp8_tiles(codes: Bytes) -> Bytes:
    """E4M3 codes uint8 [rows, k] as chunks uint8 [rows / 16, k / 32, 512]."""
    rows, k = codes.shape
    # tile, half (row g or g + 8), g, chunk, k half, t, byte
    parts = codes.reshape(rows // 16, 2, 8, k // 32, 2, 4, 4)
    return np.ascontiguousarray(parts.transpose(0, 3, 2, 5, 4, 1, 6)).reshape(rows // 16, k // 32, 512)


def f16_tiles(values: NDArray[np.float16]) -> Bytes:
    """float16 [rows, k] as chunks uint8 [rows / 16, k / 16, 512]."""
    rows, k = values.shape
    # tile, half, g, chunk, t, pair of k, k within the pair
    parts = values.reshape(rows // 16, 2, 8, k // 16, 4, 2, 2)
    return np.ascontiguousarray(parts.transpose(0, 3, 2, 4, 5, 1, 6)).view(np.uint8).reshape(rows // 16, k // 16, 512)


def tiles(matrix: NDArray[Any]) -> Bytes:
    """`fp8_tiles` of uint8 codes, `f16_tiles` of float16 values."""
    return f16_tiles(matrix) if matrix.dtype == np.float16 else fp8_tiles(matrix)


def head_rows(rotary: int) -> NDArray[np.intp]:
    """The order of a query or key head's 128 rows: RoPE's pairs (i, i + rotary / 2) lie 8 rows apart in a tile.

    Then both of a pair are accumulators of the same lane.
    """
    half = rotary // 2
    pairs = [np.r_[8 * u : 8 * u + 8, half + 8 * u : half + 8 * u + 8] for u in range(rotary // 16)]
    return np.concatenate([*pairs, np.arange(rotary, HEAD_DIM)]).astype(np.intp)


def gate_up_rows(inner: int) -> NDArray[np.intp]:
    """The order of the 2 * inner rows of [gate; up]: eight of the gate, then the up rows of the same columns."""
    unit = np.arange(inner).reshape(-1, 8)
    return np.concatenate((unit, unit + inner), axis=1).ravel().astype(np.intp)


def unit_bytes(hidden: int, *, fp8: bool) -> int:
    """Bytes of a gate/up unit: a tile's chunks, then its scales padded to 128 bytes."""
    return hidden * 16 + -(-hidden // 128 * 8 // 128) * 128 if fp8 else hidden * 32


def gate_up_units(gate_up: NDArray[Any], scales: F32 | None) -> Bytes:
    """One expert's [gate; up] as units uint8 [inner / 8, unit_bytes].

    gate_up: uint8 codes or float16, [2 * inner, hidden]; scales: for codes, [inner / 8, hidden / 128, 2], a unit's
    scales of gate and up for each 128 columns.
    """
    inner, hidden = gate_up.shape[0] // 2, gate_up.shape[1]
    fp8 = gate_up.dtype == np.uint8
    out = np.zeros((inner // 8, unit_bytes(hidden, fp8=fp8)), np.uint8)
    chunks = tiles(gate_up[gate_up_rows(inner)]).reshape(inner // 8, -1)
    out[:, : chunks.shape[1]] = chunks
    if scales is not None:
        raw = np.ascontiguousarray(scales, np.float32).reshape(inner // 8, -1).view(np.uint8)
        out[:, chunks.shape[1] : chunks.shape[1] + raw.shape[1]] = raw
    return out
