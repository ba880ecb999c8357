"""Times the row kernels and eh_proj at the released share's sizes: python3 -m tests.kernels.speed_rows

Prints microseconds of one launch in a chain of 50 that depend on each other, each with norms and weights of its own,
for rows shared by 4 and 8 blocks.
"""

from dataclasses import replace

import numpy as np

from cuq1.cuda.kernels import draft, rows
from cuq1.plan.dims import ROWS
from tests.kernels.harness import Gpu
from tests.kernels.shapes import RELEASED

LAYERS = 50


def shared_by(kernel, hidden, parts):
    """The same kernel with another number of blocks for a row."""
    old = kernel.cluster
    defines = tuple((name, parts if name == "PARTS" else value) for name, value in kernel.defines)
    extra = kernel.block - hidden // old // 4
    grid = (kernel.grid[0] // old * parts, 1, 1)
    return replace(kernel, defines=defines, grid=grid, cluster=parts, block=hidden // parts // 4 + extra)


class Buffers:
    def __init__(self, gpu):
        rng = np.random.default_rng(1)
        hidden = RELEASED.hidden
        self.gpu = gpu
        self.norms = [gpu.array(rng.uniform(0.5, 1.5, hidden).astype(np.float32)) for _ in range(2 * LAYERS)]
        self.partials = gpu.array(rng.standard_normal((8, ROWS, hidden), np.float32))
        self.router = [gpu.array(rng.standard_normal((8, ROWS, RELEASED.experts), np.float32)) for _ in range(2)]
        self.h = [gpu.array(rng.standard_normal((ROWS, hidden), np.float32)) for _ in range(2)]
        self.normed = gpu.poison((ROWS, hidden), np.float16)
        self.codes, self.scale = gpu.poison((ROWS, hidden), np.uint8), gpu.poison(ROWS, np.float32)
        self.ids = gpu.poison((ROWS, RELEASED.top_k), np.int32)
        self.weights = gpu.poison((ROWS, RELEASED.top_k), np.float32)
        self.inner_max = gpu.poison((64, ROWS), np.float32)

    def chain(self, kernel, count, layer_args, **fixed):
        calls = []
        for layer in range(LAYERS):
            args = kernel.args(fault=self.gpu.fault.address, rows=count, layer=layer)
            for name, value in {**fixed, **layer_args(layer)}.items():
                setattr(args, name, value.data.ptr if hasattr(value, "data") else value)
            calls.append((kernel, args))
        return calls

    def tail(self, kernel, count, ranks, *, codes=False):
        def of(layer):
            return {
                "residual": self.h[layer % 2],
                "h": self.h[1 - layer % 2],
                "attn_out_norm": self.norms[2 * layer],
                "ffn_norm": self.norms[2 * layer + 1],
            }

        names = ("router_attended", "router_residual") if ("ROUTED", 1) in kernel.defines else ()
        extra = {"codes": self.codes, "code_scale": self.scale, "inner_max": self.inner_max} if codes else {}
        return self.chain(
            kernel,
            count,
            of,
            o=self.partials,
            **dict(zip(names, self.router, strict=False)),
            normed=self.normed,
            expert_ids=self.ids,
            expert_weights=self.weights,
            ranks=ranks,
            attn_scale=0.3,
            **extra,
        )

    def mlp(self, kernel, count, ranks, *, sandwich=True):
        def of(layer):
            norm = {"ffn_out_norm": self.norms[2 * layer]} if sandwich else {}
            return {"h": self.h[layer % 2], "residual": self.h[1 - layer % 2], "next_norm": self.norms[layer], **norm}

        fixed = {"y": self.partials, "normed": self.normed, "ranks": ranks, "ffn_scale": 0.2}
        return self.chain(kernel, count, of, normed_residual=1, **fixed)


def main():
    gpu = Gpu()
    b = Buffers(gpu)
    hidden = RELEASED.hidden

    def show(name, calls):
        median, (low, high) = gpu.median_us(calls)
        print(f"{name:44}{median / LAYERS:7.2f} us  ({low / LAYERS:.2f} .. {high / LAYERS:.2f})", flush=True)
        return median / LAYERS

    for parts in (4, 8):
        tail, plain = rows.attn_tail(RELEASED), rows.attn_tail(RELEASED, moe=False)
        tail, plain, mlp = (shared_by(k, hidden, parts) for k in (tail, plain, rows.mlp_tail(RELEASED)))
        for ranks in (1, 8):
            show(f"attn_tail, {parts} blocks a row, {ranks} ranks", b.tail(tail, ROWS, ranks))
        show(f"attn_tail, {parts} blocks, 1 rank, no routing", b.tail(plain, ROWS, 1))
        for ranks in (1, 8):
            show(f"mlp_tail, {parts} blocks a row, {ranks} ranks", b.mlp(mlp, ROWS, ranks))
    show("attn_tail, 1 row, 1 rank", b.tail(rows.attn_tail(RELEASED), 1, 1))
    show("attn_tail, FP8 codes, 1 rank", b.tail(rows.attn_tail(RELEASED), ROWS, 1, codes=True))
    show("mlp_tail, 1 rank, no norm before the sum", b.mlp(rows.mlp_tail(RELEASED), ROWS, 1, sandwich=False))

    rng = np.random.default_rng(2)
    splits = draft.eh_splits(RELEASED)
    pieces = gpu.array(rng.standard_normal((splits, ROWS, hidden), np.float32))
    table = gpu.array(rng.integers(0x3C00, 0x3F00, (RELEASED.vocab_total, hidden), np.uint16))
    tokens = [gpu.array(rng.integers(0, RELEASED.vocab_total, ROWS).astype(np.int32)) for _ in range(LAYERS)]
    fixed = {"table": table, "residual": b.h[0], "normed": b.normed}
    kernel = rows.embed(RELEASED)
    show("embed, 8 rows", b.chain(kernel, ROWS, lambda i: {"tokens": tokens[i], "norm": b.norms[i]}, **fixed))

    size = RELEASED.eh_rows * hidden * 4
    eh = [gpu.array(rng.integers(0, 0x3C, size, np.uint8)) for _ in range(LAYERS)]
    before = gpu.array(np.arange(ROWS, dtype=np.int32))
    fixed = {"table": table, "hidden": b.h[0], "draft_hidden": b.h[0], "hidden_rows": before, "out": pieces}
    for count in (1, 4, ROWS):
        calls = b.chain(
            draft.eh_proj(RELEASED),
            count,
            lambda i: {"tokens": tokens[i % 2], "enorm": b.norms[i], "hnorm": b.norms[i + 1], "weights": eh[i]},
            **fixed,
        )
        us = show(f"eh_proj, {count} rows", calls)
        print(f"  {size / us / 1e3:.0f} GB/s, {size / us / 1e3 / gpu.read_ceiling():.0%} of the ceiling")
        for _, args in calls:
            args.weights = eh[0].data.ptr
        show(f"eh_proj, {count} rows, weights in L2", calls)
    gpu.close()


if __name__ == "__main__":
    main()
