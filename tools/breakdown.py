"""A token's time by region, from the spans of its launches: every moment counted once, also those in which nothing ran.

With dependent launch a kernel's first blocks begin while others run. Such a moment belongs to the oldest launch
that has not ended, for whose result all others wait. A moment in which no block of any launch is on the GPU is
kernel_gap. What is counted so adds up to the whole, exactly.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.tracing import Span

GAP = "kernel_gap"
# What each kernel of a Qwen2 token does, in order. Where a launch does what several would, its parts are like launches.
REGIONS = {
    "embed": "embed",
    "layers": "",  # its parts have regions of their own
    "layers.qkv": "qkv_gemv",
    "layers.attention": "attention",
    "layers.o_proj": "o_proj",
    "layers.gate_up": "gate_up",
    "layers.down": "down",
    "qkv": "qkv_gemv",
    "attention": "attention",
    "combine": "attention_combine",
    "o_proj": "o_proj",
    "gate_up": "gate_up",
    "down": "down",
    "chain": "",  # as above
    "chain.o_proj": "o_proj",
    "chain.gate_up": "gate_up",
    "chain.down": "down",
    "chain.qkv": "qkv_gemv",
    "norm": "norms",
    "lm_head": "lm_head",
    "top_k": "sample",
    "accept": "sample",
    "control": "control",
}
# Work that has no kernel of its own, and whose time is therefore inside another region's.
FUSED = {
    "append_kv": "in attention, with bias and RoPE",
    "norms": "all but the last: in qkv_gemv and gate_up, with the sums of pieces and the residual",
    "attention_combine": "in o_proj, where layers are one launch; else in attention, where a context is short",
}


@dataclass(frozen=True)
class Share:
    """Microseconds of a token, and how many launches ended. waiting: of these, before a predecessor's results came."""

    us: float = 0.0
    waiting: float = 0.0
    launches: float = 0.0

    def __add__(self, other: "Share") -> "Share":
        return Share(self.us + other.us, self.waiting + other.waiting, self.launches + other.launches)

    def scaled(self, factor: float) -> "Share":
        return Share(self.us * factor, self.waiting * factor, self.launches * factor)


class _Busy:
    """When anything ran."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for span in sorted(spans, key=lambda span: span.begin):
            if self._ends and span.begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], span.end)
            else:
                self._begins.append(span.begin)
                self._ends.append(span.end)

    def within(self, begin: int, end: int) -> int:
        """Nanoseconds of that time."""
        first = bisect_right(self._ends, begin)
        last = bisect_left(self._begins, end)
        return sum(min(self._ends[i], end) - max(self._begins[i], begin) for i in range(first, last))


def breakdown(spans: Sequence[Span], begin: int, end: int, regions: Mapping[str, str] = REGIONS) -> dict[str, Share]:
    """The nanoseconds from `begin` to `end` by region and GAP, which add up to all of them.

    spans: of all launches that run in between, in the order in which they were launched. Raises KeyError for a label
    that has no region.
    """
    busy, now = _Busy(spans), begin
    found: dict[str, Share] = {}

    def add(region: str, ns: int, waiting: int = 0, launches: int = 0) -> None:
        found[region] = found.get(region, Share()) + Share(ns / 1e3, waiting / 1e3, launches)

    for span in spans:
        if span.end <= begin or span.begin >= end:
            continue
        until = max(now, min(span.end, end))
        running = busy.within(now, until)
        if running < until - now:
            add(GAP, until - now - running)
        waiting = busy.within(now, max(now, min(span.resumed, until)))
        add(regions[span.label], running, waiting, int(span.end <= end))
        now = until
    if now < end:
        add(GAP, end - now)
    return found


def tokens_of(spans: Sequence[Span], order: Sequence[tuple[str, int]]) -> list[tuple[int, int, list[Span]]]:
    """(begin, end, spans) of each token: from the end of a token's last launch to that of the next one's.

    order: (label, layer) of a token's launches, each once; the spans are put into it. Others are left out.
    """
    places = {key: place for place, key in enumerate(order)}
    ends = sorted(span.end for span in spans if (span.label, span.layer) == order[-1])
    known = [span for span in spans if (span.label, span.layer) in places]
    return [
        (
            begin,
            end,
            sorted(
                (span for span in known if span.end > begin and span.begin < end),
                key=lambda span: (span.end > end, places[span.label, span.layer]),
            ),
        )
        for begin, end in pairwise(ends)
    ]


def mean(parts: Sequence[Mapping[str, Share]]) -> dict[str, Share]:
    """Of several tokens, in the order of REGIONS, kernel_gap last."""
    total: dict[str, Share] = {}
    for part in parts:
        for region, share in part.items():
            total[region] = total.get(region, Share()) + share
    order = [*dict.fromkeys(region for region in REGIONS.values() if region), GAP]
    return {
        region: total[region].scaled(1 / len(parts))
        for region in sorted(total, key=lambda name: order.index(name) if name in order else -1)
    }


def total(shares: Mapping[str, Share]) -> float:
    """Microseconds of all regions together."""
    return sum(share.us for share in shares.values())


def problems(shares: Mapping[str, Share], itl_us: float, launches: int, tolerance: float = 0.02) -> list[str]:
    """What does not fit: the sum and a token's time as the decode loop's own log has it, or launches without a trace.

    launches: of a token's plan.
    """
    found = []
    whole = total(shares)
    if abs(whole / itl_us - 1) > tolerance:
        found.append(f"regions and kernel_gap are {whole:.1f} µs, and a token takes {itl_us:.1f} µs")
    traced = sum(share.launches for share in shares.values())
    if abs(traced - launches) > 1e-6:
        found.append(f"{traced:g} launches a token left their times, of {launches}")
    return found
