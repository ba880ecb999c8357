"""Routing that is not folded: the router's product and the choice, against float64."""

import numpy as np
import pytest

from cuq1.cuda.abi import ROUTED_COPIES
from cuq1.cuda.kernels import routing
from cuq1.errors import DeviceError
from cuq1.plan.dims import ROWS
from tests.kernels import shapes
from tests.kernels.harness import in_header
from tests.kernels.twins import rows as twin

DIMS = {**shapes.DIMS, "narrow": shapes.NARROW}
EXACT = 1e-6  # relative error of FP32 sums of 3,072 products of random signs


@pytest.fixture
def rng():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # shown where a test fails
    return np.random.default_rng(seed)


def arguments(gpu, kernel, rows, **values):
    args = kernel.args(fault=gpu.fault.address, rows=rows)
    for name, value in values.items():
        setattr(args, name, value.data.ptr if hasattr(value, "data") else value)
    return args


def check_router(gpu, rng, dims, rows, live=None, patch=None):
    count = rows if live is None else live
    kernel = routing.router(dims)
    weights = rng.standard_normal((dims.experts, dims.hidden), np.float32)
    x = rng.standard_normal((ROWS, dims.hidden), np.float32)
    x[count:] = 1e30  # dead rows must not reach live ones
    arrays = {"normed32": gpu.array(x), "router": gpu.array(weights)}
    logits = gpu.poison((kernel.grid[1], ROWS, dims.experts), np.float32)
    limit = gpu.array(np.array([count], np.int32))
    args = arguments(gpu, kernel, rows, **arrays, logits=logits, live=0 if live is None else limit)
    gpu.run(kernel, args, patch)
    got = logits.get()
    assert np.isnan(got[:, count:]).all(), "dead rows written"
    found = got[:, :count].astype(np.float64).sum(axis=0)
    expected = x[:count].astype(np.float64) @ weights.astype(np.float64).T
    size = np.linalg.norm(x[:count].astype(np.float64), axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    assert (np.abs(found - expected) <= EXACT * size).all(), "logits"


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_router(gpu, rng, name):
    for rows in (1, 2, 5, 8):
        check_router(gpu, rng, DIMS[name], rows)
        check_router(gpu, rng, DIMS[name], 8, live=rows)
    check_router(gpu, rng, DIMS[name], 8, live=0)
    for patch in (
        ("warp % K_PARTS * (SPLIT_K / K_PARTS)", "0 * (SPLIT_K / K_PARTS)"),
        ("part < K_PARTS; ++part", "part < 1; ++part"),
        ("w[expert][j].y, x[token][j].y", "w[expert][j].y, x[token][j].x"),
    ):
        with pytest.raises(AssertionError, match="logits"):
            check_router(gpu, rng, DIMS[name], 8, patch=patch)
    with pytest.raises(AssertionError, match="dead rows"):
        check_router(gpu, rng, DIMS[name], 8, live=3, patch=("token < live", "token < a.rows"))


def check_route(gpu, rng, dims, rows, *, live=None, forced=None, ties=False, patch=None, broken=None):
    count = rows if live is None else live
    kernel = routing.route(dims, rows)
    splits = routing.router(dims).grid[1]
    parts = rng.standard_normal((splits, ROWS, dims.experts), np.float32)
    if ties:  # few values, both zeros among them
        parts[1:] = -0.0
        parts[0] = rng.choice(np.array([-1.0, -0.0, 0.0, 0.5], np.float32), parts[0].shape, p=[0.4, 0.29, 0.29, 0.02])
    if broken is not None:
        parts[0, 0, 3] = broken
    parts[:, count:] = np.nan
    ids, weights = gpu.poison((ROWS, dims.top_k), np.int32), gpu.poison((ROWS, dims.top_k), np.float32)
    told = gpu.array(np.zeros((ROUTED_COPIES, ROWS, dims.top_k), np.int32))
    values = {"logits": gpu.array(parts), "expert_ids": ids, "expert_weights": weights, "routed": told}
    chosen = None if forced is None else gpu.array(forced)
    limit = gpu.array(np.array([count], np.int32))
    values |= {"live": 0 if live is None else limit, "forced_ids": 0 if forced is None else chosen}
    gpu.run(kernel, arguments(gpu, kernel, rows, **values), patch)
    logits = np.add.reduce(parts, axis=0, dtype=np.float32)[:count]  # in order, as the kernel adds
    expected, shares = np.zeros((0, dims.top_k), np.int32), np.zeros((0, dims.top_k))
    if count > 0:
        expected, shares = twin.route(logits.astype(np.float64), dims.top_k)
    if forced is not None:
        expected, shares = forced[:count], twin.softmax_of(logits.astype(np.float64), forced[:count])
    assert (ids.get()[:count] == expected).all(), "expert_ids"
    assert (told.get()[:, :count] == expected + 1).all(), "routed"
    np.testing.assert_allclose(weights.get()[:count], shares, rtol=1e-5, err_msg="expert_weights")
    assert (ids.get()[count:] == 0x7F7F7F7F).all(), "dead rows written"
    assert np.isnan(weights.get()[count:]).all(), "dead rows written"
    assert not told.get()[:, count:].any(), "dead rows written"


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_route(gpu, rng, name):
    dims = DIMS[name]
    for rows in (1, 2, 5, 8):
        check_route(gpu, rng, dims, rows)
        check_route(gpu, rng, dims, 8, live=rows, ties=True)
    check_route(gpu, rng, dims, 8, live=0)
    forced = np.stack([rng.permutation(dims.experts)[: dims.top_k] for _ in range(ROWS)]).astype(np.int32)
    check_route(gpu, rng, dims, 8, forced=forced)
    for patch in (("< index / 4 ? key - 1 : key", "> index / 4 ? key - 1 : key"), ("(x + 0.0f)", "(x)")):
        with pytest.raises(AssertionError, match="expert_ids"):
            check_route(gpu, rng, dims, 8, ties=True, patch=in_header("common/choice.cuh", *patch))
    for patch, match, how in (
        (('"r"(id + 1)', '"r"(id)'), "routed", {}),
        (("split < ROUTER_SPLITS; ++split) logit", "split < 1; ++split) logit"), "expert_ids", {"splits": True}),
        (("__fdividef(share, total)", "share"), "expert_weights", {}),
        (("if (row >= live) return", "if (row >= a.rows) return"), "dead rows|finite", {"live": 3}),
    ):
        if how.pop("splits", False) and routing.router(dims).grid[1] == 1:
            continue
        with pytest.raises((AssertionError, DeviceError), match=match):
            check_route(gpu, rng, dims, 8, patch=patch, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_route_reports_what_is_not_finite(gpu, rng, value):
    with pytest.raises(DeviceError, match="not finite in router, layer 0"):
        check_route(gpu, rng, shapes.RELEASED, 8, broken=value)
