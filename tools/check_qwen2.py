"""The ladder of checks of Qwen2 models on one GPU, a command a tier:

    python -m tools.check_qwen2 unit     each kernel against float64, with broken variants
    python -m tools.check_qwen2 layer    every launch of whole decoder blocks, in all three forms, against float64
    python -m tools.check_qwen2 graph    the captured graph: 100 prompts, greedy tokens against the reference's

The first two are tests (tests/kernels/test_qwen2_*.py, tests/gpu/test_qwen2_blocks.py). The third decodes pieces of
this project's source, of 1 to 600 tokens, on small random models of all six shapes, or on --model, in the form that the
engine chooses (small models: the chain), and judges each token by the reference's logits after the same ones, on the
same INT4 weights. A token that is not the reference's choice is listed; it counts as a near tie where the two are
closer than the row's error explains. Rows' errors have a bound of their own.
"""

import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.checkpoint.qwen2 import open_qwen2
from cuq1.cli import Parser, guarded
from cuq1.cuda.driver import require_devices
from cuq1.engine import open_engine
from cuq1.errors import RequestError
from cuq1.pack import pack
from cuq1.reference.qwen2_engine import Qwen2Engine
from cuq1.sampling import DecodeParams
from cuq1.text import PackedText, TextSource, Tokenizer
from tools.bench import ROOT, append_row, at_least_one
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint
from tools.near_ties import Comparison, compared, decoded

TOLERANCE = 3e-3  # of a row of logits, ||gpu - cpu|| / ||cpu||: activations are halves
LONGEST = 600  # tokens of a prompt
TESTS = {"unit": "tests/kernels/test_qwen2_*.py", "layer": "tests/gpu/test_qwen2_blocks.py"}


def tests(tier: str, options: Namespace) -> dict[str, Any]:
    """A tier that is tests: what pytest says of them. Skipped ones count as failed, as nothing was checked."""
    paths = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(TESTS[tier]))
    if not paths:
        raise RequestError(f"there is no {TESTS[tier]}: run this in a checkout")
    require_devices(1)  # without one, every test would be skipped
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-m", "gpu", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-500:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {
        "tests": len(paths),
        "summary": lines[-1],
        "failures": failed,
        "failed": int(done.returncode != 0 or bool(failed)),
    }


def pieces(tokenizer: Tokenizer, count: int, seed: int, longest: int = LONGEST) -> list[list[int]]:
    """`count` pieces of this project's source, of 1 to `longest` tokens, each length's order of magnitude as likely."""
    rng = np.random.default_rng(seed)
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "cuq1").glob("**/*.py"))]
    found: list[list[int]] = []
    while len(found) < count:
        text = texts[rng.integers(len(texts))]
        start, length = rng.integers(max(1, len(text))), int(np.exp(rng.uniform(0, np.log(longest + 1))))
        ids = tokenizer.encode(text[start : start + 8 * length], control=False)[:length]
        found += [ids] if ids else []
    return found


def judged(path: Path, count: int, options: Namespace) -> Comparison:
    """A model's greedy output on the GPU, judged by the reference's logits."""
    model = open_qwen2(path)
    source: TextSource = PackedText(path, model.files) if isinstance(model, Nanoqwen) else path
    prompts = pieces(Tokenizer.load(source, model.config.vocab_size), count, options.seed)
    params = DecodeParams(temperature=0, max_tokens=options.tokens, stop_tokens=())
    context = min(LONGEST + options.tokens + 1, model.config.max_position_embeddings)
    with open_engine(model, "cuda", context=context) as engine, Qwen2Engine(model, context=context) as reference:
        decoding: Any = engine  # the GPU's has verified_rows
        sequences = decoded(decoding, prompts, params)
        return compared(decoding, prompts, sequences, [reference.score(sequence[:-1]) for sequence in sequences])


def graph(tier: str, options: Namespace) -> dict[str, Any]:
    """Tokens of the captured graph against the reference's; says of each model what it found."""
    whole, models = Comparison(), {}
    with tempfile.TemporaryDirectory() as folder:
        for path, count in _models(Path(folder), options):
            one = judged(path, count, options)
            models[path.stem] = one.report(TOLERANCE)
            print("\n".join(model_lines(path.stem, models[path.stem])), flush=True)
            whole.add(one)
    return {"models": models, **whole.report(TOLERANCE)}


def _models(folder: Path, options: Namespace) -> Iterator[tuple[Path, int]]:
    """Packed files and how many prompts each gets: --model, or small random models, every other with INT4 logits."""
    if options.model is not None:
        if not isinstance(open_qwen2(options.model), Nanoqwen):
            raise RequestError(f"{options.model} is not packed: the reference would compute other weights; pack it")
        yield options.model, options.prompts
        return
    names = [name for name in NAMES if name.endswith("-tiny")]
    for number, name in enumerate(names):
        count = options.prompts // len(names) + (number < options.prompts % len(names))
        if count:
            path = folder / f"{name}.nanoqwen"
            pack(write_qwen2_checkpoint(folder / name, qwen2_config(name), options.seed), path, number % 2 > 0)
            yield path, count


TIERS: dict[str, Callable[[str, Namespace], dict[str, Any]]] = {"unit": tests, "layer": tests, "graph": graph}


def model_lines(name: str, one: dict[str, Any]) -> list[str]:
    """A model's outcome, and every token that is not the reference's choice."""
    table = [
        f"{name}: {one['equal']} of {one['prompts']} prompts equal; rows' error {one['row_error_median']:.1e}, "
        f"at the most {one['row_error_max']:.1e} of {one['tolerance']:.0e}"
    ]
    for place in one["places"]:
        verdict = "a near tie" if place["gap"] <= 2 * place["error"] else "NOT EXPLAINED"
        table.append(
            f"  prompt {place['prompt']} at {place['position']}: {place['chosen']} for {place['reference']}, "
            f"{place['gap']:.2e} apart; error {place['error']:.2e}: {verdict}"
        )
    return table


def lines(report: dict[str, Any]) -> list[str]:
    """A tier's outcome."""
    outcome = f"{report['tier']}: {'FAILED' if report['failed'] else 'passed'}: "
    if "summary" in report:
        return [*report["failures"], outcome + report["summary"]]
    return [outcome + f"{report['prompts']} prompts, {report['equal']} of them equal, {report['tokens']} tokens"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_qwen2", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m tools.check_qwen2", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tiers", nargs="*", default=list(TIERS), help=f"of {', '.join(TIERS)}; all by default")
    parser.add_argument("--model", type=Path, metavar="FILE", help="graph: a .nanoqwen file (default: random ones)")
    parser.add_argument("--prompts", type=at_least_one, default=100)
    parser.add_argument("--tokens", type=at_least_one, default=64, help="of each answer")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--log", action="store_true", help="append rows to tools/benchlog/qwen2.jsonl")
    options = parser.parse_args(argv)
    failed = 0
    for tier in options.tiers:
        if tier not in TIERS:
            parser.error(f"there is no tier {tier}: choose from {', '.join(TIERS)}")
    for tier in options.tiers:
        start = time.perf_counter()
        report = {"tier": tier, **TIERS[tier](tier, options)}
        report["seconds"] = round(time.perf_counter() - start, 1)
        print("\n".join(lines(report)), flush=True)
        failed += report["failed"]
        if options.log:
            append_row("qwen2", json.loads(json.dumps(report)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
