"""Qwen2's prefill kernels against their twins; each check also runs with a broken kernel, which must fail."""

from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda.kernels import qwen2_prefill as prefill
from cuq1.errors import DeviceError
from cuq1.plan.qwen2_dims import PAGE, Qwen2Dims
from tests.kernels.harness import in_header
from tests.kernels.qwen2_prefill_checks import (
    check_attention,
    check_embed,
    check_gate_up,
    check_norm,
    check_projection,
    check_qkv,
    generator,
)
from tests.kernels.qwen2_shapes import DIMS, ODD
from tests.kernels.twins import qwen2_prefill as twin

# Groups of 8 and 5 query heads: the family has 6 (1.5b), 7 (0.5b, 7b), 8 (3b) and 5 (14b, 32b).
NARROW = Qwen2Dims(hidden=256, q_heads=16, kv_heads=2, head_size=64, inner=200, vocab=512, eps=1e-6)
FIVES = replace(NARROW, hidden=640, q_heads=10, head_size=128, inner=1300)
SMALL = {**ODD, "narrow": NARROW, "fives": FIVES, "7b-tiny": DIMS["7b-tiny"]}
ROWS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 512)
STARTS = (0, 1, 15, 16, 4095)


def test_activations_in_tiles_are_a_permutation():
    """What wgmma reads as A's columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a step are a word's codes in their order."""
    rng = np.random.default_rng(5)
    x = rng.permutation(19 * 128).reshape(19, 128).astype(np.float16)
    tiles = twin.to_tiles(x)
    assert (twin.from_tiles(tiles)[:19] == x).all()
    assert np.isnan(tiles[:, 19:]).all()
    for row, block, step, t in np.ndindex(19, 2, 4, 4):
        pieces = tiles[block, row].reshape(8, 8)
        low, high = (pieces[(2 * step + half) ^ (row % 8), 2 * t : 2 * t + 2] for half in range(2))
        column = 64 * block + 32 * (step // 2) + 8 * t + 4 * (step % 2)
        assert np.r_[low, high].tolist() == x[row, column : column + 4].tolist()


def test_bytes_of_a_buffer():
    for rows, width in ((1, 64), (8, 128), (9, 129), (2048, 18944)):
        assert prefill.tile_bytes(rows, width) == twin.to_tiles(np.zeros((rows, -(-width // 128) * 128))).nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [*ROWS, 2048])
def test_embed(gpu, rows):
    check_embed(gpu, NARROW, rows)
    for start in (1, 15, 16, 777):
        check_embed(gpu, NARROW, rows, start, owned=3, spare=2)


@pytest.mark.gpu
def test_embed_reports_a_token_outside_the_vocabulary(gpu):
    with pytest.raises(DeviceError, match="a token outside the vocabulary"):
        check_embed(gpu, NARROW, 20, patch=("__ldcg(a.tokens + row)", "__ldcg(a.tokens + row) + 1"))


@pytest.mark.gpu
@pytest.mark.parametrize(("spare", "start"), [(-1, 0), (-4, 100)])
def test_embed_reports_positions_that_no_page_is_left_for(gpu, spare, start):
    with pytest.raises(DeviceError, match="without a free page"):
        check_embed(gpu, NARROW, 100, start, spare=spare)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_norm(gpu, rows):
    for dims in (*SMALL.values(), DIMS["7b"], DIMS["32b"]):
        check_norm(gpu, dims, rows)
        check_norm(gpu, dims, rows, tiled=False)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SMALL)
def test_qkv(gpu, name, rows):
    for start in STARTS if name == "narrow" else (STARTS[rows % 5],):
        check_qkv(gpu, SMALL[name], rows, start)
        check_qkv(gpu, SMALL[name], rows, start, blocks=3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SMALL)
def test_attention(gpu, name, rows):
    for start in STARTS if name == "odd" else (STARTS[rows % 5],):
        check_attention(gpu, SMALL[name], rows, start)
        check_attention(gpu, SMALL[name], rows, start, split=False)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SMALL)
def test_mlp_and_projections(gpu, name, rows):
    for blocks in (None, 1, 5):
        check_gate_up(gpu, SMALL[name], rows, blocks)
        check_projection(gpu, SMALL[name], rows, blocks=blocks)
        check_projection(gpu, SMALL[name], rows, down=True, scale=16.0, blocks=blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 65, 512])
def test_the_released_sizes(gpu, rows):
    dims = DIMS["7b"]
    check_qkv(gpu, dims, rows, 100)
    check_attention(gpu, dims, rows, 300)
    check_projection(gpu, dims, rows)
    check_projection(gpu, dims, rows, down=True)
    check_gate_up(gpu, replace(dims, inner=dims.inner // 4), rows)


@pytest.mark.gpu
def test_a_whole_chunk(gpu):
    check_qkv(gpu, NARROW, prefill.CHUNK, 5)
    check_attention(gpu, NARROW, prefill.CHUNK, 5)
    check_gate_up(gpu, NARROW, prefill.CHUNK)
    check_projection(gpu, NARROW, prefill.CHUNK, down=True)


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits(gpu, monkeypatch):
    """A race would show as bits that change."""
    seen = []
    monkeypatch.setattr("tests.kernels.qwen2_prefill_checks.generator", lambda: np.random.default_rng(7))
    real = gpu.run

    def run(kernel, args, patch=None):
        real(kernel, args, patch)
        if kernel.entry == "qwen2_prefill_projection":
            memory = gpu.cupy.cuda.UnownedMemory(args.residual, args.rows * FIVES.hidden * 4, None)
            array = gpu.cupy.ndarray((args.rows, FIVES.hidden), np.float32, gpu.cupy.cuda.MemoryPointer(memory, 0))
            seen.append(array.get().tobytes())

    monkeypatch.setattr(gpu, "run", run)
    for _ in range(20):
        check_projection(gpu, FIVES, 300, down=True)
    assert len(set(seen)) == 1


def test_the_seed_is_fresh():
    assert generator().integers(2**60) != generator().integers(2**60)


GEMM = "common/int4_gemm.cuh"
BROKEN = {
    "embed page": (lambda g, p: check_embed(g, NARROW, 65, 9, 2, 1, p), "free - 1 - before", "free - before"),
    "embed count": (lambda g, p: check_embed(g, NARROW, 65, 9, 2, 1, p), "free - given", "free - 1"),
    "embed row": (lambda g, p: check_embed(g, NARROW, 65, patch=p), "tokens + row)", "tokens + row / 2)"),
    "norm width": (lambda g, p: check_norm(g, NARROW, 65, patch=p), "1.0f / HIDDEN)", "1.0f / PADDED / 1.01f)"),
    "norm order": (lambda g, p: check_norm(g, NARROW, 65, patch=p), "32 + 8 * t", "32 + 8 * (t ^ 1)"),
    "norm padding": (
        lambda g, p: check_norm(g, ODD["odd"], 65, False, p), "if (piece >= PADDED / 8)", "if (piece >= HIDDEN / 8)"
    ),
    "qkv bias": (
        lambda g, p: check_qkv(g, NARROW, 65, 3, None, p), "bias_low = f16_to_float(a.bias[row])", "bias_low = 0.0f"
    ),
    "qkv rope": (lambda g, p: check_qkv(g, NARROW, 65, 3, None, p), "x = x0 * turn.x - y", "x = x0 * turn.x + y"),
    "qkv rope of another row": (
        lambda g, p: check_qkv(g, NARROW, 65, 3, None, p), "(first + token) * PAIRS", "token * PAIRS"
    ),
    "qkv values turned": (
        lambda g, p: check_qkv(g, NARROW, 65, 3, None, p), "row < (Q_HEADS + KV_HEADS)",
        "row < 2 * (Q_HEADS + KV_HEADS)",
    ),
    "qkv page": (lambda g, p: check_qkv(g, NARROW, 65, 3, None, p), "page_table + position / PAGE", "page_table + 0"),
    "qkv place in a page": (
        lambda g, p: check_qkv(g, NARROW, 65, 3, None, p), "position % PAGE)", "(position ^ 1) % PAGE)"
    ),
    "qkv dead rows": (
        lambda g, p: check_qkv(g, NARROW, 65, 3, None, p), "tokens = min_int(gemm.width, gemm.rows - first)",
        "tokens = min_int(gemm.width, gemm.rows - first + 1)",
    ),
    "attention causal": (
        lambda g, p: check_attention(g, NARROW, 65, 70, False, p), "position <= position0 ?", "position < position0 ?"
    ),
    "attention causal, split": (
        lambda g, p: check_attention(g, NARROW, 15, 70, True, p), "position <= position0 ?", "position < position0 ?"
    ),
    "attention sees the future": (
        lambda g, p: check_attention(g, NARROW, 65, 70, False, p), "position <= position0 ?",
        "position <= position0 + 1 ?",
    ),
    "attention page": (
        lambda g, p: check_attention(g, NARROW, 65, 70, None, p), "__ldcg(page_table + place)",
        "__ldcg(page_table + place / 2)",
    ),
    "attention garbage": (
        lambda g, p: check_attention(g, NARROW, 65, 0, None, p), "+ row <= high ? 16", "+ row <= high + 1 ? 16"
    ),
    "attention reads the stage that is being filled": (
        lambda g, p: check_attention(g, NARROW, 65, 70, False, p), "shared + tile % STAGES * (2 * TILE_BYTES), key",
        "shared + (tile + 1) % STAGES * (2 * TILE_BYTES), key",
    ),
    "attention joined": (
        lambda g, p: check_attention(g, NARROW, 15, 700, True, p), "weights[w] * sums", "sums"
    ),
    "attention scale": (lambda g, p: check_attention(g, NARROW, 65, 0, None, p), "? 0.125f", "? 0.12f"),
    "attention zeros": (
        lambda g, p: check_attention(g, ODD["odd"], 65, 0, None, p), "WIDTH_BLOCKS % 2 != 0 &&", "false &&"
    ),
    "projection residual": (
        lambda g, p: check_projection(g, NARROW, 65, patch=p), "fmaf(scale, sum[at], old[i])", "scale * sum[at]"
    ),
    "projection dead rows": (
        lambda g, p: check_projection(g, NARROW, 65, patch=p), "token >= gemm.rows) continue",
        "token > gemm.rows) continue",
    ),
    "gate_up swapped": (
        lambda g, p: check_gate_up(g, NARROW, 65, None, p), "gate = sum[4 * n + j], up = sum[4 * n + 2 + j]",
        "up = sum[4 * n + j], gate = sum[4 * n + 2 + j]",
    ),
    "gate_up dead rows": (
        lambda g, p: check_gate_up(g, NARROW, 65, None, p), "min_int(gemm.width, gemm.rows - first)",
        "min_int(gemm.width, gemm.all_rows - first)",
    ),
}  # fmt: skip
BROKEN_GEMM = {
    "scale of another group": (
        "unit(at, row) + CODE_BYTES", "unit(at, row) + CODE_BYTES - at.group % A_GROUPS * UNIT_BYTES"
    ),
    "scale of another row": ("load_scale(at, second_row())", "load_scale(at, first_row())"),
    "products that pile up": ("b + (s * 32 >> 4), s > 0)", "b + (s * 32 >> 4), 1)"),
    "columns of another chunk": ("WIDTH * ACTIVATION_BLOCK * 2 + s * 32", "s * 32"),
    "codes of another pair": ("a[step][row + 2] = pairs[1]", "a[step][row + 2] = pairs[0]"),
    "another unit": ("at.group % A_GROUPS * UNIT_BYTES;", "(at.group + 1) % A_GROUPS * UNIT_BYTES;"),
}  # fmt: skip


def noticed(check, gpu, patch):
    with pytest.raises((AssertionError, DeviceError)) as found:
        check(gpu, patch)
    assert found.type is AssertionError or "reported a fault" in str(found.value)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_noticed(gpu, name):
    check, old, new = BROKEN[name]
    noticed(check, gpu, (old, new))


@pytest.mark.gpu
@pytest.mark.parametrize("name", BROKEN_GEMM)
def test_broken_products_are_noticed(gpu, name):
    patch = in_header(GEMM, *BROKEN_GEMM[name])
    noticed(lambda g, p: check_projection(g, FIVES, 65, down=True, patch=p), gpu, patch)
    noticed(lambda g, p: check_gate_up(g, FIVES, 65, None, p), gpu, patch)


def test_pages_of_the_twin():
    table, left = twin.pages(np.array([4, -1, -1, -1]), np.array([7, 8, 9]), PAGE - 1, 2 * PAGE)
    assert table.tolist() == [4, 9, 8, -1]
    assert left == 1
