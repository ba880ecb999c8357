"""Times the tails from the arrival of their data on: python3 -m tests.kernels.speed_exchange

A tail of 8 rows of the released share takes turns with a stand-in for the ranks' producers, which waits for the tail's
end and then for some microseconds of which the tail knows nothing, and stores all of its data at once. Printed are the
microseconds by which the tail lengthens the chain: its time beyond the arrival, its end and what is lost between two
polls included. Results are compared, bit for bit, with those of a kernel for one rank.
"""

from ctypes import Structure, c_int32, c_uint64
from dataclasses import replace
from pathlib import Path

import numpy as np

from cuq1.cuda import abi
from cuq1.cuda.kernels import rows
from cuq1.plan.dims import ROWS
from cuq1.plan.kernel import Kernel
from tests.kernels.emulated import NOT_READY, Ranks
from tests.kernels.harness import Gpu
from tests.kernels.shapes import RELEASED
from tests.kernels.test_rows import fill, norm_weights

TURNS = 48
PAUSES = 3000, 5000  # nanoseconds


class PushArgs(Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("source", "to", "unready")),
        *((name, c_int32) for name in ("pieces", "unready_pieces", "pause", "reserved")),
    )


PUSH = Kernel(str(Path(__file__).with_name("push.cu")), "push", PushArgs, (), (96, 1, 1), 256)


class Tails:
    """The parts of `count` ranks, and chains of tails that take them."""

    def __init__(self, gpu, count):
        rng = np.random.default_rng(count)
        self.gpu, self.dims = gpu, replace(RELEASED, ranks=count)
        self.ranks = Ranks(gpu, self.dims)
        hidden, top_k = RELEASED.hidden, RELEASED.top_k
        inbox = self.ranks.inboxes[0]
        # What an inbox's buffer begins with: o and the router's parts, and in the same place here y.
        self.words = 4 * inbox.pieces("o", "router_residual")
        self.parts = gpu.array(rng.standard_normal(self.words, np.float32))
        self.pauses = rng.integers(*PAUSES, TURNS)
        size = (ROWS, hidden)
        self.held = {name: gpu.array(norm_weights(rng, hidden)) for name in ("attn_out_norm", "ffn_norm")}
        self.residual = gpu.array(rng.standard_normal(size, np.float32))
        self.tail = {"h": gpu.poison(size, np.float32), "normed": gpu.poison(size, np.float16)}
        self.routing = {
            "expert_ids": gpu.poison((ROWS, top_k), np.int32),
            "expert_weights": gpu.poison((ROWS, top_k), np.float32),
            "routed": gpu.array(np.zeros((abi.ROUTED_COPIES, ROWS, top_k), np.int32)),
        }
        self.mlp = {"residual": gpu.poison(size, np.float32), "normed": gpu.poison(size, np.float16)}

    def at(self, name, turn):
        """With one rank, one buffer of three: the layout is the same."""
        return self.ranks.whole(0, name, turn)

    def push(self, turn, words, name, *, unready=True):
        args = PushArgs(source=self.parts.data.ptr, to=self.at(name, turn), pieces=words // 4)
        if unready:
            args.unready, args.unready_pieces = self.at(name, turn - 1), words // 4
        args.pause = int(self.pauses[turn])
        return PUSH, args, None

    def attn_tail(self, kernel, turn, where=None, *, polled=1):
        inputs = {"residual": self.residual, **self.held, **self.tail}
        inputs["o"] = self.at("o", turn) if where is None else where
        if ("ROUTED", 1) in kernel.defines:
            offsets = [self.ranks.whole(0, name, 0) for name in ("o", "router_attended", "router_residual")]
            inputs |= dict(zip(("router_attended", "router_residual"), np.diff(offsets).cumsum(), strict=True))
            for name in ("router_attended", "router_residual"):
                inputs[name] = int(inputs[name]) + inputs["o"]
            inputs |= self.routing
        return fill(self.gpu, kernel, rows=ROWS, ranks=self.dims.ranks, attn_scale=0.3, polled=polled, **inputs)

    def mlp_tail(self, kernel, turn, where=None):
        inputs = {"h": self.residual, "next_norm": self.held["ffn_norm"], **self.mlp}
        inputs["y"] = self.at("y", turn) if where is None else where
        return fill(self.gpu, kernel, rows=ROWS, ranks=self.dims.ranks, ffn_scale=0.3, **inputs)

    def beyond(self, kernel, patch=None):
        """Microseconds: (median, (10th, 90th percentile))."""
        attention, exchanged = kernel.entry == "attn_tail", self.dims.ranks > 1
        routed = self.routing if ("ROUTED", 1) in kernel.defines else {}
        out = {**self.tail, **routed} if attention else self.mlp
        of_y = self.dims.ranks * ROWS * self.dims.hidden
        words, name = (self.words, "o") if attention else (of_y, "y")
        make = self.attn_tail if attention else self.mlp_tail
        one = replace(kernel, defines=tuple(d for d in kernel.defines if d[0] != "RANKS"))
        unpolled = {"polled": 0} if attention else {}
        self.gpu.run(one, make(one, 0, self.parts.data.ptr, **unpolled))
        expected = {label: value.get() for label, value in out.items()}
        for value in out.values():
            value.view(np.uint8)[:] = 0x7F
        chains = []
        for tails in (True, False):
            calls = []
            for turn in range(TURNS):
                clears = attention or not exchanged or not tails
                calls.append(self.push(turn, words, name, unready=clears))
                if tails:
                    calls.append((kernel, make(kernel, turn), patch))
            self.ranks.memory[:] = NOT_READY
            chains.append(self.gpu.median_us(calls, copies=1))
            if tails:
                for label, value in out.items():
                    same = value.get().view(np.uint8) == expected[label].view(np.uint8)
                    assert same.all() or label == "expert_weights", label
        (with_tails, spread), (without, _) = chains
        return (with_tails - without) / TURNS, tuple((x - without) / TURNS for x in spread)


def main():
    gpu = Gpu()
    for count in (1, 2, 8):
        t = Tails(gpu, count)
        kernels = {
            "attn_tail": rows.attn_tail(t.dims),
            "attn_tail, no routing": rows.attn_tail(t.dims, moe=False),
            "mlp_tail": rows.mlp_tail(t.dims),
        }
        for name, kernel in kernels.items():
            median, (low, high) = t.beyond(kernel)
            print(f"{f'{name}, {count} ranks':34}{median:7.2f} us  ({low:.2f} .. {high:.2f})", flush=True)
    gpu.close()


if __name__ == "__main__":
    main()
