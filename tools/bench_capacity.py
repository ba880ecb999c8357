"""Whether a round takes longer where more context is allocated: caches of two sizes, alternating, at one position.

    python -m tools.bench_capacity --context 1024 --capacity 1024,262144

Both lie in memory at once, with the same random weights and routing. A time that differs by less than it does between
two caches of the same size, in other places of memory, is no difference: give a size twice to see that.
"""

import statistics
import sys
from typing import Any

from cuq1.cli import Parser, guarded
from cuq1.models import decode
from tools.bench import append_row, at_least_one
from tools.bench_round import ASSETS, Bench


def sizes(text: str) -> list[int]:
    """`1024,262144`."""
    found = [int(part) for part in text.split(",")]
    if len(found) < 2 or min(found) < 1:
        raise ValueError(text)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("bench_capacity", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.bench_capacity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=at_least_one, default=1024, help="positions cached")
    parser.add_argument("--capacity", type=sizes, default=[1024, 262144], help="positions that caches hold, a list")
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--experts", type=float, default=37.7, help="distinct experts a layer")
    parser.add_argument("--turns", type=at_least_one, default=7)
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/capacity.jsonl")
    options = parser.parse_args(argv)
    context, drafts = options.context, options.drafts
    benches = [
        Bench(ASSETS / "iquest-q1", 8, 0, max(size, context), 0, fp8_activations=False) for size in options.capacity
    ]
    plans = []
    for bench in benches:
        bench.place(context, 8, drafts, options.experts)
        short = bench.model.is_short(context)
        plans.append(decode.round_of(bench.model, 8, drafts, context=context, forced=True, short=short))
    times: list[list[float]] = [[] for _ in benches]
    for _ in range(options.turns):
        for bench, plan, found in zip(benches, plans, times, strict=True):
            found.append(bench.time(plan, 20, reset=True).median)
    medians = [statistics.median(found) for found in times]
    for size, found, median in zip(options.capacity, times, medians, strict=True):
        print(f"capacity {size:7}: {median:8.1f} µs, {min(found):.1f} to {max(found):.1f}")
    print(f"largest difference {max(medians) / min(medians) - 1:.2%}")
    if options.log:
        row: dict[str, Any] = {"gpu": benches[0].name, "context": context, "drafts": drafts, "experts": options.experts}
        append_row("capacity", {**row, "capacity": options.capacity, "us": times, "ceiling_gbps": benches[0].ceiling})
    return 0


if __name__ == "__main__":
    sys.exit(main())
