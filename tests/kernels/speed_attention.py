"""Times attention, combine and attention_short at the released share's sizes: python3 -m tests.kernels.speed_attention

Prints microseconds of one launch in a chain of many, each layer with caches of its own so that L2 does not hold them:
attention alone, with combine, and combine alone, with what attention reads against what memory delivers; and
attention_short, which does both.
"""

import numpy as np

from cuq1.cuda.kernels import attention as family
from cuq1.plan.dims import HEAD_DIM, KV_TILE, ROWS
from tests.kernels.harness import Gpu
from tests.kernels.shapes import RELEASED

BYTES = 320 << 20  # of all layers' caches: several times L2


class Chain:
    """Layers at one position."""

    def __init__(self, gpu, pool, window, position, rows):
        self.gpu, self.window, self.rows = gpu, window, rows
        self.splits = family.splits_for(RELEASED)
        low, high = position - rows + 1, position
        first = max(0, low - window + 1) // family.UNIT if window else 0
        self.bytes = (high // family.UNIT + 1 - first) * family.UNIT * HEAD_DIM * 4
        self.slots = window + KV_TILE if window else (high // KV_TILE + 1) * KV_TILE
        layer_bytes = self.slots * HEAD_DIM * 4
        m = ROWS * RELEASED.group
        self.buffers = {
            "positions": gpu.array(np.arange(low, low + ROWS, dtype=np.int32)),
            "q": pool[: ROWS * RELEASED.q_width],
            "partial_out": gpu.poison((self.splits, m, HEAD_DIM), np.float32),
            "partial_max": gpu.poison((m, self.splits), np.float32),
            "partial_sum": gpu.poison((m, self.splits), np.float32),
            "sink_k": gpu.array(np.full(HEAD_DIM, 0.1, np.float32)),
            "attended32": gpu.poison((ROWS, RELEASED.q_width), np.float32),
            "attended": gpu.poison((ROWS, RELEASED.q_width), np.float16),
        }
        layers = max(2, min(200, BYTES // layer_bytes))
        self.caches = [pool.data.ptr + layer * layer_bytes for layer in range(layers)]

    def calls(self, kernel):
        """A launch of the kernel for each layer."""
        scalars = {
            "fault": self.gpu.fault.address,
            "rows": self.rows,
            "written": self.rows,
            "window": self.window,
            "slots": self.slots,
            "splits": self.splits,
            "scale": HEAD_DIM**-0.5,
        } | {name: buffer.data.ptr for name, buffer in self.buffers.items()}
        names = {name for name, *_ in kernel.args._fields_}
        found = []
        for layer, k in enumerate(self.caches):
            values = {**scalars, "layer": layer, "k_cache": k, "v_cache": k + self.slots * HEAD_DIM * 2}
            found.append((kernel, kernel.args(**{name: value for name, value in values.items() if name in names})))
        return found

    def us(self, *kernels):
        """Microseconds a layer of these kernels, one after the other."""
        calls = [call for one in zip(*map(self.calls, kernels), strict=True) for call in one]
        return self.gpu.median_us(calls, 30)[0] / len(self.caches)


def main():
    gpu = Gpu()
    ceiling = gpu.read_ceiling()
    print(f"read ceiling {ceiling:.0f} GB/s")
    pool = gpu.cupy.empty((BYTES + (128 << 20)) // 2, np.float16)
    step = 1 << 24
    for at in range(0, len(pool), step):
        pool[at : at + step] = gpu.cupy.random.standard_normal(len(pool[at : at + step]), np.float32)
    print(f"{'window':>6} {'position':>8} {'rows':>4} {'attention':>9} {'GB/s':>5} {'ratio':>6} both  comb")
    attention, combine = family.attention(RELEASED), family.combine(RELEASED, family.splits_for(RELEASED))
    for position in (4, 8, 16, 64, 192):
        for rows in (8, 1):
            chain = Chain(gpu, pool, 0, position << 10, rows)
            alone = chain.us(attention)
            rate = chain.bytes / alone / 1e3
            print(
                f"{0:6} {position << 10:8} {rows:4} {alone:9.2f} {rate:5.0f} {rate / ceiling:6.1%} "
                f"{chain.us(attention, combine):5.2f} {chain.us(combine):5.2f}"
            )
    print(f"{'window':>6} {'position':>8} {'rows':>4} {'cluster':>7} attention_short")
    for window, position, clusters in (
        (0, 1030, (16,)),
        (0, 4200, (16,)),
        (4096, 1030, (16,)),
        (4096, 20_000, (16,)),
        (512, 20_000, (8, 16)),
    ):
        for rows in (8, 1):
            chain = Chain(gpu, pool, window, position, rows)
            for cluster in clusters:
                taken = chain.us(family.attention_short(RELEASED, window, rows, cluster))
                print(f"{window:6} {position:8} {rows:4} {cluster:7} {taken:.2f}")
    gpu.close()


if __name__ == "__main__":
    main()
