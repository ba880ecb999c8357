"""Prompts through the GPU: chunks into the sequence's caches, and scoring with caches of its own."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda.chunks import Chunks
from cuq1.cuda.kernels.prefill import CHUNK
from cuq1.cuda.memory import Arena, copy_in
from cuq1.cuda.runtime import Runtime
from cuq1.models.steps import Chunk


class Prefill:
    """Runs tokens through the target in chunks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._chunks = Chunks(runtime.plans.chunk_steps(), runtime.addresses, runtime.ranks)

    def run(self, tokens: Sequence[int], start: int, end: int, *, settle_from: int) -> None:
        """Computes positions start .. end - 1 of `tokens`, and takes what the draft can know of them into its cache.

        settle_from: the first position whose draft row is still to be written. Where `end` is the sequence's end, the
        last row's logits follow, in row 0. end - start is at most CHUNK.
        """
        runtime = self._runtime
        known = min(end, len(tokens) - 1)  # a draft row needs the token after it
        self._chunks.issue(self._chunk(tokens, start, end, settle_from, known), self._write(tokens, start, end))
        if end == len(tokens):
            runtime.run("logits", 1, 0, runtime.plans.logits_of)
        else:
            runtime.wait()

    def _chunk(self, tokens: Sequence[int], start: int, end: int, settle_from: int, known: int) -> Chunk:
        if self._runtime.model.draft is None or known <= settle_from:
            return Chunk(start, end - start)
        return Chunk(start, end - start, settle_from, known)

    def _write(self, tokens: Sequence[int], start: int, end: int) -> int:
        """Hands a chunk's tokens, and the one after it, to the GPU; returns the stream."""
        self._runtime.wait()
        self._runtime.write("prefill.tokens", np.asarray(tokens[start : end + 1], np.int32))
        return self._runtime.stream

    def score(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 [len(tokens), vocab], from empty caches that this call allocates."""
        runtime = self._runtime
        model, plans, scratch = runtime.plans.scoring(len(tokens))
        out = np.empty((len(tokens), model.dims.vocab_total), np.float32)
        arena = Arena({buffer.name: buffer.bytes for buffer in scratch})
        try:
            arena.clear()
            for name, values in model.empty.items():
                copy_in(arena[name], values)
            addresses = runtime.addresses | arena.addresses
            chunks = Chunks(plans.chunk_steps(), addresses, runtime.ranks)
            head = Chunks(plans.logits_steps(), addresses)
            for start in range(0, len(tokens), CHUNK):
                end = min(start + CHUNK, len(tokens))
                chunks.issue(Chunk(start, end - start), self._write(tokens, start, end))
                for first in range(0, end - start, plans.scored):
                    rows = min(plans.scored, end - start - first)
                    head.issue(Chunk(first, rows), runtime.stream)
                    runtime.wait()
                    runtime.read_logits("prefill.logits", out[start + first : start + first + rows])
        finally:
            arena.close()
        return out
