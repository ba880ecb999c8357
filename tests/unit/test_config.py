"""config.json: what is computed is parsed exactly, and anything else is refused before a weight is read."""

import copy
import json
import math

import pytest

from cuq1.config import FULL, SLIDING, load_config, load_sampling_defaults, parse_draft, parse_target
from cuq1.errors import ConfigError
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
        ({"num_hidden_layers": 5}, "gives 4 layers, but num_hidden_layers is 5"),
        ({"num_hybrid_layers_block": 10**9}, "but num_hidden_layers is 4"),
        ({"layer_types": [FULL] * 3}, "layer_types gives 3 layers, but num_hidden_layers is 4"),
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
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
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


def test_parsing_leaves_its_input_alone():
    target, draft = tiny_config()
    before = copy.deepcopy((target, draft))
    parse_draft(draft, parse_target(target))
    assert (target, draft) == before
