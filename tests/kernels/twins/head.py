"""The head in NumPy."""

import numpy as np

from cuq1.plan.dims import MAX_TOP_K


def logits(normed, weights, scale):
    """normed [rows, hidden], weights [vocab, hidden], both float16 -> float64 [rows, vocab]."""
    return scale * (normed.astype(np.float64) @ weights.astype(np.float64).T)


def largest(values, first_id=0):
    """The MAX_TOP_K largest of [..., vocab]: values and ids, largest first, ties by lower id; padded by -inf and -1."""
    order = np.argsort(-values, axis=-1, kind="stable")[..., :MAX_TOP_K]  # ids ascend: stable keeps the lower first
    missing = MAX_TOP_K - order.shape[-1]
    pad = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    found = np.take_along_axis(values, order, axis=-1)
    return (
        np.pad(found, pad, constant_values=-np.inf),
        np.pad(order + first_id, pad, constant_values=-1).astype(np.int32),
    )


def pieces(values, count):
    """Candidate lists of [..., vocab] cut into `count` equal pieces: [..., count, MAX_TOP_K] values and ids."""
    width = values.shape[-1] // count
    parts = [largest(values[..., i * width : (i + 1) * width], i * width) for i in range(count)]
    return np.stack([p[0] for p in parts], axis=-2), np.stack([p[1] for p in parts], axis=-2)
