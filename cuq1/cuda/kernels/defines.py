"""The -D constants that the kernels of a rank's share have in common."""

from cuq1.plan.dims import Dims
from cuq1.plan.kernel import Define


def common(dims: Dims) -> tuple[tuple[str, Define], ...]:
    """Every size of the share; a kernel uses what it needs."""
    return (
        ("HIDDEN", dims.hidden),
        ("Q_HEADS", dims.q_heads),
        ("KV_HEADS", dims.kv_heads),
        ("GROUP", dims.group),
        ("EXPERTS", dims.experts),
        ("TOP_K", dims.top_k),
        ("INNER", dims.inner),
        ("SLICE", dims.slice_width),
        ("VOCAB", dims.vocab),
        ("VOCAB_TOTAL", dims.vocab_total),
        ("EH_ROWS", dims.eh_rows),
        ("ROTARY", dims.rotary),
        ("EPS", f"{dims.eps!r}f"),
        ("FP8_ATTENTION", int(dims.fp8_attention)),
        ("FP8_EXPERTS", int(dims.fp8_experts)),
        ("FP8_ACTIVATIONS", int(dims.fp8_activations)),
        *((("RANKS", dims.ranks),) if dims.ranks > 1 else ()),
    )
