"""Hold the GPU engine against the reference on nano: greedy output, scores, acceptance, repetition.

    python -m tools.check_cuda [greedy score acceptance repeat] [--log] ...

greedy: sequences of both engines are equal, except where the reference's two best logits are closer than the
measured error; every such place is listed. score: relative error of logits, and perplexity of source that nano was
not trained on. acceptance: of each of seven drafts, over many sampled
rounds, against the reference's judgement of the same drafts. repeat: rounds of mixed prompts twice,
with equal outputs, flat memory and no error.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.cli import Parser, guarded
from cuq1.cuda.engine import CudaEngine
from cuq1.engine import Engine, open_engine
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import MAX_DRAFTS, DecodeParams
from tools.acceptance import Judged, judge, rates, rounds_of, variations
from tools.bench import NANO, ROOT, append_row, at_least_one, nano
from tools.near_ties import compared, decoded

F32 = NDArray[np.float32]
_worker: Engine | None = None


def _start() -> None:
    global _worker  # noqa: PLW0603  (one engine a process)
    _worker = open_engine(NANO, "cpu")


def _cpu_score(ids: Sequence[int]) -> F32:
    assert _worker is not None
    return np.asarray(_worker.score(ids))


def _cpu_judged(task: tuple[int, Sequence[Judged]]) -> list[Judged]:
    assert isinstance(_worker, ReferenceEngine)
    seed, rounds = task
    return [judge(_worker, one.tokens, one.drafts, sampled(seed)) for one in rounds]


def on_cpu(function: Callable[[Any], Any], tasks: Sequence[Any], jobs: int) -> list[Any]:
    """The reference's results, one engine a process."""
    with get_context("spawn").Pool(jobs, _start) as pool:
        return pool.map(function, tasks, chunksize=1)


def check_greedy(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Sequences against the reference's choices after the same tokens.

    Where they differ, the gap between the reference's two candidates is held against the error of the engine's logits
    in that very row, computed again as the request did it (tools/near_ties.py). Rows come in other groups then, so
    that last bits, and with them a close choice, can differ (`again`).
    """
    assert isinstance(engine, CudaEngine)
    prompts = nano()[2](options.prompts, 11)
    params = DecodeParams(temperature=0, max_tokens=options.tokens, draft=options.draft)
    sequences = decoded(engine, prompts, params)
    expected = on_cpu(_cpu_score, [sequence[:-1] for sequence in sequences], options.jobs)
    return compared(engine, prompts, sequences, expected).report()


def check_score(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Relative error of the logits, and perplexities, on this project's own source."""
    tokenizer = nano()[1]
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "cuq1").glob("**/*.py")))
    ids = tokenizer.encode(text, control=False)[: options.source_tokens]
    pieces = [ids[i : i + 1000] for i in range(0, len(ids), 1000)]
    references = on_cpu(_cpu_score, pieces, options.jobs)
    scores = [decode_score(engine, piece) if options.decode else engine.score(piece) for piece in pieces]
    difference = np.sqrt(sum(float(np.square(a - b).sum()) for a, b in zip(scores, references, strict=True)))
    norm = np.sqrt(sum(float(np.square(b).sum()) for b in references))
    rows = np.concatenate(
        [np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1) for a, b in zip(scores, references, strict=True)]
    )
    ours, theirs = perplexity(scores, pieces), perplexity(references, pieces)
    error = float(difference / norm)
    return {
        "tokens": len(ids),
        "kernels": "decode" if options.decode else "prefill",
        "relative_error": error,
        "row_error_median": float(np.median(rows)),
        "row_error_max": float(rows.max()),
        "perplexity": ours,
        "perplexity_reference": theirs,
        "failed": int(error > options.tolerance) + int(abs(ours / theirs - 1) > 0.01),
    }


def decode_score(engine: Engine, ids: Sequence[int]) -> F32:
    """Logits [len(ids), vocab] by the decode kernels, eight rows a pass, which fill the caches as they go."""
    assert isinstance(engine, CudaEngine)
    engine.rewind(0)
    return np.concatenate([engine.verified_rows(ids[i : i + 8], i) for i in range(0, len(ids), 8)])


def perplexity(scores: Sequence[F32], pieces: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-likelihood of each piece's tokens after its first."""
    total, count = 0.0, 0
    for logits, ids in zip(scores, pieces, strict=True):
        rows = logits[:-1].astype(np.float64)
        peak = rows.max(axis=1, keepdims=True)
        log_sum = (peak + np.log(np.exp(rows - peak).sum(axis=1, keepdims=True)))[:, 0]
        total += float((log_sum - rows[np.arange(len(ids) - 1), ids[1:]]).sum())
        count += len(ids) - 1
    return float(np.exp(total / count))


def check_acceptance(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Shares of rounds that accept more than 0 … 6 drafts, and the same drafts judged by the reference.

    chance: the standard error of such a rate where two engines go their own ways, over requests.
    """
    prompts = iter(nano()[2](options.rounds // 15 + 1, 17))  # no round of at most 120 tokens commits more than 8
    ours: list[list[Judged]] = []
    with CudaEngine(NANO, loop="host", activations=options.activations) as own:
        while sum(map(len, ours)) < options.rounds:
            ours.append(rounds_of(own, next(prompts), sampled(len(ours))))
    theirs = on_cpu(_cpu_judged, list(enumerate(ours)), options.jobs)
    (got, chance), (expected, _) = (
        rates([[one.accepted for one in request] for request in requests]) for requests in (ours, theirs)
    )
    difference = float(np.abs(got - expected).max())
    distance = variations([one for request in ours for one in request], [one for request in theirs for one in request])
    return {
        "rounds": sum(map(len, ours)),
        "accepted_by_depth": got.tolist(),
        "accepted_by_depth_reference": expected.tolist(),
        "largest_difference": difference,
        "chance": chance.tolist(),
        "variation_by_depth": distance.mean(axis=0).tolist(),
        "failed": int(difference > 0.01),
    }


def sampled(seed: int) -> DecodeParams:
    """A request with seven drafts."""
    return DecodeParams(temperature=1.0, top_k=20, top_p=0.95, seed=seed, draft=MAX_DRAFTS, max_tokens=120)


def check_repeat(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """`rounds` rounds of mixed requests, twice."""
    from cuq1.cuda.driver import bindings, check  # noqa: PLC0415

    prompts = nano()[2](60, 23)
    outputs: list[list[list[int]]] = []
    free: list[int] = []
    counts = []
    for _ in range(2):
        found: list[list[int]] = []
        rounds = request = 0
        engine.rewind(0)  # a prefix that an earlier request left is kept, computed in other chunks: other last bits
        while rounds < options.rounds // 2:
            ids = prompts[request % len(prompts)]
            draft: Any = ("auto", 7, 3, "off", 1)[request % 5]
            params = DecodeParams(
                temperature=request % 3 / 2,
                top_k=(20, 5, 0)[request % 3 if request % 50 == 2 else 0],
                top_p=0.95,
                seed=request,
                draft=draft,
                max_tokens=150,
            )
            engine.prefill(ids)
            steps = list(engine.decode(params))
            found.append([token for step in steps for token in step])
            rounds += len(steps) - 1
            request += 1
            if request == 50:
                free.append(int(check(bindings().cuMemGetInfo())[0]))
        free.append(int(check(bindings().cuMemGetInfo())[0]))
        outputs.append(found)
        counts.append(rounds)
    return {
        "rounds": counts,
        "requests": len(outputs[0]),
        "free_memory": free,
        "failed": int(outputs[0] != outputs[1]) + int(max(free) != min(free)),
    }


CHECKS = {"greedy": check_greedy, "score": check_score, "acceptance": check_acceptance, "repeat": check_repeat}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_cuda", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.check_cuda", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checks", nargs="*", default=list(CHECKS), help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--prompts", type=at_least_one, default=51)
    parser.add_argument("--tokens", type=at_least_one, default=200)
    parser.add_argument("--draft", default="auto", type=lambda text: text if text in ("auto", "off") else int(text))
    parser.add_argument("--source-tokens", type=at_least_one, default=20000)
    parser.add_argument("--decode", action="store_true", help="score with the decode kernels")
    parser.add_argument("--rounds", type=at_least_one, default=2000)
    parser.add_argument("--activations", choices=["f16", "fp8"], default="f16")
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--jobs", type=at_least_one, default=4, help="processes of the reference")
    parser.add_argument("--log", action="store_true", help="append rows to tools/benchlog/cuda.jsonl")
    options = parser.parse_args(argv)
    failed = 0
    with open_engine(NANO, "cuda", activations=options.activations) as engine:
        for name in options.checks:
            if name not in CHECKS:
                parser.error(f"there is no check {name}: choose from {', '.join(CHECKS)}")
            report = {"check": name, "activations": options.activations, **CHECKS[name](engine, options)}
            print(report, flush=True)
            failed += report["failed"]
            if options.log:
                append_row("cuda", report)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
