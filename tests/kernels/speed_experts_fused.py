"""Times the experts in one launch over layers: python3 -m tests.kernels.speed_experts_fused [key=value ...]

Keys: those of experts.fused(); dims: fp8, bf16 or e4m3; groups: distinct experts, as 8,38; rows: that choose them, 8
where not given; near: 1 for neighbours. Further variants follow a --; without any, those that are worth a comparison.
Prints microseconds a layer and the ratio to the read ceiling, in a chain, and with a small kernel between layers, whose
own time is taken off.
"""

import numpy as np

from cuq1.cuda.abi import BandwidthArgs, ExpertsArgs
from cuq1.cuda.kernels import experts
from tests.kernels import speed_experts
from tests.kernels.harness import Gpu
from tests.kernels.speed_experts import LAYERS, ROWS, choices, stand_in, variants

WORTH_COMPARING = "groups=8,11,24,38,48 -- rows=1 groups=8 -- depth=3 -- depth=5 -- depth=6 -- dims=e4m3 -- dims=bf16"


class Layers(speed_experts.Layers):
    def __init__(self, gpu, dims):
        super().__init__(gpu, dims)
        self.exchange = gpu.cupy.zeros((2, ROWS * dims.top_k, dims.inner), np.float16)
        self.epoch = gpu.cupy.zeros(6, np.int32)

    def calls(self, ids, kernel, between=None, rows=ROWS):
        """One list of (kernel, args) for all layers."""
        dims, found = self.dims, []
        for layer, chosen in enumerate(ids):
            if between is not None:
                found.append((between, BandwidthArgs(self.out.data.ptr, self.code_scale.data.ptr, 24)))
            if kernel is not None:
                args = ExpertsArgs(
                    rows=rows,
                    layer=layer,
                    normed=self.x.data.ptr,
                    codes=self.codes.data.ptr,
                    code_scale=self.code_scale.data.ptr,
                    gate_up=self.gate_up[layer].data.ptr,
                    down=self.down[layer].data.ptr,
                    down_scales=self.scales[layer].data.ptr if dims.fp8_experts else 0,
                    expert_ids=chosen.data.ptr,
                    expert_weights=self.routing.data.ptr,
                    inner=self.exchange.data.ptr,
                    epoch=self.epoch.data.ptr,
                    inner_half=self.exchange[0].size,
                    out=self.out.data.ptr,
                )
                found.append((kernel, args))
        return found


def report(layers, given):
    gpu, dims = layers.gpu, layers.dims
    ceiling = gpu.read_ceiling()
    kernel = experts.fused(
        dims, **{key: value for key, value in given.items() if key not in {"groups", "dims", "rows", "near"}}
    )
    between, rows = stand_in(), given.get("rows", ROWS)
    print(f"{given}: ceiling {ceiling:.0f} GB/s, {kernel.smem} B of shared memory")
    rng = np.random.default_rng(2)
    empty = gpu.median_us(layers.calls([None] * LAYERS, None, between), 20)[0] / LAYERS
    for distinct in map(int, given.get("groups", "8,38").split(",")):
        ids = [gpu.array(choices(rng, dims, distinct, rows, given.get("near", 0))) for _ in range(LAYERS)]
        size = distinct * (layers.unit + layers.tile)
        line = f"{distinct:3d} groups"
        for name, mid in (("in a chain", None), ("spaced", between)):
            total, (low, high) = gpu.median_us(layers.calls(ids, kernel, mid, rows), 20)
            us = total / LAYERS - (empty if mid is not None else 0)
            spread = (high - low) / LAYERS
            line += f" | {name} {us:.2f} us +-{spread / 2:.2f} {100 * size / us / 1e3 / ceiling:.0f}%"
        print(line, flush=True)


def main():
    gpu = Gpu()
    for layers, given in variants(gpu, WORTH_COMPARING, Layers):
        report(layers, given)
    gpu.close()


if __name__ == "__main__":
    main()
