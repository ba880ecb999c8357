"""config.json of the Qwen2 architecture: the whole family is parsed, and anything that is not computed is refused."""

import json

import pytest

from cuq1.config_qwen2 import load_qwen2_config, parse_qwen2
from cuq1.errors import ConfigError
from tools.checkpoint_qwen2 import NAMES, qwen2_config

BASE = qwen2_config("qwen2.5-coder-7b")

# hidden, intermediate, layers, query heads, KV heads, head_dim, vocabulary, tied: from the models' descriptions
FAMILY = {
    "0.5b": (896, 4864, 24, 14, 2, 64, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 128, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 128, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 128, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 128, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 128, 152064, False),
}


@pytest.mark.parametrize("size", FAMILY)
def test_the_family(size):
    config = parse_qwen2(qwen2_config(f"qwen2.5-coder-{size}"))
    assert (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.vocab_size,
        config.tie_word_embeddings,
    ) == FAMILY[size]
    assert (config.q_size, config.kv_size) == (config.hidden_size, config.num_key_value_heads * config.head_dim)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (1e6, 1e-6, 32768)
    assert (config.bos_token_id, config.eos_token_ids, config.stop_tokens) == (151643, (151645,), (151645,))


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-tiny")])
def test_the_scaled_down_family_keeps_its_shapes(name):
    whole, tiny = parse_qwen2(qwen2_config(name.removesuffix("-tiny"))), parse_qwen2(qwen2_config(name))
    for key in ("head_dim", "tie_word_embeddings"):
        assert getattr(tiny, key) == getattr(whole, key)
    assert tiny.num_attention_heads * whole.num_key_value_heads == whole.num_attention_heads * tiny.num_key_value_heads
    assert tiny.intermediate_size % 128 or name == "qwen2.5-coder-32b-tiny"


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": None},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": None},
        {"head_dim": 128},
        {"layer_types": ["full_attention"] * 28},
        {"sliding_window": None},
        {"use_sliding_window": None},
        {"attention_bias": True},
        {"bos_token_id": None},
        {"eos_token_id": [151645, 151643]},
        {"an_unrelated_key": 3},
        {"torch_dtype": None, "dtype": "float16"},
        {"tie_word_embeddings": None},
    ],
)
def test_harmless_differences_are_accepted(change):
    parse_qwen2({**BASE, **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', and qwen2 is computed"),
        ({"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe'"),
        ({"model_type": "iquest_q1"}, "model_type is 'iquest_q1'"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "and Qwen2ForCausalLM is computed"),
        ({"use_sliding_window": True}, "use_sliding_window is True, which cuq1 does not compute"),
        ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "names 'sliding_attention'"),
        ({"layer_types": ["full_attention"] * 27}, "layer_types gives 27 layers, but num_hidden_layers is 28"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling has type 'yarn', and only the default"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling has type None"),
        ({"rope_scaling": "linear"}, "rope_scaling has type 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters has type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta is 10000.0, but rope_theta is"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters: partial_rotary_factor is 0.5",
        ),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section is [16, 24, 24]"),
        ({"rope_theta": None}, "rope_theta must be a finite number"),
        ({"rope_theta": 0}, "rope_theta must be above 0"),
        ({"rope_theta": "big"}, "rope_theta must be a finite number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": False}, "attention_bias is False"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is {'quant_method': 'awq'}"),
        ({"head_dim": 64}, "head_dim is 64, but hidden_size / num_attention_heads is 128"),
        ({"hidden_size": 3585}, "hidden_size 3585 is not a multiple of num_attention_heads 28"),
        ({"hidden_size": 28 * 96}, "makes heads of 96 for num_attention_heads 28, and only heads of 64 or 128"),
        ({"num_key_value_heads": 5}, "num_attention_heads 28 is not a multiple of num_key_value_heads 5"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer from 1"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"intermediate_size": 2**31}, "intermediate_size must be an integer from 1 to 2147483647"),
        ({"eos_token_id": 152064}, "eos_token_id must be token ids below vocab_size 152064"),
        ({"eos_token_id": "2"}, "eos_token_id must be token ids"),
        ({"bos_token_id": [1, 2]}, "bos_token_id must be null or one token id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, not 1"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)
def test_what_is_not_computed_is_refused(change, says):
    with pytest.raises(ConfigError) as caught:
        parse_qwen2({**BASE, **change}, where="m/config.json")
    assert str(caught.value).startswith("m/config.json: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "rope_theta",
        "rms_norm_eps",
        "hidden_act",
    ],
)
def test_needed_keys_are_named_when_they_are_absent(key):
    with pytest.raises(ConfigError, match=key):
        parse_qwen2({name: value for name, value in BASE.items() if name != key})


def test_a_folder_with_and_without_sampling_defaults(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    config = load_qwen2_config(tmp_path)
    assert (config.sampling.temperature, config.sampling.top_k, config.sampling.top_p) == (1.0, 0, 1.0)
    generation = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "eos_token_id": [151645, 151643]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = load_qwen2_config(tmp_path)
    assert (config.sampling.temperature, config.sampling.top_k, config.sampling.top_p) == (0.7, 20, 0.8)
    assert config.stop_tokens == (151645, 151643)
    assert config.eos_token_ids == (151645,)
    (tmp_path / "generation_config.json").write_text(json.dumps({**generation, "top_p": 0}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p must be above 0"):
        load_qwen2_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json does not exist: point to a folder"):
        load_qwen2_config(tmp_path)
