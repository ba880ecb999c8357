"""What a request asks of the sampler, checked before anything is computed."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from cuq1.errors import RequestError
from cuq1.sampling.rng import SEED_LIMIT

Draft = int | Literal["auto", "off"]
MAX_DRAFTS = 7  # eight verification rows: the pending token and its drafts
MIN_AUTO_DRAFTS = 3


@dataclass(frozen=True)
class DecodeParams:
    """Parameters of one decode call.

    max_tokens: tokens to generate at the most, None up to the context's end;
    temperature 0 is greedy; top_k 0 keeps every token; seed None draws a fresh
    one; draft is "auto" (three to seven drafts by the stop rule), "off" or a
    fixed number from 1 to 7; stop_tokens end the request once committed.
    Raises RequestError, naming the value and its range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    draft: Draft = "auto"
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise RequestError(f"max_tokens must be an integer of at least 1, not {self.max_tokens!r}")
        if not _is_real(self.temperature) or not 0 <= self.temperature < math.inf:
            raise RequestError(f"temperature must be a finite number of at least 0, not {self.temperature!r}")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise RequestError(f"top_k must be an integer of at least 0 (0 for no limit), not {self.top_k!r}")
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < SEED_LIMIT):
            raise RequestError(f"seed must be an integer from 0 to 2**64 - 1, not {self.seed!r}")
        if self.draft not in ("auto", "off") and (not _is_int(self.draft) or not 1 <= int(self.draft) <= MAX_DRAFTS):
            raise RequestError(f"draft must be auto, off or a number from 1 to {MAX_DRAFTS}, not {self.draft!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
