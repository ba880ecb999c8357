"""gate_up and down against their twins."""

from dataclasses import replace
from functools import cache
from math import gcd

import numpy as np
import pytest

from cuq1.cuda.abi import DownArgs, GateUpArgs
from cuq1.cuda.kernels import experts
from cuq1.cuda.repack import gate_up_units, tiles
from cuq1.errors import DeviceError
from tests.kernels import shapes
from tests.kernels.twins import experts as twin

ROWS = 8
MAX_GROUPS = 64
GATE_UP_TOLERANCE = 5e-4  # inner is rounded to halves
DOWN_TOLERANCE = 1e-5
DOWN_E4M3_TOLERANCE = 5e-3  # a product near a tie may round to the other side

DIMS = {
    **shapes.DIMS,
    "released BF16": replace(shapes.RELEASED, fp8_experts=False),
    "nano BF16": replace(shapes.NANO, fp8_experts=False),
    "released FP8 activations": replace(shapes.RELEASED, fp8_activations=True),
    "nano2 FP8 activations": replace(shapes.NANO2, fp8_activations=True),
}


class Experts:
    """Random weights of some experts; all others are NaN."""

    def __init__(self, gpu, dims, seed):
        rng = np.random.default_rng(seed)
        self.gpu, self.dims = gpu, dims
        count = min(dims.experts, 64)
        self.ids = np.sort(rng.choice(dims.experts, count, replace=False)).astype(np.int32)
        self.scale_k = gcd(dims.inner, 128)
        self.e4m3 = dims.fp8_experts and dims.fp8_activations
        self.gate_up, self.down = {}, {}
        kernel = experts.gate_up(dims)
        unit = gate_up_units(*self._gate_up(rng)[:2]).shape
        size = dims.hidden * dims.inner * (1 if dims.fp8_experts else 2)
        xp = gpu.cupy
        self.gate_up_weights = xp.full((dims.experts, *unit), 0xFF, np.uint8)
        self.down_weights = xp.full((dims.experts, size), 0xFF, np.uint8)
        scales = (dims.experts, dims.hidden // 16, dims.inner // self.scale_k)
        self.down_scales = gpu.poison(scales, np.float32)
        for expert in self.ids:
            stored, scale, values = self._gate_up(rng)
            self.gate_up[int(expert)] = values
            self.gate_up_weights[expert] = gpu.array(gate_up_units(stored, scale))
            stored, scale, values = self._down(rng)
            self.down[int(expert)] = values
            self.down_weights[expert] = gpu.array(tiles(stored).reshape(-1))
            if scale is not None:
                self.down_scales[expert] = gpu.array(scale)
        assert kernel.smem  # the specification fits these sizes

    def _codes(self, rng, rows, k):
        codes = rng.integers(0, 0x58, (rows, k), np.uint8)
        return codes | (rng.integers(0, 2, (rows, k), np.uint8) << 7)

    def _gate_up(self, rng):
        """Stored weights, scales, values [2 * inner, hidden]."""
        inner, hidden = self.dims.inner, self.dims.hidden
        if not self.dims.fp8_experts:
            values = (rng.standard_normal((2 * inner, hidden), np.float32) / np.float32(hidden**0.5)).astype(np.float16)
            return values, None, values
        codes = self._codes(rng, 2 * inner, hidden)
        scales = (rng.uniform(0.2, 1.0, (inner // 8, hidden // 128, 2)) / hidden**0.5).astype(np.float32)
        return codes, scales, (codes, scales)

    def _down(self, rng):
        """Stored weights, scales, values [hidden, inner]."""
        inner, hidden = self.dims.inner, self.dims.hidden
        if not self.dims.fp8_experts:
            values = (rng.standard_normal((hidden, inner), np.float32) / np.float32(inner**0.5)).astype(np.float16)
            return values, None, values
        codes = self._codes(rng, hidden, inner)
        scales = (rng.uniform(0.2, 1.0, (hidden // 16, inner // self.scale_k)) / inner**0.5).astype(np.float32)
        return codes, scales, (codes, scales)

    def gate_up_values(self, ids):
        """{expert: float64 [2 * inner, hidden]} of the experts in ids."""
        found = {}
        for expert in np.unique(ids):
            stored = self.gate_up[int(expert)]
            if isinstance(stored, tuple):
                codes, scales = stored
                grid = np.concatenate((scales[..., 0], scales[..., 1])).astype(np.float64)  # [inner / 4, hidden / 128]
                found[int(expert)] = twin.E4M3[codes] * grid.repeat(8, axis=0).repeat(128, axis=1)
            else:
                found[int(expert)] = stored.astype(np.float64)
        return found

    def down_values(self, ids):
        found = {}
        for expert in np.unique(ids):
            stored = self.down[int(expert)]
            if isinstance(stored, tuple):
                codes, scales = stored
                grid = scales.astype(np.float64).repeat(16, axis=0).repeat(self.scale_k, axis=1)
                found[int(expert)] = twin.E4M3[codes] * grid
            else:
                found[int(expert)] = stored.astype(np.float64)
        return found

    def choose(self, rng, rows, kind):
        """Expert ids int32 [ROWS, top_k]; rows that are dead hold what must not be looked at."""
        top_k = self.dims.top_k
        if kind == "same":
            ids = np.tile(rng.choice(self.ids, top_k, replace=False), (ROWS, 1))
        elif kind == "different":
            assert len(self.ids) >= ROWS * top_k or rows * top_k <= len(self.ids)
            ids = np.resize(rng.permutation(self.ids), (ROWS, top_k))
        else:
            ids = np.stack([rng.choice(self.ids, top_k, replace=False) for _ in range(ROWS)])
        ids[rows:] = rng.choice([-1, 0, 2**31 - 1, self.dims.experts - 1], (ROWS - rows, top_k))
        return ids.astype(np.int32)


@cache
def experts_of(gpu, name, seed):
    return Experts(gpu, DIMS[name], seed)


def fresh(gpu, name):
    """Weights, kept for all tests of these sizes, and a generator for everything else."""
    seed = int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")  # pytest shows it with a failure
    return experts_of(gpu, name, 17), np.random.default_rng(seed)


def error(found, expected):
    return np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)


def activations(e, rng, alive, size):
    """x as halves, or as E4M3 codes and a scale a row, with dead rows that are no numbers; and the exact values."""
    shape = (ROWS, e.dims.hidden)
    x = (size * rng.standard_normal(shape)).astype(np.float16)
    codes = rng.integers(0, 0x60, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
    code_scale = rng.uniform(0.1, 0.3, ROWS).astype(np.float32)
    exact = twin.E4M3[codes] * code_scale[:, None].astype(np.float64) if e.e4m3 else x.astype(np.float64)
    x[alive:], codes[alive:], code_scale[alive:] = np.nan, 0x7F, np.nan
    return x, codes, code_scale, exact


def run_gate_up(e, rng, ids, rows, *, live=None, dense=0, patch=None, size=1.0):
    """Runs gate_up, checks what it wrote and left alone; returns (relative error, inner as it lies on the GPU)."""
    gpu, dims = e.gpu, e.dims
    alive = rows if live is None else min(rows, live)
    x, codes, code_scale, exact = activations(e, rng, alive, size)
    inner = gpu.poison((MAX_GROUPS, ROWS, dims.inner), np.float16)
    inner_max = gpu.array(np.zeros((MAX_GROUPS, ROWS), np.float32))
    held = [gpu.array(v) for v in (x, codes, code_scale, ids)] + [gpu.array(np.array([live or 0], np.int32))]
    args = GateUpArgs(
        fault=gpu.fault.address,
        live=0 if live is None else held[4].data.ptr,
        layer=3,
        rows=rows,
        normed=0 if e.e4m3 else held[0].data.ptr,
        codes=held[1].data.ptr if e.e4m3 else 0,
        code_scale=held[2].data.ptr if e.e4m3 else 0,
        weights=e.gate_up_weights.data.ptr,
        expert_ids=0 if dense else held[3].data.ptr,
        inner=inner.data.ptr,
        inner_max=inner_max.data.ptr if e.e4m3 else 0,
        dense_groups=dense,
    )
    gpu.run(experts.gate_up(dims), args, patch)
    found = inner.get()
    if alive == 0:
        assert np.isnan(found).all()
        return 0.0, found
    wanted = np.arange(dense) if dense else ids[:alive]
    expected = twin.gate_up(exact[:alive], e.gate_up_values(wanted), ids[:alive], dense)
    groups = len(expected)
    written = np.zeros((MAX_GROUPS, ROWS), bool)
    written[:groups, :alive] = ~np.isnan(expected[..., 0])
    assert np.isfinite(found[written]).all()
    assert np.isnan(found[~written]).all()
    if e.e4m3:
        top = np.where(written, np.abs(np.where(written[..., None], found, 0)).max(axis=2), 0)
        np.testing.assert_array_equal(inner_max.get(), top.astype(np.float32))
    part = written[:groups, :alive]
    return error(found[:groups, :alive][part], expected[part]), found


def run_down(e, rng, ids, rows, *, live=None, dense=0, patch=None, inner=None):
    """Runs down on random inner (NaN where a row did not choose a group): (relative error, out as it lies there)."""
    gpu, dims = e.gpu, e.dims
    alive = rows if live is None else min(rows, live)
    routing = rng.dirichlet(np.ones(dims.top_k), ROWS).astype(np.float32)
    routing[alive:] = np.nan
    _, chose = twin.groups_of(ids[: max(alive, 1)], dense)
    full = np.full((MAX_GROUPS, ROWS, dims.inner), np.nan, np.float16)
    if inner is None:
        values = rng.standard_normal((len(chose), max(alive, 1), dims.inner)).astype(np.float16)
        full[: len(chose), : len(chose[0])] = np.where(chose[..., None], values, np.float16(np.nan))
    else:
        full[:] = inner
    top = np.abs(full).max(axis=2).astype(np.float32)  # NaN stays NaN
    out = gpu.poison((ROWS, dims.hidden), np.float32)
    held = [gpu.array(v) for v in (full, top, ids, routing, np.array([live or 0], np.int32))]
    args = DownArgs(
        fault=gpu.fault.address,
        live=0 if live is None else held[4].data.ptr,
        layer=3,
        rows=rows,
        inner=held[0].data.ptr,
        inner_max=held[1].data.ptr if e.e4m3 else 0,
        weights=e.down_weights.data.ptr,
        scales=e.down_scales.data.ptr if dims.fp8_experts else 0,
        expert_ids=0 if dense else held[2].data.ptr,
        expert_weights=0 if dense else held[3].data.ptr,
        out=out.data.ptr,
        dense_groups=dense,
    )
    gpu.run(experts.down(dims), args, patch)
    found = out.get()
    assert np.isnan(found[alive:]).all()
    if alive == 0:
        return 0.0, found
    wanted = np.arange(dense) if dense else ids[:alive]
    expected = twin.down(
        full[: len(chose), :alive].astype(np.float64), e.down_values(wanted), ids[:alive], routing, dense, e.e4m3
    )
    assert np.isfinite(found[:alive]).all()
    return error(found[:alive], expected), found


def down_tolerance(e):
    return DOWN_E4M3_TOLERANCE if e.e4m3 else DOWN_TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize(("rows", "kind"), [(1, "any"), (2, "same"), (5, "any"), (8, "any"), (8, "same")])
def test_routed(gpu, name, rows, kind):
    e, rng = fresh(gpu, name)
    ids = e.choose(rng, rows, kind)
    assert run_gate_up(e, rng, ids, rows)[0] < GATE_UP_TOLERANCE
    assert run_down(e, rng, ids, rows)[0] < down_tolerance(e)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 4, 6, 7])
def test_every_number_of_rows(gpu, rows):
    e, rng = fresh(gpu, "nano")
    ids = e.choose(rng, rows, "any")
    assert run_gate_up(e, rng, ids, rows)[0] < GATE_UP_TOLERANCE
    assert run_down(e, rng, ids, rows)[0] < DOWN_TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rows"), [("released", 8), ("released FP8 activations", 8), ("nano", 4)])
def test_all_experts_different(gpu, name, rows):
    e, rng = fresh(gpu, name)
    ids = e.choose(rng, rows, "different")
    assert len(np.unique(ids[:rows])) == rows * e.dims.top_k
    assert run_gate_up(e, rng, ids, rows)[0] < GATE_UP_TOLERANCE
    assert run_down(e, rng, ids, rows)[0] < down_tolerance(e)


def top_one(gpu):
    """One choice a row: the only way to have a single group."""
    e = Experts(gpu, replace(shapes.NANO, top_k=1), 5)
    ids = np.full((ROWS, 1), e.ids[7], np.int32)
    return e, ids


@pytest.mark.gpu
def test_one_group(gpu):
    e, ids = top_one(gpu)
    rng = np.random.default_rng()
    assert run_gate_up(e, rng, ids, 8)[0] < GATE_UP_TOLERANCE
    assert run_down(e, rng, ids, 8)[0] < DOWN_TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("live", [0, 1, 3, 8, 11])
def test_live_rows(gpu, live):
    e, rng = fresh(gpu, "nano")
    ids = e.choose(rng, min(8, live), "any")
    assert run_gate_up(e, rng, ids, 8, live=live)[0] < GATE_UP_TOLERANCE
    assert run_down(e, rng, ids, 8, live=live)[0] < DOWN_TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "groups"), [("nano", 8), ("nano", 1), ("nano BF16", 11), ("nano2 FP8 activations", 20)]
)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_dense(gpu, name, groups, rows):
    e, rng = fresh(gpu, name)
    ids = np.full((ROWS, e.dims.top_k), 0x7F7F7F7F, np.int32)  # not looked at
    assert run_gate_up(e, rng, ids, rows, dense=groups)[0] < GATE_UP_TOLERANCE
    assert run_down(e, rng, ids, rows, dense=groups)[0] < down_tolerance(e)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["released", "nano2"])
def test_same_bits_again(gpu, name):
    e, rng = fresh(gpu, name)
    ids, seed = e.choose(rng, 8, "any"), int(rng.integers(2**31))
    once, again = (run_gate_up(e, np.random.default_rng(seed), ids, 8)[1] for _ in range(2))
    np.testing.assert_array_equal(once.view(np.uint16), again.view(np.uint16))
    once, again = (run_down(e, np.random.default_rng(seed), ids, 8)[1] for _ in range(2))
    np.testing.assert_array_equal(once.view(np.uint32), again.view(np.uint32))


@pytest.mark.gpu
def test_both_in_a_row(gpu):
    """What gate_up leaves where rows did not choose an expert is what down meets there."""
    e, rng = fresh(gpu, "released")
    ids = e.choose(rng, 6, "any")
    inner = run_gate_up(e, rng, ids, 6)[1]
    assert run_down(e, rng, ids, 6, inner=inner)[0] < DOWN_TOLERANCE


@pytest.mark.gpu
def test_overflow_is_reported(gpu):
    e, rng = fresh(gpu, "nano")
    ids = e.choose(rng, 8, "any")
    with pytest.raises(DeviceError, match="not finite in gate_up, layer 3"):
        run_gate_up(e, rng, ids, 8, size=1e4)


BROKEN_GATE_UP = {
    "mask of another group": ("groups.rows[group] >> token", "groups.rows[group ^ 1] >> token"),
    "gate and up swapped": ("silu(gate[i]) * up[i]", "silu(up[i]) * gate[i]"),
    "scale of another block": ("* CHUNK_K / 128;", "* CHUNK_K / 128 ^ 1;"),
    "one warp's sums missing": ("for (int w = 1; w < CONSUMERS; ++w) {", "for (int w = 2; w < CONSUMERS; ++w) {"),
    "weights of the next unit": ("(unit % UNITS) * UNIT", "((unit + 1) % UNITS) * UNIT"),
}
BROKEN_DOWN = {
    "no routing weight": ("= weight[j] * (1.0f / INNER_SCALE)", "= 1.0f / INNER_SCALE"),
    "weight of another place": ("= weight[j] * (1.0f / INNER_SCALE)", "= weight[j ^ 1] * (1.0f / INNER_SCALE)"),
    "scale of another block": ("tables.scale[group][tile][s]", "tables.scale[group][tile][s ^ (SCALES > 1)]"),
    "scale of another group": ("tables.scale[group][tile][s]", "tables.scale[group ^ 1][tile][s]"),
    "row of another pair": ("row] = static_cast<signed char>(pair);", "row] = static_cast<signed char>(pair ^ 1);"),
}


def rejects(run, tolerance):
    """Whether a broken kernel's run is found out."""
    try:
        return not run()[0] < tolerance
    except (AssertionError, DeviceError):
        return True


@pytest.mark.gpu
@pytest.mark.parametrize("broken", BROKEN_GATE_UP)
def test_broken_gate_up_is_rejected(gpu, broken):
    e, rng = fresh(gpu, "nano")
    ids = e.choose(rng, 8, "any")
    assert rejects(lambda: run_gate_up(e, rng, ids, 8, patch=BROKEN_GATE_UP[broken]), GATE_UP_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("broken", BROKEN_DOWN)
def test_broken_down_is_rejected(gpu, broken):
    e, rng = fresh(gpu, "released")
    ids = e.choose(rng, 8, "any")
    assert rejects(lambda: run_down(e, rng, ids, 8, patch=BROKEN_DOWN[broken]), DOWN_TOLERANCE)


def test_twin_of_one_expert_is_the_plain_formula():
    rng = np.random.default_rng(3)
    x, gate_up, down = rng.standard_normal((2, 8)), rng.standard_normal((12, 8)), rng.standard_normal((8, 6))
    ids, routing = np.array([[4], [4]]), np.ones((2, 1))
    inner = twin.gate_up(x, {4: gate_up}, ids)
    gate, up = x @ gate_up[:6].T, x @ gate_up[6:].T
    expected = (gate * up / (1 + np.exp(-gate))) @ down.T
    np.testing.assert_allclose(twin.down(inner, {4: down}, ids, routing), expected)


def test_twin_rounds_to_the_nearest_e4m3_value():
    values = twin.E4M3[:0x7F]
    np.testing.assert_array_equal(twin.round_e4m3(values), values)
    middle = (values[1:] + values[:-1]) / 2
    even = np.where(np.arange(len(middle)) % 2 == 0, values[:-1], values[1:])
    np.testing.assert_array_equal(twin.round_e4m3(middle), even)
    np.testing.assert_array_equal(twin.round_e4m3(np.array([1e9, -1e9, -0.26])), [448.0, -448.0, -0.25])
