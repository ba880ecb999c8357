"""Decoding's routing where it is not folded (kernels_cu/router.cu): for comparisons, see cuq1.models.routing."""

from cuq1.cuda.abi import RouteArgs, RouterArgs
from cuq1.cuda.kernels.defines import common
from cuq1.cuda.kernels.prefill import router_splits
from cuq1.plan.dims import ROWS, Dims
from cuq1.plan.kernel import Define, Kernel

_EXPERTS = 8  # of a block of router


def _defines(dims: Dims) -> tuple[tuple[str, Define], ...]:
    return (*common(dims), ("ROUTER_EXPERTS", _EXPERTS), ("ROUTER_SPLITS", router_splits(dims)))


def router(dims: Dims) -> Kernel:
    """logits float32 [router_splits, 8, experts], parts of normed32 @ router.T in FP32; twin: float64 matmul."""
    grid = (dims.experts // _EXPERTS, router_splits(dims), 1)
    return Kernel("router.cu", "router", RouterArgs, _defines(dims), grid, 256, max_registers=128, min_blocks=2)


def route(dims: Dims, rows: int = ROWS) -> Kernel:
    """expert_ids int32, expert_weights float32 [rows, top_k] from the logits' parts; twin: tests' `rows.route`."""
    return Kernel("router.cu", "route", RouteArgs, _defines(dims), (rows, 1, 1), dims.experts, max_registers=64)


def kernels(dims: Dims) -> list[Kernel]:
    """All of the family, for a pass of 8 rows."""
    return [router(dims), route(dims)]
