"""What the exchange costs the kernels that push and poll, with real peers, beside the same kernels for one rank:

    python3 -m cuq1.parallel.launch -n 2 -- python3 -m tests.multigpu.push_speed

Chains of 24 layers' o_proj, attn_tail, down and mlp_tail, and of o_proj or down alone, 8 rows at the released sizes,
with weights of their own. Microseconds a layer, on each rank. gate_up, qkv and attention are left out, so that what
these would hide is seen: the end of a launch that pushes waits for its peers' memory.
"""

import json
import sys
from dataclasses import replace

import numpy as np

from cuq1.cli import guarded
from cuq1.cuda.kernels import experts, projections, rows
from cuq1.cuda.module import build
from cuq1.models.inbox import Inbox
from cuq1.parallel import Rendezvous
from cuq1.parallel.exchange import SharedInbox
from cuq1.plan.dims import ROWS
from tests.kernels.harness import Gpu
from tests.kernels.shapes import RELEASED
from tests.kernels.test_rows import fill

LAYERS = 24  # a multiple of abi.INBOXES
PARTS = ("o", "router_attended", "router_residual")


class Layers:
    def __init__(self, gpu, meeting):
        self.gpu, self.place = gpu, meeting.rank
        d = self.dims = replace(RELEASED, ranks=meeting.world)
        common, own = np.random.default_rng(1), np.random.default_rng(2 + meeting.rank)
        self.inbox = Inbox(d, meeting.rank)
        self.shared = SharedInbox(meeting, self.inbox.bytes)
        self.peers = gpu.array(self.shared.distances)
        self.single = gpu.array(np.full(Inbox(RELEASED, 0).bytes // 4, -1, np.int32))
        chunk = gpu.array(own.integers(0, 0x50, 1 << 20, np.uint8) | own.integers(0, 2, 1 << 20, np.uint8) << 7)

        def codes(size):
            return gpu.cupy.tile(chunk, -(-size // chunk.size))[:size]

        self.o = [codes(d.hidden * d.q_width) for _ in range(LAYERS)]
        self.o_scales = gpu.array(own.uniform(0.01, 0.03, (d.hidden // 16, d.q_heads)).astype(np.float32))
        fold = own.standard_normal((d.experts, d.q_width + d.slice_width), np.float32)
        self.fold = [gpu.array(np.roll(fold, layer, axis=0)) for layer in range(LAYERS)]
        self.down = codes(d.experts * d.hidden * d.inner)
        scales = own.uniform(0.01, 0.03, (d.experts, d.hidden // 16, d.inner // 32)).astype(np.float32)
        self.down_scales = gpu.array(scales)
        attended = own.standard_normal((ROWS, d.q_width), np.float32)
        self.x = {
            "attended32": gpu.array(attended),
            "attended": gpu.array(attended.astype(np.float16)),
            "inner": gpu.array(own.standard_normal((64, ROWS, d.inner)).astype(np.float16)),
            "residual": gpu.array(common.standard_normal((ROWS, d.hidden), np.float32)),
            "norm": gpu.array(common.uniform(0.5, 2, d.hidden).astype(np.float32)),
        }
        choices = [[common.permutation(d.experts)[: d.top_k] for _ in range(ROWS)] for _ in range(LAYERS)]
        self.choices = gpu.array(np.array(choices, np.int32))
        self.ids = gpu.poison((ROWS, d.top_k), np.int32)
        self.weights = gpu.array(np.full((ROWS, d.top_k), 1 / d.top_k, np.float32))
        self.h, self.out = (gpu.poison((ROWS, d.hidden), np.float32) for _ in range(2))
        self.normed = gpu.poison((ROWS, d.hidden), np.float16)
        gpu.wait()

    def at(self, name, layer, ranks, *, own=False):
        if ranks == 1:
            return self.single.data.ptr + Inbox(RELEASED, 0).whole(name, 0).offset
        return self.shared.address + (self.inbox.own if own else self.inbox.whole)(name, layer).offset

    def calls(self, layer, ranks, *, chosen=None):
        """The four launches of a layer."""
        d = replace(self.dims, ranks=ranks)
        base = {"rows": ROWS, "layer": layer}
        peers = {"peers": self.peers} if ranks > 1 else {}
        out, a, r = (self.at(name, layer, ranks, own=True) for name in PARTS)
        kernel = projections.o_proj(d)
        o = {"weights": self.o[layer], "scales": self.o_scales, "fold": self.fold[layer], **peers}
        x = {name: self.x[name] for name in ("attended", "attended32", "residual")}
        yield kernel, fill(self.gpu, kernel, **base, **x, **o, out=out, router_attended=a, router_residual=r)
        kernel = rows.attn_tail(d)
        parts = {name: self.at(name, layer, ranks) for name in PARTS}
        norms = {"attn_out_norm": self.x["norm"], "ffn_norm": self.x["norm"], "attn_scale": 0.3}
        to = {"h": self.h, "normed": self.normed, "expert_ids": self.ids, "expert_weights": self.weights}
        x = {"residual": self.x["residual"]}
        yield kernel, fill(self.gpu, kernel, **base, **parts, **x, **norms, **to, ranks=ranks, polled=1)
        kernel = experts.down(d)
        w = {"weights": self.down, "scales": self.down_scales, "expert_weights": self.weights, **peers}
        w["expert_ids"] = self.ids if chosen is None else chosen
        pieces = self.inbox.pieces("o", "router_residual") // (self.dims.ranks if ranks == 1 else 1)
        unready = {"unready": self.at("o", layer, ranks), "unready_pieces": pieces}
        y = self.at("y", layer, ranks, own=True)
        yield kernel, fill(self.gpu, kernel, **base, **w, **unready, inner=self.x["inner"], out=y)
        kernel = rows.mlp_tail(d)
        to = {"residual": self.out, "normed": self.normed, "next_norm": self.x["norm"], "ffn_scale": 0.3}
        yield kernel, fill(self.gpu, kernel, **base, **to, y=self.at("y", layer, ranks), h=self.h, ranks=ranks)

    def chain(self, ranks, which):
        """which: numbers of a layer's launches. down alone gets experts that differ from layer to layer."""
        alone = len(which) == 1
        found = []
        for layer in range(LAYERS):
            calls = list(self.calls(layer, ranks, chosen=self.choices[layer] if alone else None))
            found += [calls[one] for one in which]
        return found


def measure(meeting):
    gpu = Gpu(meeting.rank)
    layers = Layers(gpu, meeting)
    found = {}
    for name, which in (("all four", range(4)), ("o_proj", [0]), ("down", [2])):
        for ranks in (1, meeting.world):
            chain = layers.chain(ranks, which)
            for kernel, _ in chain:
                build(kernel)  # ranks may take different times, while others wait
            layers.single[:] = -1
            gpu.cupy.cuda.Device().synchronize()
            meeting.barrier("ended")
            layers.shared.reset()
            meeting.barrier("fresh")
            median, spread = gpu.median_us(chain, copies=1)
            found[f"{name}, {ranks} ranks"] = [round(x / LAYERS, 2) for x in (median, *spread)]
            if ranks > 1 and len(which) > 1:
                results = [x.get() for x in (layers.h, layers.out, layers.ids)]
                assert all(np.isfinite(x).all() for x in results)
                everyones = meeting.gather("results", b"".join(x.tobytes() for x in results))
                assert len(set(everyones)) == 1, "ranks have other bits"
    meeting.barrier("measured")
    layers.shared.close()
    return found


def main():
    with Rendezvous() as meeting:
        everyones = [json.loads(one) for one in meeting.gather("times", json.dumps(measure(meeting)).encode())]
        if meeting.rank == 0:
            for name in everyones[0]:
                print(f"{name:20}", *(f"{one[name][0]:6.2f} us ({one[name][1]}..{one[name][2]})" for one in everyones))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("push_speed", main))
