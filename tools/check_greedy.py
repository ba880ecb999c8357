"""Greedy output must be the same token for token whatever is drafted.

    python tools/check_greedy.py [--prompts 51] [--tokens 200] [--log]

Decodes nano on prompts of mixed kinds with drafts off, with every fixed depth
and with the stop rule, and compares. Prompts shorter and longer than the
windows, and enough tokens, take both rings through their wraps.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, whose folder is on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuq1.cli import Parser, guarded
from cuq1.engine import Engine, open_engine
from cuq1.sampling import MAX_DRAFTS, DecodeParams
from tools.bench import append_row, at_least_one, nano

DRAFTS: tuple[Any, ...] = ("auto", *range(1, MAX_DRAFTS + 1))


def greedy(engine: Engine, ids: Sequence[int], draft: Any, tokens: int) -> list[int]:
    """`tokens` greedy tokens after a prompt, through ends of turns."""
    engine.prefill(ids)
    params = DecodeParams(temperature=0, draft=draft, max_tokens=tokens)
    return [token for step in engine.decode(params) for token in step]


def differing(
    engine: Engine, prompts: Sequence[Sequence[int]], drafts: Iterable[Any], tokens: int
) -> list[tuple[int, Any]]:
    """(prompt number, draft setting) of each output that is not the undrafted one."""
    drafts = list(drafts)
    found = []
    for number, ids in enumerate(prompts):
        expected = greedy(engine, ids, "off", tokens)
        found += [(number, draft) for draft in drafts if greedy(engine, ids, draft, tokens) != expected]
    return found


def main() -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_greedy", _main)


def _main() -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=at_least_one, default=51)
    parser.add_argument("--tokens", type=at_least_one, default=200)
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/")
    options = parser.parse_args()
    model, _, make_prompts = nano()
    prompts = make_prompts(options.prompts, 11)
    start = time.perf_counter()
    with open_engine(model) as engine:
        found = differing(engine, prompts, DRAFTS, options.tokens)
    report = {
        "prompts": len(prompts),
        "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
        "tokens": options.tokens,
        "drafts": DRAFTS,
        "differing": found,
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(report))
    if options.log:
        append_row("greedy", report)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
