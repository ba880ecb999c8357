"""What one rank holds: matrices as views of the mapped files, small tensors as float32 arrays.

H is the hidden size, D the head size, E the number of experts. Linears are [out, in].
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from cuq1.checkpoint.linear import Float32, Linear


@dataclass(frozen=True, eq=False)
class AttentionShare:
    """q, k, v: the rank's heads as rows [.., H]; o: the rank's heads as columns [H, ..], so ranks' outputs add up.

    q_norm, k_norm: [D]. sink_k: [KV heads of the rank, D].
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Float32
    k_norm: Float32
    sink_k: Float32


@dataclass(frozen=True, eq=False)
class DenseShare:
    """gate, up: [width of the rank, H]; down: [H, width of the rank], so ranks' outputs add up."""

    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, eq=False)
class MoeShare:
    """router: [E, H], replicated; gate, up, down: one linear an expert, split as a dense layer's."""

    router: Float32
    gate: tuple[Linear, ...]
    up: tuple[Linear, ...]
    down: tuple[Linear, ...]


@dataclass(frozen=True, eq=False)
class LayerShare:
    """Norm weights are [H]; ffn_out_norm is there in layer 0 and in the draft layer only."""

    attention_norm: Float32
    attn_out_norm: Float32
    feed_forward_norm: Float32
    ffn_out_norm: Float32 | None
    attention: AttentionShare
    mlp: DenseShare | MoeShare


@dataclass(frozen=True, eq=False)
class TargetShare:
    """embed_tokens: [vocab, H], a lookup table that every rank has whole; lm_head: the rank's rows; norm: [H]."""

    embed_tokens: Linear
    layers: tuple[LayerShare, ...]
    norm: Float32
    lm_head: Linear


@dataclass(frozen=True, eq=False)
class DraftShare:
    """The draft: eh_proj holds the rank's output rows [H / tp, 2 x H], embedding half of the columns first.

    embed_tokens and lm_head as the target's; enorm, hnorm, final_layernorm: [H].
    """

    embed_tokens: Linear
    enorm: Float32
    hnorm: Float32
    eh_proj: Linear
    layer: LayerShare
    final_layernorm: Float32
    lm_head: Linear


def leaves(share: object, path: str = "") -> Iterator[tuple[str, Linear | Float32]]:
    """Every linear and array of a share (or of a part of one), with its attribute path."""
    if isinstance(share, Linear | np.ndarray):
        yield path, share
    elif isinstance(share, tuple):
        for number, item in enumerate(share):
            yield from leaves(item, f"{path}[{number}]")
    elif share is not None:
        for field in fields(share):  # type: ignore[arg-type]
            yield from leaves(getattr(share, field.name), f"{path}.{field.name}" if path else field.name)
