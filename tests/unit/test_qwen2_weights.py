"""A Qwen2 model's arena, filled in host memory: every tensor read back as the format says it lies."""

import numpy as np
import pytest

from cuq1.checkpoint import int4
from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.checkpoint.packed import packed
from cuq1.checkpoint.qwen2_folder import Qwen2Folder
from cuq1.config_qwen2 import parse_qwen2
from cuq1.cuda import qwen2_load
from cuq1.cuda.qwen2_load import load_qwen2
from cuq1.cuda.qwen2_weights import qwen2_layout, qwen2_source
from cuq1.cuda.repack import untile
from cuq1.cuda.weights_host import HostArena
from cuq1.cuda.weights_random import qwen2_fills
from cuq1.errors import CheckpointError, ConfigError
from cuq1.pack import pack
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

TINY = [name for name in NAMES if name.endswith("-tiny")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder and packed file of a name."""
    made = {}

    def of(name, head="fp16"):
        if (name, head) not in made:
            folder = tmp_path_factory.mktemp(name) / "hf"
            write_qwen2_checkpoint(folder, qwen2_config(name), 5, 1)
            file = folder.parent / f"{head}.nanoqwen"
            pack(folder, file, head == "int4")
            made[name, head] = folder, file
        return made[name, head]

    return of


def filled(model, poison=0xA5):
    source = qwen2_source(packed(model))
    arena = HostArena(source.layout, poison)
    load_qwen2(source, arena)
    return source, arena


def units(found, rows, cols):
    """Values float32 [rows, cols] of units uint8 [tiles, groups, 1056], by the description in abi_qwen2.cuh alone."""
    tiles, groups = found.shape[:2]
    words = found[..., :1024].copy().view("<u4").reshape(tiles, groups, 2, 32, 4)  # chunk, lane, word
    scales = found[..., 1024:].copy().view("<f2").reshape(tiles, groups, 16)
    out = np.zeros((tiles, 16, groups, 128), np.float32)
    for chunk in range(2):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for word in range(4):
                row, k = g + 8 * (word % 2), 64 * chunk + 32 * (word // 2) + 8 * t
                out[:, row, :, k : k + 8] = int4.unpack(words[:, :, chunk, lane, word]).reshape(tiles, groups, 8)
    out *= scales.transpose(0, 2, 1)[..., None].astype(np.float32)
    whole = out.reshape(tiles * 16, groups * 128)
    assert not whole[rows:].any()
    assert not whole[:, cols:].any()
    return whole[:rows, :cols]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("head", ["fp16", "int4"])
def test_every_tensor_lies_where_kernels_read_it(models, name, head):
    file = Nanoqwen.open(models(name, head)[1])
    source, arena = filled(file)
    config = file.config
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    assert np.array_equal(arena.tensor("embed"), file.embed_tokens)
    assert np.array_equal(arena.tensor("norm"), file.norm)
    for number in range(config.num_hidden_layers):
        layer, prefix = file.layer(number), f"layers.{number}."
        qkv = units(arena.tensor(f"{prefix}qkv"), q + 2 * kv, hidden)
        assert np.array_equal(qkv, np.concatenate([part.dequantise() for part in (layer.q, layer.k, layer.v)]))
        bias = np.concatenate((layer.q_bias, layer.k_bias, layer.v_bias))
        assert np.array_equal(arena.tensor(f"{prefix}qkv_bias"), bias)
        assert np.array_equal(units(arena.tensor(f"{prefix}o"), hidden, q), layer.o.dequantise())
        assert np.array_equal(units(arena.tensor(f"{prefix}down"), hidden, inner), layer.down.dequantise())
        both = arena.tensor(f"{prefix}gate_up")
        whole = units(both, 16 * len(both), hidden).reshape(len(both), 2, 8, hidden)
        for half, matrix in enumerate((layer.gate, layer.up)):
            rows = whole[:, half].reshape(-1, hidden)
            assert np.array_equal(rows[:inner], matrix.dequantise())
            assert not rows[inner:].any()
        assert np.array_equal(arena.tensor(f"{prefix}input_norm"), layer.input_norm)
        assert np.array_equal(arena.tensor(f"{prefix}post_norm"), layer.post_norm)
    found = arena.tensor("lm_head")
    if head == "int4":
        assert np.array_equal(units(found, config.vocab_size, hidden), file.lm_head.dequantise())
    else:
        whole = untile(found, found.shape[0] * 16, found.shape[1] * 16, fp8=False)
        assert np.array_equal(whole[: config.vocab_size, :hidden], file.lm_head)
        assert not whole[config.vocab_size :].any()
        assert not whole[:, hidden:].any()
    assert not source.packed.rounded


@pytest.mark.parametrize("name", TINY)
def test_a_folder_gives_the_bytes_of_its_packed_file(models, name):
    folder, file = models(name)
    source, arena = filled(Qwen2Folder.open(folder))
    assert source.packed.rounded
    ours, theirs = arena.data, filled(Nanoqwen.open(file))[1].data
    assert np.array_equal(ours, theirs)
    assert not np.array_equal(ours[: len(ours) // 2], theirs[len(theirs) // 2 :][: len(ours) // 2])


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_a_folder_of_another_dtype_in_shards(tmp_path, dtype):
    write_qwen2_checkpoint(tmp_path / "hf", qwen2_config(TINY[-1]), 6, 3, dtype)
    pack(tmp_path / "hf", tmp_path / "m.nanoqwen")
    ours, theirs = (filled(model)[1].data for model in (Qwen2Folder.open(tmp_path / "hf"), file_of(tmp_path)))
    assert np.array_equal(ours, theirs)


def file_of(folder):
    return Nanoqwen.open(folder / "m.nanoqwen")


def test_a_failure_while_loading_ends_it_once(models, monkeypatch):
    """Whatever a thread raises comes out as it is, after the others have ended, and nothing more is copied."""
    source = qwen2_source(packed(Nanoqwen.open(models(TINY[0])[1])))
    arena = HostArena(source.layout)
    good, tried = qwen2_load.int4_units, []

    def units_of(matrices, tiles, out):
        tried.append(tiles)
        if len(tried) == 3:
            raise OSError("the disk is gone")
        return good(matrices, tiles, out)

    monkeypatch.setattr(qwen2_load, "int4_units", units_of)
    with pytest.raises(OSError, match="the disk is gone"):
        load_qwen2(source, arena)
    assert not arena.tensor("layers.1.down").any()


@pytest.mark.parametrize("size", [1 << 12, 1 << 16])
def test_pieces_of_any_size_give_the_same_bytes(models, monkeypatch, size):
    file = Nanoqwen.open(models(TINY[0])[1])
    expected = filled(file)[1].data
    monkeypatch.setattr(qwen2_load, "PIECE_BYTES", size)
    monkeypatch.setattr(qwen2_load, "_TASK_TILES", 1)
    assert np.array_equal(filled(file)[1].data, expected)


def test_progress_counts_layers(models):
    source = qwen2_source(packed(Nanoqwen.open(models(TINY[0])[1])))
    seen = []
    load_qwen2(source, HostArena(source.layout), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_values_that_halves_do_not_hold_are_named(models, tmp_path, name, value, monkeypatch):
    folder = Qwen2Folder.open(models("qwen2.5-coder-7b-tiny")[0])
    good = Qwen2Folder.tensor

    def tensor(self, asked):
        found = good(self, asked)
        if asked == name:
            found = found.astype(np.float32)
            found.reshape(-1)[-1] = value
        return found

    monkeypatch.setattr(Qwen2Folder, "tensor", tensor)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        filled(folder)


def test_damaged_halves_of_a_file_are_named(models, monkeypatch):
    file = Nanoqwen.open(models(TINY[0])[1])
    good = Nanoqwen.tensor

    def tensor(self, asked):
        found = good(self, asked)
        if asked == "layers.1.up.scales":
            found = found.copy()
            found[3, 1] = np.inf
        return found

    monkeypatch.setattr(Nanoqwen, "tensor", tensor)
    with pytest.raises(CheckpointError, match=r"layers\.1\.up\.scales holds values that are not finite"):
        filled(file)


def test_tensors_of_the_largest_model_do_not_overlap():
    layout = qwen2_layout(parse_qwen2(qwen2_config("qwen2.5-coder-32b")))
    end = 0
    for tensor in layout.tensors.values():
        assert tensor.offset >= end
        assert tensor.offset % 256 == 0
        end = tensor.end
    assert end <= layout.nbytes < end + 256
    assert 17e9 < layout.nbytes < 20e9


@pytest.mark.parametrize("name", [NAMES[0], TINY[0]])
def test_random_weights_reach_every_tensor(name):
    layout = qwen2_layout(parse_qwen2(qwen2_config(name)))
    for tensor in layout.tensors.values():
        found = [fill for fill in qwen2_fills(layout) if tensor.offset <= fill.offset < tensor.end]
        element = {0: 1, 3: 2}
        assert sum(fill.runs * fill.run * element[fill.kind] for fill in found) == tensor.nbytes
        for fill in found:
            assert fill.offset % 16 == fill.stride % 16 == 0
            assert fill.run * element[fill.kind] % 16 == 0


def test_sizes_without_kernels_are_refused():
    config = parse_qwen2(qwen2_config("qwen2.5-coder-7b", hidden_size=6144, num_attention_heads=48))
    with pytest.raises(ConfigError, match="hidden_size is 6144"):
        qwen2_layout(config)
    config = parse_qwen2(qwen2_config("qwen2.5-coder-7b", intermediate_size=32896))
    with pytest.raises(ConfigError, match="intermediate_size is 32896, and the CUDA kernels compute 32768 at most"):
        qwen2_layout(config)
    config = parse_qwen2(qwen2_config("qwen2.5-coder-7b-tiny", vocab_size=31, eos_token_id=5, bos_token_id=4))
    with pytest.raises(ConfigError, match="vocab_size is 31"):
        qwen2_layout(config)
    config = parse_qwen2(qwen2_config("qwen2.5-coder-7b", num_key_value_heads=2))
    with pytest.raises(ConfigError, match="num_attention_heads 28 for num_key_value_heads 2"):
        qwen2_layout(config)
