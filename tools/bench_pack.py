"""Time packing a Qwen2 folder to a .nanoqwen file, and opening it.

    python tools/bench_pack.py HF_DIR [--repeats 3] [--log]

Packing: a process of its own, from its start to the file on the disk, with its peak memory; beside it the least that
it could take, reading as many bytes and writing as many durably. Rounding: one layer's down_proj in memory, without
files. Opening: every checksum. Source files are read once before, so they are in memory if they fit.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, whose folder is on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuq1.checkpoint import int4
from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.checkpoint.qwen2_folder import Qwen2Folder
from cuq1.cli import Parser, guarded
from tools.bench import ROOT, append_row, at_least_one

_PIECE = 1 << 22


def seconds(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median and spread of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def copy(sources: list[Path], out: Path, size: int) -> None:
    """Read the sources, and write `size` bytes durably."""
    buffer = bytearray(_PIECE)
    with out.open("wb", buffering=0) as file:
        for source in sources:
            with source.open("rb", buffering=0) as opened:
                while count := opened.readinto(buffer):
                    size -= file.write(memoryview(buffer)[: min(count, size)])
        os.fsync(file.fileno())


def measure(model: Path, repeats: int) -> dict[str, Any]:
    folder = Qwen2Folder.open(model)
    sources = sorted({folder.index.path(name) for name in folder.index.names})
    source_bytes = sum(path.stat().st_size for path in sources)
    with tempfile.TemporaryDirectory(dir=model.resolve().parent) as scratch:
        out = Path(scratch) / "m.nanoqwen"
        command = [sys.executable, "-m", "cuq1.pack", str(model.resolve()), str(out)]
        packing = seconds(lambda: subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL), repeats)
        # first of all, since a process starts with the peak of the one that starts it
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        size = out.stat().st_size
        opening = seconds(lambda: Nanoqwen.open(out), repeats)
        least = seconds(lambda: copy(sources, Path(scratch) / "copy", size), repeats)
    weights = folder.tensor("model.layers.0.mlp.down_proj.weight").copy()
    rounding = seconds(lambda: int4.pack(int4.quantise(weights)[0]), max(repeats, 5))
    return {
        "model": model.name,
        "source_mb": round(source_bytes / 1e6, 1),
        "packed_mb": round(size / 1e6, 1),
        "pack_s": _rounded(packing),
        "pack_mb_per_s": round(source_bytes / 1e6 / packing["median"]),
        "copy_s": _rounded(least),
        "of_copy": round(least["median"] / packing["median"], 2),
        "peak_mb": round(peak / 1e6),
        "rounding_shape": list(weights.shape),
        "rounding_s": _rounded(rounding),
        "rounding_mb_per_s": round(weights.nbytes / 1e6 / rounding["median"]),
        "open_s": _rounded(opening),
        "open_mb_per_s": round(size / 1e6 / opening["median"]),
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in values.items()}


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="bench_pack", description="Time packing and opening.")
    parser.add_argument("model", metavar="HF_DIR", type=Path)
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/pack.jsonl")
    args = parser.parse_args(argv)
    results = measure(args.model, args.repeats)
    print(json.dumps(results))
    if args.log:
        append_row("pack", results)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("bench_pack", lambda: _run(None)))
