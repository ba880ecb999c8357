"""A small model of ranks that push into each other's inboxes (kernels_cu/common/exchange.cuh), walked in all orders.

Modelled: each rank's operations, a partial order of them; every rank's words, NOT_READY or with a value; what is
pushed, under way to each rank by itself and arriving in any order, its own rank's not excepted, beside anything that
any rank does. A rank clears (makes NOT_READY) its own words.

An operation waits for others of its rank: those of launches that have ended before it can happen. Two that do not wait
for each other happen in either order, as those of launches that overlap do.

Assumed: a word arrives whole, and once; all of a rank's clears are performed when the launch that makes them has ended;
a rank's launches are issued in the program's order, each as late as it may be.

Wrong is: a push that arrives where a word has not been cleared; a poll that sees another value than the one that this
exchange pushes; a clear that meets another value than the one that was polled; operations of which none can happen
although some are left; a word that is not NOT_READY when all is done.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Wrong(Exception):  # noqa: N818  (an outcome)
    """An order in which an exchange goes wrong."""


@dataclass(frozen=True)
class Op:
    """kind: push (this rank's words, to all ranks), poll or clear (of this rank's inbox), meet (waits for all ranks).

    A poll is of one word. ended: how many of the rank's launches have, before it can happen. own: operations of its own
    launch that it follows. launch: its number; note: for messages.
    """

    kind: str
    words: tuple[Hashable, ...]
    ended: int
    own: frozenset[int]
    launch: int
    note: str


Program = tuple[Op, ...]


class Writer:
    """Writes a rank's program launch by launch, in their order."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self.launches = 0

    def launch(
        self,
        note: str,
        *,
        ended: int | None = None,
        polls: Iterable[Hashable] = (),
        clears: Iterable[Hashable] = (),
        pushes: Iterable[Hashable] = (),
    ) -> None:
        """ended: how many launches have before any of this one's operations; all before it where None.

        Words that it polls itself, it clears after that. All of its clears together: one that goes ahead of the others
        is the less likely to be late, and nobody waits for it alone.
        """
        ended = self.launches if ended is None else ended
        assert not self._ops or ended >= self._ops[-1].ended
        polled: dict[Hashable, int] = {}
        for word in polls:
            polled[word] = len(self._ops)
            self._ops.append(Op("poll", (word,), ended, frozenset(), self.launches, note))
        for kind, words in (("clear", tuple(clears)), ("push", tuple(pushes))):
            own = frozenset(polled[word] for word in words if word in polled) if kind == "clear" else frozenset()
            if words:
                self._ops.append(Op(kind, words, ended, own, self.launches, note))
        self.launches += 1

    def meet(self) -> None:
        """All ranks have done all that comes before."""
        self._ops.append(Op("meet", (), self.launches, frozenset(), self.launches, "meeting"))
        self.launches += 1

    @property
    def program(self) -> Program:
        return tuple(self._ops)


class _Step(NamedTuple):
    kind: str
    words: tuple[tuple[int, int], ...]  # with the value that it pushes, or expects
    ended: int  # bits of the operations before it
    own: int
    note: str


class _State(NamedTuple):
    done: tuple[int, ...]  # of each rank, a bit for each operation
    words: tuple[bytes, ...]  # of each rank, a value each, 0: NOT_READY
    way: frozenset[tuple[int, int, int, int]]  # (to which rank, from which one, word, value)


class _Walk:
    def __init__(self, programs: Sequence[Program]) -> None:
        self.names = sorted({word for program in programs for op in program for word in op.words}, key=repr)
        self.steps = [self._steps(program) for program in programs]
        self.all_done = tuple((1 << len(program)) - 1 for program in programs)

    def _steps(self, program: Program) -> list[_Step]:
        number = {word: i for i, word in enumerate(self.names)}
        counts: Counter[tuple[str, Hashable]] = Counter()
        polled: set[Hashable] = set()  # and not cleared since
        steps = []
        for op in program:
            words = []
            for word in op.words:
                counts[op.kind, word] += 1
                value = counts[op.kind, word]
                if op.kind == "clear":  # what it has polled, or what nobody has pushed
                    value = counts["poll", word] if word in polled else 0
                    polled.discard(word)
                elif op.kind == "poll":
                    polled.add(word)
                words.append((number[word], value))
            ended = sum(1 << i for i, other in enumerate(program) if other.launch < op.ended)
            steps.append(_Step(op.kind, tuple(words), ended, sum(1 << i for i in op.own), op.note))
        return steps

    def possible(self, done: int, rank: int) -> Iterator[tuple[int, _Step]]:
        """What the rank can do, but for what it would have to wait for."""
        steps = self.steps[rank]
        for i in range((~done & (done + 1)).bit_length() - 1, len(steps)):
            step = steps[i]
            if step.ended & ~done:
                return  # later launches wait for no fewer
            if not done >> i & 1 and not step.own & ~done:
                yield i, step

    def eager(self, state: _State) -> _State:
        """Does at once what no other order could make worse.

        A push, since what it sends may arrive at any time later; a poll that sees its word, since that stays there
        until it has been polled, and whatever arrived meanwhile would be wrong in either order; a meeting that all have
        come to.
        """
        done, words, way = list(state.done), state.words, set(state.way)
        ranks = range(len(self.steps))
        again = True
        while again:
            again = False
            for rank in ranks:
                for i, step in self.possible(done[rank], rank):
                    if step.kind == "clear":
                        continue
                    if step.kind == "poll":
                        ((word, value),) = step.words
                        seen = words[rank][word]
                        if seen == 0:
                            continue
                        if seen != value:
                            raise Wrong(f"{step.note} of rank {rank} reads what is not of its exchange")
                    elif step.kind == "push":
                        way |= {(other, rank, word, value) for other in ranks for word, value in step.words}
                    elif any(step.ended & ~done[other] for other in ranks):
                        continue
                    done[rank] |= 1 << i
                    again = True
        return _State(tuple(done), words, frozenset(way))

    def following(self, state: _State) -> Iterator[_State]:
        for rank, done in enumerate(state.done):
            for i, step in self.possible(done, rank):
                if step.kind == "clear":
                    if any(state.words[rank][word] != value for word, value in step.words):
                        raise Wrong(f"{step.note} of rank {rank} clears what it has not polled")
                    now = (*state.done[:rank], done | 1 << i, *state.done[rank + 1 :])
                    cleared = _put(state.words, rank, {word: 0 for word, _ in step.words})
                    yield self.eager(_State(now, cleared, state.way))
        for message in state.way:
            rank, _, word, value = message
            if state.words[rank][word] != 0:
                raise Wrong(f"a push of {self.names[word]} arrives before rank {rank} has cleared it")
            arrived = _put(state.words, rank, {word: value})
            yield self.eager(_State(state.done, arrived, state.way - {message}))


def _put(words: tuple[bytes, ...], rank: int, values: Mapping[int, int]) -> tuple[bytes, ...]:
    changed = bytearray(words[rank])
    for word, value in values.items():
        changed[word] = value
    return (*words[:rank], bytes(changed), *words[rank + 1 :])


def walk(programs: Sequence[Program], most: int = 1_000_000) -> int:
    """Walks all orders, and returns how many states there are; raises Wrong for the first that goes wrong.

    Every step does an operation or delivers a word, so that all orders end: no rank waits for ever.
    """
    found = _Walk(programs)
    first = found.eager(
        _State(tuple(0 for _ in programs), tuple(bytes(len(found.names)) for _ in programs), frozenset())
    )
    known, queue = {first}, deque([first])
    while queue:
        state = queue.popleft()
        ends = True
        for following in found.following(state):
            ends = False
            if following not in known:
                known.add(following)
                queue.append(following)
        if not ends:
            continue
        for rank, done in enumerate(state.done):
            if done != found.all_done[rank]:
                _, step = next(found.possible(done, rank))
                raise Wrong(f"nothing can happen any more, and {step.note} of rank {rank} is left to {step.kind}")
        if any(any(words) for words in state.words):
            raise Wrong("a word is not NOT_READY when all is done")
    assert len(known) <= most, "too many states for a test"
    return len(known)
