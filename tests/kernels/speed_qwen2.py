"""Times a token's INT4 products over several layers' weights: python3 -m tests.kernels.speed_qwen2 [WORD ...]

Words: a size of tests/kernels/qwen2_shapes.py (7b where none is given); or NAME=U,S,T,W,D, which gives a kernel (qkv,
o_proj, gate_up, down, all four as `all`, or `chain`) copies of U units, S of them a warp, trigger T (0 at once, 1 after
the wait, 2 after the copies), W warps, and halves (0) or digits (1). Several of these up to a -- are one variant,
compared with the kernels as they are.

Or `layers`, which times all layers as one launch instead, with real attention, and layers=U,S,A,SLOTS,SPAN,PARTS for
another form of it: constants of cuq1/cuda/kernels/qwen2_layers.py (U units a stage, S stages at the most, A of them
ahead; an empty place for one as it is; others as NAME:number). With these, context=N is the positions that are attended
to, and count=N the layers, an even number.

Prints, for a captured chain of layers with a small kernel in attention's place: microseconds a layer, and what each
kernel adds to it (the chain with it, less the chain without), its GB/s, and its share of this run's read ceiling.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from cuq1.cuda import compile as jit
from cuq1.cuda.abi import (
    BandwidthArgs,
    Qwen2ChainArgs,
    Qwen2GateUpArgs,
    Qwen2HeadArgs,
    Qwen2ProjectionArgs,
    Qwen2QkvArgs,
)
from cuq1.cuda.kernels import qwen2_gemv
from cuq1.plan.kernel import Kernel
from cuq1.plan.qwen2_dims import UNIT_BYTES, Qwen2Dims, matrix_bytes, padded, pieces
from tests.kernels import speed_qwen2_layers
from tests.kernels.harness import Gpu
from tests.kernels.qwen2_shapes import ALL
from tests.paths import ROOT

NAMES = ("qkv", "attention", "o_proj", "gate_up", "down")
PAUSE = 4500  # clock cycles, about 2.5 us
BYTES = 1 << 30  # of weights in a chain: many times what L2 holds


def compile_beside(where, name):
    """Lets kernels be compiled from `where`, a folder with the product's sources and one of the tests'."""
    for path in (ROOT / "kernels_cu").iterdir():
        (Path(where) / path.name).symlink_to(path)
    (Path(where) / name).symlink_to(Path(__file__).parent / name)
    folder = jit.folder
    jit.folder = lambda name: Path(where) if name == "kernels_cu" else folder(name)


def stand_in():
    """A launch that waits for its predecessor, takes a while and moves nothing."""
    return Kernel("qwen2_stand_in.cu", "qwen2_stand_in", BandwidthArgs, (), (132, 1, 1), 128, smem=48 << 10)


def random_units(gpu, size, k):
    """Random codes in `size` bytes, and scales that keep products of order 1."""
    words = gpu.cupy.random.randint(-(2**31), 2**31 - 1, (size // UNIT_BYTES, UNIT_BYTES // 4), dtype=np.int32)
    units = words.view(np.uint8)
    units[:, 1024:] = gpu.array(np.full(16, 0.2 * k**-0.5, np.float16).view(np.uint8))
    return units


def kernels_of(dims, rings=None):
    rings = rings or {}
    return {
        name: getattr(qwen2_gemv, name)(dims, *([rings[name]] if name in rings else []))
        for name in ("qkv", "o_proj", "gate_up", "down", "lm_head")
    }


class Layers:
    """As many layers' weights as L2 cannot hold, and one token's buffers."""

    def __init__(self, gpu: Gpu, dims: Qwen2Dims, count: int | None = None):
        self.gpu, self.dims = gpu, dims
        gate_up = dims.gate_up_tiles * padded(dims.hidden) // 128 * UNIT_BYTES
        self.sizes = {
            "qkv": matrix_bytes(dims.qkv_rows, dims.hidden),
            "o_proj": matrix_bytes(dims.hidden, dims.q_width),
            "gate_up": gate_up,
            "down": matrix_bytes(dims.hidden, dims.inner),
            "lm_head": matrix_bytes(dims.vocab, dims.hidden),
        }
        self.layer_bytes = sum(self.sizes.values()) - self.sizes["lm_head"]
        self.count = count or max(4, min(28, BYTES // self.layer_bytes)) // 2 * 2
        k = {"down": dims.inner, "o_proj": dims.q_width}
        self.weights = [
            {
                name: random_units(gpu, size, k.get(name, dims.hidden))
                for name, size in self.sizes.items()
                if name != "lm_head"
            }
            for _ in range(self.count)
        ]
        self.head = [random_units(gpu, self.sizes["lm_head"], dims.hidden) for _ in range(2)]
        rng = np.random.default_rng(1)
        self.norm = gpu.array(rng.uniform(0.5, 1.5, dims.hidden).astype(np.float16))
        self.residual = [gpu.array(rng.standard_normal(dims.hidden, np.float32)) for _ in range(2)]
        self.zeros = {
            "qkv": gpu.cupy.zeros((pieces(dims.qkv_rows, dims.hidden), dims.qkv_rows), np.float32),
            "o": gpu.cupy.zeros((pieces(dims.hidden, dims.q_width), dims.hidden), np.float32),
            "down": gpu.cupy.zeros((pieces(dims.hidden, dims.inner), dims.hidden), np.float32),
            "inner": gpu.cupy.zeros(padded(dims.inner), np.float16),
            "logits": gpu.cupy.zeros(dims.vocab, np.float32),
        }
        # What a chain's blocks poll for, twice: o_proj's pieces, down's, and inner, which is as many halves.
        sizes = [self.zeros["o"].nbytes, self.zeros["down"].nbytes, self.zeros["inner"].nbytes]
        self.handed_words = sum(sizes) // 4
        self._unready = gpu.array(np.full((2, self.handed_words), 0xFFFFFFFF, np.uint32))
        starts = (self._unready[i].data.ptr for i in range(2))
        self.handed = [(start, start + sizes[0], start + sizes[0] + sizes[1]) for start in starts]
        self.attended = gpu.array(rng.standard_normal(padded(dims.q_width)).astype(np.float16))
        self.out = gpu.cupy.zeros(4096, np.uint32)

    def chain(self, kernels, names=NAMES, attention=None, pause=0):
        """(kernel, args) of all layers: those kernels of each that `names` has. pause: attention's clock cycles."""
        z, fault = {name: x.data.ptr for name, x in self.zeros.items()}, self.gpu.fault.address
        calls, now, other = [], *(x.data.ptr for x in self.residual)
        for layer, weights in enumerate(self.weights):
            w = {name: x.data.ptr for name, x in weights.items()}
            head = {"fault": fault, "layer": layer, "rows": 1}
            if "qkv" in names:
                args = Qwen2QkvArgs(
                    **head, residual=now, pieces=z["down"] if layer else 0, norm=self.norm.data.ptr, weights=w["qkv"],
                    residual_out=other, out=z["qkv"],
                )  # fmt: skip
                calls.append((kernels["qkv"], args))
                now, other = other, now
            if "attention" in names:
                calls.append((attention, BandwidthArgs(z["qkv"], self.out.data.ptr, pause)))
            if "o_proj" in names:
                args = Qwen2ProjectionArgs(
                    **head, **{"in": self.attended.data.ptr}, weights=w["o_proj"], out=z["o"], scale=1.0
                )
                calls.append((kernels["o_proj"], args))
            if "gate_up" in names:
                args = Qwen2GateUpArgs(
                    **head, residual=now, pieces=z["o"], norm=self.norm.data.ptr, weights=w["gate_up"],
                    residual_out=other, inner=z["inner"],
                )  # fmt: skip
                calls.append((kernels["gate_up"], args))
                now, other = other, now
            if "down" in names:
                args = Qwen2ProjectionArgs(**head, **{"in": z["inner"]}, weights=w["down"], out=z["down"], scale=16.0)
                calls.append((kernels["down"], args))
        return calls

    def chained(self, kernel, attention, pause=0):
        """(kernel, args) of all layers as launches of attention and the chain behind it."""
        fault, calls = self.gpu.fault.address, []
        for layer, weights in enumerate(self.weights):
            following = self.weights[(layer + 1) % self.count]
            o, down, inner = self.handed[layer % 2]
            calls.append((attention, BandwidthArgs(self.zeros["qkv"].data.ptr, self.out.data.ptr, pause)))
            args = Qwen2ChainArgs(
                fault=fault, layer=layer, rows=1, attended=self.attended.data.ptr,
                o_weights=weights["o_proj"].data.ptr, gate_up_weights=weights["gate_up"].data.ptr,
                down_weights=weights["down"].data.ptr, qkv_weights=following["qkv"].data.ptr,
                post_norm=self.norm.data.ptr, next_norm=self.norm.data.ptr,
                residual=self.residual[layer % 2].data.ptr, residual_out=self.residual[1 - layer % 2].data.ptr,
                o_pieces=o, down_pieces=down, inner=inner, qkv_pieces=self.zeros["qkv"].data.ptr,
                unready=self.handed[1 - layer % 2][0], unready_pieces=self.handed_words // 4,
            )  # fmt: skip
            calls.append((kernel, args))
        return calls

    def heads(self, kernels):
        z = self.zeros["logits"].data.ptr
        return [
            (
                kernels["lm_head"],
                Qwen2HeadArgs(rows=1, normed=self.attended.data.ptr, weights=w.data.ptr, logits=z),
            )
            for w in self.head
        ]

    def time(self, calls, count):
        median, (low, high) = self.gpu.median_us(calls, repeats=30, copies=max(1, 200 // len(calls)))
        return median / count, (high - low) / count


def report(layers, attention, rings=None, *, parts=True):
    """One variant's table."""
    kernels, ceiling = kernels_of(layers.dims, rings), layers.gpu.read_ceiling()

    def share(size, us):
        return f"{size / us / 1e3:6.0f} GB/s {size / us / 1e3 / ceiling:4.0%}"

    whole, spread = layers.time(layers.chain(kernels, attention=attention), layers.count)
    paused, _ = layers.time(layers.chain(kernels, attention=attention, pause=PAUSE), layers.count)
    own = f"{share(layers.layer_bytes, whole)}, with {PAUSE} cycles of attention {paused:.2f} us"
    print(f"  layer {whole:7.2f} us +- {spread / 2:.2f}  {own}", flush=True)
    if not parts:
        return
    for name in NAMES:
        rest, _ = layers.time(layers.chain(kernels, [n for n in NAMES if n != name], attention), layers.count)
        alone, _ = layers.time(layers.chain(kernels, [name], attention), layers.count)
        size = layers.sizes.get(name, 0)
        if 0 < size < 30e6:  # what is left where weights come from L2
            first = layers.weights[0][name].data.ptr
            calls = layers.chain(kernels, [name], attention)
            for _, args in calls:
                args.weights = first
            cached, _ = layers.time(calls, layers.count)
            alone_in_l2 = f", {cached:.2f} us from L2"
        else:
            alone_in_l2 = ""
        own = f"{alone:7.2f} us {share(size, alone)}"
        print(f"    {name:10}{whole - rest:7.2f} us {share(size, whole - rest)}   by itself {own}{alone_in_l2}")
    us, _ = layers.time(layers.heads(kernels), 2)
    print(f"    lm_head   {us:7.2f} us {share(layers.sizes['lm_head'], us)}", flush=True)


def report_chain(layers, attention, *ring):
    """The same layer in two launches: attention's stand-in, and the chain."""
    kernel, ceiling = qwen2_gemv.chain(layers.dims, *ring), layers.gpu.read_ceiling()
    times = []
    for pause in (0, PAUSE):
        us, spread = layers.time(layers.chained(kernel, attention, pause), layers.count)
        times.append(f"{us:.2f} us +- {spread / 2:.2f} ({layers.layer_bytes / us / 1e3 / ceiling:.0%})")
    print(f"  chain: layer {times[0]}, with {PAUSE} cycles of attention {times[1]}", flush=True)


def variants(words):
    """Lists of rings by kernel's name."""
    found = [{}]
    for word in words:
        if word == "--":
            found.append({})
            continue
        name, _, numbers = word.partition("=")
        ring = qwen2_gemv.Ring(*map(int, numbers.split(",")))
        found[-1].update(dict.fromkeys(("qkv", "o_proj", "gate_up", "down") if name == "all" else [name], ring))
    return [rings for rings in found if rings]


def report_layers(gpu, sizes, words):
    """All layers in one launch. Returns whether all its forms give the same."""
    given = dict(word.split("=") for word in words if word.startswith(("context=", "count=")))
    count, context = int(given.get("count", 28)) // 2 * 2, int(given.get("context", speed_qwen2_layers.CONTEXT))
    forms = [speed_qwen2_layers.variant(word) for word in words if word.startswith("layers")]
    print(f"read ceiling {gpu.read_ceiling():.0f} GB/s")
    same = True
    for size in sizes:
        layers = Layers(gpu, ALL[size], count)
        print(f"{size}: {layers.layer_bytes / 1e6:.1f} MB a layer, {layers.count} layers")
        same = speed_qwen2_layers.report(layers, context, forms) and same
    return same


def main():
    words = sys.argv[1:]
    sizes = [word for word in words if word in ALL] or ["7b"]
    gpu = Gpu()
    if any(word.startswith("layers") for word in words):
        same = report_layers(gpu, sizes, words)
        gpu.close()
        sys.exit(None if same else "forms of the launch differ by more than their rounding")
    with tempfile.TemporaryDirectory() as where:
        compile_beside(where, "qwen2_stand_in.cu")
        attention = stand_in()
        print(f"read ceiling {gpu.read_ceiling():.0f} GB/s")
        for size in sizes:
            layers = Layers(gpu, ALL[size])
            print(f"{size}: {layers.layer_bytes / 1e6:.1f} MB a layer, {layers.count} layers")
            report(layers, attention)
            report_chain(layers, attention)
            for rings in variants([word for word in words if word not in ALL]):
                texts = (f"{n}={r.units},{r.stages},{r.trigger},{r.warps},{int(r.digits)}" for n, r in rings.items())
                print(f"  {' '.join(texts)}")
                if "chain" in rings:
                    report_chain(layers, attention, rings["chain"])
                else:
                    report(layers, attention, rings, parts=False)
    gpu.close()


if __name__ == "__main__":
    main()
