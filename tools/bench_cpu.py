"""Time nano on the CPU engine as a user meets it: start to first token, then decoding.

    python tools/bench_cpu.py [--repeats 7] [--log]

First token: seconds from starting a fresh process to the first text on its
stdout, for a prompt of 100 tokens. Decoding: tokens a second on chat prompts,
with drafts chosen by the stop rule and without, alternating, the greedy tokens
of both compared. Medians with the range over repeats. And how many of seven
drafts a round are accepted, by the kind of prompt.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, whose folder is on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuq1.cli import Parser, guarded
from cuq1.engine import Engine, open_engine
from cuq1.sampling import MAX_DRAFTS, DecodeParams
from cuq1.text import Tokenizer
from tools.bench import NANO, ROOT, append_row, at_least_one, nano

FIRST_TOKEN_LIMIT = 2.0  # seconds
DECODE_LIMIT = 60.0  # tokens a second


def hundred_tokens(tokenizer: Tokenizer) -> str:
    """A raw prompt of exactly 100 tokens."""
    text = (ROOT / "cuq1" / "reference" / "ops.py").read_text(encoding="utf-8")
    for length in range(len(text)):
        if len(tokenizer.encode(text[:length], control=False)) == 100:
            return text[:length]
    raise AssertionError("the file has fewer than 100 tokens")


def first_token_seconds(prompt: str) -> float:
    """From starting a process to its first byte of text."""
    command = [sys.executable, "-m", "cuq1.generate", "--prompt", prompt, "--temperature", "0", "--max-tokens", "8"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        elapsed = time.perf_counter() - start
        process.stdout.read()
    return elapsed


def decode(engine: Engine, prompts: list[list[int]], draft: Any, temperature: float) -> tuple[float, list[list[int]]]:
    """Tokens a second over the prompts' answers, prefill not counted, and the answers."""
    seconds, answers = 0.0, []
    for i, ids in enumerate(prompts):
        engine.prefill(ids)
        params = DecodeParams(
            max_tokens=200, temperature=temperature, top_k=20, top_p=0.95, seed=i, draft=draft, stop_tokens=(0,)
        )
        start = time.perf_counter()
        answers.append([token for step in engine.decode(params) for token in step])
        seconds += time.perf_counter() - start
    return sum(map(len, answers)) / seconds, answers


def accepted_drafts(engine: Engine, prompts: list[list[int]], temperature: float) -> float:
    """Mean number of accepted drafts a round, of MAX_DRAFTS."""
    rounds = []
    for i, ids in enumerate(prompts):
        engine.prefill(ids)
        params = DecodeParams(
            max_tokens=200, temperature=temperature, top_k=20, top_p=0.95, seed=i, draft=MAX_DRAFTS, stop_tokens=(0,)
        )
        rounds += [step.accepted for step in engine.decode(params) if not step.from_prompt]
    return round(statistics.mean(rounds), 2)


def spread(values: list[float], digits: int = 3) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }


def main() -> int:
    """Run the command line; returns the exit status."""
    return guarded("bench_cpu", _main)


def _main() -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=at_least_one, default=7)
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/")
    options = parser.parse_args()
    _, tokenizer, make_prompts = nano()
    prompt = hundred_tokens(tokenizer)
    first = [first_token_seconds(prompt) for _ in range(options.repeats)]
    report: dict[str, Any] = {"first_token_s": spread(first)}
    passed = report["first_token_s"]["median"] < FIRST_TOKEN_LIMIT
    prompts = make_prompts(16, 3, "ft")
    with open_engine(NANO, "cpu") as engine:
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            rates: dict[str, list[float]] = {"auto": [], "off": []}
            for _ in range(options.repeats):
                answers = {}
                for draft, values in rates.items():
                    rate, answers[draft] = decode(engine, prompts, draft, temperature)
                    values.append(rate)
                assert temperature > 0 or answers["auto"] == answers["off"], "drafts changed greedy output"
            report[f"{name}_tokens_per_s"] = {draft: spread(values, 1) for draft, values in rates.items()}
            medians = {draft: statistics.median(values) for draft, values in rates.items()}
            passed &= medians["auto"] >= DECODE_LIMIT and medians["auto"] > medians["off"]
            report[f"{name}_accepted_of_{MAX_DRAFTS}"] = {
                kind: accepted_drafts(engine, make_prompts(24, 4, letter), temperature)
                for kind, letter in (("tool chats", "t"), ("function chats", "f"), ("source", "s"))
            }
    report["passed"] = passed
    print(json.dumps(report, indent=1))
    if options.log:
        append_row("cpu", report)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
