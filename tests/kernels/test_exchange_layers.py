"""Layers of several ranks one after the other, ranks ahead of each other: buffers are used again and again.

o_proj > attn_tail > down > mlp_tail, each rank on a stream of its own, layers of 1 to 8 rows. Every layer's results are
compared, bit for bit, with those of kernels for one rank that have all parts before them.
"""

from dataclasses import replace
from time import sleep

import numpy as np
import pytest

from cuq1.cuda import abi
from cuq1.cuda.abi import DownArgs
from cuq1.cuda.graph import synchronize
from cuq1.cuda.kernels import experts, projections, rows
from cuq1.cuda.launch import launch
from cuq1.cuda.module import build
from cuq1.plan.dims import ROWS
from tests.kernels.emulated import Ranks, streams
from tests.kernels.shapes import EXCHANGED
from tests.kernels.test_experts import MAX_GROUPS
from tests.kernels.test_experts import fresh as fresh_experts
from tests.kernels.test_projections import OProj
from tests.kernels.test_rows import fill, norm_weights

PROJECTED = ("o", "router_attended", "router_residual")
LAYERS = 9
SCALE = 0.3


class Layers:
    def __init__(self, gpu, name, rng):
        self.gpu, self.dims = gpu, EXCHANGED[name]
        dims, one = self.dims, replace(self.dims, ranks=1)
        self.ranks = Ranks(gpu, dims)
        self.e, _ = fresh_experts(gpu, "nano2" if name.startswith("nano") else "released")
        self.projections = [OProj(gpu, one, rng) for _ in self.ranks.places]
        self.rows = rng.integers(1, ROWS + 1, LAYERS)
        attended = rng.standard_normal((LAYERS, dims.ranks, ROWS, dims.q_width), np.float32)
        inner = rng.standard_normal((LAYERS, dims.ranks, MAX_GROUPS, ROWS, dims.inner), np.float32)
        routing = rng.dirichlet(np.ones(dims.top_k), (LAYERS, ROWS)).astype(np.float32)
        self.held = {
            "attended32": gpu.array(attended),
            "attended": gpu.array(attended.astype(np.float16)),
            "inner": gpu.array(inner.astype(np.float16)),
            "residual": gpu.array(rng.standard_normal((LAYERS, ROWS, dims.hidden), np.float32)),
            "norm": gpu.array(norm_weights(rng, dims.hidden)),
            "ids": gpu.array(np.stack([self.e.choose(rng, count, "any") for count in self.rows])),
            "routing": gpu.array(routing),
        }

    def results(self):
        shape = (LAYERS, ROWS, self.dims.hidden)
        return {name: self.gpu.poison(shape, np.float32) for name in ("h", "out")}

    def calls(self, place, layer, where, out, ranks, spare):
        """The layer's four launches. where(name, own): the address of a part, or of all ranks'."""
        gpu, dims, x = self.gpu, replace(self.dims, ranks=ranks), self.held
        base = {"rows": int(self.rows[layer]), "layer": layer}
        peers = self.ranks.peers(place) if ranks > 1 else 0
        o = self.projections[place]
        targets = [where(name, True) for name in PROJECTED]
        args = o.args(x["attended"][layer, place], x["attended32"][layer, place], x["residual"][layer], o.buffers())
        args.rows, args.layer, args.slice_start = base["rows"], layer, place * dims.slice_width % dims.hidden
        args.out, args.router_attended, args.router_residual = targets
        args.peers = peers
        # Of eight ranks on one GPU, launches that wait would take the room of those that they wait for, if three in a
        # row of each might.
        yield replace(projections.o_proj(dims), pdl=ranks < 8), args
        kernel = rows.attn_tail(dims)
        parts = {name: where(name, False) for name in PROJECTED}
        norms = {"residual": x["residual"][layer], "attn_out_norm": x["norm"], "ffn_norm": x["norm"]}
        to, count = {"h": out["h"][layer], **spare}, self.dims.ranks
        yield kernel, fill(gpu, kernel, **base, **parts, **norms, **to, ranks=count, attn_scale=SCALE)
        args = DownArgs(fault=gpu.fault.address, **base, inner=x["inner"][layer, place].data.ptr, out=where("y", True))
        args.weights, args.scales = self.e.down_weights.data.ptr, self.e.down_scales.data.ptr
        args.expert_ids, args.expert_weights = x["ids"][layer].data.ptr, x["routing"][layer].data.ptr
        args.peers = peers
        if ranks > 1:
            args.unready = where("o", False)
            args.unready_pieces = self.ranks.inboxes[place].pieces("o", "router_residual")
        yield experts.down(dims), args
        kernel = rows.mlp_tail(dims)
        to = {"residual": out["out"][layer], "normed": spare["normed"], "next_norm": x["norm"], "ffn_scale": SCALE}
        yield kernel, fill(gpu, kernel, **base, **to, y=where("y", False), h=out["h"][layer], ranks=count)

    def spare(self):
        """What the results leave out."""
        chosen = (ROWS, self.dims.top_k)
        names = {"expert_ids": (chosen, np.int32), "expert_weights": (chosen, np.float32)}
        names["normed"] = (ROWS, self.dims.hidden), np.float16
        return {name: self.gpu.poison(*how) for name, how in names.items()}

    def expected(self):
        out, spare, dims = self.results(), self.spare(), self.dims
        widths = {"o": dims.hidden, "y": dims.hidden} | dict.fromkeys(PROJECTED[1:], dims.experts)
        parts = {name: self.gpu.poison((dims.ranks, ROWS, width), np.float32) for name, width in widths.items()}
        for layer in range(LAYERS):
            for step in range(4):
                for place in self.ranks.places if step in (0, 2) else [0]:

                    def where(name, own, place=place):
                        return parts[name].data.ptr + (place * ROWS * widths[name] * 4 if own else 0)

                    self.gpu.run(*list(self.calls(place, layer, where, out, 1, spare))[step])
        return {name: value.get() for name, value in out.items()}

    def run(self, rng, patches=()):
        """All ranks' chains, launched in a random order, some of them late: what was reported, and the results."""
        patches, dims = dict(patches), self.dims
        outs, spares = [self.results() for _ in self.ranks.places], [self.spare() for _ in self.ranks.places]
        chains = []
        for place in self.ranks.places:
            calls = []
            for layer in range(LAYERS):

                def where(name, own, place=place, layer=layer):
                    return (self.ranks.own if own else self.ranks.whole)(place, name, layer)

                calls += self.calls(place, layer, where, outs[place], dims.ranks, spares[place])
            short = (("PEER_TIMEOUT_MS", 300),)
            kernels = [replace(kernel, defines=kernel.defines + short) for kernel, _ in calls]
            built = [build(kernel, self.gpu.device.arch, patches.get(kernel.entry)) for kernel in kernels]
            chains.append([*zip(built, (args for _, args in calls), strict=True)])
        self.gpu.cupy.cuda.Device().synchronize()
        order = rng.permutation(np.repeat(np.arange(dims.ranks), LAYERS * 2))
        for place in order:  # two launches at a time
            for function, args in chains[place][:2]:
                launch(function, args, streams(self.gpu)[place])
            del chains[place][:2]
            if rng.random() < 0.1:
                sleep(1e-3)
        for stream in streams(self.gpu):
            synchronize(stream)
        found = self.gpu.fault.read()
        told = None if found is None else (abi.FAULTS[found.what], abi.KERNELS[found.kernel], found.detail)
        self.gpu.fault.clear()
        return told, [{name: value.get() for name, value in out.items()} for out in outs]

    def check(self, rng, expected, patches=()):
        told, outs = self.run(rng, patches)
        assert told is None, told
        for out in outs:
            for name, value in out.items():
                same = value.view(np.uint32) == expected[name].view(np.uint32)
                assert same.all(), f"{name} of layer {int(np.argwhere(~same)[0][0])}"
        assert self.ranks.ready_words() == 0, "not made NOT_READY"


def fresh():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # shown where a test fails
    return np.random.default_rng(seed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXCHANGED)
def test_layers_one_after_the_other(gpu, name):
    rng = fresh()
    layers = Layers(gpu, name, rng)
    expected = layers.expected()
    for _ in range(5):
        layers.check(rng, expected)


BROKEN = {
    "o stays": {
        "down": ("(a.unready)[i] = make_uint4(NOT_READY, NOT_READY, NOT_READY, NOT_READY);", "(a.unready)[i].x = 0;")
    },
    "y stays": {"mlp_tail": ("make_unready_4(a.y + at", "if (RANKS > 8) make_unready_4(a.y + at")},
    "a rank twice": {"mlp_tail": ("total = sum(total, part[r]);", "total = sum(part[r], part[r]);")},
}


@pytest.mark.gpu
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_layers_are_rejected(gpu, broken):
    rng = fresh()
    layers = Layers(gpu, "nano, 2 ranks", rng)
    with pytest.raises(AssertionError):
        layers.check(rng, layers.expected(), BROKEN[broken])
