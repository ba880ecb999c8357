"""One decode round of one rank, on random weights: what each kernel takes, and the round against its floor.

    python -m tools.bench_round --config iquest-q1 --tp 8 --rank 0 --rows 4..8 --drafts 5 --context 1024 --experts 37.7

Routing is drawn to the given number of distinct experts a layer; other ranks' contributions are taken as zero. A
kernel's time is that of a chain of all its launches of the round, each with its own layer's weights, so it holds what
a dependent launch costs. Floor: the bytes that must be read, over the read bandwidth measured in the same run.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.cli import Parser, guarded
from cuq1.config import load_config
from cuq1.cuda import abi, graph
from cuq1.cuda.driver import bindings, check, open_device
from cuq1.cuda.execute import Program
from cuq1.cuda.memory import Arena, MappedFault, copy_in
from cuq1.cuda.weights import weights_plan
from cuq1.cuda.weights_device import random_weights
from cuq1.errors import DeviceError, RequestError
from cuq1.models import decode, q1
from cuq1.parallel.exchange import SharedInbox
from cuq1.parallel.rendezvous import Rendezvous
from cuq1.plan.dims import DRAFT, ROWS
from cuq1.plan.types import Plan
from tools.bench import ROOT, append_row
from tools.gpu import Spread, read_ceiling, spread_us

ASSETS = ROOT / "cuq1" / "assets"
SWEEP = (1024, 4096, 16384, 32768, 65536, 131072, 196608)


def routing(rng: np.random.Generator, rows: int, experts: int, top_k: int, distinct: int) -> NDArray[np.int32]:
    """Expert ids [ROWS, top_k] of which the first `rows` rows choose exactly `distinct` different ones.

    Raises RequestError where that is impossible.
    """
    if not top_k <= distinct <= min(experts, rows * top_k):
        raise RequestError(
            f"{rows} rows cannot choose {distinct} distinct experts of {experts}: give {top_k} to "
            f"{min(experts, rows * top_k)}"
        )
    pool = rng.permutation(experts)[:distinct]
    ids = np.zeros((ROWS, top_k), np.int32)
    unused = list(pool)
    for row in range(rows):
        # every expert of the pool is taken once before any is shared
        own = [unused.pop() for _ in range(min(top_k, len(unused)))]
        rest = [expert for expert in rng.permutation(pool) if expert not in own][: top_k - len(own)]
        ids[row] = rng.permutation(own + rest)
    return ids


def within_reach(distinct: float, rows: int, experts: int, top_k: int) -> float:
    """The distinct experts that `rows` rows can choose, where `distinct` asks for more or fewer."""
    return max(float(top_k), min(distinct, float(experts), float(rows * top_k)))


def _told(plan: Plan) -> Plan:
    """The plan where launches wait for their predecessor's end, if not all of those are there that they poll for."""
    launches = list(plan.launches)
    for drafting in (False, True):
        part = [i for i, one in enumerate(launches) if (one.layer == DRAFT) == drafting]
        labels = {launches[i].label for i in part}
        told = {"attn_tail", "gate_up", "down"} <= labels
        for i in part:
            one = launches[i]
            off = set() if told else {"routed", "polled"}
            if "o_proj" not in labels:
                off |= {"unready", "polled"} if one.label == "attn_tail" else {"unready"}
            launches[i] = replace(one, args={name: 0 if name in off else value for name, value in one.args.items()})
    return Plan(plan.buffers, tuple(launches))


class Bench:
    """A rank with random weights and caches, and the state of a round at a position.

    meeting: of the ranks that exchange their results, where there are several; each takes the GPU of its number there.
    model: the rank alone; exchanging: with the others of the meeting.
    """

    def __init__(
        self,
        config_dir: Path,
        tp: int,
        rank: int,
        capacity: int,
        seed: int,
        *,
        fp8_activations: bool,
        meeting: Rendezvous | None = None,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        config, draft = load_config(config_dir)
        layout = weights_plan(config, draft, tp, rank)
        ranks, place = (1, 0) if meeting is None else (meeting.world, meeting.rank)
        device = open_device(place)
        self.name = device.name
        size: dict[str, Any] = {"tp": tp, "rank": rank, "capacity": capacity, "sms": device.multiprocessors}
        self.model, self.exchanging = (
            q1.resolve(config, draft, layout, **size, fp8_activations=fp8_activations, ranks=count, place=number)
            for count, number in ((1, 0), (ranks, place))
        )
        self.stream = graph.stream()
        self.ceiling = read_ceiling(self.stream, device.arch)
        self.fault = MappedFault()
        # Of every form that a round may have.
        buffers = {b.name: b.bytes for b in q1.working_buffers(replace(self.exchanging, folded=False))}
        mapped = {name: buffers.pop(name) for name in ("fault", "inbox") if name in buffers}
        self.arena = Arena({"weights": layout.nbytes, **buffers, "state0": 1 << 16})
        self.arena.clear()
        base = self.arena["weights"]
        random_weights(layout, base, self.stream, seed)
        self.addresses = dict(self.arena.addresses) | {"fault": self.fault.address}
        self.addresses |= {name: base + tensor.offset for name, tensor in layout.tensors.items()}
        if meeting is not None:
            self.inbox = SharedInbox(meeting, mapped["inbox"])
            self.addresses["inbox"] = self.inbox.address
            self.write("peers", self.inbox.distances)
        for name, table in self.model.inverse_frequencies.items():
            self.write(name, table)
        self._fill_caches()

    def write(self, name: str, values: NDArray[np.generic]) -> None:
        copy_in(self.addresses[name], values)

    def _fill_caches(self) -> None:
        """Random halves in every cache: a pattern drawn once, copied over it."""
        driver = bindings()
        pattern = self.rng.standard_normal(1 << 20).astype(np.float16)
        for buffer in q1.cache_buffers(self.model):
            address = self.addresses[buffer.name]
            done = min(buffer.bytes, pattern.nbytes)
            copy_in(address, pattern[: done // pattern.itemsize])
            while done < buffer.bytes:
                step = min(done, buffer.bytes - done)
                check(driver.cuMemcpyDtoD(driver.CUdeviceptr(address + done), driver.CUdeviceptr(address), step))
                done += step

    def place(self, context: int, rows: int, drafts: int, distinct: float) -> None:
        """Positions of a round that follows `context` cached ones, and routing for every layer."""
        state = abi.State()
        state.temperature, state.top_p, state.top_k = 1.0, 0.95, 20
        state.seed_lo = 1
        state.draft_limit, state.done, state.drafts = drafts, context, rows - 1
        vocab = self.model.config.vocab_size
        for i in range(rows):
            state.tokens[i], state.positions[i] = int(self.rng.integers(vocab)), context + i
        for i in range(rows - 1):
            state.q_count[i], state.q_ids[i][0], state.q_probs[i][0] = 1, state.tokens[i + 1], 1.0
        state.depth_rows[0] = 1
        for depth in range(1, drafts):
            state.depth_rows[depth] = 1
        state.draft_positions[0] = context
        record = np.frombuffer(bytes(state), np.uint8)
        self.write("state0", record)
        self.write("state", record)
        d = self.model.dims
        distinct = within_reach(distinct, rows, d.experts, d.top_k)
        low = int(distinct)
        counts = [low + int(self.rng.random() < distinct - low) for _ in self.model.layers]
        forced = [routing(self.rng, rows, d.experts, d.top_k, count) for count in counts]
        forced.append(routing(self.rng, 1, d.experts, d.top_k, d.top_k))
        self.write("forced_ids", np.stack(forced).astype(np.int32))

    def reset(self) -> None:
        """Enqueues a copy of the state that `place` set to where rounds have theirs."""
        driver = bindings()
        source, target = (driver.CUdeviceptr(self.addresses[name]) for name in ("state0", "state"))
        check(driver.cuMemcpyDtoDAsync(target, source, self.arena.sizes["state"], driver.CUstream(self.stream)))

    def captured(self, plan: Plan, *, reset: bool) -> graph.Graph:
        """A plan's graph. reset: it begins with the state that `place` set."""
        program = Program(_told(plan), self.addresses)
        with graph.capture(self.stream) as captured:
            if reset:
                self.reset()
            program.issue(self.stream)
        ready = captured.instantiate()
        ready.upload(self.stream)
        return ready

    def check_faults(self) -> None:
        """Raises DeviceError for what kernels have reported."""
        fault = self.fault.read()
        if fault is not None:
            where = f"{abi.KERNELS.get(fault.kernel)} of layer {fault.layer}"
            raise DeviceError(f"{abi.FAULTS.get(fault.what)} appeared in {where} (detail {fault.detail})")

    def time(self, plan: Plan, repeats: int, *, reset: bool) -> Spread:
        """One replay of a plan's graph. reset: as in `captured`."""
        with self.captured(plan, reset=reset) as ready:
            spread = spread_us(lambda: ready.launch(self.stream), self.stream, repeats)
        self.check_faults()
        return spread

    def plan(self, model: q1.Model, rows: int, drafts: int, context: int, distinct: float) -> Plan:
        """A round of `model`, one of the rank's, with the routing that `place` draws."""
        short = model.is_short(context)
        return decode.round_of(model, rows, drafts, context=context, distinct=distinct, forced=True, short=short)

    def round(self, rows: int, drafts: int, context: int, distinct: float, repeats: int) -> tuple[Plan, Spread]:
        self.place(context, rows, drafts, distinct)
        plan = self.plan(self.model, rows, drafts, context, distinct)
        return plan, self.time(plan, repeats, reset=True)

    def kernels(self, plan: Plan, repeats: int) -> list[dict[str, float | str]]:
        """Each kernel's launches of the plan in a chain of their own, and the experts' two together.

        These two poll for what the attention tail tells them. `told` is what they add to a chain of it, where they do;
        without it they wait for their predecessor's end.
        """
        found: list[dict[str, float | str]] = []
        groups: dict[str, list[str]] = {}
        for launch in plan.launches:
            part = "draft" if launch.layer == DRAFT else "target"
            groups.setdefault(f"{part} {launch.label}", [launch.label])
        if "target gate_up" in groups:
            groups["target gate_up + down"] = ["gate_up", "down"]
            groups["target gate_up + down, told"] = ["attn_tail", "gate_up", "down"]
        for name, labels in groups.items():
            drafting = name.startswith("draft")
            chosen = tuple(one for one in plan.launches if one.label in labels and (one.layer == DRAFT) == drafting)
            total = self.time(Plan(plan.buffers, chosen), repeats, reset=False).median
            if name.endswith(", told"):
                alone = tuple(one for one in chosen if one.label == "attn_tail")
                total -= self.time(Plan(plan.buffers, alone), repeats, reset=False).median
            size = sum(one.read_bytes for one in chosen)
            found.append(
                {
                    "kernel": name,
                    "count": len(chosen) // len(labels),
                    "us": total / (len(chosen) // len(labels)),
                    "bytes": size / (len(chosen) // len(labels)),
                    "gbps": size / total / 1e3,
                    "of_ceiling": size / total / 1e3 / self.ceiling,
                }
            )
        return found

    def marginal(self, plan: Plan, whole: Spread, repeats: int) -> list[dict[str, float | str]]:
        """What the round gains where all launches of one kernel are left out, which counts what overlaps."""
        found: list[dict[str, float | str]] = []
        for name in dict.fromkeys(("draft " if one.layer == DRAFT else "target ") + one.label for one in plan.launches):
            kept = tuple(
                one for one in plan.launches if ("draft " if one.layer == DRAFT else "target ") + one.label != name
            )
            count = len(plan.launches) - len(kept)
            gained = whole.median - self.time(Plan(plan.buffers, kept), repeats, reset=True).median
            found.append({"kernel": name, "count": count, "us": gained / count, "total_us": gained})
        return found


def span(text: str) -> list[int]:
    """`8`, `4..8` or `4,6,8`."""
    if ".." in text:
        low, high = map(int, text.split(".."))
        found = list(range(low, high + 1))
    else:
        found = [int(part) for part in text.split(",")]
    if not found or not all(1 <= rows <= ROWS for rows in found):
        raise ValueError(text)
    return found


def contexts(text: str) -> list[int]:
    """`1024`, `1024,4096` or `sweep`."""
    found = list(SWEEP) if text == "sweep" else [int(part) for part in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError(text)
    return found


def ranks_of(text: str) -> list[int]:
    """`0,1`: two ranks or more, each once."""
    found = [int(part) for part in text.split(",")]
    if not 2 <= len(found) <= abi.MAX_RANKS or len(set(found)) < len(found) or min(found) < 0:
        raise ValueError(text)
    return found


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m tools.bench_round", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="iquest-q1", help="a folder of cuq1/assets, or a path")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=ranks_of, help="ranks that exchange, a GPU each, as 0,1 (tools/bench_ranks.py)")
    parser.add_argument("--unfolded", action="store_true", help="with --ranks: also with routing that is not folded")
    parser.add_argument("--rows", type=span, default=[8], help="rows to verify: 8, 4..8 or 4,6,8")
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--context", type=contexts, default=[1024], help="positions cached: 1024, a list, or sweep")
    parser.add_argument("--capacity", type=int, help="positions that the caches hold; the largest context by default")
    parser.add_argument("--experts", type=float, default=37.7, help="distinct experts a layer")
    parser.add_argument("--fp8-activations", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="also each kernel by itself")
    parser.add_argument("--marginal", action="store_true", help="also the round without each kernel")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-log", action="store_true", help="append no row to tools/benchlog/round.jsonl")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return guarded("bench_round", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    args = arguments(argv)
    if args.ranks is not None:
        from tools import bench_ranks  # noqa: PLC0415  (which imports this module)

        return bench_ranks.run(args, sys.argv[1:] if argv is None else argv)
    if args.unfolded:
        raise RequestError("--unfolded goes with --ranks: a rank alone is what tools/check_routing.py --time compares")
    folder = Path(args.config) if Path(args.config).is_dir() else ASSETS / args.config
    capacity = max(args.capacity or 0, *args.context)
    bench = Bench(folder, args.tp, args.rank, capacity, args.seed, fp8_activations=args.fp8_activations)
    print(f"{bench.name}, read ceiling {bench.ceiling:.0f} GB/s")
    print(
        f"{'rows':>4} {'drafts':>6} {'context':>8} {'experts':>7} {'round µs':>9} {'p10':>8} {'p90':>8} "
        f"{'GB':>6} {'floor µs':>8} {'of floor':>8}"
    )
    for context in args.context:
        for rows in args.rows:
            d = bench.model.dims
            distinct = within_reach(args.experts, rows, d.experts, d.top_k)
            plan, spread = bench.round(rows, args.drafts, context, distinct, args.repeats)
            size = sum(one.read_bytes for one in plan.launches)
            floor = size / bench.ceiling / 1e3
            print(
                f"{rows:4} {args.drafts:6} {context:8} {distinct:7.1f} {spread.median:9.1f} {spread.low:8.1f} "
                f"{spread.high:8.1f} {size / 1e9:6.3f} {floor:8.1f} {floor / spread.median:8.1%}",
                flush=True,
            )
            table = bench.kernels(plan, args.repeats) if args.kernels and rows == max(args.rows) else []
            for one in table:
                print(
                    f"  {one['kernel']:24} x{one['count']:4} {one['us']:8.2f} µs {one['bytes'] / 1e6:9.3f} MB "  # type: ignore[operator]
                    f"{one['gbps']:8.0f} GB/s {one['of_ceiling']:7.1%}"
                )
            if args.marginal and rows == max(args.rows):
                for one in bench.marginal(plan, spread, args.repeats):
                    print(f"  without {one['kernel']:20} x{one['count']:4} {one['us']:7.2f} µs, {one['total_us']:7.1f}")
            if not args.no_log:
                append_row(
                    "round",
                    {
                        "gpu": bench.name,
                        "config": args.config,
                        "tp": args.tp,
                        "rank": args.rank,
                        "rows": rows,
                        "drafts": args.drafts,
                        "context": context,
                        "capacity": capacity,
                        "experts": distinct,
                        "fp8_activations": args.fp8_activations,
                        "us": spread._asdict(),
                        "bytes": size,
                        "ceiling_gbps": bench.ceiling,
                        "of_floor": floor / spread.median,
                        "kernels": table,
                    },
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
