"""Twins of the prefill kernels, in float64, one row or one pair at a time where the order shows."""

import ml_dtypes
import numpy as np

PIECE = 8  # halves that the cache's swizzle keeps together


def e4m3(codes):
    """Values float64 of E4M3 codes uint8."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def rms(x, weight, eps):
    """weight * x / sqrt(mean(x**2) + eps) over the last axis, in float64."""
    x = x.astype(np.float64)
    return weight * x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)


def rotate(x, positions, frequencies):
    """RoPE of x [rows, 128]: the pairs (i, i + rotary / 2) turn by position * frequency."""
    pairs = len(frequencies)
    angle = np.asarray(positions, np.float64)[:, None] * frequencies
    out = x.copy()
    out[:, :pairs] = x[:, :pairs] * np.cos(angle) - x[:, pairs : 2 * pairs] * np.sin(angle)
    out[:, pairs : 2 * pairs] = x[:, pairs : 2 * pairs] * np.cos(angle) + x[:, :pairs] * np.sin(angle)
    return out


def qkv(x, heads, q_heads, kv_heads, norms, positions, frequencies, eps):
    """x [rows, hidden], heads [q, then k, then v heads, 128, hidden] to q, k, v [rows, heads, 128].

    norms: the query's and the key's, [128].
    """
    out = []
    for i, head in enumerate(heads):
        y = x.astype(np.float64) @ head.T
        if i < q_heads + kv_heads:
            y = rotate(rms(y, norms[0 if i < q_heads else 1], eps), positions, frequencies)
        out.append(y)
    y = np.stack(out, axis=1)
    return y[:, :q_heads], y[:, q_heads : q_heads + kv_heads], y[:, q_heads + kv_heads :]


def swizzle(values):
    """Rows [..., slots, 128] as the cache keeps them: piece c of slot s at c ^ (s % 8). Its own inverse."""
    slots = values.shape[-2]
    pieces = values.reshape(*values.shape[:-1], values.shape[-1] // PIECE, PIECE)
    place = np.arange(values.shape[-1] // PIECE) ^ (np.arange(slots) % 8)[:, None]
    return np.take_along_axis(pieces, np.broadcast_to(place[..., None], pieces.shape), axis=-2).reshape(values.shape)


def attention(q, k, v, sink, positions, window, scale):
    """q [rows, heads, 128]; k, v [positions, kv_heads, 128] from position 0 on; sink [kv_heads, 128]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        kv_head = head // group
        scores = scale * q[:, head] @ k[:, kv_head].T
        distance = np.asarray(positions)[:, None] - np.arange(len(k))
        hidden = distance < 0 if window == 0 else (distance < 0) | (distance >= window)
        scores[hidden] = -np.inf
        z = scale * q[:, head] @ sink[kv_head]
        peak = np.maximum(scores.max(1), z)
        weights = np.exp(scores - peak[:, None])
        out[:, head] = weights @ v[:, kv_head] / (weights.sum(1) + np.exp(z - peak))[:, None]
    return out


def group(ids, experts, tile=64):
    """Pairs by expert, then by row, and tiles (expert, first, count) of at most `tile` of an expert's pairs."""
    rows, top_k = ids.shape
    lists = [[] for _ in range(experts)]
    for row in range(rows):
        for k in range(top_k):
            lists[ids[row, k]].append(row * top_k + k)
    pairs, tiles = [], []
    for expert, mine in enumerate(lists):
        for first in range(0, len(mine), tile):
            tiles.append((expert, len(pairs) + first, min(tile, len(mine) - first)))
        pairs += mine
    return pairs, tiles


def gate_up(x, gate, up, pairs, ids):
    """silu(gate) * up of each pair, [pairs, inner]; x [rows, hidden], gate, up [experts, inner, hidden]."""
    top_k = ids.shape[1]
    out = np.empty((len(pairs), gate.shape[1]))
    pairs = np.asarray(pairs)
    for expert in np.unique(ids):
        mine = ids.ravel()[pairs] == expert
        rows = x[pairs[mine] // top_k].astype(np.float64)
        g, u = rows @ gate[expert].T, rows @ up[expert].T
        out[mine] = g / (1 + np.exp(-g)) * u
    return out


def down(inner, matrices, pairs, ids):
    """Each pair's result where it belongs, [rows, top_k, hidden].

    inner: [pairs, inner]; matrices: [experts, hidden, inner].
    """
    rows, top_k = ids.shape
    out = np.empty((rows * top_k, matrices.shape[1]))
    for i, pair in enumerate(pairs):
        out[pair] = matrices[ids.ravel()[pair]] @ inner[i]
    return out.reshape(rows, top_k, -1)


def combine(out, weights):
    """y [rows, hidden] of out [rows, top_k, hidden], weights [rows, top_k]."""
    return np.einsum("rkh,rk->rh", out.astype(np.float64), weights.astype(np.float64))


def entry(embedded, hidden, enorm, hnorm, eps):
    """The operand of eh_proj [rows, 2 * hidden]."""
    return np.concatenate((rms(embedded, enorm, eps), rms(hidden, hnorm, eps)), axis=1)
