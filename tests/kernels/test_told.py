"""gate_up and down where they poll: routing that comes late, rows of it last first, and inner as it is written."""

import numpy as np
import pytest

from cuq1.cuda.abi import ROUTED_COPIES, DownArgs, GateUpArgs
from cuq1.cuda.kernels import experts
from cuq1.errors import DeviceError
from tests.kernels.test_experts import (
    DOWN_TOLERANCE,
    GATE_UP_TOLERANCE,
    MAX_GROUPS,
    ROWS,
    activations,
    down_tolerance,
    error,
    fresh,
)
from tests.kernels.told import TELL, run_chain, tell
from tests.kernels.twins import experts as twin

NOT_READY = 0xFFFFFFFF


class Chain:
    """tell, gate_up and down on one case, and what they left."""

    def __init__(self, e, rng, ids, rows, pause=0):
        self.e, self.ids, self.rows = e, ids, rows
        gpu, dims = e.gpu, e.dims
        x, codes, code_scale, self.exact = activations(e, rng, rows, 1.0)
        self.routing = rng.dirichlet(np.ones(dims.top_k), ROWS).astype(np.float32)
        source = gpu.array(codes if e.e4m3 else x)
        self.entering = gpu.poison(source.shape, source.dtype)
        self.routed = gpu.array(np.zeros((ROUTED_COPIES, ROWS, dims.top_k), np.int32))
        self.inner = gpu.array(np.zeros((MAX_GROUPS, ROWS, dims.inner), np.float16))
        self.inner_max = gpu.array(np.zeros((MAX_GROUPS, ROWS), np.float32))
        self.out = gpu.poison((ROWS, dims.hidden), np.float32)
        self.unready = gpu.array(np.zeros(100, np.uint32))
        self.held = [gpu.array(v) for v in (ids, self.routing, code_scale)] + [source]
        self.tell = tell(source, self.entering, self.held[0], self.routed, rows=rows, pause=pause)
        fixed = {"fault": gpu.fault.address, "layer": 7, "rows": rows, "inner": self.inner.data.ptr}
        fixed |= {"inner_max": self.inner_max.data.ptr if e.e4m3 else 0, "routed": self.routed.data.ptr}
        self.gate_up = GateUpArgs(
            **fixed,
            normed=0 if e.e4m3 else self.entering.data.ptr,
            codes=self.entering.data.ptr if e.e4m3 else 0,
            code_scale=self.held[2].data.ptr if e.e4m3 else 0,
            weights=e.gate_up_weights.data.ptr,
        )
        self.down = DownArgs(
            **fixed,
            weights=e.down_weights.data.ptr,
            scales=e.down_scales.data.ptr if dims.fp8_experts else 0,
            expert_ids=self.held[0].data.ptr,
            expert_weights=self.held[1].data.ptr,
            out=self.out.data.ptr,
            unready=self.unready.data.ptr,
            unready_pieces=10,
            polled=0 if e.e4m3 else 1,
        )

    def run(self, gate_up=None, down=None, telling=True):
        """Patches of the kernels' sources. Relative errors of inner, and of out given inner."""
        e, rows = self.e, self.rows
        calls = [(experts.gate_up(e.dims), self.gate_up, gate_up), (experts.down(e.dims), self.down, down)]
        run_chain(e.gpu, ([(TELL, self.tell, None)] if telling else []) + calls)
        assert not self.routed.get().any()  # ready for the next layer
        assert (self.unready.get() == NOT_READY).sum() == 40
        expected = twin.gate_up(self.exact[:rows], e.gate_up_values(self.ids[:rows]), self.ids[:rows])
        found = self.inner.get()
        chosen = ~np.isnan(expected[..., 0])
        assert not found[: len(expected), :rows][~chosen].any()
        inner = np.where(chosen[..., None], found[: len(expected), :rows].astype(np.float64), np.nan)
        values = e.down_values(self.ids[:rows])
        projected = twin.down(inner, values, self.ids[:rows], self.routing, 0, e.e4m3)
        out = self.out.get()
        assert np.isfinite(out[:rows]).all()
        assert np.isnan(out[rows:]).all()
        return error(inner[chosen], expected[chosen]), error(out[:rows], projected)


def right(e, errors):
    return errors[0] < GATE_UP_TOLERANCE and errors[1] < down_tolerance(e)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["released", "nano", "nano BF16", "released FP8 activations"])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_results_that_come_while_they_are_waited_for(gpu, name, rows):
    e, rng = fresh(gpu, name)
    for pause in (0, 2000, 100_000):
        assert right(e, Chain(e, rng, e.choose(rng, rows, "any"), rows, pause).run())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["released", "nano2"])
def test_products_of_zero_arrive(gpu, name):
    """A zero would be what has not been written."""
    e, rng = fresh(gpu, name)
    case = Chain(e, rng, e.choose(rng, 8, "any"), 8)
    case.held[-1][:] = 0
    case.exact[:] = 0
    with np.errstate(invalid="ignore"):
        case.run()
    assert not case.inner.get().any()
    assert not case.out.get().any()


BROKEN = {
    "routing not waited for": (("if (__all_sync(0xffffffffu, here)) break;", "break;"), None),
    "rows not waited for": (("    pdl_wait();\n    pdl_trigger();\n", "    pdl_trigger();\n"), None),
    "inner not waited for": (None, ("polls.again(missing == 0,", "polls.again(true,")),
    "inner of another row": (None, ("from[j] = source * INNER", "from[j] = (source ^ 1) * INNER")),
    "routing not cleared": (None, ("a.routed[i] = 0;", ";")),
    "o not made unready": (None, ("(a.unready)[i] = make_uint4(NOT_READY,", "(a.unready)[i] = make_uint4(1,")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_kernel_is_rejected(gpu, broken):
    e, rng = fresh(gpu, "released")
    gate_up, down = BROKEN[broken]
    case = Chain(e, rng, e.choose(rng, 8, "any"), 8, 100_000)
    try:
        found = right(e, case.run(gate_up, down))
    except (AssertionError, DeviceError):
        found = False
    assert not found


@pytest.mark.gpu
def test_what_never_comes_is_reported(gpu):
    e, rng = fresh(gpu, "nano")
    ids = e.choose(rng, 8, "any")
    case = Chain(e, rng, ids, 8)
    case.entering[:] = case.held[-1]
    with pytest.raises(DeviceError, match="routing that did not come in gate_up, layer 7"):
        case.run(telling=False)
    case = Chain(e, rng, ids, 8)
    case.routed[:, :8] = case.held[0] + 1
    case.entering[:] = case.held[-1]
    nothing = ("a.inner[(int64_t(group) * ROWS + token + i) * INNER + column] = value;", ";")
    with pytest.raises(DeviceError, match="a result that did not arrive in down, layer 7"):
        case.run(gate_up=nothing, telling=False)


@pytest.mark.gpu
def test_the_same_bits_without_polling(gpu):
    e, rng = fresh(gpu, "released")
    case = Chain(e, rng, e.choose(rng, 8, "any"), 8)
    assert case.run()[1] < DOWN_TOLERANCE
    once = case.out.get()
    case.down.polled = case.gate_up.routed = 0
    case.gate_up.expert_ids = case.held[0].data.ptr
    case.run()
    np.testing.assert_array_equal(once.view(np.uint32), case.out.get().view(np.uint32))
