"""Runs a prompt through the CPU's and the GPU's target, eight rows a pass, and names the first buffer that differs.

    python -m tools.diff_engines cuq1/assets/iquest-q1-nano --prompt "def main():" --tolerance 0.01

Every launch of a pass is run by itself and what it wrote is compared with the reference's value of the same name, by
||gpu - cpu|| / ||cpu||. The reference goes on with its own values, so errors add up along the layers as in a real run.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.checkpoint import Checkpoint
from cuq1.cli import Parser, guarded
from cuq1.cuda import abi
from cuq1.cuda.driver import open_device
from cuq1.cuda.execute import Program
from cuq1.cuda.runtime import Runtime
from cuq1.cuda.weights import rank_weights
from cuq1.models import decode, q1
from cuq1.plan.dims import HEAD_DIM, ROWS
from cuq1.plan.types import Plan
from cuq1.reference.ops import F32, linear, rms_norm, route
from cuq1.reference.q1 import LayerForward, TargetForward
from cuq1.reference.weights import Experts, load_target
from cuq1.sampling.depth import default_rule
from cuq1.text import Tokenizer

Values = dict[str, NDArray[Any]]


def layer_values(layer: LayerForward, x: F32, start: int) -> tuple[Values, F32]:
    """Everything that a layer's kernels write, by buffer, and the layer's output [rows, hidden]."""
    weights, config = layer.layer, layer.config
    eps = config.rms_norm_eps
    n = rms_norm(x, weights.attention_norm, eps)
    q = layer._heads(linear(n, weights.q[0], layer.tile), weights.q_norm, start)
    k, v = layer._keys_values(n, 0, start)
    attended = layer._attend(n, 0, start)
    o = linear(attended, weights.o[0], layer.tile)
    residual = n if weights.normed_residual else x
    h = residual + np.float32(weights.attn_scale) * rms_norm(o, weights.attn_out_norm, eps)
    f = rms_norm(h, weights.feed_forward_norm, eps)
    y = layer._mlp(f)
    values: Values = {"q": q, "k_cache": k, "v_cache": v, "attended32": attended, "o": o, "h": h, "ffn_normed": f}
    if isinstance(weights.mlp, Experts):
        values["expert_ids"] = route(linear(f, weights.mlp.router, layer.tile), config.num_experts_per_tok)[0]
    values["y"] = y
    scaled = y if weights.ffn_out_norm is None else rms_norm(y, weights.ffn_out_norm, eps)
    out: F32 = h + np.float32(weights.ffn_scale) * scaled
    return values, out


WRITES = {
    "embed": ("normed",),
    "qkv": ("q", "k_cache", "v_cache"),
    "attention_short": ("attended32",),
    "combine": ("attended32",),
    "o_proj": ("o",),
    "attn_tail": ("h", "ffn_normed", "expert_ids"),
    "down": ("y",),
    "mlp_tail": ("normed",),
    "lm_head": ("logits",),
}


class Pair:
    """The two targets side by side."""

    def __init__(self, model_dir: str) -> None:
        checkpoint = Checkpoint.open(model_dir)
        weights = rank_weights(checkpoint)
        device = open_device()
        self.model = q1.resolve(checkpoint.config, checkpoint.draft_config, weights.layout, sms=device.multiprocessors)
        self.runtime = Runtime(self.model, weights, default_rule())
        self.config = checkpoint.config
        self.cpu = TargetForward(
            load_target(checkpoint, 1), checkpoint.config, checkpoint.config.max_position_embeddings
        )

    def compare(self, ids: list[int], start: int) -> Iterator[tuple[str, float]]:
        """(what, relative error) of everything that a pass of at most eight rows writes, in order."""
        rows = len(ids)
        state = abi.State()
        for i, token in enumerate(ids):
            state.tokens[i], state.positions[i] = token, start + i
        self.runtime.send(state)
        x = self.cpu.weights.embed_tokens[np.asarray(ids)]
        expected: Values = {}
        plan = decode.target_of(self.model, rows)
        for launch in plan.launches:
            Program(Plan(plan.buffers, (launch,)), self.runtime.addresses).issue(self.runtime.stream)
            self.runtime.wait()
            number = launch.layer
            if launch.label == "embed":
                expected["normed"] = rms_norm(x, self._norm(0), self.config.rms_norm_eps)
            if launch.label == "qkv":
                expected, x = layer_values(self.cpu.layers[number], x, start)
                expected["normed"] = rms_norm(x, self._norm(number + 1), self.config.rms_norm_eps)
            if launch.label == "lm_head":
                expected["logits"] = self.cpu.logits(expected["normed"])
            for name in WRITES.get(launch.kernel.entry, WRITES.get(launch.label, ())):
                if name not in expected:
                    continue
                got = self._read(name, launch.layer, rows, start, last=number == len(self.model.layers) - 1)
                yield f"layer {number} {launch.label}: {name}", _error(name, got, expected[name])

    def _norm(self, layer: int) -> F32:
        layers = self.cpu.weights.layers
        return layers[layer].attention_norm if layer < len(layers) else self.cpu.weights.norm

    def _read(self, name: str, layer: int, rows: int, start: int, *, last: bool) -> NDArray[Any]:
        d = self.model.dims
        if name.endswith("_cache"):
            return self._cache(f"{self.model.layers[layer].prefix}.{name}", self.model.layers[layer].slots, rows, start)
        shapes = {
            "q": ((d.q_heads, HEAD_DIM), np.float16),
            "attended32": ((d.q_width,), np.float32),
            "expert_ids": ((d.top_k,), np.int32),
            "logits": ((d.vocab,), np.float32),
            "normed": ((d.hidden,), np.float16),
            "ffn_normed": ((d.hidden,), np.float16),
        }
        shape, dtype = shapes.get(name, ((d.hidden,), np.float32))
        out = np.empty((ROWS, *shape), dtype)
        self.runtime.read("hidden16" if name == "normed" and last else name, out)
        return out[:rows]

    def _cache(self, name: str, slots: int, rows: int, start: int) -> NDArray[Any]:
        heads = self.model.dims.kv_heads
        out = np.empty((heads, slots, HEAD_DIM // 8, 8), np.float16)
        self.runtime.read(name, out)
        picked = []
        for position in range(start, start + rows):
            slot = position % slots
            order = np.arange(HEAD_DIM // 8) ^ (slot & 7)  # the swizzle of common/kv.cuh
            picked.append(out[:, slot][:, order].reshape(heads, HEAD_DIM))
        return np.stack(picked)


def _error(name: str, got: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative error; for expert ids, the share of choices that differ."""
    if name == "expert_ids":
        missing = [len(set(a.tolist()) - set(b.tolist())) for a, b in zip(got, expected, strict=True)]
        return sum(missing) / expected.size
    difference = np.linalg.norm(got.astype(np.float64) - expected)
    return float(difference / max(float(np.linalg.norm(expected)), 1e-30))


def main(argv: list[str] | None = None) -> int:
    return guarded("diff_engines", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.diff_engines", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a checkpoint folder")
    parser.add_argument("--prompt", default="def fibonacci(n):\n    ")
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--all", action="store_true", help="print every comparison")
    args: argparse.Namespace = parser.parse_args(argv)
    pair = Pair(args.model)
    ids = Tokenizer.load(args.model, pair.config.vocab_size).encode(args.prompt, control=False)
    worst: dict[str, float] = {}
    for start in range(0, len(ids), ROWS):
        for what, error in pair.compare(ids[start : start + ROWS], start):
            worst[what] = max(worst.get(what, 0.0), error)
            if args.all:
                print(f"position {start:5} {what:40} {error:.2e}")
            if not error <= args.tolerance:
                print(f"first difference: position {start} and on, {what}, relative error {error:.3g}")
                return 1
    print(
        f"{len(ids)} tokens, no difference beyond {args.tolerance:g}; largest: "
        + ", ".join(f"{what} {error:.1e}" for what, error in sorted(worst.items(), key=lambda one: -one[1])[:5])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
