"""What the launches of a plan do to the ranks' inboxes, and when, read from their kernels' constants and arguments.

The words that a launch pushes, polls or makes NOT_READY are spans of bytes of the inbox, which is laid out alike on all
ranks: what one rank pushes lies at the same place in every rank's.
"""

from collections.abc import Callable, Iterable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from itertools import product

from cuq1.cuda import abi
from cuq1.plan.dims import MAX_TOP_K, ROWS
from cuq1.plan.types import Launch, Plan, Ref

Span = tuple[int, int]  # first byte, and the one after the last
Spans = tuple[Span, ...]

_STATUSES = abi.constant("STATUS_READ") + 1  # words of a rank's status that are told


@dataclass(frozen=True)
class Use:
    """One launch's part in the exchange, for so many live rows.

    rows: 0 where the launch is skipped. stored: how many of the graph's launches have ended, beside all of earlier
    graphs', when it may store its first word to an inbox.
    """

    label: str
    layer: int
    rows: int
    stored: int
    pushes: Spans = ()
    polls: Spans = ()
    clears: Spans = ()


Parts = tuple[Spans, Spans, Spans]  # pushes, polls, clears


def uses_of(plan: Plan, live: Sequence[int] = ()) -> list[Use]:
    """Every launch's part. live: rows of each draft depth of the plan, by its number.

    Raises ValueError for an address in an inbox of which it is not known what the kernel does there.
    """
    times = _times(plan.launches)
    found = []
    for number, (launch, stored) in enumerate(zip(plan.launches, times, strict=True)):
        described = _DESCRIBED.get(launch.kernel.args)
        known = described[0] if described is not None else ()
        for name, ref in launch.refs():
            if ref.buffer == "inbox" and name not in known:
                raise ValueError(f"launch {number} ({launch.label}): {name} lies in the inbox, where it has no part")
        rows = _rows(launch, live)
        parts: Parts = ((), (), ())
        if described is not None and any(ref.buffer == "inbox" for _, ref in launch.refs()):
            parts = described[1](launch, rows)
        found.append(Use(launch.label, launch.layer, rows, stored, *parts))
    return found


def _rows(launch: Launch, live: Sequence[int]) -> int:
    rows, counted = launch.args.get("rows", ROWS), launch.args["live"]
    assert isinstance(rows, int)
    if not isinstance(counted, Ref):
        return rows
    return min(rows, live[(counted.offset - abi.State.depth_rows.offset) // 4])


def _times(launches: Sequence[Launch]) -> list[int]:
    """Use.stored of each launch; see common/pdl.cuh and common/flagged.cuh.

    A launch stores behind its wait for its predecessor's end, or behind some of what that one stored.
    """
    times: list[int] = []
    for k, launch in enumerate(launches):
        times.append(times[-1] if times and _polls_predecessor(launch) else k)
    return times


def _polls_predecessor(launch: Launch) -> bool:
    """Whether it goes on with its predecessor's results before that one has ended.

    Said also of samplers, which may.
    """
    entry = launch.kernel.entry
    if entry in ("attn_tail", "down"):
        return launch.args["polled"] != 0
    return entry in ("mlp_tail", "accept", "draft_sample") and _ranks(launch) > 1


def _size(launch: Launch, name: str) -> int:
    value = dict(launch.kernel.defines)[name]
    assert isinstance(value, int)
    return value


def _ranks(launch: Launch) -> int:
    found = dict(launch.kernel.defines).get("RANKS", 1)
    assert isinstance(found, int)
    return found


def _span(launch: Launch, name: str, parts: Iterable[Span]) -> Spans:
    """Runs of 4-byte words (first, count) from where an argument points, neighbours joined; none where it is null."""
    ref = launch.args[name]
    if not isinstance(ref, Ref):
        return ()
    if ref.buffer != "inbox":
        raise ValueError(f"{launch.label} of layer {launch.layer}: {name} lies in {ref.buffer}, not in the inbox")
    found: list[Span] = []
    for first, count in parts:
        begin, end = ref.offset + first * 4, ref.offset + (first + count) * 4
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        if count > 0:
            found.append((begin, end))
    return tuple(found)


def _needs_peers(launch: Launch) -> None:
    if launch.args["peers"] == 0:
        raise ValueError(f"{launch.label} of layer {launch.layer} writes into the inbox of its own rank alone")


def _o_proj(launch: Launch, rows: int) -> Parts:
    _needs_peers(launch)
    pushes = _span(launch, "out", [(0, rows * _size(launch, "HIDDEN"))])
    if launch.args["fold"] != 0:
        for name in ("router_attended", "router_residual"):
            pushes += _span(launch, name, [(0, rows * _size(launch, "EXPERTS"))])
    return pushes, (), ()


def _attn_tail(launch: Launch, rows: int) -> Parts:
    hidden, experts, ranks = _size(launch, "HIDDEN"), _size(launch, "EXPERTS"), range(_ranks(launch))
    polls = _span(launch, "o", [(r * ROWS * hidden, rows * hidden) for r in ranks])
    for name in ("router_attended", "router_residual"):
        polls += _span(launch, name, [(r * ROWS * experts, rows * experts) for r in ranks])
    return (), polls, ()


def _down(launch: Launch, rows: int) -> Parts:
    _needs_peers(launch)
    pieces = launch.args["unready_pieces"]
    assert isinstance(pieces, int)
    clears = _span(launch, "unready", [(0, pieces * 4)]) if rows > 0 else ()
    return _span(launch, "out", [(0, rows * _size(launch, "HIDDEN"))]), (), clears


def _mlp_tail(launch: Launch, rows: int) -> Parts:
    hidden = _size(launch, "HIDDEN")
    read = _span(launch, "y", [(r * ROWS * hidden, rows * hidden) for r in range(_ranks(launch))])
    return (), read, read


def _eh_proj(launch: Launch, rows: int) -> Parts:
    _needs_peers(launch)
    hidden, own, first = _size(launch, "HIDDEN"), _size(launch, "EH_ROWS"), launch.args["first_row"]
    assert isinstance(first, int)
    places = product(range(_size(launch, "EH_SPLITS")), range(rows))
    return _span(launch, "out", [((piece * ROWS + row) * hidden + first, own) for piece, row in places]), (), ()


def _qkv(launch: Launch, rows: int) -> Parts:
    if launch.args["polled"] == 0:
        raise ValueError(f"{launch.label} of layer {launch.layer} reads the inbox without polling")
    hidden, exchanged = _size(launch, "HIDDEN"), _size(launch, "EH_ROWS") * _ranks(launch)
    places = product(range(_size(launch, "ENTRY_PIECES")), range(rows))
    return (), _span(launch, "pieces", [((piece * ROWS + row) * hidden, exchanged) for piece, row in places]), ()


def _top_k(launch: Launch, rows: int) -> Parts:
    _needs_peers(launch)
    lists = [(row * _ranks(launch) * MAX_TOP_K, MAX_TOP_K) for row in range(rows)]
    pushes = _span(launch, "values", lists) + _span(launch, "ids", lists)
    if launch.args["mirror"] != 0 and rows > 0:
        pushes += _span(launch, "status", [(0, _STATUSES)])
    return pushes, (), ()


def _sampler(launch: Launch, rows: int) -> Parts:
    ranks = _ranks(launch)
    lists = [(0, rows * ranks * MAX_TOP_K)]
    read = _span(launch, "values", lists) + _span(launch, "ids", lists)
    if launch.args.get("loop", 0) != 0 and rows > 0:
        read += _span(launch, "statuses", [(rank * abi.STATUS_WORDS, _STATUSES) for rank in range(ranks)])
    return (), read, read


def _rearm(launch: Launch, rows: int) -> Parts:
    pieces = launch.args["pieces"]
    assert isinstance(pieces, int)
    return (), (), _span(launch, "target", [(0, pieces * 4)])


# What a kernel has in the inbox, and what it does there.
_DESCRIBED: dict[type[Structure], tuple[tuple[str, ...], Callable[[Launch, int], Parts]]] = {
    abi.OProjArgs: (("out", "router_attended", "router_residual"), _o_proj),
    abi.AttnTailArgs: (("o", "router_attended", "router_residual"), _attn_tail),
    abi.DownArgs: (("out", "unready"), _down),
    abi.MlpTailArgs: (("y",), _mlp_tail),
    abi.EhProjArgs: (("out",), _eh_proj),
    abi.QkvArgs: (("pieces",), _qkv),
    abi.TopKArgs: (("values", "ids", "status"), _top_k),
    abi.AcceptArgs: (("values", "ids", "statuses"), _sampler),
    abi.DraftSampleArgs: (("values", "ids"), _sampler),
    abi.RearmArgs: (("target",), _rearm),
}
