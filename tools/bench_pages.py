"""Where a Qwen2 model's decode takes pages of its KV cache: inside the one graph, or in a second graph for boundaries.

    python -m tools.bench_pages --config qwen2.5-coder-7b --context 512 --tokens 512

Shipped is one graph for all tokens, whose embedding takes a page where the position has none. The other design captures
two graphs, of which the host picks by position modulo 16: plain ones embed alone, those at a boundary run a kernel more
that takes the page. Both are timed as the host launches them, waiting for each token, or enqueueing all of them; the
first as the device's loop runs it, too. Weights are random; both designs generate from the same state, and must come to
the same tokens.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import Structure, addressof, memmove, sizeof
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.cli import Parser, guarded
from cuq1.config_qwen2 import parse_qwen2
from cuq1.cuda import abi, graph
from cuq1.cuda.driver import bindings, check, open_device
from cuq1.cuda.execute import Program
from cuq1.cuda.launch import launch
from cuq1.cuda.loop import UNBOUNDED, DeviceLoop
from cuq1.cuda.memory import Arena, Mapped, MappedFault, copy_in
from cuq1.cuda.module import Function, build
from cuq1.cuda.qwen2_weights import qwen2_layout
from cuq1.cuda.weights_device import random_weights
from cuq1.errors import DeviceError
from cuq1.models import loop as loop_plans
from cuq1.models import qwen2
from cuq1.models.qwen2_plans import Qwen2Plans
from cuq1.plan.dims import ROWS
from cuq1.plan.qwen2_dims import PAGE
from cuq1.plan.types import Plan
from tools.bench import append_row, at_least_one
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.gpu import read_ceiling, spread_of

# The embedding of the two-graph design, from the one that is shipped: without the page, and nothing but the page.
_TAKES_A_PAGE = "    if (threadIdx.x == WARP) {"
_HAS_COLUMNS = "    if (column < HIDDEN) {"
_NEVER = "    if (false) {"


class Bench:
    """A model on random weights with its caches, as DeviceLoop wants its runtime, too."""

    def __init__(self, name: str, capacity: int) -> None:
        config = parse_qwen2(qwen2_config(name))
        layout = qwen2_layout(config)
        self.model = qwen2.resolve(config, layout, capacity=capacity)
        self.plans = Qwen2Plans(self.model)
        self.device = open_device()
        self.stream = graph.stream()
        self.ceiling = read_ceiling(self.stream, self.device.arch)
        self.lost = ""
        self._fault, self._upload, self._readback = MappedFault(), Mapped(sizeof(abi.State)), Mapped(sizeof(abi.State))
        buffers = [*qwen2.working_buffers(self.model), *loop_plans.working_buffers()]
        self._arena = Arena({"weights": layout.nbytes, **{b.name: b.bytes for b in buffers if b.name != "fault"}})
        self._arena.clear()
        base = self._arena["weights"]
        random_weights(layout, base, self.stream)
        self.addresses = dict(self._arena.addresses) | {"fault": self._fault.address}
        self.addresses |= {name: base + tensor.offset for name, tensor in layout.tensors.items()}
        for table, values in self.model.inverse_frequencies.items():
            copy_in(self.addresses[table], values)

    def program(self, plan: Plan) -> Program:
        return Program(plan, self.addresses, self.device.arch)

    def start(self, context: int) -> None:
        """A sequence of `context` positions, whose pages are taken, and the state of its next token."""
        pages, table = -(-context // PAGE), self.model.empty["page_table"]
        table[:pages] = np.random.default_rng(context).permutation(self.model.pages)[:pages]
        free = np.setdiff1d(np.arange(self.model.pages, dtype=np.int32), table[:pages])
        self._write("page_table", table)
        self._write("free_pages", np.append(free, np.zeros(pages, np.int32)).astype(np.int32))
        self._write("pages", np.array([len(free), 0, 0, 0], np.int32))
        self.send(state_of(context))

    def check_pages(self, positions: int) -> None:
        """Raises DeviceError unless these positions have pages, of which none is taken twice."""
        table = self.read("page_table", self.model.pages)
        taken = table[: -(-positions // PAGE)]
        if (taken < 0).any() or len(set(taken.tolist())) < len(taken) or (table[len(taken) + 1 :] >= 0).any():
            raise DeviceError(f"{positions} positions have the pages {taken.tolist()}")

    def _write(self, name: str, values: NDArray[np.int32]) -> None:
        copy_in(self.addresses[name], values)

    def read(self, name: str, count: int) -> NDArray[np.int32]:
        out = np.empty(count, np.int32)
        check(bindings().cuMemcpyDtoH(out.ctypes.data, bindings().CUdeviceptr(self.addresses[name]), out.nbytes))
        return out

    def send(self, state: abi.State) -> None:
        self.wait()
        memmove(self._upload.address, addressof(state), sizeof(state))
        self.copy("state", self._upload.address, sizeof(state))
        self.wait()

    def copy(self, name: str, source: int, size: int) -> None:
        driver = bindings()
        pointer = driver.CUdeviceptr(self.addresses[name])
        check(driver.cuMemcpyHtoDAsync(pointer, source, size, driver.CUstream(self.stream)))

    def read_back(self) -> None:
        """Enqueues a copy of the state to the host."""
        driver = bindings()
        source = driver.CUdeviceptr(self.addresses["state"])
        check(driver.cuMemcpyDtoHAsync(self._readback.address, source, sizeof(abi.State), driver.CUstream(self.stream)))

    @property
    def state(self) -> abi.State:
        return abi.State.from_address(self._readback.address)

    def wait(self) -> None:
        graph.synchronize(self.stream)
        fault = self._fault.read()
        if fault is not None:
            raise DeviceError(
                f"{abi.FAULTS.get(fault.what)} in {abi.KERNELS.get(fault.kernel)} (detail {fault.detail})"
            )

    def check_alive(self) -> None:
        """Nothing of this is left running."""

    def meet(self) -> None:
        """There are no other ranks."""


def state_of(context: int) -> abi.State:
    state = abi.State()
    state.temperature, state.top_p, state.top_k, state.seed_lo = 1.0, 0.95, 20, 1
    state.done, state.tokens[0], state.positions[0] = context, 1, context
    return state


class Tokens:
    """The launches of a token, as designs capture them."""

    def __init__(self, bench: Bench, *, short: bool) -> None:
        plan = bench.plans.round_of(1, 0, short=short)
        first, *_ = plan.launches
        if first.label != "embed":
            raise AssertionError(f"the plan begins with {first.label}")
        self._bench, self._program = bench, bench.program(plan)
        self._args: Structure = first.structure(dict(bench.addresses))
        kernel, arch = first.kernel, bench.device.arch
        self._embed = build(kernel, arch)
        self._plain = build(kernel, arch, (_TAKES_A_PAGE, _NEVER))
        self._page = build(replace(kernel, grid=(1, 1, 1)), arch, (_HAS_COLUMNS, _NEVER))

    def captured(self, *firsts: Function) -> graph.Graph:
        """A token whose embedding is these launches; its end is on its way to the host."""
        stream = self._bench.stream
        with graph.capture(stream) as captured:
            for function in firsts:
                launch(function, self._args, stream)
            self._program.issue(stream, 1)
            self._bench.read_back()
        ready = captured.instantiate()
        ready.upload(stream)
        return ready

    def designs(self, stack: ExitStack) -> dict[str, tuple[graph.Graph, graph.Graph]]:
        """Of each design, the graphs of a token within a page and of one that begins a page."""
        one, plain, boundary = (
            stack.enter_context(self.captured(*firsts))
            for firsts in ((self._embed,), (self._plain,), (self._page, self._plain))
        )
        return {"one graph": (one, one), "two graphs": (plain, boundary)}


def waiting(bench: Bench, graphs: tuple[graph.Graph, graph.Graph], context: int, tokens: int) -> tuple[Any, list[int]]:
    """Microseconds of each token, launched, waited for and read, by the host's clock; and the tokens."""
    bench.start(context)
    times, found = [], []
    for position in range(context, context + tokens):
        begin = time.perf_counter()
        graphs[position % PAGE == 0].launch(bench.stream)
        graph.synchronize(bench.stream)
        found.append(int(bench.state.tokens[0]))
        times.append(1e6 * (time.perf_counter() - begin))
    bench.wait()
    bench.check_pages(context + tokens)
    return times, found


def enqueued(bench: Bench, graphs: tuple[graph.Graph, graph.Graph], context: int, tokens: int) -> tuple[Any, list[int]]:
    """Microseconds of each token by events between them, launched without waiting; and the last token."""
    driver, handle = bindings(), bindings().CUstream(bench.stream)
    flags = driver.CUevent_flags.CU_EVENT_DEFAULT.value
    events = [check(driver.cuEventCreate(flags)) for _ in range(tokens + 1)]
    bench.start(context)
    check(driver.cuEventRecord(events[0], handle))
    for number, event in enumerate(events[1:]):
        graphs[(context + number) % PAGE == 0].launch(bench.stream)
        check(driver.cuEventRecord(event, handle))
    bench.wait()
    bench.check_pages(context + tokens)
    times = [1e3 * float(check(driver.cuEventElapsedTime(a, b))) for a, b in pairwise(events)]
    for event in events:
        check(driver.cuEventDestroy(event))
    return times, [int(bench.state.tokens[0])]


def on_device(bench: Bench, loop: DeviceLoop, context: int, tokens: int) -> tuple[Any, list[int]]:
    """Microseconds of each token by the GPU's clock, from one control kernel's end to the next one's; and the tokens.

    The request's first token is drawn from the logits as they stand: tokens are not those of the host's launches.
    """
    bench.start(context)
    state = state_of(context)
    loop.start(state, tokens + 1, (), context, UNBOUNDED)
    records = [loop.next()]
    while records[-1].reason in (abi.END_NONE, abi.END_PAUSED):
        records.append(loop.next())
    bench.wait()
    bench.check_pages(context + tokens)
    return [(record.ended - record.launched) / 1e3 for record in records[1:]], []


def parts_of(times: Sequence[float], context: int) -> dict[str, Any]:
    """Medians with the 10th and 90th percentile, of all tokens, and of those that begin a page."""
    starts = np.array([(context + number) % PAGE == 0 for number in range(len(times))])
    every = np.asarray(times)
    spread = spread_of(every.tolist())
    return {
        "us": round(spread.median, 2),
        "p10": round(spread.low, 2),
        "p90": round(spread.high, 2),
        "mean": round(float(every.mean()), 2),
        "at_boundaries": round(float(np.median(every[starts])), 2),
        "elsewhere": round(float(np.median(every[~starts])), 2),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("bench_pages", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.bench_pages", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="qwen2.5-coder-7b", choices=NAMES, help="sizes of the random model")
    parser.add_argument("--context", type=at_least_one, default=512, help="positions cached before the first token")
    parser.add_argument("--tokens", type=at_least_one, default=512)
    parser.add_argument("--repeats", type=at_least_one, default=2, help="times that the variants take turns")
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/pages.jsonl")
    args = parser.parse_args(argv)
    bench = Bench(args.config, args.context + args.tokens + 2 * ROWS)
    short = bench.model.is_short(args.context + args.tokens)
    report: dict[str, Any] = {"gpu": bench.device.name, "config": args.config, "context": args.context}
    report |= {"tokens": args.tokens, "short": short, "ceiling_gbps": round(bench.ceiling)}
    times: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        designs = Tokens(bench, short=short).designs(stack)
        loop = DeviceLoop(bench, 0)  # type: ignore[arg-type]  # what it uses of a Runtime is there
        stack.callback(loop.close)
        for _ in range(args.repeats + 1):  # the first turn warms up
            came: dict[str, list[int]] = {}
            for how, measure in (("waiting", waiting), ("enqueued", enqueued)):
                for name, graphs in designs.items():
                    taken, found = measure(bench, graphs, args.context, args.tokens)
                    times.setdefault(f"{name}, {how}", []).append(taken)
                    came[f"{name}, {how}"] = found
            taken, _ = on_device(bench, loop, args.context, args.tokens)
            times.setdefault("one graph, on the device", []).append(taken)
            if len({found[-1] for found in came.values()}) > 1:
                raise DeviceError(f"the designs come to different tokens: {came}")
            if came["one graph, waiting"] != came["two graphs, waiting"]:
                raise DeviceError("the designs come to different tokens")
    for name, turns in times.items():
        report[name] = [parts_of(turn, args.context) for turn in turns[1:]]
    print(json.dumps(report), flush=True)
    if args.log:
        append_row("pages", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
