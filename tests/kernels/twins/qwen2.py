"""Qwen2's rows and decode attention in float64: no pages, splits or pieces."""

import numpy as np


def swizzled(pages):
    """Pages [.., PAGE, dim] as they lie in the cache: piece c, of 8 numbers, of row r lies at c ^ (r % 8). And back."""
    pieces = pages.reshape(*pages.shape[:-1], -1, 8)
    at = np.arange(pieces.shape[-2]) ^ (np.arange(pages.shape[-2])[:, None] % 8)
    return np.take_along_axis(pieces, np.broadcast_to(at[..., None], pieces.shape), axis=-2).reshape(pages.shape)


def embed(table, token):
    """float64 [hidden]: the table's row as it is."""
    return table[token].astype(np.float64)


def norm(x, weight, eps, width):
    """rms(x, weight) float64 [width], zeros beyond x [hidden]."""
    out = np.zeros(width)
    out[: len(x)] = x / np.sqrt(np.mean(x * x) + eps) * weight.astype(np.float64)
    return out


def turned(x, position, frequencies):
    """x float64 [heads, dim] with the pairs (i, i + dim / 2) turned by position * frequencies[i]."""
    angles = position * frequencies
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def scores(qkv, bias, position, frequencies, keys):
    """q.k / sqrt(dim) float64 [kv_heads, group, position + 1] of the token's queries: see `attention`."""
    kv_heads, _, dim = keys.shape
    heads = (qkv + bias.astype(np.float64)).reshape(-1, dim)
    count = len(heads) - 2 * kv_heads
    q = turned(heads[:count], position, frequencies).reshape(kv_heads, -1, dim)
    k = turned(heads[count : count + kv_heads], position, frequencies).astype(np.float16)
    return q @ np.concatenate([keys, k[:, None]], axis=1).astype(np.float64).swapaxes(1, 2) / np.sqrt(dim)


def attention(qkv, bias, position, frequencies, keys, values):
    """attended float64 [q_heads * dim] of the token at `position`, and its k and v float16 [kv_heads, dim].

    qkv: float64 [rows], q, k, v heads in order, before the biases; keys, values: float16 [kv_heads, position, dim] of
    the positions before it, k after RoPE. The token's own k and v are attended to as the halves that are kept of them.
    """
    kv_heads, _, dim = keys.shape
    heads = (qkv + bias.astype(np.float64)).reshape(-1, dim)
    count = len(heads) - 2 * kv_heads
    k = turned(heads[count : count + kv_heads], position, frequencies).astype(np.float16)
    v = heads[count + kv_heads :].astype(np.float16)
    s = scores(qkv, bias, position, frequencies, keys)
    weights = np.exp(s - s.max(axis=2, keepdims=True))
    out = weights @ np.concatenate([values, v[:, None]], axis=1).astype(np.float64)
    return (out / weights.sum(axis=2, keepdims=True)).ravel(), k, v
