"""What every GPU engine does alike: a model's decode round as captured graphs, one for each number of verified rows.

The device launches a request's rounds itself (cuq1.cuda.loop), and the host reads its log. With loop "host" the host
launches a graph a round and reads the request's state when it has ended: the same tokens, for comparison. What the
device cannot sample by itself (no top_k, or one above 32 candidates; masks; log-probabilities) is computed by the same
kernels and sampled on the host, a step at a time.
"""

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda import abi
from cuq1.cuda.abandon import let_go
from cuq1.cuda.hostsample import HostSampler
from cuq1.cuda.kernels.prefill import CHUNK
from cuq1.cuda.loop import TIMEOUT, UNBOUNDED, DeviceLoop
from cuq1.cuda.prefill import Prefill
from cuq1.cuda.ranks import Ranks
from cuq1.cuda.runtime import Runtime
from cuq1.cuda.snapshot import DeviceSaver, Marks, room_for, saver_of
from cuq1.cuda.weights_device import Source
from cuq1.errors import RequestError
from cuq1.models.plans import DeviceModel
from cuq1.plan.dims import MAX_TOP_K, ROWS
from cuq1.plan.types import Defines
from cuq1.sampling.depth import DepthRule
from cuq1.sampling.params import MAX_DRAFTS, DecodeParams, check_prompt
from cuq1.sampling.rounds import FinishReason, Round
from cuq1.sequence import SequenceEngine

LoopKind = Literal["device", "host"]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Options:
    """How an engine runs its model.

    loop: who launches a request's rounds. timeout: seconds after which a round that the device launched counts as
    stalled. progress(done, total) is called as layers are loaded. defines: for tools and tests, constants of decode
    kernels by label (Plan.with_defines). Raises RequestError for another loop.
    """

    loop: LoopKind = "device"
    timeout: float = TIMEOUT
    progress: Callable[[int, int], None] | None = None
    defines: Mapping[str, Defines] | None = None

    def __post_init__(self) -> None:
        if self.loop not in ("device", "host"):
            raise RequestError(f"loop must be device or host, not {self.loop!r}")


class DeviceEngine(SequenceEngine):
    """One request at a time. A subclass sets config, default_params and context, and calls `_start` as it is made."""

    chunk = CHUNK

    def _start(
        self,
        model: DeviceModel,
        weights: Source,
        rule: DepthRule,
        options: Options,
        *,
        drafts: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        """Takes memory, loads weights and captures the loop's graphs.

        drafts: slots of the model's draft. ranks: the group of which the model is one rank's. Raises CheckpointError,
        DeviceError where memory is too small, LaunchError where ranks differ.
        """
        self._model, self._max_drafts = model, drafts
        self._runtime = Runtime(model, weights, rule, options.progress, options.defines, ranks)
        self._prefill = Prefill(self._runtime)
        self._host = HostSampler(self._runtime, rule)
        self._loop: DeviceLoop | None = None
        self._following = False  # what changes is the count of what the device has done
        self._drafted = 0  # the most drafts a round of what the device is doing
        rings = [layer for layer in (*model.layers, model.draft) if layer is not None and layer.sliding]
        self._room = min([UNBOUNDED, *(layer.slots - layer.window for layer in rings)])
        try:
            if options.loop == "device":
                self._loop = DeviceLoop(self._runtime, self.max_drafts, timeout=options.timeout)
            self._reset()
        except BaseException as error:
            if ranks is not None:
                self.abandon(str(error))
            self._release()
            raise

    def _reset(self) -> None:
        """An empty sequence. What the caches hold is finite, and beyond every position that counts."""
        self._clear()
        self._runtime.recover()
        self._runtime.empty()

    def _clear(self) -> None:
        self._tokens = []
        self._done = 0
        self._settled = 0  # positions whose draft rows are final
        self._fresh = False  # row 0 of hidden states and logits belongs to position done - 1
        self._target_end = 0  # one past the highest position that was ever written, rejected rows included
        self._draft_end = 0

    def _saver(self, first: int, second: int) -> DeviceSaver:
        """Takes the memory for snapshots; DeviceError where it is not there."""
        self._end_chain()
        return saver_of(self, self._runtime, first, second)

    def _drop_snapshots(self) -> None:
        if self._snapshots is not None and not self._runtime.lost:
            self._end_chain()
            super()._drop_snapshots()

    def snapshot_room(self, first: int) -> int:
        """As many of the bytes that are wanted for snapshots as this GPU has to spare."""
        self._drop_snapshots()
        return room_for(first)

    def _granted(self, first: int) -> int:
        return room_for(first) if self._runtime.ranks is None else first  # ranks take the same: what rank 0 can spare

    @property
    def marks(self) -> Marks:
        """What a snapshot has to know beside the caches."""
        return Marks(self._done, self._settled, self._fresh, self._target_end, self._draft_end)

    @marks.setter
    def marks(self, marks: Marks) -> None:
        self._done, self._settled, self._fresh = marks.done, marks.settled, marks.fresh
        self._target_end, self._draft_end = marks.target_end, marks.draft_end

    @property
    def max_drafts(self) -> int:
        """The most drafts that a round can have; 0 where the checkpoint has no draft."""
        return min(self._max_drafts, MAX_DRAFTS)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of GPU memory by name."""
        return dict(self._runtime.sizes)

    @property
    def counts(self) -> tuple[int, ...]:
        """What decides how the next call is computed, with a checksum of the last tokens: the same on all ranks."""
        last = np.asarray(self._tokens[-64:], np.int32)
        held = (self._done, self._settled, int(self._fresh), self._target_end, self._draft_end)
        return (len(self._tokens), *held, zlib.crc32(last.tobytes()))

    @property
    def unattended(self) -> bool:
        """Whether the running request's next round comes without the host."""
        return self._loop is not None and self._loop.unattended

    def take_back(self, length: int) -> None:
        """On a rank that follows, after a request was ended: forget what rank 0 has not read of it."""
        self._tokens = self._tokens[:length]
        self._forget(self._done - (length - 1))

    def abandon(self, reason: str) -> None:
        """Ask nothing of the GPU any more, since other ranks may not take part: the process is about to end."""
        if not self._runtime.lost:
            self._runtime.lost = reason
            let_go()

    def _release(self) -> None:
        if self._loop is not None and not self._runtime.lost:
            self._end_chain()
            self._loop.close()
        self._runtime.close()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        if not self._following:
            self._end_chain()
        yield

    def _forget(self, rows: int) -> None:
        if rows > 0:
            self._done -= rows
            self._settled = min(self._settled, self._done)
            self._fresh = False

    def _restart(self, length: int) -> int | None:
        if length == len(self._tokens):
            return self._done
        if length == 0:
            return 0
        first = length - 1
        draft = self._model.draft
        if draft is not None:
            held = length - 1 <= self._settled and max(0, length - draft.window) >= self._draft_end - draft.slots
            if not held:  # hidden states for the draft's whole window have to come again
                first = max(0, length - draft.window)
        rings = [layer for layer in self._model.layers if layer.sliding]
        oldest = max([0, *(self._target_end - layer.slots for layer in rings)])
        window = max([0, *(layer.window for layer in rings)])
        return first if oldest <= max(0, first + 1 - window) else None

    def _catch_up(self, chunk: int) -> None:
        if self._done == len(self._tokens) and not self._fresh:
            self._forget(1)
        while self._done < len(self._tokens):
            end = min(self._done + min(chunk, self.chunk), len(self._tokens))
            first = max(self._settled, self._done - 1 if self._fresh else self._done)
            self._prefill.run(self._tokens, self._done, end, settle_from=first)
            self._target_end = max(self._target_end, end)
            self._done = end
            if self._model.draft is not None:
                self._settled = min(end, len(self._tokens) - 1)
                self._draft_end = max(self._draft_end, self._settled)
            self._fresh = True

    def _limit(self, params: DecodeParams) -> int:
        if params.draft == "off":
            return 0
        return min(self.max_drafts, params.draft) if isinstance(params.draft, int) else self.max_drafts

    def _first(self, params: DecodeParams, seed: int) -> Round:
        self._catch_up(self.chunk)
        limit = self._limit(params)
        self._fresh = False
        if self._on_host(params):
            one = self._host.first(params, self._masks, seed, self._done, limit)
        else:
            token = self._runtime.first(params, seed, self._done, limit)
            one = Round((token,), 0, 0, from_prompt=True)
        self._settled = self._done
        self._draft_end = max(self._draft_end, self._done + limit)
        return one

    def _round(self, params: DecodeParams, seed: int) -> Round:
        limit = self._limit(params)
        if self._on_host(params):
            one = self._host.round(params, self._masks, seed, limit)
        else:
            one = self._runtime.round(limit)
        self._target_end = max(self._target_end, self._done + one.drafted + 1)
        self._done += one.accepted + 1
        self._settled = self._done
        self._draft_end = max(self._draft_end, self._done + limit)
        return one

    def _rounds(self, params: DecodeParams, seed: int, request: int) -> Generator[Round, None, FinishReason]:
        if self._loop is None or self._on_host(params) or len(params.stop_tokens) > abi.MAX_STOPS:
            return (yield from super()._rounds(params, seed, request))
        return (yield from self._followed(self._loop, params, seed, request))

    def _followed(
        self, loop: DeviceLoop, params: DecodeParams, seed: int, request: int
    ) -> Generator[Round, None, FinishReason]:
        """The rounds that the device runs by itself. It is never further ahead of the reader than a rewind can undo."""
        self._check_current(request)
        budget = self._budget(params)
        with self._change():
            self._catch_up(self.chunk)
            self._guard(len(self._tokens) + budget + ROWS)
            state = self._runtime.request(params, seed, self._done, self._limit(params))
            self._drafted = state.draft_limit
            loop.start(state, budget, params.stop_tokens, len(self._tokens), self._room)
            self._fresh = False
        try:
            while True:
                record = loop.next()
                self._following = True
                try:
                    with self._change():
                        self._runtime.check_faults()
                        self._check_end(record)
                        self._count(record)
                        tokens = tuple(record.tokens[: record.count])
                        self._commit(tokens)
                finally:
                    self._following = False
                yield Round(tokens, record.drafted, record.accepted, record.index == 0)
                if record.reason == abi.END_STOP:
                    return "stop"
                if record.reason == abi.END_LENGTH:
                    return "length"
                self._check_current(request)
                loop.log.take(len(self._tokens))
        finally:
            if request == self._request and not self._closed:
                self._end_chain()

    def _check_end(self, record: abi.Record) -> None:
        """After a look at this rank's faults: what another rank has to say, where the chain ended for one of its."""
        if record.reason == abi.END_FAULT and self._runtime.ranks is not None:
            self._runtime.ranks.failed_elsewhere()

    def _count(self, record: abi.Record) -> None:
        """Takes in what a round of the device has left in the caches."""
        if record.index > 0:
            self._target_end = max(self._target_end, self._done + record.drafted + 1)
            self._done += record.accepted + 1
        self._settled = self._done
        self._draft_end = max(self._draft_end, self._done + self._drafted)

    def _end_chain(self) -> None:
        """Ends what the device is doing. Rounds that nobody has read are taken back: the rings still hold what was."""
        loop = self._loop
        if loop is None or not loop.running:
            return
        while (record := loop.drain()) is not None:
            if self._runtime.ranks is not None:  # an error is every rank's, though rank 0 may not have read so far
                self._runtime.check_faults()
                self._check_end(record)
            self._count(record)
        self._forget(self._done - (len(self._tokens) - 1))
        if self._runtime.drop_faults():
            tokens = self._tokens
            if self._snapshots is not None:
                self._snapshots.lost()
            self._reset()  # what is computed next starts from empty caches
            self._tokens = tokens

    def _on_host(self, params: DecodeParams) -> bool:
        """Whether the request needs more of the logits than the device looks at."""
        if params.logprobs is not None or self._masks:
            return True
        return params.temperature > 0 and not 1 <= params.top_k <= MAX_TOP_K

    def score(self, ids: Sequence[int]) -> F32:
        """Next-token logits float32 [len(ids), vocab]: row i follows ids[: i + 1].

        Leaves the engine's sequence alone: it computes with caches of its own. Raises RequestError as `prefill`
        does, though the sequence may fill the context, and DeviceError where memory does not hold the caches.
        """
        self._check_open()
        tokens = check_prompt(ids, self.vocab_size, self.context, room=0)
        self._end_chain()
        return self._prefill.score(tokens)

    def verified_logits(self, ids: Sequence[int]) -> F32:
        """Next-token logits float32 [rows, vocab] after the last min(8, len(ids)) of `ids`, by the decode kernels.

        For checks: it is how a round computes them, where `score` computes as a prompt is. The sequence becomes `ids`
        without its last rows.
        """
        self._check_open()
        tokens = check_prompt(ids, self.vocab_size, self.context, room=0)
        rows = min(ROWS, len(tokens))
        before = tokens[: len(tokens) - rows]
        if before:
            self.prefill(before)
        else:
            self.rewind(0)
        return self.verified_rows(tokens[-rows:], len(before))

    def verified_rows(self, rows: Sequence[int], start: int) -> F32:
        """The same of at most eight tokens at positions start, start + 1, …, with what the caches hold before them."""
        self._check_open()
        with self._change():
            if self._snapshots is not None:
                self._snapshots.overwrite(start, start + len(rows), [])
            self._target_end = max(self._target_end, start + len(rows))
            self._fresh = False
            most = self._runtime.plans.most_rows
            parts = [self._runtime.verify(rows[i : i + most], start + i) for i in range(0, len(rows), most)]
        return np.concatenate(parts)
