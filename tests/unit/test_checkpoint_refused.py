"""A checkpoint that is not exactly what its config asks for is refused, in one sentence that names the fault."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from cuq1.checkpoint import Checkpoint
from cuq1.errors import CheckpointError, ConfigError
from tests.checkpoint_files import edit, read, write
from tools.make_checkpoint import Layout, tiny_config, write_checkpoint

LAYER = "model.layers.2"
QUERY = f"{LAYER}.self_attn.q_proj.weight"
DRAFT = "mtp/model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("refused")
    write_checkpoint(root / "plain", *tiny_config())
    write_checkpoint(root / "fused", *tiny_config(), Layout(fused_experts=True))
    write_checkpoint(root / "bf16", *tiny_config(), Layout(fp8=False))
    write_checkpoint(root / "sharded", *tiny_config(), shards=3)
    return root


@pytest.fixture
def copy(models, tmp_path):
    return lambda name: shutil.copytree(models / name, tmp_path / "m")


def refusal(folder):
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def drop_containing(text):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if text in name]


def put(name, dtype, shape):
    size = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8}[dtype] * int(np.prod(shape))
    return lambda tensors: tensors.update({name: [dtype, shape, bytes(size)]})


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("plain", drop("model.norm.weight"), "lacks the tensor 'model.norm.weight'"),
        ("plain", drop("lm_head.weight"), "lacks the tensor 'lm_head.weight'"),
        ("plain", drop(f"{LAYER}.self_attn.sink_k"), f"lacks the tensor '{LAYER}.self_attn.sink_k'"),
        ("plain", drop("model.layers.0.ffn_out_norm.weight"), "lacks the tensor 'model.layers.0.ffn_out_norm.weight'"),
        ("plain", drop(f"{LAYER}.mlp.router.weight"), f"lacks the tensor '{LAYER}.mlp.router.weight'"),
        (
            "plain",
            drop_containing(f"{LAYER}.mlp.experts.7."),
            f"lacks 3 tensors ('{LAYER}.mlp.experts.7.gate_proj.weight'",
        ),
        ("plain", drop_containing(f"{LAYER}."), "lacks 35 tensors ("),
        (
            "fused",
            drop(f"{LAYER}.mlp.experts.proj", f"{LAYER}.mlp.experts.proj_scale_inv"),
            f"lacks the tensor '{LAYER}.mlp.experts.proj'",
        ),
        ("fused", drop(f"{LAYER}.mlp.experts.fc"), f"lacks the tensor '{LAYER}.mlp.experts.fc'"),
        # scales
        ("plain", drop(f"{QUERY}_scale_inv"), f"'{QUERY}' is F8_E4M3, and its scale '{QUERY}_scale_inv' is missing"),
        (
            "fused",
            drop(f"{LAYER}.mlp.experts.fc_scale_inv"),
            f"its scale '{LAYER}.mlp.experts.fc_scale_inv' is missing",
        ),
        ("plain", drop_containing("_scale_inv"), "more such faults"),
        ("bf16", put(f"{QUERY}_scale_inv", "F32", [2, 1]), f"'{QUERY}_scale_inv' scales '{QUERY}', which is BF16"),
        (
            "plain",
            put(f"{QUERY}_scale_inv", "F32", [1, 2]),
            "_scale_inv' has shape [1, 2], but config.json asks for [2, 1]",
        ),
        ("plain", put(f"{QUERY}_scale_inv", "F32", []), "_scale_inv' has shape [], but"),
        ("plain", put(f"{QUERY}_scale_inv", "F16", [2, 1]), "_scale_inv' is F16, and only BF16 or F32 is computed"),
        # shapes
        (
            "plain",
            put("model.norm.weight", "BF16", [65]),
            "'model.norm.weight' has shape [65], but config.json asks for [64]",
        ),
        (
            "plain",
            put("model.embed_tokens.weight", "BF16", [95, 64]),
            "has shape [95, 64], but config.json asks for [96, 64]",
        ),
        (
            "plain",
            put(f"{LAYER}.self_attn.sink_k", "BF16", [2, 1, 32]),
            "has shape [2, 1, 32], but config.json asks for [2, 32]",
        ),
        ("plain", put(QUERY, "F8_E4M3", [64, 256]), "has shape [64, 256], but config.json asks for [256, 64]"),
        ("fused", put(f"{LAYER}.mlp.experts.fc", "F8_E4M3", [8, 128, 64]), "asks for [8, 256, 64]"),
        # dtypes
        (
            "plain",
            put("model.norm.weight", "F16", [64]),
            "'model.norm.weight' is F16, and only BF16 or F32 is computed",
        ),
        ("plain", put(QUERY, "F8_E5M2", [256, 64]), f"'{QUERY}' is F8_E5M2, and only F8_E4M3 or BF16 or F32"),
        ("plain", put("lm_head.weight", "F8_E4M3", [96, 64]), "'lm_head.weight' is F8_E4M3, and only BF16 or F32"),
        ("plain", put(f"{LAYER}.mlp.router.weight", "I64", [8, 64]), "is I64, and only BF16 or F32"),
        # what nobody asked for
        (
            "plain",
            put("model.layers.4.attention_norm.weight", "BF16", [64]),
            "holds the unknown tensor 'model.layers.4.attention_norm.weight'",
        ),
        (
            "plain",
            put(f"{LAYER}.ffn_out_norm.weight", "BF16", [64]),
            f"holds the unknown tensor '{LAYER}.ffn_out_norm.weight'",
        ),
        ("plain", put(f"{LAYER}.self_attn.q_proj.bias", "BF16", [256]), "holds the unknown tensor"),
        (
            "plain",
            put(f"{LAYER}.mlp.gate.weight", "F32", [8, 64]),
            f"holds the unknown tensor '{LAYER}.mlp.gate.weight'",
        ),
        ("plain", put(f"{LAYER}.mlp.experts.8.gate_proj.weight", "BF16", [128, 64]), "holds the unknown tensor"),
        (
            "plain",
            put("lm_head.weight_scale_inv", "F32", [1, 1]),
            "holds the unknown tensor 'lm_head.weight_scale_inv'",
        ),
        ("plain", put("target_final_norm.weight", "BF16", [64]), "holds the unknown tensor"),
        (
            "plain",
            rename("model.norm.weight", "model.final\nnorm\ud800"),
            r"'model.norm.weight' and holds the unknown tensor 'model.final\nnorm\ud800'",
        ),
    ],
)
def test_wrong_tensors_are_named(copy, name, change, says):
    folder = copy(name)
    edit(folder, change)
    assert says in refusal(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("mtp.enorm.weight"), "lacks the tensor 'mtp.enorm.weight'"),
        (drop("embed_tokens.weight"), "lacks the tensor 'embed_tokens.weight'"),
        (put("mtp.eh_proj.weight", "BF16", [64, 64]), "mtp/config.json asks for [64, 128]"),
        (put("target_final_norm.weight", "BF16", [63]), "asks for [64]"),
        (put("mtp_layers.0.x", "BF16", [64]), "holds the unknown tensor 'mtp_layers.0.x'"),
        (drop("mtp.mtp_model_layer.mlp.experts.0.up_proj.weight_scale_inv"), "is missing"),
    ],
)
def test_the_draft_is_held_to_the_same(copy, change, says):
    folder = copy("plain")
    edit(folder, change, DRAFT)
    message = refusal(folder)
    assert says in message
    assert str(folder / "mtp") in message
    assert message.endswith(": use files and mtp/config.json of one checkpoint")


def test_fp8_that_the_drafts_config_does_not_declare_is_refused(copy):
    folder = copy("plain")
    raw = json.loads((folder / "mtp" / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "mtp" / "config.json").write_text(json.dumps(raw))
    assert "is F8_E4M3, but mtp/config.json has no quantization_config" in refusal(folder)


def test_fp8_that_the_config_does_not_declare_is_refused(copy):
    folder = copy("plain")
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert "is F8_E4M3, but config.json has no quantization_config" in refusal(folder)


def test_bf16_under_a_config_that_declares_fp8_is_accepted(copy):
    folder = copy("bf16")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**raw, "quantization_config": tiny_config()[0]["quantization_config"]})
    )
    Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["plain", "fused"])
@pytest.mark.parametrize("key", ["num_experts", "hidden_size", "intermediate_size", "vocab_size"])
def test_absurd_sizes_end_in_a_sentence(copy, name, key):
    folder = copy(name)
    shutil.rmtree(folder / "mtp")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, key: 2**31 - 1}))
    assert "use files and config.json of one checkpoint" in refusal(folder)


# files


@pytest.mark.parametrize(
    ("name", "lost", "says"),
    [
        ("plain", "config.json", "config.json does not exist"),
        ("plain", "model.safetensors", "has neither model.safetensors nor model.safetensors.index.json"),
        ("plain", DRAFT, "has neither model.safetensors nor"),
        ("plain", "mtp/config.json", "has model.safetensors but no config.json"),
        ("sharded", "mtp/config.json", "has model.safetensors.index.json but no config.json"),
        ("sharded", "model-00002-of-00003.safetensors", "model-00002-of-00003.safetensors does not exist"),
        ("sharded", "mtp/model-00001-of-00003.safetensors", "model-00001-of-00003.safetensors does not exist"),
        ("sharded", "model.safetensors.index.json", "has neither model.safetensors nor"),
    ],
)
def test_missing_files_are_named(copy, name, lost, says):
    folder = copy(name)
    (folder / lost).unlink()
    assert says in refusal(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json", DRAFT])
def test_files_that_may_not_be_read_are_not_absent(copy, file):
    folder = copy("plain")
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to((folder / file).name)
    with pytest.raises(CheckpointError, match=rf"{file} cannot be read \(.*symbolic links\): check the path and its p"):
        Checkpoint.open(folder)
    (folder / file).unlink()
    (folder / file).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"{file} is a link to a file that does not exist"):
        Checkpoint.open(folder)


def test_weights_of_a_draft_without_config_that_may_not_be_looked_at(copy):
    folder = copy("plain")
    (folder / "mtp" / "config.json").unlink()
    (folder / DRAFT).unlink()
    Checkpoint.open(folder)
    (folder / DRAFT).symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint.open(folder)


def test_a_folder_in_place_of_an_index(copy):
    folder = copy("plain")
    (folder / "model.safetensors.index.json").mkdir()
    assert "cannot be read (Is a directory): check the path" in refusal(folder)


@pytest.mark.parametrize("file", ["model.safetensors", DRAFT])
def test_truncated_files_are_named(copy, file):
    folder = copy("plain")
    raw = (folder / file).read_bytes()
    (folder / file).write_bytes(raw[:-1])
    message = refusal(folder)
    assert f"{file} is truncated" in message
    assert str(len(raw)) in message
    assert str(len(raw) - 1) in message


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "weight_map must map"),
        ('{"weight_map": {}}', "weight_map must map"),
        ('{"weight_map": ["a"]}', "weight_map must map"),
        ('{"weight_map": {"a": 1}}', "names '1', and a shard must be"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names '../model.safetensors', and a shard must be"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "a shard must be"),
        ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "a shard must be"),
        ('{"weight_map": {"a": "none.safetensors"}}', "none.safetensors does not exist"),
    ],
)
def test_a_broken_index_is_refused(copy, index, says):
    folder = copy("sharded")
    (folder / "model.safetensors.index.json").write_text(index)
    assert says in refusal(folder)


def reindex(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_index_that_disagrees_with_its_shards_is_refused(copy):
    folder = copy("sharded")
    first, last = (f"model-0000{number}-of-00003.safetensors" for number in (1, 3))
    name = "model.norm.weight"
    assert name in read(folder / last)
    reindex(folder, lambda weight_map: weight_map.update({name: first}))
    assert f"{first} lacks 'model.norm.weight'" in refusal(folder) or f"{last} holds" in refusal(folder)
    reindex(folder, lambda weight_map: weight_map.pop(name))
    assert f"{last} holds 'model.norm.weight', which" in refusal(folder)
    reindex(folder, lambda weight_map: weight_map.update({name: last, "ghost": last}))
    assert f"{last} lacks 'ghost'" in refusal(folder)
    reindex(folder, lambda weight_map: weight_map.pop("ghost"))
    Checkpoint.open(folder)
    edit(folder, put(name, "BF16", [64]), first)  # twice, once where the index says
    assert f"{first} holds 'model.norm.weight', which" in refusal(folder)


def test_weights_beside_an_index_that_does_not_name_them_are_refused(copy, models):
    folder = copy("sharded")
    shutil.copy(models / "plain" / "model.safetensors", folder)
    assert "remove the one that is out of date" in refusal(folder)


def test_one_shard_of_the_usual_name_is_fine(copy):
    folder = copy("plain")
    names = read(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    Checkpoint.open(folder)


# values, which are read with a rank's share


def spoil(name, value, dtype):
    def change(tensors):
        kind, shape, data = tensors[name]
        values = np.frombuffer(data, dtype).copy()
        values[-1] = value
        tensors[name] = [kind, shape, values.tobytes()]

    return change


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_scales_that_no_quantiser_writes_are_refused(copy, value):
    folder = copy("plain")
    edit(folder, spoil(f"{QUERY}_scale_inv", value, np.float32))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="negative or not finite: copy the checkpoint again") as caught:
        checkpoint.target()
    assert str(caught.value).startswith(f"{folder / 'model.safetensors'}: '{QUERY}'")
    checkpoint.target(8, 0)  # the scale of another rank's rows
    checkpoint.draft()


@pytest.mark.parametrize("name", ["model.norm.weight", f"{LAYER}.self_attn.sink_k", f"{LAYER}.self_attn.k_norm.weight"])
def test_small_tensors_that_are_not_finite_are_refused(copy, name):
    folder = copy("plain")
    edit(folder, spoil(name, np.nan, ml_dtypes.bfloat16))
    with pytest.raises(CheckpointError, match=f"'{name}' holds values that are not finite"):
        Checkpoint.open(folder).target()


def test_no_draft_folder_is_no_fault_until_it_is_asked_for(copy):
    folder = copy("plain")
    shutil.rmtree(folder / "mtp")
    checkpoint = Checkpoint.open(folder)
    checkpoint.target()
    with pytest.raises(CheckpointError, match=r"mtp/config\.json.*decode without drafts"):
        checkpoint.draft()


def test_tensors_in_any_order_and_alignment(copy):
    folder = copy("plain")
    tensors = read(folder / "model.safetensors")
    write(
        folder / "model.safetensors",
        {"mtp_layers.x": ["U8", [3], b"abc"], **dict(sorted(tensors.items(), reverse=True))},
    )
    Checkpoint.open(folder).target()
