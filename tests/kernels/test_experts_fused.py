"""gate_up and down in one launch against their twins."""

from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda.abi import ExpertsArgs
from cuq1.cuda.kernels import experts
from cuq1.errors import DeviceError
from cuq1.plan.dims import MULTIPROCESSORS
from tests.kernels import shapes
from tests.kernels.test_experts import DIMS, ROWS, Experts, activations, error, fresh
from tests.kernels.twins import experts as twin

INNER_TOLERANCE = 5e-4  # inner is rounded to halves
OUT_TOLERANCE = 1e-5  # from inner as the kernel stored it
OUT_E4M3_TOLERANCE = 5e-3  # a product near a tie may round to the other side


class Case:
    """One launch's inputs, of which dead rows' are no numbers."""

    def __init__(self, e, rng, ids, rows, *, live=None, dense=0, size=1.0):
        self.e, self.ids, self.rows, self.live, self.dense = e, ids, rows, live, dense
        self.alive = rows if live is None else min(rows, live)
        self.half = int(rng.integers(2))  # of inner, which launches use in turn
        self.x, self.codes, self.code_scale, self.exact = activations(e, rng, self.alive, size)
        self.routing = rng.dirichlet(np.ones(e.dims.top_k), ROWS).astype(np.float32)
        self.routing[self.alive :] = np.nan

    def launch(self, kernel, patch=None, times=1):
        """Runs the kernel on fresh buffers: inner [pairs, INNER], its used half, and out, as they lie there."""
        e, gpu, dims = self.e, self.e.gpu, self.e.dims
        inputs = (self.x, self.codes, self.code_scale, self.ids, self.routing, np.array([self.live or 0], np.int32))
        x, codes, code_scale, ids, routing, live = (gpu.array(values) for values in inputs)
        slots = ROWS * max(dims.top_k, self.dense)
        inner = gpu.poison((2, slots, dims.inner), np.float16)
        inner[self.half] = 0
        epoch = gpu.array(np.array([self.half, 0, 0, 0, 0, 0], np.int32))
        out = gpu.poison((ROWS, dims.hidden), np.float32)
        args = ExpertsArgs(
            fault=gpu.fault.address,
            live=0 if self.live is None else live.data.ptr,
            layer=3,
            rows=self.rows,
            normed=0 if e.e4m3 else x.data.ptr,
            codes=codes.data.ptr if e.e4m3 else 0,
            code_scale=code_scale.data.ptr if e.e4m3 else 0,
            gate_up=e.gate_up_weights.data.ptr,
            down=e.down_weights.data.ptr,
            down_scales=e.down_scales.data.ptr if dims.fp8_experts else 0,
            expert_ids=0 if self.dense else ids.data.ptr,
            expert_weights=0 if self.dense else routing.data.ptr,
            inner=inner.data.ptr,
            epoch=epoch.data.ptr,
            out=out.data.ptr,
            dense_groups=self.dense,
            inner_half=inner[0].size,
        )
        for _ in range(times):
            gpu.run(kernel, args, patch)
        used = (self.half + times - 1) % 2
        if self.alive == 0:
            assert epoch.get().tolist() == [self.half, 0, 0, 0, 0, 0]
        else:
            assert epoch.get()[[0, 1, 4 - 2 * used, 5 - 2 * used]].tolist() == [1 - used, 0, 0, 0]
            assert not inner[1 - used].get().any()  # ready for the next launch
        return inner[used].get(), out.get()


def run(e, rng, ids, rows, *, patch=None, sms=MULTIPROCESSORS, **how):
    """Runs the kernel, checks what it wrote and left alone: relative errors of inner, and of out given inner."""
    case = Case(e, rng, ids, rows, **how)
    inner, out = case.launch(experts.fused(e.dims, dense_groups=case.dense, sms=sms), patch)
    alive, dense = case.alive, case.dense
    assert np.isnan(out[alive:]).all()
    if alive == 0:
        assert not inner.any()
        return 0.0, 0.0
    wanted = np.arange(dense) if dense else ids[:alive]
    expected = twin.gate_up(case.exact[:alive], e.gate_up_values(wanted), ids[:alive], dense)
    named = np.arange(dense) if dense else np.argsort(np.unique(ids[:alive], return_index=True)[1])
    chosen = ~np.isnan(expected[..., 0])
    pairs = int(chosen.sum())
    assert (inner[:pairs].view(np.uint16) != 0).all()
    assert not inner[pairs:].view(np.uint16).any()
    found = np.full(expected.shape, np.nan)
    ordered = found[named]
    ordered[chosen[named]] = inner[:pairs]  # the kernel's groups come as rows name them
    found[named] = ordered
    projected = twin.down(found, e.down_values(wanted), ids[:alive], case.routing, dense, e.e4m3)
    assert np.isfinite(out[:alive]).all()
    return error(found[chosen], expected[chosen]), error(out[:alive], projected)


def right(e, errors):
    """Whether the errors that `run` returns are within what rounding explains."""
    return errors[0] < INNER_TOLERANCE and errors[1] < (OUT_E4M3_TOLERANCE if e.e4m3 else OUT_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize(("rows", "kind"), [(1, "any"), (2, "same"), (5, "any"), (8, "any"), (8, "same")])
def test_routed(gpu, name, rows, kind):
    e, rng = fresh(gpu, name)
    assert right(e, run(e, rng, e.choose(rng, rows, kind), rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 4, 6, 7])
def test_every_number_of_rows(gpu, rows):
    e, rng = fresh(gpu, "nano")
    assert right(e, run(e, rng, e.choose(rng, rows, "any"), rows))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rows"), [("released", 8), ("released FP8 activations", 8), ("nano", 4)])
def test_all_experts_different(gpu, name, rows):
    e, rng = fresh(gpu, name)
    ids = e.choose(rng, rows, "different")
    assert len(np.unique(ids[:rows])) == rows * e.dims.top_k
    assert right(e, run(e, rng, ids, rows))


@pytest.mark.gpu
def test_one_group(gpu):
    """One choice a row: the only way to have a single group."""
    e = Experts(gpu, replace(shapes.NANO, top_k=1), 5)
    assert right(e, run(e, np.random.default_rng(), np.full((ROWS, 1), e.ids[7], np.int32), 8))


@pytest.mark.gpu
@pytest.mark.parametrize("live", [0, 1, 3, 8, 11])
def test_live_rows(gpu, live):
    e, rng = fresh(gpu, "nano")
    assert right(e, run(e, rng, e.choose(rng, min(8, live), "any"), 8, live=live))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "groups"), [("nano", 8), ("nano", 1), ("nano BF16", 11), ("nano2 FP8 activations", 20), ("released", 8)]
)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_dense(gpu, name, groups, rows):
    e, rng = fresh(gpu, name)
    if name == "released":
        e = Experts(gpu, replace(e.dims, experts=groups), 23)
    ids = np.full((ROWS, e.dims.top_k), 0x7F7F7F7F, np.int32)  # not looked at
    assert right(e, run(e, rng, ids, rows, dense=groups))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "sms"), [("nano", 16), ("nano", 8), ("nano", 5), ("nano2", 3), ("released", 96)])
def test_fewer_multiprocessors(gpu, name, sms):
    """Every way in which tiles divide among blocks."""
    e, rng = fresh(gpu, name)
    assert right(e, run(e, rng, e.choose(rng, 8, "any"), 8, sms=sms))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["released", "nano2", "released FP8 activations"])
def test_same_bits_again(gpu, name):
    e, rng = fresh(gpu, name)
    case = Case(e, rng, e.choose(rng, 8, "any"), 8)
    once = case.launch(experts.fused(e.dims))
    for _ in range(10):
        again = case.launch(experts.fused(e.dims))
        for a, b in zip(once, again, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.gpu
def test_a_launch_leaves_what_the_next_one_needs(gpu):
    """The counters go on from launch to launch, with other inputs' products in inner."""
    e, rng = fresh(gpu, "released")
    case = Case(e, rng, e.choose(rng, 8, "any"), 8)
    once, often = (case.launch(experts.fused(e.dims), times=times) for times in (1, 5))
    for a, b in zip(once, often, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["released", "nano2 FP8 activations"])
def test_products_of_zero_arrive(gpu, name):
    """A word of inner that is all zeros would be one that has not been written."""
    e, rng = fresh(gpu, name)
    case = Case(e, rng, e.choose(rng, 8, "any"), 8)
    case.x[:], case.codes[:] = 0, 0
    inner, out = case.launch(experts.fused(e.dims))
    assert not inner.any()
    assert not out.any()


@pytest.mark.gpu
def test_overflow_is_reported(gpu):
    e, rng = fresh(gpu, "nano")
    with pytest.raises(DeviceError, match="not finite in gate_up, layer 3"):
        run(e, rng, e.choose(rng, 8, "any"), 8, size=1e4)


BROKEN = {
    "mask of another group": (
        "chosen = shared.chose(group, token);\n            const uint8_t",
        "chosen = shared.chose(group ^ 1, token);\n            const uint8_t",
    ),
    "gate and up swapped": ("silu(gate[i]) * up[i]", "silu(up[i]) * gate[i]"),
    "scale of another block": ("* CHUNK_K / 128;", "* CHUNK_K / 128 ^ 1;"),
    "one warp's sums missing": ("for (int w = 1; w < CONSUMERS; ++w) {", "for (int w = 2; w < CONSUMERS; ++w) {"),
    "weights of the next unit": ("(unit % UNITS) * UNIT", "((unit + 1) % UNITS) * UNIT"),
    "no routing weight": ("= weight[j] * (1.0f / INNER_SCALE)", "= 1.0f / INNER_SCALE"),
    "scale of another group": ("[item * SCALES + s]", "[(item ^ N) * SCALES + s]"),
    "row of another pair": (
        "(chosen ? shared.slot(group, token) : 0) * PITCH",
        "(shared.slot(group, token) ^ 1) * PITCH",
    ),
    "a row before it is complete": ("slot[i] < 0 || !row[i].complete()", "slot[i] < 0"),
    "the other half not cleared": ("other[i] = make_uint4(0, 0, 0, 0);", ";"),
    "the half not counted on": ("a.epoch[0] = half ^ 1;", ";"),
    "the looking blocks not counted anew": ("a.epoch[1] = 0;", ";"),
}


def rejects(e, errors):
    """Whether a broken kernel's run is found out."""
    try:
        return not right(e, errors())
    except (AssertionError, DeviceError):
        return True


@pytest.mark.gpu
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_kernel_is_rejected(gpu, broken):
    e, rng = fresh(gpu, "released")
    ids = e.choose(rng, 8, "any")
    assert rejects(e, lambda: run(e, rng, ids, 8, patch=BROKEN[broken]))
