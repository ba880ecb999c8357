"""Where a layer's time goes: when the blocks resume and end each of its parts, from the end of the layer before it."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Times:
    """A part's times in microseconds from the moment at which half of the blocks had ended the layer before: of the
    first block that has work in it, half of them, and the last one.

    work: from a block's resuming to its end, the median. blocks: how many have work in it.
    """

    first_resumed: float
    resumed: float
    last_resumed: float
    first_end: float
    end: float
    last_end: float
    work: float
    blocks: float


def timeline(
    entries: NDArray[np.void], labels: Sequence[str], order: Iterable[tuple[str, int]]
) -> dict[str, list[Times]]:
    """Of each part of a layer, in order, its times in every layer but the first.

    entries: one token's (dtype tools.tracing.ENTRY); labels: what their kernels are called; order: (label, layer) of a
    token's launches and parts.
    """
    names = [label for label, layer in order if layer == 1]
    found: dict[str, list[Times]] = {name: [] for name in names}
    if not names:
        return found
    by_name = {name: entries[entries["kernel"] == labels.index(name)] for name in names}
    ends = by_name[names[-1]]
    for layer in range(1, int(max(part["layer"].max(initial=0) for part in by_name.values())) + 1):
        before = ends["end"][ends["layer"] == layer - 1]
        for name, of_all in by_name.items():
            part = of_all[of_all["layer"] == layer]
            if not (len(before) and len(part)):
                continue
            waited = part[part["resumed"] > 0]  # others have no work in it, or none of its blocks waits for anything
            part = waited if len(waited) else part
            zero = np.median(before.astype(np.int64))
            end = part["end"].astype(np.int64)
            resumed = part["resumed" if len(waited) else "begin"].astype(np.int64)
            ns = [*_spread(resumed - zero), *_spread(end - zero), float(np.median(end - resumed))]
            found[name].append(Times(*[value / 1e3 for value in ns] + [float(len(part))]))
    return found


def _spread(ns: NDArray[np.float64]) -> tuple[float, float, float]:
    return float(ns.min()), float(np.median(ns)), float(ns.max())


def medians(tokens: Sequence[dict[str, list[Times]]]) -> dict[str, Times]:
    """Over the layers of several tokens, value by value."""
    found: dict[str, list[Times]] = {}
    for token in tokens:
        for name, times in token.items():
            found.setdefault(name, []).extend(times)
    return {
        name: Times(*np.median([astuple(one) for one in times], axis=0).tolist())
        for name, times in found.items()
        if times
    }


def timeline_lines(title: str, times: dict[str, Times]) -> list[str]:
    """A table of them."""
    columns = f"{'first':>8}{'half':>8}{'last':>8}"
    table = [
        f"{title}: µs from the end of the layer before in half of its blocks",
        f"  {'':20}{'resumed':>24}  {'ended':>24}",
        f"  {'':20}{columns}  {columns}  {'work':>8}  blocks",
    ]
    for name, one in times.items():
        resumed = f"{one.first_resumed:8.2f}{one.resumed:8.2f}{one.last_resumed:8.2f}"
        ended = f"{one.first_end:8.2f}{one.end:8.2f}{one.last_end:8.2f}"
        table.append(f"  {name:20}{resumed}  {ended}  {one.work:8.2f}  {one.blocks:6.0f}")
    return table
