"""A checkpoint's weights as FP32 arrays, in the shapes the reference multiplies by.

Each split matrix is a list with one array a rank. One rank is the ordinary case;
with more, the ranks' partial results are summed in rank order, as the ranks of a
tensor-parallel run do, which shows that shares add up to the whole.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cuq1.checkpoint import Checkpoint, DenseShare, LayerShare, Linear, TargetShare
from cuq1.checkpoint.shares import leaves
from cuq1.config import Q1Config
from cuq1.errors import DeviceError
from cuq1.reference.ops import F32

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Dense:
    """gate_up: [2 * width, hidden] a rank, gate half first; down: [hidden, width] a rank."""

    gate_up: list[F32]
    down: list[F32]


@dataclass(frozen=True)
class Experts:
    """router: [experts, hidden]; a rank: gate_up [experts, 2 * width, hidden], down [experts, hidden, width]."""

    router: F32
    gate_up: list[F32]
    down: list[F32]


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    q: [heads * head_dim, hidden] a rank; kv: [2 * kv_heads * head_dim, hidden] a rank, keys first;
    o: [hidden, heads * head_dim] a rank; sink_k: [kv_heads, head_dim] a rank; norms: [hidden], q_norm and
    k_norm: [head_dim]. Keys and values are apart from queries so that a row's are the same bits where
    nothing else of it is computed.
    The scales multiply the two sublayers' outputs. `normed_residual` says that
    the normalised input becomes the residual, as in every layer but the first.
    """

    attention_norm: F32
    attn_out_norm: F32
    feed_forward_norm: F32
    ffn_out_norm: F32 | None
    q_norm: F32
    k_norm: F32
    q: list[F32]
    kv: list[F32]
    o: list[F32]
    sink_k: list[F32]
    mlp: Dense | Experts
    attn_scale: float
    ffn_scale: float
    normed_residual: bool


@dataclass(frozen=True)
class Target:
    """embed_tokens: [vocab, hidden]; lm_head: [vocab / ranks, hidden] a rank."""

    embed_tokens: F32
    layers: list[Layer]
    norm: F32
    lm_head: list[F32]


@dataclass(frozen=True)
class Draft:
    """The recursive draft; eh_proj: [hidden / ranks, 2 * hidden] a rank, embedding half first."""

    embed_tokens: F32
    enorm: F32
    hnorm: F32
    eh_proj: list[F32]
    layer: Layer
    final_layernorm: F32
    lm_head: list[F32]


def _stack(*parts: Linear) -> F32:
    """The parts' rows one under the other, dequantised in place."""
    out = np.empty((sum(part.shape[0] for part in parts), parts[0].shape[1]), np.float32)
    row = 0
    for part in parts:
        part.dequantize(out[row : row + part.shape[0]])
        row += part.shape[0]
    return out


def _experts(gate: Sequence[Linear], up: Sequence[Linear], down: Sequence[Linear]) -> tuple[F32, F32]:
    width, hidden = gate[0].shape
    gate_up = np.empty((len(gate), 2 * width, hidden), np.float32)
    down_out = np.empty((len(gate), hidden, width), np.float32)
    for e in range(len(gate)):
        gate[e].dequantize(gate_up[e, :width])
        up[e].dequantize(gate_up[e, width:])
        down[e].dequantize(down_out[e])
    return gate_up, down_out


def _layer(shares: Sequence[LayerShare], config: Q1Config, *, sandwich: bool) -> Layer:
    """One layer from its ranks' shares; `sandwich` is layer 0's and the draft's residual structure."""
    one = shares[0]
    mlp: Dense | Experts
    if isinstance(one.mlp, DenseShare):
        dense = [share.mlp for share in shares if isinstance(share.mlp, DenseShare)]
        mlp = Dense([_stack(m.gate, m.up) for m in dense], [m.down.dequantize() for m in dense])
    else:
        routed = [share.mlp for share in shares if not isinstance(share.mlp, DenseShare)]
        pairs = [_experts(m.gate, m.up, m.down) for m in routed]
        mlp = Experts(one.mlp.router, [gate_up for gate_up, _ in pairs], [down for _, down in pairs])
    attention = [share.attention for share in shares]
    return Layer(
        attention_norm=one.attention_norm,
        attn_out_norm=one.attn_out_norm,
        feed_forward_norm=one.feed_forward_norm,
        ffn_out_norm=one.ffn_out_norm,
        q_norm=one.attention.q_norm,
        k_norm=one.attention.k_norm,
        q=[a.q.dequantize() for a in attention],
        kv=[_stack(a.k, a.v) for a in attention],
        o=[a.o.dequantize() for a in attention],
        sink_k=[a.sink_k for a in attention],
        mlp=mlp,
        attn_scale=config.first_layer_attn_out_scale if sandwich else config.attn_out_scale,
        ffn_scale=config.first_layer_ffn_out_scale if sandwich else config.ffn_out_scale,
        normed_residual=not sandwich,
    )


def _refuse_too_large(shares: Sequence[TargetShare]) -> None:
    """DeviceError where the FP32 weights cannot fit into this machine's memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return  # not every system says
    needed = sum(4 * leaf.shape[0] * leaf.shape[1] for _, leaf in leaves(tuple(shares)) if isinstance(leaf, Linear))
    if needed > memory:
        raise DeviceError(
            f"the CPU engine needs {needed / 1e9:.0f} GB for this checkpoint's weights in FP32, and this machine has "
            f"{memory / 1e9:.0f} GB: use a smaller checkpoint, or a machine with more memory"
        )


def load_target(checkpoint: Checkpoint, tp: int, progress: Progress | None = None) -> Target:
    """The target's weights as `tp` ranks' shares; `progress(done, layers)` is called after each layer."""
    config = checkpoint.config
    shares = [checkpoint.target(tp, rank) for rank in range(tp)]
    _refuse_too_large(shares)
    layers = []
    for i in range(config.num_layers):
        layers.append(_layer([share.layers[i] for share in shares], config, sandwich=i == 0))
        if progress is not None:
            progress(i + 1, config.num_layers)
    return Target(
        embed_tokens=shares[0].embed_tokens.dequantize(),
        layers=layers,
        norm=shares[0].norm,
        lm_head=[share.lm_head.dequantize() for share in shares],
    )


def load_draft(checkpoint: Checkpoint, tp: int) -> Draft | None:
    """The draft's weights, or None where the checkpoint has no draft."""
    if checkpoint.draft_config is None:
        return None
    shares = [checkpoint.draft(tp, rank) for rank in range(tp)]
    return Draft(
        embed_tokens=shares[0].embed_tokens.dequantize(),
        enorm=shares[0].enorm,
        hnorm=shares[0].hnorm,
        eh_proj=[share.eh_proj.dequantize() for share in shares],
        layer=_layer([share.layer for share in shares], checkpoint.draft_config.layer, sandwich=True),
        final_layernorm=shares[0].final_layernorm,
        lm_head=[share.lm_head.dequantize() for share in shares],
    )
