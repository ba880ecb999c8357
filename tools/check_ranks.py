"""Hold nano on several GPUs against nano on one.

    python -m tools.check_ranks [score greedy seeded repeat] [--tp 2] [--log] ...

Starts its ranks itself. Each check is done with the host's loop, and then the device's loop must give the same
sequences. score: logits of prompts by
the prefill kernels, relative error. greedy: sequences against the choices of one GPU after the same tokens; where they
differ, the gap between the two candidates there is held against the error of that very row, and every such place is
listed. seeded: sampled sequences against those of one GPU with the same seeds, round by round; a draw goes another way
where rounding moved a probability across it, as often as the distributions that it is made from differ. repeat: the
same requests again.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.cli import Parser, guarded
from cuq1.cuda.engine import CudaEngine
from cuq1.errors import RequestError
from cuq1.parallel.follow import Leader, follow
from cuq1.parallel.launch import Launch
from cuq1.parallel.rank import Part, as_rank, launched
from cuq1.sampling import DecodeParams
from tools.bench import NANO, append_row, at_least_one, nano
from tools.seeded import compare

F32 = NDArray[np.float32]
Report = dict[str, Any]
Request = tuple[list[int], DecodeParams]
Sequences = list[list[int]]
LOOPS = ("host", "device")


def sequence(engine: CudaEngine | Leader, ids: Sequence[int], params: DecodeParams) -> list[int]:
    """The prompt and what follows it, on a fresh sequence."""
    engine.rewind(0)
    engine.prefill(ids)
    return [*ids, *(token for step in engine.decode(params) for token in step)]


def deciding_rows(engine: CudaEngine | Leader, ids: Sequence[int], whole: Sequence[int]) -> F32:
    """Logits [len(whole) - len(ids), vocab] from which a request with the prompt `ids` chose its tokens."""
    first = engine.score(ids)[-1:]
    engine.rewind(0)
    engine.prefill(ids)
    rest = whole[len(ids) : -1]
    passes = [engine.verified_rows(rest[i : i + 8], len(ids) + i) for i in range(0, len(rest), 8)]
    return np.concatenate([first, *passes])


def check_score(one: CudaEngine, several: Leader, options: argparse.Namespace) -> Report:
    """The relative error of logits, and whether a second time gives the same bits."""
    errors, unequal = [], 0
    for ids in nano()[2](options.prompts, 13):
        expected, got = one.score(ids), several.score(ids)
        errors += list(np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1))
        unequal += int(not np.array_equal(got, several.score(ids)))
    # A row whose experts were a close choice is far off; few are.
    median, mean = float(np.median(errors)), float(np.mean(errors))
    failed = int(median > options.tolerance) + int(mean > 10 * options.tolerance) + unequal
    return {"row_error_median": median, "row_error_mean": mean, "unequal": unequal, "failed": failed}


def greedy_requests(options: argparse.Namespace) -> Iterator[Request]:
    """Prompts of mixed kinds, and what is asked for."""
    for ids in nano()[2](options.prompts, 11):
        yield ids, DecodeParams(temperature=0, max_tokens=options.tokens)


def check_greedy(one: CudaEngine, several: Leader, options: argparse.Namespace, sequences: Sequences) -> Report:
    """Every choice against one GPU's."""
    places: list[Report] = []
    tokens = failed = 0
    for number, ((ids, _), whole) in enumerate(zip(greedy_requests(options), sequences, strict=True)):
        tokens += len(whole) - len(ids)
        expected, ours = deciding_rows(one, ids, whole), deciding_rows(several, ids, whole)
        for at, (row, again) in enumerate(zip(expected, ours, strict=True)):
            best, chosen = int(row.argmax()), whole[len(ids) + at]
            if best == chosen:
                continue
            place = {
                "prompt": number,
                "position": len(ids) + at,
                "gap": float(row[best] - row[chosen]),
                "error": float(np.abs(again - row).max()),
                "one": best,
                "several": chosen,
            }
            failed += place["gap"] > 2 * place["error"]
            places.append(place)
    return {"tokens": tokens, "places": places, "failed": failed}


def seeded_requests(options: argparse.Namespace) -> Iterator[Request]:
    """The same, sampled."""
    for number, ids in enumerate(nano()[2](options.prompts, 17)):
        yield ids, DecodeParams(temperature=1.0, top_k=20, top_p=0.95, seed=number, max_tokens=options.tokens)


def check_seeded(one: CudaEngine, several: Leader, options: argparse.Namespace, sequences: Sequences) -> Report:
    """Where sequences part from one GPU's, and how often rounding may make them: see tools.seeded."""
    return compare(one, several, list(seeded_requests(options)), sequences, deciding_rows)


def mixed_requests(options: argparse.Namespace) -> Iterator[Request]:
    """Of every kind, the host's sampling among them."""
    for number, ids in enumerate(nano()[2](options.prompts, 23)):
        draft: Any = ("auto", 7, 3, "off", 1)[number % 5]
        asked = DecodeParams(temperature=number % 3 / 2, top_k=0 if number == 7 else 20, top_p=0.95, draft=draft)
        yield ids, replace(asked, seed=number, max_tokens=options.tokens)


def check_repeat(_: CudaEngine, several: Leader, options: argparse.Namespace, sequences: Sequences) -> Report:
    """The same requests again."""
    again = [sequence(several, ids, params) for ids, params in mixed_requests(options)]
    differing = [number for number, pair in enumerate(zip(again, sequences, strict=True)) if pair[0] != pair[1]]
    return {"differing": differing, "failed": len(differing)}


Check = Callable[[CudaEngine, Leader, argparse.Namespace, Sequences], Report]
CHECKS: dict[str, tuple[Callable[[argparse.Namespace], Iterator[Request]], Check]] = {
    "score": (lambda options: iter(()), lambda one, several, options, _: check_score(one, several, options)),
    "greedy": (greedy_requests, check_greedy),
    "seeded": (seeded_requests, check_seeded),
    "repeat": (mixed_requests, check_repeat),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if launched():
        return guarded("check_ranks", lambda: as_rank(lambda part: _run(_arguments(argv), part)))
    return guarded("check_ranks", lambda: _start(argv))


def _start(argv: list[str]) -> int:
    options = _arguments(argv)
    return Launch([sys.executable, "-m", "tools.check_ranks", *argv], options.tp, program="check_ranks").run()


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m tools.check_ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checks", nargs="*", default=list(CHECKS), help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--tp", type=at_least_one, default=2)
    parser.add_argument("--prompts", type=at_least_one, default=50)
    parser.add_argument("--tokens", type=at_least_one, default=200)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS, help="who launches rounds; both by default")
    parser.add_argument("--activations", choices=["f16", "fp8"], default="f16")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of the median relative error of a row's logits")
    parser.add_argument("--log", action="store_true", help="append rows to tools/benchlog/ranks.jsonl")
    options = parser.parse_args(argv)
    for name in options.checks:
        if name not in CHECKS:
            raise RequestError(f"there is no check {name}: choose from {', '.join(CHECKS)}")
    if "seeded" in options.checks and "host" not in options.loops:
        raise RequestError("the check seeded looks at rounds that the host steps: leave --loops out")
    options.loops = [loop for loop in LOOPS if loop in options.loops]
    return options


def _run(options: argparse.Namespace, part: Part) -> int:
    if not part.channel.leads:
        for loop in options.loops:
            follow(_open(options, loop, part), part.meeting)
        return 0
    part.begin()
    failed = 0
    known: dict[str, Sequences] = {}
    with CudaEngine(NANO, loop="host", activations=options.activations) as one:
        for loop in options.loops:
            with Leader(_open(options, loop, part), part.meeting) as several:
                for name in options.checks:
                    start = time.perf_counter()
                    requests, check = CHECKS[name]
                    sequences = [sequence(several, ids, params) for ids, params in requests(options)]
                    if name in known:
                        apart = sum(a != b for a, b in zip(known[name], sequences, strict=True))
                        found: Report = {"other_than_the_host": apart, "failed": apart}
                    else:
                        known[name] = sequences
                        found = check(one, several, options, sequences)
                    about = {"check": name, "tp": options.tp, "loop": loop, "activations": options.activations}
                    seconds = round(time.perf_counter() - start, 1)
                    report = {**about, "prompts": options.prompts, **found, "check_seconds": seconds}
                    print(json.dumps(report), flush=True)
                    failed += report["failed"]
                    if options.log:
                        append_row("ranks", report)
    return 1 if failed else 0


def _open(options: argparse.Namespace, loop: Any, part: Part) -> CudaEngine:
    return CudaEngine(NANO, options.tp, loop=loop, activations=options.activations, meeting=part.meeting)


if __name__ == "__main__":
    sys.exit(main())
