"""Each of Qwen2's prefill kernels against its twin, as a function that also takes a `patch` of the kernel."""

from dataclasses import replace

import numpy as np

from cuq1.checkpoint import int4
from cuq1.cuda import abi
from cuq1.cuda.kernels import qwen2_prefill as prefill
from cuq1.cuda.repack import int4_units
from cuq1.plan.qwen2_dims import PAGE, padded
from tests.kernels.twins import qwen2_prefill as twin
from tests.kernels.twins.qwen2 import swizzled

THETA = 1e6
EXTRA = 3  # rows beyond the chunk: NaN going in, untouched coming out


def generator():
    seed = int(np.random.default_rng().integers(2**63))
    print("seed", seed)
    return np.random.default_rng(seed)


def error(found, wanted):
    assert np.isfinite(found).all(), "something live was not written, or is not finite"
    return np.linalg.norm(np.float64(found) - wanted) / np.linalg.norm(wanted)


def untouched(values):
    return np.isnan(values).all() if values.dtype.kind == "f" else (values.view(np.uint8) == 0x7F).all()


def matrix(rng, rows, k):
    """An INT4 matrix: words and scales, as the checkpoint has them, and its values float64 [rows, padded(k)]."""
    codes = np.zeros((rows, padded(k)), np.int8)
    codes[:, :k] = rng.integers(-7, 8, (rows, k))
    scales = (rng.uniform(0.2, 2, (rows, padded(k) // 128)) / (4 * k**0.5)).astype(np.float16)
    return int4.pack(codes), scales, codes * np.repeat(scales.astype(np.float64), 128, axis=1)


def activations(rng, rows, k):
    """float16 [rows, padded(k)] with zeros beyond k."""
    out = np.zeros((rows, padded(k)), np.float16)
    out[:, :k] = rng.standard_normal((rows, k))
    return out


def rows_and_dead(values):
    out = np.full((len(values) + EXTRA, *values.shape[1:]), np.nan, values.dtype)
    out[: len(values)] = values
    return out


def buffer(gpu, rows, k):
    """A poisoned buffer of activations in tiles, and something behind it."""
    return gpu.poison(prefill.tile_bytes(rows, k) // 2 + 64, np.float16)


def of_buffer(values, rows, k):
    """[rows, padded(k)] of such a buffer; checks that nothing else was written."""
    tiles = values[:-64].reshape(padded(k) // 64, -1, 64)
    assert untouched(values[-64:])
    assert untouched(tiles[:, rows:])
    return twin.from_tiles(tiles)[:rows]


class Cache:
    """Shuffled pages: more than the positions need, NaN wherever nobody has written."""

    def __init__(self, rng, dims, positions):
        self.count = -(-positions // PAGE)
        self.all = self.count + 5
        self.table = rng.permutation(self.all)[: self.count].astype(np.int32)
        self.shape = (self.all, dims.kv_heads, PAGE, dims.head_size)

    def filled(self, values):
        """Pages with values [positions, kv_heads, size] of positions 0, 1, ..."""
        out = np.full(self.shape, np.nan, np.float16)
        for position, value in enumerate(values):
            out[self.table[position // PAGE], :, position % PAGE] = value
        return swizzled(out)

    def read(self, pages, positions):
        """[positions, kv_heads, size], and checks that the rest is untouched."""
        pages = swizzled(pages)
        at = self.table[positions // PAGE], slice(None), positions % PAGE
        found = pages[at]
        pages[at] = np.nan
        assert untouched(pages)
        return found


def check_embed(gpu, dims, rows, start=0, owned=0, spare=0, patch=None):
    """owned: pages of the table that are there already, a random choice. spare: free pages beyond those needed."""
    rng = generator()
    table = rng.standard_normal((dims.vocab, dims.hidden)).astype(np.float16)
    tokens = rng.integers(0, dims.vocab, rows).astype(np.int32)
    tokens[-1] = dims.vocab - 1
    first, end = start // PAGE, (start + rows - 1) // PAGE + 1
    page_table = np.full(end + 4, -1, np.int32)
    order = rng.permutation(1000).astype(np.int32)
    have = np.unique(np.r_[:first, rng.choice(np.arange(first, end), min(owned, end - first), replace=False)])
    page_table[have] = order[: len(have)]
    free = order[len(have) : len(have) + (end - len(have)) + spare]
    put = [gpu.array(x) for x in (tokens, table, page_table, free)]
    counter = gpu.array(np.array([len(free), 0, 0, 0], np.int32))
    residual = gpu.poison((rows + EXTRA, dims.hidden), np.float32)
    args = abi.Qwen2PrefillEmbedArgs(
        gpu.fault.address, 0, 0, rows, put[0].data.ptr, put[1].data.ptr, residual.data.ptr, counter.data.ptr,
        put[2].data.ptr, put[3].data.ptr, len(page_table), start,
    )  # fmt: skip
    gpu.run(prefill.embed(dims, rows), args, patch)
    out = residual.get()
    assert (out[:rows] == table[tokens]).all()
    assert untouched(out[rows:])
    wanted, left = twin.pages(page_table, free, start, rows)
    assert (put[2].get() == wanted).all()
    assert counter.get().tolist() == [left, 0, 0, 0]


def check_norm(gpu, dims, rows, tiled=True, patch=None):
    rng = generator()
    x = (rng.standard_normal((rows, dims.hidden)) * rng.uniform(0.1, 30, (rows, 1))).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, dims.hidden).astype(np.float16)
    put = [gpu.array(rows_and_dead(x)), gpu.array(weight)]
    width = padded(dims.hidden)
    normed = buffer(gpu, rows, dims.hidden) if tiled else gpu.poison((rows + EXTRA, width), np.float16)
    args = abi.Qwen2PrefillNormArgs(
        gpu.fault.address, 0, 0, rows, put[0].data.ptr, put[1].data.ptr, normed.data.ptr
    )  # fmt: skip
    gpu.run(prefill.norm(dims, rows, tiled=tiled), args, patch)
    out = normed.get()
    assert tiled or untouched(out[rows:])
    found = of_buffer(out, rows, dims.hidden) if tiled else out[:rows]
    assert error(found[:, : dims.hidden], twin.norm(x, weight.astype(np.float64), dims.eps)) < 4e-4
    assert (found[:, dims.hidden :] == 0).all()


def on(kernel, blocks):
    """The kernel with another number of blocks, which then take output tiles in turn, and wider ones."""
    return replace(kernel, grid=(blocks, 1, 1)) if blocks else kernel


def check_qkv(gpu, dims, rows, start=0, blocks=None, patch=None):
    rng = generator()
    x = activations(rng, rows, dims.hidden)
    words, scales, values = matrix(rng, dims.qkv_rows, dims.hidden)
    bias = rng.standard_normal(dims.qkv_rows).astype(np.float16)
    positions = start + np.arange(rows)
    half = dims.head_size // 2
    angles = positions[:, None] * THETA ** (-np.arange(half) / half)
    rope = np.stack((np.cos(angles), np.sin(angles)), -1).astype(np.float32)
    cache = Cache(rng, dims, start + rows)
    put = [gpu.array(a) for a in (twin.to_tiles(x), int4_units([(words, scales)]), bias, rope, cache.table)]
    q = gpu.poison((rows + EXTRA, dims.q_heads, dims.head_size), np.float16)
    pages = [gpu.poison(cache.shape, np.float16) for _ in "kv"]
    args = abi.Qwen2PrefillQkvArgs(
        gpu.fault.address, 0, 3, rows, *(a.data.ptr for a in (*put, q, *pages)), start
    )  # fmt: skip
    gpu.run(on(prefill.qkv(dims, rows), blocks), args, patch)
    wanted = twin.qkv(x, values, bias.astype(np.float64), dims, positions, THETA)
    out = q.get()
    assert untouched(out[rows:])
    for found, want in zip((out[:rows], *(cache.read(p.get(), positions) for p in pages)), wanted, strict=True):
        assert error(found, want) < 4e-4


def check_attention(gpu, dims, rows, start=0, split=None, patch=None):
    """split: 16 rows a block (True) or 64 (False), whatever the specification would choose."""
    rng = generator()
    end = start + rows
    q = rng.standard_normal((rows, dims.q_heads, dims.head_size)).astype(np.float16)
    k, v = (rng.standard_normal((end, dims.kv_heads, dims.head_size)).astype(np.float16) for _ in "kv")
    k[rng.integers(end)] *= 3  # one key that most look at
    cache = Cache(rng, dims, end)
    put = [gpu.array(a) for a in (rows_and_dead(q), cache.table, cache.filled(k), cache.filled(v))]
    attended = buffer(gpu, rows, dims.q_width)
    args = abi.Qwen2PrefillAttentionArgs(
        gpu.fault.address, 0, 0, rows, *(a.data.ptr for a in (*put, attended)), start
    )  # fmt: skip
    gpu.run(prefill.attention(dims, rows, split=split), args, patch)
    found = of_buffer(attended.get(), rows, dims.q_width)
    wanted = twin.attention(q, k, v, start + np.arange(rows)).reshape(rows, -1)
    assert error(found[:, : dims.q_width], wanted) < 1e-3
    assert (found[:, dims.q_width :] == 0).all()


def check_projection(gpu, dims, rows, down=False, scale=0.75, blocks=None, patch=None):
    rng = generator()
    k = dims.inner if down else dims.q_width
    x = activations(rng, rows, k)
    words, scales, values = matrix(rng, dims.hidden, k)
    residual = rng.standard_normal((rows, dims.hidden)).astype(np.float32)
    put = [gpu.array(a) for a in (twin.to_tiles(x), int4_units([(words, scales)]), rows_and_dead(residual))]
    args = abi.Qwen2PrefillProjectionArgs(
        gpu.fault.address, 0, 0, rows, *(a.data.ptr for a in put), scale
    )  # fmt: skip
    gpu.run(on((prefill.down if down else prefill.o_proj)(dims, rows), blocks), args, patch)
    out = put[2].get()
    # Of what was added: the residual would hide errors.
    assert error(out[:rows] - residual, twin.projection(0, x, values, scale)) < 2e-5
    assert untouched(out[rows:])


def check_gate_up(gpu, dims, rows, blocks=None, patch=None):
    rng = generator()
    x = activations(rng, rows, dims.hidden)
    gate, up = (matrix(rng, dims.inner, dims.hidden) for _ in "gu")
    units = int4_units([gate[:2], up[:2]], tiles=dims.gate_up_tiles)
    put = [gpu.array(a) for a in (twin.to_tiles(x, fill=2), units)]  # a dead row that is written would show
    inner = buffer(gpu, rows, dims.inner)
    args = abi.Qwen2PrefillGateUpArgs(
        gpu.fault.address, 0, 0, rows, *(a.data.ptr for a in (*put, inner))
    )  # fmt: skip
    gpu.run(on(prefill.gate_up(dims, rows), blocks), args, patch)
    found = of_buffer(inner.get(), rows, dims.inner)
    assert error(found[:, : dims.inner], twin.gate_up(x, gate[2], up[2])) < 4e-4
    assert (found[:, dims.inner :] == 0).all()
