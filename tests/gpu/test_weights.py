"""The GPU's arena against NumPy's, byte for byte; what loading refuses; random weights."""

import time
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cuq1.checkpoint import AttentionShare, Checkpoint, LayerShare, Linear, MoeShare, TargetShare
from cuq1.config import load_config
from cuq1.cuda import weights_load
from cuq1.cuda.memory import Arena
from cuq1.cuda.weights import RankWeights, rank_weights, weights_plan
from cuq1.cuda.weights_device import DeviceArena, load_weights, random_weights
from cuq1.cuda.weights_host import HostArena
from cuq1.errors import CheckpointError
from cuq1.plan import cost
from tests.checkpoint_files import SIZES, edit
from tests.paths import NANO, RELEASED
from tools.make_checkpoint import Layout, tiny_config, write_checkpoint

pytestmark = pytest.mark.gpu


def bytes_of(gpu, address, size):
    memory = gpu.cupy.cuda.UnownedMemory(address, size, None)
    return gpu.cupy.ndarray(size, np.uint8, gpu.cupy.cuda.MemoryPointer(memory, 0))


def loaded(gpu, weights, fill=0):
    """The arena's bytes after loading, over a background of `fill`."""
    arena = Arena({"weights": weights.layout.nbytes})
    try:
        data = bytes_of(gpu, arena["weights"], weights.layout.nbytes)
        data.fill(fill)
        gpu.cupy.cuda.Device().synchronize()
        load_weights(weights, arena["weights"], gpu.stream)
        return data.get()
    finally:
        arena.close()


def wrong_tensors(layout, data, host):
    """Names of tensors that are not those of the host's arena; folded routing, a sum, within one part in 2**23."""
    wrong = set()
    for name, tensor in layout.tensors.items():
        found = data[tensor.offset : tensor.end].view(tensor.dtype).reshape(tensor.shape)
        exact = host.tensor(name)
        same = np.allclose(found, exact, rtol=2**-23, atol=1e-12) if name.endswith("fold") else (found == exact).all()
        if not same:
            wrong.add(name)
    return wrong


def compare(gpu, weights):
    host = HostArena(weights.layout, 0x5A)
    weights_load.load(weights, host)
    data = loaded(gpu, weights, 0x5A)
    assert wrong_tensors(weights.layout, data, host) == set()
    inside = np.zeros(weights.layout.nbytes, bool)
    for tensor in weights.layout.tensors.values():
        inside[tensor.offset : tensor.end] = True
    assert (data[~inside] == 0x5A).all()
    return data, host


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1)])
def test_nano(gpu, tp, rank):
    checkpoint = Checkpoint.open(NANO)
    weights = rank_weights(checkpoint, tp, rank)
    data, host = compare(gpu, weights)
    data = data.copy()
    tensor = weights.layout.tensors["layers.2.down.weights"]
    data[tensor.offset + 4 : tensor.offset + 8] = data[tensor.offset : tensor.offset + 4]  # the control
    assert wrong_tensors(weights.layout, data, host) == {"layers.2.down.weights"}
    start = time.perf_counter()
    loaded(gpu, rank_weights(checkpoint, tp, rank))
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("layout", [Layout(), Layout(fused_experts=True), Layout(fp8=False)], ids=str)
def test_a_rank_of_eight(gpu, tmp_path, layout):
    folder = write_checkpoint(tmp_path / "m", *tiny_config(**SIZES), layout, seed=3)
    compare(gpu, rank_weights(Checkpoint.open(folder), 8, 5))


def test_mixed_precisions_and_small_pieces(gpu, tmp_path, monkeypatch):
    """FP32 rows where a part mixes dtypes; many pieces, so that the staging buffers take turns."""
    folder = write_checkpoint(tmp_path / "m", *tiny_config(**SIZES), Layout(), seed=3)
    whole = Checkpoint.open(folder).target()

    def change(tensors):
        for name, linear in (
            ("model.layers.0.self_attn.k_proj", whole.layers[0].attention.k),
            ("model.layers.1.mlp.experts.2.down_proj", whole.layers[1].mlp.down[2]),
        ):
            del tensors[f"{name}.weight_scale_inv"]
            tensors[f"{name}.weight"] = ["F32", list(linear.shape), linear.dequantize().tobytes()]

    edit(folder, change)
    monkeypatch.setattr(weights_load, "PIECE_BYTES", 50_000)
    compare(gpu, rank_weights(Checkpoint.open(folder), 2, 1))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("model.layers.1.mlp.experts.2.up_proj.weight", b"\xff", "not finite"),
        ("model.embed_tokens.weight", b"\x80\x7f", "not finite"),
        ("lm_head.weight", b"\xc0\x7f", "not finite"),
        ("lm_head.weight", b"\x80\x47", "beyond 65504"),
    ],
)
def test_bad_values_are_refused_by_name(gpu, tmp_path, name, value, says):
    folder = write_checkpoint(tmp_path / "m", *tiny_config(**SIZES), Layout(), seed=3)

    def change(tensors):
        data = tensors[name][2]
        tensors[name][2] = data[: -len(value)] + value

    edit(folder, change)
    with pytest.raises(CheckpointError) as caught:
        loaded(gpu, rank_weights(Checkpoint.open(folder)))
    assert repr(name) in str(caught.value)
    assert says in str(caught.value)


def released_rank(layers=3, rank=3):
    """Random shares of a rank of eight at the released sizes, but for the layers and the vocabulary."""
    whole, _ = load_config(RELEASED)
    config = replace(whole, layer_types=whole.layer_types[:layers], mlp_only_layers=(), vocab_size=16_000)
    random = np.random.default_rng(0)
    fp8 = np.dtype(ml_dtypes.float8_e4m3fn)

    def codes(*shape):
        raw = np.frombuffer(random.bytes(int(np.prod(shape))), np.uint8) & 0xFE  # no NaN: its lowest bit is set
        return raw.view(fp8).reshape(shape)

    def scales(rows, cols):
        return random.uniform(0.001, 0.002, (rows // 128, cols // 128)).astype(np.float32)

    def norm(size):
        return random.uniform(0.9, 1.1, size).astype(np.float32)

    # `down` is cut across its rows: whole matrices, so that a row's bytes lie as far apart as in a file
    gate_up, down = codes(256, 2, 192, 3072), codes(256, 3072, 1536)
    plain = random.standard_normal((16_000, 3072), np.float32).astype(ml_dtypes.bfloat16)
    first, own = 192 * rank, slice(192 * rank, 192 * (rank + 1))
    layer = LayerShare(
        norm(3072),
        norm(3072),
        norm(3072),
        None,
        AttentionShare(
            Linear("q", codes(768, 3072), scales(6144, 3072), 768 * rank),
            Linear("k", codes(128, 3072), scales(1024, 3072), 128 * rank),
            Linear("v", codes(128, 3072), scales(1024, 3072), 128 * rank),
            Linear("o", codes(3072, 6144), scales(3072, 6144)).part(slice(None), slice(768 * rank, 768 * (rank + 1))),
            norm(128),
            norm(128),
            norm((1, 128)),
        ),
        MoeShare(
            random.standard_normal((256, 3072), np.float32),
            tuple(Linear(f"gate {e}", gate_up[e, 0], scales(1536, 3072), first) for e in range(256)),
            tuple(Linear(f"up {e}", gate_up[e, 1], scales(1536, 3072), first) for e in range(256)),
            tuple(Linear(f"down {e}", down[e], scales(3072, 1536)).part(slice(None), own) for e in range(256)),
        ),
    )
    sandwich = replace(layer, ffn_out_norm=norm(3072))
    table = Linear("embed", plain)
    head = table.part(slice(2000 * rank, 2000 * (rank + 1)))
    target = TargetShare(table, (sandwich, *[layer] * (layers - 1)), norm(3072), head)
    return RankWeights(weights_plan(config, None, 8, rank), target, None)


def test_the_released_sizes(gpu):
    weights = released_rank()
    data, _ = compare(gpu, weights)
    del data
    arena = Arena({"weights": weights.layout.nbytes})
    try:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            load_weights(weights, arena["weights"], gpu.stream)
            seconds.append(time.perf_counter() - start)
    finally:
        arena.close()
    size = weights.layout.nbytes / 1e9
    print(f"\nloading {size:.2f} GB from memory: {size / min(seconds):.1f} GB/s")


def test_random_weights(gpu):
    """All finite, of deviation 1 / sqrt(k), the same for the same seed; 43 GB in seconds."""
    config, draft = load_config(RELEASED)
    layout = weights_plan(config, draft, 8, 3)
    assert layout.nbytes > cost.resident_bytes(config, 8)
    arena = Arena({"weights": layout.nbytes})
    try:
        base = arena["weights"]
        data = bytes_of(gpu, base, layout.nbytes)

        def get(name, dtype=None):
            tensor = layout.tensors[name]
            return data[tensor.offset : min(tensor.end, tensor.offset + (64 << 20))].get().view(dtype or tensor.dtype)

        start = time.perf_counter()
        random_weights(layout, base, gpu.stream, seed=7)
        seconds = time.perf_counter() - start
        print(f"\nrandom weights, {layout.nbytes / 1e9:.1f} GB: {seconds:.2f} s")
        assert seconds < 10
        for number in (0, 1, 87, -1):
            prefix = layout.layer(number).prefix
            for name, tensor in layout.tensors.items():
                if name.startswith(prefix) and tensor.dtype == "float32":
                    assert np.isfinite(get(name)).all(), name
            for name in ("qkv.weights", "down.weights"):
                counts = np.bincount(get(prefix + name), minlength=256)
                assert counts[0x7F] == counts[0xFF] == 0
                assert counts[0x7E] > 1.5 * counts[0x7D] > 0  # NaN's neighbour takes its place
                assert (counts > 0).sum() == 254
            unit = 16 * 3072 + 256
            units = get(f"{prefix}gate_up")[: 500 * unit].reshape(-1, unit)
            tails = np.ascontiguousarray(units[:, 16 * 3072 :]).view(np.float32)
            assert (tails[:, :48] > 0).all()
            assert not tails[:, 48:].any()
        head = get("lm_head", np.float16).astype(np.float32)
        assert abs(head.std() * 3072**0.5 - 1) < 0.01
        assert abs(head.mean()) < 1e-4
        table = (get("embed").astype(np.uint32) << 16).view(np.float32)
        assert np.isfinite(table).all()
        assert abs(table.std() - 1) < 0.01
        names = ("embed", "layers.0.down.weights", "layers.87.fold", "draft.lm_head.weights")
        before = [get(name) for name in names]
        random_weights(layout, base, gpu.stream, seed=7)
        for name, values in zip(names, before, strict=True):
            np.testing.assert_array_equal(get(name), values)
        random_weights(layout, base, gpu.stream, seed=8)
        assert (get(names[1]) == before[1]).mean() < 1.1 / 254  # equal by chance
    finally:
        arena.close()


def test_folded_random_routing_is_that_of_the_random_router(gpu):
    layout = weights_plan(*load_config(NANO), 2, 1)
    arena = Arena({"weights": layout.nbytes})
    try:
        random_weights(layout, arena["weights"], gpu.stream, seed=1)
        host = HostArena(layout)
        host.data[:] = bytes_of(gpu, arena["weights"], layout.nbytes).get()
    finally:
        arena.close()
    for number in (1, 5, -1):
        plan, dims = layout.layer(number), layout.dims(number)
        found = host.tensor(f"{plan.prefix}fold").copy()
        assert np.isfinite(found).all()
        assert found.std() > 0.01
        host.fold(weights_load.fold_of(plan, layout.tensors, dims.hidden, dims.q_heads, dims.slice_width, layout.rank))
        np.testing.assert_allclose(found, host.tensor(f"{plan.prefix}fold"), rtol=2**-22, atol=1e-9)


def test_staging_grows_for_a_large_piece(gpu):
    with DeviceArena(0, gpu.stream) as arena:
        assert arena.stage(100).size == 100
        big = weights_load.PIECE_BYTES + 4096
        for _ in range(3):
            assert arena.stage(big).size == big
