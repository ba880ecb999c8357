"""Times Qwen2's decode attention: python3 -m tests.kernels.speed_qwen2_attention [MODEL ...]

Prints microseconds a layer in a chain of many launches, each with pages of its own so that L2 does not hold them: the
short form, the long form with combine, combine alone; beside them what reading the pages takes at the read ceiling.
"""

import sys

import numpy as np

from cuq1.cuda import abi
from cuq1.cuda.kernels import qwen2_attention as family
from cuq1.plan.qwen2_dims import PAGE, padded
from tests.kernels.harness import Gpu
from tests.kernels.qwen2_shapes import RELEASED

BYTES = 320 << 20  # of all layers' pages: several times L2
POSITIONS = (64, 576, 1024, 2048, 4096, 16384, 32767)


class Chain:
    """Layers at one position, their pages in any order."""

    def __init__(self, gpu, dims, pool, position, layers=None):
        rng = np.random.default_rng(1)
        self.gpu, self.splits = gpu, family.splits_for(dims)
        pages = position // PAGE + 1
        page_bytes = dims.kv_heads * PAGE * dims.head_size * 2
        self.bytes = 2 * dims.kv_heads * dims.head_size * 2 * (position + 1)
        layer_bytes = 2 * pages * page_bytes
        layers = layers or max(4, min(200, BYTES // layer_bytes))
        self.k = [pool.data.ptr + layer * layer_bytes for layer in range(layers)]
        self.v_offset = pages * page_bytes
        statistics = (dims.kv_heads, dims.group, self.splits)
        self.buffers = {
            "positions": gpu.array(np.array([position], np.int32)),
            "pieces": gpu.array(rng.standard_normal((8, dims.qkv_rows), np.float32)),
            "bias": gpu.array(rng.standard_normal(dims.qkv_rows).astype(np.float16)),
            "inverse_frequencies": gpu.array(1e6 ** (-2 * np.arange(dims.head_size // 2) / dims.head_size)),
            "page_table": gpu.array(rng.permutation(pages).astype(np.int32)),
            "attended": gpu.poison(padded(dims.q_width), np.float16),
            "partial_out": gpu.poison((dims.kv_heads, self.splits, dims.group, dims.head_size), np.float32),
            "partial_max": gpu.poison(statistics, np.float32),
            "partial_sum": gpu.poison(statistics, np.float32),
        }

    def calls(self, kernel):
        """A launch of the kernel for each layer."""
        found = []
        for layer, k in enumerate(self.k):
            args = kernel.args(fault=self.gpu.fault.address, layer=layer, rows=1, splits=self.splits)
            if kernel.args is abi.Qwen2AttentionArgs:
                args.k_pages, args.v_pages = k, k + self.v_offset
            for name, buffer in self.buffers.items():
                if hasattr(args, name):
                    setattr(args, name, buffer.data.ptr)
            found.append((kernel, args))
        return found

    def us(self, *kernels):
        """Microseconds a layer of these kernels, one after the other: median, and the 10th and 90th percentile."""
        calls = [call for one in zip(*map(self.calls, kernels), strict=True) for call in one]
        median, spread = self.gpu.median_us(calls, 20)
        return median / len(self.k), [value / len(self.k) for value in spread]


def random_pool(gpu):
    pool = gpu.cupy.empty((BYTES + (256 << 20)) // 2, np.float16)
    step = 1 << 24
    for at in range(0, len(pool), step):
        pool[at : at + step] = gpu.cupy.random.standard_normal(len(pool[at : at + step]), np.float32)
    return pool


def main(names):
    gpu = Gpu()
    ceiling = gpu.read_ceiling()
    print(f"read ceiling {ceiling:.0f} GB/s")
    pool = random_pool(gpu)
    print(f"{'model':>6} {'positions':>9} {'floor':>6} {'short':>6}  spread        {'long':>6} {'both':>6} {'comb':>5}")
    for name in names or ("7b", "1.5b", "0.5b"):
        dims = RELEASED[name]
        short, long, combine = family.attention_short(dims), family.attention(dims), family.combine(dims)
        for position in POSITIONS:
            chain = Chain(gpu, dims, pool, position - 1)
            taken, (low, high) = chain.us(short)
            print(
                f"{name:>6} {position:9} {chain.bytes / ceiling / 1e3:6.2f} {taken:6.2f} ({low:.2f} to {high:.2f}) "
                f"{chain.us(long)[0]:6.2f} {chain.us(long, combine)[0]:6.2f} {chain.us(combine)[0]:5.2f}"
            )
    gpu.close()


if __name__ == "__main__":
    main(sys.argv[1:])
