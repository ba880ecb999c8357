"""Prompt processing as launches: a chunk of up to CHUNK tokens through the target, and its rows into the draft's cache.

What a caller does for each chunk of a sequence, in order of positions, without gaps:
    1. writes the tokens from position chunk.start on, the one after the chunk too where it is known, as int32 into the
       buffer `prefill.tokens`;
    2. issues the steps of `chunk_steps`, or the plan that `chunk_plan` makes of them, on one stream.
Then the caches of all layers hold the chunk's positions (a ring its last `slots`), `prefill.hidden` [rows, hidden]
FP32 and `prefill.hidden16` FP16 the rows' final hidden states, and row 0 of `hidden` and `hidden16` the last row's, as
`decode.logits_of` and the draft's first depth read them.

chunk.settle_from .. settle_to are the positions whose rows the draft's cache takes in: token p + 1 has to be known
for position p. The one before the chunk may be among them: its hidden state is what row 0 of `hidden` still holds.

Within a layer:  (ring > staging) qkv > attention (> merge) (staging > ring) > o_proj > attn_tail > router > route >
group > gate_up > down > combine > mlp_tail. A chunk would overrun a sliding layer's ring, so its attention reads a
staging buffer with the window before the chunk and the chunk itself. Keys are split among blocks where a chunk has few
rows. Routing is not folded here: the FP32 router meets unrounded rows. A dense layer is experts that every row chose.

Where the model is one rank's of several that exchange, a Sum follows o_proj and combine, which give that rank's part,
and the draft's eh_proj, which gives its columns: NCCL makes it, all ranks having the same bits afterwards. Throughput
counts here, not latency.

A step's arguments depend on the chunk in a few numbers only, so that an executor (cuq1.cuda.chunks) binds them once.
"""

from functools import partial

from cuq1.cuda.kernels import prefill, rows
from cuq1.cuda.kernels.prefill import CHUNK
from cuq1.models.prefill_buffers import SCORED, staged_slots, thetas, working_buffers
from cuq1.models.prefill_draft import settle
from cuq1.models.prefill_steps import Steps, plain, plan_of
from cuq1.models.q1 import Layer, Model
from cuq1.models.steps import Chunk, Fields, Step, Sum, maker
from cuq1.plan.dims import KV_TILE
from cuq1.plan.types import Plan, Ref, Value

__all__ = [
    "CHUNK",
    "SCORED",
    "Chunk",
    "Step",
    "Sum",
    "chunk_plan",
    "chunk_steps",
    "logits_step",
    "plan_of",
    "working_buffers",
]


def chunk_steps(model: Model) -> list[Step | Sum]:
    """The launches of a chunk, in order; a step may be absent from a given chunk."""
    b = Steps(model)
    if model.draft is not None:
        settle(b, model.draft, _qkv_args(b, model.draft), before=True)
    _tables(b)
    _embed(b)
    for i, layer in enumerate(model.layers):
        _attention_part(b, layer)
        _mlp_part(b, layer)
        following = model.layers[i + 1] if i + 1 < len(model.layers) else None
        _tail(b, layer, following)
    if model.draft is not None:
        settle(b, model.draft, _qkv_args(b, model.draft), before=False)
    return b.steps


def logits_step(model: Model) -> Step:
    """`prefill.logits` [rows, vocab] FP32 of rows of the last chunk, at most SCORED at once.

    It is issued for Chunk(first, rows): rows first .. first + rows - 1 of the chunk, counted from its beginning.
    """
    b = Steps(model)
    d = model.dims
    args: Fields = {
        "weights": b.weight("lm_head"),
        "scales": 0,
        "out": Ref("prefill.logits"),
        "out_stride": d.vocab,
        "first_column": 0,
        "scale": model.config.logit_scale,
    }

    def at(part: Chunk) -> Fields:
        if part.rows > SCORED or part.end > CHUNK:
            raise ValueError(f"at most {SCORED} of a chunk's {CHUNK} rows are scored at once: {part}")
        return {"rows": part.rows, "in": Ref("prefill.hidden16", part.start * d.hidden * 2)}

    b.add("lm_head", len(model.layers), maker(prefill.lm_head, plain(d)), args, at)
    (step,) = b.steps
    assert isinstance(step, Step)
    return step


def chunk_plan(model: Model, chunk: Chunk) -> Plan:
    """All of a chunk as a plan."""
    return plan_of(model, chunk_steps(model), chunk)


def _first_staged(layer: Layer, chunk: Chunk) -> int:
    """The position of the staging buffer's slot 0: the tile of the oldest key that the chunk sees."""
    return max(0, chunk.start - layer.window + 1) // KV_TILE * KV_TILE


def _tables(b: Steps) -> None:
    d = plain(b.model.dims)
    if not d.rotary:
        return
    for theta in thetas(b.model):
        b.add(
            "rope",
            0,
            maker(prefill.rope, d),
            {"inverse_frequencies": Ref(f"rope.{theta:g}"), "table": Ref(f"prefill.rope.{theta:g}")},
            lambda chunk: {"rows": chunk.rows, "start": chunk.start},
        )


def _embed(b: Steps) -> None:
    first = b.model.layers[0]
    args: Fields = {
        "tokens": Ref("prefill.tokens"),
        "table": b.weight("embed"),
        "norm": b.weight(f"{first.prefix}.attention_norm"),
        "residual": Ref("prefill.residual"),
        "normed": Ref("prefill.normed"),
        "normed_residual": int(not first.sandwich),
    }
    b.add("embed", 0, maker(rows.embed, plain(b.model.dims)), args)


def _qkv_args(b: Steps, layer: Layer) -> dict[str, Value]:
    p = layer.prefix
    return {
        "normed": Ref("prefill.normed"),
        "weights": b.weight(f"{p}.qkv.weights"),
        "scales": b.maybe(f"{p}.qkv.scales"),
        "q_norm": b.weight(f"{p}.q_norm"),
        "k_norm": b.weight(f"{p}.k_norm"),
        "rope": Ref(f"prefill.rope.{layer.theta:g}") if layer.dims.rotary else 0,
        "q": Ref("prefill.q"),
        "k_cache": Ref(f"{p}.k_cache"),
        "v_cache": Ref(f"{p}.v_cache"),
        "slots": layer.slots,
        "first_head": 0,
    }


def _attention_part(b: Steps, layer: Layer) -> None:
    p, d = layer.prefix, plain(layer.dims)
    qkv = _qkv_args(b, layer)
    caches = (qkv["k_cache"], qkv["v_cache"])
    ring: Fields = {}
    if layer.sliding:
        staged = (Ref("prefill.k_staged"), Ref("prefill.v_staged"))
        ring = {
            "k_ring": caches[0],
            "v_ring": caches[1],
            "k_staged": staged[0],
            "v_staged": staged[1],
            "ring_slots": layer.slots,
            "staged_slots": staged_slots(b.model),
        }
        caches = staged
        qkv |= {"k_cache": staged[0], "v_cache": staged[1], "slots": staged_slots(b.model)}
        b.add("window", layer.number, maker(prefill.ring, d), {**ring, "to_ring": 0}, partial(_before, layer))
    place = partial(_place, layer)
    b.add("qkv", layer.number, maker(prefill.qkv, d), qkv, place)
    parts: Fields = {
        "attended": Ref("prefill.attended"),
        "partial_out": Ref("prefill.partial_out"),
        "partial_stats": Ref("prefill.partial_stats"),
    }
    attention: Fields = {
        "q": Ref("prefill.q"),
        "k": caches[0],
        "v": caches[1],
        "sink_k": b.weight(f"{p}.sink_k"),
        **parts,
        "slots": qkv["slots"],
        "window": layer.window,
        "scale": b.model.config.softmax_scale,
    }
    split = partial(_split, layer, b.model.sms)
    b.add("attention", layer.number, maker(prefill.attention, d), attention, lambda c: {**place(c), "splits": split(c)})
    merge = partial(_merge, layer, b.model.sms)
    b.add("merge", layer.number, maker(prefill.merge, d), parts, merge)
    if layer.sliding:
        b.add("ring", layer.number, maker(prefill.ring, d), {**ring, "to_ring": 1}, partial(_newest, layer))
    o: Fields = {
        "in": Ref("prefill.attended"),
        "weights": b.weight(f"{p}.o.weights"),
        "scales": b.maybe(f"{p}.o.scales"),
        "out": Ref("prefill.o"),
        "out_stride": d.hidden,
        "first_column": 0,
        "scale": 1.0,
    }
    b.add("o_proj", layer.number, maker(prefill.o_proj, d), o)
    b.sum("o", layer.number)


def _place(layer: Layer, chunk: Chunk) -> Fields:
    first = _first_staged(layer, chunk) if layer.sliding else 0
    return {"rows": chunk.rows, "start": chunk.start, "first_position": first}


def _split(layer: Layer, sms: int, chunk: Chunk) -> int:
    keys = chunk.end if layer.window == 0 else min(chunk.end, layer.window + chunk.rows)
    return prefill.splits_for(layer.dims, chunk.rows, keys, sms)


def _merge(layer: Layer, sms: int, chunk: Chunk) -> Fields | None:
    splits = _split(layer, sms, chunk)
    return {"rows": chunk.rows, "splits": splits} if splits > 1 else None


def _before(layer: Layer, chunk: Chunk) -> Fields | None:
    """What the chunk sees of the ring."""
    first = _first_staged(layer, chunk)
    return {"rows": chunk.start - first, "start": first, "first_position": first} if chunk.start > first else None


def _newest(layer: Layer, chunk: Chunk) -> Fields:
    """What the ring keeps of the chunk."""
    kept = min(chunk.rows, layer.slots)
    return {"rows": kept, "start": chunk.end - kept, "first_position": _first_staged(layer, chunk)}


def _mlp_part(b: Steps, layer: Layer) -> None:
    p, d, number = layer.prefix, plain(layer.dims), layer.number
    tail: Fields = {
        "o": Ref("prefill.o"),
        "router_attended": 0,
        "router_residual": 0,
        "residual": Ref("prefill.residual"),
        "attn_out_norm": b.weight(f"{p}.attn_out_norm"),
        "ffn_norm": b.weight(f"{p}.ffn_norm"),
        "h": Ref("prefill.h"),
        "normed": Ref("prefill.ffn_normed"),
        "codes": 0,
        "code_scale": 0,
        "expert_ids": 0,
        "expert_weights": 0,
        "inner_max": 0,
        "forced_ids": 0,
        "ranks": 1,
        "attn_scale": layer.attn_scale,
        "normed32": 0 if layer.dense_groups else Ref("prefill.ffn_normed32"),
        "inverse": 0,
        "routed": 0,
        "inner": 0,
        "polled": 0,
    }
    b.add("attn_tail", number, maker(rows.attn_tail, d, moe=False), tail)
    ids: Ref | int = 0
    weights: Ref | int = 0
    if not layer.dense_groups:
        logits, ids, weights = (Ref(f"prefill.{n}") for n in ("router_logits", "expert_ids", "expert_weights"))
        router: Fields = {"normed32": tail["normed32"], "router": b.weight(f"{p}.router"), "logits": logits}
        b.add("router", number, maker(prefill.router, d), router)
        route: Fields = {"logits": logits, "expert_ids": ids, "expert_weights": weights}
        b.add("route", number, maker(prefill.route, d), route)
    lists: dict[str, Value] = {name: Ref(f"prefill.{name}") for name in ("pairs", "tiles", "tile_count")}
    dense = {"dense_groups": layer.dense_groups}
    b.add("group", number, maker(prefill.group, d, **dense), {"expert_ids": ids, **lists})
    gate_up: Fields = {
        "normed": tail["normed"],
        "weights": b.weight(f"{p}.gate_up"),
        "inner": Ref("prefill.inner"),
        **lists,
    }
    b.add("gate_up", number, maker(prefill.gate_up, d, **dense), gate_up)
    down: Fields = {
        "inner": Ref("prefill.inner"),
        "weights": b.weight(f"{p}.down.weights"),
        "scales": b.maybe(f"{p}.down.scales"),
        "out": Ref("prefill.down"),
        **lists,
    }
    b.add("down", number, maker(prefill.down, d, **dense), down)
    combine: Fields = {"out": Ref("prefill.down"), "expert_weights": weights, "y": Ref("prefill.y")}
    b.add("combine", number, maker(prefill.combine, d, **dense), combine)
    b.sum("y", number)


def _tail(b: Steps, layer: Layer, following: Layer | None) -> None:
    p, d = layer.prefix, plain(layer.dims)
    args: dict[str, Value] = {
        "y": Ref("prefill.y"),
        "h": Ref("prefill.h"),
        "ffn_out_norm": b.weight(f"{p}.ffn_out_norm") if layer.sandwich else 0,
        "ranks": 1,
        "ffn_scale": layer.ffn_scale,
    }
    make = maker(rows.mlp_tail, d)
    if following is not None:
        after: Fields = {
            "next_norm": b.weight(f"{following.prefix}.attention_norm"),
            "residual": Ref("prefill.residual"),
            "normed": Ref("prefill.normed"),
            "normed_residual": int(not following.sandwich),
        }
        b.add("mlp_tail", layer.number, make, {**args, **after})
        return
    last: Fields = {"next_norm": b.weight("norm"), "normed_residual": 1}
    rows_of = {"residual": Ref("prefill.hidden"), "normed": Ref("prefill.hidden16")}
    b.add("mlp_tail", layer.number, make, {**args, **last, **rows_of})
    # The last row once more, to where decoding looks for it.
    newest = {"residual": Ref("hidden"), "normed": Ref("hidden16")}

    def at(chunk: Chunk) -> Fields:
        offset = (chunk.rows - 1) * d.hidden * 4
        return {"rows": 1, "y": Ref("prefill.y", offset), "h": Ref("prefill.h", offset)}

    b.add("mlp_tail", layer.number, make, {**args, **last, **newest}, at)
