"""What INT4 costs a trained model in perplexity, held against what rounding alone explains (tools/quality.py).

    python -m tools.check_quality [--model FOLDER] [--text FILE ...] [--tokens 16384] [--draws 16]

The model is nano, whose layers' matrices are rounded as cuq1.pack rounds a Qwen2 model's, or a Hugging Face folder of
Qwen2; the text is this project's own source, which nano was not trained on. Both figures, the loss over the source
model's and the divergence of what is predicted from what the source predicts, have to lie in the interval that would
hold another draw of rounding's errors with random signs in 99.9 % of cases. Quantisers with a mistake are measured
too, and have to lie outside. With --log, a row goes to tools/benchlog/quality.jsonl.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from cuq1.checkpoint import Checkpoint
from cuq1.checkpoint.qwen2 import is_qwen2
from cuq1.checkpoint.qwen2_folder import Qwen2Folder
from cuq1.cli import Parser, guarded
from cuq1.errors import RequestError
from cuq1.reference.qwen2_weights import load_qwen2
from cuq1.reference.weights import load_target
from cuq1.text import Tokenizer
from tools.bench import NANO, ROOT, append_row, at_least_one
from tools.quality import (
    Change,
    Cost,
    Measure,
    Q1Subject,
    Qwen2Subject,
    Subject,
    exchanged,
    floored,
    random_signs,
    rounded,
    scaled,
    unchanged,
)

SHARE = 0.999
MISTAKES: dict[str, Change] = {
    "scales 5 % too large": scaled(1.05),
    "fractions dropped": floored,
    "codes of a pair exchanged": exchanged,
}


def interval(draws: list[float], share: float = SHARE) -> tuple[float, float]:
    """Where the next of such draws would lie in that share of cases, by Student's distribution."""
    from scipy.stats import t  # noqa: PLC0415  (a development dependency)

    mean, count = float(np.mean(draws)), len(draws)
    reach = float(t.ppf((1 + share) / 2, count - 1) * np.std(draws, ddof=1) * (1 + 1 / count) ** 0.5)
    return mean - reach, mean + reach


def explained(cost: Cost, draws: list[Cost], share: float = SHARE) -> bool:
    """Whether both figures lie in their interval."""
    spans = [interval([draw[i] for draw in draws], share) for i in range(2)]
    return all(low <= value <= high for value, (low, high) in zip(cost, spans, strict=True))


def opened(path: Path) -> tuple[Subject, Tokenizer]:
    """The model of a folder and its tokenizer."""
    if is_qwen2(path):
        if path.is_file():
            raise RequestError(f"{path} is packed already: give the Hugging Face folder that it was packed from")
        folder = Qwen2Folder.open(path)
        return Qwen2Subject(load_qwen2(folder), folder.config), Tokenizer.load(path, folder.config.vocab_size)
    checkpoint = Checkpoint.open(path)
    return Q1Subject(load_target(checkpoint, 1), checkpoint.config), Tokenizer.load(path, checkpoint.config.vocab_size)


def report(measure: Measure, draws: int) -> dict[str, Any]:
    """Costs of INT4 with and without the logits' matrix, the intervals that explain them, and the mistakes' costs."""
    found: dict[str, Any] = {"tokens": measure.tokens, "perplexity": measure.perplexity, "draws": draws}
    problems = []
    for name, head in (("layers", None), ("layers and lm_head", rounded)):
        cost = measure.cost(rounded, head)
        drawn = []
        for seed in range(draws):
            signs = random_signs(np.random.default_rng(seed))
            drawn.append(measure.cost(signs, None if head is None else signs))
        found[name] = {
            "cost": cost._asdict(),
            "perplexity": measure.perplexity * float(np.exp(cost.loss)),
            "explained": [interval([draw[i] for draw in drawn]) for i in range(2)],
        }
        if not explained(cost, drawn):
            problems.append(f"rounding alone does not explain what INT4 costs in {name}")
        if head is None:
            costs = {mistake: measure.cost(change) for mistake, change in MISTAKES.items()}
            found["mistakes"] = {mistake: cost._asdict() for mistake, cost in costs.items()}
            problems += [f"{mistake}: not noticed" for mistake, one in costs.items() if explained(one, drawn)]
    alone = measure.cost(unchanged, rounded)
    found["lm_head alone"] = {"cost": alone._asdict(), "perplexity": measure.perplexity * float(np.exp(alone.loss))}
    return {**found, "problems": problems, "failed": len(problems)}


def lines(found: dict[str, Any]) -> list[str]:
    """The report as a table."""
    table = [
        f"{found['tokens']} tokens, perplexity {found['perplexity']:.4f}",
        f"{'INT4':28} {'perplexity':>10} {'loss':>8} {'explained':>18} {'divergence':>10} {'explained':>18}",
    ]
    for name in ("layers", "layers and lm_head", "lm_head alone"):
        one, spans = found[name], found[name].get("explained")
        parts = []
        for i, value in enumerate(one["cost"].values()):
            parts.append(f"{value:{(8, 10)[i]}.4f} {'{:.4f} to {:.4f}'.format(*spans[i]) if spans else '':>18}")
        table.append(f"{name:28} {one['perplexity']:10.4f} {' '.join(parts)}")
    for name, cost in found["mistakes"].items():
        perplexity = found["perplexity"] * float(np.exp(cost["loss"]))
        table.append(f"{name:28} {perplexity:10.4g} {cost['loss']:8.4f} {'':18} {cost['divergence']:10.4f}")
    return [*table, *(f"PROBLEM: {text}" for text in found["problems"])]


def text_of(path: Path) -> str:
    """A file's text. Raises RequestError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path} cannot be read as UTF-8 text ({problem}): name another file") from None


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_quality", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.check_quality", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=NANO, help="a trained model's folder (default: nano)")
    parser.add_argument("--text", type=Path, nargs="+", help="UTF-8 files (default: this project's source)")
    parser.add_argument("--tokens", type=at_least_one, default=16384)
    parser.add_argument("--piece", type=at_least_one, default=512, help="tokens that are predicted from each other")
    parser.add_argument("--draws", type=at_least_one, default=16, help="of rounding's errors with random signs")
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/quality.jsonl")
    options = parser.parse_args(argv)
    if min(options.draws, options.piece) < 2:
        parser.error("--draws and --piece must be at least 2")
    subject, tokenizer = opened(options.model)
    paths = options.text or sorted((ROOT / "cuq1").glob("**/*.py"))
    ids = np.asarray(tokenizer.encode("".join(map(text_of, paths)), control=False))
    pieces = [ids[i : i + options.piece] for i in range(0, min(options.tokens, len(ids)), options.piece)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise RequestError("the text has fewer than two tokens: give a longer one")
    found = {"model": options.model.name, **report(Measure(subject, pieces), options.draws)}
    print("\n".join(lines(found)))
    if options.log:
        append_row("quality", found)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
