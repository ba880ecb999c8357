"""Reuse of multicast buffers: every interleaving of two ranks, in a model of kernels_cu/exchange_multicast.cu.

A rank's steps are those of its stream: send(i) stores its own word, tail(i) loads the words of all ranks one by one,
in any order, again from the start while one is not ready, and then makes its own word of exchange i - 1 not ready.
"""

import pytest

RANKS, EXCHANGES = 2, 7
NOT_READY = -1


class StaleError(Exception):
    """A tail took a word of another exchange."""


class StuckError(Exception):
    """No rank can go on."""


def program(order):
    """The steps of a rank; order: of one exchange's steps, as (kind, shift of the exchange's number)."""
    steps = []
    for i in range(-1, EXCHANGES):
        steps += [(kind, i + shift) for kind, shift in order if 0 <= i + shift < EXCHANGES]
    return steps


def successors(state, steps, buffers):
    """What one step of one rank leads to: (steps done, words seen in this look, memory) of all."""
    done, seen, memory = state
    for rank in range(RANKS):
        if done[rank] == len(steps):
            continue
        kind, i = steps[done[rank]]
        place = i % buffers

        def after(rank=rank, memory=memory, words=(None,) * RANKS, finished=True):
            return (
                tuple(n + (r == rank and finished) for r, n in enumerate(done)),
                tuple(words if r == rank else one for r, one in enumerate(seen)),
                memory,
            )

        def stored(word, rank=rank, place=place):
            row = tuple(word if p == place else one for p, one in enumerate(memory[rank]))
            return tuple(row if r == rank else one for r, one in enumerate(memory))

        if kind == "send":
            yield after(memory=stored(i))
        elif kind == "arm":
            yield after(memory=stored(NOT_READY))
        elif None not in seen[rank]:  # the switch has all words: their sum, or a NaN
            if NOT_READY in seen[rank]:
                yield after(finished=False)
            elif any(word != i for word in seen[rank]):
                raise StaleError(f"exchange {i} took {seen[rank]}")
            else:
                yield after()
        else:
            for source in range(RANKS):
                if seen[rank][source] is None:
                    words = tuple(memory[source][place] if r == source else one for r, one in enumerate(seen[rank]))
                    yield after(words=words, finished=False)


def explore(order, buffers):
    """The number of states that can be reached, all of them looked at."""
    steps = program(order)
    start = ((0,) * RANKS, ((None,) * RANKS,) * RANKS, ((NOT_READY,) * buffers,) * RANKS)
    known, waiting, leads = {start}, [start], {}
    while waiting:
        state = waiting.pop()
        leads[state] = set(successors(state, steps, buffers))
        for one in leads[state] - known:
            known.add(one)
            waiting.append(one)
    # From every state the end can be reached: no word that somebody waits for has been lost.
    ended = {state for state in known if all(n == len(steps) for n in state[0])}
    comes_from = {}
    for state, following in leads.items():
        for one in following:
            comes_from.setdefault(one, []).append(state)
    can_end, waiting = set(ended), list(ended)
    while waiting:
        for one in comes_from.get(waiting.pop(), []):
            if one not in can_end:
                can_end.add(one)
                waiting.append(one)
    if can_end != known:
        raise StuckError(f"{len(known - can_end)} of {len(known)} states")
    return len(known)


AS_IT_IS = [("send", 0), ("look", 0), ("arm", -1)]


def test_three_buffers_are_enough():
    assert explore(AS_IT_IS, buffers=3) > 500


@pytest.mark.parametrize(
    ("order", "buffers", "finds"),
    [
        (AS_IT_IS, 2, StaleError),
        # made ready again before all ranks have looked
        ([("send", 0), ("look", 0), ("arm", 0)], 3, StuckError),
        # by a launch that the next send does not wait for
        ([("send", 0), ("look", 0), ("send", 1), ("arm", -1)], 3, StaleError),
        ([("send", 0), ("look", 0), ("arm", -2)], 3, StaleError),
        ([("send", 0), ("look", 0)], 3, StaleError),
    ],
)
def test_what_would_be_wrong_is_found(order, buffers, finds):
    with pytest.raises(finds):
        explore(order, buffers)
