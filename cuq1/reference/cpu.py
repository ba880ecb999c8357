"""What the CPU engines have in common, whatever model they compute."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from cuq1.errors import DeviceError
from cuq1.reference.cache import Cache, FullCache, RingCache
from cuq1.reference.ops import F32
from cuq1.sampling.params import check_prompt
from cuq1.sequence import PREFILL_CHUNK, SequenceEngine


class Forward(Protocol):
    """A model with caches of its own."""

    def forward(self, tokens: NDArray[np.int64], start: int) -> F32:
        """Hidden states float32 [rows, hidden] of tokens at positions start, start + 1, …."""

    def logits(self, hidden: F32) -> F32:
        """Next-token logits float32 [rows, vocab]."""


class CpuEngine(SequenceEngine):
    """One request at a time in NumPy. A subclass computes, and sets `config` before it calls `_reset`."""

    def __init__(self) -> None:
        super().__init__()
        self._blas = ThreadpoolController()

    saved_counts: tuple[str, ...] = ("_done",)  # names of what a snapshot has beside the caches
    saved_arrays: tuple[str, ...] = ()

    def _saver(self, first: int, second: int) -> "EngineSaver":
        return EngineSaver(self)

    @abstractmethod
    def caches(self) -> Iterator[Cache]:
        """What the sequence's positions are kept in, in the same order every time."""

    @abstractmethod
    def _new_caches(self) -> None:
        """Empty caches for the whole context."""

    @abstractmethod
    def _forward(self, room: int) -> Forward:
        """The model with empty caches for `room` positions, apart from the sequence's."""

    def _reset(self) -> None:
        """An empty sequence. Raises DeviceError where memory does not hold the caches."""
        try:
            self._new_caches()
        except MemoryError:
            raise DeviceError(
                f"this machine's memory does not hold the caches of a context of {self.context}: "
                "lower max_position_embeddings in config.json"
            ) from None
        self._tokens = []
        self._done = 0
        self._logits: F32 | None = None  # after the last token, once that has been through the model

    @property
    def logits(self) -> F32 | None:
        """Next-token logits [vocab] after the sequence, where its last token has just been through the model."""
        return self._logits if self._done == len(self._tokens) else None

    def take_logits(self, logits: F32 | None) -> None:
        """The sequence's logits, from a snapshot that may have none."""
        self._logits = logits

    def _need_logits(self) -> None:
        """Where a snapshot had none, the last token goes through the model again."""
        if self._done == len(self._tokens) and self._logits is None:
            self._forget(1)

    def _clear(self) -> None:
        """An empty sequence in the same caches."""
        self._tokens = []
        self._done = 0
        self._logits = None
        for cache in self.caches():
            if isinstance(cache, RingCache):
                cache.end = 0

    def _computing(self) -> AbstractContextManager[object]:
        """BLAS on one thread: more gain little on products this small, and on shared cores wait for each other."""
        limit: AbstractContextManager[object] = self._blas.limit(limits=1, user_api="blas")
        return limit

    def score(self, ids: Sequence[int]) -> F32:
        """Next-token logits float32 [len(ids), vocab]: row i follows ids[: i + 1].

        Leaves the engine's sequence alone. Raises RequestError as `prefill` does, though the
        sequence may fill the context.
        """
        self._check_open()
        tokens = np.asarray(check_prompt(ids, self.vocab_size, self.context, room=0), np.int64)
        model = self._forward(len(tokens))
        out = np.empty((len(tokens), self.vocab_size), np.float32)
        with self._computing():
            for start in range(0, len(tokens), PREFILL_CHUNK):
                rows = slice(start, start + PREFILL_CHUNK)
                out[rows] = model.logits(model.forward(tokens[rows], start))
        return out


@dataclass(frozen=True, eq=False)
class HostCopy:
    """Arrays of the only tier that there is."""

    arrays: list[F32]
    first_tier: bool = True

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def spill(self) -> bool:
        """There is nowhere to go."""
        return False

    def free(self) -> None:
        """The arrays go with their last reference."""


class EngineSaver:
    """cuq1.snapshots.Saver of a CPU engine."""

    padding = 0

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine

    def close(self) -> None:
        """The copies go with their last reference."""

    def _full(self) -> list[F32]:
        return [a for cache in self._engine.caches() if isinstance(cache, FullCache) for a in (cache.k, cache.v)]

    def _rings(self) -> list[RingCache]:
        return [cache for cache in self._engine.caches() if isinstance(cache, RingCache)]

    @property
    def slack(self) -> int | None:
        """What rings hold beside a window."""
        return min((ring.slots - ring.window for ring in self._rings()), default=None)

    def written(self, marks: tuple[int, ...]) -> int:
        """As in Saver."""
        return max(marks[len(self._engine.saved_counts) :], default=0)

    @property
    def state_bytes(self) -> int:
        arrays = [a for ring in self._rings() for a in (ring.k, ring.v)]
        arrays += [getattr(self._engine, name) for name in self._engine.saved_arrays]
        return sum(a.nbytes for a in arrays) + 4 * self._engine.vocab_size

    def save(self) -> tuple[HostCopy, tuple[int, ...]]:
        engine, rings = self._engine, self._rings()
        arrays = [a[:, : min(ring.end, ring.slots)].copy() for ring in rings for a in (ring.k, ring.v)]
        arrays += [getattr(engine, name).copy() for name in engine.saved_arrays]
        if engine.logits is not None:
            arrays.append(engine.logits.copy())
        counts = (getattr(engine, name) for name in engine.saved_counts)
        return HostCopy(arrays), (*counts, *(ring.end for ring in rings))

    def load(self, state: HostCopy, marks: tuple[int, ...]) -> None:
        engine, arrays, values = self._engine, iter(state.arrays), iter(marks)
        for name in engine.saved_counts:
            setattr(engine, name, next(values))
        for ring in self._rings():
            for cache in (ring.k, ring.v):
                kept = next(arrays)
                cache[:, : kept.shape[1]] = kept
            ring.end = next(values)
        for name in engine.saved_arrays:
            setattr(engine, name, next(arrays).copy())
        engine.take_logits(next(arrays, None))

    def row_bytes(self) -> int:
        return sum(a.nbytes // a.shape[1] for a in self._full())

    def copy_rows(self, start: int, end: int) -> HostCopy:
        return HostCopy([a[:, start:end].copy() for a in self._full()])

    def put_rows(self, copy: HostCopy, first: int, start: int, end: int) -> None:
        for array, kept in zip(self._full(), copy.arrays, strict=True):
            array[:, start:end] = kept[:, start - first : end - first]
