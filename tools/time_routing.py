"""check_routing --time: a round of one rank, folded and not, in turn in one run, and the difference by launch."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from cuq1.cuda.driver import bindings, check
from cuq1.errors import Cuq1Error
from tools.bench import append_row
from tools.bench_ranks import differences, print_differences, traced
from tools.bench_round import ASSETS, Bench
from tools.gpu import alternating_us, spread_of
from tools.tracing import steps

DRAFTS, CONTEXT, EXPERTS = 5, 1024, 37.7  # of bench_round's round
BLOCKS, REPEATS = 10, 10
APART = 0.05  # how far hidden states of the two forms may be, relative, after all layers


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit status."""
    folder = Path(args.time) if Path(args.time).is_dir() else ASSETS / args.time
    bench = Bench(folder, args.tp, 0, CONTEXT, args.seed, fp8_activations=False)
    for rows in (8, 4, 1):
        distinct = EXPERTS if rows > 4 else 8.0 * rows
        bench.place(CONTEXT, rows, DRAFTS, distinct)
        models = {"folded": bench.model, "unfolded": replace(bench.model, folded=False)}
        plans = {name: bench.plan(model, rows, DRAFTS, CONTEXT, distinct) for name, model in models.items()}
        ready = {name: bench.captured(plan, reset=True) for name, plan in plans.items()}
        hidden = {}
        for name, one in ready.items():
            one.launch(bench.stream)
            check(bindings().cuCtxSynchronize())
            bench.check_faults()
            hidden[name] = _hidden(bench, rows)
        apart = float(np.linalg.norm(hidden["folded"] - hidden["unfolded"]) / np.linalg.norm(hidden["folded"]))
        if not apart <= APART:
            raise Cuq1Error(f"{rows} rows: both forms' hidden states differ by {apart:.1e} of their size")
        times = alternating_us(ready, bench.stream, BLOCKS, REPEATS)
        bench.check_faults()
        for one in ready.values():
            one.close()
        found = {name: spread_of(values) for name, values in times.items()}
        text = ", ".join(f"{name} {one.median:.1f} us ({one.low:.1f} to {one.high:.1f})" for name, one in found.items())
        more = found["unfolded"].median - found["folded"].median
        print(f"{args.time}, rank 0 of {args.tp}, {rows} rows, {DRAFTS} drafts, {bench.name}:")
        print(f"  {text}: {more:+.1f} unfolded")
        print(f"  hidden states after all layers, with the same experts forced: {apart:.1e} apart")
        if rows == 8:
            parts = {name: steps(traced(bench, plan)) for name, plan in plans.items()}
            print_differences(differences(parts["folded"], parts["unfolded"]), ("folded", "unfolded"))
        row = {"gpu": bench.name, "what": f"round of {args.time}", "tp": args.tp, "rows": rows, "apart": apart}
        row |= {"us": {name: one._asdict() for name, one in found.items()}}
        print(json.dumps(row))
        if args.log:
            append_row("routing", row)
    return 0


def _hidden(bench: Bench, rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    out = np.empty((rows, bench.model.dims.hidden), np.float32)
    check(bindings().cuMemcpyDtoH(out.ctypes.data, bindings().CUdeviceptr(bench.addresses["hidden"]), out.nbytes))
    if not np.isfinite(out).all() or not out.any():
        raise Cuq1Error("hidden states are not finite, or zero")
    return out.astype(np.float64)
