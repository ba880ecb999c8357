"""The launches of a Qwen2 model's token, from its config alone: no GPU library is needed."""

from pathlib import Path
from typing import Any

from cuq1.checkpoint.nanoqwen import is_nanoqwen
from cuq1.checkpoint.qwen2 import open_qwen2
from cuq1.config_qwen2 import load_qwen2_config
from cuq1.cuda.qwen2_weights import qwen2_layout
from cuq1.errors import ConfigError
from cuq1.inspect.plan import CONTEXT, HEAD, grouped, launch_report, table_row, totals_text
from cuq1.inspect.render import aligned
from cuq1.inspect.report import printable
from cuq1.models import qwen2, qwen2_decode


def qwen2_plan_report(path: Path, context: int | None, bandwidth: float) -> dict[str, Any]:
    """Every launch of one token: geometry, bytes, and their floor in microseconds at `bandwidth` bytes/s.

    path: a folder, of which config.json is enough, or a .nanoqwen file, which is checked whole. context: positions that
    are cached, the token's own among them. Raises ConfigError or CheckpointError as loading does, and ConfigError for a
    context that the model does not have.
    """
    file = open_qwen2(path) if is_nanoqwen(path) else None
    config = load_qwen2_config(path) if file is None else file.config
    longest = config.max_position_embeddings
    context = min(CONTEXT, longest) if context is None else context
    if not 1 <= context <= longest:
        raise ConfigError(f"context {context} is outside the model's: choose one from 1 to {longest}")
    int4_head = getattr(file, "int4_head", False)
    model = qwen2.resolve(config, qwen2_layout(config, int4_head=int4_head), capacity=context)
    plan = qwen2_decode.round_of(model, context=context, short=model.is_short(context - 1))
    return {
        "path": printable(path),
        "context": context,
        "lm_head": "int4" if int4_head else "fp16",
        "bandwidth": bandwidth,
        "layers": config.num_hidden_layers,
        "launches": [launch_report(launch, bandwidth) for launch in plan.launches],
        "kernels": len(plan.kernels()),
        "buffer_bytes": plan.total_bytes(),
        "read_bytes": plan.read_bytes(),
        "floor_us": plan.read_bytes() / bandwidth * 1e6,
    }


def render_qwen2_plan(found: dict[str, Any]) -> str:
    """A plan's report as text: launches that differ in nothing but their layer share a line."""
    table = [table_row(launches, found["layers"]) for launches in grouped(found["launches"])]
    title = f"{found['path']}: a token in INT4, lm_head {found['lm_head']}, context {found['context']}"
    body = aligned([HEAD, *table], right=(2, *range(4, len(HEAD))))
    return f"{title}\n\n{body}\n\n{totals_text(found)}"
