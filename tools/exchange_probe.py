"""A rank's part in runs of the exchange's probe (kernels_cu/exchange_probe.cu), and the numbers that it is given."""

import sys
import time
from collections.abc import Sequence
from ctypes import sizeof
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.config import load_config
from cuq1.cuda import graph
from cuq1.cuda.abi import DEFAULT_PEER_TIMEOUT_MS, FAULTS, INBOXES, ExchangeFound, ExchangeProbeArgs
from cuq1.cuda.driver import bindings, check, open_device
from cuq1.cuda.kernels import exchange_probe
from cuq1.cuda.launch import Call
from cuq1.cuda.memory import Arena, MappedFault, copy_in
from cuq1.cuda.module import build
from cuq1.parallel import Rendezvous
from cuq1.parallel.exchange import SharedInbox
from cuq1.parallel.launch import main as launch
from cuq1.plan.dims import ROWS, Dims, dims_of
from tools.bench import ROOT

Floats = NDArray[np.float32]

GRAPHS = (300, 96, 3)  # exchanges of the graphs that take turns: multiples of INBOXES
AHEAD = 16  # graphs that are launched before the oldest has ended
MOST = np.finfo(np.float32).max


def start(module: str, ranks: int, argv: Sequence[str], prefix: Sequence[str] = ()) -> int:
    """Runs `python -m module argv` as ranks: the launcher's exit status. prefix: a program that runs each."""
    return launch(["-n", str(ranks), "--", *prefix, sys.executable, "-m", module, *argv])


def open_rank(meeting: Rendezvous) -> str:
    """Opens the rank's GPU, which ranks share where there are fewer: its name."""
    count = int(check(bindings().cuDeviceGetCount()))
    return open_device(meeting.rank % count).name


def dims(places: int) -> Dims:
    """The released model's sizes, for this many that exchange."""
    return replace(dims_of(load_config(ROOT / "cuq1" / "assets" / "iquest-q1")[0], 8), ranks=places)


def mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """exchange_probe.cu: mixed."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def rows_of(exchanges: int, seed: int) -> NDArray[np.int64]:
    """The rows that each exchange draws."""
    numbers = np.arange(exchanges, dtype=np.uint32)
    return 1 + (mixed(numbers ^ mixed(np.array([seed], np.uint32))) % ROWS).astype(np.int64)


def partials(kind: str, patterns: int, places: int, columns: int, rng: np.random.Generator) -> Floats:
    """[patterns, places, ROWS, columns] whose sums in the order of places are finite.

    kind: `plain`; `cancelling`, 2^24, 1 and -2^24 on places that take turns, with which the order shows; `subnormal`;
    `zeros` of both signs; `largest`, the largest finite number with either sign; or `all`, words of all kinds.
    """
    shape = (patterns, places, ROWS, columns)
    place = np.arange(places)[:, None, None]
    if kind == "plain":
        return (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, shape))).astype(np.float32)
    if kind == "cancelling":
        turn = (rng.integers(0, 3, (patterns, 1, ROWS, columns)) + place) % 3
        return np.asarray(np.array([2.0**24, 1.0, -(2.0**24)], np.float32)[turn], np.float32)
    if kind == "subnormal":
        bits = rng.integers(0, 1 << 23, shape, np.uint32) | (rng.integers(0, 2, shape, np.uint32) << np.uint32(31))
        return np.asarray(bits.view(np.float32), np.float32)
    if kind == "zeros":
        return np.where(rng.random(shape) < 0.7, -0.0, 0.0).astype(np.float32)
    if kind == "largest":
        first = rng.integers(0, 2, (patterns, 1, ROWS, columns))
        return np.where((place + first) % 2 == 0, MOST, -MOST).astype(np.float32)
    kinds = ("plain", "cancelling", "subnormal", "zeros", "largest")
    of_each = [partials(one, patterns, places, columns, rng) for one in kinds]
    return np.asarray(np.choose(rng.integers(0, len(kinds), (patterns, 1, ROWS, columns)), of_each), np.float32)


def in_order(values: Floats) -> Floats:
    """The sums over places, added one after the other in FP32: [patterns, ROWS, columns]."""
    total = values[:, 0]
    with np.errstate(invalid="ignore"):
        for one in range(1, values.shape[1]):
            total = total + values[:, one]
    return total


@dataclass
class Setting:
    """One run: numbers of exchanges and places, what is pushed and what has to come out, and what is wrong with it."""

    exchanges: int
    values: Floats  # [patterns, places, ROWS, columns]
    sums: Floats
    seed: int = 1
    pause: int = 1000  # cycles
    timeout_ms: int = DEFAULT_PEER_TIMEOUT_MS
    behind: int = 1
    skipped: tuple[int, int] = (-1, -1)  # exchange, place
    patch: tuple[str, str] | None = None
    graphs: tuple[int, ...] = field(default=GRAPHS)

    @property
    def places(self) -> int:
        return int(self.values.shape[1])


class Probe:
    """A rank's memory and graphs for one setting, which all ranks make together. Places are the ranks' in turn.

    Use as a context manager.
    """

    def __init__(self, meeting: Rendezvous, setting: Setting) -> None:
        self.meeting, self.setting = meeting, setting
        own = setting.places // meeting.world
        if own * meeting.world != setting.places:
            raise ValueError(f"{setting.places} places on {meeting.world} ranks")
        columns, patterns = setting.values.shape[3], setting.values.shape[0]
        sized = replace(dims(setting.places), hidden=columns)
        each = INBOXES * setting.places * ROWS * columns * 4
        self.inbox = SharedInbox(meeting, own * each)
        sizes = {"partials": setting.values.nbytes, "sums": setting.sums.nbytes, "peers": own * setting.places * 8}
        self._arena = Arena(sizes | {"found": sizeof(ExchangeFound)})
        self._arena.clear()
        copy_in(self._arena["partials"], setting.values)
        copy_in(self._arena["sums"], setting.sums)
        to = [int(self.inbox.distances[place // own]) + place % own * each for place in range(setting.places)]
        copy_in(self._arena["peers"], np.array([[one - here * each for one in to] for here in range(own)], np.int64))
        self.fault = MappedFault()
        self._stream = graph.stream()
        args = ExchangeProbeArgs(
            fault=self.fault.address,
            inbox=self.inbox.address,
            peers=self._arena["peers"],
            partials=self._arena["partials"],
            sums=self._arena["sums"],
            found=self._arena["found"],
            patterns=patterns,
            place=meeting.rank * own,
            seed=setting.seed,
            pause=setting.pause,
            behind=setting.behind,
            skipped=setting.skipped[0],
            skipping=setting.skipped[1],
        )
        limit = None if setting.timeout_ms == DEFAULT_PEER_TIMEOUT_MS else setting.timeout_ms
        calls = [
            Call(build(kernel, patch=setting.patch), args)
            for kernel in (
                exchange_probe.push(sized, own, limit),
                exchange_probe.take(sized, own, limit),
                exchange_probe.count(sized),
            )
        ]
        self._graphs = [self._capture(length, args, calls) for length in setting.graphs]
        self.launched = 0
        meeting.barrier("probe")

    def _capture(self, length: int, args: Any, calls: Sequence[Call]) -> graph.Graph:
        push, take, count = calls
        with graph.capture(self._stream) as captured:
            for args.layer in range(length):
                push.issue(self._stream)
                take.issue(self._stream)
            args.count = length
            count.issue(self._stream)
        found = captured.instantiate()
        found.upload(self._stream)
        return found

    def launch(self, number: int = 0) -> None:
        """Enqueues a graph."""
        self._graphs[number].launch(self._stream)
        self.launched += self.setting.graphs[number]

    def wait(self) -> None:
        """Until all that was enqueued has ended. Other threads of the process run meanwhile."""
        while graph.busy(self._stream):
            time.sleep(2e-4)

    def run(self) -> dict[str, Any]:
        """All exchanges, or those up to a fault: what was found. The order of graphs is drawn alike on all ranks."""
        rng = np.random.default_rng(self.setting.seed)
        begun, ahead = time.perf_counter(), 0
        while self.launched < self.setting.exchanges and self.fault.read() is None:
            self.launch(int(rng.integers(len(self._graphs))))
            ahead += 1
            if ahead == AHEAD:
                self.wait()
                ahead = 0
        self.wait()
        return self.found() | {"seconds": time.perf_counter() - begun}

    def found(self) -> dict[str, Any]:
        """What the kernels left: ExchangeFound, and the fault as a sentence."""
        bits = np.empty(sizeof(ExchangeFound), np.uint8)
        check(bindings().cuMemcpyDtoH(bits.ctypes.data, bindings().CUdeviceptr(self._arena["found"]), bits.nbytes))
        record = ExchangeFound.from_buffer_copy(bits.tobytes())
        fault = self.fault.read()
        return {name: getattr(record, name) for name, *_ in ExchangeFound._fields_} | {
            "launched": self.launched,
            "what": 0 if fault is None else fault.what,
            "blamed": None if fault is None else fault.detail,
            "at": None if fault is None else fault.layer,
            "fault": None if fault is None else self.sentence(fault.what, fault.layer, fault.detail),
        }

    def sentence(self, what: int, number: int, place: int) -> str:
        """A fault of the probe in words."""
        where = f"exchange {number} (buffer {number % INBOXES})"
        if FAULTS.get(what) == FAULTS[6]:
            rank = place * self.meeting.world // self.setting.places
            return f"rank {rank}'s part of {where}, place {place}, did not come within {self.setting.timeout_ms} ms"
        return f"{FAULTS.get(what, what)} in {where} at place {place}"

    def words(self) -> NDArray[np.uint32]:
        """The inbox: [places here, INBOXES, places, ROWS, columns]."""
        shape = (-1, INBOXES, *self.setting.values.shape[1:])
        found = np.empty(self.inbox.nbytes // 4, np.uint32)
        check(bindings().cuMemcpyDtoH(found.ctypes.data, bindings().CUdeviceptr(self.inbox.address), found.nbytes))
        return found.reshape(shape)

    def close(self) -> None:
        self.wait()
        for one in self._graphs:
            one.close()
        self.inbox.close()
        self._arena.close()
        self.fault.close()

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:  # else everything goes with the process
            self.close()
