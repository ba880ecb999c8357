"""Where a rank's weights lie on the GPU: named tensors in one arena, planned from the config alone.

Nothing here needs a GPU or reads a tensor. The orders of elements are those of abi_decode.cuh, common/mma.cuh and
common/experts.cuh in kernels_cu. Names: `embed`, `norm`, `lm_head`; a layer's under `layers.3.`; the draft's under
`draft.`, its one layer's among them (`draft.qkv.weights`).

Precision is one of two a part of a layer. A part (attention: q, k, v, o; or all of an MLP's gate, up and down) is FP8
where all its linears carry scales and the shapes allow it, else F16: dequantised, and rounded to IEEE halves. A BF16
value fits a half exactly from 2**-14 up; below it loses at most 2**-25, 3e-8, absolute. What exceeds a half is refused.
The draft's lm_head alone is rounded further, to E4M3 with a scale a row: it decides what is drafted, never what is
accepted (tools/decisions/009).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

from cuq1.checkpoint import Checkpoint, DenseShare, DraftShare, LayerShare, Linear, RankShare, TargetShare
from cuq1.checkpoint.linear import BLOCK
from cuq1.config import DraftConfig, Q1Config
from cuq1.cuda.repack import TILE, unit_bytes
from cuq1.errors import ConfigError
from cuq1.plan.dims import DRAFT, HEAD_DIM, ROWS, Dims, dims_of

ALIGNMENT = 256
CHUNK = 512
MOST_DENSE_INNER = 256


@dataclass(frozen=True)
class Tensor:
    """One tensor of the arena: NumPy shape and dtype (packed weights are uint8), and the byte at which it begins."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Precision:
    """Whether a layer's attention and its MLP carry scales throughout."""

    attention: bool
    experts: bool


@dataclass(frozen=True)
class LayerLayout:
    """What a layer's kernels are compiled for.

    prefix: begins its tensors' names. inner: columns of one expert, or of one pseudo-expert of a dense layer;
    groups: how many of these. down_scale_k: columns of `down` that share a scale.
    """

    prefix: str
    moe: bool
    sandwich: bool
    inner: int
    groups: int
    fp8_attention: bool
    fp8_experts: bool
    down_scale_k: int


@dataclass(frozen=True)
class Layout:
    """A rank's arena: `nbytes` bytes, its tensors by name in order of offset. Layer -1 is the draft's."""

    config: Q1Config
    draft_config: DraftConfig | None
    tp: int
    rank: int
    layers: tuple[LayerLayout, ...]
    draft: LayerLayout | None
    tensors: dict[str, Tensor]
    nbytes: int

    def layer(self, number: int) -> LayerLayout:
        if number != DRAFT:
            return self.layers[number]
        if self.draft is None:
            raise ValueError("the layout has no draft")
        return self.draft

    def fp8_attention(self, layer: int) -> bool:
        return self.layer(layer).fp8_attention

    def fp8_experts(self, layer: int) -> bool:
        return self.layer(layer).fp8_experts

    def dense_inner(self, layer: int) -> int:
        """Width of a dense layer's pseudo-experts: 0 in an MoE layer."""
        found = self.layer(layer)
        return 0 if found.moe else found.inner

    def dense_groups(self, layer: int) -> int:
        """How many pseudo-experts a dense layer has: 0 in an MoE layer."""
        found = self.layer(layer)
        return 0 if found.moe else found.groups

    def dims(self, layer: int) -> Dims:
        """The sizes and precisions that a layer's kernels are compiled for."""
        config = self.config if layer != DRAFT or self.draft_config is None else self.draft_config.layer
        found = self.layer(layer)
        return replace(
            dims_of(config, self.tp),
            inner=found.inner,
            fp8_attention=found.fp8_attention,
            fp8_experts=found.fp8_experts,
        )

    def address(self, base: int, name: str) -> int:
        """Where a tensor lies in an arena that begins at `base`; 0, a null pointer, where there is none."""
        tensor = self.tensors.get(name)
        return 0 if tensor is None else base + tensor.offset


@dataclass(frozen=True)
class RankWeights:
    """One rank's layout, and the shares of a checkpoint that fill it; large matrices are unread views."""

    layout: Layout
    target: TargetShare
    draft: DraftShare | None


def rank_weights(checkpoint: Checkpoint, tp: int = 1, rank: int = 0, *, draft: bool = True) -> RankWeights:
    """The share of a rank, and the layout in the precisions that the checkpoint has; `draft=False` leaves it out.

    Raises ConfigError where the model does not divide or its sizes have no kernels, CheckpointError where a scale or
    a small tensor is damaged.
    """
    target = checkpoint.target(tp, rank)
    draft_share = checkpoint.draft(tp, rank) if draft and checkpoint.draft_config is not None else None
    layout = weights_plan(
        checkpoint.config,
        checkpoint.draft_config if draft else None,
        tp,
        rank,
        precisions=[_precision(layer) for layer in target.layers],
        draft_precision=None if draft_share is None else _precision(draft_share.layer),
    )
    return RankWeights(layout, target, draft_share)


def weights_plan(
    config: Q1Config,
    draft_config: DraftConfig | None,
    tp: int = 1,
    rank: int = 0,
    *,
    precisions: Sequence[Precision] | None = None,
    draft_precision: Precision | None = None,
) -> Layout:
    """The layout of one rank's weights.

    precisions: of each layer; without, all of a config that declares block FP8 is FP8, and all of another F16.
    Raises ConfigError where the model does not divide into `tp` shares, or a share's sizes have no kernels.
    """
    share = RankShare(config, tp, rank)
    planner = Planner()
    by_config = Precision(config.fp8_block is not None, config.fp8_block is not None)
    planner.add("embed", (config.vocab_size, config.hidden_size), "uint16")
    layers = tuple(
        planner.layer(
            f"layers.{i}.",
            share,
            by_config if precisions is None else precisions[i],
            moe=config.is_moe(i),
            sandwich=i == 0,
        )
        for i in range(config.num_layers)
    )
    planner.add("norm", (config.hidden_size,), "float32")
    planner.f16_tiles("lm_head", config.vocab_size // tp, config.hidden_size)
    draft = None
    if draft_config is not None:
        draft_share = RankShare(draft_config.layer, tp, rank)
        fp8 = draft_config.layer.fp8_block is not None
        draft = planner.draft(draft_share, draft_precision or Precision(fp8, fp8))
    return Layout(config, draft_config, tp, rank, layers, draft, planner.tensors, planner.position)


def _precision(layer: LayerShare) -> Precision:
    attention, mlp = layer.attention, layer.mlp
    linears: tuple[Linear, ...] = (
        (mlp.gate, mlp.up, mlp.down) if isinstance(mlp, DenseShare) else (*mlp.gate, *mlp.up, *mlp.down)
    )
    return Precision(
        attention=all(one.scale_inv is not None for one in (attention.q, attention.k, attention.v, attention.o)),
        experts=all(one.scale_inv is not None for one in linears),
    )


class Planner:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.position = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: str = "uint8") -> None:
        tensor = Tensor(name, shape, dtype, self.position)
        self.tensors[name] = tensor
        self.position += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def f16_tiles(self, name: str, rows: int, cols: int) -> None:
        """Rows are padded with zeros to whole tiles."""
        self.add(name, (-(-rows // TILE), cols // 16, CHUNK))

    def draft(self, share: RankShare, precision: Precision) -> LayerLayout:
        config = share.config
        hidden = config.hidden_size
        self.add("draft.embed", (config.vocab_size, hidden), "uint16")
        for name in ("draft.enorm", "draft.hnorm", "draft.final_norm"):
            self.add(name, (hidden,), "float32")
        self.f16_tiles("draft.eh_proj", hidden // share.tp, 2 * hidden)
        layer = self.layer("draft.", share, precision, moe=True, sandwich=True)
        tiles = -(-(config.vocab_size // share.tp) // TILE)
        self.add("draft.lm_head.weights", (tiles, hidden // 32, CHUNK))
        self.add("draft.lm_head.scales", (tiles * TILE,), "float32")
        return layer

    def layer(self, prefix: str, share: RankShare, precision: Precision, *, moe: bool, sandwich: bool) -> LayerLayout:
        config, tp = share.config, share.tp
        _refuse_other_sizes(config, tp)
        hidden, experts = config.hidden_size, config.num_experts
        q_heads = config.num_attention_heads // tp
        kv_heads = share.kv_heads.stop - share.kv_heads.start
        width, slice_width = q_heads * HEAD_DIM, hidden // tp
        fp8 = precision.attention
        cut = 32 if fp8 else 16  # columns of a chunk
        for name in ("attention_norm", "attn_out_norm", "ffn_norm", *["ffn_out_norm"] * sandwich):
            self.add(f"{prefix}{name}", (hidden,), "float32")
        self.add(f"{prefix}q_norm", (HEAD_DIM,), "float32")
        self.add(f"{prefix}k_norm", (HEAD_DIM,), "float32")
        self.add(f"{prefix}sink_k", (kv_heads, HEAD_DIM), "float32")
        heads = q_heads + 2 * kv_heads
        self.add(f"{prefix}qkv.weights", (heads, HEAD_DIM // TILE, hidden // cut, CHUNK))
        if fp8:
            self.add(f"{prefix}qkv.scales", (heads, hidden // BLOCK), "float32")
        self.add(f"{prefix}o.weights", (hidden // TILE, width // cut, CHUNK))
        if fp8:
            self.add(f"{prefix}o.scales", (hidden // TILE, q_heads), "float32")
        if moe:
            self.add(f"{prefix}router", (experts, hidden), "float32")
            self.add(f"{prefix}fold", (experts, width + slice_width), "float32")
            inner, groups = config.intermediate_size // tp, experts
            fp8_experts = precision.experts and inner % 32 == 0
            _refuse_inner(inner, tp)
        else:
            inner, fp8_experts = _dense_inner(config, tp, fp8=precision.experts)
            groups = config.dense_intermediate_size // tp // inner
        cut = 32 if fp8_experts else 16
        # The rank's first column of `down` is a multiple of inner, and so is each pseudo-expert's.
        scale_k = gcd(inner, BLOCK)
        self.add(f"{prefix}gate_up", (groups, inner // 8, unit_bytes(hidden, fp8=fp8_experts)))
        self.add(f"{prefix}down.weights", (groups, hidden // TILE, inner // cut, CHUNK))
        if fp8_experts:
            self.add(f"{prefix}down.scales", (groups, hidden // TILE, inner // scale_k), "float32")
        return LayerLayout(prefix, moe, sandwich, inner, groups, fp8, fp8_experts, scale_k)


def _dense_inner(config: Q1Config, tp: int, *, fp8: bool) -> tuple[int, bool]:
    """The width of a dense layer's pseudo-experts, and whether it stays FP8.

    An expert's, so that one kernel serves both, else the largest that divides the rank's share.
    """
    width, inner = config.dense_intermediate_size // tp, config.intermediate_size // tp
    most = max(64, ROWS * config.num_experts_per_tok)  # MAX_GROUPS of common/experts.cuh
    for cut in (32, 16) if fp8 else (16,):
        fitting = [size for size in range(cut, min(width, MOST_DENSE_INNER) + 1, cut) if width % size == 0]
        own = inner % cut == 0 and width % inner == 0
        if own or fitting:
            chosen = inner if own else max(fitting)
            if width // chosen > most:
                raise ConfigError(
                    f"dense_intermediate_size {config.dense_intermediate_size} at tp {tp} would be computed in "
                    f"{width // chosen} parts of {chosen}, and the CUDA kernels take {most}: choose a larger tp"
                )
            return chosen, cut == 32
    raise ConfigError(
        f"dense_intermediate_size {config.dense_intermediate_size} at tp {tp} gives {width} columns a rank, and the "
        "CUDA kernels need a multiple of 16: choose a smaller tp"
    )


def _refuse_inner(inner: int, tp: int) -> None:
    if inner % 16:
        raise ConfigError(
            f"intermediate_size at tp {tp} gives {inner} columns a rank, and the CUDA kernels need a multiple of 16: "
            "choose a smaller tp"
        )


def _refuse_other_sizes(config: Q1Config, tp: int) -> None:
    if config.head_dim != HEAD_DIM:
        raise ConfigError(
            f"head_dim is {config.head_dim}, and the CUDA kernels compute {HEAD_DIM}: use --device cpu for this model"
        )
    for key, size, step in (("hidden_size", config.hidden_size, BLOCK), ("rotary_dim", config.rotary_dim, 16)):
        if size % step:
            raise ConfigError(
                f"{key} is {size}, and the CUDA kernels need a multiple of {step}: use --device cpu for this model"
            )
