"""check_routing --time: a round of one rank, folded and not, in turn in one run, and the difference by launch.

The same experts are forced on both. Their weights differ, since one rank's fold holds a part of the logits alone, so
what is checked here is that results are finite and repeat; what they are is check_routing's part.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from cuq1.cuda.graph import Graph, synchronize
from cuq1.errors import Cuq1Error
from tools.bench import append_row
from tools.bench_ranks import differences, digest, print_differences, traced
from tools.bench_round import ASSETS, Bench
from tools.gpu import alternating_us, spread_of
from tools.tracing import steps

DRAFTS, CONTEXT, EXPERTS = 5, 1024, 37.7  # of bench_round's round
BLOCKS, REPEATS = 10, 10


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
        results = {name: _result(bench, one, rows) for name, one in ready.items()}
        times = alternating_us(ready, bench.stream, BLOCKS, REPEATS)
        if results != {name: _result(bench, one, rows) for name, one in ready.items()}:
            raise Cuq1Error(f"{rows} rows: a repeated round has other results than the first one")
        for one in ready.values():
            one.close()
        found = {name: spread_of(values) for name, values in times.items()}
        text = ", ".join(f"{name} {one.median:.1f} us ({one.low:.1f} to {one.high:.1f})" for name, one in found.items())
        more = found["unfolded"].median - found["folded"].median
        print(f"{args.time}, rank 0 of {args.tp}, {rows} rows, {DRAFTS} drafts, {bench.name}:")
        print(f"  {text}: {more:+.1f} unfolded")
        if rows == 8:
            parts = {name: steps(traced(bench, plan)) for name, plan in plans.items()}
            print_differences(differences(parts["folded"], parts["unfolded"]), ("folded", "unfolded"))
        row = {"gpu": bench.name, "what": f"round of {args.time}", "tp": args.tp, "rows": rows}
        row |= {"us": {name: one._asdict() for name, one in found.items()}}
        print(json.dumps(row))
        if args.log:
            append_row("routing", row)
    return 0


def _result(bench: Bench, ready: Graph, rows: int) -> str:
    ready.launch(bench.stream)
    synchronize(bench.stream)
    bench.check_faults()
    return digest(bench, rows)
