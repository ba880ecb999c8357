"""The chosen experts: gate/up and down, which read three quarters of a pass's bytes."""

from math import gcd

from cuq1.cuda.abi import DownArgs, GateUpArgs
from cuq1.cuda.kernels.defines import common
from cuq1.cuda.repack import TILE, unit_bytes
from cuq1.plan.dims import MULTIPROCESSORS, ROWS, Dims
from cuq1.plan.kernel import Kernel

_WARPS = 8  # of a block that multiply
_CHUNK = 512
_STAGES = 8  # of gate_up: 130 KB in flight a block at the released sizes
_DOWN_STAGES = 96 << 10  # bytes of down's stages, at most


def gate_up(dims: Dims, *, sms: int = MULTIPROCESSORS, stages: int | None = None) -> Kernel:
    """INNER_SCALE * silu(gate) * up of the chosen experts; twin: tests/kernels/twins/experts.py, `gate_up`.

    sms: multiprocessors, each of which takes one block. stages: copies in flight a block, of a part of a unit each.
    """
    chunks = dims.hidden // (32 if dims.fp8_experts else 16)
    part_chunks = _WARPS * next(n for n in (4, 2, 1) if chunks % (n * _WARPS) == 0)
    stage = part_chunks * _CHUNK + unit_bytes(dims.hidden, fp8=dims.fp8_experts) - chunks * _CHUNK
    stages = _STAGES if stages is None else stages
    return Kernel(
        "gate_up.cu",
        "gate_up",
        GateUpArgs,
        (
            *common(dims),
            ("STAGES", stages),
            ("SMEM", stages * stage),
        ),
        (sms, 1, 1),
        (_WARPS + 1) * 32,
        smem=stages * stage,
        max_registers=112,
    )


def down(dims: Dims, *, scale_k: int | None = None, tiles: int | None = None, depth: int | None = None) -> Kernel:
    """The sum of weighted down projections; twin: tests/kernels/twins/experts.py, `down`.

    scale_k: columns of an expert that share a scale, gcd(inner, 128) where not given. tiles: of 16 output rows, that
    a block computes; depth: groups whose weights are in flight a warp.
    """
    fitting = _down_shape(dims)
    tiles = fitting[0] if tiles is None else tiles
    depth = fitting[1] if depth is None else depth
    ring = _WARPS * depth * tiles * _tile_bytes(dims)
    rows = ROWS * dims.top_k * (-(-dims.inner * 2 // 128) * 128 + 32)
    smem = ring + max(rows, _WARPS * tiles * ROWS * 20 * 4)  # the warps' sums take the place of the rows
    return Kernel(
        "down.cu",
        "down",
        DownArgs,
        (
            *common(dims),
            ("DOWN_SCALE_K", gcd(dims.inner, 128) if scale_k is None else scale_k),
            ("TILES", tiles),
            ("DEPTH", depth),
            ("SMEM", smem),
        ),
        (dims.hidden // TILE // tiles, 1, 1),
        _WARPS * 32,
        smem=smem,
        max_registers=128,
    )


def _tile_bytes(dims: Dims) -> int:
    return TILE * dims.inner * (1 if dims.fp8_experts else 2)


def _down_shape(dims: Dims) -> tuple[int, int]:
    """Tiles of a block and groups in flight a warp, as many as fit; two tiles only where blocks are plenty."""
    one = _WARPS * _tile_bytes(dims)
    plenty = dims.hidden // TILE // 2 >= MULTIPROCESSORS // 2
    shapes = ((2, 2), (1, 2), (1, 1)) if plenty else ((1, 2), (1, 1))
    return next((shape for shape in shapes if shape[0] * shape[1] * one <= _DOWN_STAGES), shapes[-1])


def kernels(dims: Dims) -> list[Kernel]:
    """All kernels for these sizes."""
    return [gate_up(dims), down(dims)]
