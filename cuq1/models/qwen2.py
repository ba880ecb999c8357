"""A Qwen2 model, resolved for one GPU: its sizes, its paged KV cache, and the buffers that all of its plans share.

A page holds PAGE positions of all KV heads of a layer; a page's number is the same in every layer. The sequence's pages
stand in the page table, by position / PAGE, and kernels take them from a list of free ones as positions need them. All
that the caches hold stays when the sequence is shortened, and so does the table: what is computed again writes over it.
"""

from collections.abc import Mapping
from ctypes import sizeof
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cuq1.config_qwen2 import Qwen2Config
from cuq1.cuda import abi
from cuq1.cuda.abi import QWEN2_LAYERS
from cuq1.cuda.kernels import head, qwen2_attention, qwen2_head, qwen2_layers
from cuq1.models.collect import Tensor, buffer_of
from cuq1.models.qwen2_forms import HALF, Form, form_for, handed_bytes, runs_of
from cuq1.plan.dims import MAX_TOP_K, MULTIPROCESSORS, ROWS, Dims
from cuq1.plan.qwen2_dims import PAGE, Qwen2Dims, padded, pieces
from cuq1.plan.types import Buffer


class Weights(Protocol):
    """A model's weights as they lie in memory."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def dims(self) -> Qwen2Dims: ...


@dataclass(frozen=True)
class Layer:
    """A layer holds every position, so that nothing stands in the way of rewinding."""

    number: int
    sliding: bool = False
    window: int = 0
    slots: int = 0

    @property
    def prefix(self) -> str:
        return f"layers.{self.number}"


@dataclass(frozen=True)
class Model:
    """capacity: positions that the caches hold, whole pages of them. form: in which launches the layers run;
    layers_per_launch: at most, in the form `layers`."""

    config: Qwen2Config
    weights: Weights
    capacity: int
    form: Form = "launches"
    layers_per_launch: int = QWEN2_LAYERS

    draft = None

    @property
    def sizes(self) -> Qwen2Dims:
        """What this model's own kernels are compiled for."""
        return self.weights.dims

    @property
    def dims(self) -> Dims:
        """What lm_head, sampling and the loop are compiled for."""
        return qwen2_head.shared(self.sizes)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(map(Layer, range(self.config.num_hidden_layers)))

    @property
    def runs(self) -> tuple[range, ...]:
        """The layers of each launch, in the form `layers`."""
        return runs_of(len(self.layers), self.layers_per_launch)

    @property
    def regions(self) -> int:
        """Of `handed`: neighbouring chains take turns, as one clears what the next fills; else each launch has one."""
        return {"layers": len(self.runs), "chain": 2, "launches": 0}[self.form]

    @property
    def pages(self) -> int:
        return self.capacity // PAGE

    @property
    def splits(self) -> int:
        """Blocks among which a KV head's positions are divided in a long context."""
        return qwen2_attention.splits_for(self.sizes)

    @property
    def short_context(self) -> int:
        """Positions up to which a pass may use the plans for short contexts."""
        if self.form == "layers":
            return qwen2_layers.short_positions(self.sizes)
        return qwen2_attention.short_positions(self.sizes)

    def is_short(self, done: int) -> bool:
        """Whether a pass at position `done` may use the plans for short contexts: as control.cu decides it."""
        return done + ROWS <= self.short_context

    @property
    def rope(self) -> str:
        """The buffer of RoPE's frequencies."""
        return f"rope.{self.config.rope_theta:g}"

    @property
    def inverse_frequencies(self) -> dict[str, NDArray[np.float64]]:
        """RoPE's theta ** (-2i / head_size) [head_size / 2], by the name of its buffer."""
        pairs = self.sizes.head_size // 2
        return {self.rope: self.config.rope_theta ** (-np.arange(pairs, dtype=np.float64) / pairs)}

    @property
    def empty(self) -> dict[str, NDArray[np.int32]]:
        """The page table and the free pages of an empty sequence, which takes the first page first."""
        return {
            "page_table": np.full(self.pages, -1, np.int32),
            "free_pages": np.arange(self.pages, dtype=np.int32)[::-1].copy(),
            "pages": np.array([self.pages, 0, 0, 0], np.int32),
        }


def resolve(
    config: Qwen2Config,
    weights: Weights,
    *,
    capacity: int | None = None,
    sms: int = MULTIPROCESSORS,
    form: Form | None = None,
    layers_per_launch: int = QWEN2_LAYERS,
) -> Model:
    """capacity: positions, the whole context where it is None; caches are of whole pages. sms: the GPU's
    multiprocessors. form: None is the fastest that they allow; layers_per_launch: 1 to QWEN2_LAYERS, as in Model.

    Raises ConfigError for a form that the model does not have there.
    """
    positions = config.max_position_embeddings if capacity is None else capacity
    chosen = form_for(weights.dims, sms, form)
    return Model(config, weights, -(-positions // PAGE) * PAGE, chosen, layers_per_launch)


def row_bytes(config: Qwen2Config) -> int:
    """What a layer's cache takes for a position."""
    return 2 * config.kv_size * HALF


def position_bytes(config: Qwen2Config) -> int:
    """What the caches of all layers take for a position."""
    return config.num_hidden_layers * row_bytes(config)


def cache_buffers(model: Model) -> list[Buffer]:
    """Keys and values of every layer, and which pages are whose; zeroed before first use, as masked values must be
    finite."""
    d = model.sizes
    shape = (model.pages, d.kv_heads, PAGE, d.head_size)
    return [
        *(buffer_of(f"{layer.prefix}.{kind}_pages", shape, "float16") for layer in model.layers for kind in "kv"),
        buffer_of("page_table", (model.pages,), "int32"),
        buffer_of("free_pages", (model.pages,), "int32"),
        buffer_of("pages", (sizeof(abi.Pages) // 4,), "int32"),
    ]


def working_buffers(model: Model) -> list[Buffer]:
    """Everything that decoding reads or writes besides weights: caches, activations, the request's state."""
    d = model.sizes
    lists = (ROWS, head.pieces_of(d.vocab), MAX_TOP_K)
    f32, f16 = "float32", "float16"
    return [
        *cache_buffers(model),
        buffer_of("fault", (sizeof(abi.Fault),), "uint8"),
        buffer_of("state", (sizeof(abi.State),), "uint8"),
        buffer_of(model.rope, (d.head_size // 2,), "float64"),
        buffer_of("residual", (2, d.hidden), f32),  # before attention, and before the MLP
        *_layers_buffers(model),
        buffer_of("hidden16", (ROWS, padded(d.hidden)), f16),
        buffer_of("logits", (1, d.vocab), f32),
        buffer_of("top_values", lists, f32),
        buffer_of("top_ids", lists, "int32"),
    ]


def _layers_buffers(model: Model) -> list[Buffer]:
    """What passes between the launches of the layers, and between their blocks."""
    d, splits, form = model.sizes, model.splits, model.form
    f32, f16 = "float32", "float16"
    found = []
    if model.regions:
        found += [buffer_of("handed", (model.regions, handed_bytes(d, form)), "uint8")]
    if form != "layers":
        found += [
            buffer_of("qkv_pieces", (pieces(d.qkv_rows, d.hidden), d.qkv_rows), f32),
            buffer_of("attended", (padded(d.q_width),), f16),
            buffer_of("partial_out", (d.kv_heads, splits, d.group, d.head_size), f32),
            buffer_of("partial_max", (d.kv_heads, d.group, splits), f32),
            buffer_of("partial_sum", (d.kv_heads, d.group, splits), f32),
        ]
    if form == "launches":
        found += [
            buffer_of("o_pieces", (pieces(d.hidden, d.q_width), d.hidden), f32),
            buffer_of("inner", (padded(d.inner),), f16),
            buffer_of("down_pieces", (pieces(d.hidden, d.inner), d.hidden), f32),
        ]
    return found
