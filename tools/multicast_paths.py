"""The exchange through the switch and by peer push, side by side on a rank, for tools/check_multicast.py."""

import time
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda import abi, graph
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.kernels import multicast, rows
from cuq1.cuda.launch import Call
from cuq1.cuda.memory import Arena, MappedFault, copy_in
from cuq1.cuda.module import build
from cuq1.errors import DeviceError
from cuq1.models.inbox import Inbox
from cuq1.parallel import Rendezvous
from cuq1.parallel.exchange import SharedInbox
from cuq1.parallel.multicast import Multicast
from cuq1.plan.dims import ROWS
from tools.exchange_probe import dims
from tools.gpu import Spread, spread_us
from tools.peer_loads import PeerLoads, patch

BATCH = 48  # exchanges between two looks at their results; a multiple of PATTERNS
PATTERNS = 8  # partials that exchanges take in turn
LINKS = 60  # of a graph that is timed; a multiple of abi.INBOXES
SWITCH, PUSH = "switch", "push"

Floats = NDArray[np.float32]


@dataclass
class Result:
    """Of a run's exchanges, one by one: residual float32 and normed float16, [exchanges, ROWS, hidden].

    what, at, blamed: of the fault that was reported, its kind, exchange and rank; 0 and None where there is none.
    """

    residual: Floats
    normed: NDArray[np.float16]
    seconds: float
    what: int = 0
    at: int | None = None
    blamed: int | None = None
    fault: str | None = None

    def told(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seconds", "what", "at", "blamed", "fault")}


class Paths:
    """A rank's memory, kernels and stream for both. Made by all ranks together; use as a context manager.

    peer_loads: no multicast object is made, and each rank's memory is loaded in the switch's place.
    """

    def __init__(self, meeting: Rendezvous, *, peer_loads: bool) -> None:
        self.meeting = meeting
        self.dims = d = dims(meeting.world)
        kind = PeerLoads if peer_loads else Multicast
        self.shared: PeerLoads | Multicast = kind(meeting, multicast.nbytes(d))
        self.layout = Inbox(d, meeting.rank)
        self.inbox = SharedInbox(meeting, self.layout.bytes)
        row, many = d.hidden * 4, ROWS * d.hidden * 4
        sizes = {"partials": PATTERNS * many, "residual": BATCH * many, "normed": BATCH * many // 2}
        self._arena = Arena(
            sizes | {"h": many, "zeros": many, "out_norm": row, "norm": row, "peers": abi.MAX_RANKS * 8}
        )
        self._arena.clear()
        rng = np.random.default_rng(1)
        # What a sum is added to without a change, signs of zeros included.
        copy_in(self._arena["zeros"], np.full((ROWS, d.hidden), -0.0, np.float32))
        copy_in(self._arena["h"], rng.standard_normal((ROWS, d.hidden), np.float32))
        for name in ("out_norm", "norm"):
            copy_in(self._arena[name], rng.uniform(0.5, 2, d.hidden).astype(np.float32))
        copy_in(self._arena["peers"], self.inbox.distances)
        self._fault = MappedFault()
        self._stream = graph.stream()
        self._next = {SWITCH: 0, PUSH: 0}  # numbers of the exchanges to come
        tail = multicast.tail(d)
        changed = patch(tail, self.shared.distances) if isinstance(self.shared, PeerLoads) else None
        send, tail_args = abi.MulticastSendArgs(), abi.MulticastTailArgs()
        self._send = Call(build(multicast.send(d), patch=changed), send)
        self._tails = {
            SWITCH: Call(build(tail, patch=changed), tail_args),
            PUSH: Call(build(rows.mlp_tail(d)), abi.MlpTailArgs(ranks=d.ranks)),
        }
        self.set_norms(True)
        meeting.barrier("paths")

    def load(self, values: Floats) -> None:
        """Takes this rank's partials of [PATTERNS, ranks, ROWS, hidden]."""
        copy_in(self._arena["partials"], values[:, self.meeting.rank])

    def set_norms(self, norms: bool, *, faults: bool = True) -> None:
        """Exchanges from now on: sum, norm, residual, norm; or else `residual` is the sum itself, bit by bit.

        faults: whether they are reported. A wait after a report is given up.
        """
        for one in self._tails.values():
            args = one.args
            args.fault = self._fault.address if faults else 0
            args.h = self._arena["h" if norms else "zeros"]
            args.ffn_out_norm = self._arena["out_norm"] if norms else 0
            args.ffn_scale = 0.5 if norms else 1.0
            args.next_norm = self._arena["norm"]

    def run(self, path: str, counts: NDArray[Any], pauses: NDArray[Any], skip: int | None = None) -> Result:
        """Exchanges of so many rows each, BATCH at most.

        pauses: nanoseconds by which sends are late; skip: one that this rank leaves out.
        """
        self.meeting.barrier("a run")  # waits are for kernels, not for a rank that compares results
        begun = time.perf_counter()
        for number, (count, pause) in enumerate(zip(counts, pauses, strict=True)):
            self._exchange(path, number, int(count), int(pause), send=number != skip)
        while graph.busy(self._stream):
            time.sleep(2e-4)
        seconds = time.perf_counter() - begun
        shape = (len(counts), ROWS, self.dims.hidden)
        found = Result(self._read("residual", shape, np.float32), self._read("normed", shape, np.float16), seconds)
        fault = self._fault.read()
        if fault is not None:
            found.what, found.at, found.blamed = fault.what, fault.layer, fault.detail
            found.fault = sentence(fault)
            self._fault.clear()
        return found

    def reset(self) -> None:
        """The memory behind the switch as it was at first, on all ranks, after exchanges that failed."""
        self.meeting.barrier("ended")
        self.shared.reset()
        self._next[SWITCH] = 0
        self.meeting.barrier("reset")

    def period(self, path: str) -> Spread:
        """Microseconds per exchange of 8 rows, in a graph of nothing else."""
        self.meeting.barrier("a graph")
        with graph.capture(self._stream) as captured:
            for number in range(LINKS):
                self._exchange(path, number % BATCH, ROWS, 0)
        with captured.instantiate() as found:
            found.upload(self._stream)
            whole = spread_us(lambda: found.launch(self._stream), self._stream)
        fault = self._fault.read()
        if fault is not None:
            raise DeviceError(f"{path}: {sentence(fault)}")
        return Spread(*(one / LINKS for one in whole))

    def close(self) -> None:
        graph.synchronize(self._stream)
        self.shared.close()
        self.inbox.close()
        self._arena.close()
        self._fault.close()

    def __enter__(self) -> "Paths":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:  # else everything goes with the process
            self.close()

    def _exchange(self, path: str, slot: int, count: int, pause: int, *, send: bool = True) -> None:
        d, many = self.dims, ROWS * self.dims.hidden * 4
        number = self._next[path]
        self._next[path] += 1
        sending, tail = self._send.args, self._tails[path].args
        sending.layer = tail.layer = slot
        sending.rows = tail.rows = count
        sending.source = self._arena["partials"] + slot % PATTERNS * many
        sending.delay = pause
        tail.residual, tail.normed = self._arena["residual"] + slot * many, self._arena["normed"] + slot * many // 2
        if path == SWITCH:
            sending.out = self.shared.own + multicast.buffer(d, number)
            sending.sent = self.shared.own + multicast.sent(d) + self.meeting.rank * 4
            sending.peers = 0
            tail.y = self.shared.address + multicast.buffer(d, number)
            tail.sent = self.shared.address + multicast.sent(d)
            tail.unready = self.shared.own + multicast.buffer(d, number - 1)
        else:
            sending.out = self.inbox.address + self.layout.own("y", number).offset
            sending.sent, sending.peers = 0, self._arena["peers"]
            tail.y = self.inbox.address + self.layout.whole("y", number).offset
        if send:
            self._send.issue(self._stream)
        self._tails[path].issue(self._stream)

    def _read(self, name: str, shape: Sequence[int], dtype: Any) -> Any:
        found = np.empty(shape, dtype)
        check(bindings().cuMemcpyDtoH(found.ctypes.data, bindings().CUdeviceptr(self._arena[name]), found.nbytes))
        return found


def sentence(fault: Structure) -> str:
    """A fault of an exchange in words."""
    what, at, place = (getattr(fault, name) for name in ("what", "layer", "detail"))
    if what != abi.constant("FAULT_PEER"):
        return f"{abi.FAULTS.get(what, what)} in exchange {at}"
    whose = f"rank {place}'s part" if place >= 0 else "some rank's part"
    return f"{whose} of exchange {at} did not come within {abi.DEFAULT_PEER_TIMEOUT_MS} ms"
