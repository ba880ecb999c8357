"""The command line of cuq1.inspect."""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cuq1.checkpoint.qwen2 import is_qwen2
from cuq1.cli import Parser, guarded
from cuq1.errors import ConfigError
from cuq1.inspect.qwen2 import qwen2_report, render_qwen2
from cuq1.inspect.render import render
from cuq1.inspect.report import report

DEFAULT_BANDWIDTH = "4.5TB/s"  # an H200 reading its memory
DEFAULT_LINK = "395GB/s"  # an H200 copying to another one by NVLink

# The B of bytes is a capital: Gb/s are bits.
_BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([kKmMgGtT]?)(?:B(?:/s)?)?")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bandwidth(text: str) -> float:
    """Bytes a second, 1 at the least, from 4.5e12, 4.5TB/s, 4500 GB/s; ValueError for anything else."""
    match = _BANDWIDTH.fullmatch(text.strip())
    value = float(match[1]) * _PREFIXES[match[2].lower()] if match else math.nan
    if not 1 <= value < math.inf:
        raise ValueError(
            f"{text!r} is not a bandwidth of at least 1 byte/s: write bytes a second, as 4.5e12 or 4.5TB/s"
        )
    return value


def _bandwidth(text: str) -> float:
    try:
        return parse_bandwidth(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status."""
    return guarded("cuq1.inspect", lambda: _inspect(argv))


def _inspect(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="cuq1.inspect", description="Sizes of a checkpoint and the floor of its decode round.")
    parser.add_argument(
        "model", type=Path, help="folder with config.json, with or without weights, or a .nanoqwen file"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    parser.add_argument("--context", type=int, metavar="N", help="positions in the KV cache (default: several)")
    parser.add_argument(
        "--bandwidth", type=_bandwidth, default=DEFAULT_BANDWIDTH, metavar="B/s", help="default %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: bytes, bytes/s, ms and counts")
    parser.add_argument("--plan", action="store_true", help="print the launches of one decode round on a GPU")
    parser.add_argument("--rank", type=int, metavar="N", help="with --plan: which rank (default 0)")
    parser.add_argument("--rows", type=int, metavar="N", help="with --plan: rows verified, 1 to 8 (default 8)")
    parser.add_argument("--distinct", type=float, metavar="N", help="with --plan: distinct experts a layer")
    parser.add_argument(
        "--link", type=_bandwidth, metavar="B/s", help=f"with --plan: to other ranks (default {DEFAULT_LINK})"
    )
    args = parser.parse_args(argv)
    qwen2 = is_qwen2(args.model)
    if qwen2 and (args.tp != 1 or any(value is not None for value in (args.rank, args.rows, args.distinct, args.link))):
        raise ConfigError(
            f"{args.model} is a Qwen2 model, which one rank computes, a row a round: leave out --tp, --rank, --rows, "
            "--distinct and --link"
        )
    if args.plan and qwen2:
        from cuq1.inspect.qwen2_plan import qwen2_plan_report, render_qwen2_plan  # noqa: PLC0415  (as below)

        found = qwen2_plan_report(args.model, args.context, args.bandwidth)
        text = render_qwen2_plan(found)
    elif args.plan:
        from cuq1.inspect.plan import plan_report, render_plan  # noqa: PLC0415  (kernels' sizes, for this alone)

        rank, rows = args.rank or 0, 8 if args.rows is None else args.rows
        link = parse_bandwidth(DEFAULT_LINK) if args.link is None else args.link
        found = plan_report(args.model, args.tp, rank, rows, args.context, args.distinct, args.bandwidth, link)
        text = render_plan(found)
    elif any(value is not None for value in (args.rank, args.rows, args.distinct, args.link)):
        parser.error("--rank, --rows, --distinct and --link choose what --plan prints: give --plan as well")
    elif qwen2:
        found = qwen2_report(args.model, args.context, args.bandwidth)
        text = render_qwen2(found)
    else:
        found = report(args.model, args.tp, args.context, args.bandwidth)
        text = render(found)
    print(json.dumps(found, indent=2, allow_nan=False) if args.json else text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
