"""The IQuest-Q1 forward pass: one layer, and the target model."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cuq1.config import SLIDING, Q1Config
from cuq1.reference.cache import Cache, FullCache, RingCache
from cuq1.reference.ops import (
    F32,
    TILE_ROWS,
    apply_rope,
    attention,
    linear,
    rms_norm,
    rope_tables,
    route,
    silu,
)
from cuq1.reference.weights import Dense, Experts, Layer, Target

Ids = NDArray[np.int64]


def ranks_sum(parts: Sequence[F32]) -> F32:
    """The ranks' partial results added in rank order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def new_cache(config: Q1Config, kind: str, kv_heads: int, capacity: int) -> Cache:
    """An empty cache for a layer of this kind; `capacity` positions where it is a full one."""
    if kind == SLIDING:
        return RingCache(kv_heads, config.head_dim, config.sliding_window)
    return FullCache(kv_heads, config.head_dim, capacity)


def _gated(x: F32, gate_up: F32, down: F32, tile: int) -> F32:
    """down(silu(gate(x)) * up(x)) of one expert or dense layer."""
    both = linear(x, gate_up, tile)
    width = both.shape[1] // 2
    return linear(silu(both[:, :width]) * both[:, width:], down, tile)


class LayerForward:
    """One layer with its caches, one a rank.

    `theta` and the caches' window are the layer's own; `config` gives the rest.
    `tile` is the number of rows that go into one product (see `ops`).
    """

    def __init__(self, layer: Layer, config: Q1Config, kind: str, capacity: int, tile: int = TILE_ROWS) -> None:
        self.layer = layer
        self.config = config
        self.tile = tile
        self.theta = config.swa_rope_theta if kind == SLIDING else config.rope_theta
        self.caches = [new_cache(config, kind, len(sink), capacity) for sink in layer.sink_k]

    def _heads(self, x: F32, norm: F32, start: int) -> F32:
        """Projections x [rows, heads * head_dim] as [rows, heads, head_dim], after per-head norm and RoPE."""
        config = self.config
        cos, sin = rope_tables(np.arange(start, start + len(x)), self.theta, config.rotary_dim)
        return apply_rope(rms_norm(x.reshape(len(x), -1, config.head_dim), norm, config.rms_norm_eps), cos, sin)

    def _keys_values(self, n: F32, rank: int, start: int) -> tuple[F32, F32]:
        """One rank's k and v [rows, kv_heads, head_dim], ready for the cache."""
        both = linear(n, self.layer.kv[rank], self.tile)
        k, v = np.split(both, 2, axis=1)
        return self._heads(k, self.layer.k_norm, start), v.reshape(len(n), -1, self.config.head_dim)

    def _attend(self, n: F32, rank: int, start: int) -> F32:
        """One rank's attention output [rows, heads * head_dim]; writes K and V of its rows."""
        cache = self.caches[rank]
        q = self._heads(linear(n, self.layer.q[rank], self.tile), self.layer.q_norm, start)
        k, v = self._keys_values(n, rank, start)
        out = np.empty_like(q)
        for row in range(0, len(n), self.tile):
            # A tile's rows are written before they are read, as a verification pass does it.
            rows = slice(row, row + self.tile)
            cache.write(start + row, k[rows], v[rows])
            positions = start + np.arange(row, min(row + self.tile, len(n)))
            first = 0 if cache.window is None else max(0, int(positions[0]) - cache.window + 1)
            keys, values, k_start = cache.read(first, int(positions[-1]))
            out[rows] = attention(
                q[rows],
                keys,
                values,
                self.layer.sink_k[rank],
                positions,
                k_start,
                cache.window,
                self.config.softmax_scale,
                self.tile,
            )
        return out.reshape(len(n), -1)

    def _moe(self, f: F32, experts: Experts) -> F32:
        """The routed experts' outputs [rows, hidden], weighted and summed from the largest weight down."""
        ids, weights = route(linear(f, experts.router, self.tile), self.config.num_experts_per_tok)
        order = np.argsort(ids, axis=None, kind="stable")  # (row, place) pairs, an expert's together
        x = f[order // ids.shape[1]]
        ends = np.cumsum(np.bincount(ids.ravel(), minlength=len(experts.router))).tolist()
        parts = []
        for gate_up, down in zip(experts.gate_up, experts.down, strict=True):
            y = np.empty_like(x)
            start = 0
            for expert, end in enumerate(ends):
                if end > start:
                    y[order[start:end]] = _gated(x[start:end], gate_up[expert], down[expert], self.tile)
                    start = end
            parts.append((y.reshape(*ids.shape, -1) * weights[:, :, None]).sum(axis=1))
        return ranks_sum(parts)

    def _mlp(self, f: F32) -> F32:
        mlp = self.layer.mlp
        if isinstance(mlp, Dense):
            return ranks_sum(
                [_gated(f, gate_up, down, self.tile) for gate_up, down in zip(mlp.gate_up, mlp.down, strict=True)]
            )
        return self._moe(f, mlp)

    def write_kv(self, x: F32, start: int) -> None:
        """Store the keys and values of at most as many rows as the caches hold, and compute nothing else."""
        n = rms_norm(x, self.layer.attention_norm, self.config.rms_norm_eps)
        for rank, cache in enumerate(self.caches):
            k, v = self._keys_values(n, rank, start)
            cache.write(start, k, v)

    def forward(self, x: F32, start: int) -> F32:
        """x [rows, hidden] at positions start, start + 1, … to the layer's output [rows, hidden]."""
        layer, eps = self.layer, self.config.rms_norm_eps
        n = rms_norm(x, layer.attention_norm, eps)
        attended = ranks_sum([linear(self._attend(n, rank, start), o, self.tile) for rank, o in enumerate(layer.o)])
        residual = n if layer.normed_residual else x
        h = residual + np.float32(layer.attn_scale) * rms_norm(attended, layer.attn_out_norm, eps)
        y = self._mlp(rms_norm(h, layer.feed_forward_norm, eps))
        if layer.ffn_out_norm is not None:
            y = rms_norm(y, layer.ffn_out_norm, eps)
        scaled: F32 = np.float32(layer.ffn_scale) * y
        return h + scaled


class TargetForward:
    """The target with its caches, for sequences of up to `capacity` tokens."""

    def __init__(self, weights: Target, config: Q1Config, capacity: int) -> None:
        self.weights = weights
        self.config = config
        self.layers = [
            LayerForward(layer, config, kind, capacity)
            for layer, kind in zip(weights.layers, config.layer_types, strict=True)
        ]

    def forward(self, ids: Ids, start: int) -> F32:
        """Token ids [rows] at positions start, … to hidden states [rows, hidden] after the final norm."""
        x = self.weights.embed_tokens[ids]
        for layer in self.layers:
            x = layer.forward(x, start)
        return rms_norm(x, self.weights.norm, self.config.rms_norm_eps)

    def logits(self, hidden: F32) -> F32:
        """Next-token logits [rows, vocab] of hidden states [rows, hidden]."""
        return head_logits(hidden, self.weights.lm_head, self.config.logit_scale)

    def oldest(self) -> int:
        """The lowest position that every layer's cache still holds."""
        return max(cache.oldest() for layer in self.layers for cache in layer.caches)


def head_logits(hidden: F32, lm_head: Sequence[F32], scale: float, tile: int = TILE_ROWS) -> F32:
    """logit_scale * lm_head(hidden), the ranks' vocabulary rows side by side: [rows, vocab]."""
    logits = np.concatenate([linear(hidden, share, tile) for share in lm_head], axis=1)
    return logits if scale == 1 else logits * np.float32(scale)
