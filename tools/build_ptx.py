"""Compiles a model's kernels into ptx/, so that a machine without NVRTC, or with CUQ1_NO_JIT=1, can run it.

    python -m tools.build_ptx cuq1/assets/iquest-q1 --tp 8 [--arch sm_90a] [--out ptx] [--add] [--check]

What builds a wheel or an image calls this first, and with `--add` for each further model. ptx/MANIFEST.json lists every
cubin under the hash of what it was compiled from; a cubin whose sources have changed since is not used, and `--check`
(exit status 1) names what is missing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from cuq1.checkpoint.nanoqwen import is_nanoqwen
from cuq1.checkpoint.qwen2 import is_qwen2, open_qwen2
from cuq1.cli import Parser, guarded
from cuq1.config import load_config
from cuq1.config_qwen2 import load_qwen2_config
from cuq1.cuda import compile as jit
from cuq1.cuda.folders import folder
from cuq1.cuda.kernels import packing
from cuq1.cuda.qwen2_weights import qwen2_layout
from cuq1.cuda.weights import weights_plan
from cuq1.errors import DeviceError
from cuq1.models import decode, loop, prefill, q1, qwen2, qwen2_prefill
from cuq1.models.family import plans_of
from cuq1.plan.dims import MULTIPROCESSORS, ROWS
from cuq1.plan.kernel import Kernel


def qwen2_kernels(path: Path) -> list[Kernel]:
    """Every kernel that a Qwen2 model launches: a token in any context, prompts, scoring, either logits' matrix."""
    config = open_qwen2(path).config if is_nanoqwen(path) else load_qwen2_config(path)
    found: dict[Kernel, None] = {}
    for int4_head, sms in product((False, True), (MULTIPROCESSORS, MULTIPROCESSORS - 1)):  # as on a smaller GPU
        model = qwen2.resolve(config, qwen2_layout(config, int4_head=int4_head), sms=sms)
        own = plans_of(model)
        plans = [loop.round_of(model, 1, 0, short=short) for short in (False, True)]
        plans += [loop.first_of(model, 0), own.logits_of(), qwen2_prefill.chunk_plan(model, prefill.Chunk(0, 1))]
        plans += [qwen2_prefill.steps_plan(model, qwen2_prefill.logits_steps(model), prefill.Chunk(0, 1))]
        found |= {kernel: None for plan in plans for kernel in plan.kernels()}
    return list(found)


def model_kernels(folder: Path, tp: int) -> list[Kernel]:
    """Every kernel that a rank of `tp` launches, which exchange: rounds of any shape, prompts, and loading."""
    if is_qwen2(folder):
        return qwen2_kernels(folder)
    config, draft = load_config(folder)
    drafts = draft.num_draft_slots if draft is not None else 0
    layout = weights_plan(config, draft, tp, 0)
    found: dict[Kernel, None] = {}
    capacities = (config.sliding_window, config.max_position_embeddings)
    for capacity, fp8 in product(capacities, {False, config.fp8_block is not None}):
        model = q1.resolve(config, draft, layout, tp=tp, rank=0, capacity=capacity, fp8_activations=fp8, ranks=tp)
        shapes = list(product(range(1, ROWS + 1), (False, True)))
        plans = [decode.round_of(model, rows, drafts, short=short) for rows, short in shapes]
        plans += [decode.target_of(model, rows, short=short) for rows, short in shapes]
        plans += [decode.round_of(model, 1, 0), decode.first_of(model, drafts), decode.logits_of(model)]
        if drafts:
            plans += [decode.depth_of(model, 0, settle_only=True)]
            plans += [decode.depth_of(model, depth) for depth in range(drafts)]
            plans += [loop.depth_of(model, depth) for depth in range(drafts)]
        plans += [loop.round_of(model, rows, drafts, short=short) for rows, short in shapes]
        plans += [loop.first_of(model, drafts)]
        chunk = prefill.Chunk(0, prefill.CHUNK, 0, prefill.CHUNK if drafts else 0)
        plans.append(prefill.chunk_plan(model, chunk))
        plans.append(prefill.plan_of(model, [prefill.logits_step(model)], prefill.Chunk(0, prefill.SCORED)))
        found |= {kernel: None for plan in plans for kernel in plan.kernels()}
        found |= dict.fromkeys(packing.kernels(model.dims))
    return list(found)


def build(kernels: Sequence[Kernel], arch: str, out: Path, *, add: bool = False) -> dict[str, Any]:
    """Fills `out`, beside what it lists with `add`, and returns the manifest.

    Raises DeviceError for a kernel that is over its budget.
    """
    out.mkdir(parents=True, exist_ok=True)
    cubins: dict[str, Any] = _listed(out) if add else {}
    for kernel in kernels:
        compiled = jit.compile_kernel(kernel, arch)
        problem = jit.over_budget(kernel, compiled)
        if problem is not None:
            raise DeviceError(problem)
        source = jit.digest(kernel, arch)
        if source in cubins:
            cubins[source]["kernels"][kernel.entry] = _figures(compiled)
            continue
        name = f"{Path(kernel.source).stem}-{source[:16]}.cubin"
        jit.replace_file(out / name, compiled.path.read_bytes())
        cubins[source] = {
            "file": name,
            "source": kernel.source,
            "defines": dict(kernel.defines),
            "arch": arch,
            "kernels": {kernel.entry: _figures(compiled)},
            "log": compiled.log,
        }
    manifest = {"compiler": f"NVRTC {jit.nvrtc_version()}", "flags": list(jit.FLAGS), "cubins": cubins}
    for old in out.glob("*.cubin"):
        if old.name not in {entry["file"] for entry in cubins.values()}:
            old.unlink()
    jit.replace_file(out / "MANIFEST.json", (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


def _figures(compiled: jit.Cubin) -> dict[str, int]:
    return {"registers": compiled.registers, "spills": compiled.spills, "static_smem": compiled.smem}


def _listed(out: Path) -> dict[str, Any]:
    path = out / "MANIFEST.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))["cubins"]) if path.is_file() else {}


def missing(kernels: Sequence[Kernel], arch: str, out: Path) -> list[str]:
    """The sources of kernels that `out` holds no cubin for, as they stand now."""
    cubins = _listed(out)
    lacking = set()
    for kernel in kernels:
        entry = cubins.get(jit.digest(kernel, arch))
        if entry is None or not (out / entry["file"]).is_file():
            lacking.add(f"{kernel.source}: {kernel.entry}")
    return sorted(lacking)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools.build_ptx", description="Compiles a model's kernels ahead of time.")
    parser.add_argument("dir", type=Path, nargs="+", help="folders with config.json, or .nanoqwen files")
    parser.add_argument(
        "--tp", type=int, nargs="+", default=[1], metavar="N", help="tensor-parallel ranks, one number or several (1)"
    )
    parser.add_argument("--arch", default="sm_90a", help="default %(default)s")
    parser.add_argument("--out", type=Path, default=folder("ptx"), help="default %(default)s")
    parser.add_argument("--add", action="store_true", help="keep what the folder lists already")
    parser.add_argument("--check", action="store_true", help="only say whether every cubin is there and current")
    return guarded("tools.build_ptx", lambda: _run(parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    shares = product(args.dir, args.tp)
    kernels = list(dict.fromkeys(kernel for folder, tp in shares for kernel in model_kernels(folder, tp)))
    if args.check:
        lacking = missing(kernels, args.arch, args.out)
        print("\n".join([f"no current cubin of {name}" for name in lacking] or [f"{args.out} is complete"]))
        return 1 if lacking else 0
    cubins = build(kernels, args.arch, args.out, add=args.add)["cubins"]
    size = sum((args.out / entry["file"]).stat().st_size for entry in cubins.values())
    print(f"{len(cubins)} cubins, {size / 1e6:.1f} MB, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
