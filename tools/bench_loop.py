"""The decode loop of one rank on random weights: a round as the device runs it, and as the host steps it.

    python -m tools.bench_loop --config iquest-q1 --tp 8 --drafts 5 --force-accept 3 --context 1024 --rounds 500

Timing must not depend on what random weights accept: --force-accept has each round accept that many of its drafts.
Routing is drawn to a number of distinct experts a layer, as in bench_round. Times are the log's, by the GPU's clock,
from one round's end to the next one's; the host's are wall time over as many rounds, with its read of the state.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from ctypes import addressof, memmove, sizeof
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cuq1.cli import Parser, guarded
from cuq1.cuda import abi, graph
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.execute import Program
from cuq1.cuda.loop import UNBOUNDED, DeviceLoop
from cuq1.cuda.memory import Arena, Mapped
from cuq1.models import decode, q1
from cuq1.models import loop as plans
from cuq1.plan.dims import DRAFT, ROWS
from cuq1.plan.types import Defines, Launch, Plan, Ref
from tools.bench import append_row, at_least_one
from tools.bench_round import ASSETS, Bench, contexts


class Rank:
    """A Bench as the device's loop wants its runtime: the same memory, with forced routing and acceptance."""

    def __init__(self, bench: Bench, accepted: int) -> None:
        self.model, self.stream = bench.model, bench.stream
        self._arena = Arena({b.name: b.bytes for b in plans.working_buffers()})
        self.addresses = bench.addresses | self._arena.addresses
        self._defines: dict[str, Defines] = {"accept": (("FORCE_ACCEPT", accepted),)}
        self._upload, self.readback = Mapped(sizeof(abi.State)), Mapped(sizeof(abi.State))
        self.lost = ""

    def program(self, plan: Plan) -> Program:
        launches = tuple(self._forced(launch) for launch in plan.launches)
        names = {ref.buffer for launch in launches for _, ref in launch.refs()}
        buffers = {b.name: b for b in (*plan.buffers, *q1.working_buffers(self.model)) if b.name in names}
        return Program(Plan(tuple(buffers.values()), launches).with_defines(self._defines), self.addresses)

    def _forced(self, launch: Launch) -> Launch:
        """Routing from what Bench.place has drawn, where a launch routes."""
        if not launch.args.get("router_attended") or "forced_ids" not in launch.args:
            return launch
        index = len(self.model.layers) if launch.layer == DRAFT else launch.layer
        ids = Ref("forced_ids", index * ROWS * self.model.dims.top_k * 4)
        return replace(launch, args={**launch.args, "forced_ids": ids})

    def send(self, state: abi.State) -> None:
        self.wait()
        memmove(self._upload.address, addressof(state), sizeof(state))
        self.copy("state", self._upload.address, sizeof(state))

    def copy(self, name: str, source: int, size: int) -> None:
        driver = bindings()
        pointer = driver.CUdeviceptr(self.addresses[name])
        check(driver.cuMemcpyHtoDAsync(pointer, source, size, driver.CUstream(self.stream)))

    def wait(self) -> None:
        graph.synchronize(self.stream)

    def check_alive(self) -> None:
        pass


def request(context: int, drafts: int) -> abi.State:
    state = abi.State()
    state.temperature, state.top_p, state.top_k, state.seed_lo = 1.0, 0.95, 20, 1
    state.draft_limit, state.done = drafts, context
    return state


def on_device(rank: Rank, args: argparse.Namespace, context: int) -> dict[str, float]:
    """Microseconds of a round and its parts: medians over the log."""
    loop = DeviceLoop(rank, args.drafts)  # type: ignore[arg-type]  # what it uses of a Runtime is there
    loop.start(request(context, args.drafts), args.rounds * (args.force_accept + 1) + 1, (), context, UNBOUNDED)
    records = [loop.next()]
    while records[-1].reason in (abi.END_NONE, abi.END_PAUSED):
        records.append(loop.next())
    loop.close()
    steady = [record for record in records[2:] if record.accepted == args.force_accept]
    parts: dict[str, Callable[[abi.Record], int]] = {
        "round": lambda r: r.ended - r.launched,
        "verification": lambda r: r.verified - r.launched,
        "drafting": lambda r: r.ended - r.verified,
    }
    found = {name: float(np.median([part(record) for record in steady])) / 1e3 for name, part in parts.items()}
    spread = np.percentile([record.ended - record.launched for record in steady], [10, 90]) / 1e3
    return {**found, "p10": float(spread[0]), "p90": float(spread[1]), "rounds": len(steady)}


def on_host(rank: Rank, args: argparse.Namespace, context: int, *, device: bool = False) -> float:
    """Microseconds of a round that the host launches, waits for and reads. device: as the loop's graphs are made."""
    rows = args.drafts + 1
    short = rank.model.is_short(context)
    driver, stream = bindings(), bindings().CUstream(rank.stream)
    first = rank.program(decode.first_of(rank.model, args.drafts))
    whole = rank.program(decode.round_of(rank.model, rows, args.drafts, short=short))
    with graph.capture(rank.stream) as captured:
        whole.issue(rank.stream)
        source = driver.CUdeviceptr(rank.addresses["state"])
        check(driver.cuMemcpyDtoHAsync(rank.readback.address, source, sizeof(abi.State), stream))
    state = abi.State.from_address(rank.readback.address)
    with captured.instantiate(device=device) as ready:
        ready.upload(rank.stream)
        rank.send(request(context, args.drafts))
        first.issue(rank.stream)
        rank.wait()
        times = []
        for _ in range(args.rounds):
            start = time.perf_counter()
            ready.launch(rank.stream)
            rank.wait()
            tokens = tuple(state.log_tokens[: state.log_count])
            times.append(time.perf_counter() - start)
            assert len(tokens) == args.force_accept + 1
    return float(np.median(times)) * 1e6


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("bench_loop", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.bench_loop", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="iquest-q1", help="a folder of cuq1/assets, or a path")
    parser.add_argument("--tp", type=at_least_one, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--drafts", type=at_least_one, default=5)
    parser.add_argument("--force-accept", type=int, default=3, metavar="N", help="drafts that every round accepts")
    parser.add_argument("--context", type=contexts, default=[1024], help="positions cached: 1024, a list, or sweep")
    parser.add_argument("--experts", type=float, default=37.7, help="distinct experts a layer")
    parser.add_argument("--rounds", type=at_least_one, default=300)
    parser.add_argument("--fp8-activations", action="store_true")
    parser.add_argument("--log", action="store_true", help="append rows to tools/benchlog/loop.jsonl")
    args = parser.parse_args(argv)
    if not 0 <= args.force_accept <= args.drafts:
        parser.error(f"--force-accept must be 0 to {args.drafts}, the number of drafts")
    folder = Path(args.config) if Path(args.config).is_dir() else ASSETS / args.config
    room = (args.rounds + 2) * (args.force_accept + 1) + 2 * ROWS
    bench = Bench(folder, args.tp, args.rank, max(args.context) + room, 0, fp8_activations=args.fp8_activations)
    rank = Rank(bench, args.force_accept)
    for context in args.context:
        bench.place(context, args.drafts + 1, args.drafts, args.experts)
        report: dict[str, Any] = {
            "gpu": bench.name,
            "config": args.config,
            "tp": args.tp,
            "drafts": args.drafts,
            "accepted": args.force_accept,
            "context": context,
            "experts": args.experts,
            "host_us": [on_host(rank, args, context)],
            "device_us": [on_device(rank, args, context)],
            "ceiling_gbps": bench.ceiling,
        }
        report["host_us"].append(on_host(rank, args, context))
        report["device_us"].append(on_device(rank, args, context))
        report["host_us_of_such_a_graph"] = on_host(rank, args, context, device=True)
        print(json.dumps(report), flush=True)
        if args.log:
            append_row("loop", {"check": "bench", **report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
