"""A layer's experts in a decode plan: gate_up and down."""

from collections.abc import Mapping
from typing import Any

from cuq1.cuda.kernels import experts
from cuq1.models.builder import Builder
from cuq1.models.q1 import Layer
from cuq1.plan.dims import DRAFT
from cuq1.plan.types import Ref


def add_experts(b: Builder, layer: Layer, turn: int, base: Mapping[str, Any], share: float) -> None:
    """Adds the launches.

    turn: as in cuq1.models.inbox; base: `live` and `rows`; share: of the layer's experts that are read.
    """
    p, d, number = layer.prefix, layer.dims, layer.number
    quantised = d.fp8_activations
    weights = b.weight(f"{p}.gate_up")
    out, unready = _results(b, layer, turn)
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
            "routed": 0 if layer.dense_groups else Ref("routed", 0),
        },
        b.size(weights) * share,
        base["rows"] * d.top_k * d.inner * 2,
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
            "out": out,
            "dense_groups": layer.dense_groups,
            "routed": 0 if layer.dense_groups else Ref("routed", 0),
            **unready,
            "polled": int(layer.dense_groups == 0 and not quantised),
            "peers": b.peers,
        },
        b.size(*down.values()) * share,
        base["rows"] * d.hidden * 4,
    )


def _results(b: Builder, layer: Layer, turn: int) -> tuple[Ref, Mapping[str, Ref | int]]:
    """Where down's results go, and what it makes NOT_READY: what the layer's attention tail has read.

    One rank has one such buffer, for the next layer, if that polls. The draft's entry lies behind the draft's o, and
    has been read as well.
    """
    inbox = b.model.inbox
    if inbox is None:
        follows = b.model.polls(layer.number + 1)
        pieces = b.buffers["o"].bytes // 16 if follows else 0
        return Ref("y"), {"unready": Ref("o") if follows else 0, "unready_pieces": pieces}
    pieces = inbox.pieces("o", "eh" if layer.number == DRAFT else "router_residual")
    return inbox.own("y", turn), {"unready": inbox.whole("o", turn), "unready_pieces": pieces}
