"""IQuest-Q1 as a plan: the launches of one decode round of one rank, over named buffers.

A round verifies `rows` rows (the pending token and its drafts), judges the drafts, and drafts for the next round:

    embed, then for each layer  qkv > attention > combine > o_proj > attn_tail > gate_up > down > mlp_tail,
    lm_head > top_k > accept, then for each draft depth
    eh_proj > entry_norm > qkv > ... > mlp_tail > lm_head > top_k > draft_sample.

A layer's residual base is the raw input in layer 0 and the draft ("sandwich" layers), and the normalised input
elsewhere, which is why embed and mlp_tail say what the next layer wants.
"""

from collections.abc import Mapping
from ctypes import sizeof
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

from cuq1.config import SLIDING, DraftConfig, Q1Config
from cuq1.cuda import abi
from cuq1.cuda.kernels import attention, draft, experts, head, projections, rows, sampling
from cuq1.plan.dims import HEAD_DIM, KV_TILE, MAX_TOP_K, ROWS, Dims, dims_of
from cuq1.plan.kernel import Kernel
from cuq1.plan.types import Buffer, Launch, Plan, Ref

DRAFT = -1  # the draft's layer number in launches and reports
SLACK = ROWS  # positions beyond the context that the last rounds' drafts may write
ITEM = {"float32": 4, "float16": 2, "uint8": 1, "int32": 4, "float64": 8, "uint16": 2}


class Tensor(Protocol):
    """A tensor of the rank's weights."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


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
    fp8_activations: the experts' inputs are quantised to E4M3 with a scale a row.
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

    @property
    def splits(self) -> dict[str, int]:
        """Splits of the sequence by layer kind; partial results are sized for the largest."""
        found = {}
        for layer in (*self.layers, *((self.draft,) if self.draft else ())):
            found[f"{layer.window}"] = attention.splits_for(layer.dims, layer.window, self.sms)
        return found

    @property
    def short_context(self) -> int:
        """Positions up to which a pass may use the plans for short contexts."""
        return attention.short_context(attention.splits_for(self.dims, 0, self.sms))


def resolve(
    config: Q1Config,
    draft_config: DraftConfig | None,
    weights: Weights,
    *,
    tp: int = 1,
    rank: int = 0,
    capacity: int | None = None,
    sms: int = 132,
    fp8_activations: bool = False,
) -> Model:
    """The model of one rank; capacity defaults to the whole context."""
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
    return Model(
        config, draft_config, tp, rank, slots, sms, dims_of(config, tp), layers, drafter, weights, fp8_activations
    )


@dataclass
class _Builder:
    """Collects launches, and the buffers that they name."""

    model: Model
    distinct: float
    context: int
    short: bool = False  # full layers see no more than Model.short_context positions
    buffers: dict[str, Buffer] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        for buffer in working_buffers(self.model):
            self.buffers[buffer.name] = buffer

    def weight(self, name: str) -> Ref:
        if name not in self.buffers:
            found = self.model.weights.tensors[name]
            self.buffers[name] = _buffer(name, found.shape, found.dtype)
        return Ref(name, 0)

    def maybe(self, name: str) -> Ref | int:
        """A weight that not every layer has, such as the scales of what is not quantised."""
        return self.weight(name) if name in self.model.weights.tensors else 0

    def size(self, *refs: Ref | int) -> int:
        return sum(self.buffers[ref.buffer].bytes for ref in refs if isinstance(ref, Ref))

    def add(self, kernel: Kernel, label: str, layer: int, args: Mapping[str, Any], read: float, write: float) -> None:
        args = {"fault": Ref("fault", 0), "live": 0, "layer": layer, **args}
        known = {name for name, *_ in kernel.args._fields_}
        args = {name: value for name, value in args.items() if name in known}
        self.launches.append(Launch(kernel, label, layer, args, int(read), int(write)))

    def plan(self) -> Plan:
        used = {value.buffer for launch in self.launches for value in launch.args.values() if isinstance(value, Ref)}
        return Plan(tuple(b for b in self.buffers.values() if b.name in used), tuple(self.launches))


def _buffer(name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
    return Buffer(name, shape, dtype, prod(shape) * ITEM[dtype])


def cache_buffers(model: Model) -> list[Buffer]:
    """Keys and values of every layer, zeroed before first use: a masked slot's value must be finite."""
    found = []
    for layer in (*model.layers, *((model.draft,) if model.draft else ())):
        shape = (layer.dims.kv_heads, layer.slots, HEAD_DIM)
        found += [_buffer(f"{layer.prefix}.{kind}_cache", shape, "float16") for kind in "kv"]
    return found


def working_buffers(model: Model) -> list[Buffer]:
    """Everything that a round reads or writes besides weights: caches, activations, the request's state."""
    d = model.dims
    layers = (*model.layers, *((model.draft,) if model.draft else ()))
    splits = max(model.splits.values())
    groups = max(ROWS * d.top_k, 64)
    inner = max(layer.dims.inner for layer in layers)
    m = ROWS * d.group
    pieces = head.PIECES
    f32, f16, i32 = "float32", "float16", "int32"
    return [
        *cache_buffers(model),
        _buffer("fault", (sizeof(abi.Fault),), "uint8"),
        _buffer("state", (sizeof(abi.State),), "uint8"),
        *(_buffer(f"rope.{theta:g}", (d.rotary // 2,), "float64") for theta in sorted({la.theta for la in layers})),
        _buffer("residual", (ROWS, d.hidden), f32),
        _buffer("normed", (ROWS, d.hidden), f16),
        _buffer("q", (ROWS, d.q_heads, HEAD_DIM), f16),
        _buffer("partial_out", (d.kv_heads, splits, m, HEAD_DIM), f32),
        _buffer("partial_max", (d.kv_heads, splits, m), f32),
        _buffer("partial_sum", (d.kv_heads, splits, m), f32),
        _buffer("attended32", (ROWS, d.q_width), f32),
        _buffer("attended", (ROWS, d.q_width), f16),
        _buffer("o", (ROWS, d.hidden), f32),
        _buffer("router_attended", (ROWS, d.experts), f32),
        _buffer("router_residual", (ROWS, d.experts), f32),
        _buffer("h", (ROWS, d.hidden), f32),
        _buffer("ffn_normed", (ROWS, d.hidden), f16),
        _buffer("codes", (ROWS, d.hidden), "uint8"),
        _buffer("code_scale", (ROWS,), f32),
        _buffer("expert_ids", (ROWS, d.top_k), i32),
        _buffer("expert_weights", (ROWS, d.top_k), f32),
        _buffer("forced_ids", (len(layers), ROWS, d.top_k), i32),
        _buffer("inner", (groups, ROWS, inner), f16),
        _buffer("inner_max", (groups, ROWS), f32),
        _buffer("y", (ROWS, d.hidden), f32),
        _buffer("hidden", (ROWS, d.hidden), f32),
        _buffer("hidden16", (ROWS, d.hidden), f16),
        _buffer("draft_hidden", (ROWS, d.hidden), f32),
        _buffer("draft_hidden16", (ROWS, d.hidden), f16),
        _buffer("eh_pieces", (draft.eh_splits(d), ROWS, d.hidden), f32),
        _buffer("logits", (ROWS, d.vocab), f32),
        _buffer("top_values", (ROWS, pieces, MAX_TOP_K), f32),
        _buffer("top_ids", (ROWS, pieces, MAX_TOP_K), i32),
    ]


def _attention_part(b: _Builder, layer: Layer, rows_: int, live: Ref | int, positions: Ref, head_rows: int) -> None:
    """qkv, attention, combine, o_proj; `head_rows` of the `rows_` rows go beyond writing keys and values."""
    p, d = layer.prefix, layer.dims
    caches = {"k_cache": Ref(f"{p}.k_cache", 0), "v_cache": Ref(f"{p}.v_cache", 0)}
    qkv = {"weights": b.weight(f"{p}.qkv.weights"), "scales": b.maybe(f"{p}.qkv.scales")}
    splits = attention.splits_for(d, layer.window, b.model.sms)
    seen = min(b.context, layer.window) if layer.window else b.context
    kv = seen * d.kv_heads * 2 * HEAD_DIM * 2
    partial = {name: Ref(name, 0) for name in ("partial_out", "partial_max", "partial_sum")}
    shared = {"live": live, "q": Ref("q", 0), "positions": positions, **partial}
    shape = {"window": layer.window, "splits": splits, "scale": b.model.config.softmax_scale}
    b.add(
        projections.qkv(d),
        "qkv",
        layer.number,
        {
            **qkv,
            **caches,
            "live": live,
            "rows": rows_,
            "normed": Ref("normed", 0),
            "q_norm": b.weight(f"{p}.q_norm"),
            "k_norm": b.weight(f"{p}.k_norm"),
            "positions": positions,
            "inverse_frequencies": Ref(f"rope.{layer.theta:g}", 0),
            "q": Ref("q", 0),
            "slots": layer.slots,
        },
        b.size(*qkv.values()),
        rows_ * (d.q_heads + 2 * d.kv_heads) * HEAD_DIM * 2,
    )
    if head_rows == 0:
        return
    b.add(
        attention.attention(d, layer.window, splits, short=b.short),
        "attention",
        layer.number,
        {**shared, **caches, **shape, "rows": head_rows, "slots": layer.slots, "written": rows_},
        kv,
        0,
    )
    b.add(
        attention.combine(d, splits),
        "combine",
        layer.number,
        {
            **shared,
            **shape,
            "rows": head_rows,
            "sink_k": b.weight(f"{p}.sink_k"),
            "attended32": Ref("attended32", 0),
            "attended": Ref("attended", 0),
        },
        0,
        head_rows * d.q_width * 6,
    )
    moe = layer.dense_groups == 0
    o = {
        "weights": b.weight(f"{p}.o.weights"),
        "scales": b.maybe(f"{p}.o.scales"),
        "fold": b.weight(f"{p}.fold") if moe else 0,
    }
    b.add(
        projections.o_proj(d, moe=moe),
        "o_proj",
        layer.number,
        {
            **o,
            "live": live,
            "rows": head_rows,
            "attended": Ref("attended", 0),
            "attended32": Ref("attended32", 0),
            "residual": Ref("residual", 0),
            "out": Ref("o", 0),
            "router_attended": Ref("router_attended", 0),
            "router_residual": Ref("router_residual", 0),
            "slice_start": b.model.rank * d.slice_width,
        },
        b.size(*o.values()),
        head_rows * (d.hidden + 2 * d.experts) * 4,
    )


def _mlp_part(
    b: _Builder, layer: Layer, rows_: int, live: Ref | int, after: Mapping[str, Any], *, forced: bool
) -> None:
    """attn_tail, gate_up, down, mlp_tail; `after` says what the tail prepares for what comes next."""
    p, d = layer.prefix, layer.dims
    moe = layer.dense_groups == 0
    quantised = d.fp8_activations
    number = layer.number
    base = {"live": live, "rows": rows_}
    index = number if number != DRAFT else len(b.model.layers)
    b.add(
        rows.attn_tail(d, rows_, moe=moe),
        "attn_tail",
        number,
        {
            **base,
            "o": Ref("o", 0),
            "router_attended": Ref("router_attended", 0) if moe else 0,
            "router_residual": Ref("router_residual", 0) if moe else 0,
            "residual": Ref("residual", 0),
            "attn_out_norm": b.weight(f"{p}.attn_out_norm"),
            "ffn_norm": b.weight(f"{p}.ffn_norm"),
            "h": Ref("h", 0),
            "normed": Ref("ffn_normed", 0),
            "codes": Ref("codes", 0) if quantised else 0,
            "code_scale": Ref("code_scale", 0) if quantised else 0,
            "expert_ids": Ref("expert_ids", 0),
            "expert_weights": Ref("expert_weights", 0),
            "inner_max": Ref("inner_max", 0) if quantised else 0,
            "forced_ids": Ref("forced_ids", index * ROWS * d.top_k * 4) if forced and moe else 0,
            "ranks": 1,
            "attn_scale": layer.attn_scale,
            "normed32": 0,
        },
        0,
        rows_ * d.hidden * 6,
    )
    share = layer.dense_groups / (layer.dense_groups or 1) if not moe else min(1.0, _distinct(b, rows_) / d.experts)
    weights = b.weight(f"{p}.gate_up")
    down = {"weights": b.weight(f"{p}.down.weights"), "scales": b.maybe(f"{p}.down.scales")}
    b.add(
        experts.gate_up(d, sms=b.model.sms),
        "gate_up",
        number,
        {
            **base,
            "normed": Ref("ffn_normed", 0),
            "codes": Ref("codes", 0) if quantised else 0,
            "code_scale": Ref("code_scale", 0) if quantised else 0,
            "weights": weights,
            "expert_ids": Ref("expert_ids", 0),
            "inner": Ref("inner", 0),
            "inner_max": Ref("inner_max", 0) if quantised else 0,
            "dense_groups": layer.dense_groups,
        },
        b.size(weights) * share,
        rows_ * d.top_k * d.inner * 2,
    )
    b.add(
        experts.down(d, scale_k=layer.down_scale_k),
        "down",
        number,
        {
            **base,
            **down,
            "inner": Ref("inner", 0),
            "inner_max": Ref("inner_max", 0) if quantised else 0,
            "expert_ids": Ref("expert_ids", 0),
            "expert_weights": Ref("expert_weights", 0),
            "out": Ref("y", 0),
            "dense_groups": layer.dense_groups,
        },
        b.size(*down.values()) * share,
        rows_ * d.hidden * 4,
    )
    b.add(
        rows.mlp_tail(d, rows_),
        "mlp_tail",
        number,
        {
            **base,
            "y": Ref("y", 0),
            "h": Ref("h", 0),
            "ffn_out_norm": b.weight(f"{p}.ffn_out_norm") if layer.sandwich else 0,
            "ranks": 1,
            "ffn_scale": layer.ffn_scale,
            **after,
        },
        0,
        rows_ * d.hidden * 6,
    )


def _distinct(b: _Builder, rows_: int) -> float:
    """Distinct experts that `rows_` rows read: the figure that the plan was asked for, within what is possible."""
    low, high = b.model.dims.top_k, min(b.model.dims.experts, rows_ * b.model.dims.top_k)
    return max(low, min(high, b.distinct))


def _head(b: _Builder, name: str, normed: str, rows_: int, live: Ref | int, layer: int) -> None:
    d = b.model.dims
    weights = b.weight(name)
    b.add(
        head.lm_head(d),
        "lm_head",
        layer,
        {
            "live": live,
            "rows": rows_,
            "normed": Ref(normed, 0),
            "weights": weights,
            "logits": Ref("logits", 0),
            "scale": b.model.config.logit_scale,
        },
        b.size(weights),
        rows_ * d.vocab * 4,
    )


def _top_k(b: _Builder, rows_: int, live: Ref | int, layer: int) -> None:
    d = b.model.dims
    b.add(
        head.top_k(d),
        "top_k",
        layer,
        {
            "live": live,
            "rows": rows_,
            "logits": Ref("logits", 0),
            "values": Ref("top_values", 0),
            "ids": Ref("top_ids", 0),
            "first_id": b.model.rank * d.vocab,
        },
        rows_ * d.vocab * 4,
        0,
    )


def _state(name: str, index: int = 0) -> Ref:
    """A field of the request's state; index counts 4-byte elements."""
    return Ref("state", getattr(abi.State, name).offset + 4 * index)


def _target(b: _Builder, rows_: int, *, forced: bool) -> None:
    """The target's forward pass of rows_ rows: hidden states, and their logits."""
    model = b.model
    first = model.layers[0]
    table = b.weight("embed")
    b.add(
        rows.embed(model.dims, rows_),
        "embed",
        0,
        {
            "rows": rows_,
            "tokens": _state("tokens"),
            "table": table,
            "norm": b.weight(f"{first.prefix}.attention_norm"),
            "residual": Ref("residual", 0),
            "normed": Ref("normed", 0),
            "normed_residual": int(not first.sandwich),
        },
        rows_ * model.dims.hidden * 2,
        rows_ * model.dims.hidden * 6,
    )
    for i, layer in enumerate(model.layers):
        _attention_part(b, layer, rows_, 0, _state("positions"), rows_)
        if i + 1 < len(model.layers):
            following = model.layers[i + 1]
            after = {
                "next_norm": b.weight(f"{following.prefix}.attention_norm"),
                "residual": Ref("residual", 0),
                "normed": Ref("normed", 0),
                "normed_residual": int(not following.sandwich),
            }
        else:
            after = {
                "next_norm": b.weight("norm"),
                "residual": Ref("hidden", 0),
                "normed": Ref("hidden16", 0),
                "normed_residual": 1,
            }
        _mlp_part(b, layer, rows_, 0, after, forced=forced)
    _head(b, "lm_head", "hidden16", rows_, 0, len(model.layers))


def _accept(b: _Builder, rows_: int, *, first: bool) -> None:
    b.add(
        sampling.accept(b.model.dims),
        "accept",
        len(b.model.layers),
        {
            "rows": rows_,
            "state": Ref("state", 0),
            "values": Ref("top_values", 0),
            "ids": Ref("top_ids", 0),
            "pieces": head.PIECES,
            "first": int(first),
        },
        0,
        0,
    )


def _draft_depth(b: _Builder, depth: int, *, sample: bool, forced: bool, settle_only: bool = False) -> None:
    """One draft depth. Depth 0 has a row for each newly committed position, of which only the newest goes on."""
    model = b.model
    layer = model.draft
    assert layer is not None
    rows_ = ROWS if depth == 0 else 1
    live = _state("depth_rows", depth)
    eh = b.weight("draft.eh_proj")
    base = {"live": live, "rows": rows_}
    b.add(
        draft.eh_proj(model.dims),
        "eh_proj",
        DRAFT,
        {
            **base,
            "tokens": _state("draft_tokens"),
            "hidden_rows": _state("draft_hidden"),
            "table": b.weight("draft.embed"),
            "hidden": Ref("hidden", 0),
            "draft_hidden": Ref("draft_hidden", 0),
            "enorm": b.weight("draft.enorm"),
            "hnorm": b.weight("draft.hnorm"),
            "weights": eh,
            "out": Ref("eh_pieces", 0),
            "first_row": model.rank * model.dims.eh_rows,
        },
        b.size(eh),
        rows_ * model.dims.eh_rows * 4,
    )
    b.add(
        rows.entry_norm(model.dims, rows_),
        "entry_norm",
        DRAFT,
        {
            **base,
            "pieces": Ref("eh_pieces", 0),
            "norm": b.weight("draft.attention_norm"),
            "residual": Ref("residual", 0),
            "normed": Ref("normed", 0),
        },
        0,
        rows_ * model.dims.hidden * 6,
    )
    _attention_part(b, layer, rows_, live, _state("draft_positions"), 0 if settle_only else 1)
    if settle_only:
        return
    after = {
        "next_norm": b.weight("draft.final_norm"),
        "residual": Ref("draft_hidden", 0),
        "normed": Ref("draft_hidden16", 0),
        "normed_residual": 1,
    }
    _mlp_part(b, layer, 1, live, after, forced=forced)
    _head(b, "draft.lm_head", "draft_hidden16", 1, live, DRAFT)
    if sample:
        _top_k(b, 1, live, DRAFT)
        b.add(
            sampling.draft_sample(model.dims),
            "draft_sample",
            DRAFT,
            {
                "live": live,
                "rows": 1,
                "state": Ref("state", 0),
                "values": Ref("top_values", 0),
                "ids": Ref("top_ids", 0),
                "pieces": head.PIECES,
                "depth": depth,
            },
            0,
            0,
        )


def _drafting(b: _Builder, drafts: int, *, forced: bool) -> None:
    """Depths 0 .. drafts - 1; without drafts, the draft's cache still takes in what was committed."""
    if b.model.draft is None:
        return
    for depth in range(drafts):
        _draft_depth(b, depth, sample=True, forced=forced)
    if drafts == 0:
        _draft_depth(b, 0, sample=False, forced=forced, settle_only=True)


def round_of(
    model: Model,
    rows_: int,
    drafts: int,
    *,
    context: int = 1024,
    distinct: float = 8.0,
    forced: bool = False,
    short: bool = False,
) -> Plan:
    """A whole round: `rows_` rows are verified and judged, then up to `drafts` drafts are made.

    context and distinct count the bytes only. forced: routing is read from the buffer `forced_ids`. short: no row's
    position reaches `model.short_context`.
    """
    b = _Builder(model, distinct, context, short=short)
    _target(b, rows_, forced=forced)
    _top_k(b, rows_, 0, len(model.layers))
    _accept(b, rows_, first=False)
    _drafting(b, drafts, forced=forced)
    return b.plan()


def first_of(model: Model, drafts: int) -> Plan:
    """A request's first token from the logits' row 0, and the drafts after it."""
    b = _Builder(model, model.dims.top_k, 0)
    _top_k(b, 1, 0, len(model.layers))
    _accept(b, 1, first=True)
    _drafting(b, drafts, forced=False)
    return b.plan()


def target_of(model: Model, rows_: int, *, short: bool = False) -> Plan:
    """The target's forward pass alone: logits of rows_ rows, for sampling on the host. short: as in `round_of`."""
    b = _Builder(model, model.dims.top_k, 0, short=short)
    _target(b, rows_, forced=False)
    return b.plan()


def depth_of(model: Model, depth: int, *, settle_only: bool = False) -> Plan:
    """One draft depth up to its logits (row 0), for sampling on the host."""
    b = _Builder(model, model.dims.top_k, 0)
    _draft_depth(b, depth, sample=False, forced=False, settle_only=settle_only)
    return b.plan()


def logits_of(model: Model) -> Plan:
    """Logits' row 0 from row 0 of the target's hidden states, after a prefill."""
    b = _Builder(model, model.dims.top_k, 0)
    _head(b, "lm_head", "hidden16", 1, 0, len(model.layers))
    return b.plan()


def round_plan(
    config: Q1Config,
    draft_config: DraftConfig | None,
    *,
    tp: int,
    rank: int,
    rows: int = ROWS,
    drafts: int = 5,
    context: int = 1024,
    distinct: float = 37.7,
) -> Plan:
    """The plan of one round of one rank from configs alone, as it is printed."""
    from cuq1.cuda.weights import weights_plan  # noqa: PLC0415

    layout = weights_plan(config, draft_config, tp, rank)
    model = resolve(config, draft_config, layout, tp=tp, rank=rank, capacity=context)
    short = context + ROWS <= model.short_context
    most = drafts if draft_config is not None else 0
    return round_of(model, rows, most, context=context, distinct=distinct, short=short)
