"""A Qwen2 model's prompts as steps: a chunk of up to CHUNK tokens, in order of positions, without gaps.

What a caller does for each chunk: writes its tokens as int32 into `prefill.tokens`, and issues the steps. Then the
caches hold the chunk's positions, `prefill.residual` its rows before the final norm, and row 0 of `hidden16` the last
row after it, as `qwen2_decode.logits_of` reads it.

Within a layer:  norm > qkv > attention > o_proj > norm > gate_up > down.  Projections add to the residual themselves.
"""

from functools import partial

from cuq1.cuda.kernels import qwen2_gemv, qwen2_head, qwen2_prefill
from cuq1.cuda.kernels.qwen2_prefill import CHUNK
from cuq1.models.collect import buffer_of
from cuq1.models.qwen2 import Layer, Model, working_buffers
from cuq1.models.steps import Chunk, Fields, Step, StepList, Sum, maker, plan_over
from cuq1.plan.kernel import Kernel
from cuq1.plan.qwen2_dims import Qwen2Dims, padded
from cuq1.plan.types import Buffer, Plan, Ref

SCORED = 256  # rows of `prefill.logits`


def scored(model: Model) -> int:
    """Rows whose logits `logits_steps` computes at once: an INT4 head's are a decode kernel's."""
    return 1 if model.sizes.int4_head else SCORED


def prompt_buffers(model: Model) -> list[Buffer]:
    """Everything that a chunk reads or writes besides weights and what decoding has; `normed`, `attended` and `inner`
    are in tiles."""
    d = model.sizes
    f32, f16 = "float32", "float16"
    return [
        buffer_of("prefill.tokens", (CHUNK + 1,), "int32"),
        buffer_of("prefill.rope", (CHUNK, d.head_size // 2, 2), f32),
        buffer_of("prefill.residual", (CHUNK, d.hidden), f32),
        buffer_of("prefill.normed", (CHUNK, padded(d.hidden)), f16),
        buffer_of("prefill.q", (CHUNK, d.q_heads, d.head_size), f16),
        buffer_of("prefill.attended", (CHUNK, padded(d.q_width)), f16),
        buffer_of("prefill.inner", (CHUNK, padded(d.inner)), f16),
        buffer_of("prefill.hidden16", (scored(model), padded(d.hidden)), f16),
        buffer_of("prefill.logits", (scored(model), d.vocab), f32),
    ]


def chunk_steps(model: Model) -> list[Step | Sum]:
    """The launches of a chunk, in order."""
    b, d = StepList(model.weights.tensors), model.sizes
    rope: Fields = {"inverse_frequencies": Ref(model.rope), "table": Ref("prefill.rope")}
    b.add("rope", 0, maker(qwen2_head.rope, d), rope, _placed)
    embed: Fields = {
        "tokens": Ref("prefill.tokens"),
        "table": b.weight("embed"),
        "residual": Ref("prefill.residual"),
        "pages": Ref("pages"),
        "page_table": Ref("page_table"),
        "free_pages": Ref("free_pages"),
        "max_pages": model.pages,
    }
    b.add("embed", 0, maker(qwen2_prefill.embed, d), embed, _placed)
    for layer in model.layers:
        _attention(b, d, layer)
        _mlp(b, d, layer)
    last: Fields = {"norm": b.weight("norm"), "normed": Ref("hidden16")}
    make = maker(qwen2_prefill.norm, d, tiled=False)
    b.add("norm", len(model.layers), make, last, partial(_row, d, rows=1))
    return b.steps


def logits_steps(model: Model) -> list[Step | Sum]:
    """`prefill.logits` [rows, vocab] FP32 of rows of the last chunk, at most `scored` at once.

    They are issued for Chunk(first, rows): rows first .. first + rows - 1 of the chunk, counted from its beginning.
    """
    b, d, last = StepList(model.weights.tensors), model.sizes, len(model.layers)
    most = scored(model)

    def at(part: Chunk) -> Fields:
        if part.rows > most or part.end > CHUNK:
            raise ValueError(f"at most {most} of a chunk's {CHUNK} rows are scored at once: {part}")
        return {"rows": part.rows, "residual": Ref("prefill.residual", part.start * d.hidden * 4)}

    norm: Fields = {"norm": b.weight("norm"), "normed": Ref("prefill.hidden16")}
    b.add("norm", last, maker(qwen2_prefill.norm, d, tiled=False), norm, at)
    if d.int4_head:
        args: Fields = {
            "normed": Ref("prefill.hidden16"),
            "weights": b.weight("lm_head"),
            "logits": Ref("prefill.logits"),
        }
        b.add("lm_head", last, maker(_head, d), args)
        return b.steps
    linear: Fields = {
        "in": Ref("prefill.hidden16"),
        "weights": b.weight("lm_head"),
        "scales": 0,
        "out": Ref("prefill.logits"),
        "out_stride": d.vocab,
        "first_column": 0,
        "scale": 1.0,
    }
    b.add("lm_head", last, maker(qwen2_head.scores, d), linear)
    return b.steps


def chunk_plan(model: Model, chunk: Chunk) -> Plan:
    """All of a chunk as a plan."""
    return steps_plan(model, chunk_steps(model), chunk)


def steps_plan(model: Model, steps: list[Step | Sum], chunk: Chunk) -> Plan:
    """Steps for a chunk as a plan. Bytes count weights alone."""
    return plan_over((*working_buffers(model), *prompt_buffers(model)), model.weights.tensors, steps, chunk)


def _placed(chunk: Chunk) -> Fields:
    return {"rows": chunk.rows, "start": chunk.start}


def _row(d: Qwen2Dims, chunk: Chunk, *, rows: int) -> Fields:
    """The chunk's last rows."""
    return {"rows": rows, "residual": Ref("prefill.residual", (chunk.rows - rows) * d.hidden * 4)}


def _head(dims: Qwen2Dims, rows: int) -> Kernel:
    return qwen2_gemv.lm_head(dims)


def _norm(b: StepList, d: Qwen2Dims, layer: Layer, weights: str) -> None:
    args: Fields = {
        "residual": Ref("prefill.residual"),
        "norm": b.weight(f"{layer.prefix}.{weights}"),
        "normed": Ref("prefill.normed"),
    }
    b.add("norm", layer.number, maker(qwen2_prefill.norm, d), args)


def _attention(b: StepList, d: Qwen2Dims, layer: Layer) -> None:
    p, number = layer.prefix, layer.number
    _norm(b, d, layer, "input_norm")
    caches: Fields = {
        "page_table": Ref("page_table"),
        "k_pages": Ref(f"{p}.k_pages"),
        "v_pages": Ref(f"{p}.v_pages"),
        "q": Ref("prefill.q"),
    }
    qkv: Fields = {
        "normed": Ref("prefill.normed"),
        "weights": b.weight(f"{p}.qkv"),
        "bias": b.weight(f"{p}.qkv_bias"),
        "rope": Ref("prefill.rope"),
        **caches,
    }
    b.add("qkv", number, maker(qwen2_prefill.qkv, d), qkv, _placed)
    attended = Ref("prefill.attended")
    b.add("attention", number, maker(qwen2_prefill.attention, d), {**caches, "attended": attended}, _placed)
    o: Fields = {"in": attended, "weights": b.weight(f"{p}.o"), "residual": Ref("prefill.residual"), "scale": 1.0}
    b.add("o_proj", number, maker(qwen2_prefill.o_proj, d), o)


def _mlp(b: StepList, d: Qwen2Dims, layer: Layer) -> None:
    p, number = layer.prefix, layer.number
    _norm(b, d, layer, "post_norm")
    inner = Ref("prefill.inner")
    gate_up: Fields = {"normed": Ref("prefill.normed"), "weights": b.weight(f"{p}.gate_up"), "inner": inner}
    b.add("gate_up", number, maker(qwen2_prefill.gate_up, d), gate_up)
    down: Fields = {
        "in": inner,
        "weights": b.weight(f"{p}.down"),
        "residual": Ref("prefill.residual"),
        "scale": 1 / qwen2_gemv.INNER_SCALE,
    }
    b.add("down", number, maker(qwen2_prefill.down, d), down)
