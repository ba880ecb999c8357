"""What there is to say about a Qwen2 model, as JSON values and as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuq1.checkpoint.nanoqwen import Nanoqwen, is_nanoqwen
from cuq1.checkpoint.nanoqwen_dims import Dims
from cuq1.checkpoint.qwen2 import open_qwen2
from cuq1.config_qwen2 import Qwen2Config, load_qwen2_config
from cuq1.inspect.render import aligned, count_text, ms_text, size_text
from cuq1.inspect.report import by_kind, chosen_contexts, has_weights, printable

HALF = 2  # bytes of a packed model's keys, values and embeddings
HEADS = {"fp16": False, "int4": True}


def qwen2_report(path: Path, context: int | None, bandwidth: float) -> dict[str, Any]:
    """Sizes, stored tensors, and what a decoded token reads of a packed model: bytes, bytes/s, milliseconds, counts.

    Of a folder, config.json is enough; where there are weights, their headers are checked as for loading, and a
    .nanoqwen file is checked whole. Raises ConfigError or CheckpointError as loading does, and ConfigError for a
    context that the model does not have.
    """
    stored = open_qwen2(path) if is_nanoqwen(path) or has_weights(path) else None
    config = load_qwen2_config(path) if stored is None else stored.config
    heads = HEADS
    tensors: list[dict[str, Any]] | None = None
    if isinstance(stored, Nanoqwen):
        tensors = _packed_kinds(stored)
        heads = {name: int4 for name, int4 in HEADS.items() if int4 == stored.int4_head}
    elif stored is not None:
        tensors = by_kind(stored.index)
    kv = config.num_hidden_layers * 2 * config.kv_size * HALF
    return {
        "path": printable(path),
        "config": _sizes(config),
        "parameters": _parameters(config),
        **({} if tensors is None else {"tensors": tensors}),
        "packed": [_packed(config, name, int4, bandwidth) for name, int4 in heads.items()],
        "bandwidth": bandwidth,
        "kv": {
            "bytes_per_token": kv,
            "read": [
                {"context": length, "bytes": length * kv, "ms": length * kv / bandwidth * 1e3}
                for length in chosen_contexts(config.max_position_embeddings, context)
            ],
        },
    }


def _sizes(config: Qwen2Config) -> dict[str, Any]:
    return {
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "query_heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "width": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "tied": config.tie_word_embeddings,
    }


def _parameters(config: Qwen2Config) -> int:
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    layer = hidden * (2 * q + 2 * kv + 3 * config.intermediate_size) + q + 2 * kv + 2 * hidden
    vocab = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return config.num_hidden_layers * layer + vocab + hidden


def _packed(config: Qwen2Config, head: str, int4_head: bool, bandwidth: float) -> dict[str, Any]:
    """The tensors of a packed model, and those that each token reads, which an embedding is only as logits' matrix."""
    held = Dims.of(config, int4_head).tensor_bytes()
    is_head = config.tie_word_embeddings and not int4_head
    read = held if is_head else held - config.vocab_size * config.hidden_size * HALF
    return {"lm_head": head, "bytes": held, "read_bytes": read, "read_ms": read / bandwidth * 1e3}


def _packed_kinds(file: Nanoqwen) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for name, place in file.places.items():
        part = name.rsplit(".", 1)[-1]
        kind = {"words": "INT4 codes", "scales": "INT4 scales", "bias": "biases", "embed_tokens": "embedding"}.get(
            part, "lm_head" if part == "lm_head" else "norms"
        )
        dtype = "INT4" if part == "words" else "F16"
        row = kinds.setdefault(kind, {"kind": kind, "tensors": 0, "dtypes": [dtype], "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += place.nbytes
    return sorted(kinds.values(), key=lambda row: (-row["bytes"], row["kind"]))


def render_qwen2(found: dict[str, Any]) -> str:
    """The text of a report, without a final newline."""
    size, kv = found["config"], found["kv"]
    overview = [
        ("layers", str(size["layers"])),
        ("hidden size", str(size["hidden_size"])),
        ("heads", f"{size['query_heads']} query, {size['kv_heads']} KV, of {size['head_dim']}"),
        ("MLP width", str(size["width"])),
        ("vocabulary", f"{size['vocab_size']}, embedding {'tied' if size['tied'] else 'apart from lm_head'}"),
        ("context", str(size["context"])),
        ("parameters", count_text(found["parameters"])),
        ("KV of a token", size_text(kv["bytes_per_token"])),
    ]
    blocks = [(found["path"], aligned(overview))]
    if "tensors" in found:
        rows = found["tensors"]
        table = [(row["kind"], str(row["tensors"]), size_text(row["bytes"]), " ".join(row["dtypes"])) for row in rows]
        count, total = sum(row["tensors"] for row in rows), sum(row["bytes"] for row in rows)
        blocks.append((f"{count} tensors, {size_text(total)}", aligned(table, right=(1, 2))))
    packed: list[Sequence[str]] = [("lm_head", "holds", "a token reads", "ms")]
    for row in found["packed"]:
        sizes = size_text(row["bytes"]), size_text(row["read_bytes"])
        packed.append((row["lm_head"], *sizes, ms_text(row["read_ms"])))
    blocks.append((f"packed, at {found['bandwidth'] / 1e12:g} TB/s", aligned(packed, right=(1, 2, 3))))
    read = [(str(row["context"]), size_text(row["bytes"]), ms_text(row["ms"])) for row in kv["read"]]
    blocks.append(("KV on top", aligned([("context", "bytes", "ms"), *read], right=range(3))))
    return "\n\n".join(f"{title}\n{table}" for title, table in blocks)
