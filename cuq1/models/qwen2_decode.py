"""A Qwen2 model's decode plans: the launches of one token.

    embed > layers, in a launch or two > norm > lm_head > top_k > accept.

That is the form of large models, on GPUs that have room for it (cuq1.models.qwen2_forms). The others are

    embed > qkv, then for each layer  attention (> combine) > chain,
    norm > lm_head > top_k > accept,

of which a chain is o_proj > gate_up > down > qkv of the next layer in one launch; or each of these a launch of its own.

The norms between down and the next qkv, and between o_proj and gate_up, are those kernels' own part, and so are the
sums: a projection leaves pieces, which whoever reads adds to the residual. Outside of `layers` the residual's two rows
take turns, as a block may still read the one while another writes the other, and only a long context has a combine
after attention.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cuq1.cuda import abi
from cuq1.cuda.kernels import head, qwen2_attention, qwen2_gemv, qwen2_head, qwen2_layers, qwen2_rows
from cuq1.models.collect import Collector
from cuq1.models.qwen2 import Layer, Model, row_bytes, working_buffers
from cuq1.models.qwen2_forms import HALF, handed, handed_bytes
from cuq1.plan.kernel import Kernel
from cuq1.plan.types import Plan, Ref


class Builder(Collector):
    """A plan in the making. context: positions cached, of which the bytes are counted; short: see `round_of`."""

    def __init__(self, model: Model, context: int = 0, *, short: bool = False) -> None:
        super().__init__(model.weights.tensors, working_buffers(model))
        self.model, self.context, self.short = model, context, short
        self.base: Mapping[str, Any] = {"rows": 1}

    def put(
        self, kernel: Kernel, label: str, layer: int, args: Mapping[str, Any], read: int, write: int, variant: str = ""
    ) -> None:
        self.add(kernel, label, layer, {**self.base, **args}, read, write, variant)


def _state(name: str, index: int = 0) -> Ref:
    """A field of the request's state; index counts 4-byte elements."""
    return Ref("state", getattr(abi.State, name).offset + 4 * index)


def _residuals(b: Builder) -> tuple[Ref, Ref]:
    """The residual before attention, and before the MLP."""
    return Ref("residual"), Ref("residual", 4 * b.model.sizes.hidden)


def _embed(b: Builder) -> None:
    d = b.model.sizes
    args = {
        "tokens": _state("tokens"),
        "positions": _state("positions"),
        "table": b.weight("embed"),
        "residual": _residuals(b)[0],
        "pages": Ref("pages"),
        "page_table": Ref("page_table"),
        "free_pages": Ref("free_pages"),
        "max_pages": b.model.pages,
        **_unready(b, 0, {"layers": b.model.regions, "chain": 1, "launches": 0}[b.model.form]),
    }
    b.put(qwen2_rows.embed(d), "embed", 0, args, d.hidden * HALF, d.hidden * 4 + 16 * args["unready_pieces"])


def _unready(b: Builder, first: int, count: int) -> dict[str, Any]:
    """Regions of `handed` that are to be cleared."""
    if count == 0:
        return {"unready": 0, "unready_pieces": 0}
    size = handed_bytes(b.model.sizes, b.model.form)
    return {"unready": Ref("handed", first * size), "unready_pieces": count * size // 16}


def _layers(b: Builder, region: int, run: range) -> None:
    d = b.model.sizes
    residual = _residuals(b)[0]
    prefixes = [b.model.layers[number].prefix for number in run]
    matrices = {f"{name}_weights": _each(b, prefixes, name) for name in ("qkv", "o", "gate_up", "down")}
    args = {
        **matrices,
        "input_norm": _each(b, prefixes, "input_norm"),
        "post_norm": _each(b, prefixes, "post_norm"),
        "bias": _each(b, prefixes, "qkv_bias"),
        **{name: tuple(Ref(f"{prefix}.{name}") for prefix in prefixes) for name in ("k_pages", "v_pages")},
        "positions": _state("positions"),
        "inverse_frequencies": Ref(b.model.rope),
        "page_table": Ref("page_table"),
        "residual": residual,
        "residual_out": residual,
        **handed(d, "layers", region),
        "layers": len(run),
    }
    row = row_bytes(b.model.config)
    weights = [ref for refs in matrices.values() for ref in refs]
    read = b.size(*weights) + len(run) * b.context * row
    write = len(run) * (handed_bytes(d, "layers") + row) + d.hidden * 4
    variant = f"{run[0]}-{run[-1]}" if len(run) > 1 else ""
    b.put(qwen2_layers.layers(d, short=b.short), "layers", run[0], args, read, write, variant)


def _each(b: Builder, prefixes: Sequence[str], name: str) -> tuple[Ref, ...]:
    """A weight of several layers."""
    return tuple(b.weight(f"{prefix}.{name}") for prefix in prefixes)


def _qkv(b: Builder, layer: Layer) -> None:
    d, p, number = b.model.sizes, layer.prefix, layer.number
    before, after = _residuals(b)
    weights = b.weight(f"{p}.qkv")
    qkv = {
        "residual": before,
        "pieces": Ref("down_pieces") if number > 0 else 0,
        "norm": b.weight(f"{p}.input_norm"),
        "weights": weights,
        "residual_out": after,
        "out": Ref("qkv_pieces"),
    }
    b.put(qwen2_gemv.qkv(d), "qkv", number, qkv, b.size(weights), d.qkv_rows * 4)


def _attention(b: Builder, layer: Layer) -> None:
    d, p, number = b.model.sizes, layer.prefix, layer.number
    partial = {name: Ref(name) for name in ("partial_out", "partial_max", "partial_sum")}
    splits = b.model.splits
    attention = {
        "pieces": Ref("qkv_pieces"),
        "bias": b.weight(f"{p}.qkv_bias"),
        "positions": _state("positions"),
        "inverse_frequencies": Ref(b.model.rope),
        "page_table": Ref("page_table"),
        "k_pages": Ref(f"{p}.k_pages"),
        "v_pages": Ref(f"{p}.v_pages"),
        "attended": Ref("attended"),
        **partial,
        "splits": splits,
    }
    row = row_bytes(b.model.config)
    kernel = qwen2_attention.attention_short(d) if b.short else qwen2_attention.attention(d, splits)
    b.put(kernel, "attention", number, attention, b.context * row, row)
    if not b.short:
        combine = {**partial, "attended": Ref("attended"), "splits": splits}
        b.put(qwen2_attention.combine(d), "combine", number, combine, 0, d.q_width * HALF)


def _chain(b: Builder, layer: Layer) -> None:
    d, p, number = b.model.sizes, layer.prefix, layer.number
    last = number + 1 == len(b.model.layers)
    rows = _residuals(b)
    following = f"layers.{number + 1}"
    weights = {
        "o_weights": b.weight(f"{p}.o"),
        "gate_up_weights": b.weight(f"{p}.gate_up"),
        "down_weights": b.weight(f"{p}.down"),
        "qkv_weights": 0 if last else b.weight(f"{following}.qkv"),
    }
    args = {
        "attended": Ref("attended"),
        **weights,
        "post_norm": b.weight(f"{p}.post_norm"),
        "next_norm": 0 if last else b.weight(f"{following}.input_norm"),
        "residual": rows[number % 2],
        "residual_out": rows[1 - number % 2],
        **handed(d, "chain", number % 2),
        "qkv_pieces": 0 if last else Ref("qkv_pieces"),
        **_unready(b, 1 - number % 2, 0 if last else 1),
    }
    write = handed_bytes(d, "chain") + 4 * (d.hidden + (0 if last else d.qkv_rows))
    b.put(qwen2_gemv.chain(d, last=last), "chain", number, args, b.size(*weights.values()), write)


def _mlp(b: Builder, layer: Layer) -> None:
    d, p, number = b.model.sizes, layer.prefix, layer.number
    before, after = _residuals(b)
    o = b.weight(f"{p}.o")
    args: dict[str, Any] = {"in": Ref("attended"), "weights": o, "out": Ref("o_pieces"), "scale": 1.0}
    b.put(qwen2_gemv.o_proj(d), "o_proj", number, args, b.size(o), d.hidden * 4)
    weights = b.weight(f"{p}.gate_up")
    gate_up = {
        "residual": after,
        "pieces": Ref("o_pieces"),
        "norm": b.weight(f"{p}.post_norm"),
        "weights": weights,
        "residual_out": before,
        "inner": Ref("inner"),
    }
    b.put(qwen2_gemv.gate_up(d), "gate_up", number, gate_up, b.size(weights), d.inner * HALF)
    down = b.weight(f"{p}.down")
    args = {"in": Ref("inner"), "weights": down, "out": Ref("down_pieces"), "scale": 1 / qwen2_gemv.INNER_SCALE}
    b.put(qwen2_gemv.down(d), "down", number, args, b.size(down), d.hidden * 4)


def _logits(b: Builder) -> None:
    d, last = b.model.sizes, len(b.model.layers)
    weights = b.weight("lm_head")
    args = {"normed": Ref("hidden16"), "weights": weights, "logits": Ref("logits"), "scale": 1.0, "scales": 0}
    kernel = qwen2_gemv.lm_head(d) if d.int4_head else qwen2_head.lm_head(d)
    b.put(kernel, "lm_head", last, args, b.size(weights), d.vocab * 4)


def _token(b: Builder) -> None:
    """The forward pass of the state's token: logits."""
    d = b.model.sizes
    _embed(b)
    layers, form = b.model.layers, b.model.form
    residual, pieces = _residuals(b)[0], Ref("down_pieces") if form == "launches" else 0
    if form == "layers":
        for region, run in enumerate(b.model.runs):
            _layers(b, region, run)
    else:
        for layer in layers:
            if form == "launches" or layer.number == 0:
                _qkv(b, layer)
            _attention(b, layer)
            (_chain if form == "chain" else _mlp)(b, layer)
    if form == "chain":
        residual = _residuals(b)[len(layers) % 2]
        pieces = handed(d, form, (len(layers) - 1) % 2)["down_pieces"]
    norm = {
        "residual": residual,
        "pieces": pieces,
        "norm": b.weight("norm"),
        "normed": Ref("hidden16"),
    }
    b.put(qwen2_rows.norm(d), "norm", len(b.model.layers), norm, 0, d.hidden * HALF)
    _logits(b)


def _sample(b: Builder, *, first: bool) -> None:
    d, last = b.model.sizes, len(b.model.layers)
    lists = {"values": Ref("top_values"), "ids": Ref("top_ids")}
    top = {"logits": Ref("logits"), **lists, "first_id": 0, "peers": 0, "mirror": 0, "status": 0}
    b.put(qwen2_head.top_k(d), "top_k", last, top, d.vocab * 4, 0)
    args = {"state": Ref("state"), **lists, "pieces": head.pieces_of(d.vocab), "first": int(first)}
    b.put(qwen2_head.accept(d), "accept", last, {**args, "statuses": 0, "loop": 0}, 0, 0)


def round_of(model: Model, *, context: int = 1024, short: bool = False) -> Plan:
    """A token: its forward pass, and the draw of the next one. context counts the bytes only; short: its position does
    not reach `model.short_context`."""
    b = Builder(model, context, short=short)
    _token(b)
    _sample(b, first=False)
    return b.plan()


def first_of(model: Model) -> Plan:
    """A request's first token from the logits' row 0."""
    b = Builder(model)
    _sample(b, first=True)
    return b.plan()


def target_of(model: Model, *, short: bool = False) -> Plan:
    """A token's forward pass alone, for sampling on the host. short: as in `round_of`."""
    b = Builder(model, short=short)
    _token(b)
    return b.plan()


def logits_of(model: Model) -> Plan:
    """Logits' row 0 from row 0 of the hidden states, after a prompt."""
    b = Builder(model)
    _logits(b)
    return b.plan()
