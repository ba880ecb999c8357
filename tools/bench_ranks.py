"""A round of several ranks that exchange, each on a GPU and in a process of its own: bench_round --ranks 0,1.

The ranks are those of a larger group (--tp): what the others would push is taken as zero. Weights are random, each
rank with its own share; routing is drawn, the same on all of them. Beside it stands the round of each rank alone,
replayed in turn with the other in the same processes, and what differs between the two, kernel by kernel.

A kernel that waits for a peer has no time of its own: in a chain by itself it would never end. So the table by kernel
is from the GPU's clock inside whole rounds (tools/tracing.py): what passes from the predecessor's end until a launch
has what it waits for, and from there to its end. Of two rounds in a row the second is looked at: ranks are in step.

Checked in the same run: all ranks have the same bits of hidden states, drafts and tokens, all finite; alone, others.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cuq1.cuda import abi, graph
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.execute import Program
from cuq1.errors import Cuq1Error, RequestError
from cuq1.parallel.launch import Launch
from cuq1.parallel.rendezvous import RANK, Rendezvous
from cuq1.plan.dims import ROWS
from cuq1.plan.types import Plan
from tools.bench import append_row
from tools.bench_round import ASSETS, Bench, within_reach
from tools.gpu import alternating_us, spread_of
from tools.tracing import Span, Step, Tracer, spans, steps

BLOCKS = 3  # of replays, of both kinds in turn
ROUNDS = 5  # that are traced
TIMEOUT, HEARTBEAT = 300.0, 20.0  # seconds: kernels are compiled, 40 GB of weights drawn


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """As a rank where the environment says so, else as the launcher of all of them; returns the exit status."""
    if max(args.ranks) >= args.tp:
        raise RequestError(f"--ranks {','.join(map(str, args.ranks))}: with --tp {args.tp} they go to {args.tp - 1}")
    if args.kernels or args.marginal:
        raise RequestError("--kernels and --marginal time launches without their peers: leave them out with --ranks")
    if not os.environ.get(RANK):
        command = [sys.executable, "-m", "tools.bench_round", *argv]
        return Launch(command, len(args.ranks), "127.0.0.1:0", TIMEOUT, HEARTBEAT).run()
    with Rendezvous() as meeting:
        meeting.agree("arguments", {"arguments": json.dumps(vars(args), default=str, sort_keys=True)})
        _measure(args, meeting)
    return 0


def _measure(args: argparse.Namespace, meeting: Rendezvous) -> None:
    folder = Path(args.config) if Path(args.config).is_dir() else ASSETS / args.config
    capacity = max(args.capacity or 0, *args.context)
    rank = args.ranks[meeting.rank]
    how = {"fp8_activations": args.fp8_activations, "meeting": meeting}
    bench = Bench(folder, args.tp, rank, capacity, args.seed, **how)
    d = bench.model.dims
    for context in args.context:
        for rows in args.rows:
            distinct = within_reach(args.experts, rows, d.experts, d.top_k)
            bench.place(context, rows, args.drafts, distinct)
            models = {"alone": bench.model, "exchanging": bench.exchanging}
            if args.unfolded:
                models["unfolded"] = replace(bench.exchanging, folded=False)
            plans = {name: bench.plan(one, rows, args.drafts, context, distinct) for name, one in models.items()}
            found = _round(bench, plans, rows, args.repeats, meeting)
            found |= {"rank": rank, "bytes": plans["alone"].read_bytes(), "ceiling_gbps": bench.ceiling}
            every = [json.loads(one) for one in meeting.gather("results", json.dumps(found).encode())]
            _check(every)
            if meeting.rank == 0:
                _report(args, context, rows, distinct, every, bench.name)
    bench.inbox.close()


def _round(bench: Bench, plans: dict[str, Plan], rows: int, repeats: int, meeting: Rendezvous) -> dict[str, Any]:
    """Times, results and steps of both rounds."""
    ready = {name: bench.captured(plan, reset=True) for name, plan in plans.items()}
    results = {}
    for name, one in ready.items():
        meeting.barrier(f"{name} is ready")
        one.launch(bench.stream)
        graph.synchronize(bench.stream)
        bench.check_faults()
        results[name] = digest(bench, rows)
    times = alternating_us(ready, bench.stream, BLOCKS, repeats, lambda: meeting.barrier("a block of replays"))
    bench.check_faults()
    if digest(bench, rows) != results[list(ready)[-1]]:
        raise Cuq1Error("a repeated round has other results than the first one")
    for one in ready.values():
        one.close()
    parts = {}
    for name, plan in plans.items():
        rounds = traced(bench, plan, lambda: meeting.barrier("a traced round"))
        parts[name] = {label: [round(x, 2) for x in vars(step).values()] for label, step in steps(rounds).items()}
    return {
        "results": results,
        "us": {name: spread_of(values)._asdict() for name, values in times.items()},
        "steps": parts,
    }


def digest(bench: Bench, rows: int) -> str:
    """Of a round's hidden states, the draft's, tokens and drafts. Raises Cuq1Error for what is not finite."""
    driver, hidden = bindings(), bench.model.dims.hidden
    found = hashlib.sha256()
    for name, count in (("hidden", rows), ("draft_hidden", 1)):
        values = np.empty((count, hidden), np.float32)
        check(driver.cuMemcpyDtoH(values.ctypes.data, driver.CUdeviceptr(bench.addresses[name]), values.nbytes))
        if not np.isfinite(values).all() or not values.any():
            raise Cuq1Error(f"{name} is not finite, or zero, after a round")
        found.update(values.tobytes())
    record = np.empty(bench.arena.sizes["state"], np.uint8)
    check(driver.cuMemcpyDtoH(record.ctypes.data, driver.CUdeviceptr(bench.addresses["state"]), record.nbytes))
    state = abi.State.from_buffer_copy(record.tobytes())
    for name in ("tokens", "positions", "q_ids", "q_probs", "log_tokens"):
        found.update(bytes(getattr(state, name)))
    found.update(bytes([state.log_count, state.log_accepted, state.drafts % (ROWS + 1)]))
    return found.hexdigest()


def traced(bench: Bench, plan: Plan, before: Callable[[], object] = bool) -> list[list[Span]]:
    """The launches of some rounds, each behind another one, which brings ranks in step. before: each of these pairs."""
    labels = dict.fromkeys(launch.label for launch in plan.launches)
    tracer = Tracer(labels, layers=len(bench.model.layers) + 1)  # the head counts as a layer
    plan = plan.with_defines(tracer.defines)
    program = Program(plan, bench.addresses)
    tracer.attach(plan.kernels())
    with graph.capture(bench.stream) as captured:
        for _ in range(2):
            tracer.forget(bench.stream)
            bench.reset()
            program.issue(bench.stream)
    found = []
    with captured.instantiate() as ready:
        ready.upload(bench.stream)
        for _ in range(ROUNDS + 1):
            before()
            ready.launch(bench.stream)
            graph.synchronize(bench.stream)
            found.append(spans(tracer.read(), tracer.labels))
    bench.check_faults()
    tracer.close()
    return found[1:]


def _check(every: Sequence[dict[str, Any]]) -> None:
    """Raises Cuq1Error unless the ranks have the same results where they exchange, and others alone."""
    together: set[str] = set()
    for kind in every[0]["results"].keys() - {"alone"}:
        found = {one["results"][kind] for one in every}
        if len(found) > 1:
            raise Cuq1Error(f"ranks {[one['rank'] for one in every]} exchange and have {len(found)} different results")
        together |= found
    alone = {one["results"]["alone"] for one in every}
    if len(alone) < len(every) or together & alone:
        raise Cuq1Error("ranks have the same results alone as well: this check would not find a lost exchange")


def differences(alone: dict[str, Step], together: dict[str, Step]) -> list[tuple[str, Step, Step, float]]:
    """(launch, alone, together, microseconds more a round), the largest difference first."""
    nothing = Step(0, 0.0, 0.0)
    names = dict.fromkeys((*together, *alone))
    pairs = [(name, alone.get(name, nothing), together.get(name, nothing)) for name in names]
    more = [(name, a, b, b.wait + b.work - a.wait - a.work) for name, a, b in pairs]
    return sorted(more, key=lambda one: -abs(one[3]))


def print_differences(table: Sequence[tuple[str, Step, Step, float]], kinds: tuple[str, str]) -> None:
    """What `differences` found, as lines: of each kind the launches of a round, and a launch's waiting and work."""
    head = f"{'n':>5} {'wait':>7} {'work':>7}"
    print(f"  {'us, by the GPU clock':22} {head} {kinds[0]:10} {head} {kinds[1]:10} {'a round':>9}")
    for label, a, b, more in table:
        each = [
            f"{step.count:5.0f} {step.wait / max(step.count, 1):7.2f} {step.work / max(step.count, 1):7.2f} {'':10}"
            for step in (a, b)
        ]
        print(f"  {label:22} {each[0]} {each[1]} {more:+9.1f}")
    whole = [
        sum(step.wait + step.work for step in found) for found in ([one[1] for one in table], [one[2] for one in table])
    ]
    print(f"  {'all, as traced':22} {whole[0]:21.1f} {'':10} {whole[1]:21.1f} {'':10} {whole[1] - whole[0]:+9.1f}")


def _report(
    args: argparse.Namespace, context: int, rows: int, distinct: float, every: Sequence[dict[str, Any]], name: str
) -> None:
    sizes = f"{args.config}, tp {args.tp}, {rows} rows, {args.drafts} drafts, context {context}, {distinct:g} experts"
    print(f"{sizes}, {len(every)} x {name}")
    for one in every:
        floor = one["bytes"] / one["ceiling_gbps"] / 1e3
        print(f"rank {one['rank']}, us (10th to 90th percentile), of which bytes alone take {floor:.1f}:")
        for kind, us in one["us"].items():
            more = us["median"] - one["us"]["alone"]["median"]
            print(f"  {kind:10} {us['median']:8.1f} ({us['low']:.1f} to {us['high']:.1f}) {more:+.1f}")
        found = {kind: {label: Step(*step) for label, step in one["steps"][kind].items()} for kind in one["steps"]}
        for kinds in pairwise(found):
            print_differences(differences(*(found[kind] for kind in kinds)), kinds)
    print("results: the same bits on all ranks, finite; alone, each rank has others", flush=True)
    if args.no_log:
        return
    row = {"gpu": name, "config": args.config, "tp": args.tp, "rows": rows, "drafts": args.drafts, "context": context}
    append_row("ranks", {**row, "experts": distinct, "fp8_activations": args.fp8_activations, "ranks": list(every)})
