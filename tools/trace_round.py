"""One decode round as a timeline, kernel by kernel, from the GPU's clock: a picture and a trace file.

    python -m tools.trace_round --config iquest-q1 --tp 8 --rows 8 --drafts 5 --context 1024 --out round

Writes OUT.svg, and OUT.json for Perfetto or chrome://tracing. The round is bench_round's: one rank, random weights,
routing drawn to a number of distinct experts. A launch is shown from its first block's begin to its last block's end:
what it does before its predecessor's results (pale), what it waits for, and its work. Each block writes an entry
when it ends, which takes a round a few percent longer than it is. --layers picks the layers of the enlarged part.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from cuq1.cli import Parser, guarded
from cuq1.cuda import graph
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.execute import Program
from cuq1.models import decode
from cuq1.plan.dims import DRAFT
from tools.bench_round import ASSETS, Bench, within_reach
from tools.tracing import Span, Tracer, spans

COLOURS = {
    "embed": "#888888",
    "qkv": "#4477aa",
    "attention": "#ee6677",
    "combine": "#aa3377",
    "o_proj": "#66ccee",
    "attn_tail": "#bbbb44",
    "gate_up": "#228833",
    "down": "#88cc66",
    "mlp_tail": "#ddaa33",
    "lm_head": "#774411",
    "top_k": "#cc8855",
    "accept": "#000000",
    "draft_sample": "#333333",
    "eh_proj": "#9955bb",
    "entry_norm": "#cc99dd",
    "control": "#ff0000",
}


def chrome(found: Sequence[Span], blocks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Spans in the Chrome trace format: microseconds, a thread a kernel."""
    start = found[0].begin
    threads = list(dict.fromkeys(span.label for span in found))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": label}}
        for i, label in enumerate(threads)
    ]
    before = "nothing"
    for span in found:
        where = "draft" if span.layer == DRAFT else f"layer {span.layer}"
        about = {"layer": where, "blocks": span.blocks, "waits for": before}
        common = {"ph": "X", "pid": 0, "tid": threads.index(span.label), "args": about}
        parts = [
            (f"{span.label} prologue", span.begin, span.waiting),
            (f"{span.label} waits for {before}", span.waiting, span.resumed),
            (f"{span.label}, {where}", span.resumed, span.end),
        ]
        events += [
            {**common, "name": name, "ts": (begin - start) / 1e3, "dur": (end - begin) / 1e3}
            for name, begin, end in parts
            if end > begin
        ]
        before = f"{span.label}, {where}"
    return {"displayTimeUnit": "ns", "traceEvents": [*events, *blocks]}


def table(found: Sequence[Span]) -> list[str]:
    """Microseconds by label: from the predecessor's end to its own end, and what its parts are."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for before, span in pairwise(found):
        name = ("draft " if span.layer == DRAFT else "") + span.label
        rows.setdefault(name, []).append(
            ((span.end - before.end) / 1e3, (span.resumed - before.end) / 1e3, (before.end - span.begin) / 1e3)
        )
    lines = [f"{'launch':20} {'count':>5} {'step µs':>8} {'resume':>7} {'early':>7} {'total':>8}"]
    for name, values in rows.items():
        step, resume, early = (sum(column) / len(values) for column in zip(*values, strict=True))
        lines.append(f"{name:20} {len(values):5} {step:8.2f} {resume:7.2f} {early:7.2f} {step * len(values):8.1f}")
    return lines


def draw(found: Sequence[Span], title: str, layers: Sequence[int], path: Path) -> None:
    """The whole round above, and some layers of it enlarged below, a row a kernel."""
    import matplotlib as mpl  # noqa: PLC0415  (a development dependency)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    start = found[0].begin
    chosen = [span for span in found if span.layer in layers]
    parts = [("the round", found), (f"layers {', '.join(map(str, layers))}", chosen)]
    last = [span for span in found if span.layer == DRAFT]
    starts = [i for i, span in enumerate(last) if span.label == "eh_proj"]
    if starts:
        parts.append(("a draft depth", last[starts[-1] :]))
    figure, axes = pyplot.subplots(len(parts), 1, figsize=(18, 3.6 * len(parts)), layout="constrained")
    for axis, (name, part) in zip(axes, parts, strict=True):
        labels = list(dict.fromkeys(span.label for span in part))
        for span in part:
            row, colour = labels.index(span.label), COLOURS.get(span.label, "#444444")
            for begin, end, alpha in (
                (span.begin, span.waiting, 0.5),
                (span.waiting, span.resumed, 0.2),
                (span.resumed, span.end, 1.0),
            ):
                left, width = (begin - start) / 1e3, (end - begin) / 1e3
                axis.barh(row, width, left=left, height=0.8, color=colour, alpha=alpha, linewidth=0)
            if len(part) < 60:
                work = (span.end - span.resumed) / 1e3
                axis.text((span.resumed - start) / 1e3, row, f" {work:.1f}", va="center", fontsize=7)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel("µs")
        axis.set_title(
            f"{title}: {name} (half: before the predecessor's results; pale: waiting for them)", fontsize=9, loc="left"
        )
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(path)
    pyplot.close(figure)


def traced_round(bench: Bench, args: argparse.Namespace) -> list[Span]:
    """The launches of one round, after a few that were not kept."""
    d = bench.model.dims
    distinct = within_reach(args.experts, args.rows, d.experts, d.top_k)
    bench.place(args.context, args.rows, args.drafts, distinct)
    short = bench.model.is_short(args.context)
    plan = decode.round_of(bench.model, args.rows, args.drafts, context=args.context, forced=True, short=short)
    tracer = Tracer(dict.fromkeys(launch.label for launch in plan.launches))
    plan = plan.with_defines(tracer.defines)
    program = Program(plan, bench.addresses)
    tracer.attach(plan.kernels())
    driver = bindings()
    source, target = (driver.CUdeviceptr(bench.addresses[name]) for name in ("state0", "state"))
    size = bench.arena.sizes["state"]
    with graph.capture(bench.stream) as captured:
        program.issue(bench.stream)
    with captured.instantiate() as ready:
        ready.upload(bench.stream)
        for _ in range(5):
            graph.synchronize(bench.stream)
            tracer.clear()
            check(driver.cuMemcpyDtoD(target, source, size))
            ready.launch(bench.stream)
        graph.synchronize(bench.stream)
        return spans(tracer.read(), tracer.labels)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("trace_round", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.trace_round", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="iquest-q1", help="a folder of cuq1/assets, or a path")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--experts", type=float, default=37.7)
    parser.add_argument("--fp8-activations", action="store_true")
    parser.add_argument("--layers", default="3,4,5", help="layers to enlarge")
    parser.add_argument("--out", type=Path, default=Path("round"), help="name of the files, without .svg and .json")
    args = parser.parse_args(argv)
    folder = Path(args.config) if Path(args.config).is_dir() else ASSETS / args.config
    bench = Bench(folder, args.tp, args.rank, args.context, 0, fp8_activations=args.fp8_activations)
    found = traced_round(bench, args)
    title = f"{args.config}, TP{args.tp}, {args.rows} rows, {args.drafts} drafts, context {args.context}, {bench.name}"
    print(f"{title}: {(found[-1].end - found[0].begin) / 1e3:.1f} µs, {len(found)} launches")
    print("\n".join(table(found)))
    args.out.with_suffix(".json").write_text(json.dumps(chrome(found)), encoding="utf-8")
    draw(found, title, [int(part) for part in args.layers.split(",")], args.out.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
