"""Pieces of memory for snapshots: none overlaps another, and what is given back is whole again."""

import random

import numpy as np
import pytest

from cuq1.cuda.heap import ALIGNMENT, Heap
from cuq1.cuda.snapshot import _runs


def play(heap, rng, steps=300):
    owner = np.zeros(heap.size, np.int32)
    taken = {}
    for number in range(1, steps):
        if taken and rng.random() < 0.45:
            start = rng.choice(list(taken))
            size = taken.pop(start)
            assert (owner[start : start + size] == owner[start]).all()
            owner[start : start + size] = 0
            heap.give(start)
            continue
        size = rng.choice([1, ALIGNMENT, rng.randrange(1, 6000)])
        start = heap.take(size)
        if start is None:
            whole = -(-size // ALIGNMENT) * ALIGNMENT
            free = "".join("x" if held else " " for held in owner[::ALIGNMENT])
            assert max(map(len, free.split("x"))) * ALIGNMENT < whole
            continue
        assert start % ALIGNMENT == 0
        assert not owner[start : start + size].any()
        owner[start : start + size] = number
        taken[start] = size
    for start in taken:
        heap.give(start)


def test_random_pieces():
    for _ in range(20):
        rng = random.Random()
        heap = Heap(20_000 + rng.randrange(20_000))
        play(heap, rng)
        assert heap.take(heap.size) == 0
        with pytest.raises(KeyError):
            heap.give(ALIGNMENT)


def test_a_heap_that_forgets_what_is_taken_is_noticed(monkeypatch):
    take = Heap.take

    def forgetful(self, size):
        gaps = list(self._gaps)
        start = take(self, size)
        self._gaps = gaps
        return start

    monkeypatch.setattr(Heap, "take", forgetful)
    with pytest.raises(AssertionError):
        play(Heap(30_000), random.Random(1))


def test_nothing_is_nothing():
    assert Heap(0).take(1) is None
    assert Heap(ALIGNMENT - 1).take(1) is None


def test_runs_of_pages():
    assert _runs(np.array([3, 4, 5, 9, 8, 7, 8])) == [(0, 3, 3), (3, 9, 1), (4, 8, 1), (5, 7, 2)]
    assert _runs(np.array([2])) == [(0, 2, 1)]
