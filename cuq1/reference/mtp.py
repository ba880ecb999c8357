"""The recursive draft: one physical layer, run once for each draft depth."""

import numpy as np

from cuq1.config import SLIDING, DraftConfig
from cuq1.reference.cache import ring_slots
from cuq1.reference.ops import F32, linear, rms_norm
from cuq1.reference.q1 import Ids, LayerForward, head_logits
from cuq1.reference.weights import Draft

TILE = 1  # a depth has one row; a tile of eight takes twice as long


class DraftForward:
    """The draft with its cache.

    Row t of the cache belongs to (token at t + 1, hidden state at t). All depths
    share the cache: depth 0 writes true rows, later depths write rows made from
    drafted tokens and the draft's own hidden states, which depth 0 of the next
    round overwrites.
    """

    def __init__(self, weights: Draft, config: DraftConfig) -> None:
        self.weights = weights
        self.config = config.layer
        self.layer = LayerForward(weights.layer, config.layer, SLIDING, config.layer.sliding_window, TILE)
        self.slots = ring_slots(config.layer.sliding_window)  # older rows need not be computed

    def _entry(self, tokens: Ids, hidden: F32) -> F32:
        weights, eps = self.weights, self.config.rms_norm_eps
        embedded = rms_norm(weights.embed_tokens[tokens], weights.enorm, eps)
        joined = np.concatenate((embedded, rms_norm(hidden, weights.hnorm, eps)), axis=1)
        return np.concatenate([linear(joined, share, TILE) for share in weights.eh_proj], axis=1)

    def settle(self, tokens: Ids, hidden: F32, start: int) -> None:
        """Write the rows of positions start, …: tokens [rows] at start + 1, …, hidden [rows, H] at start, ….

        Only the layer's keys and values are needed, as no later row reads anything else of these.
        """
        self.layer.write_kv(self._entry(tokens, hidden), start)

    def forward(self, tokens: Ids, hidden: F32, start: int) -> tuple[F32, F32]:
        """As `settle`, and the rows' outputs: hidden states [rows, H] and logits [rows, vocab] for start + 2, …."""
        v = self.layer.forward(self._entry(tokens, hidden), start)
        out = rms_norm(v, self.weights.final_layernorm, self.config.rms_norm_eps)
        return out, head_logits(out, self.weights.lm_head, self.config.logit_scale, TILE)

    def oldest(self) -> int:
        """The lowest position that the cache still holds."""
        return self.layer.caches[0].oldest()
