"""IQuest-Q1, resolved for one rank: its layers' sizes and kinds, and the buffers that all of its plans share."""

from collections.abc import Mapping
from ctypes import sizeof
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cuq1.config import SLIDING, DraftConfig, Q1Config
from cuq1.cuda import abi
from cuq1.cuda.kernels import attention, draft, head, prefill
from cuq1.errors import ConfigError
from cuq1.models.collect import Tensor, buffer_of
from cuq1.models.inbox import Inbox
from cuq1.plan.dims import DRAFT, HEAD_DIM, KV_TILE, MAX_TOP_K, MULTIPROCESSORS, ROWS, Dims, dims_of
from cuq1.plan.types import Buffer, Ref

SLACK = ROWS  # positions beyond the context that the last rounds' drafts may write


class LayerWeights(Protocol):
    """How a layer's weights are stored, which decides the kernels that read them."""

    @property
    def moe(self) -> bool: ...

    @property
    def inner(self) -> int:
        """Columns of an expert, or of a dense layer's pseudo-experts."""

    @property
    def groups(self) -> int:
        """Experts, or pseudo-experts."""

    @property
    def fp8_attention(self) -> bool: ...

    @property
    def fp8_experts(self) -> bool: ...

    @property
    def down_scale_k(self) -> int:
        """Columns of the down projection that share a scale."""


class Weights(Protocol):
    """What the plan has to know of a rank's weights (cuq1.cuda.weights lays them out)."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def layer(self, number: int) -> LayerWeights: ...


def ring_slots(window: int) -> int:
    """Slots of a sliding layer's cache: the window and a tile of slack, in whole tiles."""
    return -(-(window + KV_TILE) // KV_TILE) * KV_TILE


@dataclass(frozen=True)
class Layer:
    """One physical layer: where its weights and caches are, and what its norms do."""

    number: int
    prefix: str
    sliding: bool
    window: int
    slots: int
    theta: float
    sandwich: bool
    attn_scale: float
    ffn_scale: float
    dense_groups: int
    dims: Dims
    down_scale_k: int


@dataclass(frozen=True)
class Model:
    """A rank's model, resolved: sizes, layers, and the buffers that all of its plans share.

    capacity: positions of a full layer's cache, a multiple of 64. sms: multiprocessors of the GPU.
    fp8_activations: the experts' inputs are quantised to E4M3 with a scale a row. place: the rank's number among the
    `dims.ranks` that exchange. folded: routing is (laboratory: where not, see cuq1.models.routing).
    """

    config: Q1Config
    draft_config: DraftConfig | None
    tp: int
    rank: int
    capacity: int
    sms: int
    dims: Dims
    layers: tuple[Layer, ...]
    draft: Layer | None
    weights: Weights
    fp8_activations: bool = False
    place: int = 0
    folded: bool = True

    @cached_property
    def inbox(self) -> Inbox | None:
        """Where peers push their parts, or None where nothing is exchanged."""
        return Inbox(self.dims, self.place) if self.dims.ranks > 1 else None

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The target's, and the draft's where there is one."""
        return self.layers if self.draft is None else (*self.layers, self.draft)

    @property
    def inverse_frequencies(self) -> dict[str, NDArray[np.float64]]:
        """RoPE's theta ** (-2i / rotary) [rotary / 2] of every base, by the name of its buffer."""
        pairs = self.dims.rotary // 2
        exponents = -np.arange(pairs, dtype=np.float64) / max(pairs, 1)
        return {f"rope.{layer.theta:g}": layer.theta**exponents for layer in self.all_layers}

    @property
    def empty(self) -> dict[str, NDArray[np.int32]]:
        """What buffers hold where the sequence is empty: nothing is asked, as no kernel looks beyond what counts."""
        return {}

    @property
    def short_context(self) -> int:
        """Positions up to which a pass may use the plans for short contexts."""
        return attention.SHORT_CONTEXT

    def is_short(self, done: int) -> bool:
        """Whether a pass at positions done, done + 1, … may use the plans for short contexts."""
        return done + ROWS <= self.short_context

    def folds(self, layer: Layer) -> bool:
        """Whether a layer's router is part of o_proj and of the attention tail."""
        return self.folded and layer.dense_groups == 0

    def polls(self, number: int) -> bool:
        """Whether a layer's attention tail polls for what o_proj writes: the layer before then makes that NOT_READY.

        Not said of what comes from peers, for which every layer's polls.
        """
        return 0 < number < len(self.layers) and self.layers[number].dense_groups == 0


def resolve(
    config: Q1Config,
    draft_config: DraftConfig | None,
    weights: Weights,
    *,
    tp: int = 1,
    rank: int = 0,
    capacity: int | None = None,
    sms: int = MULTIPROCESSORS,
    fp8_activations: bool = False,
    ranks: int = 1,
    place: int = 0,
    folded: bool = True,
) -> Model:
    """The model of one rank; capacity defaults to the whole context.

    ranks: how many exchange their results, of which this is number `place`; with 1 the others' are taken as zero.
    folded: as in Model. Raises ConfigError for more ranks than kernels exchange among, ValueError for a place that is
    not one of theirs.
    """
    if ranks > abi.MAX_RANKS:
        raise ConfigError(f"{ranks} ranks are more than exchange their results: choose at most {abi.MAX_RANKS}")
    if not 0 <= place < ranks <= tp:
        raise ValueError(f"place {place} is none of {ranks} ranks' of {tp}")
    positions = (config.max_position_embeddings if capacity is None else capacity) + SLACK
    slots = -(-positions // KV_TILE) * KV_TILE

    def layer(number: int, source: Q1Config, prefix: str, *, sliding: bool, sandwich: bool) -> Layer:
        stored = weights.layer(number)
        dims = replace(
            dims_of(source, tp),
            inner=stored.inner,
            fp8_attention=stored.fp8_attention,
            fp8_experts=stored.fp8_experts,
            fp8_activations=fp8_activations and stored.moe and stored.fp8_experts,
            ranks=ranks,
        )
        return Layer(
            number=number,
            prefix=prefix,
            sliding=sliding,
            window=source.sliding_window if sliding else 0,
            slots=ring_slots(source.sliding_window) if sliding else slots,
            theta=source.swa_rope_theta if sliding else source.rope_theta,
            sandwich=sandwich,
            attn_scale=source.first_layer_attn_out_scale if sandwich else source.attn_out_scale,
            ffn_scale=source.first_layer_ffn_out_scale if sandwich else source.ffn_out_scale,
            dense_groups=0 if stored.moe else stored.groups,
            dims=dims,
            down_scale_k=stored.down_scale_k,
        )

    layers = tuple(
        layer(i, config, f"layers.{i}", sliding=kind == SLIDING, sandwich=i == 0)
        for i, kind in enumerate(config.layer_types)
    )
    drafter = (
        layer(DRAFT, draft_config.layer, "draft", sliding=True, sandwich=True) if draft_config is not None else None
    )
    dims = replace(dims_of(config, tp), ranks=ranks)
    return Model(
        config, draft_config, tp, rank, slots, sms, dims, layers, drafter, weights, fp8_activations, place, folded
    )


def cache_buffers(model: Model) -> list[Buffer]:
    """Keys and values of every layer, zeroed before first use: a masked slot's value must be finite."""
    found = []
    for layer in model.all_layers:
        shape = (layer.dims.kv_heads, layer.slots, HEAD_DIM)
        found += [buffer_of(f"{layer.prefix}.{kind}_cache", shape, "float16") for kind in "kv"]
    return found


def projected(d: Dims) -> dict[str, Ref]:
    """Where o_proj's results lie, one behind the other: [ROWS, hidden], and twice [ROWS, experts], float32."""
    after = ROWS * d.hidden * 4
    return {
        "o": Ref("o", 0),
        "router_attended": Ref("o", after),
        "router_residual": Ref("o", after + ROWS * d.experts * 4),
    }


def _unfolded_buffers(d: Dims) -> tuple[Buffer, ...]:
    return (
        buffer_of("ffn_normed32", (ROWS, d.hidden), "float32"),
        buffer_of("router_logits", (prefill.router_splits(d), ROWS, d.experts), "float32"),
    )


def working_buffers(model: Model) -> list[Buffer]:
    """Everything that a round reads or writes besides weights: caches, activations, the request's state."""
    d = model.dims
    layers = model.all_layers
    splits = attention.splits_for(d, model.sms)  # of full layers; sliding ones leave no partial results
    groups = max(ROWS * d.top_k, 64)
    inner = max(layer.dims.inner for layer in layers)
    m = ROWS * d.group
    pieces = head.PIECES
    f32, f16, i32 = "float32", "float16", "int32"
    return [
        *cache_buffers(model),
        buffer_of("fault", (sizeof(abi.Fault),), "uint8"),
        buffer_of("state", (sizeof(abi.State),), "uint8"),
        *(buffer_of(f"rope.{theta:g}", (d.rotary // 2,), "float64") for theta in sorted({la.theta for la in layers})),
        buffer_of("residual", (ROWS, d.hidden), f32),
        buffer_of("residual_inverse", (ROWS,), f32),
        buffer_of("normed", (ROWS, d.hidden), f16),
        buffer_of("q", (ROWS, d.q_heads, HEAD_DIM), f16),
        buffer_of("partial_out", (d.kv_heads, splits, m, HEAD_DIM), f32),
        buffer_of("partial_max", (d.kv_heads, splits, m), f32),
        buffer_of("partial_sum", (d.kv_heads, splits, m), f32),
        buffer_of("attended32", (ROWS, d.q_width), f32),
        buffer_of("attended", (ROWS, d.q_width), f16),
        buffer_of("o", (ROWS * (d.hidden + 2 * d.experts),), f32),
        buffer_of("h", (ROWS, d.hidden), f32),
        buffer_of("ffn_normed", (ROWS, d.hidden), f16),
        buffer_of("codes", (ROWS, d.hidden), "uint8"),
        buffer_of("code_scale", (ROWS,), f32),
        buffer_of("expert_ids", (ROWS, d.top_k), i32),
        buffer_of("expert_weights", (ROWS, d.top_k), f32),
        buffer_of("routed", (abi.ROUTED_COPIES, ROWS, d.top_k), i32),
        buffer_of("forced_ids", (len(layers), ROWS, d.top_k), i32),
        buffer_of("inner", (groups, ROWS, inner), f16),
        buffer_of("inner_max", (groups, ROWS), f32),
        buffer_of("y", (ROWS, d.hidden), f32),
        buffer_of("hidden", (ROWS, d.hidden), f32),
        buffer_of("hidden16", (ROWS, d.hidden), f16),
        buffer_of("draft_hidden", (ROWS, d.hidden), f32),
        buffer_of("draft_hidden16", (ROWS, d.hidden), f16),
        buffer_of("eh_pieces", (draft.eh_splits(d), ROWS, d.hidden), f32),
        buffer_of("logits", (ROWS, d.vocab), f32),
        buffer_of("top_values", (ROWS, pieces, MAX_TOP_K), f32),
        buffer_of("top_ids", (ROWS, pieces, MAX_TOP_K), i32),
        *(model.inbox.buffers() if model.inbox is not None else ()),
        *(() if model.folded else _unfolded_buffers(d)),
    ]
