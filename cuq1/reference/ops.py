"""The operations of the reference, in NumPy and FP32.

A row's result must not depend on how many rows are computed with it: then
verification of eight rows, a single step and a prefill chunk of any size agree
bit for bit, speculation cannot change greedy output, and a seed means the same
tokens whatever came before. BLAS does not promise that for matrices of
different shapes, so every product of a weight here has one fixed shape: rows go
through in tiles of one size, TILE_ROWS in the target and 1 in the draft, whose
depths have a single row, and keys in tiles of TILE_KEYS, padded with zeros. Sums
over tiles run in order of position, where a masked tile adds an exact zero.
"""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

TILE_ROWS = 8
TILE_KEYS = 64


def row_tiles(x: F32, size: int) -> F32:
    """[rows, ...] as [tiles, size, ...], the last tile padded with zero rows."""
    rows = x.shape[0]
    tiles = -(-rows // size)
    if tiles * size != rows:
        padded = np.zeros((tiles * size, *x.shape[1:]), np.float32)
        padded[:rows] = x
        x = padded
    return x.reshape(tiles, size, *x.shape[1:])


def linear(x: F32, weight: F32, tile: int = TILE_ROWS) -> F32:
    """x [rows, in] times weight [out, in] transposed, `tile` rows a product: [rows, out]."""
    tiles: F32 = row_tiles(x, tile) @ weight.T
    return tiles.reshape(-1, weight.shape[0])[: x.shape[0]]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """weight * x / sqrt(mean(x**2) + eps) over the last axis."""
    inverse = 1 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(eps))
    scale: F32 = inverse.astype(np.float32, copy=False)
    return x * scale * weight


def silu(x: F32) -> F32:
    """x * sigmoid(x), written with tanh so that no exponential overflows."""
    half = np.float32(0.5)
    gate: F32 = half * np.tanh(half * x) + half
    return x * gate


def rope_tables(positions: NDArray[np.int64], theta: float, rotary_dim: int) -> tuple[F32, F32]:
    """Cosines and sines [rows, 1, rotary_dim / 2] of position * theta**(-2i / rotary_dim)."""
    pairs = rotary_dim // 2
    frequencies = theta ** (-np.arange(pairs, dtype=np.float64) / max(pairs, 1))
    angles = positions[:, None] * frequencies
    return np.cos(angles).astype(np.float32)[:, None], np.sin(angles).astype(np.float32)[:, None]


def apply_rope(x: F32, cos: F32, sin: F32) -> F32:
    """Rotate the pairs (i, i + rotary_dim / 2) of x [rows, heads, head_dim]; later dimensions pass through."""
    pairs = cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, x[..., 2 * pairs :]), axis=-1)


def route(logits: F32, count: int) -> tuple[NDArray[np.int64], F32]:
    """The `count` largest of logits [rows, experts], ties to the lower index, and the softmax over them.

    Returns expert ids and weights, both [rows, count], largest first.
    """
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    chosen = np.take_along_axis(logits, ids, axis=-1)
    weights: F32 = np.exp(chosen - chosen[:, :1])
    return ids, weights / weights.sum(axis=-1, keepdims=True)


def attention(
    q: F32,
    k: F32,
    v: F32,
    sink_k: F32 | None,
    q_positions: NDArray[np.int64],
    k_start: int,
    window: int | None,
    scale: float,
    tile: int = TILE_ROWS,
) -> F32:
    """Causal grouped-query attention of at most `tile` queries, with a sink of zero value where there is one.

    q: [rows, heads, head_dim], after norm and RoPE; k, v: [kv_heads, tiles,
    TILE_KEYS, head_dim], holding positions from k_start on, a multiple of
    TILE_KEYS; sink_k: [kv_heads, head_dim], not rotated. A query at i sees the
    keys j <= i, and with a window those with i - j < window. Slots that no query
    sees must hold finite numbers. Returns [rows, heads, head_dim].
    """
    rows, heads, dim = q.shape
    kv_heads, tiles = k.shape[:2]
    grouped = row_tiles(q, tile)[0].reshape(tile, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    grouped = np.ascontiguousarray(grouped)  # [kv_heads, group, tile, head_dim]
    scores: F32 = grouped[:, :, None] @ k[:, None].swapaxes(-1, -2)
    scores *= np.float32(scale)  # [kv_heads, group, tiles, tile, TILE_KEYS]

    positions = np.full(tile, q_positions[-1])
    positions[:rows] = q_positions
    distance = positions[:, None] - (k_start + np.arange(tiles * TILE_KEYS))
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores += np.where(hidden, np.float32(-np.inf), np.float32(0)).reshape(tile, tiles, TILE_KEYS).swapaxes(0, 1)

    peak = scores.max(axis=(2, 4))  # [kv_heads, group, tile]
    if sink_k is not None:
        sink = np.float32(scale) * (grouped * sink_k[:, None, None]).sum(axis=-1)
        peak = np.maximum(peak, sink)
    scores -= peak[:, :, None, :, None]
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1).sum(axis=2)
    if sink_k is not None:
        total += np.exp(sink - peak)
    out: F32 = (scores @ v[:, None]).sum(axis=2) / total[..., None]
    return out.transpose(2, 0, 1, 3).reshape(tile, heads, dim)[:rows]
