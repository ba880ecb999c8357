"""What a decode call hands back, round by round."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from cuq1.sampling.logprobs import TokenLogprob

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Round:
    """The tokens that one step committed; iterating over it gives their ids.

    drafted: drafts verified in this round; accepted: how many of them the
    rejection rule accepted. The request's first token comes from the prompt's
    own logits: it is a round with nothing drafted and `from_prompt` set. A stop
    token or the token budget can cut `tokens` short of accepted + 1. `logprobs`
    has an entry a token where the request asked for them, and is empty elsewhere.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    from_prompt: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)


class DecodeStream:
    """An iterator over the rounds of one request.

    seed: the request's seed, also where the caller named none; finish_reason:
    None while rounds are to come, then "stop" or "length". Leaving the loop
    early is fine: what was yielded is committed, and nothing else. An engine
    that computes ahead goes on until the stream is closed or deleted, or the
    engine is given something else to do.
    """

    def __init__(self, seed: int, rounds: Generator[Round, None, FinishReason]) -> None:
        self.seed = seed
        self.finish_reason: FinishReason | None = None
        self._rounds = rounds

    def close(self) -> None:
        """Cancel the request: the rounds that were yielded stay, and no other comes."""
        self._rounds.close()

    def __iter__(self) -> "DecodeStream":
        return self

    def __next__(self) -> Round:
        try:
            return next(self._rounds)
        except StopIteration as end:
            if self.finish_reason is None:
                self.finish_reason = end.value
            raise StopIteration from None
