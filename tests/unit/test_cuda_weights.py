"""A rank's arena: planned sizes, every element and scale at its place, folded routing, and what is refused."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from cuq1.checkpoint import Checkpoint, DenseShare, Linear
from cuq1.checkpoint.shares import leaves
from cuq1.config import load_config, parse_draft, parse_target
from cuq1.cuda import repack, weights_load
from cuq1.cuda.weights import Precision, rank_weights, weights_plan
from cuq1.cuda.weights_host import HostArena
from cuq1.cuda.weights_random import FILL_E4M3, FILL_F32, fills
from cuq1.errors import CheckpointError, ConfigError
from cuq1.plan import cost
from tests.checkpoint_files import SIZES, edit
from tests.fixtures.unpack import gate_up_of, matrix_of
from tests.paths import NANO, RELEASED
from tools.make_checkpoint import Layout, tiny_config, write_checkpoint

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = ("gate", "up", "down")
LAYOUTS = {"FP8": Layout(pow2_scales=False), "fused FP8": Layout(fused_experts=True), "BF16": Layout(fp8=False)}


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "m"
    return Checkpoint.open(write_checkpoint(folder, *tiny_config(**SIZES), LAYOUTS[request.param], seed=4))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One expert a tensor, FP8; tests copy and spoil it."""
    return write_checkpoint(tmp_path_factory.mktemp("weights") / "m", *tiny_config(**SIZES), seed=4)


def loaded(checkpoint, tp=1, rank=0, fill=0):
    weights = rank_weights(checkpoint, tp, rank)
    arena = HostArena(weights.layout, fill)
    weights_load.load(weights, arena)
    return weights, arena


def decoded(raw, scales=None, step=(0, 0)):
    """Codes times their scales, or halves from their bits: float32. `step`: rows and columns that share a scale."""
    if scales is None:
        return raw.view(np.float16).astype(np.float32)
    values = raw.view(E4M3).astype(np.float32)
    rows, cols = np.indices(raw.shape)
    return values * scales[rows // step[0], cols // step[1]]


def unpacked(arena, layout, number):
    """A layer's matrices from the arena's bytes: name to float32 array, experts' in lists."""
    plan, dims = layout.layer(number), layout.dims(number)
    hidden, heads = dims.hidden, dims.q_heads + 2 * dims.kv_heads

    def get(name):
        return arena.tensor(plan.prefix + name)

    fp8 = plan.fp8_attention
    cut = 32 if fp8 else 16
    rows = matrix_of(get("qkv.weights").reshape(heads * 8, hidden // cut, 512), fp8=fp8)
    qkv = decoded(rows, get("qkv.scales") if fp8 else None, (128, 128)).reshape(heads, 128, hidden)
    natural = np.argsort(repack.head_rows(dims.rotary))
    turned = qkv[: dims.q_heads + dims.kv_heads, natural]
    out = {
        "q": turned[: dims.q_heads].reshape(-1, hidden),
        "k": turned[dims.q_heads :].reshape(-1, hidden),
        "v": qkv[dims.q_heads + dims.kv_heads :].reshape(-1, hidden),
        "o": decoded(matrix_of(get("o.weights"), fp8=fp8), get("o.scales") if fp8 else None, (16, 128)),
    }
    fp8, inner = plan.fp8_experts, plan.inner
    out |= {name: [] for name in NAMES}
    for e in range(plan.groups):
        gate, up, scales = gate_up_of(get("gate_up")[e], hidden, fp8=fp8)
        out["gate"].append(decoded(gate, scales[..., 0] if fp8 else None, (8, 128)))
        out["up"].append(decoded(up, scales[..., 1] if fp8 else None, (8, 128)))
        down = matrix_of(get("down.weights")[e], fp8=fp8)
        scale_k = inner // get("down.scales").shape[2] if fp8 else 0
        out["down"].append(decoded(down, get("down.scales")[e] if fp8 else None, (16, scale_k)))
    if not plan.moe:
        out |= {name: [np.concatenate(out[name], axis=int(name == "down"))] for name in NAMES}
    return out


def expected(share):
    """The same from a LayerShare, halves rounded from float32 where nothing is FP8."""
    mlp = share.mlp
    experts = {name: [getattr(mlp, name)] if isinstance(mlp, DenseShare) else getattr(mlp, name) for name in NAMES}
    attention = {name: getattr(share.attention, name).dequantize() for name in "qkvo"}
    return attention | {name: [linear.dequantize() for linear in linears] for name, linears in experts.items()}


def differs(found, wanted, *, halves=False):
    """The names of matrices that are not equal, with `halves` after rounding to halves."""
    return {name for name in wanted if not np.array_equal(found[name], rounded(np.array(wanted[name]), halves))}


def rounded(values, halves):
    return values.astype(np.float16).astype(np.float32) if halves else values


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (4, 2), (8, 0), (8, 5), (8, 7)])
def test_every_element_is_at_its_place(model, tp, rank):
    weights, arena = loaded(model, tp, rank)
    fp8 = model.config.fp8_block is not None
    layers = [*enumerate(weights.target.layers), (-1, weights.draft.layer)]
    for number, share in layers:
        assert weights.layout.fp8_attention(number) == fp8
        assert differs(unpacked(arena, weights.layout, number), expected(share), halves=not fp8) == set(), number
        prefix = weights.layout.layer(number).prefix
        for name, values in (
            ("attention_norm", share.attention_norm),
            ("attn_out_norm", share.attn_out_norm),
            ("ffn_norm", share.feed_forward_norm),
            ("ffn_out_norm", share.ffn_out_norm),
            ("q_norm", share.attention.q_norm),
            ("k_norm", share.attention.k_norm),
            ("sink_k", share.attention.sink_k),
            ("router", None if isinstance(share.mlp, DenseShare) else share.mlp.router),
        ):
            if values is None:
                assert prefix + name not in weights.layout.tensors
            else:
                np.testing.assert_array_equal(arena.tensor(prefix + name), values, err_msg=name)


def check_rounded_rows(codes, scales, values):
    """Codes [rows, k] times their rows' scales are values, to E4M3's half step, and use all of its range."""
    largest = np.abs(values).max(axis=1)
    np.testing.assert_array_equal(np.abs(codes).max(axis=1), np.where(largest > 0, 448, 0))
    error = np.abs(codes * scales[: len(codes), None] - values)
    # Half a step: 2**-4 of a normal number, 2**-10 of the scale below 2**-6 of it.
    bound = np.maximum(np.abs(values) * 2.0**-4, scales[: len(codes), None] * 2.0**-10)
    assert (error <= 1.0001 * bound).all()


def test_a_scale_of_another_row_is_noticed():
    values = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32) * [[1], [2], [3], [4]]
    codes, scales = repack.quantised(values.astype(np.float32))
    codes = codes.view(E4M3).astype(np.float32)
    check_rounded_rows(codes, scales[:, 0], values)
    with pytest.raises(AssertionError):
        check_rounded_rows(codes, np.roll(scales[:, 0], 1), values)


def test_a_row_of_zeros_and_one_that_is_not_finite():
    codes, scales = repack.quantised(np.array([[0.0] * 32, [np.inf] * 32, [np.nan] * 32, [1e-44] * 32], np.float32))
    assert not codes[0].any()
    assert scales[0, 0] == 1
    assert not np.isfinite(scales[1:3]).any()
    assert (codes[3] & 0x7F != 0x7F).all()


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (8, 5)])
def test_what_belongs_to_no_layer(model, tp, rank):
    weights, arena = loaded(model, tp, rank)
    for prefix, share in (("", weights.target), ("draft.", weights.draft)):
        table = arena.tensor(f"{prefix}embed")
        np.testing.assert_array_equal(table, share.embed_tokens.weight.view(np.uint16))
        if prefix:
            codes = matrix_of(arena.tensor("draft.lm_head.weights"), fp8=True)
            heads = codes.view(E4M3).astype(np.float32)
            check_rounded_rows(heads[: 160 // tp], arena.tensor("draft.lm_head.scales"), share.lm_head.dequantize())
        else:
            heads = matrix_of(arena.tensor("lm_head"), fp8=False).view(np.float16)
            np.testing.assert_array_equal(heads[: 160 // tp], share.lm_head.dequantize().astype(np.float16))
        assert len(heads) == -(-160 // tp // 16) * 16
        assert not heads[160 // tp :].any()
    np.testing.assert_array_equal(arena.tensor("norm"), weights.target.norm)
    for name, values in (
        ("enorm", weights.draft.enorm),
        ("hnorm", weights.draft.hnorm),
        ("final_norm", weights.draft.final_layernorm),
    ):
        np.testing.assert_array_equal(arena.tensor(f"draft.{name}"), values)
    eh_proj = matrix_of(arena.tensor("draft.eh_proj"), fp8=False).view(np.float16)
    np.testing.assert_array_equal(eh_proj[: 256 // tp], weights.draft.eh_proj.dequantize().astype(np.float16))


def test_the_comparison_notices_a_wrong_block(plain):
    """The control: what a loader that forgets where a share begins would compute."""
    weights, arena = loaded(Checkpoint.open(plain), 8, 5)
    wanted = expected(weights.target.layers[1])
    assert differs(unpacked(arena, weights.layout, 1), wanted) == set()
    tails = arena.tensor("layers.1.gate_up")[..., 256 * 16 :]
    tails[...] = np.roll(tails, 8, axis=1)  # the border of a block, 64 rows into the share, moves by 64 rows
    assert differs(unpacked(arena, weights.layout, 1), wanted) == {"gate", "up"}
    scales = arena.tensor("layers.1.down.scales")
    scales[...] = scales[..., [0, 0, 2]]
    assert differs(unpacked(arena, weights.layout, 1), wanted) == {"gate", "up", "down"}


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_folded_routing_is_routing(model, tp):
    """router . (ffn_norm * rms(residual + scale * rms(o) * attn_out_norm)) in float64, o summed over ranks."""
    random = np.random.default_rng(tp)
    ranks = [loaded(model, tp, rank) for rank in range(tp)]
    for number in (1, -1):
        residual, scale, eps = random.standard_normal((3, 256)), 0.7, 1e-6
        o, attended, kept = np.zeros((3, 256)), 0.0, 0.0
        for rank, (weights, arena) in enumerate(ranks):
            share = weights.target.layers[1] if number == 1 else weights.draft.layer
            projection = unpacked(arena, weights.layout, number)["o"].astype(float)
            width = projection.shape[1]
            a = random.standard_normal((3, width))
            o += a @ projection.T
            fold = arena.tensor(weights.layout.layer(number).prefix + "fold").astype(float)
            assert fold.shape == (4, width + 256 // tp)
            attended = attended + a @ fold[:, :width].T
            kept = kept + residual[:, rank * 256 // tp : (rank + 1) * 256 // tp] @ fold[:, width:].T

        def rms(x):
            return np.sqrt(np.square(x).mean(axis=1, keepdims=True) + eps)  # noqa: B023

        h = residual + scale * o / rms(o) * share.attn_out_norm
        logits = (h / rms(h) * share.feed_forward_norm) @ share.mlp.router.astype(float).T
        folded = (kept + scale / rms(o) * attended) / rms(h)
        assert np.linalg.norm(folded - logits) < 1e-6 * np.linalg.norm(logits)
        assert np.linalg.norm(kept / rms(h) - logits) > 0.1 * np.linalg.norm(logits)


def addresses(checkpoint):
    """Each mapped file's first address, and a counter for each of its bytes."""
    files = {*checkpoint.target_index.files.values(), *checkpoint.draft_index.files.values()}
    return [(file._bytes.__array_interface__["data"][0], np.zeros(file._bytes.size, np.int64)) for file in files]


def count(counters, array):
    """Add one to the counters of an array's bytes."""
    address = array.__array_interface__["data"][0]
    counter, first = next((c, address - base) for base, c in counters if 0 <= address - base < c.size)
    where = as_strided(counter[first:], array.shape, [8 * stride for stride in array.strides])
    where += 1


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (8, 5)])
def test_every_byte_of_a_share_is_read_once(model, monkeypatch, tp, rank):
    read, wanted = addresses(model), addresses(model)
    copy = weights_load._copy

    def counted(target, source):
        count(read, source)
        copy(target, source)

    monkeypatch.setattr(weights_load, "_copy", counted)
    weights, _ = loaded(model, tp, rank)
    for _, leaf in [*leaves(weights.target), *leaves(weights.draft)]:
        if isinstance(leaf, Linear):
            count(wanted, leaf.weight.view(np.uint8))
    for (_, got), (_, exact) in zip(read, wanted, strict=True):
        np.testing.assert_array_equal(got, exact)
        assert exact.any()
        assert exact.max() == 1


def test_every_planned_byte_is_written(model):
    """Over two different backgrounds: equal inside tensors, untouched between them."""
    weights, arena = loaded(model, 8, 3, fill=0xCD)
    _, other = loaded(model, 8, 3, fill=0x31)
    inside = np.zeros(weights.layout.nbytes, bool)
    for tensor in weights.layout.tensors.values():
        inside[tensor.offset : tensor.end] = True
    np.testing.assert_array_equal(arena.data[inside], other.data[inside])
    assert (arena.data[~inside] == 0xCD).all()


def test_a_tensor_that_is_left_out_is_noticed(plain, monkeypatch):
    weights = rank_weights(Checkpoint.open(plain))
    monkeypatch.setattr(weights_load._Loader, "_fold", lambda *_: None)
    with pytest.raises(AssertionError, match=r"layers\.1\.fold: byte \d+ was not written"):
        weights_load.load(weights, HostArena(weights.layout))


def test_pieces_of_any_size_give_the_same_bytes(plain, monkeypatch):
    checkpoint = Checkpoint.open(plain)
    _, whole = loaded(checkpoint, 2, 1)
    monkeypatch.setattr(weights_load, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(weights_load, "_ITEM_TILES", 3)
    _, pieces = loaded(checkpoint, 2, 1)
    np.testing.assert_array_equal(pieces.data, whole.data)


def test_progress_counts_layers(plain):
    weights = rank_weights(Checkpoint.open(plain))
    seen = []
    weights_load.load(weights, HostArena(weights.layout), lambda *now: seen.append(now))
    assert seen == [(1, 3), (2, 3), (3, 3)]


EXPERT = "model.layers.1.mlp.experts.2"


def spoil(tensors, name, position, value):
    data = bytearray(tensors[name][2])
    data[position : position + len(value)] = value
    tensors[name][2] = bytes(data)


def bf16(value):
    return np.array(value, BF16).tobytes()


@pytest.mark.parametrize(
    ("file", "name", "position", "value"),
    [
        ("", f"{EXPERT}.gate_proj.weight", 77, b"\x7f"),
        ("", f"{EXPERT}.up_proj.weight", -1, b"\xff"),
        ("", f"{EXPERT}.down_proj.weight", 0, b"\xff"),
        ("", "model.layers.0.mlp.up_proj.weight", 200_000, b"\x7f"),
        ("", "model.layers.0.self_attn.q_proj.weight", 128 * 256 + 20 * 256, b"\x7f"),
        ("", "model.layers.1.self_attn.v_proj.weight", -1, b"\x7f"),
        ("", "model.layers.1.self_attn.o_proj.weight", 0, b"\x7f"),
        ("", "model.embed_tokens.weight", -2, bf16(np.nan)),
        ("", "lm_head.weight", 0, bf16(np.inf)),
        ("mtp/", "mtp.eh_proj.weight", 2, bf16(-np.inf)),
        ("mtp/", "mtp.mtp_model_layer.mlp.experts.3.down_proj.weight", 5, b"\xff"),
        ("", f"{EXPERT}.down_proj.weight_scale_inv", 0, np.float32(np.nan).tobytes()),
        ("", "model.layers.0.self_attn.k_norm.weight", 0, bf16(np.nan)),
    ],
)
def test_values_that_are_not_finite_are_refused_by_name(plain, tmp_path, file, name, position, value):
    folder = copied(plain, tmp_path)
    size = len(value)

    def change(tensors):
        spoil(tensors, name, position if position >= 0 else len(tensors[name][2]) - size, value)

    edit(folder, change, f"{file}model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        loaded(Checkpoint.open(folder))
    said = str(caught.value)
    assert repr(name.removesuffix("_scale_inv")) in said
    assert f"{file}model.safetensors" in said
    assert "not finite" in said


def copied(model, tmp_path):
    folder = tmp_path / "copy"
    for path in model.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(model)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(model)).write_bytes(path.read_bytes())
    return folder


def test_values_beyond_a_half_are_refused(plain, tmp_path):
    folder = copied(plain, tmp_path)
    edit(folder, lambda tensors: spoil(tensors, "lm_head.weight", 1000, bf16(65536.0)))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' holds values beyond 65504"):
        loaded(Checkpoint.open(folder))
    edit(folder, lambda tensors: spoil(tensors, "lm_head.weight", 1000, bf16(-65280.0)))
    _, arena = loaded(Checkpoint.open(folder))
    assert matrix_of(arena.tensor("lm_head"), fp8=False).view(np.float16).min() == -65280


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_a_part_with_a_plain_linear_is_computed_in_halves(plain, tmp_path, dtype):
    """k_proj of one layer and one expert's down of another: their parts only, each from mixed dtypes."""
    folder = copied(plain, tmp_path)
    whole = Checkpoint.open(plain).target()
    names = {
        "model.layers.0.self_attn.k_proj": whole.layers[0].attention.k,
        f"{EXPERT}.down_proj": whole.layers[1].mlp.down[2],
    }

    def change(tensors):
        for name, linear in names.items():
            del tensors[f"{name}.weight_scale_inv"]
            kind = "BF16" if dtype == BF16 else "F32"
            tensors[f"{name}.weight"] = [kind, list(linear.shape), linear.dequantize().astype(dtype).tobytes()]

    edit(folder, change)
    weights, arena = loaded(Checkpoint.open(folder), 8, 5)
    layout = weights.layout
    assert [layout.fp8_attention(i) for i in (0, 1, -1)] == [False, True, True]
    assert [layout.fp8_experts(i) for i in (0, 1, -1)] == [True, False, True]
    for number in (0, 1):
        found, wanted = unpacked(arena, layout, number), expected(weights.target.layers[number])
        halves = {"q", "k", "v", "o"} if number == 0 else set(NAMES)
        assert differs(found, {name: wanted[name] for name in halves}, halves=True) == set()
        assert differs(found, {name: wanted[name] for name in wanted.keys() - halves}) == set()


def test_fp32_tables_are_rounded_to_bf16(plain, tmp_path):
    folder = copied(plain, tmp_path)
    values = np.random.default_rng(0).standard_normal((160, 256)).astype(np.float32)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        edit(folder, lambda tensors, name=name: tensors.update({name: ["F32", [160, 256], values.tobytes()]}))
    _, arena = loaded(Checkpoint.open(folder))
    np.testing.assert_array_equal(arena.tensor("embed"), values.astype(BF16).view(np.uint16))
    np.testing.assert_array_equal(
        matrix_of(arena.tensor("lm_head"), fp8=False).view(np.float16), values.astype(np.float16)
    )


def test_the_released_model_at_eight_ranks():
    config, draft = load_config(RELEASED)
    layout = weights_plan(config, draft, 8, 0)
    tensors = layout.tensors
    fold = 88 * 256 * (768 + 384) * 4  # 87 layers and the draft's
    counted = cost.resident_bytes(config, 8) + cost.draft_resident_bytes(draft, 8) + fold
    assert counted < layout.nbytes < 1.01 * counted
    assert {name: tensors[f"layers.3.{name}"].shape for name in ("qkv.weights", "qkv.scales", "o.weights")} == {
        "qkv.weights": (8, 8, 96, 512),
        "qkv.scales": (8, 24),
        "o.weights": (192, 24, 512),
    }
    assert tensors["layers.3.o.scales"].shape == (192, 6)
    assert tensors["layers.3.gate_up"].shape == (256, 24, 16 * 3072 + 256)
    assert tensors["layers.3.down.weights"].shape == (256, 192, 6, 512)
    assert tensors["layers.3.down.scales"].shape == (256, 192, 3)
    assert tensors["layers.3.fold"].shape == (256, 768 + 384)
    assert tensors["lm_head"].shape == (1250, 192, 512)
    assert tensors["draft.eh_proj"].shape == (24, 384, 512)
    assert tensors["draft.lm_head.weights"].nbytes == 20_000 * 3072
    assert tensors["draft.lm_head.scales"].shape == (20_000,)
    assert (layout.dense_inner(0), layout.dense_groups(0)) == (192, 8)
    assert (layout.dense_inner(1), layout.dense_groups(1)) == (0, 0)
    assert "layers.0.ffn_out_norm" in tensors
    assert "layers.0.fold" not in tensors
    assert "layers.1.ffn_out_norm" not in tensors
    assert "draft.ffn_out_norm" in tensors
    assert layout.dims(0).inner == 192
    assert layout.address(1 << 20, "layers.0.fold") == 0
    assert layout.address(1 << 20, "norm") == (1 << 20) + tensors["norm"].offset


@pytest.mark.parametrize(("tp", "inner", "groups", "scale_k"), [(1, 128, 8, 128), (2, 64, 8, 64)])
def test_nano(tp, inner, groups, scale_k):
    layout = weights_plan(*load_config(NANO), tp, tp - 1)
    assert (layout.dense_inner(0), layout.dense_groups(0)) == (inner, groups)
    assert layout.layer(1).down_scale_k == scale_k
    assert layout.tensors["layers.1.down.scales"].shape == (32, 16, inner // scale_k)
    assert layout.tensors["draft.sink_k"].shape == (2 // tp, 128)


def test_tensors_lie_apart_and_aligned():
    layout = weights_plan(*load_config(NANO))
    end = 0
    for name, tensor in layout.tensors.items():
        assert name == tensor.name
        assert tensor.offset % 256 == 0
        assert 0 <= tensor.offset - end < 256
        end = tensor.end
    assert 0 <= layout.nbytes - end < 256
    assert weights_plan(load_config(NANO)[0], None).draft is None


@pytest.mark.parametrize(
    ("dense", "fp8", "inner", "groups", "stays"),
    [
        (1536, True, 192, 1, True),  # at tp 8: 192 columns a rank, as an expert
        (8 * 320, True, 160, 2, True),  # 192 does not divide 320; 160 is the largest multiple of 32 that does
        (8 * 320, False, 160, 2, False),
        (8 * 48, True, 48, 1, False),  # no multiple of 32 divides 48
        (8 * 112, False, 112, 1, False),
    ],
)
def test_dense_layers_as_pseudo_experts(dense, fp8, inner, groups, stays):
    config = parse_target(tiny_config(**{**SIZES, "dense_intermediate_size": dense})[0])
    precisions = [Precision(fp8, fp8)] * 2
    layout = weights_plan(config, None, 8, 3, precisions=precisions)
    assert (layout.dense_inner(0), layout.dense_groups(0), layout.fp8_experts(0)) == (inner, groups, stays)
    assert layout.tensors["layers.0.gate_up"].shape[:2] == (groups, inner // 8)
    assert layout.dims(0).inner == inner
    assert layout.dims(0).fp8_experts == stays


def test_experts_of_48_columns_are_computed_in_halves(tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_config(**{**SIZES, "intermediate_size": 384}), seed=1)
    weights, arena = loaded(Checkpoint.open(folder), 8, 5)
    assert not weights.layout.fp8_experts(1)
    assert differs(unpacked(arena, weights.layout, 1), expected(weights.target.layers[1]), halves=True) <= set("qkvo")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_dim": 64}, "head_dim is 64, and the CUDA kernels compute 128"),
        ({"hidden_size": 192}, "hidden_size is 192, and the CUDA kernels need a multiple of 128"),
        ({"rotary_dim": 24}, "rotary_dim is 24, and the CUDA kernels need a multiple of 16"),
        ({"intermediate_size": 64}, "intermediate_size at tp 8 gives 8 columns a rank"),
        ({"dense_intermediate_size": 8 * 40}, "gives 40 columns a rank"),
        ({"dense_intermediate_size": 8 * 16 * 67}, "67 parts of 16, and the CUDA kernels take 64"),
    ],
)
def test_sizes_without_kernels_are_refused(change, says):
    with pytest.raises(ConfigError) as caught:
        weights_plan(parse_target(tiny_config(**SIZES | change)[0]), None, 8)
    assert says in str(caught.value)


def test_nano_at_one_and_two_ranks():
    """The real checkpoint: what the GPU tests compare with."""
    checkpoint = Checkpoint.open(NANO)
    for tp, rank in itertools.chain([(1, 0)], itertools.product([2], range(2))):
        weights, arena = loaded(checkpoint, tp, rank)
        for number in (0, 4, -1):
            share = weights.draft.layer if number < 0 else weights.target.layers[number]
            assert differs(unpacked(arena, weights.layout, number), expected(share)) == set()


@pytest.mark.parametrize("fp8", [True, False])
def test_random_weights_fill_every_tensor_once(fp8):
    """But folded routing, which is computed, and what pads a unit's scales, which stays zero."""
    target, draft = tiny_config(**SIZES)
    config = parse_target(target)
    precision = Precision(fp8, fp8)
    layout = weights_plan(
        config, parse_draft(draft, config), 2, 1, precisions=[precision] * 2, draft_precision=precision
    )
    times = np.zeros(layout.nbytes, np.uint8)
    for fill in fills(layout):
        size = fill.run * {FILL_E4M3: 1, FILL_F32: 4}.get(fill.kind, 2)
        assert fill.kind == FILL_F32 or (size % 16 == 0 and fill.offset % 16 == 0 and fill.stride % 16 == 0)
        as_strided(times[fill.offset :], (fill.runs, size), (fill.stride, 1))[...] += 1
    for name, tensor in layout.tensors.items():
        filled = times[tensor.offset : tensor.end].reshape((*tensor.shape[:-1], -1))
        if name.endswith("fold"):
            assert not filled.any()
        elif name.endswith("gate_up") and fp8:
            assert (filled[..., : 16 * 256 + 16] == 1).all()
            assert not filled[..., 16 * 256 + 16 :].any()
        else:
            assert (filled == 1).all(), name
    assert times.sum() == sum(
        fill.runs * fill.run * {FILL_E4M3: 1, FILL_F32: 4}.get(fill.kind, 2) for fill in fills(layout)
    )
