"""Hold the decode loop that the device runs against the one that the host steps, on nano.

    python -m tools.check_loop [equal ends gap drafting threshold distribution million stall] [--log] ...

equal: the same tokens, records, reasons and caches, bit for bit, over mixed requests. ends: budgets, stop tokens at
every place, the context's end, cancellation. gap: from a round's last kernel to the next one's first, by the GPU's
clock, of both loops. drafting: time per token with the stop rule against the best fixed depth, paired, and what ran at
each depth. threshold: the same under other thresholds of the rule. distribution: sampled tokens against exact
probabilities, with wrong rules as the control. million: a million tokens in requests of random length. stall: a round
that never ends.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.cli import Parser, guarded
from cuq1.cuda.driver import bindings, check, require
from cuq1.cuda.engine import CudaEngine
from cuq1.cuda.loop import UNBOUNDED
from cuq1.errors import DeviceError
from cuq1.sampling import DecodeParams
from tools.bench import ROOT, append_row, at_least_one, nano
from tools.check_distribution import FALSE_ALARM, p_values
from tools.loop_common import Report, finished, flat, opened, timed, traced
from tools.loop_drafting import check_drafting, check_threshold
from tools.tracing import Span, spans

CROSSING = 1000  # times a prompt, to have more tokens than any short context


def caches(engine: CudaEngine) -> dict[str, Any]:
    """Every cache as a CuPy array over the engine's memory."""
    cupy = require("cupy")
    runtime, found = engine._runtime, {}
    for name, size in runtime.sizes.items():
        if name.endswith("_cache"):
            memory = cupy.cuda.UnownedMemory(runtime.addresses[name], size, runtime)
            found[name] = cupy.ndarray((size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(bool((array == other[name]).all()) for name, array in one.items())


def mixed(number: int, rng: np.random.Generator) -> DecodeParams:
    """A request of some temperature, filter, draft and budget."""
    drafts: tuple[Any, ...] = ("auto", "auto", 7, 3, 5, 1, 2, "off")
    return DecodeParams(
        temperature=(0.0, 1.0, 0.7)[number % 3],
        top_k=int(rng.integers(1, 33)),
        top_p=float(rng.uniform(0.5, 1.0)),
        seed=int(rng.integers(2**63)),
        draft=drafts[number % len(drafts)],
        max_tokens=int(rng.integers(1, 120)),
    )


def beside(host: CudaEngine, device: CudaEngine, ids: Sequence[int], params: DecodeParams) -> list[tuple[Any, ...]]:
    """Of a request on each loop: its rounds and reason, the sequence, and the rounds of another one behind it.

    The device drafts nothing where a request ends, the host's loop does: the request behind it overwrites what that
    left in the draft's cache, up to twelve positions further.
    """
    following = replace(params, draft=7, max_tokens=24, stop_tokens=())
    return [(finished(engine, ids, params), engine.tokens, list(engine.decode(following))) for engine in (host, device)]


def check_equal(options: argparse.Namespace) -> Report:
    """Requests on both loops; each one again with a stop token at a place of its output that walks through rounds."""
    rng = np.random.default_rng(options.seed)
    prompts = nano()[2](24, 31)
    differing, offsets, reasons, rounds = [], set(), {"stop": 0, "length": 0}, 0
    with opened("host") as host, opened("device") as device:
        held = caches(host), caches(device)
        for number in range(options.requests):
            ids, params = prompts[number % len(prompts)], mixed(number, rng)
            if number % 20 == 7:  # from the kernels for short contexts to the others, within the request
                ids = (ids * CROSSING)[: host._model.short_context - 1 - int(rng.integers(60))]
            if number % 2:  # with stop tokens: one that is not there, and one that is
                (whole, _), *_ = beside(host, device, ids, params)[0]
                tokens = flat(whole)
                place = int(rng.integers(len(tokens)))
                params = replace(params, stop_tokens=(4095, tokens[place], 4094))
                stopped = tokens.index(tokens[place])
                starts = np.cumsum([0, *map(len, whole)])
                at = int(np.searchsorted(starts, stopped, side="right")) - 1
                offsets.add((stopped - int(starts[at]), stopped - int(starts[at]) == len(whole[at]) - 1))
            expected, got = beside(host, device, ids, params)
            reasons[str(expected[0][1])] += 1
            rounds += len(expected[0][0])
            if expected != got or not same(*held):
                differing.append(number)
        # The control: another seed must be found different, in its tokens or its caches.
        params = DecodeParams(temperature=1.0, top_k=20, seed=1, max_tokens=50)
        noticed = finished(host, prompts[0], params) != finished(device, prompts[0], replace(params, seed=2))
        noticed = noticed and not same(*held)
        resumed = device._loop.resumed if device._loop is not None else -1
    return {
        "requests": options.requests,
        "rounds": rounds,
        "reasons": reasons,
        "offsets": len(offsets),
        "resumed": resumed,
        "differing": differing,
        "control_noticed": noticed,
        "failed": len(differing) + int(not noticed),
    }


def check_ends(options: argparse.Namespace) -> Report:
    """Each way in which a request ends, against the host's loop."""
    prompts = nano()[2](6, 37)
    wrong: list[str] = []
    waited: list[float] = []
    with opened("host", capacity=1024) as host, opened("device", capacity=1024) as device:

        def hold(name: str, ids: Sequence[int], params: DecodeParams, reason: str, length: int | None = None) -> None:
            expected, got = finished(host, ids, params), finished(device, ids, params)
            count = len(flat(got[0]))
            if expected != got or got[1] != reason or (length is not None and count != length):
                wrong.append(name)

        for seed, ids in enumerate(prompts):
            base = DecodeParams(temperature=1.0, top_k=20, top_p=0.95, seed=seed)
            for budget in (1, 8):
                hold(f"budget {budget}", ids, replace(base, max_tokens=budget), "length", budget)
            whole, _ = finished(host, ids, replace(base, max_tokens=60))
            tokens = flat(whole)
            hold("first token", ids, replace(base, max_tokens=60, stop_tokens=(tokens[0],)), "stop", 1)
            start = 0
            for step in whole:
                for offset in range(len(step)):  # the last is the bonus or the replacement
                    length = tokens.index(tokens[start + offset]) + 1
                    params = replace(base, max_tokens=60, stop_tokens=(tokens[start + offset],))
                    hold(f"stop at {start}+{offset}", ids, params, "stop", length)
                start += len(step)
            long = (ids * (1024 // len(ids) + 1))[: 1024 - 5 - seed]  # the context ends within a round
            hold("context", long, replace(base, max_tokens=1_000_000), "length", 5 + seed)
            # A million tokens, cancelled: what was read stays, and the next request is as if nothing had been. Also
            # where the rings have wrapped, and the device is as far ahead as it may be.
            for prompt in (ids, (ids * 40)[: 600 + seed]):
                asked = replace(base, max_tokens=1_000_000, draft=(2, "auto", 7)[seed % 3])
                expected = cancelled(host, prompt, asked)
                got = cancelled(device, prompt, asked, waited)
                if expected != got or got[1] != (*prompt, *got[0]):
                    wrong.append(f"cancelled after {len(prompt)}")
        # The control: a device that runs further ahead than the rings can take back.
        device._room = UNBOUNDED
        prompt = (prompts[0] * 40)[:600]
        asked = DecodeParams(temperature=1.0, top_k=20, seed=1, max_tokens=1_000_000, draft=7)
        noticed = cancelled(device, prompt, asked, waited) != cancelled(host, prompt, asked)
    return {
        "wrong": wrong,
        "cancelling_ms": round(1e3 * max(waited), 3),
        "control_noticed": noticed,
        "failed": len(wrong) + int(not noticed),
    }


def cancelled(
    engine: CudaEngine, ids: Sequence[int], params: DecodeParams, waited: list[float] | None = None
) -> tuple[Any, ...]:
    """What was read of a request that was cancelled, the sequence then, and what another request adds to it.

    waited: takes the seconds that cancelling took.
    """
    engine.rewind(0)
    engine.prefill(ids)
    stream = engine.decode(params)
    read = [token for _ in range(5) for token in next(stream)]
    time.sleep(0.01)
    begin = time.perf_counter()
    stream.close()
    if waited is not None:
        waited.append(time.perf_counter() - begin)
    held = engine.tokens
    following = list(engine.decode(DecodeParams(temperature=1.0, top_k=20, seed=99, max_tokens=40)))
    return read, held, stream.finish_reason, following, engine.tokens


def gaps(found: Sequence[Span]) -> list[float]:
    """Microseconds from the end of what ran last before each round to the round's first block."""
    return [(span.begin - before.end) / 1e3 for before, span in pairwise(found) if span.label == "embed"]


def check_gap(options: argparse.Namespace) -> Report:
    """The gap between rounds of both loops, over as many rounds."""
    prompts = nano()[2](6, 41)
    report: Report = {}
    for loop, last in (("device", "control"), ("host", "draft_sample")):
        found: list[float] = []
        with traced(loop, ("embed", last)) as (engine, tracer):
            number = 0
            while len(found) < options.rounds:
                params = DecodeParams(temperature=1.0, top_k=20, top_p=0.95, seed=number, max_tokens=1200)
                tracer.clear()
                finished(engine, prompts[number % len(prompts)], params)
                found += gaps(spans(tracer.read(), tracer.labels))
                number += 1
        low, median, high, most = np.percentile(found, [10, 50, 90, 99])
        report[loop] = {"rounds": len(found), "median": median, "p10": low, "p90": high, "p99": most}
    report["failed"] = int(report["device"]["median"] > 5.0)
    return report


class Sampled:
    """An engine whose scores are what its requests after one prompt sample from, to the bit.

    The engine's `score` computes all as a prompt, and where a token lies at the edge of top-p, last bits decide about
    it. The samples' last prompt token is computed again after each rewind, and what follows by the decode kernels.
    """

    def __init__(self, engine: CudaEngine, prompt: Sequence[int]) -> None:
        self._engine, self._prompt = engine, list(prompt)
        self.prefill, self.rewind, self.decode = engine.prefill, engine.rewind, engine.decode

    def score(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 [rows, vocab]; the last row follows `ids`, which are the prompt and at most eight tokens."""
        engine, length = self._engine, len(self._prompt)
        engine.prefill(self._prompt)
        list(engine.decode(DecodeParams(max_tokens=2, seed=0, top_k=20)))
        engine.rewind(length)
        with engine._change():
            engine._catch_up(engine.chunk)
        if len(ids) > length:
            return engine.verified_rows(ids[length:], length)
        logits = np.empty((1, engine.vocab_size), np.float32)
        engine._runtime.read("logits", logits)
        return logits


def check_distribution(options: argparse.Namespace) -> Report:
    """check_distribution's test through the device's loop; rules that are wrong must be found out by it."""
    tokenizer = nano()[1]
    ids = tokenizer.encode("def parse_", control=True)
    params = DecodeParams(temperature=1.0, top_k=20, top_p=0.95)
    report: Report = {}
    for name, fault in (("as it is", 0), ("accepts whatever is possible", 1), ("replaces without subtracting", 2)):
        defines = {"accept": (("TEST_FAULT", fault),)} if fault else {}
        with opened("device", defines=defines) as engine:
            sampled: Any = Sampled(engine, ids)
            report[name] = p_values(sampled, ids, params, range(options.samples))
    right = min(report["as it is"].values()) > FALSE_ALARM
    noticed = all(min(values.values()) < FALSE_ALARM for name, values in report.items() if name != "as it is")
    return {"samples": options.samples, "p_values": report, "failed": int(not right) + int(not noticed)}


def check_million(options: argparse.Namespace) -> Report:
    """Many tokens in one process: memory, throughput by tenths."""
    rng = np.random.default_rng(options.seed)
    prompts = nano()[2](60, 43)
    free: list[int] = []
    rates: list[float] = []
    tokens = requests = resumed = 0
    with opened("device") as engine:
        for part in range(10):
            goal, start, begun = options.tokens * (part + 1) // 10, tokens, time.perf_counter()
            decoding = 0.0
            while tokens < goal:
                ids = prompts[int(rng.integers(len(prompts)))]
                length = int(np.exp(rng.uniform(0, np.log(4000))))
                params = DecodeParams(
                    temperature=1.0,
                    top_k=20,
                    top_p=0.95,
                    seed=requests,
                    max_tokens=min(length, options.tokens - tokens),
                    draft=("auto", 7, "auto", 4)[requests % 4],
                )
                seconds, count = timed(engine, ids, params)
                if count != params.max_tokens:
                    raise DeviceError(f"request {requests} gave {count} of {params.max_tokens} tokens")
                tokens, requests, decoding = tokens + count, requests + 1, decoding + seconds
            free.append(int(check(bindings().cuMemGetInfo())[0]))
            rates.append((tokens - start) / (time.perf_counter() - begun))
        resumed = engine._loop.resumed if engine._loop is not None else -1
    middle = statistics.median(rates)
    return {
        "tokens": tokens,
        "requests": requests,
        "resumed": resumed,
        "tokens_per_s": [round(rate) for rate in rates],
        "spread": round(max(abs(rate / middle - 1) for rate in rates), 4),
        "free_memory": sorted(set(free[1:])),
        "failed": int(len(set(free[1:])) > 1) + int(max(rates[:3]) > 1.1 * max(rates[-3:])),
    }


STALL = """
import sys, time
from cuq1.cuda.engine import CudaEngine
from cuq1.errors import DeviceError
from cuq1.sampling import DecodeParams
from tools.bench import NANO
engine = CudaEngine(NANO, timeout=0.5, loop="device", defines={"control": (("STALL_AT", 4),)})
engine.prefill([1, 2, 3, 4, 5])
start = time.perf_counter()
try:
    for step in engine.decode(DecodeParams(temperature=0, max_tokens=500)):
        pass
except DeviceError as error:
    print(f"{time.perf_counter() - start:.3f} {error}")
try:
    engine.prefill([1, 2])
except DeviceError as error:
    print("refused")
engine.close()
print("closed", flush=True)
sys.exit(3)
"""


def check_stall(options: argparse.Namespace) -> Report:
    """In a process of its own: the error, its time, the exit; and that the next process works."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", STALL], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
        )
        lines, status = done.stdout.splitlines(), done.returncode
        errors = done.stderr[-500:]
    except subprocess.TimeoutExpired as error:
        lines, status, errors = [str(error.stdout)], -1, "the process did not end"
    seconds = time.perf_counter() - start
    with opened("device") as engine:
        count = len(flat(finished(engine, [1, 2, 3], DecodeParams(max_tokens=20, seed=1))[0]))
    right = len(lines) == 3 and lines[1:] == ["refused", "closed"] and "did not end within 0.5 s" in lines[0]
    right = right and "round 3" in lines[0] and float(lines[0].split()[0]) < 1.0 and status == 3
    return {
        "output": lines,
        "errors": errors,
        "status": status,
        "seconds": round(seconds, 2),
        "next_process_tokens": count,
        "failed": int(not right or count != 20),
    }


CHECKS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "equal": check_equal,
    "ends": check_ends,
    "gap": check_gap,
    "drafting": check_drafting,
    "threshold": check_threshold,
    "distribution": check_distribution,
    "million": check_million,
    "stall": check_stall,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_loop", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.check_loop", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checks", nargs="*", default=list(CHECKS), help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--requests", type=at_least_one, default=200)
    parser.add_argument("--rounds", type=at_least_one, default=5000)
    parser.add_argument("--seeds", type=at_least_one, default=30)
    parser.add_argument("--samples", type=at_least_one, default=20_000)
    parser.add_argument("--tokens", type=at_least_one, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--log", action="store_true", help="append rows to tools/benchlog/loop.jsonl")
    options = parser.parse_args(argv)
    failed = 0
    for name in options.checks:
        if name not in CHECKS:
            parser.error(f"there is no check {name}: choose from {', '.join(CHECKS)}")
        start = time.perf_counter()
        report = {"check": name, **CHECKS[name](options)}
        report["check_seconds"] = round(time.perf_counter() - start, 1)
        print(json.dumps(report), flush=True)
        failed += report["failed"]
        if options.log:
            append_row("loop", report)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
