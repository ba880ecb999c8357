"""A layer's launches in a decode plan: how its input comes, attention, and the MLP with the tails around it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cuq1.cuda.kernels import attention, projections, rows
from cuq1.models import q1
from cuq1.models.builder import Builder
from cuq1.models.decode_experts import add_experts
from cuq1.models.q1 import Layer
from cuq1.models.routing import add_routing
from cuq1.plan.dims import DRAFT, HEAD_DIM, ROWS
from cuq1.plan.types import Ref


@dataclass(frozen=True)
class Entry:
    """How a layer's input comes to qkv: normed rows in a buffer, or pieces that qkv adds and normalises itself."""

    pieces: int = 0
    base: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inverse(self) -> Ref | int:
        """What multiplies the residual, for those that read it."""
        found: Ref | int = self.args.get("inverse", 0)
        return found


def add_attention(
    b: Builder, layer: Layer, turn: int, rows_: int, live: Ref | int, positions: Ref, head_rows: int, entry: Entry
) -> None:
    """qkv, attention (and combine), o_proj; `head_rows` of the `rows_` rows go beyond writing keys and values.

    turn: see cuq1.models.inbox.
    """
    p, d = layer.prefix, layer.dims
    caches = {"k_cache": Ref(f"{p}.k_cache", 0), "v_cache": Ref(f"{p}.v_cache", 0)}
    qkv = {"weights": b.weight(f"{p}.qkv.weights"), "scales": b.maybe(f"{p}.qkv.scales")}
    seen = min(b.context, layer.window) if layer.window else b.context
    kv = seen * d.kv_heads * 2 * HEAD_DIM * 2
    b.add(
        projections.qkv(d, pieces=entry.pieces, base=entry.base),
        "qkv",
        layer.number,
        {
            **qkv,
            **caches,
            "live": live,
            "rows": rows_,
            "normed": 0 if entry.pieces else Ref("normed", 0),
            **dict.fromkeys(("entry_scale", "base", "pieces", "norm", "residual", "inverse", "polled"), 0),
            **entry.args,
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
    query: dict[str, Any] = {"live": live, "q": Ref("q", 0), "positions": positions, "rows": head_rows}
    query |= {"window": layer.window, "scale": b.model.config.softmax_scale}
    keys = {**caches, "slots": layer.slots, "written": rows_}
    result = {name: Ref(name, 0) for name in ("attended32", "attended")} | {"sink_k": b.weight(f"{p}.sink_k")}
    written = head_rows * d.q_width * 6
    if layer.window or b.short:
        kernel = attention.attention_short(d, layer.window, head_rows)
        b.add(kernel, "attention", layer.number, {**query, **keys, **result}, kv, written)
    else:
        splits = attention.splits_for(d, b.model.sms)
        query |= {name: Ref(name, 0) for name in ("partial_out", "partial_max", "partial_sum")} | {"splits": splits}
        b.add(attention.attention(d, splits), "attention", layer.number, {**query, **keys}, kv, 0)
        b.add(attention.combine(d, splits), "combine", layer.number, {**query, **result}, 0, written)
    moe = b.model.folds(layer)
    projected = _projected(b, turn, own=True)
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
            "out": projected["o"],
            "router_attended": projected["router_attended"],
            "router_residual": projected["router_residual"],
            "slice_start": b.model.rank * d.slice_width,
            "inverse": entry.inverse,
            "peers": b.peers,
        },
        b.size(*o.values()),
        head_rows * (d.hidden + 2 * d.experts) * 4,
    )


def _projected(b: Builder, turn: int, *, own: bool) -> Mapping[str, Ref]:
    """Where o_proj's results lie; of several ranks' this rank's own, or the first one's."""
    inbox = b.model.inbox
    if inbox is None:
        return q1.projected(b.model.dims)
    at = inbox.own if own else inbox.whole
    return {name: at(name, turn) for name in ("o", "router_attended", "router_residual")}


def add_mlp(
    b: Builder,
    layer: Layer,
    turn: int,
    rows_: int,
    live: Ref | int,
    entry: Entry,
    after: Mapping[str, Any] | None,
    *,
    forced: bool,
) -> None:
    """attn_tail, gate_up, down, mlp_tail; `after` says what the last one prepares for what comes next.

    Without `after` there is no mlp_tail: the next layer's qkv takes its place.
    """
    p, d = layer.prefix, layer.dims
    moe, folded = layer.dense_groups == 0, b.model.folds(layer)
    quantised = d.fp8_activations
    number = layer.number
    inbox = b.model.inbox
    projected = _projected(b, turn, own=False)
    base = {"live": live, "rows": rows_}
    index = number if number != DRAFT else len(b.model.layers)
    forced_ids = Ref("forced_ids", index * ROWS * d.top_k * 4) if forced and moe else 0
    b.add(
        rows.attn_tail(d, rows_, moe=folded),
        "attn_tail",
        number,
        {
            **base,
            "o": projected["o"],
            "router_attended": projected["router_attended"] if folded else 0,
            "router_residual": projected["router_residual"] if folded else 0,
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
            "forced_ids": forced_ids if folded else 0,
            "ranks": d.ranks,
            "attn_scale": layer.attn_scale,
            "normed32": Ref("ffn_normed32") if moe and not folded else 0,
            "inverse": entry.inverse,
            "routed": Ref("routed", 0) if folded else 0,
            "inner": Ref("inner", 0) if moe and not quantised else 0,
            "polled": int(inbox is not None or b.model.polls(number)),
        },
        0,
        rows_ * d.hidden * 6,
    )
    if moe and not folded:
        add_routing(b, layer, base, forced_ids)
    share = layer.dense_groups / (layer.dense_groups or 1) if not moe else min(1.0, _distinct(b, rows_) / d.experts)
    add_experts(b, layer, turn, base, share)
    if after is None:
        return
    b.add(
        rows.mlp_tail(d, rows_),
        "mlp_tail",
        number,
        {
            **base,
            "y": Ref("y", 0) if inbox is None else inbox.whole("y", turn),
            "h": Ref("h", 0),
            "ffn_out_norm": b.weight(f"{p}.ffn_out_norm") if layer.sandwich else 0,
            "ranks": d.ranks,
            "ffn_scale": layer.ffn_scale,
            **after,
        },
        0,
        rows_ * d.hidden * 6,
    )


def _distinct(b: Builder, rows_: int) -> float:
    """Distinct experts that `rows_` rows read: the figure that the plan was asked for, within what is possible."""
    low, high = b.model.dims.top_k, min(b.model.dims.experts, rows_ * b.model.dims.top_k)
    return max(low, min(high, b.distinct))
