"""What an exchange among ranks costs, and the tails that it is part of, beside NCCL's all-reduce of the same size.

    python -m tools.bench_exchange [--ranks 2] [--log]

Starts its ranks itself, a GPU each; 8 rows of 3072 FP32 numbers; all in captured graphs. Times are by each GPU's own
clock, medians over exchanges with the 10th and 90th percentile, and each run's results are checked.

exchange: one launch that pushes its rank's partials to all, polls for theirs and adds them up. Its time is from the
first block's first store to the last block's last sum, and of one exchange the mean over the ranks: what a rank waits
because its peer began later, that peer need not wait, so the mean is the exchange's own time, whatever the clocks and
the launches are apart, as long as that is less than the exchange takes.

attn_tail, mlp_tail: partials are pushed, but for the last word of each row, which comes when all else has been there
for microseconds. Just before it a sign is stored that lies elsewhere in the inbox, and warps of a block of its own poll
the signs of all ranks. The last partial arrives after the last poll that missed a sign was issued, and before the
first that found all of them was back. `seen` counts from the latter, so from when a kernel can know of it at best,
`bound` from the former, a poll's way to memory and back earlier. Both end when the last block of the tail does, which
is after its push has ended.

period: of a graph of nothing else, the time per link: launches and whatever else there is between. all_reduce is
NCCL's; `+ mlp_tail` is that, or the push, and the tail of one rank, or of several.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.cli import Parser, guarded
from cuq1.cuda import abi, graph
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.kernels import exchange, exchange_probe, rows
from cuq1.cuda.launch import launch
from cuq1.cuda.memory import Arena, MappedFault, copy_in
from cuq1.cuda.module import build
from cuq1.errors import DeviceError
from cuq1.models.inbox import Inbox
from cuq1.parallel import Rendezvous
from cuq1.parallel.exchange import SharedInbox
from cuq1.parallel.nccl import Communicator
from cuq1.parallel.rendezvous import RANK
from cuq1.plan.dims import ROWS
from cuq1.plan.kernel import Kernel
from tools.bench import append_row
from tools.exchange_probe import dims, open_rank, start
from tools.gpu import Spread, spread_us
from tools.tracing import Tracer

LINKS = 60  # of a graph; a multiple of abi.INBOXES
REPEATS = 20
SETTLING = 6  # links at a graph's begin that do not count: ranks may be further apart there
PAUSE = 12000  # cycles before the last words of a push

Floats = NDArray[np.float32]


_built = cache(build)


def spread(times: NDArray[Any]) -> Spread:
    """Of nanoseconds."""
    low, middle, high = np.percentile(times / 1e3, [10, 50, 90])
    return Spread(float(middle), float(low), float(high))


class Bench:
    """A rank's memory, and graphs over it."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.meeting = meeting
        self.dims = d = dims(meeting.world)
        self.alone = replace(d, ranks=1)
        self.layout = Inbox(d, meeting.rank)
        self.signs = self.layout.bytes
        signs = abi.INBOXES * meeting.world * ROWS * 4
        self.inbox = SharedInbox(meeting, max(self.signs + signs, abi.INBOXES * meeting.world * ROWS * d.hidden * 4))
        rng = np.random.default_rng(1)
        whole = rng.standard_normal((meeting.world, ROWS, d.hidden)).astype(np.float32)
        logits = rng.standard_normal((meeting.world, 2, ROWS, d.experts)).astype(np.float32)
        self.total = whole[0]
        for one in whole[1:]:
            self.total = self.total + one
        self.held: dict[str, NDArray[Any]] = {
            "peers": self.inbox.distances,
            "partials": whole,
            "sums": self.total,
            "logits": logits[meeting.rank],
            "base": rng.standard_normal((ROWS, d.hidden)).astype(np.float32),
            "norm": rng.uniform(0.5, 2, d.hidden).astype(np.float32),
            "ffn_norm": rng.uniform(0.5, 2, d.hidden).astype(np.float32),
        }
        blocks = exchange_probe.both(d).grid[0]
        row = ROWS * d.hidden
        sizes = {name: value.nbytes for name, value in self.held.items()}
        sizes |= {"h": row * 4, "normed": row * 2, "ids": ROWS * d.top_k * 4, "weights": ROWS * d.top_k * 4}
        sizes |= {"reduced": row * 4, "found": 64, "times": LINKS * max(blocks, exchange_probe.WATCHERS) * 16}
        self.arena = Arena(sizes)
        self.arena.clear()
        for name, value in self.held.items():
            copy_in(self.arena[name], value)
        self.fault = MappedFault()
        self.stream = graph.stream()
        meeting.barrier("bench")

    def graph(self, links: int, link: Callable[[int], None]) -> graph.Graph:
        with graph.capture(self.stream) as captured:
            for number in range(links):
                link(number)
        found = captured.instantiate()
        found.upload(self.stream)
        return found

    def add(self, kernel: Kernel, args: Structure) -> None:
        launch(_built(kernel), args, self.stream)

    def fresh(self) -> None:
        """All inboxes NOT_READY, on all ranks."""
        graph.synchronize(self.stream)
        self.meeting.barrier("ended")
        self.inbox.reset()
        self.meeting.barrier("fresh")

    def read(self, name: str, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        found = np.empty(shape, dtype)
        check(bindings().cuMemcpyDtoH(found.ctypes.data, bindings().CUdeviceptr(self.arena[name]), found.nbytes))
        return found

    def settle(self) -> None:
        graph.synchronize(self.stream)
        fault = self.fault.read()
        if fault is not None:
            raise DeviceError(f"{abi.FAULTS[fault.what]} in link {fault.layer}, of place {fault.detail}")

    def shared(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Every rank's, stacked."""
        return np.array([json.loads(one) for one in self.meeting.gather("times", json.dumps(values.tolist()).encode())])

    def period(self, link: Callable[[int], None]) -> Spread:
        """Microseconds per link."""
        self.fresh()
        with self.graph(LINKS, link) as found:
            whole = spread_us(lambda: found.launch(self.stream), self.stream)
        self.settle()
        return Spread(*(one / LINKS for one in whole))

    # the links

    def both(self, number: int) -> None:
        args = abi.ExchangeProbeArgs(
            fault=self.fault.address,
            layer=number,
            rows=ROWS,
            inbox=self.inbox.address,
            **{name: self.arena[name] for name in ("peers", "partials", "sums", "found", "times")},
            patterns=1,
            place=self.meeting.rank,
            behind=1,
            skipped=-1,
        )
        self.add(exchange_probe.both(self.dims), args)

    def push(self, number: int, name: str, source: int, columns: int, *, timed: bool) -> None:
        args = abi.ExchangePushArgs(
            fault=self.fault.address,
            layer=number,
            rows=ROWS,
            partials=source,
            own=self.inbox.address + self.layout.own(name, number).offset,
            peers=self.arena["peers"],
            signs=self.inbox.address + self.signs if timed else 0,
            times=self.arena["times"],
            columns=columns,
            place=self.meeting.rank,
            pause=PAUSE,
        )
        self.add(exchange_probe.part(self.dims, ROWS * columns, signs=timed), args)

    def own_partials(self) -> int:
        return self.arena["partials"] + self.meeting.rank * ROWS * self.dims.hidden * 4

    def mlp(self, number: int, kernel: Kernel, y: int, ranks: int) -> None:
        args = abi.MlpTailArgs(
            fault=self.fault.address,
            layer=number,
            rows=ROWS,
            y=y,
            h=self.arena["base"],
            next_norm=self.arena["norm"],
            residual=self.arena["h"],
            normed=self.arena["normed"],
            ranks=ranks,
            ffn_scale=0.5,
        )
        self.add(kernel, args)

    def mlp_link(self, number: int, tail: Kernel, *, timed: bool) -> None:
        self.push(number, "y", self.own_partials(), self.dims.hidden, timed=timed)
        self.mlp(number, tail, self.inbox.address + self.layout.whole("y", number).offset, self.dims.ranks)

    def attn_link(self, number: int, tail: Kernel, *, timed: bool) -> None:
        d = self.dims
        for i, name in enumerate(("router_attended", "router_residual")):
            self.push(number, name, self.arena["logits"] + i * ROWS * d.experts * 4, d.experts, timed=False)
        self.push(number, "o", self.own_partials(), d.hidden, timed=timed)
        at = {name: self.inbox.address + self.layout.whole(name, number).offset for name in ("o", *_ROUTER)}
        args = abi.AttnTailArgs(
            fault=self.fault.address,
            layer=number,
            rows=ROWS,
            **at,
            residual=self.arena["base"],
            attn_out_norm=self.arena["norm"],
            ffn_norm=self.arena["ffn_norm"],
            h=self.arena["h"],
            normed=self.arena["normed"],
            expert_ids=self.arena["ids"],
            expert_weights=self.arena["weights"],
            ranks=d.ranks,
            attn_scale=0.5,
            polled=1,
        )
        self.add(tail, args)
        again = abi.RearmArgs(target=at["o"], pieces=self.layout.pieces("o", "router_residual"))
        self.add(exchange.rearm(), again)

    def reduce(self, ranks: Communicator) -> None:
        ranks.all_reduce(self.arena["reduced"], ROWS * self.dims.hidden, self.stream)

    # what is measured

    def exchanges(self) -> NDArray[np.float64]:
        """Nanoseconds of each exchange, the mean over the ranks."""
        self.fresh()
        found = []
        with self.graph(LINKS, self.both) as captured:
            for _ in range(REPEATS):
                captured.launch(self.stream)
                self.settle()
                times = self.read("times", (LINKS, exchange_probe.both(self.dims).grid[0], 2), np.uint64)
                found.append((times[:, :, 1].max(1) - times[:, :, 0].min(1))[SETTLING:].astype(np.int64))
        record = abi.ExchangeFound.from_buffer_copy(self.read("found", (64,), np.uint8).tobytes())
        if record.wrong:
            raise DeviceError(f"{record.wrong} sums of the exchange have other bits than the host's")
        return np.asarray(self.shared(np.array(found)).mean(0).ravel())

    def beyond(self, label: str, kernel: Kernel, link: Callable[..., None], wanted: Floats) -> NDArray[np.float64]:
        """[2, links]: nanoseconds from a tail's last partial to its end: as it is seen, and the bound."""
        self.fresh()
        tracer = Tracer([label])
        kernel = replace(kernel, defines=(*kernel.defines, *tracer.defines[label]))
        tracer.attach([kernel])
        found = []
        with self.graph(LINKS, lambda number: link(number, kernel, timed=True)) as captured:
            for _ in range(REPEATS):
                tracer.clear()
                captured.launch(self.stream)
                self.settle()
                entries = tracer.read()
                ends = np.zeros(LINKS, np.uint64)
                np.maximum.at(ends, entries["layer"], entries["end"])
                times = self.read("times", (LINKS, exchange_probe.WATCHERS, 2), np.uint64)
                since = np.stack([times[:, :, 1].min(1), times[:, :, 0].max(1)])
                found.append((ends.astype(np.int64) - since.astype(np.int64))[:, SETTLING:])
        tracer.close()
        error = float(np.abs(self.read("h", wanted.shape, np.float32) - wanted).max())
        if not error < 1e-4 * float(np.abs(wanted).max()):
            raise DeviceError(f"{label} is wrong by {error}")
        return self.shared(np.concatenate(found, 1)).transpose(1, 0, 2).reshape(2, -1)

    def measure(self) -> list[dict[str, Any]]:
        """All rows of the table, on every rank."""
        d, base = self.dims, self.held["base"].astype(np.float64)
        total = self.total.astype(np.float64)
        rms = np.sqrt((total**2).mean(1, keepdims=True) + d.eps)
        attended = (base + 0.5 * total / rms * self.held["norm"]).astype(np.float32)
        added = (base + 0.5 * total).astype(np.float32)
        tail, attn = rows.mlp_tail(d), rows.attn_tail(d)
        found = [
            row("exchange", spread(self.exchanges())),
            row("exchange, period", self.period(self.both)),
        ]
        for label, kernel, link, wanted in (
            ("attn_tail", attn, self.attn_link, attended),
            ("mlp_tail", tail, self.mlp_link, added),
        ):
            seen, bound = self.beyond(label, kernel, link, wanted)
            found += [row(f"{label}, seen", spread(seen)), row(f"{label}, bound", spread(bound))]
        found.append(row("push + mlp_tail, period", self.period(lambda n: self.mlp_link(n, tail, timed=False))))
        with Communicator(self.meeting) as ranks:
            found.append(row("all_reduce, period", self.period(lambda n: self.reduce(ranks))))
            alone = rows.mlp_tail(self.alone)

            def reduced(number: int) -> None:
                self.reduce(ranks)
                self.mlp(number, alone, self.arena["reduced"], 1)

            found.append(row("all_reduce + mlp_tail, period", self.period(reduced)))
        return found

    def close(self) -> None:
        graph.synchronize(self.stream)
        self.inbox.close()
        self.arena.close()
        self.fault.close()


_ROUTER = ("router_attended", "router_residual")


def row(label: str, us: Spread) -> dict[str, Any]:
    return {"what": label, **{name: round(value, 3) for name, value in us._asdict().items()}}


def _rank(options: argparse.Namespace) -> int:
    with Rendezvous() as meeting:
        device = open_rank(meeting)
        bench = Bench(meeting)
        found = bench.measure()
        if meeting.rank == 0:
            d = bench.dims
            size = ROWS * d.hidden * 4
            print(f"{meeting.world} x {device}, {ROWS} rows of {d.hidden}, {size} bytes to each rank; microseconds")
            print(f"{'':32} {'median':>8} {'10%':>8} {'90%':>8}")
            for one in found:
                print(f"{one['what']:32} {one['median']:8.2f} {one['low']:8.2f} {one['high']:8.2f}")
            results = {"check": "bench", "ranks": meeting.world, "device": device, "bytes": size, "us": found}
            print(json.dumps(results), flush=True)
            if options.log:
                append_row("exchange", results)
        bench.close()
    return 0


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="bench_exchange", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/exchange.jsonl")
    options = parser.parse_args(argv)
    return _rank(options) if RANK in os.environ else start("tools.bench_exchange", options.ranks, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("bench_exchange", lambda: _run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
