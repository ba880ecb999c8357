"""Which random numbers each tensor of an arena is filled with, so that every product's results are of order 1."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cuq1.cuda.qwen2_weights import Qwen2Layout
from cuq1.cuda.weights import LayerLayout, Layout, Tensor
from cuq1.plan.dims import HEAD_DIM
from cuq1.plan.qwen2_dims import TILE, UNIT_BYTES

FILL_E4M3, FILL_BF16, FILL_F32, FILL_F16 = range(4)  # FillArgs.kind


@dataclass(frozen=True)
class Fill:
    """Random numbers: `runs` runs of `run` elements, `stride` bytes apart. shared: every rank has the same."""

    offset: int
    runs: int
    run: int
    stride: int
    kind: int
    mean: float = 0.0
    deviation: float = 0.0
    shared: bool = False

    def seed(self, seed: int, number: int, rank: int) -> int:
        """Of fill `number` of a rank's."""
        own = 0 if self.shared else rank * 0x8CB92BA72F3D8DD7
        return seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + own


def fills(layout: Layout) -> list[Fill]:
    """What fills every tensor but folded routing."""
    found = [_whole(layout.tensors["embed"], FILL_BF16, 0.0, 1.0, shared=True), *_norms(layout, "norm")]
    hidden = layout.config.hidden_size
    found.append(_whole(layout.tensors["lm_head"], FILL_F16, 0.0, hidden**-0.5))
    for number, plan in enumerate(layout.layers):
        found += _layer_fills(layout, number, plan)
    if layout.draft is not None:
        found += [
            _whole(layout.tensors["draft.embed"], FILL_BF16, 0.0, 1.0, shared=True),
            _whole(layout.tensors["draft.eh_proj"], FILL_F16, 0.0, (2 * hidden) ** -0.5),
            *_matrix_fills(layout, "draft.lm_head", hidden),
            *_norms(layout, "draft.enorm", "draft.hnorm", "draft.final_norm"),
            *_layer_fills(layout, -1, layout.draft),
        ]
    return found


def qwen2_fills(layout: Qwen2Layout) -> list[Fill]:
    """What fills every tensor of a Qwen2 model.

    Codes are random nibbles, of -8, which no packed model has, to 7. Columns and rows beyond a matrix's are random as
    well, where the input has zeros, or nobody looks.
    """
    found = []
    for name, tensor in layout.tensors.items():
        if tensor.dtype == "uint8" and tensor.shape[-1] == UNIT_BYTES:
            units, codes = tensor.nbytes // UNIT_BYTES, UNIT_BYTES - 2 * TILE
            scale = (_NIBBLES * _fan_in(layout, name)) ** -0.5
            found.append(Fill(tensor.offset, units, codes, UNIT_BYTES, FILL_E4M3))
            found.append(Fill(tensor.offset + codes, units, TILE, UNIT_BYTES, FILL_F16, scale, scale / 8))
        elif name.endswith("norm"):
            found.append(_whole(tensor, FILL_F16, 1.0, 0.1))
        else:
            deviation = {"embed": 1.0, "lm_head": layout.dims.hidden**-0.5}.get(name, 0.3)
            found.append(_whole(tensor, FILL_F16, 0.0, deviation))
    return found


_NIBBLES = 21.5  # the mean square of a random code


def _fan_in(layout: Qwen2Layout, name: str) -> int:
    part, dims = name.rpartition(".")[2], layout.dims
    return {"o": dims.q_width, "down": dims.inner}.get(part, dims.hidden)


def _layer_fills(layout: Layout, number: int, plan: LayerLayout) -> list[Fill]:
    tensors, prefix, hidden = layout.tensors, plan.prefix, layout.config.hidden_size
    width = layout.dims(number).q_heads * HEAD_DIM
    found = [_whole(tensors[f"{prefix}sink_k"], FILL_F32, 0.0, 1.0)]
    found += _norms(
        layout,
        *(
            f"{prefix}{name}"
            for name in ("attention_norm", "attn_out_norm", "ffn_norm", "ffn_out_norm", "q_norm", "k_norm")
        ),
    )
    if plan.moe:  # larger than 1 / sqrt(hidden), so that routing has preferences
        found.append(_whole(tensors[f"{prefix}router"], FILL_F32, 0.0, 2 * hidden**-0.5, shared=True))
    for part, k in (("qkv", hidden), ("o", width)):
        found += _matrix_fills(layout, f"{prefix}{part}", k * (layout.tp if part == "o" else 1))
    found += _matrix_fills(layout, f"{prefix}down", plan.inner * (layout.tp if plan.moe else layout.tp * plan.groups))
    gate_up = tensors[f"{prefix}gate_up"]
    if not plan.fp8_experts:
        return [*found, _whole(gate_up, FILL_F16, 0.0, hidden**-0.5)]
    units, unit = gate_up.shape[0] * gate_up.shape[1], gate_up.shape[2]
    scale = _code_scale(hidden)
    return [
        *found,
        Fill(gate_up.offset, units, 16 * hidden, unit, FILL_E4M3),
        Fill(gate_up.offset + 16 * hidden, units, hidden // 64, unit, FILL_F32, scale, scale / 8),
    ]


def _matrix_fills(layout: Layout, name: str, k: int) -> list[Fill]:
    """`name`.weights and .scales, of a matrix whose sums run over k columns."""
    weights, scales = layout.tensors[f"{name}.weights"], layout.tensors.get(f"{name}.scales")
    if scales is None:
        return [_whole(weights, FILL_F16, 0.0, k**-0.5)]
    scale = _code_scale(k)
    return [_whole(weights, FILL_E4M3, 0.0, 0.0), _whole(scales, FILL_F32, scale, scale / 8)]


def _norms(layout: Layout, *names: str) -> list[Fill]:
    return [_whole(layout.tensors[name], FILL_F32, 1.0, 0.1, shared=True) for name in names if name in layout.tensors]


def _whole(tensor: Tensor, kind: int, mean: float, deviation: float, *, shared: bool = False) -> Fill:
    element = {FILL_E4M3: 1, FILL_F32: 4}.get(kind, 2)
    return Fill(tensor.offset, 1, tensor.nbytes // element, tensor.nbytes, kind, mean, deviation, shared)


def _code_scale(k: int) -> float:
    """The scale with which random codes have a deviation of 1 / sqrt(k)."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return float((np.square(values[np.isfinite(values)]).mean() * k) ** -0.5)
