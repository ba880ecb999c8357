"""Sequences that an engine can come back to: what its caches held at the ends of prompts, within bounds of memory.

A full-attention cache only grows, so that a sequence's rows stay where they are until another sequence takes their
place; a sliding window's ring forgets. A snapshot therefore copies at once what is forgotten (rings, the draft's cache,
hidden states: its `state`), and of the rows of full-attention caches those alone that are about to be overwritten, when
they are: a short request between two turns of a long conversation costs a few rows. Each row of a snapshot is `intact`
in the caches, or in a piece, or both; snapshots of the same sequence share pieces.

Where memory runs short, copies move from the first tier (the GPU) to the second (the host), least recently used first,
and what is worth least is dropped: a prompt that was overtaken by its conversation, then one that nobody came back to,
then whatever was used longest ago.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Made = TypeVar("Made")

TAIL = 64  # tokens at a prompt's end that its next turn may have otherwise: what opens an answer, above all
MOST = 256  # snapshots, whatever they take


class Copy(Protocol):
    """A copy of part of an engine's caches."""

    @property
    def nbytes(self) -> int: ...

    @property
    def first_tier(self) -> bool:
        """Whether it takes of the first tier's memory."""

    def spill(self) -> bool:
        """Move to the second tier; False where that has no memory."""

    def free(self) -> None:
        """Give its memory back."""


class Saver(Protocol):
    """Copies what an engine's caches hold: full-attention ones by position, and all that later positions overwrite.

    slack: how far back from the last position that was written a sequence can be rewound, None for any distance.
    padding: positions that a copy of rows may take beyond its own.
    """

    @property
    def padding(self) -> int: ...

    @property
    def slack(self) -> int | None: ...

    @property
    def state_bytes(self) -> int:
        """What `save` takes, at the most."""

    def save(self) -> tuple[Copy, Any] | None:
        """A copy of rings, the draft's cache, hidden states and logits, with the engine's counts.

        None where there is no memory.
        """

    def written(self, marks: Any) -> int:
        """One past the highest position that rings had been given when a state was saved, rejected rows included."""

    def load(self, state: Any, marks: Any) -> None:
        """Take a saved state back, what is done among it. The sequence is already the snapshot's."""

    def row_bytes(self) -> int:
        """Bytes that a position takes in the full-attention caches."""

    def copy_rows(self, start: int, end: int) -> Copy | None:
        """Positions start .. end - 1; None where there is no memory."""

    def close(self) -> None:
        """Give all memory back."""

    def put_rows(self, copy: Any, first: int, start: int, end: int) -> None:
        """Positions start .. end - 1 back into the caches, of a copy whose first position is `first`."""


@dataclass(eq=False)
class Piece:
    """Positions start .. end - 1 of a snapshot, in a copy that begins with them and may go on."""

    start: int
    end: int
    copy: Copy


@dataclass(eq=False)
class Snapshot:
    """tokens: the sequence; marks: the engine's own; turn: it is a prompt's end, where a conversation goes on.

    intact: bool [tokens], whether the caches hold a position's row. parent: the longest snapshot that this one goes on
    from; hits: requests that went on from here.
    """

    tokens: Ids
    state: Copy
    marks: Any
    hint: str
    turn: bool
    intact: NDArray[np.bool_]
    used: int
    pieces: list[Piece] = field(default_factory=list)
    hits: int = 0
    parent: "Snapshot | None" = None

    def __len__(self) -> int:
        return len(self.tokens)

    def lacking(self) -> NDArray[np.bool_]:
        """bool [tokens]: no piece has this row."""
        found = np.ones(len(self), np.bool_)
        for piece in self.pieces:
            found[piece.start : piece.end] = False
        return found


class SnapshotStore:
    """The snapshots of one engine.

    first, second: bytes of the two tiers. All is decided by what is called in which order, so that ranks which are
    called alike keep the same.
    """

    def __init__(self, saver: Saver, first: int, second: int = 0) -> None:
        self.saver = saver
        self._first, self._second = first, second
        self._snapshots: list[Snapshot] = []
        self._clock = 0
        self._pinned: Snapshot | None = None  # is about to be restored

    def __len__(self) -> int:
        return len(self._snapshots)

    def __contains__(self, snapshot: Snapshot) -> bool:
        return snapshot in self._snapshots

    @property
    def nbytes(self) -> tuple[int, int]:
        """What the two tiers hold."""
        sizes = [0, 0]
        for copy in self._copies(self._snapshots):
            sizes[0 if copy.first_tier else 1] += copy.nbytes
        return sizes[0], sizes[1]

    def best(self, ids: Sequence[int], beyond: int) -> Snapshot | None:
        """The snapshot from which the most of `ids` can be had, where that is more than `beyond` tokens."""
        wanted, found = np.asarray(ids, np.int32), None
        for snapshot in self._snapshots:
            usable = self._usable(snapshot, wanted)
            if usable > beyond:
                found, beyond = snapshot, usable
        return found

    def reach(self, ids: Sequence[int], held: int) -> int:
        """How many of `ids` can be had from a snapshot, or `held` where that is more."""
        wanted = np.asarray(ids, np.int32)
        return max([held, *(self._usable(one, wanted) for one in self._snapshots)])

    def _usable(self, snapshot: Snapshot, ids: Ids) -> int:
        same = common(snapshot.tokens, ids)
        if same == len(snapshot) or self.saver.slack is None:
            return same
        return same if self.saver.written(snapshot.marks) - same <= self.saver.slack else 0

    def reached(self, ids: Sequence[int], length: int) -> None:
        """A request goes on from the first `length` of its tokens: what was remembered of them has been of use."""
        wanted = np.asarray(ids, np.int32)
        self._clock += 1
        passed = [
            one for one in self._snapshots if self._usable(one, wanted) and len(one) <= length + (self.saver.slack or 0)
        ]
        if passed:
            last = max(passed, key=len)
            last.hits += 1
            last.used = self._clock

    def find(self, tokens: Sequence[int], hint: str, *, turn: bool) -> Snapshot | None:
        """The snapshot of exactly these tokens; it counts as used now."""
        wanted = np.asarray(tokens, np.int32)
        for snapshot in self._snapshots:
            if len(snapshot) == len(wanted) and np.array_equal(snapshot.tokens, wanted):
                self._clock += 1
                snapshot.used = self._clock
                snapshot.hint = hint or snapshot.hint
                snapshot.turn |= turn
                return snapshot
        return None

    def remembered(self, tokens: Sequence[int]) -> int:
        """The length of the longest snapshot that `tokens` begin with."""
        wanted = np.asarray(tokens, np.int32)
        lengths = [len(one) for one in self._snapshots if common(one.tokens, wanted) == len(one)]
        return max(lengths, default=0)

    def _room(self, size: int) -> bool:
        """Make room in the first tier; False where that is smaller."""
        if size > self._first:
            return False
        self._fit(size)
        return self.nbytes[0] + size <= self._first

    def copied(self, size: int, make: Callable[[], Made | None]) -> Made | None:
        """What `make` copies into about `size` bytes of the first tier; None where that is smaller.

        Free memory may be in pieces, none of them large enough: then more has to go than the bound asks for.
        """
        made = make() if self._room(size) else None
        while made is None and size <= self._first and self._relieve():
            made = make()
        return made

    def add(self, tokens: Sequence[int], state: Copy, marks: Any, *, hint: str, turn: bool) -> None:
        """The sequence that the caches hold now."""
        self._clock += 1
        ids = np.asarray(tokens, np.int32)
        new = Snapshot(ids, state, marks, hint, turn, np.ones(len(ids), np.bool_), self._clock)
        new.parent = max((one for one in self._snapshots if _goes_on(one, new)), key=len, default=None)
        for one in self._snapshots:
            if _goes_on(new, one) and (one.parent is None or len(one.parent) < len(new)):
                one.parent = new
        self._snapshots.append(new)
        self._fit(0)

    def overwrite(self, start: int, end: int, tokens: Sequence[int]) -> None:
        """The caches' positions start .. end - 1 are about to be written, for a sequence that begins with `tokens`."""
        written = np.asarray(tokens, np.int32)
        for snapshot in sorted(self._snapshots, key=len, reverse=True):  # shorter ones share the longest one's pieces
            first, last = max(start, common(snapshot.tokens, written)), min(end, len(snapshot))
            if first >= last or snapshot not in self._snapshots:
                continue
            need = snapshot.intact & snapshot.lacking()
            for low, high in _stretches(need[first:last], first):
                if not self._save(snapshot, low, high):
                    break
            snapshot.intact[first:last] = False

    def _save(self, snapshot: Snapshot, start: int, end: int) -> bool:
        """Copy rows that caches alone have; False where there is no room, and snapshots that need them are dropped."""
        most = max(1, self._first // (4 * max(1, self.saver.row_bytes())))  # so that older copies can spill meanwhile
        for part in range(start, end, most):
            if not self._save_part(snapshot, part, min(part + most, end)):
                shared = [(one, common(one.tokens, snapshot.tokens)) for one in self._snapshots]
                self._drop([one for one, same in shared if (one.intact & one.lacking())[part : min(end, same)].any()])
                return False
        return True

    def _save_part(self, snapshot: Snapshot, start: int, end: int) -> bool:
        size = (end - start + self.saver.padding) * self.saver.row_bytes()
        copy = self.copied(size, lambda: self.saver.copy_rows(start, end))
        if copy is None:
            return False
        taken = False
        for one in self._snapshots:
            # where another sequence's row is this one's, all rows before it are
            same = min(end, common(one.tokens, snapshot.tokens))
            if start < same and one.lacking()[start:same].any():
                one.pieces.append(Piece(start, same, copy))
                taken = True
        if not taken:  # what it was for had to make room
            copy.free()
        return True

    def restore(self, snapshot: Snapshot) -> None:
        """Bring a snapshot's rows back into the caches, in place of what they hold."""
        self._pinned = snapshot
        gone = _stretches(~snapshot.intact, 0)
        for start, end in gone:
            self.overwrite(start, end, snapshot.tokens.tolist())
        self._pinned = None
        for start, end in gone:
            at = start
            while at < end:
                piece = next(one for one in snapshot.pieces if one.start <= at < one.end)
                stop = min(piece.end, end)
                self.saver.put_rows(piece.copy, piece.start, at, stop)
                at = stop
        for other in self._snapshots:
            same = common(other.tokens, snapshot.tokens)
            other.intact[:same] = True
            other.intact[same : len(snapshot)] = False

    def lost(self) -> None:
        """The caches hold nothing any more: what is in them alone is gone."""
        self._drop([one for one in self._snapshots if one.lacking().any()])
        for snapshot in self._snapshots:
            snapshot.intact[:] = False

    def clear(self) -> None:
        """Drop everything."""
        self._drop(self._snapshots)

    def _fit(self, more: int) -> None:
        """Spill and drop until the bounds hold, with `more` bytes to come in the first tier."""
        while victims := [one for one in self._snapshots if one is not self._pinned]:
            first, second = self.nbytes
            if first + more <= self._first and len(self._snapshots) <= MOST:
                return
            if first + more <= self._first + self._second - second and self._spill(self._second - second):
                continue
            self._drop([min(victims, key=self._worth)])

    def _relieve(self) -> bool:
        """Make something leave the first tier, by spilling where it can be; False where nothing is left there."""
        if self._spill(self._second - self.nbytes[1]):
            return True
        there = [one for one in self._snapshots if any(copy.first_tier for copy in self._copies([one]))]
        victims = [one for one in there if one is not self._pinned]
        if victims:
            self._drop([min(victims, key=self._worth)])
        return bool(victims)

    def _spill(self, room: int) -> bool:
        """Move the copies of the least recently used snapshot that has any in the first tier; False where none can."""
        for snapshot in sorted(self._snapshots, key=lambda one: one.used):
            for copy in self._copies([snapshot]):
                if copy.first_tier:
                    return copy.nbytes <= room and copy.spill()
        return False

    def _worth(self, snapshot: Snapshot) -> tuple[int, int]:
        """What to drop first is worth least."""
        turns = [one for one in self._snapshots if one.turn]
        after = [one for one in turns if one.parent is snapshot]
        if len(after) == 1 and any(one.parent is after[0] for one in turns) and (snapshot.turn or not snapshot.hits):
            return 0, snapshot.used  # the conversation has gone on from where it went on from here
        if after:
            return 3, snapshot.used
        if not snapshot.turn:
            return 1, snapshot.used  # an answer's end: as much is had from its prompt's, but for the answer
        before = snapshot.parent
        while before is not None and not before.turn:
            before = before.parent
        if snapshot.hits or (before is not None and before.hits):
            return 4, snapshot.used
        return 2 if snapshot.hint else 1, snapshot.used

    def _drop(self, snapshots: Iterable[Snapshot]) -> None:
        gone = list(snapshots)
        kept = [one for one in self._snapshots if one not in gone]
        for one in kept:
            while one.parent in gone:
                one.hits += one.parent.hits if one.parent.turn else 0
                one.parent = one.parent.parent
        needed = set(map(id, self._copies(kept)))
        for copy in self._copies(gone):
            if id(copy) not in needed:
                copy.free()
        self._snapshots = kept

    def _copies(self, snapshots: Iterable[Snapshot]) -> list[Copy]:
        found = {id(copy): copy for one in snapshots for copy in (one.state, *(piece.copy for piece in one.pieces))}
        return list(found.values())


def common(ours: Ids, theirs: Ids) -> int:
    """How many tokens two sequences begin with alike."""
    count = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:count] != theirs[:count])
    return int(different[0]) if len(different) else count


def _goes_on(first: Snapshot, second: Snapshot) -> bool:
    """Whether the second is a longer sequence that begins with the first, its tail apart."""
    same = common(first.tokens, second.tokens)
    return len(second) > len(first) and same >= len(first) - TAIL and same > len(first) // 2


def _stretches(where: NDArray[np.bool_], offset: int) -> list[tuple[int, int]]:
    """(start, end) of each stretch that is true; places are counted from `offset`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], where, [False])).astype(np.int8))) + offset
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
