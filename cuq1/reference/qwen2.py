"""The Qwen2 forward pass, in FP32 whatever the weights are stored in."""

import numpy as np
from numpy.typing import NDArray

from cuq1.config_qwen2 import Qwen2Config
from cuq1.reference.cache import FullCache
from cuq1.reference.ops import F32, TILE_ROWS, apply_rope, attention, linear, rms_norm, rope_tables, silu
from cuq1.reference.qwen2_weights import Qwen2Layer, Qwen2Weights

Ids = NDArray[np.int64]


class Qwen2LayerForward:
    """One layer with its cache, for sequences of up to `capacity` tokens."""

    def __init__(self, layer: Qwen2Layer, config: Qwen2Config, capacity: int) -> None:
        self.layer = layer
        self.config = config
        self.cache = FullCache(config.num_key_value_heads, config.head_dim, capacity)

    def _attend(self, n: F32, start: int) -> F32:
        """Attention's output [rows, heads * head_dim]; writes K and V of its rows."""
        layer, dim = self.layer, self.config.head_dim
        cos, sin = rope_tables(np.arange(start, start + len(n)), self.config.rope_theta, dim)
        q = apply_rope((linear(n, layer.q) + layer.q_bias).reshape(len(n), -1, dim), cos, sin)
        k = apply_rope((linear(n, layer.k) + layer.k_bias).reshape(len(n), -1, dim), cos, sin)
        v = (linear(n, layer.v) + layer.v_bias).reshape(len(n), -1, dim)
        self.cache.write(start, k, v)
        out = np.empty_like(q)
        for row in range(0, len(n), TILE_ROWS):
            rows = slice(row, row + TILE_ROWS)
            positions = start + np.arange(row, min(row + TILE_ROWS, len(n)))
            keys, values, k_start = self.cache.read(0, int(positions[-1]))
            out[rows] = attention(q[rows], keys, values, None, positions, k_start, None, dim**-0.5)
        return out.reshape(len(n), -1)

    def forward(self, x: F32, start: int) -> F32:
        """x [rows, hidden] at positions start, start + 1, … to the layer's output [rows, hidden]."""
        layer, eps = self.layer, self.config.rms_norm_eps
        h = x + linear(self._attend(rms_norm(x, layer.input_norm, eps), start), layer.o)
        f = rms_norm(h, layer.post_norm, eps)
        return h + linear(silu(linear(f, layer.gate)) * linear(f, layer.up), layer.down)


class Qwen2Forward:
    """The model with its caches, for sequences of up to `capacity` tokens."""

    def __init__(self, weights: Qwen2Weights, config: Qwen2Config, capacity: int) -> None:
        self.weights = weights
        self.config = config
        self.layers = [Qwen2LayerForward(layer, config, capacity) for layer in weights.layers]

    def forward(self, ids: Ids, start: int) -> F32:
        """Token ids [rows] at positions start, … to hidden states [rows, hidden] after the final norm.

        Positions before start must have been computed; later ones are overwritten.
        """
        x = self.weights.embed_tokens[ids]
        for layer in self.layers:
            x = layer.forward(x, start)
        return rms_norm(x, self.weights.norm, self.config.rms_norm_eps)

    def logits(self, hidden: F32) -> F32:
        """Next-token logits [rows, vocab] of hidden states [rows, hidden]."""
        return linear(hidden, self.weights.lm_head)
