"""What a request asks of the sampler, checked before anything is computed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

from cuq1.errors import RequestError
from cuq1.sampling.rng import SEED_LIMIT

Draft = int | Literal["auto", "off"]
MAX_DRAFTS = 7  # eight verification rows: the pending token and its drafts
MIN_AUTO_DRAFTS = 3
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class DecodeParams:
    """Parameters of one decode call; numbers of any kind become Python's own.

    max_tokens: tokens to generate at the most, None up to the context's end;
    temperature 0 is greedy; top_k 0 keeps every token; seed None draws a fresh
    one; draft is "auto" (three to seven drafts by the stop rule), "off" or a
    fixed number from 1 to 7; stop_tokens end the request once committed; logprobs
    asks for every token's log-probability and those of the so many most likely
    ones (at most 20), as the model gives them: before temperature and filters.
    Raises RequestError, naming the value and its range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    draft: Draft = "auto"
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            self._set("max_tokens", _integer(self.max_tokens, 1), "an integer of at least 1")
        temperature = _real(self.temperature)
        self._set("temperature", temperature if _within(temperature, 0) else None, "a finite number of at least 0")
        self._set("top_k", _integer(self.top_k, 0), "an integer of at least 0 (0 for no limit)")
        top_p = _real(self.top_p)
        self._set("top_p", top_p if _within(top_p, 0, 1) and top_p else None, "above 0 and at most 1")
        if self.seed is not None:
            self._set("seed", _integer(self.seed, 0, SEED_LIMIT - 1), "an integer from 0 to 2**64 - 1")
        if not isinstance(self.draft, str) or self.draft not in ("auto", "off"):
            self._set("draft", _integer(self.draft, 1, MAX_DRAFTS), f"auto, off or a number from 1 to {MAX_DRAFTS}")
        if self.logprobs is not None:
            self._set("logprobs", _integer(self.logprobs, 0, MAX_LOGPROBS), f"an integer from 0 to {MAX_LOGPROBS}")
        self._set("stop_tokens", _token_ids(self.stop_tokens), "a sequence of token ids of at least 0")

    def _set(self, field: str, value: Any, range_: str) -> None:
        """Store a checked value; None says that what was given is outside its range."""
        if value is None:
            raise RequestError(f"{field} must be {range_}, not {getattr(self, field)!r}")
        object.__setattr__(self, field, value)


def _integer(value: object, low: int, high: float = math.inf) -> int | None:
    """An integer of any type within [low, high] as an int; None for anything else."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if not isinstance(value, bool) and low <= number <= high else None


def _real(value: Any) -> float | None:
    """A number of any type as a float; None for what is not a number, and for text."""
    if isinstance(value, bool | str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _within(value: float | None, low: float, high: float = math.inf) -> bool:
    return value is not None and math.isfinite(value) and low <= value <= high


def _token_ids(values: object) -> tuple[int, ...] | None:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        return None
    ids = [_integer(value, 0) for value in values]
    return None if None in ids else tuple(id_ for id_ in ids if id_ is not None)


def check_prompt(ids: Any, vocab_size: int, context: int, *, room: int) -> list[int]:
    """A prompt's token ids as a list of ints, with room for `room` tokens more.

    Raises RequestError for an empty prompt, one that does not fit the context, what
    is not an integer, and ids outside the vocabulary.
    """
    try:
        tokens = [index(token) for token in ids]
    except TypeError:
        raise RequestError("a prompt is a sequence of integer token ids: encode the text first") from None
    if not tokens:
        raise RequestError("the prompt is empty: give at least one token")
    if len(tokens) > context - room:
        verb = "leaves no room to generate" if len(tokens) <= context else "is smaller"
        raise RequestError(
            f"the prompt has {len(tokens)} tokens and the context of {context} {verb}: shorten the prompt"
        )
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} is outside the vocabulary of {vocab_size}: encode with this model's tokenizer"
            )
    return tokens


def check_draft(draft: Draft, max_drafts: int) -> None:
    """RequestError where a fixed number of drafts is asked of a draft model that makes fewer, or of none."""
    if isinstance(draft, int) and draft > max_drafts:
        limit = f"makes at most {max_drafts}: lower draft" if max_drafts else "has no draft model: use draft off"
        raise RequestError(f"{draft} drafts a round were asked for, but this checkpoint {limit}")
