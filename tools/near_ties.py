"""Greedy output against the reference: where the two choose differently, and whether rounding explains it.

Both choices are closer in the reference's logits than the engine's own logits are to them in that row; that alone says
little, since an engine with wrong logits has large errors. So the rows' errors are bounded as well, all of them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cuq1.sampling import DecodeParams, DecodeStream

F32 = NDArray[np.float32]


class Decoding(Protocol):
    """What is asked of an engine. verified_rows: logits of tokens at positions start, … by the decode kernels."""

    def prefill(self, ids: Sequence[int]) -> int: ...
    def decode(self, params: DecodeParams) -> DecodeStream: ...
    def score(self, ids: Sequence[int]) -> F32: ...
    def rewind(self, length: int) -> None: ...
    def verified_rows(self, rows: Sequence[int], start: int) -> F32: ...


@dataclass(frozen=True)
class Place:
    """A token that is not the reference's choice: both tokens, how far the reference's logits are apart, the error of
    the engine's logits, and what the engine chooses where the row is computed once more."""

    prompt: int
    position: int
    gap: float
    error: float
    reference: int
    chosen: int
    again: int

    @property
    def explained(self) -> bool:
        return self.gap <= 2 * self.error


@dataclass
class Comparison:
    """Of all prompts. errors: ||engine - reference|| / ||reference|| of each row that a token was chosen from."""

    prompts: int = 0
    tokens: int = 0
    places: list[Place] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def add(self, other: "Comparison") -> None:
        """Takes in other prompts, which are numbered behind these."""
        self.places += [replace(place, prompt=place.prompt + self.prompts) for place in other.places]
        self.prompts += other.prompts
        self.tokens += other.tokens
        self.errors += other.errors

    def failed(self, tolerance: float | None = None) -> int:
        """Places that rounding does not explain, and rows beyond the tolerance."""
        beyond = 0 if tolerance is None else sum(not error <= tolerance for error in self.errors)
        return beyond + sum(not place.explained for place in self.places)

    def report(self, tolerance: float | None = None) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "equal": self.prompts - len({place.prompt for place in self.places}),
            "places": [asdict(place) for place in self.places],
            "row_error_median": float(np.median(self.errors)),
            "row_error_max": float(np.max(self.errors)),
            "tolerance": tolerance,
            "failed": self.failed(tolerance),
        }


def deciding_rows(engine: Decoding, ids: Sequence[int], sequence: Sequence[int], rows: int = 8) -> F32:
    """Logits [len(sequence) - len(ids), vocab] from which a request with the prompt `ids` chose its tokens: the first
    by the kernels of prompts, the rest by those of decoding, `rows` at once."""
    first = engine.score(ids)[-1:]
    engine.rewind(0)
    engine.prefill(ids)
    rest = sequence[len(ids) : -1]
    passes = [engine.verified_rows(rest[i : i + rows], len(ids) + i) for i in range(0, len(rest), rows)]
    return np.concatenate([first, *passes])


def decoded(engine: Decoding, prompts: Sequence[Sequence[int]], params: DecodeParams) -> list[list[int]]:
    """Each prompt with its answer."""
    found = []
    for ids in prompts:
        engine.rewind(0)
        engine.prefill(ids)
        found.append([*ids, *(token for step in engine.decode(params) for token in step)])
    return found


def compared(
    engine: Decoding,
    prompts: Sequence[Sequence[int]],
    sequences: Sequence[Sequence[int]],
    expected: Sequence[F32],
) -> Comparison:
    """sequences: from `decoded`; expected: the reference's scores of each one's tokens but the last."""
    found = Comparison(len(prompts))
    for number, (ids, sequence, scores) in enumerate(zip(prompts, sequences, expected, strict=True)):
        ours, reference = deciding_rows(engine, ids, sequence), scores[len(ids) - 1 :]
        found.tokens += len(reference)
        found.errors += (np.linalg.norm(ours - reference, axis=1) / np.linalg.norm(reference, axis=1)).tolist()
        for i, (row, own) in enumerate(zip(reference, ours, strict=True)):
            best, chosen = int(row.argmax()), sequence[len(ids) + i]
            if best != chosen:
                gap, error = float(row[best] - row[chosen]), float(np.abs(own - row).max())
                found.places.append(Place(number, len(ids) + i, gap, error, best, chosen, int(own.argmax())))
    return found
