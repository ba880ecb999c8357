"""Checks that no succession of graphs loses, or takes twice, what ranks push into each other's inboxes.

Every rank launches the same graphs in the same order, but nothing else keeps the ranks together: one may be as far
ahead as its polls let it. `check` takes the graphs as plans of all ranks and verifies, from the launches' constants and
arguments (cuq1.models.inbox_use):

    places   what is pushed lies in the inbox; no two ranks push to one place; all ranks poll, and clear, the same words
    data     a word that is polled was pushed once since it was last made NOT_READY; one that is made NOT_READY had been
             polled, if it was pushed; at a graph's end all are NOT_READY
    reuse    before a rank pushes a word again, every other rank has made it NOT_READY: between the two lies an exchange
             that each rank began after the one, and of which the other had all ranks' parts

Then no consumer looks at words too early either: it begins after the consumer of the exchange between has polled.
Words that are made NOT_READY without having been pushed, such as those of rows that are not live, count for reuse too.

Taken for granted: a launch's stores are performed in its rank's memory when it has ended; all ranks' hosts launch the
same graphs, and their kernels find the same numbers of live rows; a consumer polls all words of live rows before it
goes on, and a launch of no rows does nothing to the inbox.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuq1.models.inbox_use import Spans, Use, uses_of
from cuq1.plan.types import Plan

_NOWHERE = -1  # in place of a launch's number
_SAFE = -2  # in place of the launch that made a word NOT_READY: none has, in this graph


@dataclass(frozen=True)
class Graph:
    """What the ranks launch together: one plan of each, by place. live: rows of each draft depth, by its number."""

    plans: tuple[Plan, ...]
    live: tuple[int, ...] = ()


def check(graphs: Mapping[str, Graph], follows: Iterable[tuple[str, str]]) -> None:
    """Raises ValueError with a sentence that names graph, launch and field where an exchange could go wrong.

    follows: (name, name) of graphs of which the second may be launched after the first with nothing between them that
    waits for all ranks.
    """
    uses = {name: [uses_of(plan, graph.live) for plan in graph.plans] for name, graph in graphs.items()}
    sizes = {plan.buffer("inbox").bytes for graph in graphs.values() for plan in graph.plans if _has_inbox(plan)}
    if len(sizes) > 1:
        raise ValueError(f"inboxes have {sorted(sizes)} bytes: they must be laid out alike")
    words = _Words(uses.values(), max(sizes, default=0))
    walked = {name: _Walk(name, each, words) for name, each in uses.items()}
    after = {name: walk.open for name, walk in walked.items()}
    follows = list(follows)
    settled = False
    while not settled:  # graphs without an exchange pass on what those before them have left open
        settled = True
        for first, second in follows:
            walked[second].refuse(after[first], first)
            if not walked[second].exchanges and (after[first] & ~after[second]).any():
                after[second] = after[second] | after[first]
                settled = False


def _has_inbox(plan: Plan) -> bool:
    return any(buffer.name == "inbox" for buffer in plan.buffers)


class _Words:
    """All words of an inbox, as few runs of them that no span divides."""

    def __init__(self, uses: Iterable[Sequence[Sequence[Use]]], size: int) -> None:
        ends = {0, size}
        for graph in uses:
            for rank in graph:
                for use in rank:
                    for begin, end in (*use.pushes, *use.polls, *use.clears):
                        if not 0 <= begin < end <= size:
                            raise ValueError(f"{_named(use)} reaches bytes {begin} to {end} of an inbox of {size}")
                        ends |= {begin, end}
        self._ends = {end: number for number, end in enumerate(sorted(ends))}
        self.count = len(self._ends) - 1

    def runs(self, spans: Spans) -> NDArray[np.intp]:
        numbers = [np.arange(self._ends[begin], self._ends[end]) for begin, end in spans]
        return np.concatenate(numbers) if numbers else np.zeros(0, np.intp)


def _named(use: Use) -> str:
    return f"{use.label} of {'the draft' if use.layer < 0 else f'layer {use.layer}'}"


class _Walk:
    """One graph, launch by launch.

    open: words that it leaves without an exchange since they were made NOT_READY. exchanges: whether it has any.
    """

    def __init__(self, name: str, ranks: Sequence[Sequence[Use]], words: _Words) -> None:
        self._name, self._words, self._ranks = name, words, len(ranks)
        self._ready = np.zeros(words.count, bool)
        self._polled = np.full(words.count, _NOWHERE)  # by which launch, since it was pushed
        self._pushed = np.full(words.count, _NOWHERE)
        self._by = np.full(words.count, _NOWHERE)
        self._cleared = np.full(words.count, _SAFE)
        self._first = np.full(words.count, _NOWHERE)  # pushed by this launch before any exchange of the graph
        self._done: list[tuple[int, int]] = []  # exchanges: launches ended before its first push, and the consumer
        if len({len(rank) for rank in ranks}) > 1:
            raise ValueError(f"{name}: ranks launch {sorted(len(rank) for rank in ranks)} kernels")
        self._reference = ranks[0]
        for k, uses in enumerate(zip(*ranks, strict=True)):
            self._step(k, uses)
        left = np.flatnonzero(self._ready)
        if len(left) > 0:
            pusher = ranks[0][self._pushed[left[0]]]
            raise ValueError(f"{name}: what {_named(pusher)} pushes is not NOT_READY again at the graph's end")
        self.exchanges = bool(self._done)
        reach = max((stored for stored, _ in self._done), default=_NOWHERE)
        self.open = (self._cleared != _SAFE) & (self._cleared >= reach)

    def refuse(self, left_open: NDArray[np.bool_], earlier: str) -> None:
        """Raises ValueError where this graph pushes what `earlier` left open, before an exchange."""
        found = np.flatnonzero(left_open & (self._first != _NOWHERE))
        if len(found) > 0:
            pusher = self._reference[self._first[found[0]]]
            raise ValueError(
                f"{self._name} after {earlier}: {_named(pusher)} pushes words that another rank may not have made "
                "NOT_READY yet"
            )

    def _step(self, k: int, uses: Sequence[Use]) -> None:
        use = uses[0]
        for other in uses:
            if (other.label, other.layer, other.stored) != (use.label, use.layer, use.stored):
                raise ValueError(f"{self._name}: launch {k} is {_named(use)} on one rank, {_named(other)} on another")
            if (other.polls, other.clears) != (use.polls, use.clears):
                raise ValueError(f"{self._name}: {_named(use)} reads one rank's inbox elsewhere than another's")
        if use.polls:
            self._poll(k, use)
        if use.clears:
            self._clear(k, use)
        for rank, other in enumerate(uses):
            if other.pushes:
                self._push(k, rank, other)

    def _fail(self, use: Use, what: str) -> None:
        raise ValueError(f"{self._name}: {_named(use)} {what}")

    def _poll(self, k: int, use: Use) -> None:
        found = self._words.runs(use.polls)
        if not self._ready[found].all():
            self._fail(use, "polls words that no rank has pushed since they were made NOT_READY")
        self._polled[found] = k
        for producer in np.unique(self._pushed[found]):
            if len(np.unique(self._by[found[self._pushed[found] == producer]])) == self._ranks:
                self._done.append((self._reference[producer].stored, k))

    def _clear(self, k: int, use: Use) -> None:
        found = self._words.runs(use.clears)
        polled = self._polled[found]
        pushed = self._ready[found]
        if (polled[pushed] == _NOWHERE).any():
            self._fail(use, "makes NOT_READY what nobody has waited for")
        if ((polled != k) & (polled >= use.stored))[pushed].any():
            self._fail(use, "makes NOT_READY what may still be read")
        self._ready[found] = False
        self._polled[found] = _NOWHERE
        self._cleared[found] = k

    def _push(self, k: int, rank: int, use: Use) -> None:
        found = self._words.runs(use.pushes)
        if len(np.unique(found)) < len(found):
            self._fail(use, "pushes a word twice")
        ready = found[self._ready[found]]
        if (self._pushed[ready] == k).any():
            other = self._by[ready[self._pushed[ready] == k][0]]
            self._fail(use, f"pushes to one place from ranks {other} and {rank}")
        if len(ready) > 0:
            self._fail(use, "pushes words that were not made NOT_READY since they were last pushed")
        # Exchanges of which this rank had all parts before it pushes; of them, the one that ranks began the latest.
        reach = max((stored for stored, consumer in self._done if consumer < use.stored), default=_NOWHERE)
        cleared = self._cleared[found]
        if ((cleared != _SAFE) & (cleared >= reach)).any():
            self._fail(use, "pushes words that another rank may not have made NOT_READY yet")
        self._ready[found] = True
        self._pushed[found], self._by[found], self._polled[found] = k, rank, _NOWHERE
        if reach == _NOWHERE:
            self._first[found] = k
