"""The chosen experts in float64, on dequantised weights."""

import numpy as np

INNER_SCALE = 1 / 16  # inner as gate_up stores it
MOST_E4M3 = 448.0


def _e4m3_values():
    """The value of each E4M3 code: float64 [256]; codes 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value[code & 0x7F == 0x7F] = np.nan
    return np.where(code >> 7, -value, value)


E4M3 = _e4m3_values()
_MAGNITUDES = E4M3[:0x7F]


def round_e4m3(x):
    """x to the nearest E4M3 value, ties to the even code, beyond 448 to 448."""
    size = np.minimum(np.abs(x), MOST_E4M3)
    above = np.clip(np.searchsorted(_MAGNITUDES, size), 1, len(_MAGNITUDES) - 1)
    low, high = _MAGNITUDES[above - 1], _MAGNITUDES[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.sign(x) * np.where(up, high, low)


def groups_of(ids, dense_groups=0):
    """The distinct experts of ids [rows, top_k], ascending, and which rows chose each: bool [groups, rows]."""
    if dense_groups:
        return np.arange(dense_groups), np.ones((dense_groups, len(ids)), bool)
    experts = np.unique(ids)
    return experts, (ids[None] == experts[:, None, None]).any(axis=2)


def gate_up(x, weights, ids, dense_groups=0):
    """INNER_SCALE * silu(gate) * up: float64 [groups, rows, inner], NaN where a row did not choose the group's expert.

    x: float64 [rows, hidden]; weights: {expert: float64 [2 * inner, hidden]}, gate rows first; ids: [rows, top_k].
    """
    experts, chose = groups_of(ids, dense_groups)
    inner = len(weights[int(experts[0])]) // 2
    out = np.full((len(experts), len(x), inner), np.nan)
    for group, expert in enumerate(experts):
        gate, up = np.split(x[chose[group]] @ weights[int(expert)].T, 2, axis=1)
        out[group, chose[group]] = INNER_SCALE * gate / (1 + np.exp(-gate)) * up
    return out


def down(inner, weights, ids, routing, dense_groups=0, e4m3=False):
    """The weighted sum of down projections: float64 [rows, hidden].

    inner: float64 [groups, rows, inner], as `gate_up` returns it; weights: {expert: float64 [hidden, inner]};
    routing: [rows, top_k], the weights of ids. e4m3: inner is rounded to E4M3, a (group, row)'s largest being 448.
    """
    experts, chose = groups_of(ids, dense_groups)
    out = np.zeros((len(ids), len(weights[int(experts[0])])))
    for group, expert in enumerate(experts):
        for row in np.flatnonzero(chose[group]):
            x = inner[group, row]
            if e4m3:
                step = np.abs(x).max() / MOST_E4M3
                x = round_e4m3(x / step) * step if step > 0 else x
            weight = 1.0 if dense_groups else float(routing[row, ids[row] == expert].sum())
            out[row] += weight / INNER_SCALE * (weights[int(expert)] @ x)
    return out
