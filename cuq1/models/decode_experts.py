"""A layer's experts in a decode plan: in one launch, or gate_up and down in two (tools/decisions/003)."""

from collections.abc import Mapping
from typing import Any

from cuq1.cuda.kernels import experts
from cuq1.models.builder import Builder
from cuq1.models.q1 import Layer, exchanged
from cuq1.plan.types import Ref


def add_experts(b: Builder, layer: Layer, base: Mapping[str, Any], share: float) -> None:
    """Adds the launches. base: `live` and `rows`; share: of the layer's experts that are read."""
    (_fused if experts.FUSED else _gate_up_and_down)(b, layer, base, share)


def _fused(b: Builder, layer: Layer, base: Mapping[str, Any], share: float) -> None:
    p, d, number = layer.prefix, layer.dims, layer.number
    quantised = d.fp8_activations
    gate_up, down = b.weight(f"{p}.gate_up"), b.weight(f"{p}.down.weights")
    scales = b.maybe(f"{p}.down.scales")
    b.add(
        experts.fused(d, sms=b.model.sms, scale_k=layer.down_scale_k, dense_groups=layer.dense_groups),
        "experts",
        number,
        {
            **base,
            "normed": Ref("ffn_normed", 0),
            "codes": Ref("codes", 0) if quantised else 0,
            "code_scale": Ref("code_scale", 0) if quantised else 0,
            "gate_up": gate_up,
            "down": down,
            "down_scales": scales,
            "expert_ids": Ref("expert_ids", 0),
            "expert_weights": Ref("expert_weights", 0),
            "inner": Ref("exchange", 0),
            "epoch": Ref("exchange_epoch", 0),
            "out": Ref("y", 0),
            "dense_groups": layer.dense_groups,
            "inner_half": exchanged(b.model),
            "routed": 0 if layer.dense_groups or not experts.TOLD else Ref("routed", 0),
        },
        b.size(gate_up, down, scales) * share,
        base["rows"] * d.hidden * 4,
    )


def _gate_up_and_down(b: Builder, layer: Layer, base: Mapping[str, Any], share: float) -> None:
    p, d, number = layer.prefix, layer.dims, layer.number
    quantised = d.fp8_activations
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
            "routed": 0 if layer.dense_groups or not experts.TOLD else Ref("routed", 0),
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
            "out": Ref("y", 0),
            "dense_groups": layer.dense_groups,
            "routed": 0 if layer.dense_groups or not experts.TOLD else Ref("routed", 0),
        },
        b.size(*down.values()) * share,
        base["rows"] * d.hidden * 4,
    )
