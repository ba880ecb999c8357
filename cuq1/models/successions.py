"""The graphs that a request's loops launch on all ranks, and which may follow which, for cuq1.models.order.

Between two graphs lies nothing that waits for all ranks, except

    before a request's first token    its prompt's chunks, whose sums NCCL makes
    after logits for the host         the host has those of all ranks before any of them goes on
"""

from collections.abc import Iterable, Iterator, Sequence

from cuq1.models import decode, loop
from cuq1.models.order import Graph, check
from cuq1.models.q1 import Model
from cuq1.plan.dims import ROWS
from cuq1.plan.types import Plan
from cuq1.sampling.params import MIN_AUTO_DRAFTS

_Key = tuple[str, int, int, int, bool]  # kind, rows, depths that it has, depths that run or the depth's number, short


def check_all(models: Sequence[Model], *, rows: Iterable[int] = range(1, ROWS + 1), most: int | None = None) -> int:
    """Checks all that can be launched on these ranks' models, by place; returns how many graphs that were.

    rows: of rounds, those that are looked at. most: draft depths of a round, at the most, None: all that the draft has.
    Raises as `order.check`.
    """
    model = models[0]
    slots = model.draft_config.num_draft_slots if model.draft_config is not None else 0
    keys = list(_keys(list(rows), slots if most is None else most, model))
    graphs = {_name(key): graph for key, graph in zip(keys, _graphs(models, keys), strict=True)}
    follows = [(_name(first), _name(second)) for first in keys for second in keys if _may_follow(first, second)]
    check(graphs, follows)
    return len(graphs)


def _name(key: _Key) -> str:
    kind, rows, depths, run, short = key
    if kind not in ("round", "first", "target"):
        return f"{kind} {run}"
    what = "first token" if kind == "first" else f"{kind} of {rows} rows{' in a short context' if short else ''}"
    return what if kind == "target" else f"{what}, {run} of {depths} depths"


def _keys(rows: Sequence[int], most: int, model: Model) -> Iterator[_Key]:
    lengths = [short for short in (False, True) if not short or model.short_context >= ROWS]
    for depths in range(most + 1):
        # Depth 0 always runs; the others while the stop rule wants more.
        for run in range(min(1, depths), depths + 1):
            yield "first", 1, depths, run, False
            for verified in rows:
                if verified <= most + 1:
                    yield from (("round", verified, depths, run, short) for short in lengths)
    for verified in rows:
        yield from (("target", verified, 0, 0, short) for short in lengths)
    if model.draft is not None:
        yield from (("depth", 1, 1, depth, False) for depth in range(MIN_AUTO_DRAFTS, most))
        yield from (("logits of depth", 1, 1, depth, False) for depth in range(most))
        yield "settling", 1, 0, 0, False


def _graphs(models: Sequence[Model], keys: Sequence[_Key]) -> Iterator[Graph]:
    known: dict[tuple[str, int, int, bool], tuple[Plan, ...]] = {}
    for kind, rows, depths, run, short in keys:
        numbered = run if "depth" in kind else 0
        key = (kind, rows, depths + numbered, short)
        if key not in known:
            known[key] = tuple(_plan(model, kind, rows, depths, numbered, short) for model in models)
        live = [int(depth < run or "depth" in kind) for depth in range(ROWS)]
        live[0] = rows  # as many as a round commits, at the most; one row fewer pushes, polls and clears less of each
        yield Graph(known[key], tuple(live))


def _plan(model: Model, kind: str, rows: int, depths: int, depth: int, short: bool) -> Plan:
    if kind == "round":
        return loop.round_of(model, rows, depths, short=short)
    if kind == "first":
        return loop.first_of(model, depths)
    if kind == "target":
        return decode.target_of(model, rows, short=short)
    if kind == "depth":
        return loop.depth_of(model, depth)
    return decode.depth_of(model, depth, settle_only=kind == "settling")


def _may_follow(first: _Key, second: _Key) -> bool:
    """Whether `second` can be launched after `first` with nothing between them that waits for all ranks."""
    kind, _, depths, run, _ = first
    if kind in ("target", "logits of depth") or second[0] in ("first", "logits of depth", "settling"):
        return False
    if second[0] == "depth":  # after one that ran all of its depths
        return second[3] == run + 1 if kind == "depth" else kind in ("round", "first") and second[3] == depths == run
    return True
