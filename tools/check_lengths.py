"""Hold the GPU against the reference on a random checkpoint of the released geometry, at lengths around every boundary.

    python -m tools.check_lengths [--reference FILE] [--activations f16] [--log]

6 query heads a KV head, experts of 192 columns (one and a half scale blocks), 256 of them, window 4,096; few layers,
and a small hidden size and vocabulary, so that the CPU can follow. Lengths are those at which a tile, the window, the
ring or a chunk ends. Each is scored as a prompt, and its last rows are computed once more as a decode round does.
FILE keeps the reference's logits: they are computed where it doesn't exist.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from cuq1.cli import Parser, guarded
from cuq1.cuda.engine import CudaEngine
from cuq1.engine import open_engine
from tools.bench import append_row
from tools.checkpoint_tensors import Layout
from tools.make_checkpoint import tiny_config, write_checkpoint

LENGTHS = (1, 63, 64, 65, 4095, 4096, 4097, 4160, 4161, 20000)
GEOMETRY = {
    "hidden_size": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "rotary_dim": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "intermediate_size": 192,
    "dense_intermediate_size": 768,
    "sliding_window": 4096,
    "draft_window": 512,
    "vocab_size": 128,
    "max_position_embeddings": 32768,
}
SEED = 7


def make(folder: Path) -> None:
    """The checkpoint, always the same."""
    target, draft = tiny_config(**GEOMETRY)
    write_checkpoint(folder, target, draft, Layout(), seed=SEED)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_lengths", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.check_lengths", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reference", type=Path, help="where the reference's logits are kept (.npy)")
    parser.add_argument("--activations", choices=["f16", "fp8"], default="f16")
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--reference-only", action="store_true", help="compute and keep them, without a GPU")
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/lengths.jsonl")
    options = parser.parse_args(argv)
    ids = np.random.default_rng(SEED).integers(0, GEOMETRY["vocab_size"], max(LENGTHS)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        if options.reference is not None and options.reference.exists():
            reference = np.load(options.reference)
        else:
            with open_engine(folder, "cpu") as cpu:
                reference = cpu.score(ids)
            if options.reference is not None:
                np.save(options.reference, reference)
        if options.reference_only:
            return 0
        found = []
        with CudaEngine(folder, activations=options.activations) as cuda:
            for length in LENGTHS:
                rows = cuda.score(ids[:length])
                last = cuda.verified_logits(ids[:length])
                scored = _error(rows, reference[:length])
                decoded = _error(last, reference[length - len(last) : length])
                found.append({"length": length, "score": scored, "decode": decoded})
                print(f"{length:6} tokens: prompt {scored:.2e}, decode round {decoded:.2e}", flush=True)
    failed = [one for one in found if not max(one["score"], one["decode"]) <= options.tolerance]
    if options.log:
        append_row("lengths", {"activations": options.activations, "lengths": found, "failed": len(failed)})
    return 1 if failed else 0


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    sys.exit(main())
