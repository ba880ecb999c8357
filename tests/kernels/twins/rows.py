"""Twins of kernels_cu/rows.cu and tails.cu. Inputs as they are stored; results in float64."""

import numpy as np

E4M3_MAX = 448.0


def rms_norm(x, weight, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def bf16_values(bits):
    """bfloat16 as uint16 to float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def embed(tokens, table, norm, eps, *, normed_residual):
    """tokens [rows], table uint16 [vocab, hidden]: (residual, normed) [rows, hidden]; a foreign token counts as 0."""
    known = np.where((tokens >= 0) & (tokens < len(table)), tokens, 0)
    x = bf16_values(table[known])
    normed = rms_norm(x, norm, eps)
    return (normed if normed_residual else x), normed


def attn_tail(o, residual, attn_out_norm, ffn_norm, scale, eps):
    """o [ranks, rows, hidden]: (h, normed) [rows, hidden]."""
    h = residual.astype(np.float64) + scale * rms_norm(o.astype(np.float64).sum(axis=0), attn_out_norm, eps)
    return h, rms_norm(h, ffn_norm, eps)


def folded_logits(o, h, router_attended, router_residual, scale, eps):
    """The router's logits [rows, experts] from parts [ranks, rows, experts] that both norms are still to divide."""
    o = o.astype(np.float64).sum(axis=0)
    inverse_o = 1 / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + eps)
    inverse_h = 1 / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + eps)
    parts = scale * inverse_o * router_attended.astype(np.float64).sum(axis=0)
    return (parts + router_residual.astype(np.float64).sum(axis=0)) * inverse_h


def route(logits, count):
    """(ids, weights) [rows, count], largest first, ties to the lower index."""
    ids = np.stack([np.lexsort((np.arange(row.size), -row))[:count] for row in logits])
    return ids, softmax_of(logits, ids)


def softmax_of(logits, ids):
    chosen = np.take_along_axis(logits, ids, axis=-1)
    weights = np.exp(chosen - chosen.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def code_scales(normed):
    """[rows]: what E4M3 codes are multiplied by; 1 for a row of zeros."""
    top = np.abs(normed).max(axis=-1)
    return np.where(top > 0, top / E4M3_MAX, 1.0)


def e4m3_values(codes):
    """E4M3 codes uint8 to float64."""
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(float)
    return sign * np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def mlp_tail(y, h, ffn_out_norm, next_norm, scale, eps, *, normed_residual):
    """y [ranks, rows, hidden], ffn_out_norm or None: (residual, normed)."""
    y = y.astype(np.float64).sum(axis=0)
    out = h.astype(np.float64) + scale * (y if ffn_out_norm is None else rms_norm(y, ffn_out_norm, eps))
    normed = rms_norm(out, next_norm, eps)
    return (normed if normed_residual else out), normed
