"""A Qwen2 model from a prompt to its answer: time to the first token, time a token, and where it goes.

    python -m tools.bench_e2e --prompt 512 --gen 128 --config qwen2.5-coder-7b
    python -m tools.bench_e2e --context 16384 --config qwen2.5-coder-7b
    python -m tools.bench_e2e --model qwen.nanoqwen

Batch 1, random prompts; with --config, random weights. Three ways to launch are measured in turn, with the same tokens:
device (the device launches each token's graph), host (the host does), eager (the host launches every kernel). Times
are the host's: from the prompt to the first token (TTFT), and from the first token to the last (ITL), medians of
requests with the 10th and the 90th percentile. The share is that of the bytes that a token must read, over the read
bandwidth measured in the same run. Regions come from kernels compiled to leave their times (tools/breakdown.py).
--context N measures a longer prompt, too, and holds the time that it adds against the bytes that it adds. --form
measures several ways to put layers into launches in turn; --timeline shows when blocks resume and end a layer's parts.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from cuq1.cli import Parser, guarded
from cuq1.cuda import graph
from cuq1.cuda.driver import open_device
from cuq1.cuda.qwen2_engine import Qwen2CudaEngine
from cuq1.errors import RequestError
from cuq1.models.qwen2 import position_bytes
from cuq1.models.qwen2_forms import FORMS, form_for
from cuq1.plan.dims import DRAFT
from cuq1.plan.qwen2_dims import qwen2_dims
from cuq1.sampling import DecodeParams
from tools.bench import append_row, at_least_one, not_negative
from tools.breakdown import REGIONS, breakdown, mean, problems, tokens_of, total
from tools.e2e_report import MODES, Regions, lines, plain
from tools.gpu import Spread, read_ceiling, spread_of
from tools.qwen2_engines import Mode, Part, Subject, parts_of, records, token_plan
from tools.timeline import medians, timeline
from tools.tracing import Tracer, spans

TRACED = 12  # tokens of a request whose launches leave their times


def prompt_of(length: int, vocab: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, min(vocab, 150_000), length).tolist()
    return found


def request(engine: Qwen2CudaEngine, ids: Sequence[int], count: int) -> tuple[float, float, list[int]]:
    """Milliseconds to the first token, milliseconds a token after it, and the tokens. Nothing is held before."""
    params = DecodeParams(temperature=0, max_tokens=count, stop_tokens=())
    engine.rewind(0)
    start = time.perf_counter()
    engine.prefill(ids)
    times: list[float] = []
    tokens: list[int] = []
    for step in engine.decode(params):
        times.append(time.perf_counter())
        tokens += step
    return 1e3 * (times[0] - start), 1e3 * (times[-1] - times[0]) / max(1, len(times) - 1), tokens


def measured(engine: Qwen2CudaEngine, ids: Sequence[int], options: Namespace) -> dict[str, Any]:
    """Spreads of both times over requests, after some that are not counted; and the tokens, always the same."""
    for _ in range(options.warm_up):
        request(engine, ids, options.gen)
    found = [request(engine, ids, options.gen) for _ in range(options.repeats)]
    if any(tokens != found[0][2] for _, _, tokens in found):
        raise RequestError("the same request gave different tokens")
    ttft, itl = spread_of([one[0] for one in found]), spread_of([one[1] for one in found])
    return {"ttft_ms": ttft, "itl_ms": itl, "tokens": found[0][2]}


def device_itl_us(engine: Qwen2CudaEngine, ids: Sequence[int], count: int) -> Spread:
    """Microseconds from one token's end to the next one's, by the GPU's clock."""
    with records(engine) as log:
        request(engine, ids, count)
    return spread_of([(one.ended - one.launched) / 1e3 for one in log[1:]])


def finite(engine: Qwen2CudaEngine, ids: Sequence[int]) -> bool:
    """Whether the decode kernels' logits after the last of `ids` are all finite and not all the same."""
    logits = engine.verified_rows(ids[-1:], len(ids) - 1)
    return bool(np.isfinite(logits).all() and logits.std() > 0)


def regions(subject: Subject, mode: Mode, ids: Sequence[int], options: Namespace) -> Regions:
    """A token's regions behind a prompt: those of requests' last tokens.

    Launches of layers have places of their own for their entries, of which the last token's stay: it is the cheapest
    way. What ends a token has none, so that the end of the one before it is known, too: the loop's kernel, or where the
    host launches the head.
    """
    open_device()
    device = mode == "device"
    tracer = Tracer(
        [label for label in REGIONS if device or label != "control"],
        layers=subject.config.num_hidden_layers + device,  # the head counts as a layer
    )
    parts, itl, times = [], [], []
    try:
        with subject.engine(mode, len(ids) + TRACED + 1, tracer) as engine:
            launches = parts_of(token_plan(engine, len(ids) + TRACED))
            order = [(one.label, one.layer) for one in launches] + [("control", DRAFT)] * device
            request(engine, ids, TRACED)
            for _ in range(options.traced):
                tracer.clear()
                with records(engine) as log:
                    request(engine, ids, TRACED)
                entries = tracer.read()
                begin, end, found = tokens_of(spans(entries, tracer.labels), order)[-1]
                parts.append(breakdown(found, begin, end))
                times.append(timeline(entries, tracer.labels, order))
                itl += [(one.ended - one.launched) / 1e3 for one in log[-1:]]
    finally:
        tracer.close()
    shares = mean(parts)
    time_us = float(np.mean(itl)) if device else total(shares)
    wrong = problems(shares, time_us, len(order))
    of_layers = medians(times) if options.timeline and device else {}
    return Regions(mode, len(ids), shares, time_us, wrong, region_bytes(launches), of_layers)


def region_bytes(parts: Sequence[Part]) -> dict[str, int]:
    """What a token's launches read, by region."""
    found: dict[str, int] = {}
    for label, _, size in parts:
        found[REGIONS[label]] = found.get(REGIONS[label], 0) + size
    return found


def bench(subject: Subject, options: Namespace, ceiling: float) -> dict[str, Any]:
    """All of a model's figures."""
    ids = prompt_of(options.prompt, subject.config.vocab_size, options.seed)
    room = options.gen + 1
    middle = options.prompt + options.gen // 2
    found: dict[str, Any] = {
        "model": subject.name,
        "form": subject.form,
        "prompt": options.prompt,
        "gen": options.gen,
        "problems": [],
    }
    for mode in MODES:
        with subject.engine(mode, max(options.prompt, options.context or 0) + room) as engine:
            found[mode] = measured(engine, ids, options)
            if mode == "device":
                found["clock_us"] = device_itl_us(engine, ids, options.gen)
                plan = token_plan(engine, middle)
                found["bytes"], found["launches"] = plan.read_bytes(), len(plan.launches) + 1
                if not finite(engine, ids):
                    found["problems"].append("the logits are not finite, or all the same")
                if options.context:
                    long = prompt_of(options.context, subject.config.vocab_size, options.seed + 1)
                    found["context"] = {"prompt": options.context, **measured(engine, long, options)}
    for mode in MODES[1:]:
        if found[mode]["tokens"] != found["device"]["tokens"]:
            found["problems"].append(f"{mode} gives other tokens than device")
    if options.context:
        added = (options.context - options.prompt) * position_bytes(subject.config)
        extra = 1e3 * (found["context"]["itl_ms"].median - found["device"]["itl_ms"].median)
        found["context"] |= {"added_bytes": added, "extra_us": extra, "ratio": extra / (added / ceiling / 1e3)}
    if options.traced:
        found["breakdowns"] = {mode: regions(subject, mode, ids, options) for mode in ("device", "eager")}
        if options.context:
            found["breakdowns"]["context"] = regions(subject, "device", long, options)
        for name, one in found["breakdowns"].items():
            found["problems"] += [f"{name}: {text}" for text in one.problems]
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("bench_e2e", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.bench_e2e", description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", nargs="+", default=["qwen2.5-coder-7b"], help="models with random weights")
    source.add_argument("--model", nargs="+", help="Hugging Face folders, or .nanoqwen files")
    parser.add_argument("--int4-head", action="store_true", help="of random weights, the logits' matrix is INT4, too")
    parser.add_argument(
        "--form",
        nargs="+",
        choices=FORMS,
        default=[None],
        help="launches: one for all layers, one for what lies between two attentions, or one for each product "
        "(default: the engine's choice)",
    )
    parser.add_argument("--prompt", type=at_least_one, default=512, help="tokens of the prompt")
    parser.add_argument("--gen", type=at_least_one, default=128, help="tokens of the answer")
    parser.add_argument("--context", type=at_least_one, help="a longer prompt, measured too")
    parser.add_argument("--repeats", type=at_least_one, default=15, help="requests that are counted")
    parser.add_argument("--warm-up", type=not_negative, default=3, help="requests before them")
    parser.add_argument(
        "--traced", type=not_negative, default=10, help="requests whose launches leave their times; 0 for none"
    )
    parser.add_argument("--timeline", action="store_true", help="of these, when blocks resume and end a layer's parts")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--log", action="store_true", help="append rows to tools/benchlog/e2e.jsonl")
    options = parser.parse_args(argv)
    if options.gen < 2:
        parser.error("--gen must be at least 2: a token's time is that from one to the next")
    if options.context and options.context <= options.prompt:
        parser.error("--context must be more than --prompt, to which it is compared")
    names = options.model or options.config
    subjects = [Subject.of(name, int4_head=options.int4_head) for name in names]
    longest = max(options.prompt, options.context or 0) + max(options.gen, TRACED) + 1
    for subject in subjects:
        if longest > subject.config.max_position_embeddings:
            raise RequestError(
                f"{subject.name} has {subject.config.max_position_embeddings} positions, and {longest} are asked for: "
                "lower --prompt, --context or --gen"
            )
    device = open_device()
    sms = device.multiprocessors
    forms = [
        replace(subject, form=form_for(qwen2_dims(subject.config), sms, form))
        for subject, form in product(subjects, options.form)
    ]
    ceiling = read_ceiling(graph.stream(), device.arch)
    print(f"{device.name}, read ceiling {ceiling:.0f} GB/s")
    failed = 0
    for subject in forms:
        found = bench(subject, options, ceiling)
        failed += len(found["problems"])
        print("\n".join(lines(found, ceiling)), flush=True)
        if options.log:
            append_row("e2e", {"gpu": device.name, "ceiling_gbps": ceiling, **plain(found)})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
