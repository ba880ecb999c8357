"""One engine on several ranks: rank 0 leads, and the others do with theirs what it does with its own.

Each call goes to all ranks before any of them computes, so that caches and counts stay equal; with it goes what rank
0's engine counts, and a rank that counts otherwise ends the run. A request's rounds are announced one by one, unless
the devices run them by themselves (`Ranked.unattended`): then every rank reads its own device's log, until that ends or
has paused, and waits for rank 0 there. What rank 0 does not read of a request is taken back on all ranks.

Any error but a RequestError, which all ranks have alike and before they compute, ends the run.
"""

import atexit
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import index
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cuq1.errors import LaunchError, RequestError
from cuq1.parallel.commands import Channel, Command
from cuq1.parallel.masks import HeardMask, ToldMask
from cuq1.parallel.rendezvous import Rendezvous
from cuq1.sampling.mask import Mask
from cuq1.sampling.params import DecodeParams, check_prompt
from cuq1.sampling.rounds import DecodeStream, FinishReason, Round


class Ranked(Protocol):
    """An engine that computes on this rank, in step with the other ranks' (cuq1.engine.Engine, and what it needs)."""

    @property
    def default_params(self) -> DecodeParams: ...

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def counts(self) -> tuple[int, ...]:
        """What decides how the next call is computed; equal on all ranks."""

    @property
    def unattended(self) -> bool:
        """Whether the request's next round comes without the host."""

    def prefill(self, ids: Sequence[int], *, chunk: int | None = ...) -> int: ...

    def held(self, ids: Sequence[int]) -> int: ...

    def keep_snapshots(self, first: int, second: int = 0) -> None: ...

    def remember(self, hint: str = "", *, turn: bool = True) -> None: ...

    def decode(self, params: DecodeParams | None = None, *, mask: Mask | None = None) -> DecodeStream: ...

    def snapshot_room(self, first: int) -> int:
        """As many of the bytes that are wanted for snapshots as this rank has."""

    def score(self, ids: Sequence[int]) -> NDArray[np.float32]: ...

    def verified_rows(self, rows: Sequence[int], start: int) -> NDArray[np.float32]: ...

    def rewind(self, length: int) -> None: ...

    def take_back(self, length: int) -> None:
        """After a request was ended: forget what it committed beyond the first `length` tokens."""

    def abandon(self, reason: str) -> None:
        """Ask nothing of the device any more: the process is about to end."""

    def close(self) -> None: ...


class Leader:
    """Rank 0's engine of several ranks: an Engine, whose every call the others follow.

    owned: the rendezvous is left when the engine is closed.
    """

    def __init__(self, engine: Ranked, meeting: Rendezvous, *, owned: bool = False) -> None:
        self._engine, self._channel, self._owned = engine, Channel(meeting), owned
        self._request = 0  # counts what supersedes a stream
        self._running: DecodeStream | None = None
        self._failed: str | None = None
        self._closed = False
        atexit.register(self._close_at_exit)

    @property
    def default_params(self) -> DecodeParams:
        """What the checkpoint's generation_config.json asks for, stop tokens included."""
        return self._engine.default_params

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed sequence: prompt and generated tokens."""
        return self._engine.tokens

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._engine.vocab_size

    @property
    def context(self) -> int:
        """The largest number of tokens that the sequence can have."""
        return self._engine.context

    def prefill(self, ids: Sequence[int], *, chunk: int | None = None) -> int:
        """As Engine.prefill."""
        self._check_open()
        ids = check_prompt(ids, self.vocab_size, self.context, room=1)
        chunk = None if chunk is None else _integer(chunk, "the prefill chunk")
        with self._on_all("prefill", ids=ids, chunk=chunk):
            return self._engine.prefill(ids, chunk=chunk)

    def held(self, ids: Sequence[int]) -> int:
        """As Engine.held: all ranks hold the same."""
        self._check_open()
        return self._engine.held(ids)

    def keep_snapshots(self, first: int, second: int = 0) -> None:
        """As Engine.keep_snapshots: `first` bytes on each rank, as far as this one has them, and `second` in all."""
        self._check_open()
        first, second = _integer(first, "the bytes for snapshots"), _integer(second, "the bytes for snapshots")
        first, second = self._engine.snapshot_room(first), second // self._channel.meeting.world
        with self._on_all("keep_snapshots", first=first, second=second):
            self._engine.keep_snapshots(first, second)

    def remember(self, hint: str = "", *, turn: bool = True) -> None:
        """As Engine.remember."""
        self._check_open()
        with self._on_all("remember", hint=hint, turn=turn):
            self._engine.remember(hint, turn=turn)

    def score(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """As Engine.score."""
        self._check_open()
        ids = check_prompt(ids, self.vocab_size, self.context, room=0)
        with self._on_all("score", ids=ids):
            return self._engine.score(ids)

    def verified_rows(self, rows: Sequence[int], start: int) -> NDArray[np.float32]:
        """For checks: logits float32 [rows, vocab] of at most eight tokens, by the decode kernels."""
        self._check_open()
        with self._on_all("verified_rows", rows=list(rows), start=start):
            return self._engine.verified_rows(rows, start)

    def rewind(self, length: int) -> None:
        """As Engine.rewind."""
        self._check_open()
        length = _integer(length, "the length to rewind to")
        with self._on_all("rewind", length=length):
            self._engine.rewind(length)

    def decode(self, params: DecodeParams | None = None, *, mask: Mask | None = None) -> DecodeStream:
        """As Engine.decode. Nothing is computed, on any rank, before the first round is asked for."""
        self._check_open()
        with self._fatal():
            self._end_running()
        told = None if mask is None else ToldMask(mask, self._channel)
        own = self._engine.decode(params, mask=told)  # says what is wrong with them
        self._request += 1
        params = replace(params or self.default_params, seed=own.seed)
        return DecodeStream(own.seed, self._rounds(own, params, self._request, masked=mask is not None))

    def close(self) -> None:
        """Give memory and devices back, and let the other ranks go."""
        if self._closed:
            return
        atexit.unregister(self._close_at_exit)
        try:
            if self._failed is None:
                with self._on_all("close"):
                    self._closed = True
                    self._engine.close()
        finally:
            self._closed = True
            if self._owned:
                self._channel.meeting.close()

    def _close_at_exit(self) -> None:
        """A program that ends without closing its engine is no failure, and one that has failed has said so."""
        with suppress(Exception):
            self.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rounds(
        self, own: DecodeStream, params: DecodeParams, request: int, *, masked: bool
    ) -> Generator[Round, None, FinishReason]:
        self._check_current(request)
        with self._fatal():
            self._send("decode", params=vars(params), masked=masked)
        self._running = own
        try:
            while True:
                with self._fatal():
                    step = next(own, None)
                if step is None:
                    self._running = None
                    assert own.finish_reason is not None
                    return own.finish_reason
                yield step
                self._check_current(request)
                if not self._engine.unattended:
                    with self._fatal():
                        self._send("step")
        finally:
            if self._running is own and self._failed is None:
                with self._fatal():
                    self._end_running()

    def _end_running(self) -> None:
        """Ends the request that is under way, on all ranks after the same round."""
        own, self._running = self._running, None
        if own is not None:
            own.close()
            self._send("end", length=len(self._engine.tokens))

    @contextmanager
    def _on_all(self, name: str, **values: Any) -> Iterator[None]:
        with self._fatal():
            self._request += 1
            self._end_running()
            self._send(name, **values)
            yield

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """What is interrupted or fails here has left ranks apart."""
        try:
            yield
        except RequestError:
            raise
        except BaseException as error:
            self._failed = str(error) or type(error).__name__
            self._engine.abandon(f"the ranks' engine has ended ({self._failed}): start the program again")
            raise

    def _send(self, name: str, **values: Any) -> None:
        self._channel.send(name, counts=self._engine.counts, **values)

    def _check_open(self) -> None:
        if self._failed is not None:
            raise RequestError(f"the ranks' engine has ended ({self._failed}): start the program again")
        if self._closed:
            raise RequestError("the engine is closed: open another one")

    def _check_current(self, request: int) -> None:
        self._check_open()
        if request != self._request:
            raise RequestError("this request ended when the engine was given something else to do: decode again")


def follow(engine: Ranked, meeting: Rendezvous) -> None:
    """On the other ranks: do what rank 0 does, until it closes its engine.

    Raises LaunchError where another rank failed or counts otherwise, and whatever this rank's engine raises.
    """
    channel = Channel(meeting)
    try:
        while True:
            command = channel.receive()
            _check_counts(engine, meeting.rank, command)
            if command["command"] == "close":
                break
            with suppress(RequestError):  # rank 0 has the same one
                _obey(engine, channel, command)
    except BaseException as error:
        engine.abandon(str(error) or type(error).__name__)
        raise
    engine.close()


def _obey(engine: Ranked, channel: Channel, command: Command) -> None:
    match command["command"]:
        case "prefill":
            engine.prefill(command["ids"], chunk=command["chunk"])
        case "keep_snapshots":
            engine.keep_snapshots(command["first"], command["second"])
        case "remember":
            engine.remember(command["hint"], turn=command["turn"])
        case "score":
            engine.score(command["ids"])
        case "verified_rows":
            engine.verified_rows(command["rows"], command["start"])
        case "rewind":
            engine.rewind(command["length"])
        case "decode":
            params = command["params"]
            mask = HeardMask(channel, engine.vocab_size) if command["masked"] else None
            _mirror(engine, channel, DecodeParams(**{**params, "stop_tokens": tuple(params["stop_tokens"])}), mask)
        case name:
            raise LaunchError(f"rank {channel.meeting.rank} was given the command {name!r}, which stands nowhere here")


def _mirror(engine: Ranked, channel: Channel, params: DecodeParams, mask: Mask | None) -> None:
    """A request, from its beginning to its end on rank 0."""
    stream, failed = engine.decode(params, mask=mask), False
    while not failed:
        try:
            if next(stream, None) is None:
                return
        except RequestError:  # a mask that fails; rank 0 has the same one, and ends the request
            failed = True
        if engine.unattended:
            continue
        command = channel.receive()
        if command["command"] != "step" or failed:
            stream.close()
            if command["command"] != "end":
                raise LaunchError(f"rank {channel.meeting.rank} was given {command['command']!r} within a request")
            if not failed:  # else what was under way is as far on all ranks, and begins anew
                engine.take_back(command["length"])
        _check_counts(engine, channel.meeting.rank, command)
        if command["command"] == "end":
            return


def _check_counts(engine: Ranked, rank: int, command: Command) -> None:
    ours, theirs = list(engine.counts), command["counts"]
    if ours != theirs:
        raise LaunchError(
            f"rank {rank} is not where rank 0 is at {command['command']!r}: it counts {ours}, and rank 0 {theirs}; "
            "start the program again, and report this"
        )


def _integer(value: object, name: str) -> int:
    """As all ranks are given it; RequestError for what is no integer."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"{name} must be an integer, not {value!r}") from None
