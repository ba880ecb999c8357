"""Weights in the order in which the kernels' lanes consume them: common/mma.cuh, experts.cuh, abi_qwen2.cuh say which.

Done once at load, so that every load in a kernel is 16 contiguous bytes a lane and 512 a warp.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuq1.checkpoint.int4 import CODES_A_WORD, Scales, Words
from cuq1.checkpoint.linear import BLOCK, Linear
from cuq1.plan.dims import HEAD_DIM
from cuq1.plan.qwen2_dims import GROUP, UNIT_BYTES

Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]

TILE = 16  # weight rows of an MMA

_GROUP_WORDS = GROUP // CODES_A_WORD  # of a row
_SCRATCH = 1 << 18  # words that `int4_units` rearranges at once: they stay in the L2 cache


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


def quantised(values: F32) -> tuple[Bytes, F32]:
    """float32 [rows, k] as E4M3 codes uint8 [rows, k] and scales float32 [rows, 1], the largest magnitude over 448.

    A row of zeros has the scale 1; one that is not finite has a scale that is not finite either.
    """
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(448)
    scales[scales == 0] = 1
    with np.errstate(invalid="ignore"):
        codes = (values / scales).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8), scales


def untile(packed: Bytes, rows: int, k: int, *, fp8: bool) -> NDArray[Any]:
    """The inverse of `tiles`, as values: [rows, k] of the chunks with which `packed` begins, codes decoded unscaled."""
    size = rows * k * (1 if fp8 else 2)
    flat = packed.reshape(-1)[:size]
    if fp8:
        parts = flat.reshape(rows // 16, k // 32, 8, 4, 2, 2, 4)  # tile, chunk, g, t, k half, half, byte
        codes = np.ascontiguousarray(parts.transpose(0, 5, 2, 1, 4, 3, 6)).reshape(rows, k)
        values: F32 = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return values
    halves: NDArray[Any] = flat.view(np.float16).reshape(
        rows // 16, k // 16, 8, 4, 2, 2, 2
    )  # tile, chunk, g, t, pair, half, k
    return np.ascontiguousarray(halves.transpose(0, 5, 2, 1, 3, 4, 6)).reshape(rows, k)


def head_rows(rotary: int) -> NDArray[np.intp]:
    """The order of a query or key head's 128 rows: RoPE's pairs (i, i + rotary / 2) lie 8 rows apart in a tile.

    Then both of a pair are accumulators of the same lane.
    """
    half = rotary // 2
    pairs = [np.r_[8 * u : 8 * u + 8, half + 8 * u : half + 8 * u + 8] for u in range(rotary // 16)]
    return np.concatenate([*pairs, np.arange(rotary, HEAD_DIM)]).astype(np.intp)


def head_runs(rotary: int) -> list[tuple[int, int, int]]:
    """`head_rows` as runs (place, row, count): `count` rows from `row` on lie from `place` on."""
    half = rotary // 2
    runs = []
    for unit in range(rotary // 16):
        runs += [(16 * unit, 8 * unit, 8), (16 * unit + 8, half + 8 * unit, 8)]
    return [*runs, (rotary, rotary, HEAD_DIM - rotary)] if rotary < HEAD_DIM else runs


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


def int4_units(matrices: Sequence[tuple[Words, Scales]], tiles: int | None = None, out: Bytes | None = None) -> Bytes:
    """INT4 matrices of one shape as units uint8 [tiles, groups, UNIT_BYTES]; the order is abi_qwen2.cuh's.

    matrices: words uint32 [rows, 16 * groups] and scales float16 [rows, groups], as cuq1.checkpoint.int4 makes them. A
    tile has 16 // len(matrices) rows of each, the same ones: one matrix alone, or gate and up. tiles: at least as many
    as hold the rows, and as many by default; rows that the matrices do not have are zeros. out: where to write, of the
    result's shape and contiguous.

    About 7 GB/s into an `out` that has been written before, on one thread; NumPy lets others run beside it.
    """
    rows, width = matrices[0][0].shape
    groups, share = width // _GROUP_WORDS, TILE // len(matrices)
    count = -(-rows // share) if tiles is None else tiles
    if out is None:
        out = np.empty((count, groups, UNIT_BYTES), np.uint8)
    units = out.reshape(count, -1).view(np.uint32)
    order, codes = _unit_order(groups), TILE * width
    height = max(1, _SCRATCH // len(order))
    scratch = np.zeros((min(height, count), len(order)), np.uint32)
    for top in range(0, count, height):
        part = scratch[: count - top]
        words = part[:, :codes].reshape(len(part), TILE, width)
        scales = part[:, codes:].view(np.float16).reshape(len(part), groups, TILE)
        for first, (some_words, some_scales) in zip(range(0, TILE, share), matrices, strict=True):
            _fill(words[:, first : first + share], some_words[top * share :])
            _fill(scales[:, :, first : first + share].swapaxes(1, 2), some_scales[top * share :])
        # "wrap" writes straight into `out`, which the default mode does not; the indices are all in range.
        np.take(part, order, axis=1, out=units[top : top + len(part)], mode="wrap")
    return out


def _fill(tiles: NDArray[Any], rows: NDArray[Any]) -> None:
    """tiles [tiles, share, n] from rows [.., n], and zeros where these end."""
    count, share, width = tiles.shape
    whole = min(len(rows) // share, count)
    tiles[:whole] = rows[: whole * share].reshape(whole, share, width)
    tiles[whole:] = 0
    if whole < count:
        rest = rows[whole * share :]
        tiles[whole, : len(rest)] = rest


@cache
def _unit_order(groups: int) -> NDArray[np.intp]:
    """Where a tile's units have their words from: [16 rows][16 * groups] of codes, then [groups][8] of scales."""
    codes = np.arange(TILE * groups * _GROUP_WORDS).reshape(2, 8, groups, 2, 2, 4)  # half, g, group, chunk, k half, t
    codes = codes.transpose(2, 3, 1, 5, 4, 0).reshape(groups, -1)
    scales = codes.size + np.arange(groups * TILE // 2).reshape(groups, -1)
    return np.concatenate((codes, scales), axis=1).ravel().astype(np.intp)


def block_scales(linears: Sequence[Linear], row_step: int, col_step: int) -> F32:
    """The scales of pieces of `row_step` x `col_step` elements: float32 [linears, rows / row_step, cols / col_step].

    linears: FP8 shares of one shape, of unsplit matrices of one shape. Raises ValueError where a piece would lie in
    more than one block.
    """
    rows = _blocks(linears, [linear.row0 for linear in linears], linears[0].shape[0], row_step)
    cols = _blocks(linears, [linear.col0 for linear in linears], linears[0].shape[1], col_step)
    grids = np.stack([np.asarray(linear.scale_inv) for linear in linears])
    number = np.arange(len(linears))[:, None, None]
    return np.ascontiguousarray(grids[number, rows[:, :, None], cols[:, None, :]], np.float32)


def _blocks(linears: Sequence[Linear], first: Sequence[int], size: int, step: int) -> NDArray[np.intp]:
    """The blocks of pieces of `step` rows or columns from a share's `first` on: [linears, size / step]."""
    begin = np.array(first)[:, None] + np.arange(0, size, step)
    found = begin // BLOCK
    crossing = ((begin + step - 1) // BLOCK != found).any(axis=1)
    if size % step or crossing.any():
        linear = linears[int(crossing.argmax())]
        raise ValueError(f"{linear.source}: pieces of {step} of its {size} rows or columns cross a block's border")
    return found
