"""What the CPU engines have in common, whatever model they compute."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from cuq1.errors import DeviceError
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
