"""Engines without a model, one a rank: with rounds that the host steps, or that all ranks' devices make together."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

from cuq1.sampling import DecodeParams, Round
from cuq1.sequence import SequenceEngine

SEGMENT = 5  # rounds after which a device pauses, as if its reader were behind
VOCAB = 1000


class Chain:
    """The devices' rounds of one request. One is there when every rank has launched its segment; all end together."""

    def __init__(self, world, budget):
        self.changed = threading.Condition()
        self.budget = budget
        self.launched = [0] * world
        self.read = [0] * world
        self.end = None  # the number of the last round, once somebody has cancelled

    def launch(self, rank):
        with self.changed:
            self.launched[rank] += 1
            self.changed.notify_all()

    def record(self, rank, number):
        """Why the device stops after round `number`, or an empty text."""
        segment = number // SEGMENT
        with self.changed:
            came = self.changed.wait_for(lambda: min(self.launched) > segment, 5)
            assert came, f"rank {rank} waits for a peer's launch of segment {segment}: {self.launched}"
            assert self.end is None or number <= self.end
            self.read[rank] = max(self.read[rank], number + 1)
            if number == self.budget - 1:
                return "length"
            if number % SEGMENT == SEGMENT - 1:
                return "paused"
            return "cancelled" if number == self.end else ""

    def cancel(self, number):
        """Ends it after the round that the fastest reader is in, `number` at least."""
        with self.changed:
            self.end = max(number, *self.read)


class FakeEngine(SequenceEngine):
    """Token i of a request is a number that its seed and the sequence decide. chains: shared by the ranks' engines."""

    def __init__(self, rank, world=2, chains=None, device=False):
        super().__init__()
        self.rank, self.world, self.device = rank, world, device
        self.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=400_000)
        self.default_params = DecodeParams(max_tokens=8)
        self.chains = {} if chains is None else chains
        self.calls = []
        self.unattended = False
        self.abandoned = None
        self.fault = None  # what the next computation raises
        self.number = 0

    @property
    def counts(self):
        return (len(self._tokens), self._done, sum(self._tokens[-64:]))

    def snapshot_room(self, first):
        return min(first, 1000)

    def keep_snapshots(self, first, second=0):
        self.calls.append(("keep_snapshots", first, second))

    def remember(self, hint="", *, turn=True):
        self.calls.append(("remember", hint, turn, len(self._tokens)))

    def take_back(self, length):
        self._tokens = self._tokens[:length]
        self._forget(self._done - (length - 1))

    def abandon(self, reason):
        self.abandoned = reason

    def compute(self, name, *values):
        self.calls.append((name, *values))
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def token(self, seed):
        token = (seed * 31 + sum(self._tokens[-3:]) * 7 + len(self._tokens)) % VOCAB
        allowed = self._masks.after(())
        return token if allowed is None else int(np.roll(allowed, -token).argmax() + token) % VOCAB

    def prefill(self, ids, *, chunk=None):
        kept = super().prefill(ids, chunk=chunk)
        self.calls.append(("prefill", len(ids), chunk))
        return kept

    def score(self, ids):
        self.compute("score", len(ids))
        return np.zeros((len(ids), VOCAB), np.float32)

    def verified_rows(self, rows, start):
        self.compute("verified_rows", tuple(rows), start)
        return np.zeros((len(rows), VOCAB), np.float32)

    @property
    def max_drafts(self):
        return 0

    def _reset(self):
        self._tokens, self._done = [], 0

    def _restart(self, length):
        return length if length == 0 or length > len(self._tokens) - 40 else None  # as rings do

    def _forget(self, rows):
        if rows > 0:
            self._done -= rows

    def _catch_up(self, chunk):
        self.compute("catch up", len(self._tokens) - self._done)
        self._done = len(self._tokens)

    def _first(self, params, seed):
        self._catch_up(1)
        return Round((self.token(seed),), 0, 0, from_prompt=True)

    def _round(self, params, seed):
        self.compute("round")
        self._done += 1
        return Round((self.token(seed),), 0, 0)

    def _computing(self):
        return nullcontext()

    def _release(self):
        self.calls.append(("close",))

    def _rounds(self, params, seed, request):
        if not self.device:
            return (yield from super()._rounds(params, seed, request))
        return (yield from self._followed(params, seed))

    def _followed(self, params, seed):
        self.number += 1
        chain = self.chains.setdefault(self.number, Chain(self.world, params.max_tokens))
        with self._change():
            self._catch_up(1)
        number, reason = 0, "paused"
        try:
            while True:
                if reason == "paused":
                    chain.launch(self.rank)
                    self.unattended = True
                reason = chain.record(self.rank, number)
                self.unattended = reason == ""
                self._count(number, seed)
                yield Round((self._tokens[-1],), 0, 0, number == 0)
                number += 1
                if reason == "length":
                    return "length"
                assert reason != "cancelled", "a chain that has ended gives no further round"
        finally:
            self._drain(chain, number + 1, reason)

    def _count(self, number, seed):
        self.compute("record", number)
        self._done += int(number > 0)
        self._tokens.append(self.token(seed))

    def _drain(self, chain, number, reason):
        """Rounds that nobody has read are taken back."""
        held = len(self._tokens)
        if self.unattended:
            self.unattended = False
            chain.cancel(number)
            while reason == "":
                reason = chain.record(self.rank, number)
                self._done += int(number > 0)
                number += 1
        self._forget(self._done - (held - 1))
