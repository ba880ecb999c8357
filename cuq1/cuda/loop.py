"""The decode loop on the device: graphs that launch one another, and the log that the host reads beside them.

The host launches a request's first graph. From then on each round's control kernel launches the next; the host
polls the log. A chain ends for a reason that its last record names. Where it only paused, since the reader was behind,
the host launches it again: no kernel ever spins for a reader, and no record is overwritten.

Of several ranks, each launches its own graphs and reads its own log: the same records, whose reasons all ranks' control
kernels have agreed on. One that cancels or reads slowly ends or pauses the chain on all of them after the same round.
"""

import time
from collections.abc import Callable, Sequence
from ctypes import addressof, memmove, sizeof
from functools import partial

from cuq1.cuda import abi, graph
from cuq1.cuda.abandon import let_go
from cuq1.cuda.execute import Program
from cuq1.cuda.log import ResultLog, describe
from cuq1.cuda.memory import Mapped
from cuq1.cuda.runtime import Runtime
from cuq1.errors import DeviceError
from cuq1.models import loop as plans
from cuq1.plan.dims import ROWS
from cuq1.plan.types import Plan
from cuq1.sampling.params import MAX_DRAFTS

POLL = 50e-6  # seconds between looks at the log
TIMEOUT = 10.0  # seconds without a record after which a round counts as stalled
UNBOUNDED = 1 << 30
_QUERY = 40  # looks at the log between two at the stream

_SHORT, _DEPTHS = ROWS + 1, 2 * (ROWS + 1)  # places in abi.Loop.graphs
# ("round", rows, draft depths within, short), ("first", 0, draft depths within, _) or ("depth", 0, depth, _)
_Key = tuple[str, int, int, bool]


class DeviceLoop:
    """One request at a time: start, then next until a record has a reason, or drain.

    most: the most drafts that a request may make in a round. timeout: seconds that a round may take. Raises DeviceError
    where graphs cannot be captured or linked.
    """

    def __init__(self, runtime: Runtime, most: int, *, timeout: float = TIMEOUT) -> None:
        self._runtime = runtime
        self.timeout = timeout
        self._mirror = Mapped(sizeof(abi.Mirror))
        self._upload = Mapped(sizeof(abi.Loop))
        runtime.addresses["mirror"] = self._mirror.address
        self.log = ResultLog(abi.Mirror.from_address(self._mirror.address))
        self._graphs: dict[_Key, graph.Graph] = {}
        self.running = False
        self._paused: abi.Record | None = None
        self._last: abi.Record | None = None
        self.resumed = 0  # times that the reader was behind
        self._made = 0  # draft depths in the graphs of the running request's rounds
        self._tables: dict[tuple[int, bool], abi.Loop] = {}
        self.prepare(most, auto=True)

    def close(self) -> None:
        """Frees graphs and host memory; no chain may be running."""
        for ready in self._graphs.values():
            ready.close()
        self._graphs.clear()
        for mapped in (self._mirror, self._upload):
            mapped.close()

    @property
    def _lengths(self) -> list[bool]:
        """The kinds of rounds that the caches' size makes possible: in long contexts, in short ones."""
        model = self._runtime.model
        return [short for short in (False, True) if (model.short_context >= ROWS if short else self._long)]

    @property
    def _long(self) -> bool:
        return self._runtime.model.capacity > self._runtime.model.short_context

    def prepare(self, most: int, *, auto: bool) -> None:
        """Captures and uploads what requests with at most `most` drafts a round launch, where that is not done.

        auto: the stop rule chooses how many; else it is always `most`.
        """
        model = self._runtime.model
        made = plans.depths_within(most, auto=auto)
        wanted: dict[_Key, Callable[[], Plan]] = {("first", 0, made, False): lambda: plans.first_of(model, made)}
        for rows in plans.rows_for(most, auto=auto):
            for short in self._lengths:
                wanted["round", rows, made, short] = partial(plans.round_of, model, rows, made, short=short)
        for depth in range(made, most):
            wanted["depth", 0, depth, False] = partial(plans.depth_of, model, depth)
        missing = [key for key in wanted if key not in self._graphs]
        for key in missing:
            self._graphs[key] = self._capture(self._runtime.program(wanted[key]()))
        if missing:
            self._runtime.meet()

    def _capture(self, program: Program) -> graph.Graph:
        stream = self._runtime.stream
        with graph.capture(stream) as captured:
            program.issue(stream)
        ready = captured.instantiate(device=True)
        ready.upload(stream)
        return ready

    def _table(self, most: int, *, auto: bool) -> abi.Loop:
        """A Loop whose graphs are those of such requests; a length that cannot occur has the other's.

        It is made once: what a request adds is the little that differs.
        """
        if (most, auto) in self._tables:
            return self._tables[most, auto]
        self.prepare(most, auto=auto)
        made = plans.depths_within(most, auto=auto)
        loop = self._tables[most, auto] = abi.Loop()
        table = loop.graphs
        for rows in range(1, ROWS + 1):
            found = [self._graphs.get(("round", rows, made, short)) for short in (False, True)]
            for place, ready in zip((0, _SHORT), (found[0] or found[1], found[1] or found[0]), strict=True):
                table[place + rows] = 0 if ready is None else ready.handle
        for depth in range(MAX_DRAFTS):
            ready = self._graphs.get(("depth", 0, depth, False))
            table[_DEPTHS + depth] = 0 if ready is None else ready.handle
        return loop

    @property
    def unattended(self) -> bool:
        """Whether the next record comes without the host."""
        return self.running and self._paused is None

    def start(self, state: abi.State, budget: int, stops: Sequence[int], taken: int, room: int) -> None:
        """Launches a request from the logits' row 0.

        state: from Runtime.request. budget: tokens to commit at the most; stops: at most MAX_STOPS tokens that end the
        request; taken: the sequence's length; room: how many positions the device may reach beyond what was taken.
        """
        most, auto = state.draft_limit, bool(state.auto_depth)
        loop = self._table(most, auto=auto)
        self._made = plans.depths_within(most, auto=auto)
        for place in range(abi.MAX_STOPS):
            loop.stops[place] = stops[place] if place < len(stops) else -1
        loop.short_context = self._runtime.model.short_context
        loop.budget, loop.room, loop.written = budget, room, self.log.read & 0xFFFFFFFF
        self._runtime.send(state)
        memmove(self._upload.address, addressof(loop), sizeof(abi.Loop))
        self._runtime.copy("loop", self._upload.address, sizeof(abi.Loop))
        self.log.begin(taken)
        self._last = self._paused = None
        self.running = True
        self._graphs["first", 0, self._made, False].launch(self._runtime.stream)

    def next(self) -> abi.Record:
        """Waits for the next record. Raises DeviceError where it does not come in time, or the GPU failed."""
        if self._paused is not None:
            self._resume(self._paused)
        limit = time.monotonic() + self.timeout
        looks = 0
        ended = False
        while True:
            record = self.log.next()
            if record is not None:
                return self._arrived(record)
            looks += 1
            if ended:
                self.running = False
                raise DeviceError(f"the decode loop ended without a reason: {describe(self._last)}")
            if looks % _QUERY == 0:
                ended = not self._busy()  # what it wrote last is then there: one look more
            if time.monotonic() > limit:
                self.running = False
                self._runtime.lost = (
                    f"a decode round did not end within {self.timeout:g} s: {describe(self._last)}; the GPU's memory "
                    "is given back when this process ends"
                )
                let_go()
                self._runtime.check_alive()
            time.sleep(POLL)

    def _busy(self) -> bool:
        try:
            return graph.busy(self._runtime.stream)
        except DeviceError:
            self.running = False
            self._runtime.wait()  # which knows what a kernel reported
            raise

    def _arrived(self, record: abi.Record) -> abi.Record:
        self._last = record
        if record.reason == abi.END_PAUSED:
            self._paused = record
        elif record.reason != abi.END_NONE:
            self.running = False
            graph.synchronize(self._runtime.stream)
        if record.reason == abi.END_LAUNCH:
            raise DeviceError(f"the driver refused to launch a graph from the device: status {record.status}")
        return record

    def _resume(self, record: abi.Record) -> None:
        self._paused = None
        self.resumed += 1
        short = record.done + ROWS <= self._runtime.model.short_context and True in self._lengths
        key = ("round", record.next_rows, self._made, short or not self._long)
        self._graphs[key].launch(self._runtime.stream)

    def drain(self) -> abi.Record | None:
        """Cancels the request: a record that has not been read, or None once the chain has ended."""
        if not self.running or self._paused is not None:
            self.running = False
            return None
        self.log.cancel()
        return self.next()
