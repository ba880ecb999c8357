"""The Qwen2 reference against float64, closed forms and numbers computed by hand."""

import math
from dataclasses import fields

import numpy as np
import pytest

from cuq1.checkpoint.qwen2 import open_qwen2
from cuq1.config_qwen2 import parse_qwen2
from cuq1.pack import pack
from cuq1.reference.qwen2 import Qwen2Forward
from cuq1.reference.qwen2_weights import Qwen2Layer, Qwen2Weights, load_qwen2
from tests.checkpoint_files import edit
from tests.fixtures.float64 import relative
from tests.fixtures.float64_qwen2 import Qwen2Evaluator, of_file, of_folder
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

TINY = [name for name in NAMES if name.endswith("-tiny")]
SMALL = "qwen2.5-coder-0.5b-tiny"
TOLERANCE = 1e-5  # FP32 gives about 5e-7; a wrong model is at least ten times outside
# Two KV heads of two query heads each, and an eps that shows.
GROUPED = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 0.03}


def random_ids(length, vocab=512):
    return np.random.default_rng().integers(0, vocab, length)


def logits(path, ids):
    opened = open_qwen2(path)
    model = Qwen2Forward(load_qwen2(opened), opened.config, len(ids))
    return model.logits(model.forward(np.asarray(ids), 0))


def folder(tmp_path, name, dtype="BF16", shards=1, **overrides):
    return write_qwen2_checkpoint(tmp_path / "hf", qwen2_config(name, **overrides), 2, shards, dtype)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("head", ["fp16", "int4"])
def test_the_family_matches_float64(tmp_path, name, head):
    """Folder and packed file, each against its own values; packing changes them far more than FP32 does."""
    hf, file, ids = folder(tmp_path, name), tmp_path / "m.nanoqwen", random_ids(70)
    pack(hf, file, int4_head=head == "int4")
    config, tensors = of_file(file)
    # a tied model whose logits' matrix is INT4 has two matrices
    tied = config["tie_word_embeddings"] and head == "fp16"
    packed = Qwen2Evaluator({**config, "tie_word_embeddings": tied}, tensors).logits(ids)
    assert relative(logits(file, ids), packed) < TOLERANCE
    if head == "fp16":
        assert relative(logits(hf, ids), Qwen2Evaluator(*of_folder(hf)).logits(ids)) < TOLERANCE
    assert relative(logits(hf, ids), packed) > 1e-2


@pytest.mark.parametrize(("dtype", "shards"), [("F16", 1), ("F32", 3), ("BF16", 5)])
def test_every_dtype_in_one_file_or_in_shards(tmp_path, dtype, shards):
    hf, ids = folder(tmp_path, SMALL, dtype, shards), random_ids(20)
    assert len(list(hf.glob("*.safetensors"))) == shards
    assert relative(logits(hf, ids), Qwen2Evaluator(*of_folder(hf)).logits(ids)) < TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fault", [None, "bias", "interleaved", "kv_heads", "eps", "tied"])
def test_a_wrong_model_is_noticed(tmp_path, tied, fault):
    hf, ids = folder(tmp_path, SMALL, **GROUPED, tie_word_embeddings=tied), random_ids(40)
    if tied:  # some exports repeat the embedding; what is there must not be read
        other = np.random.default_rng().standard_normal((512, 256), np.float32).tobytes()
        edit(hf, lambda tensors: tensors.update({"lm_head.weight": ["F32", [512, 256], other]}))
    error = relative(logits(hf, ids), Qwen2Evaluator(*of_folder(hf), [fault]).logits(ids))
    assert error < TOLERANCE if fault is None else error > 10 * TOLERANCE


@pytest.mark.parametrize("chunks", [[1] * 150, [7, 64, 1, 78], [149, 1], [150]])
def test_chunks_of_any_size_give_the_same_bits(tmp_path, chunks):
    opened = open_qwen2(folder(tmp_path, SMALL))
    weights, ids = load_qwen2(opened), random_ids(150)
    whole = Qwen2Forward(weights, opened.config, 150).forward(ids, 0)
    model, start, parts = Qwen2Forward(weights, opened.config, 150), 0, []
    model.forward(random_ids(150), 0)  # what is held of other tokens is overwritten
    for rows in chunks:
        parts.append(model.forward(ids[start : start + rows], start))
        start += rows
    assert np.array_equal(np.concatenate(parts), whole)


def model_of(heads=1, kv_heads=1, eps=1e-6, theta=100.0, **weights):
    """One layer of heads of 64, all of whose matrices and biases are zero but for those given."""
    hidden, eye = 64 * heads, np.eye(64 * heads, dtype=np.float32)
    config = parse_qwen2(
        qwen2_config(
            SMALL,
            hidden_size=hidden,
            intermediate_size=hidden,
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            rms_norm_eps=eps,
            rope_theta=theta,
        )
    )
    sizes = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
    values = {field.name: np.zeros((hidden, hidden), np.float32) for field in fields(Qwen2Layer)}
    values |= {name: np.zeros((rows, hidden), np.float32) for name, rows in sizes.items()}
    values |= {f"{name}_bias": np.zeros(rows, np.float32) for name, rows in sizes.items()}
    values |= {"input_norm": eye.sum(0), "post_norm": eye.sum(0)}
    values |= {name: np.asarray(value, np.float32) for name, value in weights.items()}
    layer = Qwen2Layer(**values)
    return Qwen2Forward(Qwen2Weights(eye, [layer], 2 * eye.sum(0), 3 * eye), config, 300)


def test_a_layer_of_zeros_changes_nothing():
    """Logits are then 3 * 2 * the normalised embedding, a unit vector whose mean square is 1/64."""
    model = model_of(eps=3 / 64)
    hidden = model.forward(np.array([5, 9]), 0)
    expected = np.zeros((2, 64))
    expected[0, 5] = expected[1, 9] = 3 * 2 / math.sqrt(1 / 64 + 3 / 64)  # 24
    assert model.logits(hidden) == pytest.approx(expected)
    assert expected.max() == 24


def test_swiglu_by_hand():
    """Ones with eps 3 become halves: silu(1/2) / 2 = 0.155615."""
    eye = np.eye(64)
    out = model_of(eps=3.0, gate=eye, up=eye, down=eye).layers[0].forward(np.ones((1, 64), np.float32), 0)
    assert out == pytest.approx(np.full((1, 64), 1.155615), abs=1e-6)


def test_query_heads_share_a_kv_head_in_groups():
    """Every value of KV head g is g + 1: heads 0 and 1 give ones, 2 and 3 twos, whatever the weights of the sum."""
    model = model_of(heads=4, kv_heads=2, v_bias=np.repeat([1, 2], 64), o=np.eye(256))
    x = np.random.default_rng().standard_normal((9, 256), np.float32)
    assert model.layers[0].forward(x, 0) - x == pytest.approx(np.tile(np.repeat([1, 2], 128), (9, 1)), abs=1e-5)


def test_rope_weighs_by_distance():
    """Queries and keys are 5 in dimension 1 alone: scores are 25 / 8 cos(distance * theta^(-2/64))."""
    bias = 5.0 * (np.arange(64) == 1)
    x = np.random.default_rng().standard_normal((200, 64), np.float32)
    model = model_of(q_bias=bias, k_bias=bias, v=np.eye(64), o=np.eye(64))
    got = np.concatenate([model.layers[0].forward(x[:150], 0), model.layers[0].forward(x[150:], 150)]) - x

    def expected(frequency):
        n = x / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True) + 1e-6)
        distance = np.arange(200)[:, None] - np.arange(200)
        weights = np.where(distance >= 0, np.exp(25 / 8 * np.cos(distance * frequency)), 0)
        return weights / weights.sum(1, keepdims=True) @ n

    assert relative(got, expected(100 ** (-2 / 64))) < TOLERANCE
    assert relative(got, expected(1.0)) > 0.1  # neighbours as pairs: dimension 1 would turn as fast as 0
