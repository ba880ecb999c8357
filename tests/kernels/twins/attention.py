"""Decode attention in float64, from positions alone: no tiles, splits or rings."""

import numpy as np


def sees(position, key, window):
    """Whether a query at `position` sees the key at `key`, numbers or arrays."""
    return (key <= position) & ((window == 0) | (position - key < window))


def attended(q, keys, values, labels, sink_k, positions, window, scale):
    """Softmax over the keys that each row sees and a sink of zero value: float64 [rows, q_heads * dim].

    q: [rows, q_heads, dim]; keys, values: [kv_heads, count, dim], the key at place c is that of position labels[c];
    sink_k: [kv_heads, dim]; positions: [rows].
    """
    rows, heads, dim = q.shape
    queries = q.astype(np.float64).reshape(rows, len(keys), heads // len(keys), dim)
    out = np.zeros(queries.shape)
    for kv_head, (k, v) in enumerate(zip(keys.astype(np.float64), values.astype(np.float64), strict=True)):
        for row, position in enumerate(positions):
            visible = np.flatnonzero(sees(position, np.asarray(labels), window))
            scores = scale * (queries[row, kv_head] @ k[visible].T)
            sink = scale * (queries[row, kv_head] @ sink_k[kv_head].astype(np.float64))[:, None]
            top = np.maximum(sink, scores.max(axis=1, initial=-np.inf, keepdims=True))
            weights = np.exp(scores - top)
            out[row, kv_head] = weights @ v[visible] / (weights.sum(axis=1, keepdims=True) + np.exp(sink - top))
    return out.reshape(rows, heads * dim)


def place(cache, slot, head, vector):
    """Writes a key or value into a cache float16 [kv_heads, slots / 64, 64, dim], whose rows are swizzled.

    Piece c, of 8 numbers, of a row lies at c ^ (row % 8).
    """
    row = cache[head, slot // 64, slot % 64]
    for piece in range(len(vector) // 8):
        at = (piece ^ (slot % 8)) * 8
        row[at : at + 8] = vector[piece * 8 : piece * 8 + 8]


def filled(vectors, labels, slots, ring, garbage):
    """A cache float16 [kv_heads, slots / 64, 64, dim] after vectors [kv_heads, count, dim] were written in order.

    labels: their positions, ascending. Slots never written hold `garbage`.
    """
    kv_heads, _, dim = vectors.shape
    cache = np.full((kv_heads, slots // 64, 64, dim), garbage, np.float16)
    labels = np.asarray(labels)
    newest = labels >= labels[-1] - slots + 1  # a ring keeps no more
    places = labels[newest] % slots if ring else labels[newest]
    pieces = vectors[:, newest].reshape(kv_heads, len(places), dim // 8, 8)
    swizzled = np.empty_like(pieces)
    for residue in range(8):
        rows = places % 8 == residue
        swizzled[:, rows] = pieces[:, rows][:, :, np.arange(dim // 8) ^ residue]
    cache.reshape(kv_heads, slots, dim)[:, places] = swizzled.reshape(kv_heads, len(places), dim)
    return cache
