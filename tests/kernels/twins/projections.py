"""What the projections compute, in float64."""

import numpy as np


def heads(normed, weight, norm, positions, theta, rotary, eps):
    """Heads [rows, heads, 128] of weight [heads * 128, hidden]: norm and RoPE, or neither where norm is None."""
    x = (normed.astype(np.float64) @ weight.T).reshape(len(normed), -1, 128)
    if norm is None:
        return x
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * norm
    half = rotary // 2
    turned = np.exp(1j * positions[:, None].astype(np.float64) * theta ** (-2.0 * np.arange(half) / rotary))
    pairs = (x[..., :half] + 1j * x[..., half:rotary]) * turned[:, None]
    return np.concatenate((pairs.real, pairs.imag, x[..., rotary:]), axis=-1)


def entry(pieces, base, scale, eps):
    """x [rows, hidden] = base + scale * (the sum of pieces), or that sum without a base; and 1 / rms(x) [rows]."""
    x = pieces.astype(np.float64).sum(axis=0)
    if base is not None:
        x = base.astype(np.float64) + scale * x
    return x, 1 / np.sqrt((x * x).mean(axis=-1) + eps)


def slots_of(cache):
    """The cache [heads, tiles, 64, 128] in order [heads, slots, 128]: piece c of slot s lies at c ^ s % 8."""
    pieces = cache.reshape(len(cache), -1, 16, 8)
    order = np.arange(16) ^ (np.arange(pieces.shape[1])[:, None] % 8)
    return np.take_along_axis(pieces, order[None, :, :, None], axis=2).reshape(len(cache), -1, 128)


def o_proj(attended, weight):
    """Attended [rows, q width] times weight [hidden, q width] transposed."""
    return attended.astype(np.float64) @ weight.T


def router(attended, residual, fold):
    """The logits' parts: of attended [rows, q width], and of the residual's slice [rows, slice]."""
    width = attended.shape[1]
    fold = fold.astype(np.float64)
    return attended @ fold[:, :width].T, residual @ fold[:, width:].T
