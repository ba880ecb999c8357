"""The launch between two attentions against its twins, step by step from what it stored itself."""

from dataclasses import dataclass

import numpy as np
import pytest

from cuq1.cuda.abi import Qwen2ChainArgs
from cuq1.cuda.kernels import qwen2_gemv
from cuq1.cuda.repack import int4_units
from cuq1.plan.qwen2_dims import padded, pieces
from tests.kernels.harness import tells
from tests.kernels.qwen2_shapes import ALL, DIMS, SMALL
from tests.kernels.test_qwen2_gemv import Matrix, error, fresh, mlp, token_of, total
from tests.kernels.twins import qwen2_gemv as twin

pytestmark = pytest.mark.gpu

NOT_READY = 0xFF  # every byte of it


@dataclass
class Found:
    """What a launch stored."""

    o: np.ndarray
    inner: np.ndarray
    down: np.ndarray
    residual: np.ndarray
    qkv: np.ndarray
    unready: np.ndarray


class Chain:
    """Random weights and inputs of a layer, and of the next one's q, k and v."""

    def __init__(self, gpu, dims, rng):
        self.gpu, self.dims = gpu, dims
        self.o = Matrix(gpu, rng, dims.hidden, dims.q_width)
        self.gate, self.up = (Matrix(gpu, rng, dims.inner, dims.hidden) for _ in range(2))
        self.down = Matrix(gpu, rng, dims.hidden, dims.inner)
        self.qkv = Matrix(gpu, rng, dims.qkv_rows, dims.hidden)
        self.attended = rng.standard_normal(padded(dims.q_width)).astype(np.float16)
        self.residual = (rng.standard_normal(dims.hidden) * 3).astype(np.float32)
        self.norms = rng.uniform(0.5, 1.5, (2, dims.hidden)).astype(np.float16)

    def run(self, kernel, patch=None, *, last=False, ready=False):
        """ready: what the launch polls for holds old values."""
        gpu, dims = self.gpu, self.dims

        def unready(shape, dtype):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return gpu.array(np.full(size, 0 if ready else NOT_READY, np.uint8).view(dtype).reshape(shape))

        gate_up = int4_units([(m.words, m.scales) for m in (self.gate, self.up)], dims.gate_up_tiles)
        weights = [self.o.units(), gpu.array(gate_up), self.down.units(), self.qkv.units()]
        attended, residual, norm, next_norm = map(gpu.array, (self.attended, self.residual, *self.norms))
        o = unready((pieces(dims.hidden, dims.q_width), dims.hidden), np.float32)
        down = unready((pieces(dims.hidden, dims.inner), dims.hidden), np.float32)
        inner = unready(padded(dims.inner), np.float16)
        out = gpu.poison(dims.hidden, np.float32)
        qkv = gpu.poison((pieces(dims.qkv_rows, dims.hidden), dims.qkv_rows), np.float32)
        cleared = gpu.poison(4096, np.uint32)
        args = Qwen2ChainArgs(
            fault=gpu.fault.address, layer=5, rows=1, attended=attended.data.ptr,
            o_weights=weights[0].data.ptr, gate_up_weights=weights[1].data.ptr, down_weights=weights[2].data.ptr,
            qkv_weights=0 if last else weights[3].data.ptr, post_norm=norm.data.ptr,
            next_norm=0 if last else next_norm.data.ptr, residual=residual.data.ptr, residual_out=out.data.ptr,
            o_pieces=o.data.ptr, inner=inner.data.ptr, down_pieces=down.data.ptr,
            qkv_pieces=0 if last else qkv.data.ptr, unready=cleared.data.ptr, unready_pieces=1023,
        )  # fmt: skip
        gpu.run(kernel, args, patch)
        return Found(*(x.get() for x in (o, inner, down, out, qkv, cleared)))

    def check(self, kernel, patch=None, *, last=False, ready=False):
        """The largest error of any step, of what it may be."""
        dims, found = self.dims, self.run(kernel, patch, last=last, ready=ready)
        attention = total(found.o, dims.hidden, dims.q_width)
        errors = [error(attention, self.o.times(self.attended), self.o.spread(kernel, self.attended))]
        x, normed = twin.entry(self.residual, attention[None], self.norms[0], dims.eps)
        errors.append(error(found.inner[: dims.inner], *mlp(kernel, self.gate, self.up, normed)))
        assert not found.inner[dims.inner :].any()
        added = total(found.down, dims.hidden, dims.inner)
        errors.append(error(added, 16 * self.down.times(found.inner), 16 * self.down.spread(kernel, found.inner)))
        x, normed = (x, None) if last else twin.entry(x, added[None], self.norms[1], dims.eps)
        errors.append(error(found.residual, x))
        if last:
            assert np.isnan(found.qkv).all()
        else:
            token = token_of(kernel, normed)
            heads = total(found.qkv, dims.qkv_rows, dims.hidden)
            errors.append(error(heads, self.qkv.times(token), self.qkv.spread(kernel, token)))
        assert (found.unready[: 4 * 1023] == 0xFFFFFFFF).all()
        assert (found.unready[4 * 1023 :] == 0x7F7F7F7F).all()
        return max(errors)


CASES = [(size, last) for size in (*SMALL, "0.5b", "7b") for last in (False, True)] + [("1.5b", False), ("32b", False)]


@pytest.mark.parametrize(("size", "last"), CASES)
def test_a_chain(gpu, size, last):
    dims = ALL[size]
    assert Chain(gpu, dims, fresh()).check(qwen2_gemv.chain(dims, last=last), last=last) < 1


def test_equal_inputs_give_equal_bits(gpu):
    dims = DIMS["0.5b"]
    chain = Chain(gpu, dims, fresh())
    first, second = (chain.run(qwen2_gemv.chain(dims)) for _ in range(2))
    for name in ("o", "inner", "down", "residual", "qkv"):
        np.testing.assert_array_equal(
            getattr(first, name).view(np.uint8), getattr(second, name).view(np.uint8), err_msg=name
        )


WRONG = {
    "results not waited for": ("if (__all_sync(0xffffffffu, ready)) return false;", "return false;"),
    "nothing cleared": ("make_uint4(NOT_READY, NOT_READY, NOT_READY, NOT_READY)", "make_uint4(0, 0, 0, 0)"),
    "down as it is": ("1.0f / INNER_SCALE", "1.0f"),
    "one norm for both": ("row.load_norm(a.next_norm)", "row.load_norm(a.post_norm)"),
    "a norm's mean": ("sum * (1.0f / HIDDEN)", "sum * (1.01f / HIDDEN)"),
    "silu of another sign": ("silu(gate) * up", "gate / (1.0f + __expf(gate)) * up"),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_chain_is_noticed(gpu, why):
    dims = DIMS["0.5b"]
    chain = Chain(gpu, dims, fresh())
    with tells():
        assert chain.check(qwen2_gemv.chain(dims), WRONG[why]) < 1


def test_old_values_would_be_taken(gpu):
    """The control of clearing: what is polled for must not look as if it had come."""
    dims = DIMS["0.5b"]
    chain = Chain(gpu, dims, fresh())
    with tells():
        assert chain.check(qwen2_gemv.chain(dims), ready=True) < 1
