"""What benchmarks share: nano with its prompts, and rows of evidence under tools/benchlog/."""

import json
import os
import platform
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from cuq1.text import Tokenizer
from tools import nano_prompts

ROOT = Path(__file__).resolve().parents[1]
NANO = ROOT / "cuq1" / "assets" / "iquest-q1-nano"


def nano() -> tuple[Path, Tokenizer, Callable[..., list[list[int]]]]:
    """nano's folder and tokenizer, and `prompts(count, seed, kinds="fts")`."""
    tokenizer = Tokenizer.load(NANO, 4096)
    return NANO, tokenizer, lambda count, seed, kinds="fts": nano_prompts.prompts(NANO, tokenizer, count, seed, kinds)


def at_least_one(text: str) -> int:
    """A count given on a command line."""
    return _count(text, 1)


def not_negative(text: str) -> int:
    """A count given on a command line, which may be 0."""
    return _count(text, 0)


def _count(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return value


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def append_row(name: str, results: dict[str, Any]) -> None:
    """Append results to tools/benchlog/<name>.jsonl with what is needed to repeat them."""
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": f"{os.cpu_count()} x {_processor()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **results,
    }
    log = ROOT / "tools" / "benchlog" / f"{name}.jsonl"
    log.parent.mkdir(exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
