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
from typing import Any

from cuq1.config import DraftConfig, Q1Config
from cuq1.cuda import abi
from cuq1.cuda.kernels import draft, exchange, head, rows, sampling
from cuq1.models.builder import Builder
from cuq1.models.decode_layer import Entry, add_attention, add_mlp
from cuq1.models.q1 import Layer, Model, resolve
from cuq1.plan.dims import DRAFT, ROWS
from cuq1.plan.types import Plan, Ref


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
    entry = Entry()
    for layer, following in zip(model.layers, (*model.layers[1:], None), strict=True):
        add_attention(b, layer, layer.number, rows_, 0, _state("positions"), rows_, entry)
        after, coming = _between(b, layer, following)
        add_mlp(b, layer, layer.number, rows_, 0, entry, after, forced=forced)
        entry = coming
    _head(b, "lm_head", "hidden16", rows_, 0, len(model.layers))


def _between(b: Builder, layer: Layer, following: Layer | None) -> tuple[Mapping[str, Any] | None, Entry]:
    """What a layer's mlp_tail prepares, or None where the following qkv takes that over; and that qkv's entry."""
    if following is None:
        last = {"next_norm": b.weight("norm"), "residual": Ref("hidden", 0), "normed": Ref("hidden16", 0)}
        return {**last, "normed_residual": 1}, Entry()
    norm = b.weight(f"{following.prefix}.attention_norm")
    if layer.sandwich or b.model.inbox is not None:  # a norm of the MLP's own comes first, or the sum over ranks
        after = {"next_norm": norm, "residual": Ref("residual", 0), "normed": Ref("normed", 0)}
        return {**after, "normed_residual": int(not following.sandwich)}, Entry()
    args: dict[str, Any] = {"base": Ref("h", 0), "pieces": Ref("y", 0), "norm": norm, "residual": Ref("residual", 0)}
    args |= {"inverse": 0 if following.sandwich else Ref("residual_inverse", 0), "entry_scale": layer.ffn_scale}
    return None, Entry(1, base=True, args=args)


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
            # Ranks that exchange take the first columns, whichever ranks they are: qkv polls for those.
            "first_row": (model.rank if inbox is None else model.place) * model.dims.eh_rows,
            "peers": b.peers,
        },
        b.size(eh),
        rows_ * model.dims.eh_rows * 4,
    )
    norm = b.weight("draft.attention_norm")
    entry = Entry(
        draft.eh_splits(model.dims),
        args={"pieces": pieces, "norm": norm, "residual": Ref("residual", 0), "polled": int(inbox is not None)},
    )
    add_attention(b, layer, turn, rows_, live, _state("draft_positions"), 0 if settle_only else 1, entry)
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
    add_mlp(b, layer, turn, 1, live, entry, after, forced=forced)
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
