"""Qwen2's products with INT4 matrices in float64, from words and scales as cuq1/checkpoint/NANOQWEN.md states them.

xp is numpy, or cupy for matrices that would take numpy long.
"""

from itertools import pairwise

import numpy as np

OFFSETS = (0, 16, 4, 20, 8, 24, 12, 28)  # of the bits of eight neighbouring codes
ROWS = 1024  # whose values are in memory at once


def values(words, scales, xp=np):
    """float64 [rows, 128 * groups] of words uint32 [rows, 16 * groups] and scales float16 [rows, groups]."""
    codes = xp.stack([(words >> np.uint32(offset)) & np.uint32(15) for offset in OFFSETS], axis=-1).astype(np.int8)
    codes = xp.where(codes > 7, codes - 16, codes).reshape(*scales.shape, 128)
    return (codes * scales.astype(np.float64)[:, :, None]).reshape(len(words), -1)


def product(words, scales, x, xp=np, power=1):
    """float64 [rows] = W x of a token x [128 * groups]; power 2: of W's squares instead."""
    x = x.astype(np.float64)
    starts = range(0, len(words), ROWS)
    parts = [(values(words[i : i + ROWS], scales[i : i + ROWS], xp) ** power * x).sum(axis=1) for i in starts]
    return xp.concatenate(parts)


def digit_variance(x):
    """float64 [128 * groups]: variance of the error of a token's values as digits, uniform within a step of a group's
    largest over 32,600."""
    steps = np.abs(x.astype(np.float64)).reshape(-1, 128).max(axis=1) / 32600
    return (steps * steps / 12).repeat(128)


def block_ranges(units, blocks):
    """The runs [first, end) of units that blocks take, as abi_qwen2.cuh has it: in order, and equal but for one."""
    cuts = [block * units // blocks for block in range(blocks + 1)]
    return list(pairwise(cuts))


def written(rows, k, blocks):
    """Which of pieces [PIECES, rows] there are: bool [most pieces, rows]."""
    groups, tiles = -(-k // 128), -(-rows // 16)
    counts = np.zeros(tiles, int)
    for first, end in block_ranges(tiles * groups, min(blocks, tiles * groups)):
        counts[first // groups : (end - 1) // groups + 1] += 1
    return (np.arange(counts.max())[:, None] < counts).repeat(16, axis=1)[:, :rows]


def entry(residual, pieces, norm, eps):
    """x float64 [hidden] = residual + the sum of pieces [n, hidden] or None; and rms(x, norm) float64 [hidden]."""
    x = residual.astype(np.float64)
    if pieces is not None:
        x = x + np.where(np.isnan(pieces), 0, pieces).astype(np.float64).sum(axis=0)
    return x, x / np.sqrt((x * x).mean() + eps) * norm.astype(np.float64)


def gate_up(gate, up):
    """silu(gate) * up / 16, float64."""
    gate = gate.astype(np.float64)
    return gate / (1 + np.exp(-gate)) * up / 16
