"""What a Qwen2 model has of the head's and the sampler's kernels, which know nothing of a model's layers."""

from cuq1.cuda.kernels import control, head, prefill, sampling
from cuq1.plan.dims import MAX_TOP_K, Dims
from cuq1.plan.kernel import Kernel
from cuq1.plan.qwen2_dims import Qwen2Dims, padded


def shared(dims: Qwen2Dims) -> Dims:
    """The sizes that these kernels are compiled for. hidden: as lm_head reads rows, in whole groups."""
    return Dims(
        hidden=padded(dims.hidden),
        q_heads=dims.q_heads,
        kv_heads=dims.kv_heads,
        experts=1,
        top_k=1,
        inner=dims.inner,
        slice_width=padded(dims.hidden),
        vocab=dims.vocab,
        vocab_total=dims.vocab,
        eh_rows=padded(dims.hidden),
        rotary=dims.head_size,
        eps=dims.eps,
        fp8_attention=False,
        fp8_experts=False,
    )


def lm_head(dims: Qwen2Dims) -> Kernel:
    """logits float32 [1, vocab] of a matrix of halves: cuq1.cuda.kernels.head."""
    return head.lm_head(shared(dims))


def top_k(dims: Qwen2Dims) -> Kernel:
    """values and ids [pieces, MAX_TOP_K] of one row's logits: cuq1.cuda.kernels.head."""
    return head.top_k(shared(dims), rows=1, pieces=head.pieces_of(dims.vocab))


def accept(dims: Qwen2Dims) -> Kernel:
    """Draws the next token from top_k's lists: cuq1.cuda.kernels.sampling."""
    return sampling.accept(shared(dims), head.pieces_of(dims.vocab))


def rope(dims: Qwen2Dims, rows: int) -> Kernel:
    """table float32 [rows, head_size / 2, 2]: cuq1.cuda.kernels.prefill."""
    return prefill.rope(shared(dims), rows)


def scores(dims: Qwen2Dims, rows: int) -> Kernel:
    """logits float32 [rows, vocab] of a matrix of halves: cuq1.cuda.kernels.prefill."""
    return prefill.lm_head(shared(dims), rows)


def kernels(dims: Qwen2Dims) -> list[Kernel]:
    """All of them. A vocabulary smaller than a list of candidates has no top_k."""
    halves = [] if dims.int4_head else [lm_head(dims), scores(dims, 1)]
    lists = [top_k(dims)] if dims.vocab >= MAX_TOP_K else []
    return [*halves, *lists, accept(dims), control.control(shared(dims)), rope(dims, 1)]
