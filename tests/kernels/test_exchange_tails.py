"""o_proj and down push, attn_tail and mlp_tail poll: ranks emulated on one GPU.

Kernels for one rank are the oracle, bit for bit: of each rank's part, and of the tails, which then read parts that are
all there, and add them in the order of ranks. They are held to the twins in test_projections, test_experts, test_rows.
"""

from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest

from cuq1.cuda import abi
from cuq1.cuda.abi import ROUTED_COPIES, DownArgs
from cuq1.cuda.kernels import experts, projections, rows
from cuq1.plan.dims import ROWS
from tests.kernels.emulated import NOT_READY, Ranks
from tests.kernels.shapes import EXCHANGED
from tests.kernels.test_experts import MAX_GROUPS
from tests.kernels.test_experts import fresh as fresh_experts
from tests.kernels.test_projections import OProj
from tests.kernels.test_rows import EXACT, HALF, assert_close, assert_untouched, fill, norm_weights
from tests.kernels.twins import rows as twin

SCALE = 0.37
TURN = 4
NOT_FINITE, PEER = (next(n for n, text in abi.FAULTS.items() if word in text) for word in ("not finite", "a peer's"))
PROJECTED = ("o", "router_attended", "router_residual")


@pytest.fixture
def rng():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # shown where a test fails
    return np.random.default_rng(seed)


def same_bits(found, expected, what):
    found, expected = (np.ascontiguousarray(x).view(np.uint8) for x in (found, expected))
    assert np.array_equal(found, expected), f"{what}: other bits"


def told(found):
    """(what, kernel, detail) of a report, or None."""
    return None if found is None else (found.what, abi.KERNELS[found.kernel], found.detail)


class Attention:
    """Each rank's o_proj with weights of its own, and its attention tail."""

    def __init__(self, gpu, dims, rng, count, live=None, *, moe=True, codes=False):
        self.gpu, self.dims, self.moe = gpu, dims, moe
        self.ranks, self.live = Ranks(gpu, dims), count if live is None else live
        one = replace(dims, ranks=1)
        self.layers = [OProj(gpu, one, rng, moe) for _ in self.ranks.places]
        attended = rng.standard_normal((dims.ranks, ROWS, dims.q_width), np.float32)
        attended[:, self.live :] = np.nan
        residual = rng.standard_normal((ROWS, dims.hidden), np.float32)
        residual[self.live :] = np.nan
        self.x = {
            "residual": residual,
            "inverse": rng.uniform(0.2, 3.0, ROWS).astype(np.float32),
            "attn_out_norm": norm_weights(rng, dims.hidden),
            "ffn_norm": norm_weights(rng, dims.hidden),
        }
        self.held = {name: gpu.array(value) for name, value in self.x.items()}
        self.held |= {"limit": gpu.array(np.array([self.live], np.int32)), "attended32": gpu.array(attended)}
        self.held["attended"] = gpu.array(attended.astype(np.float16))
        self.fixed = {"rows": count, "layer": 6, "live": 0 if live is None else self.held["limit"].data.ptr}
        self.codes = codes

    def projection(self, place, ranks, targets):
        layer, dims = self.layers[place], replace(self.dims, ranks=ranks)
        attended = [self.held[name][place] for name in ("attended", "attended32")]
        args = layer.args(*attended, self.held["residual"], targets, 0, inverse=self.held["inverse"])
        args.rows, args.slice_start = self.fixed["rows"], place * dims.slice_width % dims.hidden
        args.live = self.fixed["live"]
        if ranks > 1:
            args.out, args.router_attended, args.router_residual = (
                self.ranks.own(place, name, TURN) for name in PROJECTED
            )
            args.peers = self.ranks.peers(place)
        return projections.o_proj(dims, moe=self.moe), args

    def outputs(self):
        gpu, dims = self.gpu, self.dims
        size = (ROWS, dims.hidden)
        out = {"h": gpu.poison(size, np.float32), "normed": gpu.poison(size, np.float16)}
        out["normed32"] = gpu.poison(size, np.float32)
        out["expert_ids"] = gpu.poison((ROWS, dims.top_k), np.int32)
        out["expert_weights"] = gpu.poison((ROWS, dims.top_k), np.float32)
        out["routed"] = gpu.array(np.zeros((ROUTED_COPIES, ROWS, dims.top_k), np.int32))
        out["inner"] = gpu.poison((MAX_GROUPS, ROWS, dims.inner), np.float16)
        if self.codes:
            out |= {"codes": gpu.poison(size, np.uint8), "code_scale": gpu.poison(ROWS, np.float32)}
        return out

    def tail(self, ranks, out, sources, define=()):
        kernel = rows.attn_tail(replace(self.dims, ranks=ranks), moe=self.moe)
        inputs = {name: self.held[name] for name in self.x}
        names = PROJECTED if self.moe else PROJECTED[:1]
        inputs |= dict(zip(names, sources, strict=False))
        args = fill(self.gpu, kernel, **self.fixed, ranks=self.dims.ranks, attn_scale=SCALE, **inputs, **out)
        args.polled = int(ranks > 1)
        return replace(kernel, defines=(*kernel.defines, *define)), args

    def expect(self):
        """The parts, and the tail's results, of kernels for one rank."""
        parts = []
        for place in self.ranks.places:
            targets = self.layers[place].buffers()
            self.gpu.run(*self.projection(place, 1, targets))
            parts.append([x.get() for x in targets])
        self.parts = [np.stack(x) for x in zip(*parts, strict=True)]
        held, out = [self.gpu.array(x) for x in self.parts], self.outputs()
        self.gpu.run(*self.tail(1, out, held))
        self.expected = {name: value.get() for name, value in out.items()}

    def calls(self, o_proj=None, attn_tail=None, define=()):
        """The producers and the consumers of all ranks, with patches."""
        self.out = [self.outputs() for _ in self.ranks.places]
        consumers = []
        for place in self.ranks.places:
            sources = [self.ranks.whole(place, name, TURN) for name in PROJECTED]
            consumers.append([(*self.tail(self.dims.ranks, self.out[place], sources, define), attn_tail)])
        producers = [
            [(*self.projection(p, self.dims.ranks, self.layers[p].buffers()), o_proj)] for p in self.ranks.places
        ]
        return producers, consumers

    def check_parts(self):
        for name, expected in zip(PROJECTED if self.moe else PROJECTED[:1], self.parts, strict=False):
            found = self.ranks.parts(name, TURN)
            for owner in found:
                same_bits(owner[:, : self.live], expected[:, : self.live].view(np.uint32), f"parts of {name}")
            assert (found[:, :, self.live :] == NOT_READY).all(), f"{name}: a dead row was pushed"

    def check(self):
        live = self.live
        for out in self.out:
            got = {name: value.get() for name, value in out.items()}
            for name, expected in self.expected.items():
                # Dead rows, which stay poisoned, as well. What a share is divided by has been summed in another order.
                same_bits(got[name], self.out[0][name].get() if name == "expert_weights" else expected, name)
        if live == 0:
            return
        x = {name: value.astype(np.float64) for name, value in self.x.items()}
        residual = x["residual"][:live] * x["inverse"][:live, None]
        scale = np.float64(np.float32(SCALE))
        norms = x["attn_out_norm"], x["ffn_norm"]
        h, normed = twin.attn_tail(self.parts[0][:, :live], residual, *norms, scale, self.dims.eps)
        assert_close(got["h"][:live], h, EXACT, "h")
        assert_close(got["normed"][:live], normed, HALF, "normed")
        for name in ("h", "normed", "normed32"):
            assert_untouched(got[name], live, name)
        if not self.moe:
            return
        parts = [x[:, :live] for x in self.parts]
        ids, weights = twin.route(twin.folded_logits(parts[0], h, *parts[1:], SCALE, self.dims.eps), self.dims.top_k)
        assert (got["expert_ids"][:live] == ids).all(), "expert_ids"
        assert_close(got["expert_weights"][:live], weights, 1e-5, "expert_weights")

    def go(self, patches=None, *, late=False, unchecked=False):
        """Producers, then consumers, or the other way round; what was reported."""
        self.expect()
        producers, consumers = self.calls(**(patches or {}))
        if late:
            found = self.ranks.run(consumers, producers, pause=0.05)
        else:
            found = self.ranks.run(producers)
            assert unchecked or found is None, told(found)
            if not unchecked:
                self.check_parts()
            found = self.ranks.run(consumers) or found
        if not unchecked:
            assert found is None, told(found)
            self.check()
        return told(found)


class Mlp:
    """Each rank's down with products of its own, and its MLP tail."""

    def __init__(self, gpu, name, rng, count, live=None, *, sandwich=False, dense=0):
        self.gpu, self.dims = gpu, EXCHANGED[name]
        self.e, _ = fresh_experts(gpu, "nano2" if name.startswith("nano") else "released")
        self.ranks, self.live = Ranks(gpu, self.dims), count if live is None else live
        ids = self.e.choose(rng, self.live, "any")
        routing = rng.dirichlet(np.ones(self.dims.top_k), ROWS).astype(np.float32)
        inner = rng.standard_normal((self.dims.ranks, MAX_GROUPS, ROWS, self.dims.inner)).astype(np.float16)
        self.h = rng.standard_normal((ROWS, self.dims.hidden), np.float32)
        self.norms = [norm_weights(rng, self.dims.hidden) for _ in range(2)]
        self.held = [gpu.array(x) for x in (ids, routing, inner, self.h, *self.norms, np.array([self.live], np.int32))]
        self.limit = 0 if live is None else self.held[6].data.ptr
        self.count, self.sandwich, self.dense = count, sandwich, dense
        # What the attention tails have read, and what lies around it.
        self.ranks.memory[:] = 0x3F800000
        self.ranks.put("y", TURN, np.full(self.ranks.parts("y", TURN).shape[1:], NOT_READY, np.uint32))

    def down(self, place, ranks, out):
        ids, routing, inner = self.held[:3]
        args = DownArgs(fault=self.gpu.fault.address, live=self.limit, layer=3, rows=self.count, out=out)
        args.inner = inner[place].data.ptr
        args.weights, args.scales = self.e.down_weights.data.ptr, self.e.down_scales.data.ptr
        args.dense_groups = self.dense
        if not self.dense:
            args.expert_ids, args.expert_weights = ids.data.ptr, routing.data.ptr
        if ranks > 1:
            args.peers = self.ranks.peers(place)
            args.unready = self.ranks.whole(place, "o", TURN)
            args.unready_pieces = self.ranks.inboxes[place].pieces("o", "router_residual")
        return experts.down(replace(self.dims, ranks=ranks)), args

    def tail(self, ranks, out, source, define=()):
        kernel = rows.mlp_tail(replace(self.dims, ranks=ranks))
        inputs = {"y": source, "h": self.held[3], "next_norm": self.held[4], "live": self.limit}
        if self.sandwich:
            inputs["ffn_out_norm"] = self.held[5]
        args = fill(self.gpu, kernel, layer=3, rows=self.count, ranks=self.dims.ranks, ffn_scale=SCALE, **inputs, **out)
        return replace(kernel, defines=(*kernel.defines, *define)), args

    def outputs(self):
        size = (ROWS, self.dims.hidden)
        return {"residual": self.gpu.poison(size, np.float32), "normed": self.gpu.poison(size, np.float16)}

    def go(self, patches=None, *, late=False, define=(), unchecked=False):
        gpu, dims, live = self.gpu, self.dims, self.live
        patches = patches or {}
        parts = gpu.poison((dims.ranks, ROWS, dims.hidden), np.float32)
        for place in self.ranks.places:
            gpu.run(*self.down(place, 1, parts[place].data.ptr))
        out = self.outputs()
        gpu.run(*self.tail(1, out, parts))
        expected, parts = {name: value.get() for name, value in out.items()}, parts.get()

        outs = [self.outputs() for _ in self.ranks.places]
        producers, consumers = [], []
        for place in self.ranks.places:
            own, whole = self.ranks.own(place, "y", TURN), self.ranks.whole(place, "y", TURN)
            producers.append([(*self.down(place, dims.ranks, own), patches.get("down"))])
            consumers.append([(*self.tail(dims.ranks, outs[place], whole, define), patches.get("mlp_tail"))])
        if late:
            found = self.ranks.run(consumers, producers, pause=0.05)
        else:
            found = self.ranks.run(producers)
            if not unchecked:
                assert found is None, told(found)
                pushed = self.ranks.parts("y", TURN)
                for owner in pushed:
                    same_bits(owner[:, :live], parts[:, :live].view(np.uint32), "parts of y")
                assert (pushed[:, :, live:] == NOT_READY).all(), "a dead row was pushed"
            found = self.ranks.run(consumers) or found
        if unchecked:
            return told(found)
        assert found is None, told(found)
        for out in outs:
            for name, value in out.items():
                same_bits(value.get(), expected[name], name)
        y = parts[:, :live]
        norm = self.norms[1] if self.sandwich else None
        scale = np.float64(np.float32(SCALE))
        h, normed = twin.mlp_tail(y, self.h[:live], norm, self.norms[0], scale, dims.eps, normed_residual=False)
        if live:
            assert_close(expected["residual"][:live], h, EXACT, "residual")
            assert_close(expected["normed"][:live], normed, HALF, "normed")
        # NOT_READY again: y, o and the logits of this turn, and nothing else; a launch without rows clears nothing.
        cleared = 4 * self.ranks.inboxes[0].pieces("o", "router_residual") if live else 0
        assert self.ranks.ready_words() == self.ranks.memory.size - dims.ranks * (cleared + parts.size), (
            "not made ready again"
        )
        for name in (*PROJECTED, "y") if live else ("y",):
            assert (self.ranks.parts(name, TURN) == NOT_READY).all(), f"{name} was not made NOT_READY"
        return None


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXCHANGED)
def test_o_proj_to_attn_tail(gpu, rng, name):
    dims = EXCHANGED[name]
    for count, live, moe in ((1, None, True), (2, None, True), (5, None, False), (8, None, True), (8, 3, True)):
        Attention(gpu, dims, rng, count, live, moe=moe).go()
    Attention(gpu, dims, rng, 8, 0).go()
    Attention(gpu, dims, rng, 8, 5, codes=True).go()
    for count, live, moe in ((8, None, True), (5, 2, True), (8, 8, False)):
        Attention(gpu, dims, rng, count, live, moe=moe).go(late=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXCHANGED)
def test_down_to_mlp_tail(gpu, rng, name):
    for count, live, sandwich in ((1, None, True), (2, None, False), (5, None, False), (8, None, True), (8, 3, False)):
        Mlp(gpu, name, rng, count, live, sandwich=sandwich).go()
    Mlp(gpu, name, rng, 8, 0).go()
    if name.startswith("nano"):  # all experts have weights
        Mlp(gpu, name, rng, 8, 5, dense=4).go()
    for count, live, sandwich in ((8, None, False), (5, 2, True)):
        Mlp(gpu, name, rng, count, live, sandwich=sandwich).go(late=True)


class Sums:
    """mlp_tail alone, whose residual is the sum of y: -0 + 1 * y, whatever y is."""

    def __init__(self, gpu, name, values):
        self.gpu, self.dims, self.ranks = gpu, EXCHANGED[name], Ranks(gpu, EXCHANGED[name])
        self.values = values
        self.ranks.put("y", TURN, values)
        size = (ROWS, self.dims.hidden)
        self.held = [gpu.array(np.full(size, -0.0, np.float32)), gpu.array(np.ones(self.dims.hidden, np.float32))]
        self.out = [gpu.poison(size, np.float32) for _ in self.ranks.places]
        self.normed = gpu.poison(size, np.float16)

    def run(self, patch=None, define=()):
        kernel = rows.mlp_tail(self.dims)
        kernel = replace(kernel, defines=(*kernel.defines, *define))
        calls = []
        for place in self.ranks.places:
            inputs = {"h": self.held[0], "next_norm": self.held[1], "y": self.ranks.whole(place, "y", TURN)}
            args = fill(self.gpu, kernel, rows=ROWS, ranks=self.dims.ranks, ffn_scale=1.0, **inputs, normed=self.normed)
            args.residual = self.out[place].data.ptr
            calls.append([(kernel, args, patch)])
        return told(self.ranks.run(calls))

    def check(self):
        total = self.values[0].copy()
        with np.errstate(all="ignore"):
            for part in self.values[1:]:
                total = total + part
        for out in self.out:
            same_bits(out.get(), total, "sum")


def adversarial(rng, dims):
    """Sums that another order, or a place that is taken for zero, changes."""
    shape = (dims.ranks, ROWS, dims.hidden)
    tiny = np.array([1e-45, -1e-45, 1e-40, -1.1754942e-38, 0.0, -0.0], np.float32)
    values = rng.choice(tiny, shape)
    large = np.array([2.0**24, 1.0, -(2.0**24)], np.float32)
    for k in range(3):
        columns = np.arange(dims.hidden // 2)
        for c in columns:
            values[(c + k) % dims.ranks, :, c] += large[k]
    return values


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXCHANGED)
def test_sums_are_of_ranks_in_order(gpu, rng, name):
    dims = EXCHANGED[name]
    sums = Sums(gpu, name, adversarial(rng, dims))
    assert sums.run() is None
    sums.check()
    assert sums.ranks.ready_words() == 0
    normal = rng.standard_normal(sums.values.shape, np.float32) * np.float32(1e-3)
    every = normal.view(np.uint32) ^ rng.integers(0, 2, normal.shape, np.uint32) << 31
    sums = Sums(gpu, name, every.view(np.float32))
    assert sums.run() is None
    sums.check()
    largest = np.zeros_like(normal)
    largest[rng.integers(dims.ranks, size=dims.hidden), 2, np.arange(dims.hidden)] = np.finfo(np.float32).max
    sums = Sums(gpu, name, largest)
    assert sums.run()[0] == NOT_FINITE  # its square isn't
    sums.check()
    if dims.ranks > 2:
        sums = Sums(gpu, name, adversarial(rng, dims))
        sums.run(("total = sum(total, part[r]);", "total = sum(total, part[RANKS - r]);"))
        with pytest.raises(AssertionError, match="sum"):
            sums.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXCHANGED)
def test_what_is_not_finite_is_reported(gpu, rng, name):
    dims = EXCHANGED[name]
    values = rng.standard_normal((dims.ranks, ROWS, dims.hidden), np.float32)
    opposite = values.copy()
    opposite[0, 3, 7], opposite[dims.ranks - 1, 3, 7] = np.inf, -np.inf
    nan = {bits: values.copy() for bits in (0x7FC00000, 0xFFFFFFFE, 0x7F800001, 0x7FFFFFFF)}
    for bits, changed in nan.items():
        changed.view(np.uint32)[dims.ranks - 1, 3, 7] = bits
    for changed in (opposite, *nan.values()):
        sums = Sums(gpu, name, changed)
        assert sums.run() == (NOT_FINITE, "down", 0)
        rest = [out.get() for out in sums.out]
        for out in rest:
            assert np.isnan(out[3, 7])
            assert np.isfinite(np.delete(out, 3, axis=0)).all()
        assert sums.ranks.ready_words() == 0
    short = (("PEER_TIMEOUT_MS", 20),)
    sums = Sums(gpu, name, nan[0x7FC00000])
    broken = ("missing = has_come(part[r]) ? missing : r;", "missing = part[r].w == part[r].w ? missing : r;")
    assert sums.run(broken, short)[0] == PEER  # a NaN taken for what has not come


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXCHANGED)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_part_that_is_not_finite_is_pushed(gpu, rng, name, value):
    case = Attention(gpu, EXCHANGED[name], rng, 4)
    case.held["attended"][-1, 2, 5] = value
    case.expect = lambda: None
    assert case.go(unchecked=True) == (NOT_FINITE, "o_proj", 0)
    assert case.ranks.ready_words() == case.dims.ranks**2 * 4 * (case.dims.hidden + 2 * case.dims.experts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXCHANGED)
@pytest.mark.parametrize("what", PROJECTED)
def test_a_part_that_never_comes(gpu, rng, name, what):
    """One word that one rank did not push, to one rank; then all of a rank."""
    dims = EXCHANGED[name]
    case = Attention(gpu, dims, rng, 5)
    case.expect()
    producers, consumers = case.calls(define=(("PEER_TIMEOUT_MS", 50),))
    assert case.ranks.run(producers) is None
    place = int(rng.integers(dims.ranks))
    first, shape = case.ranks.where(what, TURN)
    width = shape[-1]
    words = case.ranks.memory[dims.ranks - 1, first].reshape(shape)
    words[place, 4, int(rng.integers(width))] = NOT_READY
    begun = perf_counter()
    assert told(case.ranks.run(consumers)) == (PEER, "attn_tail", place)
    assert perf_counter() - begun < 2
    for out in case.out[:-1]:
        for label in ("h", "normed", "expert_ids"):
            same_bits(out[label].get(), case.expected[label], label)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXCHANGED)
def test_a_rank_that_never_pushes(gpu, rng, name):
    dims = EXCHANGED[name]
    place = int(rng.integers(dims.ranks))
    for moe in (True, False):
        case = Attention(gpu, dims, rng, 2, moe=moe)
        producers, consumers = case.calls(define=(("PEER_TIMEOUT_MS", 50),))
        producers[place] = []
        begun = perf_counter()
        assert told(case.ranks.run(producers, consumers)) == (PEER, "attn_tail", place)
        assert perf_counter() - begun < 3
    sums = Sums(gpu, name, np.ones((dims.ranks, ROWS, dims.hidden), np.float32))
    where, shape = sums.ranks.where("y", TURN)
    for owner in sums.ranks.places:
        sums.ranks.memory[owner, where].reshape(shape)[place] = NOT_READY
    assert sums.run(define=(("PEER_TIMEOUT_MS", 50),)) == (PEER, "mlp_tail", place)
    Attention(gpu, dims, rng, 2).go()  # and the next run has nothing left of it


BROKEN = {
    "parts to oneself": {"o_proj": ("peers.push(&out, x);", "out = ready_float(x);")},
    "rows not polled for": {"attn_tail": ("while (polls.again(missing, fault,", "while (polls.again(-1, fault,")},
    "logits not polled for": {"attn_tail": ("while (polls.again(missing, a.fault,", "while (polls.again(-1, a.fault,")},
    "another rank's logits": {"attn_tail": ("attended += parts[0][r];", "attended += parts[0][0];")},
    "dead rows polled for": {
        "attn_tail": (
            "if (row >= min_int(live, a.rows)) {\n        pdl_settle();\n        return;\n    }\n    float4 o;",
            "float4 o;",
        )
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_attention_is_rejected(gpu, rng, broken):
    case = Attention(gpu, EXCHANGED["released, 2 ranks"], rng, 8, 5)
    patches = {**BROKEN[broken], "define": (("PEER_TIMEOUT_MS", 200),)}
    with pytest.raises(AssertionError):
        case.go(patches, late=True)


BROKEN_MLP = {
    "parts to oneself": {"down": ("peers.push(&out, x);", "out = x;")},
    "not polled for": {"mlp_tail": ("while (polls.again(missing, fault,", "while (polls.again(-1, fault,")},
    "not made ready again": {"mlp_tail": ("make_unready_4(a.y + at", "if (r > 0) make_unready_4(a.y + at")},
    "o not made ready again": {"down": ("i < a.unready_pieces;", "i < a.unready_pieces - 1;")},
}


@pytest.mark.gpu
@pytest.mark.parametrize("broken", BROKEN_MLP)
def test_a_broken_mlp_is_rejected(gpu, rng, broken):
    case = Mlp(gpu, "released, 2 ranks", rng, 8, 5)
    with pytest.raises(AssertionError):
        case.go(BROKEN_MLP[broken], late=True, define=(("PEER_TIMEOUT_MS", 200),))


def test_an_inbox_has_no_more_rows_than_a_pass():
    for dims in EXCHANGED.values():
        for make in (rows.attn_tail, rows.mlp_tail):
            with pytest.raises(ValueError, match="an inbox has 8 rows, not 203"):
                make(dims, 203)
            assert make(replace(dims, ranks=1), 203).grid[0] > ROWS
