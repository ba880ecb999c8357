"""config.json: what is computed is parsed exactly, and anything else is refused before a weight is read."""

import copy
import errno
import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

from cuq1.config import (
    FULL,
    SLIDING,
    SamplingDefaults,
    load_config,
    load_sampling_defaults,
    parse_draft,
    parse_target,
)
from cuq1.errors import ConfigError
from cuq1.sampling.params import DecodeParams
from tests.paths import NANO, RELEASED
from tools.make_checkpoint import tiny_config


def test_the_released_model():
    config, draft = load_config(RELEASED)
    assert config.num_layers == 88
    assert (config.layer_types.count(FULL), config.layer_types.count(SLIDING)) == (25, 63)
    assert config.layer_types[:6] == (FULL, FULL, SLIDING, SLIDING, SLIDING, FULL)
    assert config.layer_types[-3:] == (FULL,) * 3
    assert not config.is_moe(0)
    assert all(config.is_moe(layer) for layer in range(1, 88))
    assert config.softmax_scale == 128**-0.5
    assert config.fp8_block == (128, 128)
    assert (config.sliding_window, config.max_position_embeddings) == (4096, 524288)
    assert draft.num_draft_slots == 7
    assert draft.layer.sliding_window == 512
    assert draft.layer.layer_types == (SLIDING,)
    assert draft.layer.is_moe(0)
    defaults = load_sampling_defaults(RELEASED, config)
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.stop_tokens) == (1.0, 20, 0.95, (0,))


def test_nano_has_the_released_keys():
    for file in ("config.json", "mtp/config.json", "generation_config.json"):
        released, nano = (json.loads((folder / file).read_text()) for folder in (RELEASED, NANO))
        assert released.keys() == nano.keys()
    assert load_config(NANO)[0].layer_types == (FULL, FULL, SLIDING, SLIDING, SLIDING, FULL)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": [FULL, SLIDING, SLIDING, FULL], "first_layers_types": None},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"architectures": None},
        {"moe_router_dtype": "float32"},
        {"eos_token_id": [0, 5]},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"an_unrelated_key": 3},
        {"rotary_dim": 0},
        {"rotary_dim": 32},
        {"scoring_func": "softmax", "norm_topk_prob": True, "routed_scaling_factor": 1.0, "topk_method": "greedy"},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"layer_types": [FULL, SLIDING, SLIDING, FULL]},
        {"first_k_dense_replace": 1, "moe_layer_freq": 1},
        {"moe_layer_freq": [0, 1, 1, 1]},
        {"use_qk_norm": True, "attn_output_gate": False},
        {"moe_topk": 2, "rope_local_base_freq": 10000},
    ],
)
def test_harmless_differences_are_accepted(change):
    parse_target({**tiny_config()[0], **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is ['LlamaForCausalLM']"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which cuq1 does not compute"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"use_over_encoding": True}, "use_over_encoding is True"),
        ({"shared_kv_num_layers": 2}, "shared_kv_num_layers is 2"),
        ({"no_rope_layers": [3]}, "no_rope_layers is [3]"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"enable_sink_attention": False}, "enable_sink_attention is False"),
        ({"moe_router_dtype": "bf16"}, "moe_router_dtype is 'bf16'"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling has type 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has type 'linear'"),
        ({"rope_scaling": "yarn"}, "rope_scaling has type 'yarn'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters has type 'yarn'"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', which cuq1 does not compute"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ({"use_qk_norm": False}, "use_qk_norm is False"),
        ({"qk_layernorm": False}, "qk_layernorm is False"),
        ({"attn_output_gate": True}, "attn_output_gate is True"),
        ({"rope_interleave": True}, "rope_interleave is True"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
        ({"attention_multiplier": 0.01}, "attention_multiplier is 0.01"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, but rotary_dim is 16 of head_dim 32"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half', but rotary_dim is 16"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
            "rope_parameters.partial_rotary_factor is 1.0, but rotary_dim is 16",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_parameters.rope_theta is 500000.0, but rope_theta is 1000000.0: keep the one that is right",
        ),
        ({"rope_scaling": {"type": "default", "rope_theta": "x"}}, "rope_scaling.rope_theta is 'x', but rope_theta is"),
        ({"moe_topk": 4}, "moe_topk is 4, but num_experts_per_tok is 2"),
        ({"rope_local_base_freq": 1e6}, "rope_local_base_freq is 1000000.0, but swa_rope_theta is 10000.0"),
        ({"layer_types": [FULL, FULL, SLIDING, FULL]}, "layer_types contradicts first_layers_types"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace is 2, which contradicts mlp_only_layers [0]"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, which contradicts mlp_only_layers [0]"),
        ({"moe_layer_freq": [1, 1, 1, 1]}, "moe_layer_freq is [1, 1, 1, 1], which contradicts"),
        ({"num_hidden_layers": 5}, "gives 4 layers, but num_hidden_layers is 5"),
        ({"num_hybrid_layers_block": 10**9}, "but num_hidden_layers is 4"),
        ({"layer_types": [FULL] * 3}, "layer_types gives 3 layers, but num_hidden_layers is 4"),
        ({"layer_types": [FULL, SLIDING, "full", FULL]}, "layer_types names 'full'"),
        ({"layer_types": [FULL] * 3 + ["linear_attention"]}, "layer_types names 'linear_attention'"),
        ({"layer_types": FULL}, "layer_types must be a list of strings"),
        ({"first_layers_types": None}, "first_layers_types must be a list of strings"),
        ({"hidden_size": None}, "hidden_size must be an integer from 1"),
        ({"hidden_size": "64"}, "hidden_size must be an integer from 1"),
        ({"hidden_size": True}, "hidden_size must be an integer from 1"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer from 1"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1"),
        ({"hidden_size": 10**30}, "hidden_size must be an integer from 1 to 2147483647"),
        ({"num_attention_heads": 7}, "num_attention_heads 7 is not a multiple of num_key_value_heads 2"),
        ({"rotary_dim": 15}, "rotary_dim must be even"),
        ({"rotary_dim": 34}, "at most head_dim 32"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers must list layer numbers below 4"),
        ({"mlp_only_layers": 0}, "mlp_only_layers must list layer numbers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers must list layer numbers"),
        ({"eos_token_id": 96}, "eos_token_id must be token ids below vocab_size 96"),
        ({"eos_token_id": -1}, "eos_token_id must be token ids"),
        ({"eos_token_id": "0"}, "eos_token_id must be token ids"),
        ({"rope_theta": 0}, "rope_theta must be above 0"),
        ({"rope_theta": math.inf}, "rope_theta must be a finite number"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a finite number"),
        ({"softmax_scale": -1}, "softmax_scale must be above 0"),
        ({"logit_scale": 0}, "logit_scale must be above 0"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config must have quant_method fp8"),
        ({"quantization_config": "fp8"}, "quantization_config must have quant_method fp8"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "quantization_config.fmt must be e4m3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size must be [128, 128], not None"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size must be [128, 128], not [64, 64]",
        ),
    ],
)
def test_what_is_not_computed_is_refused(change, says):
    with pytest.raises(ConfigError, match=r"^here/config\.json") as caught:
        parse_target({**tiny_config()[0], **change}, "here/config.json")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [key for key in tiny_config()[0] if key.startswith(("num_", "rope_theta", "vocab"))])
def test_needed_keys_are_named_when_they_are_absent(key):
    raw = tiny_config()[0]
    del raw[key]
    with pytest.raises(ConfigError, match=key):
        parse_target(raw)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "iquest_q1"}, "model_type is 'iquest_q1'"),
        ({"architectures": ["IQuestQ1ForCausalLM"]}, "architectures is"),
        ({"target_config": None}, "target_config must hold the target's dimensions"),
        ({"num_draft_slots": 0}, "num_draft_slots must be an integer from 1"),
        ({"sliding_window": None}, "sliding_window must be an integer"),
        ({"num_target_layers": 5}, "num_target_layers is 5, but the target has 4 layers"),
        ({"target_config": {"hidden_size": 128}}, "target_config.hidden_size is 128, but the target's is 64"),
        ({"target_config": {"vocab_size": 100}}, "target_config.vocab_size is 100, but the target's is 96"),
        ({"target_config": {"hidden_act": "gelu"}}, "target_config: hidden_act is 'gelu'"),
    ],
)
def test_a_draft_that_does_not_fit_its_target_is_refused(change, says):
    target, draft = tiny_config()
    inner = change.get("target_config")
    if isinstance(inner, dict):
        change = {"target_config": {**draft["target_config"], **inner}}
    with pytest.raises(ConfigError) as caught:
        parse_draft({**draft, **change}, parse_target(target))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not valid JSON"),
        (b"[1]", "must hold a JSON object, not a list"),
    ],
)
def test_files_that_are_no_config_are_named(tmp_path, content, says):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'} {says}")


def test_missing_folders_and_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist: point to a folder that holds a checkpoint"):
        load_config(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be read \(Not a directory\): check the path"):
        load_config(tmp_path / "file")


def defaults_of(tmp_path, raw):
    if raw is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    return load_sampling_defaults(tmp_path, parse_target(tiny_config()[0]))


def test_sampling_defaults(tmp_path):
    plain = defaults_of(tmp_path, None)
    assert (plain.temperature, plain.top_k, plain.top_p, plain.stop_tokens) == (1.0, 0, 1.0, (0,))
    assert defaults_of(tmp_path, {"eos_token_id": [7, 0]}).stop_tokens == (0, 7)
    assert defaults_of(tmp_path, {"do_sample": False, "temperature": 0.6}).temperature == 0
    assert defaults_of(tmp_path, {"top_k": None, "top_p": 0.5}).top_k == 0


@pytest.mark.parametrize(
    "raw",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 2.5},
        {"eos_token_id": 96},
        {"eos_token_id": [None]},
    ],
)
def test_sampling_defaults_out_of_range_are_refused(tmp_path, raw):
    with pytest.raises(ConfigError, match="generation_config"):
        defaults_of(tmp_path, raw)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"temperature": -0.5}, "temperature must be at least 0, not -0.5"),
        ({"temperature": "1"}, "temperature must be a finite number, not '1'"),
        ({"temperature": True}, "temperature must be a finite number, not True"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"top_p": [0.9]}, "top_p must be a finite number, not [0.9]"),
        ({"top_k": "20"}, "top_k must be an integer from 0"),
        ({"do_sample": "false"}, "do_sample must be true or false, not 'false'"),
        ({"do_sample": 0}, "do_sample must be true or false, not 0"),
    ],
)
def test_sampling_defaults_at_fault_are_named_with_their_value(tmp_path, raw, says):
    with pytest.raises(ConfigError) as caught:
        defaults_of(tmp_path, raw)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'}: {says}")


def test_sampling_is_the_default_of_do_sample(tmp_path):
    for sample in ({}, {"do_sample": None}, {"do_sample": True}):
        assert defaults_of(tmp_path, {"temperature": 0.6, **sample}).temperature == 0.6


def test_sampling_defaults_have_the_names_of_decode_params():
    assert {field.name for field in fields(SamplingDefaults)} <= {field.name for field in fields(DecodeParams)}


def test_a_draft_may_repeat_what_its_target_says_of_layers():
    """Its own layer is one routed sliding layer, whatever the target's layers are."""
    target, draft = tiny_config()
    said = {"layer_types": [FULL, SLIDING, SLIDING, FULL], "first_k_dense_replace": 1, "moe_layer_freq": [0, 1, 1, 1]}
    draft["target_config"] |= said
    assert parse_draft(draft, parse_target({**target, **said})).layer.layer_types == (SLIDING,)


def model_folder(tmp_path):
    """A folder with the configs alone."""
    target, draft = tiny_config()
    (tmp_path / "mtp").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(target))
    (tmp_path / "mtp" / "config.json").write_text(json.dumps(draft))
    return tmp_path


def test_only_an_absent_draft_is_no_draft(tmp_path):
    folder = model_folder(tmp_path)
    mtp, config = folder / "mtp", folder / "mtp" / "config.json"
    assert load_config(folder)[1] is not None
    config.unlink()
    assert load_config(folder)[1] is None
    mtp.rmdir()
    assert load_config(folder)[1] is None
    mtp.write_text("")
    with pytest.raises(
        ConfigError, match=r"mtp/config\.json cannot be read \(Not a directory\): check the path and its"
    ):
        load_config(folder)
    mtp.unlink()
    mtp.symlink_to("mtp")
    with pytest.raises(ConfigError, match=r"mtp cannot be read \(Too many levels of symbolic links\): check"):
        load_config(folder)
    mtp.unlink()
    mtp.symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"mtp is a link to a file that does not exist: copy the file, or remove"):
        load_config(folder)


@pytest.mark.parametrize("name", ["mtp", "mtp/config.json", "generation_config.json"])
def test_what_may_not_be_looked_at_is_not_absent(tmp_path, monkeypatch, name):
    """As in a folder without search permission, which root would not notice."""
    folder, stat = model_folder(tmp_path), Path.stat

    def denied(path, **options):
        if path == folder / name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(ConfigError, match=rf"{name} cannot be read \(Permission denied\): check the path and its perm"):
        load_sampling_defaults(folder, load_config(folder)[0])


def test_a_path_with_a_nul_byte_is_a_fault_of_the_path():
    with pytest.raises(ConfigError, match=r"^'a\\x00b/config\.json' holds a NUL byte, which no path may: point to"):
        load_config("a\0b")


def test_keys_that_occur_twice_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"head_dim": 32, "rope": {"a": 1}, "head_dim": 64}')
    with pytest.raises(ConfigError, match=r"is not valid JSON \(the key 'head_dim' occurs twice\): copy"):
        load_config(tmp_path)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    config = model_folder(tmp_path) / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    load_config(tmp_path)


def test_parsing_leaves_its_input_alone():
    target, draft = tiny_config()
    before = copy.deepcopy((target, draft))
    parse_draft(draft, parse_target(target))
    assert (target, draft) == before
