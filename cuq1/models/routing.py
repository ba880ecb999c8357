"""Routing that is not folded, in a decode plan: the laboratory's other side of a comparison (Model.folded).

o_proj and attn_tail then have no part in it: attn_tail also leaves the normalised row in FP32, router multiplies it
with the whole router, which every rank holds, and route chooses. gate_up polls for the choice as for attn_tail's.
"""

from collections.abc import Mapping
from typing import Any

from cuq1.cuda.kernels import routing
from cuq1.models.builder import Builder
from cuq1.models.q1 import Layer
from cuq1.plan.dims import ROWS
from cuq1.plan.types import Ref


def add_routing(b: Builder, layer: Layer, base: Mapping[str, Any], forced_ids: Ref | int) -> None:
    """Adds the launches. base: `live` and `rows`; forced_ids: as in AttnTailArgs."""
    d, number = layer.dims, layer.number
    weights, logits = b.weight(f"{layer.prefix}.router"), Ref("router_logits")
    args = {**base, "normed32": Ref("ffn_normed32"), "router": weights, "logits": logits}
    kernel = routing.router(d)
    b.add(kernel, "router", number, args, b.size(weights), kernel.grid[1] * ROWS * d.experts * 4)
    chosen: dict[str, Any] = {name: Ref(name) for name in ("expert_ids", "expert_weights", "routed")}
    kernel = routing.route(d, base["rows"])
    b.add(kernel, "route", number, {**base, "logits": logits, **chosen, "forced_ids": forced_ids}, 0, 0)
