"""Times gate_up and down over several layers' weights: python3 -m tests.kernels.speed_experts [key=value ...]

Keys: stages (gate_up); tiles, depth (down); dims: fp8, bf16 or e4m3; groups: distinct experts, as 8,38. Further
variants follow a --; without any, those that are worth a comparison. Prints microseconds a layer and the ratio to the
read ceiling, for each kernel in a chain of its own kind, for both in turn, and for both with a small kernel between
layers, whose own time is taken off.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from cuq1.cuda.abi import BandwidthArgs, DownArgs, GateUpArgs
from cuq1.cuda.kernels import experts
from cuq1.cuda.repack import unit_bytes
from cuq1.plan.kernel import Kernel
from tests.kernels.harness import Gpu
from tests.kernels.shapes import RELEASED

LAYERS = 16
ROWS = 8
WORTH_COMPARING = (
    "stages=8 -- stages=6 groups=8,38 -- stages=10 groups=8,38 -- stages=12 groups=8,38 -- tiles=2 depth=1 groups=8,38 "
    "-- tiles=1 depth=2 groups=8,38 -- tiles=1 depth=4 groups=8,38 -- dims=e4m3 groups=8,38 -- dims=bf16 groups=8,38"
)


def choices(rng, dims, distinct, count=ROWS, near=0):
    """Expert ids [count, top_k] with that many distinct experts; near: they are neighbours."""
    pool = rng.choice(dims.experts, distinct, replace=False)
    if near:
        pool = rng.permutation(distinct) + int(rng.integers(dims.experts - distinct))
    rows = [pool[i : i + dims.top_k] for i in range(0, distinct, dims.top_k)]
    if len(rows[-1]) < dims.top_k:
        others = rng.choice(np.setdiff1d(pool, rows[-1]), dims.top_k - len(rows[-1]), replace=False)
        rows[-1] = np.concatenate((rows[-1], others))
    while len(rows) < count:
        rows.append(rng.choice(pool, dims.top_k, replace=False))
    return np.stack(rows).astype(np.int32)


class Layers:
    def __init__(self, gpu, dims):
        xp = gpu.cupy
        rng = np.random.default_rng(1)
        self.gpu, self.dims = gpu, dims
        self.unit = unit_bytes(dims.hidden, fp8=dims.fp8_experts) * dims.inner // 8
        self.tile = dims.hidden * dims.inner * (1 if dims.fp8_experts else 2)
        self.gate_up = [self._random(dims.experts * self.unit) for _ in range(LAYERS)]
        self.down = [self._random(dims.experts * self.tile) for _ in range(LAYERS)]
        self.scales = [xp.ones((dims.experts, dims.hidden // 16, 4), np.float32) for _ in range(LAYERS)]
        self.x = gpu.array((0.01 * rng.standard_normal((ROWS, dims.hidden))).astype(np.float16))
        self.codes = gpu.array(rng.integers(0, 0x30, (ROWS, dims.hidden), np.uint8))
        self.code_scale = gpu.array(np.full(ROWS, 0.01, np.float32))
        self.inner = xp.zeros((64, ROWS, dims.inner), np.float16)
        self.inner_max = xp.ones((64, ROWS), np.float32)
        self.out = xp.zeros((ROWS, dims.hidden), np.float32)
        self.routing = gpu.array(np.full((ROWS, dims.top_k), 0.125, np.float32))

    def _random(self, size):
        """Bytes that are small numbers, both as E4M3 codes and as the high byte of a float."""
        xp = self.gpu.cupy
        words = xp.random.randint(0, 2**31 - 1, size // 4, dtype=np.int32)
        words &= np.int32(0x3F3F3F3F)
        return words.view(np.uint8)

    def calls(self, ids, gate_up, down, between=None):
        """One list of (kernel, args) for all layers."""
        dims, found = self.dims, []
        for layer, chosen in enumerate(ids):
            if between is not None:
                found.append((between, BandwidthArgs(self.out.data.ptr, self.inner_max.data.ptr, 24)))
            if gate_up is not None:
                args = GateUpArgs(
                    rows=ROWS,
                    layer=layer,
                    normed=self.x.data.ptr,
                    codes=self.codes.data.ptr,
                    code_scale=self.code_scale.data.ptr,
                    weights=self.gate_up[layer].data.ptr,
                    expert_ids=chosen.data.ptr,
                    inner=self.inner.data.ptr,
                    inner_max=self.inner_max.data.ptr,
                )
                found.append((gate_up, args))
            if down is not None:
                args = DownArgs(
                    rows=ROWS,
                    layer=layer,
                    inner=self.inner.data.ptr,
                    inner_max=self.inner_max.data.ptr,
                    weights=self.down[layer].data.ptr,
                    scales=self.scales[layer].data.ptr if dims.fp8_experts else 0,
                    expert_ids=chosen.data.ptr,
                    expert_weights=self.routing.data.ptr,
                    out=self.out.data.ptr,
                )
                found.append((down, args))
        return found


def stand_in():
    path = Path(__file__).with_name("stand_in.cu")
    return Kernel(str(path), "stand_in", BandwidthArgs, (), (24, 1, 1), 128)


def options(text):
    found = dict(item.split("=") for item in text)
    return {key: value if key in {"groups", "dims"} else int(value) for key, value in found.items()}


def report(layers, given, alone):
    gpu, dims = layers.gpu, layers.dims
    ceiling = gpu.read_ceiling()
    gate_up = experts.gate_up(dims, stages=given.get("stages"))
    down = experts.down(dims, tiles=given.get("tiles"), depth=given.get("depth"))
    between = stand_in()
    print(f"{given}: ceiling {ceiling:.0f} GB/s, gate_up {gate_up.smem} B, down {down.smem} B x {down.grid[0]}")
    rng = np.random.default_rng(2)
    empty = gpu.median_us(layers.calls([None] * LAYERS, None, None, between), 20)[0] / LAYERS
    for distinct in map(int, given.get("groups", "8,11,24,38,48").split(",")):
        ids = [gpu.array(choices(rng, dims, distinct)) for _ in range(LAYERS)]
        sizes = distinct * layers.unit, distinct * layers.tile
        line = f"{distinct:3d} groups"
        for name, a, b, size, mid, used in (
            ("gate_up", gate_up, None, sizes[0], None, alone),
            ("down", None, down, sizes[1], None, alone),
            ("pair", gate_up, down, sum(sizes), None, True),
            ("pair, spaced", gate_up, down, sum(sizes), between, True),
        ):
            if not used:
                continue
            total, (low, high) = gpu.median_us(layers.calls(ids, a, b, mid), 20)
            us = total / LAYERS - (empty if mid is not None else 0)
            spread = (high - low) / LAYERS
            line += f" | {name} {us:.2f} us +-{spread / 2:.2f} {100 * size / us / 1e3 / ceiling:.0f}%"
        print(line, flush=True)


def variants(gpu, worth, make):
    """(layers, options) of each variant of the command line, or of `worth`; make(gpu, dims) only where dims change."""
    words_of = [[]]
    for word in sys.argv[1:] or worth.split():
        if word == "--":
            words_of.append([])
        else:
            words_of[-1].append(word)
    parsed = [options(words) for words in words_of]
    dims = {"fp8": RELEASED, "bf16": replace(RELEASED, fp8_experts=False)}
    dims["e4m3"] = replace(RELEASED, fp8_activations=True)
    layers = None
    for given in parsed:
        chosen = dims[given.get("dims", "fp8")]
        if layers is None or layers.dims != chosen:
            layers = make(gpu, chosen)
        yield layers, given


def main():
    gpu = Gpu()
    for number, (layers, given) in enumerate(variants(gpu, WORTH_COMPARING, Layers)):
        report(layers, given, number == 0)
    gpu.close()


if __name__ == "__main__":
    main()
