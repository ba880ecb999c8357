"""One sequence of tokens and the requests on it: what every engine does alike, whatever computes it."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import index
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cuq1.errors import RequestError
from cuq1.sampling.mask import Mask, MaskPath
from cuq1.sampling.params import MAX_DRAFTS, DecodeParams, check_draft, check_prompt
from cuq1.sampling.rng import fresh_seed
from cuq1.sampling.rounds import DecodeStream, FinishReason, Round
from cuq1.snapshots import TAIL, Saver, Snapshot, SnapshotStore, common

PREFILL_CHUNK = 256
GUARDED = 512  # positions ahead of an answer that are seen to at once


class Limits(Protocol):
    """What a sequence has to know of a model's config."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_position_embeddings(self) -> int:
        """The largest number of tokens that a sequence can have."""


class SequenceEngine(ABC):
    """The committed sequence, and the order in which it is filled, extended and shortened.

    A subclass holds the caches and computes. It keeps `_done`, the number of tokens whose keys and values
    the target's caches hold; the sequence's other tokens are pending, one of them while a request runs.
    """

    config: Limits
    default_params: DecodeParams
    _context: int | None = None  # less than the model's
    chunk: int = PREFILL_CHUNK  # rows of a prefill pass, where the caller names none

    def __init__(self) -> None:
        self._closed = False
        self._request = 0  # counts what supersedes a running decode
        self._whole = True  # False while a change is under way, and after one that was interrupted
        self._tokens: list[int] = []
        self._done = 0
        self._masks = MaskPath()  # of the current request
        self._snapshots: SnapshotStore | None = None
        self._guarded = 0  # positions below have been seen to, where they belong to snapshots

    @abstractmethod
    def _reset(self) -> None:
        """An empty sequence, with caches to match."""

    def _clear(self) -> None:
        """An empty sequence, though full-attention caches keep what they hold."""
        self._reset()
        if self._snapshots is not None:
            self._snapshots.lost()

    @abstractmethod
    def _restart(self, length: int) -> int | None:
        """Where computing must start again for the first `length` tokens to stand; None where the rings forbid it."""

    @abstractmethod
    def _forget(self, rows: int) -> None:
        """No longer count the last `rows` positions as held by the caches, nor logits after them."""

    @abstractmethod
    def _catch_up(self, chunk: int) -> None:
        """Run the tokens that the caches do not hold yet through the target, at most `chunk` rows at once."""

    @abstractmethod
    def _first(self, params: DecodeParams, seed: int) -> Round:
        """The first token of a request, from the logits after the sequence."""

    @abstractmethod
    def _round(self, params: DecodeParams, seed: int) -> Round:
        """Draft from the pending token on, verify, apply the rejection rule."""

    @abstractmethod
    def _computing(self) -> AbstractContextManager[object]:
        """What has to hold while anything is computed."""

    @abstractmethod
    def _release(self) -> None:
        """Give memory and devices back."""

    @abstractmethod
    def score(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Next-token logits float32 [len(ids), vocab]: row i follows ids[: i + 1]."""

    def _saver(self, first: int, second: int) -> Saver | None:
        """Copies what the caches hold, in so many bytes of two tiers; None where an engine keeps no snapshots."""
        return None

    def _granted(self, first: int) -> int:
        """As many of the bytes that are wanted for snapshots as there are."""
        return first

    @property
    @abstractmethod
    def max_drafts(self) -> int:
        """The most drafts that a round can have; 0 where the checkpoint has no draft."""

    @contextmanager
    def _change(self) -> Iterator[None]:
        """What stands inside changes caches and counts together.

        An exception in the middle, Ctrl-C above all, leaves them apart; the next change then
        starts from empty caches, and computes again what the committed sequence needs.
        """
        if not self._whole:
            tokens = self._tokens
            if self._snapshots is not None:
                self._snapshots.lost()
            self._reset()
            self._tokens = tokens
        self._whole = False
        with self._computing():
            yield
        self._whole = True

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed sequence: prompt and generated tokens."""
        return tuple(self._tokens)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.config.vocab_size

    @property
    def context(self) -> int:
        """The largest number of tokens that the sequence can have."""
        return self.config.max_position_embeddings if self._context is None else self._context

    def _take_context(self, context: int | None) -> None:
        """Sets a shorter context. Raises RequestError for one that the model does not have."""
        longest = self.config.max_position_embeddings
        if context is not None and not 1 <= context <= longest:
            raise RequestError(f"a context of {context} is outside the model's: choose one from 1 to {longest}")
        self._context = context

    def prefill(self, ids: Sequence[int], *, chunk: int | None = None) -> int:
        """Make `ids` the engine's sequence, and compute what `decode` starts from.

        The longest prefix that the caches already hold is kept, so a conversation's
        next turn passes the whole conversation. The result does not depend on what
        was kept, nor on `chunk`, the rows computed at once. Returns the number of
        tokens that were kept. Raises RequestError for an empty prompt, one at or
        past the context, or an id outside the vocabulary.
        """
        self._check_open()
        ids = check_prompt(ids, self.vocab_size, self.context, room=1)
        chunk = self.chunk if chunk is None else chunk
        if not isinstance(chunk, int) or chunk < 1:
            raise RequestError(f"the prefill chunk must be an integer of at least 1 row, not {chunk!r}")
        self._request += 1
        with self._change():
            kept = self._keep(ids)
            self._tokens = ids
            self._guard(len(ids))
            self._catch_up(chunk)
        return kept

    def _keep(self, ids: list[int]) -> int:
        """Keep or bring back what there is of the sequence `ids`; returns how many of its tokens that is."""
        kept = self._common(ids)
        restart = self._restart(kept)
        store = self._snapshots
        if store is not None:
            found = store.best(ids, kept if restart is not None else 0)
            if found is not None:
                self._bring_back(store, found)
                kept = self._common(ids)
                restart = self._restart(kept)
            store.reached(ids, kept if restart is not None else 0)
        if restart is None:
            kept = restart = 0
        self._shorten(kept, restart)
        return min(kept, self._done)

    def _bring_back(self, store: SnapshotStore, snapshot: Snapshot) -> None:
        if len(self._tokens) - store.remembered(self._tokens) > 2 * TAIL:
            self._remember("", turn=False)  # the answer that another conversation was given since
        if snapshot not in store:
            return  # the room for that was its own
        store.restore(snapshot)
        self._tokens = snapshot.tokens.tolist()
        store.saver.load(snapshot.state, snapshot.marks)

    def keep_snapshots(self, first: int, second: int = 0) -> None:
        """From now on keep snapshots in `first` bytes and, for a GPU, `second` of the host's; bounds of 0 end it.

        `prefill` then comes back to whatever was remembered of a prompt's beginning. What was remembered before is
        dropped.
        """
        self._check_open()
        self._drop_snapshots()
        first = self._granted(first)
        saver = self._saver(first, second) if first > 0 else None
        self._snapshots = None if saver is None else SnapshotStore(saver, first, second)

    def _drop_snapshots(self) -> None:
        store, self._snapshots = self._snapshots, None
        if store is not None:
            store.clear()
            store.saver.close()

    def remember(self, hint: str = "", *, turn: bool = True) -> None:
        """Keep what the sequence's continuation needs, so that a later `prefill` can come back to here.

        To be called after `prefill`, at a prompt's end or, with `turn` False, at a boundary within it. hint: which
        conversation it is, where that is known. Nothing happens without `keep_snapshots`, or where memory is too small.
        """
        self._check_open()
        if self._snapshots is not None:
            with self._change():
                self._remember(hint, turn=turn)

    def _guard(self, end: int) -> None:
        """Positions from the first that is not done up to `end` are about to be written."""
        if self._snapshots is not None:
            self._snapshots.overwrite(self._done, min(end, self.context), self._tokens)
            self._guarded = end

    def _remember(self, hint: str, *, turn: bool) -> None:
        store = self._snapshots
        assert store is not None
        tokens = self._tokens[: self._done]
        if not tokens or store.find(tokens, hint, turn=turn) is not None:
            return
        saved = store.copied(store.saver.state_bytes, store.saver.save)
        if saved is not None:
            store.add(tokens, *saved, hint=hint, turn=turn)

    @property
    def snapshot_bytes(self) -> tuple[int, int]:
        """What snapshots take of their two bounds."""
        return (0, 0) if self._snapshots is None else self._snapshots.nbytes

    def held(self, ids: Sequence[int]) -> int:
        """How many of the first tokens of `ids` a prefill that begins with them would keep, but for a few at the end.

        A prompt that is computed in steps, so that it can be left, begins with one of more tokens than these: one of
        fewer would give them up. 0 where all are computed anew.
        """
        self._check_open()
        kept = self._common(ids)
        kept = 0 if not self._whole or self._restart(kept) is None else min(kept, self._done)
        return kept if self._snapshots is None or not self._whole else self._snapshots.reach(ids, kept)

    def _common(self, ids: Sequence[int]) -> int:
        """How many tokens `ids` and the sequence begin with alike."""
        return common(np.asarray(self._tokens, np.int32), np.asarray(ids, np.int32))

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of the sequence and forget the rest.

        Raises RequestError where a sliding window's ring no longer holds what the
        kept tokens' successors would see: prefill the sequence again then.
        """
        self._check_open()
        try:
            length = index(length)
        except TypeError:
            raise RequestError(f"rewind takes a number of tokens, not {length!r}") from None
        if not 0 <= length <= len(self._tokens):
            raise RequestError(
                f"rewind to {length} is outside the sequence of {len(self._tokens)} tokens: give at most that many"
            )
        self._request += 1
        with self._change():
            restart = self._restart(length)
            if restart is not None:
                self._shorten(length, restart)
        if restart is None:
            raise RequestError(
                f"rewind to {length} of {len(self._tokens)} tokens goes back further than the sliding windows' "
                "rings hold: prefill the first tokens again instead"
            )

    def _shorten(self, length: int, restart: int) -> None:
        """Keep `length` tokens, and what the caches hold of positions before `restart`."""
        if length == len(self._tokens):
            return
        if length == 0:
            self._reset() if self._snapshots is None else self._clear()
            return
        self._tokens = self._tokens[:length]
        self._forget(self._done - restart)

    def decode(self, params: DecodeParams | None = None, *, mask: Mask | None = None) -> DecodeStream:
        """Generate from the end of the sequence; iterate over the result for the rounds.

        Without params, those of the checkpoint's generation_config.json apply. A mask says which tokens
        may come; it belongs to this request alone, and is told the tokens that were committed.
        Ends with finish_reason "stop" at a stop token, which is committed as the last
        one, and with "length" at max_tokens or at the context's end. Raises RequestError
        on an empty or full sequence, and where drafts are asked of a checkpoint without any.
        """
        self._check_open()
        params = params or self.default_params
        if not isinstance(params, DecodeParams):
            raise RequestError(f"decode takes DecodeParams, not {type(params).__name__}")
        if not self._tokens:
            raise RequestError("there is nothing to continue: prefill a prompt first")
        if len(self._tokens) >= self.context:
            raise RequestError(f"the sequence fills the context of {self.context} tokens: rewind or shorten it")
        check_draft(params.draft, self.max_drafts)
        self._request += 1
        self._masks = MaskPath(mask)
        self._guarded = 0
        seed = fresh_seed() if params.seed is None else params.seed
        return DecodeStream(seed, self._rounds(params, seed, self._request))

    def close(self) -> None:
        """Give the memory back; the engine cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self._drop_snapshots()
            self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed: open another one")

    def _check_current(self, request: int) -> None:
        if self._closed or request != self._request:
            raise RequestError("this request ended when the engine was given something else to do: decode again")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rounds(self, params: DecodeParams, seed: int, request: int) -> Generator[Round, None, FinishReason]:
        """The request: a first token from the prompt's logits, then speculative rounds."""
        self._check_current(request)
        budget = self._budget(params)
        step: Round | None = None
        while True:
            with self._change():
                if self._snapshots is not None and self._guarded < len(self._tokens) + MAX_DRAFTS + 1:
                    self._guard(len(self._tokens) + GUARDED)
                step = self._first(params, seed) if step is None else self._round(params, seed)
                tokens, stopped = _cut(step.tokens, budget, params.stop_tokens)
                self._commit(tokens)
                self._masks.commit(tokens)
            budget -= len(tokens)
            yield Round(tokens, step.drafted, step.accepted, step.from_prompt, step.logprobs[: len(tokens)])
            if stopped:
                return "stop"
            if budget == 0:
                return "length"
            self._check_current(request)

    def _budget(self, params: DecodeParams) -> int:
        """The most tokens that a request can commit now."""
        room = self.context - len(self._tokens)
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _commit(self, tokens: tuple[int, ...]) -> None:
        """Append committed tokens; the last one is pending, so rows that were verified beyond it no longer count."""
        self._tokens.extend(tokens)
        self._forget(self._done - (len(self._tokens) - 1))


def _cut(tokens: tuple[int, ...], budget: int, stop_tokens: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """The tokens up to the budget or the first stop token, and whether it was a stop token that ended them."""
    tokens = tokens[:budget]
    for i, token in enumerate(tokens):
        if token in stop_tokens:
            return tokens[: i + 1], True
    return tokens, False
