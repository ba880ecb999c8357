"""Packing: every family shape, compared element by element with plain arithmetic and with a second reader."""

import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest

from cuq1.checkpoint.nanoqwen import Int4Linear, Nanoqwen
from cuq1.checkpoint.nanoqwen_header import FILES
from cuq1.checkpoint.qwen2_folder import Qwen2Folder
from cuq1.pack import pack
from tests import nanoqwen_reader
from tests.checkpoint_files import read, write
from tests.paths import ROOT
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

TINY = [name for name in NAMES if name.endswith("-tiny")]
SMALL = "qwen2.5-coder-0.5b-tiny"
NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes, once, a model's folder and packs it: (folder, file)."""
    done = {}

    def make(name, lm_head="fp16", dtype="BF16", **overrides):
        key = name, lm_head, dtype, tuple(overrides.items())
        if key not in done:
            base = tmp_path_factory.mktemp("packed")
            folder = write_qwen2_checkpoint(base / "hf", qwen2_config(name, **overrides), seed=4, dtype=dtype, shards=2)
            pack(folder, base / "m.nanoqwen", lm_head == "int4")
            done[key] = folder, base / "m.nanoqwen"
        return done[key]

    return make


def stored(folder):
    """Every tensor of a folder as float32, read without cuq1."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        for name, (dtype, shape, data) in read(path).items():
            tensors[name] = np.frombuffer(data, NUMPY[dtype]).astype(np.float32).reshape(shape)
    return tensors


def theirs(name):
    """The checkpoint's name of a packed tensor."""
    if "." not in name:
        return {"embed_tokens": "model.embed_tokens.weight", "norm": "model.norm.weight"}.get(name, f"{name}.weight")
    _, number, part, *bias = name.split(".")
    layer = f"model.layers.{number}."
    norms = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}
    if part in norms:
        return layer + norms[part]
    return f"{layer}{'self_attn' if part in 'qkvo' else 'mlp'}.{part}_proj.{'bias' if bias else 'weight'}"


def rounded(weights):
    """round(w / scale) x scale, with scale = FP16(absmax / 7) of each 128 inputs of a row, group by group."""
    values = np.empty_like(weights)
    for start in range(0, weights.shape[1], 128):
        group = weights[:, start : start + 128]
        scale = (np.abs(group).max(1, keepdims=True) / np.float32(7)).astype(np.float16).astype(np.float32)
        codes = np.round(group / scale)
        assert np.abs(codes).max() <= 7
        values[:, start : start + 128] = codes * scale
    return values


def differing(packed, tensors, names):
    """Those of `names` (packed ones) whose values are not what plain arithmetic makes of the checkpoint's."""
    wrong = []
    for name in names:
        source = tensors[theirs(name)] if theirs(name) in tensors else tensors["model.embed_tokens.weight"]
        if f"{name}.words" in packed.places:
            linear = Int4Linear(packed.tensor(f"{name}.words"), packed.tensor(f"{name}.scales"), source.shape[1])
            same = np.array_equal(linear.dequantise(), rounded(source))
        else:
            same = np.array_equal(packed.tensor(name), source.astype(np.float16))
        wrong += [] if same else [name]
    return wrong


def linears_and_vectors(packed):
    return dict.fromkeys(re.sub(r"\.(words|scales)$", "", name) for name in packed.places)


@pytest.mark.parametrize("lm_head", ["fp16", "int4"])
@pytest.mark.parametrize("name", TINY)
def test_values_are_those_of_plain_arithmetic(made, name, lm_head):
    folder, file = made(name, lm_head)
    packed, tensors = Nanoqwen.open(file), stored(folder)
    names = linears_and_vectors(packed)
    assert not differing(packed, tensors, names)
    assert len(names) == 12 * 2 + 2 + (lm_head == "int4" or not packed.config.tie_word_embeddings)
    head = packed.lm_head
    if lm_head == "int4":
        assert isinstance(head, Int4Linear)
        assert head.shape == packed.embed_tokens.shape
    else:
        assert (head.__array_interface__["data"] == packed.embed_tokens.__array_interface__["data"]) == (
            packed.config.tie_word_embeddings
        )


def test_the_comparison_rejects_one_changed_weight(made):
    folder, file = made(SMALL)
    packed, tensors = Nanoqwen.open(file), stored(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    row = packed.layer(1).down.dequantise()[3]
    tensors[name][3, 300] = -row[300] if row[300] else 1.0  # an input of the last group, which is not full
    tensors["model.layers.0.self_attn.k_proj.bias"] = tensors["model.layers.0.self_attn.k_proj.bias"] + np.float32(0.1)
    assert differing(packed, tensors, linears_and_vectors(packed)) == ["layers.0.k.bias", "layers.1.down"]


@pytest.mark.parametrize("lm_head", ["fp16", "int4"])
@pytest.mark.parametrize("name", TINY)
def test_a_reader_written_from_the_specification_agrees(made, name, lm_head):
    folder, file = made(name, lm_head)
    packed, second = Nanoqwen.open(file), nanoqwen_reader.read(file)
    assert second["raw"].keys() == packed.places.keys()
    for tensor, array in second["raw"].items():
        np.testing.assert_array_equal(packed.tensor(tensor), array)
        assert packed.places[tensor].offset % 128 == 0
    for number in range(packed.config.num_hidden_layers):
        layer = packed.layer(number)
        for part in ("q", "k", "v", "o", "gate", "up", "down"):
            np.testing.assert_array_equal(
                getattr(layer, part).dequantise(), second["values"][f"layers.{number}.{part}"]
            )
        for part, field in (("input_norm",) * 2, ("post_norm",) * 2, *((f"{x}.bias", f"{x}_bias") for x in "qkv")):
            np.testing.assert_array_equal(getattr(layer, field), second["values"][f"layers.{number}.{part}"])
    if lm_head == "int4":
        np.testing.assert_array_equal(packed.lm_head.dequantise(), second["values"]["lm_head"])
    config, header = packed.config, second["header"]
    assert (header["H"], header["I"], header["L"]) == (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
    )
    assert (header["heads"], header["kv_heads"], header["head_dim"], header["V"], header["context"]) == (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.vocab_size,
        config.max_position_embeddings,
    )
    assert (header["theta"], header["eps"], header["tied"], header["int4_head"]) == (
        config.rope_theta,
        config.rms_norm_eps,
        config.tie_word_embeddings,
        lm_head == "int4",
    )
    assert second["files"] == packed.files
    assert {name: (folder / name).read_bytes() for name in FILES[:4]} == packed.files


def test_the_second_reader_rejects_other_bytes(made, tmp_path):
    raw = bytearray(made(SMALL)[1].read_bytes())
    for byte in (0, 12, 30, 100, 200, 251, 300, len(raw) // 2, len(raw) - 1):
        raw[byte] ^= 4
        (tmp_path / "x").write_bytes(raw)
        with pytest.raises(nanoqwen_reader.BadFileError):
            nanoqwen_reader.read(tmp_path / "x")
        raw[byte] ^= 4


def test_the_specifications_example_word():
    text = (ROOT / "cuq1" / "checkpoint" / "NANOQWEN.md").read_text(encoding="utf-8")
    assert "the codes 1, 2, 3, 4, 5, 6, 7, -1 are the word 0xF6427531, the bytes `31 75 42 F6`" in text
    words = np.frombuffer(bytes.fromhex("317542F6"), "<u4").reshape(1, 1)
    assert words[0, 0] == 0xF6427531
    values = nanoqwen_reader.linear_values(words, np.ones((1, 1), np.float16), 8)
    assert values.tolist() == [[1, 2, 3, 4, 5, 6, 7, -1]]
    linear = Int4Linear(np.repeat(words, 16, 1), np.ones((1, 1), np.float16), 128)
    np.testing.assert_array_equal(linear.dequantise(), np.tile(values, 16))


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_checkpoints_of_other_precisions(made, dtype):
    folder, file = made(SMALL, dtype=dtype)
    packed = Nanoqwen.open(file)
    assert not differing(packed, stored(folder), linears_and_vectors(packed))


@pytest.mark.parametrize("change", [{"intermediate_size": 1}, {"intermediate_size": 129}, {"intermediate_size": 127}])
def test_widths_off_the_group(made, change):
    folder, file = made(SMALL, **change)
    packed = Nanoqwen.open(file)
    assert not differing(packed, stored(folder), linears_and_vectors(packed))
    assert nanoqwen_reader.read(file)["raw"].keys() == packed.places.keys()


def test_q_k_and_v_lie_as_one_matrix(made):
    for name in TINY:
        packed = Nanoqwen.open(made(name)[1])
        for kind in (".words", ".scales", ".bias"):
            q, k, v = (packed.places[f"layers.1.{part}{kind}"] for part in "qkv")
            assert (q.end, k.end) == (k.offset, v.offset)


def test_the_same_folder_gives_the_same_bytes(made, tmp_path):
    folder, file = made(SMALL)
    pack(folder, tmp_path / "again.nanoqwen")
    assert (tmp_path / "again.nanoqwen").read_bytes() == file.read_bytes()


def test_a_tied_model_with_its_embedding_repeated(made, tmp_path):
    """A tied model's files may hold lm_head.weight, too; the embedding is what counts."""
    folder, file = made(SMALL)
    copy = tmp_path / "hf"
    copy.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json":
            (copy / path.name).write_bytes(path.read_bytes())
    tensors = [item for path in sorted(folder.glob("*.safetensors")) for item in read(path).items()]
    (copy / "model.safetensors.index.json").unlink()
    embedding = dict(tensors)["model.embed_tokens.weight"]
    write(copy / "model.safetensors", {**dict(tensors), "lm_head.weight": embedding})
    pack(copy, tmp_path / "m.nanoqwen")
    assert (tmp_path / "m.nanoqwen").read_bytes() == file.read_bytes()


def test_a_folder_without_text_files(made, tmp_path):
    folder, _ = made(SMALL)
    for path in folder.iterdir():
        if path.name not in FILES[1:]:
            (tmp_path / path.name).symlink_to(path)
    pack(tmp_path, tmp_path / "m.nanoqwen")
    packed = Nanoqwen.open(tmp_path / "m.nanoqwen")
    assert packed.files.keys() == {"config.json"}
    assert packed.config.stop_tokens == packed.config.eos_token_ids
    assert nanoqwen_reader.read(tmp_path / "m.nanoqwen")["files"] == packed.files


def test_views_are_of_the_mapping_and_may_not_be_written(made):
    packed = Nanoqwen.open(made(SMALL)[1])
    words = packed.layer(0).q.words
    assert not words.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        words[0, 0] = 1


def test_sampling_defaults_and_stop_tokens_travel_inside(made):
    folder, file = made(SMALL)
    assert Nanoqwen.open(file).config == Qwen2Folder.open(folder).config
    generation = json.loads((folder / "generation_config.json").read_text())
    assert Nanoqwen.open(file).config.sampling.top_p == generation["top_p"]


def test_the_header_byte_by_byte(made):
    raw = made("qwen2.5-coder-7b-tiny", "int4")[1].read_bytes()
    assert raw[:8] == b"NANOQWEN"
    assert struct.unpack_from("<12I", raw, 8) == (1, 1, 128, 5, 896, 1184, 2, 7, 1, 128, 512, 8192)
    assert struct.unpack_from("<2d", raw, 56) == (1e6, 1e-6)
    assert struct.unpack_from("<Q", raw, 72) == (len(raw),)
