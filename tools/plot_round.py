"""The last sweep of tools/bench_round.py as a Markdown table and a plot.

python -m tools.plot_round --out docs.svg    (needs matplotlib: pip install 'cuq1[plot]')
"""

import json
import sys
from pathlib import Path
from typing import Any

from cuq1.cli import Parser, guarded
from cuq1.errors import RequestError
from tools.bench import ROOT

LOG = ROOT / "tools" / "benchlog" / "round.jsonl"


def last_sweep(log: Path) -> list[dict[str, Any]]:
    """The rows of the last command that measured several contexts, by context. RequestError where there is none."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    sweeps: list[list[dict[str, Any]]] = []
    for row in rows:
        same = sweeps and sweeps[-1][-1]["command"] == row["command"] and sweeps[-1][-1]["context"] < row["context"]
        if same:
            sweeps[-1].append(row)
        else:
            sweeps.append([row])
    found = [sweep for sweep in sweeps if len(sweep) > 1]
    if not found:
        raise RequestError(f"{log} has no sweep: run python -m tools.bench_round --context sweep first")
    return found[-1]


def table(sweep: list[dict[str, Any]]) -> str:
    """Markdown: a row a context."""
    lines = ["| context | round, ms (p10 to p90) | read, GB | floor, ms | floor / round |", "|---|---|---|---|---|"]
    for row in sweep:
        us, floor = row["us"], row["bytes"] / row["ceiling_gbps"] / 1e3
        low, middle, high = (us[name] / 1e3 for name in ("low", "median", "high"))
        lines.append(
            f"| {row['context'] // 1024}K | {middle:.2f} ({low:.2f} to {high:.2f}) | {row['bytes'] / 1e9:.2f} | "
            f"{floor / 1e3:.2f} | {row['of_floor']:.0%} |"
        )
    return "\n".join(lines)


def plot(sweep: list[dict[str, Any]], out: Path) -> None:
    """Measured rounds and their floors over the context."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise RequestError("the plot needs matplotlib: pip install 'cuq1[plot]'") from None
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    contexts = [row["context"] / 1024 for row in sweep]
    axes.plot(contexts, [row["us"]["median"] / 1e3 for row in sweep], "o-", label="measured")
    axes.plot(
        contexts, [row["bytes"] / row["ceiling_gbps"] / 1e6 for row in sweep], "s--", label="bytes / read ceiling"
    )
    axes.set_xlabel("context, 1,024 tokens")
    axes.set_ylabel("round, ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    first = sweep[0]
    axes.set_title(
        f"{first['config']}, one rank of {first['tp']}: {first['rows']} rows, {first['drafts']} drafts, "
        f"{first['experts']} experts a layer, {first['gpu']}",
        fontsize=8,
    )
    figure.savefig(out, metadata={"Date": None})


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("plot_round", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.plot_round", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="an .svg or .png file")
    options = parser.parse_args(argv)
    sweep = last_sweep(LOG)
    print(table(sweep))
    if options.out is not None:
        plot(sweep, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
