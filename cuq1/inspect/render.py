"""The report of cuq1.inspect as aligned text."""

from collections.abc import Collection, Sequence
from typing import Any

Row = tuple[str, ...]


def render(found: dict[str, Any]) -> str:
    """The text of a report, without a final newline."""
    rank = f"one rank of {found['tp']}"
    floor = found["floor"]
    blocks = [(found["path"], aligned(_overview(found["config"], found["parameters"])))]
    for part, kinds in found.get("tensors", {}).items():
        table = [(row["kind"], str(row["tensors"]), size_text(row["bytes"]), " ".join(row["dtypes"])) for row in kinds]
        count, size = sum(row["tensors"] for row in kinds), sum(row["bytes"] for row in kinds)
        blocks.append((f"{part}: {count} tensors, {size_text(size)}", aligned(table, right=(1, 2))))
    blocks.append((f"{rank} holds", aligned(_held(found["rank_bytes"], found["kv"]))))
    parts = [(part, size_text(size)) for part, size in floor["part_bytes"].items()]
    blocks.append((f"{rank} reads", aligned(parts, right=(1,))))
    blocks.append((f"floor of a round at {floor['bandwidth'] / 1e12:g} TB/s", _rounds(floor)))
    read = [(str(row["context"]), size_text(row["bytes"]), ms_text(row["ms"])) for row in found["kv"]["read"]]
    blocks.append(("KV on top", aligned([("context", "bytes", "ms"), *read], right=range(3))))
    return "\n\n".join(f"{title}\n{table}" for title, table in blocks)


def _overview(size: dict[str, Any], counts: dict[str, int]) -> list[Row]:
    rows: list[Row] = [
        (
            "layers",
            f"{size['layers']}: {size['full_layers']} full, {size['sliding_layers']} sliding; "
            f"{size['dense_layers']} dense, {size['layers'] - size['dense_layers']} MoE",
        ),
        ("hidden size", str(size["hidden_size"])),
        ("heads", f"{size['query_heads']} query, {size['kv_heads']} KV, of {size['head_dim']}"),
        ("experts", f"{size['experts']} of width {size['expert_width']}, {size['experts_per_token']} a token"),
        ("dense width", str(size["dense_width"])),
        ("vocabulary", str(size["vocab_size"])),
        ("context", f"{size['context']}, sliding window {size['sliding_window']}"),
        ("weights", size["weights"]),
        ("parameters", f"{count_text(counts['target'])}, {count_text(counts['target_active'])} active a token"),
    ]
    if "draft" in counts:
        draft = f"{count_text(counts['draft'])} parameters, {count_text(counts['draft_active'])} active a depth"
        rows.append(("draft", f"{draft}; {size['draft_slots']} slots, window {size['draft_window']}"))
    return rows


def _held(rank_bytes: dict[str, float], kv: dict[str, Any]) -> list[Row]:
    return [
        *((f"{part} weights", size_text(size)) for part, size in rank_bytes.items()),
        ("KV of a token, each layer", size_text(kv["bytes_per_token_layer"])),
        ("KV of a token, full layers", size_text(kv["bytes_per_token_full"])),
        ("KV of a token, sliding layers", f"{size_text(kv['bytes_per_token_sliding'])}, up to the window"),
    ]


def _rounds(floor: dict[str, Any]) -> str:
    head: Row = ("distinct experts a layer", "target", "ms")
    table: list[Row] = []
    for row in floor["rounds"]:
        line: Row = (f"{row['distinct_experts']:g}", size_text(row["target_bytes"]), ms_text(row["target_ms"]))
        table.append(
            (*line, size_text(row["round_bytes"]), ms_text(row["round_ms"])) if floor["draft_depths"] else line
        )
    if floor["draft_depths"]:
        head = (*head, f"with {floor['draft_depths']} draft depths", "ms")
    return aligned([head, *table], right=range(len(head)))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows of cells in columns, indented; the columns in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _scaled(value: float) -> tuple[float, str]:
    prefixes = ("", "k", "M", "G", "T")
    power = 0
    while value >= 999.5 and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    return value, prefixes[power]


def size_text(size: float) -> str:
    """Bytes to three digits, in powers of 1000."""
    value, prefix = _scaled(size)
    digits = 0 if value >= 99.95 or not prefix else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}B"


def count_text(count: int) -> str:
    """Parameters, where a G is a B(illion)."""
    value, prefix = _scaled(count)
    return f"{value:.1f} {'B' if prefix == 'G' else prefix}"


def ms_text(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds >= 0.1 else f"{milliseconds:.2g}"
