"""The launches of a decode round, from the configs alone: no GPU library is needed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cuq1.checkpoint import RankShare
from cuq1.config import load_config
from cuq1.errors import ConfigError
from cuq1.inspect.render import aligned, size_text
from cuq1.models.decode import round_plan
from cuq1.models.inbox_use import uses_of
from cuq1.plan.cost import FLOOR_DEPTHS
from cuq1.plan.dims import ROWS
from cuq1.plan.types import Launch

CONTEXT = 1024
DISTINCT = 37.7  # distinct experts a layer of the released model at six rows, where nothing else is asked for


def plan_report(
    folder: Path,
    tp: int,
    rank: int,
    rows: int,
    context: int | None,
    distinct: float | None,
    bandwidth: float,
    link: float,
) -> dict[str, Any]:
    """Every launch of one round of a rank: geometry, bytes, and their floor in microseconds at `bandwidth` bytes/s.

    Where there are several ranks, also the bytes that each launch sends to all peers together, and their floor at
    `link` bytes/s. The round's drafts count as accepted.
    The round verifies `rows` rows and makes five drafts, fewer where the draft has fewer slots, none without a draft.
    Raises ConfigError for what no rank or round can be.
    """
    config, draft = load_config(folder)
    RankShare(config, tp, rank)  # refuses a tp that does not divide the model, and a rank outside it
    if not 1 <= rows <= ROWS:
        raise ConfigError(f"a round verifies 1 to {ROWS} rows, not {rows}")
    context = min(CONTEXT, config.max_position_embeddings) if context is None else context
    if not rows <= context <= config.max_position_embeddings:
        longest = config.max_position_embeddings
        raise ConfigError(f"context {context} is outside this round's: choose one from {rows} to {longest}")
    low = config.num_experts_per_tok
    high = min(config.num_experts, rows * low)
    distinct = min(max(DISTINCT, low), high) if distinct is None else distinct
    if not low <= distinct <= high:
        raise ConfigError(f"{rows} rows choose {low} to {high} distinct experts a layer, not {distinct:g}")
    drafts = 0 if draft is None else min(FLOOR_DEPTHS, draft.num_draft_slots)
    plan = round_plan(
        config, draft, tp=tp, rank=rank, rows=rows, drafts=drafts, context=context, distinct=float(distinct)
    )
    uses = uses_of(plan, [rows] + [1] * (ROWS - 1))
    pushes = [(tp - 1) * sum(end - begin for begin, end in use.pushes) for use in uses]
    launches = [
        {**launch_report(launch, bandwidth), "pushed_bytes": pushed, "link_us": pushed / link * 1e6}
        for launch, pushed in zip(plan.launches, pushes, strict=True)
    ]
    return {
        "path": str(folder).encode(errors="replace").decode(),
        "tp": tp,
        "rank": rank,
        "rows": rows,
        "drafts": drafts,
        "context": context,
        "distinct_experts": distinct,
        "bandwidth": bandwidth,
        "layers": config.num_layers,
        "launches": launches,
        "kernels": len(plan.kernels()),
        "buffer_bytes": plan.total_bytes(),
        "read_bytes": plan.read_bytes(),
        "floor_us": plan.read_bytes() / bandwidth * 1e6,
        "link_bandwidth": link,
        "pushed_bytes": sum(pushes),
        "link_us": sum(pushes) / link * 1e6,
    }


def launch_report(launch: Launch, bandwidth: float) -> dict[str, Any]:
    """A launch's geometry, its bytes, and their floor in microseconds at `bandwidth` bytes/s."""
    return {
        "label": launch.label,
        "variant": launch.variant,
        "layer": launch.layer,
        "source": launch.kernel.source,
        "entry": launch.kernel.entry,
        "grid": list(launch.kernel.grid),
        "block": launch.kernel.block,
        "cluster": launch.kernel.cluster,
        "smem": launch.kernel.smem,
        "read_bytes": launch.read_bytes,
        "write_bytes": launch.write_bytes,
        "floor_us": launch.read_bytes / bandwidth * 1e6,
    }


HEAD: tuple[str, ...] = ("launch", "of", "times", "blocks x threads", "cluster", "smem", "reads", "us each", "us")


def render_plan(found: dict[str, Any]) -> str:
    """A plan's report as text: launches that differ in nothing but their layer share a line."""
    groups = grouped(found["launches"])
    head = HEAD
    table = [table_row(launches, found["layers"]) for launches in groups]
    if found["tp"] > 1:
        head = (*head, "pushes", "us each", "us")
        table = [(*row, *_pushed(launches)) for row, launches in zip(table, groups, strict=True)]
    right = (2, *range(4, len(head)))
    title = (
        f"{found['path']}: a round of rank {found['rank']} of {found['tp']}, {found['rows']} rows verified, "
        f"{found['drafts']} drafts, context {found['context']}, {found['distinct_experts']:g} distinct experts a layer"
    )
    totals = totals_text(found)
    if found["tp"] > 1:
        peers = "a peer" if found["tp"] == 2 else f"{found['tp'] - 1} peers"
        totals += (
            f"\nthey push {size_text(found['pushed_bytes'])} to {peers}: {found['link_us']:.1f} us at "
            f"{found['link_bandwidth'] / 1e9:g} GB/s"
        )
    return f"{title}\n\n{aligned([head, *table], right=right)}\n\n{totals}"


def grouped(launches: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Launches that differ in nothing but their layer, together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for launch in launches:
        part = "draft" if launch["layer"] < 0 else "target"
        geometry = (*launch["grid"], launch["block"], launch["cluster"], launch["smem"])
        pushed = launch.get("pushed_bytes", 0)
        key = (part, launch["label"], launch["variant"], geometry, launch["read_bytes"], pushed)
        groups.setdefault(key, []).append(launch)
    return list(groups.values())


def totals_text(found: dict[str, Any]) -> str:
    return (
        f"{len(found['launches'])} launches of {found['kernels']} kernels read {size_text(found['read_bytes'])}: "
        f"{found['floor_us']:.1f} us at {found['bandwidth'] / 1e12:g} TB/s; "
        f"buffers take {size_text(found['buffer_bytes'])}"
    )


def table_row(launches: list[dict[str, Any]], layers: int) -> tuple[str, ...]:
    first = launches[0]
    grid = first["grid"][: max((axis + 1 for axis in range(3) if first["grid"][axis] > 1), default=1)]
    return (
        f"{first['label']} {first['variant']}".strip(),
        _places([launch["layer"] for launch in launches], layers),
        str(len(launches)),
        f"{','.join(map(str, grid))} x {first['block']}",
        str(first["cluster"]) if first["cluster"] > 1 else "",
        str(first["smem"]) if first["smem"] else "",
        size_text(first["read_bytes"]),
        f"{first['floor_us']:.2f}",
        f"{sum(launch['floor_us'] for launch in launches):.1f}",
    )


def _pushed(launches: list[dict[str, Any]]) -> tuple[str, ...]:
    first = launches[0]
    if first["pushed_bytes"] == 0:
        return "", "", ""
    total = sum(launch["link_us"] for launch in launches)
    return size_text(first["pushed_bytes"]), f"{first['link_us']:.2f}", f"{total:.1f}"


def _places(numbers: Iterable[int], layers: int) -> str:
    """Layers as ranges, shortened: 0-3, 7, 9 and 30 more."""
    ordered = sorted(set(numbers))
    if ordered[0] < 0:
        return "draft"
    if ordered[0] >= layers:
        return "head"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:3]]
    rest = sum(high - low + 1 for low, high in runs[3:])
    return ", ".join(texts) + (f" and {rest} more" if rest else "")
