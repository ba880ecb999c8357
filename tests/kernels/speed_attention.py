"""Times attention and combine at the released share's sizes: python3 -m tests.kernels.speed_attention

Prints microseconds of one launch in a chain of many, each layer with caches of its own so that L2 does not hold them:
attention alone, with combine, and combine alone; and what attention reads against what memory delivers.
"""

import numpy as np

from cuq1.cuda.abi import AttentionArgs, CombineArgs
from cuq1.cuda.kernels import attention as family
from cuq1.plan.dims import HEAD_DIM, KV_TILE, ROWS
from tests.kernels.harness import Gpu
from tests.kernels.shapes import RELEASED

BYTES = 320 << 20  # of all layers' caches: several times L2


class Chain:
    """Layers at one position."""

    def __init__(self, gpu, pool, window, position, rows, splits=None, shape=None):
        self.gpu = gpu
        self.splits = family.splits_for(RELEASED, window) if splits is None else splits
        self.window = window
        low, high = position - rows + 1, position
        first = max(0, low - window + 1) // KV_TILE if window else 0
        self.bytes = (high // KV_TILE + 1 - first) * KV_TILE * HEAD_DIM * 4
        slots = window + KV_TILE if window else (high // KV_TILE + 1) * KV_TILE
        layer_bytes = slots * HEAD_DIM * 4
        layers = max(2, min(200, BYTES // layer_bytes))
        m = ROWS * RELEASED.group
        self.held = [
            gpu.array(np.arange(low, low + ROWS, dtype=np.int32)),
            pool[: ROWS * RELEASED.q_width],
            gpu.poison((self.splits, m, HEAD_DIM), np.float32),
            gpu.poison((m, self.splits), np.float32),
            gpu.poison((m, self.splits), np.float32),
            gpu.array(np.full(HEAD_DIM, 0.1, np.float32)),
            gpu.poison((ROWS, RELEASED.q_width), np.float32),
            gpu.poison((ROWS, RELEASED.q_width), np.float16),
        ]
        positions, q, *rest = (x.data.ptr for x in self.held)
        kernel, second = family.attention(RELEASED, window, self.splits), family.combine(RELEASED, self.splits)
        if shape is not None:
            kernel = family.shaped(RELEASED, self.splits, *shape)
        fault, scale = gpu.fault.address, HEAD_DIM**-0.5
        self.attention, self.combine = [], []
        for layer in range(layers):
            k = pool.data.ptr + layer * layer_bytes
            self.attention.append(
                (
                    kernel,
                    AttentionArgs(
                        fault,
                        0,
                        layer,
                        rows,
                        q,
                        k,
                        k + layer_bytes // 2,
                        positions,
                        *rest[:3],
                        slots,
                        window,
                        self.splits,
                        scale,
                        rows,
                    ),
                )
            )
            outputs = (rest[3], positions, *rest[:3], *rest[4:])
            self.combine.append(
                (second, CombineArgs(fault, 0, layer, rows, q, *outputs, window, self.splits, scale, 0))
            )

    def times(self):
        """Microseconds a layer: attention, attention and combine, combine."""
        count = len(self.attention)
        both = [call for pair in zip(self.attention, self.combine, strict=True) for call in pair]
        return [self.gpu.median_us(calls, 30)[0] / count for calls in (self.attention, both, self.combine)]


def main():
    gpu = Gpu()
    ceiling = gpu.read_ceiling()
    print(f"read ceiling {ceiling:.0f} GB/s")
    pool = gpu.cupy.empty((BYTES + (128 << 20)) // 2, np.float16)
    step = 1 << 24
    for at in range(0, len(pool), step):
        pool[at : at + step] = gpu.cupy.random.standard_normal(len(pool[at : at + step]), np.float32)
    print(
        f"{'window':>6} {'position':>8} {'rows':>4} {'splits':>6} {'attention':>9} {'GB/s':>5} {'ratio':>6} both  comb"
    )
    cases = [(0, p << 10, rows, None, None) for p in (1, 4, 16, 64, 192) for rows in (8, 1)]
    cases += [
        (0, p << 10, 8, 132, shape) for p in (4, 64, 192) for shape in ((4, 4, 1), (4, 6, 1), (8, 3, 1), (8, 4, 1))
    ]
    cases += [(4096, 20_000, rows, None, None) for rows in (8, 6, 1)]
    cases += [(4096, 20_000, 8, 33, (4, 2, 3)), (4096, 1000, 8, None, None)]
    cases += [(512, 20_000, rows, None, None) for rows in (8, 1)]
    for window, position, rows, splits, shape in cases:
        chain = Chain(gpu, pool, window, position, rows, splits, shape)
        alone, both, combine = chain.times()
        rate = chain.bytes / alone / 1e3
        print(
            f"{window:6} {position:8} {rows:4} {chain.splits:6} {alone:9.2f} {rate:5.0f} {rate / ceiling:6.1%} "
            f"{both:5.2f} {combine:5.2f} {shape or ''}"
        )
    gpu.close()


if __name__ == "__main__":
    main()
