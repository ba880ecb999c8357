"""What there is to say about a checkpoint folder, as JSON values."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cuq1.checkpoint import Checkpoint, RankShare
from cuq1.checkpoint.index import Index
from cuq1.checkpoint.shares import leaves
from cuq1.config import FULL, SLIDING, DraftConfig, Q1Config, load_config
from cuq1.errors import ConfigError
from cuq1.plan import cost

CONTEXTS = (1024, 16 * 1024, 64 * 1024, 128 * 1024, 192 * 1024)

# First match wins. Names are the files' own.
KINDS: tuple[tuple[str, str], ...] = (
    (r"^mtp_layers\.", "training's draft (not used)"),
    (r"_scale_inv$", "block scales"),
    (r"embed_tokens\.weight$", "embedding"),
    (r"lm_head\.weight$", "lm_head"),
    (r"\.eh_proj\.weight$", "eh_proj"),
    (r"\.self_attn\.[qkvo]_proj\.weight$", "attention projections"),
    (r"\.sink_k$", "attention sinks"),
    (r"\.mlp\.(router|gate)\.weight$", "routers"),
    (r"\.mlp\.experts\.", "experts"),
    (r"\.mlp\.(gate|up|down)_proj\.weight$", "dense MLP"),
    (r"norm\.weight$", "norms"),
    (r"\.bias$", "biases"),
)


def report(folder: Path, tp: int, context: int | None, bandwidth: float) -> dict[str, Any]:
    """Sizes, tensors, what rank 0 of `tp` holds and reads: bytes, bytes/s, milliseconds and counts.

    Needs config.json only; where there are weights, their headers are checked as for loading.
    Raises ConfigError or CheckpointError as loading does, and ConfigError for a context that the
    model does not have.
    """
    config, draft = load_config(folder)
    RankShare(config, tp)  # refuses a tp that does not divide the model
    if draft is not None:
        RankShare(draft.layer, tp)
    contexts = chosen_contexts(config.max_position_embeddings, context)
    return {
        "path": printable(folder),
        "config": _sizes(config, draft),
        "parameters": _parameters(config, draft),
        **(
            _stored(Checkpoint.open(folder), tp)
            if has_weights(folder)
            else {"rank_bytes": _estimated(config, draft, tp)}
        ),
        "tp": tp,
        "kv": _kv(config, tp, contexts, bandwidth),
        "floor": _floor(config, draft, tp, bandwidth),
    }


def chosen_contexts(longest: int, context: int | None) -> list[int]:
    """The one that was asked for, else several of those that the model has; ConfigError for one that it has not."""
    if context is not None and not 1 <= context <= longest:
        raise ConfigError(f"context {context} is outside this model's: choose one from 1 to {longest}")
    return [length for length in CONTEXTS if length <= longest] or [longest] if context is None else [context]


def printable(path: Path) -> str:
    """A path as text; a name that is not UTF-8 could not be printed."""
    return str(path).encode(errors="replace").decode()


def has_weights(folder: Path) -> bool:
    """Whether there are tensors beside the config."""
    return any(path.name.endswith((".safetensors", ".safetensors.index.json")) for path in _files(folder))


def _files(folder: Path) -> Iterable[Path]:
    for part in (folder, folder / "mtp"):
        try:
            if part.is_dir():
                yield from part.iterdir()
        except OSError as error:
            raise ConfigError(f"{part} cannot be read ({error.strerror}): check its permissions") from None


def _sizes(config: Q1Config, draft: DraftConfig | None) -> dict[str, Any]:
    sizes = {
        "layers": config.num_layers,
        "full_layers": config.layer_types.count(FULL),
        "sliding_layers": config.layer_types.count(SLIDING),
        "dense_layers": len(config.mlp_only_layers),
        "hidden_size": config.hidden_size,
        "query_heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "expert_width": config.intermediate_size,
        "dense_width": config.dense_intermediate_size,
        "vocab_size": config.vocab_size,
        "sliding_window": config.sliding_window,
        "context": config.max_position_embeddings,
        "weights": "block FP8" if config.fp8_block else "BF16",
    }
    if draft is not None:
        sizes |= {"draft_slots": draft.num_draft_slots, "draft_window": draft.layer.sliding_window}
    return sizes


def _parameters(config: Q1Config, draft: DraftConfig | None) -> dict[str, int]:
    counts = {"target": cost.parameters(config), "target_active": cost.parameters(config, active=True)}
    if draft is not None:
        counts |= {"draft": cost.draft_parameters(draft), "draft_active": cost.draft_parameters(draft, active=True)}
    return counts


def _stored(checkpoint: Checkpoint, tp: int) -> dict[str, Any]:
    """What lies on disk, and what rank 0 holds of it."""
    rank = {"target": sum(leaf.nbytes for _, leaf in leaves(checkpoint.target(tp)))}
    tensors = {"target": by_kind(checkpoint.target_index)}
    if checkpoint.draft_index is not None:
        rank["draft"] = sum(leaf.nbytes for _, leaf in leaves(checkpoint.draft(tp)))
        tensors["draft"] = by_kind(checkpoint.draft_index)
    return {"tensors": tensors, "rank_bytes": rank}


def _estimated(config: Q1Config, draft: DraftConfig | None, tp: int) -> dict[str, float]:
    rank = {"target": cost.resident_bytes(config, tp)}
    return rank if draft is None else rank | {"draft": cost.draft_resident_bytes(draft, tp)}


def by_kind(index: Index) -> list[dict[str, Any]]:
    """Number, dtypes and bytes of an index's tensors of each kind, the largest first."""
    kinds: dict[str, dict[str, Any]] = {}
    for name in index.names:
        kind = next((kind for pattern, kind in KINDS if re.search(pattern, name)), "other")
        row = kinds.setdefault(kind, {"kind": kind, "tensors": 0, "dtypes": [], "bytes": 0})
        entry = index.entry(name)
        row["tensors"] += 1
        row["bytes"] += entry.end - entry.begin
        if entry.dtype not in row["dtypes"]:
            row["dtypes"].append(entry.dtype)
    return sorted(kinds.values(), key=lambda row: (-row["bytes"], row["kind"]))


def _kv(config: Q1Config, tp: int, contexts: list[int], bandwidth: float) -> dict[str, Any]:
    row = cost.kv_row_bytes(config, tp)
    return {
        "bytes_per_token_layer": row,
        "bytes_per_token_full": row * config.layer_types.count(FULL),
        "bytes_per_token_sliding": row * config.layer_types.count(SLIDING),
        "read": [
            {"context": length, "bytes": (read := cost.kv_bytes(config, tp, length)), "ms": read / bandwidth * 1e3}
            for length in contexts
        ],
    }


def _floor(config: Q1Config, draft: DraftConfig | None, tp: int, bandwidth: float) -> dict[str, Any]:
    depths = 0 if draft is None else min(cost.FLOOR_DEPTHS, draft.num_draft_slots)
    depth_bytes = 0.0 if draft is None else cost.draft_depth_bytes(draft, tp)
    rows = []
    for distinct in cost.distinct_levels(config):
        target = cost.target_cost(config, tp, distinct).total
        both = target + depths * depth_bytes
        row = {"distinct_experts": distinct, "target_bytes": target, "target_ms": target / bandwidth * 1e3}
        rows.append(row if draft is None else row | {"round_bytes": both, "round_ms": both / bandwidth * 1e3})
    return {
        "bandwidth": bandwidth,
        "draft_depths": depths,
        "part_bytes": {
            "attention projections, a layer": cost.attention_bytes(config, tp),
            "router, a layer": cost.router_bytes(config, tp),
            "one expert": cost.expert_bytes(config, tp),
            "dense MLP, a layer": cost.dense_bytes(config, tp),
            "lm_head": cost.lm_head_bytes(config, tp),
            **({} if draft is None else {"one draft depth": depth_bytes}),
        },
        "rounds": rows,
    }
