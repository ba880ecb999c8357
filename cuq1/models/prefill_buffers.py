"""The buffers of prompt processing, besides weights, caches, `rope.*`, `hidden` and `hidden16`."""

from cuq1.cuda.kernels import prefill
from cuq1.cuda.kernels.prefill import CHUNK
from cuq1.models.collect import buffer_of
from cuq1.models.q1 import Layer, Model
from cuq1.plan.dims import HEAD_DIM, KV_TILE
from cuq1.plan.types import Buffer

SCORED = 256  # rows of `prefill.logits`


def working_buffers(model: Model, *, draft: bool = True) -> list[Buffer]:
    """Everything that a chunk reads or writes besides weights, caches, `rope.*`, `hidden` and `hidden16`.

    draft: with what the draft's rows need.
    """
    d = model.dims
    most = max(layer.dims.inner * _choices(layer) for layer in model.layers)
    choices = max(_choices(layer) for layer in model.layers)
    experts = max(_experts(layer) for layer in model.layers)
    f32, f16, i32 = "float32", "float16", "int32"
    found = [
        _buffer("tokens", (CHUNK + 1,), i32),
        *(_buffer(f"rope.{theta:g}", (CHUNK, d.rotary // 2, 2), f32) for theta in thetas(model) if d.rotary),
        _buffer("residual", (CHUNK, d.hidden), f32),
        _buffer("normed", (CHUNK, d.hidden), f16),
        _buffer("q", (CHUNK, d.q_heads, HEAD_DIM), f16),
        _buffer("attended", (CHUNK, d.q_width), f16),
        # Keys are split only where that makes at most two blocks, of 64 rows of a head, for each multiprocessor.
        _buffer("partial_out", (2 * model.sms * 64, HEAD_DIM), f32),
        _buffer("partial_stats", (2 * model.sms * 64, 2), f32),
        _buffer("o", (CHUNK, d.hidden), f32),
        _buffer("h", (CHUNK, d.hidden), f32),
        _buffer("ffn_normed", (CHUNK, d.hidden), f16),
        _buffer("ffn_normed32", (CHUNK, d.hidden), f32),
        _buffer("router_logits", (prefill.router_splits(d), CHUNK, d.experts), f32),
        _buffer("expert_ids", (CHUNK, d.top_k), i32),
        _buffer("expert_weights", (CHUNK, d.top_k), f32),
        _buffer("pairs", (CHUNK * choices,), i32),
        _buffer("tiles", (CHUNK * choices // prefill.TILE_TOKENS + experts, 4), i32),
        _buffer("tile_count", (1,), i32),
        _buffer("inner", (CHUNK * most,), f16),
        _buffer("down", (CHUNK * choices, d.hidden), f32),
        _buffer("y", (CHUNK, d.hidden), f32),
        _buffer("hidden", (CHUNK, d.hidden), f32),
        _buffer("hidden16", (CHUNK, d.hidden), f16),
        _buffer("logits", (SCORED, d.vocab), f32),
    ]
    if d.ranks > 1:
        found.append(_buffer("all_logits", (d.ranks, SCORED, d.vocab), f32))
    if any(layer.sliding for layer in model.layers):
        shape = (d.kv_heads, staged_slots(model), HEAD_DIM)
        found += [_buffer("k_staged", shape, f16), _buffer("v_staged", shape, f16)]
    if draft and model.draft is not None:
        found += [
            _buffer("rope_before", (1, max(1, d.rotary // 2), 2), f32),
            _buffer("entry", (CHUNK, 2 * d.hidden), f16),
            _buffer("entered", (CHUNK, d.hidden), f32),
        ]
    return found


def _buffer(name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
    return buffer_of(f"prefill.{name}", shape, dtype)


def _choices(layer: Layer) -> int:
    """Experts that every row of a layer goes to."""
    return layer.dense_groups or layer.dims.top_k


def _experts(layer: Layer) -> int:
    return layer.dense_groups or layer.dims.experts


def thetas(model: Model) -> list[float]:
    """The RoPE bases of all layers."""
    return sorted({layer.theta for layer in model.all_layers})


def staged_slots(model: Model) -> int:
    """Positions that the staging buffer holds: a window, what rounds it to tiles, and a chunk."""
    window = max(layer.window for layer in model.layers)
    return -(-(window + KV_TILE + CHUNK) // KV_TILE) * KV_TILE
