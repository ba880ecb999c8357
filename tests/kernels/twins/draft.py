"""Twin of kernels_cu/draft.cu. Inputs as they are stored; results in float64."""

import numpy as np

from tests.kernels.twins.rows import bf16_values, rms_norm


def operand(tokens, hidden_rows, table, hidden, draft_hidden, enorm, hnorm, eps):
    """[rms(table[token], enorm) ; rms(hidden, hnorm)] rounded to halves: float64 [rows, 2 * hidden]."""
    known = np.where((tokens >= 0) & (tokens < len(table)), tokens, 0)
    before = np.stack([draft_hidden[0] if row < 0 else hidden[row] for row in hidden_rows])
    both = (rms_norm(bf16_values(table[known]), enorm, eps), rms_norm(before, hnorm, eps))
    return np.concatenate(both, axis=1).astype(np.float16).astype(np.float64)


def eh_proj(joined, weight):
    """joined [rows, 2 * hidden], weight float16 [eh_rows, 2 * hidden]: [rows, eh_rows]."""
    return joined @ weight.astype(np.float64).T
