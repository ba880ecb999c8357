"""Twins of Qwen2's prefill kernels in float64, and the order of activations in tiles, element by element."""

from functools import cache

import numpy as np

PAGE = 16
INNER_SCALE = 1 / 16


@cache
def _places():
    """Where column k of 64 lies in a row of row % 8 == r: [r][k], as kernels_cu/common/activations.cuh says it."""
    places = np.empty((8, 64), np.intp)
    for r in range(8):
        for b, t, s, h, j in np.ndindex(2, 4, 2, 2, 2):
            piece = 4 * b + 2 * s + h
            places[r, 32 * b + 8 * t + 4 * s + 2 * h + j] = (piece ^ r) * 8 + 2 * t + j
    return places


def to_tiles(values, fill=np.nan):
    """float16 [rows, k] as a kernel's buffer [k / 64, rows rounded up to 8, 64]; `fill` in rows beyond."""
    rows, k = values.shape
    out = np.full((k // 64, -(-rows // 8) * 8, 64), fill, np.float16)
    for block in range(k // 64):
        np.put_along_axis(
            out[block, :rows], _places()[np.arange(rows) % 8], values[:, 64 * block : 64 * block + 64], axis=1
        )
    return out


def from_tiles(buffer):
    """The inverse: [rows rounded up to 8, k] of a buffer [k / 64, rows, 64]."""
    blocks, rows, _ = buffer.shape
    places = _places()[np.arange(rows) % 8]
    return np.concatenate([np.take_along_axis(buffer[block], places, axis=1) for block in range(blocks)], axis=1)


def norm(residual, weight, eps):
    """weight * x / sqrt(mean(x**2) + eps), [rows, hidden]."""
    x = residual.astype(np.float64)
    return weight * x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)


def rotate(x, positions, theta):
    """RoPE of x [rows, heads, size]: (i, i + size / 2) turn by position * theta ** (-2 i / size)."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions, np.float64)[:, None, None] * theta ** (-np.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    return np.concatenate(
        (low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)), axis=-1
    )


def qkv(x, matrix, bias, dims, positions, theta):
    """x [rows, hidden], matrix [qkv rows, hidden] to q, k, v [rows, heads, size]."""
    y = (x.astype(np.float64) @ matrix.T + bias).reshape(len(x), -1, dims.head_size)
    q, k, v = np.split(y, (dims.q_heads, dims.q_heads + dims.kv_heads), axis=1)
    return rotate(q, positions, theta), rotate(k, positions, theta), v


def attention(q, k, v, positions):
    """q [rows, heads, size]; k, v [positions, kv heads, size] from position 0 on: [rows, heads, size]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / q.shape[-1] ** 0.5
        scores[np.arange(len(k)) > np.asarray(positions)[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[:, head] = weights @ v[:, head // group] / weights.sum(1, keepdims=True)
    return out


def gate_up(x, gate, up):
    """INNER_SCALE * silu(gate) * up, [rows, inner]."""
    g, u = x.astype(np.float64) @ gate.T, x.astype(np.float64) @ up.T
    return INNER_SCALE * g / (1 + np.exp(-g)) * u


def projection(residual, x, matrix, scale):
    """residual + scale * x @ matrix.T, [rows, hidden]."""
    return residual + scale * (x.astype(np.float64) @ matrix.T)


def pages(page_table, free_pages, start, rows):
    """The table after positions start .. start + rows - 1 took what they lack, and how many pages are left."""
    table, free = page_table.copy(), len(free_pages)
    for position in range(start, start + rows):
        place = position // PAGE
        if place < len(table) and table[place] < 0 and free > 0:
            free -= 1
            table[place] = free_pages[free]
    return table, free
