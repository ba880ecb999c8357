"""IQuest-Q1 as a plan: the launches of one decode round of one rank, over named buffers.

A round verifies `rows` rows (the pending token and its drafts), judges the drafts, and drafts for the next round:

    embed, then for each layer  qkv > attention > o_proj > attn_tail > gate_up > down,
    mlp_tail > lm_head > top_k > accept, then for each draft depth
    eh_proj > qkv > ... > down > mlp_tail > lm_head > top_k > draft_sample.

The norm between down, or eh_proj, and the next qkv is qkv's own part. Only the sandwich layers, which normalise the
MLP's output as well, and the last one have an mlp_tail.

A full layer of a long context has a combine after attention.

Where ranks exchange (Model.inbox), o_proj, down, eh_proj and top_k push their parts into every rank's inbox, and
attn_tail, mlp_tail, the draft's qkv, and accept or draft_sample poll for them; then every layer has an mlp_tail.

A layer's residual base is the raw input in layer 0 and the draft ("sandwich" layers), and the normalised input
elsewhere, which is why embed and mlp_tail say what the next layer wants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cuq1.config import DraftConfig, Q1Config
from cuq1.cuda import abi
from cuq1.cuda.kernels import attention, draft, exchange, head, projections, rows, sampling
from cuq1.models import q1
from cuq1.models.builder import Builder
from cuq1.models.decode_experts import add_experts
from cuq1.models.q1 import Layer, Model, resolve
from cuq1.models.routing import add_routing
from cuq1.plan.dims import DRAFT, HEAD_DIM, ROWS
from cuq1.plan.types import Plan, Ref


@dataclass(frozen=True)
class _Entry:
    """How a layer's input comes to qkv: normed rows in a buffer, or pieces that qkv adds and normalises itself."""

    pieces: int = 0
    base: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inverse(self) -> Ref | int:
        """What multiplies the residual, for those that read it."""
        found: Ref | int = self.args.get("inverse", 0)
        return found


def _attention_part(
    b: Builder, layer: Layer, turn: int, rows_: int, live: Ref | int, positions: Ref, head_rows: int, entry: _Entry
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


def _mlp_part(
    b: Builder,
    layer: Layer,
    turn: int,
    rows_: int,
    live: Ref | int,
    entry: _Entry,
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


def _head(b: Builder, name: str, normed: str, rows_: int, live: Ref | int, layer: int) -> None:
    """Logits. The draft's matrix is E4M3 with a scale a row: a draft is verified whatever it was drawn from."""
    d = b.model.dims
    drafting = layer == DRAFT
    weights = b.weight(f"{name}.weights" if drafting else name)
    scales = b.weight(f"{name}.scales") if drafting else 0
    b.add(
        head.lm_head(d, head.KEPT if drafting else 0, fp8=drafting),
        "lm_head",
        layer,
        {
            "live": live,
            "rows": rows_,
            "normed": Ref(normed, 0),
            "weights": weights,
            "logits": Ref("logits", 0),
            "scale": b.model.config.logit_scale,
            "scales": scales,
        },
        b.size(weights, scales),
        rows_ * d.vocab * 4,
    )


def _top_k(b: Builder, rows_: int, live: Ref | int, layer: int, turn: int) -> None:
    d, inbox = b.model.dims, b.model.inbox
    to = {
        "values": Ref("top_values") if inbox is None else inbox.own("values", turn),
        "ids": Ref("top_ids") if inbox is None else inbox.own("ids", turn),
        "status": inbox.own("status", turn) if inbox is not None and layer != DRAFT else 0,
    }
    b.add(
        head.top_k(d),
        "top_k",
        layer,
        {
            "live": live,
            "rows": rows_,
            "logits": Ref("logits", 0),
            **to,
            "first_id": b.model.rank * d.vocab,
            "peers": b.peers,
            "mirror": 0,
        },
        rows_ * d.vocab * 4,
        0,
    )


def _state(name: str, index: int = 0) -> Ref:
    """A field of the request's state; index counts 4-byte elements."""
    return Ref("state", getattr(abi.State, name).offset + 4 * index)


def _target(b: Builder, rows_: int, *, forced: bool) -> None:
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
    entry = _Entry()
    for layer, following in zip(model.layers, (*model.layers[1:], None), strict=True):
        _attention_part(b, layer, layer.number, rows_, 0, _state("positions"), rows_, entry)
        after, coming = _between(b, layer, following)
        _mlp_part(b, layer, layer.number, rows_, 0, entry, after, forced=forced)
        entry = coming
    _head(b, "lm_head", "hidden16", rows_, 0, len(model.layers))


def _between(b: Builder, layer: Layer, following: Layer | None) -> tuple[Mapping[str, Any] | None, _Entry]:
    """What a layer's mlp_tail prepares, or None where the following qkv takes that over; and that qkv's entry."""
    if following is None:
        last = {"next_norm": b.weight("norm"), "residual": Ref("hidden", 0), "normed": Ref("hidden16", 0)}
        return {**last, "normed_residual": 1}, _Entry()
    norm = b.weight(f"{following.prefix}.attention_norm")
    if layer.sandwich or b.model.inbox is not None:  # a norm of the MLP's own comes first, or the sum over ranks
        after = {"next_norm": norm, "residual": Ref("residual", 0), "normed": Ref("normed", 0)}
        return {**after, "normed_residual": int(not following.sandwich)}, _Entry()
    args: dict[str, Any] = {"base": Ref("h", 0), "pieces": Ref("y", 0), "norm": norm, "residual": Ref("residual", 0)}
    args |= {"inverse": 0 if following.sandwich else Ref("residual_inverse", 0), "entry_scale": layer.ffn_scale}
    return None, _Entry(1, base=True, args=args)


def _candidates(b: Builder, turn: int) -> Mapping[str, Ref | int]:
    """Where the sampler finds the lists of all ranks."""
    inbox = b.model.inbox
    if inbox is None:
        return {"values": Ref("top_values"), "ids": Ref("top_ids"), "pieces": head.PIECES}
    return {"values": inbox.whole("values", turn), "ids": inbox.whole("ids", turn), "pieces": b.model.dims.ranks}


def _accept(b: Builder, rows_: int, *, first: bool) -> None:
    turn, inbox = len(b.model.layers) - 1, b.model.inbox
    b.add(
        sampling.accept(b.model.dims),
        "accept",
        len(b.model.layers),
        {
            "rows": rows_,
            "state": Ref("state", 0),
            **_candidates(b, turn),
            "first": int(first),
            "statuses": 0 if inbox is None else inbox.whole("status", turn),
            "loop": 0,
        },
        0,
        0,
    )


def _draft_depth(b: Builder, depth: int, *, sample: bool, forced: bool, settle_only: bool = False) -> None:
    """One draft depth. Depth 0 has a row for each newly committed position, of which only the newest goes on."""
    model = b.model
    layer = model.draft
    assert layer is not None
    rows_ = ROWS if depth == 0 else 1
    live = _state("depth_rows", depth)
    turn, inbox = len(model.layers) + depth, model.inbox
    pieces = Ref("eh_pieces") if inbox is None else inbox.whole("eh", turn)
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
            "out": pieces,
            "first_row": model.rank * model.dims.eh_rows,
            "peers": b.peers,
        },
        b.size(eh),
        rows_ * model.dims.eh_rows * 4,
    )
    norm = b.weight("draft.attention_norm")
    entry = _Entry(
        draft.eh_splits(model.dims),
        args={"pieces": pieces, "norm": norm, "residual": Ref("residual", 0), "polled": int(inbox is not None)},
    )
    _attention_part(b, layer, turn, rows_, live, _state("draft_positions"), 0 if settle_only else 1, entry)
    if settle_only:
        if inbox is not None:
            words = inbox.pieces("eh", "eh")
            b.add(exchange.rearm(), "rearm", DRAFT, {**base, "target": pieces, "pieces": words}, 0, 16 * words)
        return
    after = {
        "next_norm": b.weight("draft.final_norm"),
        "residual": Ref("draft_hidden", 0),
        "normed": Ref("draft_hidden16", 0),
        "normed_residual": 1,
    }
    _mlp_part(b, layer, turn, 1, live, entry, after, forced=forced)
    _head(b, "draft.lm_head", "draft_hidden16", 1, live, DRAFT)
    if sample:
        _top_k(b, 1, live, DRAFT, turn)
        b.add(
            sampling.draft_sample(model.dims),
            "draft_sample",
            DRAFT,
            {
                "live": live,
                "rows": 1,
                "state": Ref("state", 0),
                **_candidates(b, turn),
                "depth": depth,
            },
            0,
            0,
        )


def _drafting(b: Builder, drafts: int, *, forced: bool) -> None:
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
    b = Builder(model, distinct, context, short=short)
    _target(b, rows_, forced=forced)
    _top_k(b, rows_, 0, len(model.layers), len(model.layers) - 1)
    _accept(b, rows_, first=False)
    _drafting(b, drafts, forced=forced)
    return b.plan()


def first_of(model: Model, drafts: int) -> Plan:
    """A request's first token from the logits' row 0, and the drafts after it."""
    b = Builder(model, model.dims.top_k, 0)
    _top_k(b, 1, 0, len(model.layers), len(model.layers) - 1)
    _accept(b, 1, first=True)
    _drafting(b, drafts, forced=False)
    return b.plan()


def target_of(model: Model, rows_: int, *, short: bool = False) -> Plan:
    """The target's forward pass alone: logits of rows_ rows, for sampling on the host. short: as in `round_of`."""
    b = Builder(model, model.dims.top_k, 0, short=short)
    _target(b, rows_, forced=False)
    return b.plan()


def depth_of(model: Model, depth: int, *, sample: bool = False, settle_only: bool = False) -> Plan:
    """One draft depth: up to its logits (row 0), for sampling on the host, or up to the drawn draft."""
    b = Builder(model, model.dims.top_k, 0)
    _draft_depth(b, depth, sample=sample, forced=False, settle_only=settle_only)
    return b.plan()


def logits_of(model: Model) -> Plan:
    """Logits' row 0 from row 0 of the target's hidden states, after a prefill."""
    b = Builder(model, model.dims.top_k, 0)
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
    model = resolve(config, draft_config, layout, tp=tp, rank=rank, capacity=context, ranks=tp, place=rank)
    short = model.is_short(context)
    most = drafts if draft_config is not None else 0
    return round_of(model, rows, most, context=context, distinct=distinct, short=short)
