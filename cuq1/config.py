"""Model configurations, parsed from a checkpoint's JSON and validated.

A config that describes something cuq1 does not compute is refused here, before
any weight is read, so that no engine has to guess.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuq1.errors import ConfigError

FULL = "full_attention"
SLIDING = "sliding_attention"

TARGET_TYPES = ("iquest_q1",)
TARGET_ARCHITECTURES = ("IQuestQ1ForCausalLM",)
DRAFT_TYPES = ("iquest_q1_mtp_recursive", "iquest_q1_mtp")
DRAFT_ARCHITECTURES = ("IQuestQ1MTPRecursive", "IQuestQ1MtpRecursive")

# Keys that change the computation when they are set to anything but these values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_over_encoding": (None, False),
    "shared_kv_num_layers": (None, 0),
    "no_rope_layers": (None, []),
    "tie_word_embeddings": (None, False),
    "enable_sink_attention": (None, True),
    "enable_lm_head_fp32": (None, True),
    "use_sliding_window": (None, True),
    "use_hybrid_layers": (None, True),
    "moe_router_dtype": (None, "fp32", "float32"),
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "n_group": (None, 0, 1),
    "topk_group": (None, 0, 1),
    "topk_method": (None, "greedy"),
    "scoring_func": (None, "softmax"),
    "norm_topk_prob": (None, True),
    "routed_scaling_factor": (None, 1, 1.0),
    "decoder_sparse_step": (None, 1),
    "qk_norm": (None, True),
    "qk_layernorm": (None, True),
    "use_qk_norm": (None, True),
    "attn_output_gate": (None, False),
    "rope_interleave": (None, False),
    "use_alibi": (None, False),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "swiglu_limit": (None,),
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
}
# Other models' names for the same numbers: where both are given, they must agree. (Sizes need no such check: the
# weights' shapes are it.)
_ALSO_CALLED = {
    "moe_topk": "num_experts_per_tok",
    "rope_local_base_freq": "swa_rope_theta",
}


# Bounds every size and count, so that a damaged one cannot start endless work.
_LARGEST = 2**31 - 1


# Keys of generation_config.json that change which token is taken, unless they have these values.
_UNAPPLIED: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "num_beams"), 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "penalty_alpha"), 0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens")),
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters of generation_config.json; top_k 0 means no limit."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Q1Config:
    """The IQuest-Q1 target, or the dimensions of its draft layer.

    Sizes are in elements; `softmax_scale` is resolved (head_dim**-0.5 where the
    JSON has null); `layer_types` has one of FULL and SLIDING for each layer.
    `fp8_block` is the (rows, columns) of one scale block, or None for a
    checkpoint that declares no quantisation.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    dense_intermediate_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    sliding_window: int
    layer_types: tuple[str, ...]
    mlp_only_layers: tuple[int, ...]
    rope_theta: float
    swa_rope_theta: float
    rotary_dim: int
    rms_norm_eps: float
    attn_out_scale: float
    ffn_out_scale: float
    first_layer_attn_out_scale: float
    first_layer_ffn_out_scale: float
    softmax_scale: float
    logit_scale: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    fp8_block: tuple[int, int] | None

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    def is_moe(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers


@dataclass(frozen=True)
class DraftConfig:
    """The recursive draft: one MoE layer over the target's hidden states.

    `layer` holds the layer's dimensions, with the draft's own window and RoPE
    base; `num_draft_slots` is the largest number of drafts a round.
    """

    layer: Q1Config
    num_draft_slots: int


class Reader:
    """Typed access to a JSON object, with errors that name file and key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def fail(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} {problem}")

    def integer(self, key: str, low: int = 1) -> int:
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _LARGEST:
            raise self.fail(key, f"must be an integer from {low} to {_LARGEST}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        try:
            finite = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
        except OverflowError:  # an integer beyond every float
            finite = False
        if value is None or not finite:
            raise self.fail(key, f"must be a finite number, not {value!r}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.fail(key, f"must be above 0, not {value!r}")
        return value

    def same(self, key: str, value: Any, wanted: float, source: str) -> None:
        """Refuses a `value` of `key` that is given and is not the number of `source`."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and value == wanted):
            raise self.fail(key, f"is {value!r}, but {source} is {wanted!r}: keep the one that is right")

    def strings(self, key: str) -> list[str]:
        value = self.raw.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, f"must be a list of strings, not {value!r}")
        return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object_pairs_hook that refuses equal keys, of which json would keep the last, by ValueError."""
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} occurs twice")
    return table


def is_present(path: Path) -> bool:
    """False only where `path` does not exist; ConfigError where nobody can tell, or where it is a broken link."""
    try:
        path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link to a file that does not exist: copy the file, or remove the link"
            ) from None
        return False
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None
    return True


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, a byte order mark aside; ConfigError where there is none or a key occurs twice."""
    if "\0" in str(path):
        raise ConfigError(
            f"{str(path)!r} holds a NUL byte, which no path may: point to a folder that holds a checkpoint"
        )
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: point to a folder that holds a checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """`read_json` of a file's bytes; `where` names the file in errors."""
    try:
        raw = json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON ({error}): copy the file again") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must hold a JSON object, not a {type(raw).__name__}: copy the file again")
    return raw


def token_ids(value: Any) -> tuple[int, ...] | None:
    """Token ids given as null, one integer or a list of integers; None if they are neither."""
    items = [] if value is None else value if isinstance(value, list) else [value]
    if all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
        return tuple(dict.fromkeys(items))
    return None


def _layer_types(read: Reader, layers: int) -> tuple[str, ...]:
    if read.raw.get("layer_types") is None:
        source = "first_layers_types + hybrid_layers_types_block x num_hybrid_layers_block + last_layers_types"
        return _checked_types(read, _composed_types(read, layers), layers, source)
    types = _checked_types(read, read.strings("layer_types"), layers, "layer_types")
    parts = ("first_layers_types", "hybrid_layers_types_block", "num_hybrid_layers_block", "last_layers_types")
    if all(read.raw.get(part) is not None for part in parts) and list(types) != _composed_types(read, layers):
        raise read.fail("layer_types", f"contradicts {', '.join(parts)}: keep the one that is right")
    return types


def _composed_types(read: Reader, layers: int) -> list[str]:
    repeat = read.integer("num_hybrid_layers_block", 0)
    return (
        read.strings("first_layers_types")
        + read.strings("hybrid_layers_types_block") * min(repeat, layers + 1)
        + read.strings("last_layers_types")
    )


def _checked_types(read: Reader, types: list[str], layers: int, source: str) -> tuple[str, ...]:
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise read.fail(source, f"names {kind!r}, and only {FULL} and {SLIDING} are computed")
    if len(types) != layers:
        raise read.fail(source, f"gives {len(types)} layers, but num_hidden_layers is {layers}")
    return tuple(types)


def _dense_layers(read: Reader, layers: int) -> tuple[int, ...]:
    """mlp_only_layers, which other models' ways of saying the same must not contradict."""
    dense = read.raw.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise read.fail("mlp_only_layers", f"must list layer numbers below {layers}, not {dense!r}")
    numbers = tuple(sorted(set(dense)))
    first = read.raw.get("first_k_dense_replace")
    every = read.raw.get("moe_layer_freq")
    # A frequency of 1 says nothing about the first layers, a list says it of each layer.
    flags = [int(layer not in numbers) for layer in range(layers)]
    for key, agrees in (
        ("first_k_dense_replace", first is None or (type(first) is int and tuple(range(first)) == numbers)),
        ("moe_layer_freq", every is None or every == flags or (type(every) is int and every == 1)),
    ):
        if not agrees:
            raise read.fail(key, f"is {read.raw[key]!r}, which contradicts mlp_only_layers {list(numbers)}")
    return numbers


def _refuse_other_rope(read: Reader, head_dim: int, rotary_dim: int) -> None:
    theta = read.positive("rope_theta")
    factors = {"partial_rotary_factor": read.raw.get("partial_rotary_factor")}
    for key in ("rope_scaling", "rope_parameters"):  # the older and the newer spelling
        scaling = read.raw.get(key)
        if scaling is None:
            continue
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else scaling
        if kind != "default":
            raise read.fail(key, f"has type {kind!r}, and only the default (unscaled) RoPE is computed")
        read.same(f"{key}.rope_theta", scaling.get("rope_theta"), theta, "rope_theta")
        factors[f"{key}.partial_rotary_factor"] = scaling.get("partial_rotary_factor")
    for key, factor in factors.items():
        number = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 <= factor <= 1
        if factor is not None and not (number and round(factor * head_dim) == rotary_dim):
            raise read.fail(
                key, f"is {factor!r}, but rotary_dim is {rotary_dim} of head_dim {head_dim}: keep the one that is right"
            )


def _fp8_block(read: Reader) -> tuple[int, int] | None:
    quantization = read.raw.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        raise read.fail("quantization_config", "must have quant_method fp8, the only quantisation that is computed")
    if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise read.fail("quantization_config.fmt", f"must be e4m3, not {quantization['fmt']!r}")
    block = quantization.get("weight_block_size")
    if block != [128, 128]:
        raise read.fail("quantization_config.weight_block_size", f"must be [128, 128], not {block!r}")
    return (128, 128)


def refuse_other_values(read: Reader, only: Mapping[str, tuple[Any, ...]]) -> None:
    """ConfigError for a key of `only` whose value is none of those given there, an absent one being None."""
    for key, allowed in only.items():
        value = read.raw.get(key)
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise read.fail(key, f"is {value!r}, which cuq1 does not compute (it computes {allowed[-1]!r})")


def refuse_other_models(read: Reader, types: tuple[str, ...], architectures: tuple[str, ...]) -> None:
    """ConfigError for a config of another model_type, or of another model's architectures."""
    kind = read.raw.get("model_type")
    if kind not in types:
        raise read.fail("model_type", f"is {kind!r}, and {' or '.join(types)} is computed here")
    named = read.raw.get("architectures")
    if named is not None and (not isinstance(named, list) or not any(name in architectures for name in named)):
        raise read.fail("architectures", f"is {named!r}, and {' or '.join(architectures)} is computed here")


def _target(raw: Mapping[str, Any], where: str, fp8_block: tuple[int, int] | None) -> Q1Config:
    read = Reader(raw, where)
    refuse_other_models(read, TARGET_TYPES, TARGET_ARCHITECTURES)
    refuse_other_values(read, _ONLY)
    for name, key in _ALSO_CALLED.items():
        read.same(name, raw.get(name), read.number(key), key)
    layers = read.integer("num_hidden_layers")
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads")
    head_dim = read.integer("head_dim")
    if heads % kv_heads:
        raise read.fail("num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {kv_heads}")
    rotary = read.integer("rotary_dim", 0)
    if rotary % 2 or rotary > head_dim:
        raise read.fail("rotary_dim", f"must be even and at most head_dim {head_dim}, not {rotary}")
    _refuse_other_rope(read, head_dim, rotary)
    experts = read.integer("num_experts")
    chosen = read.integer("num_experts_per_tok")
    if chosen > experts:
        raise read.fail("num_experts_per_tok", f"{chosen} exceeds num_experts {experts}")
    vocab = read.integer("vocab_size")
    eos = token_ids(raw.get("eos_token_id"))
    if eos is None or any(token >= vocab for token in eos):
        raise read.fail("eos_token_id", f"must be token ids below vocab_size {vocab}, not {raw.get('eos_token_id')!r}")
    softmax_scale = raw.get("softmax_scale")
    return Q1Config(
        hidden_size=read.integer("hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        dense_intermediate_size=read.integer("dense_intermediate_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_experts=experts,
        num_experts_per_tok=chosen,
        sliding_window=read.integer("sliding_window"),
        layer_types=_layer_types(read, layers),
        mlp_only_layers=_dense_layers(read, layers),
        rope_theta=read.positive("rope_theta"),
        swa_rope_theta=read.positive("swa_rope_theta"),
        rotary_dim=rotary,
        rms_norm_eps=read.positive("rms_norm_eps"),
        attn_out_scale=read.number("attn_out_scale", 1.0),
        ffn_out_scale=read.number("ffn_out_scale", 1.0),
        first_layer_attn_out_scale=read.number("first_layer_attn_out_scale", 1.0),
        first_layer_ffn_out_scale=read.number("first_layer_ffn_out_scale", 1.0),
        softmax_scale=head_dim**-0.5 if softmax_scale is None else read.positive("softmax_scale"),
        logit_scale=read.positive("logit_scale", 1.0),
        max_position_embeddings=read.integer("max_position_embeddings"),
        eos_token_ids=eos,
        fp8_block=fp8_block,
    )


def parse_target(raw: Mapping[str, Any], where: str = "config.json") -> Q1Config:
    """The target's config from its JSON object; `where` names it in errors.

    Raises ConfigError for malformed values and for anything cuq1 does not compute.
    """
    return _target(raw, where, _fp8_block(Reader(raw, where)))


def parse_draft(raw: Mapping[str, Any], target: Q1Config, where: str = "mtp/config.json") -> DraftConfig:
    """The draft's config, checked to fit the target whose hidden states it continues."""
    read = Reader(raw, where)
    refuse_other_models(read, DRAFT_TYPES, DRAFT_ARCHITECTURES)
    dims = raw.get("target_config")
    if not isinstance(dims, dict):
        raise read.fail("target_config", "must hold the target's dimensions as an object")
    merged = {
        **dims,
        # one physical layer, routed, sliding: its window and RoPE base are the draft's own
        "num_hidden_layers": 1,
        "layer_types": [SLIDING],
        "first_layers_types": None,
        "mlp_only_layers": [],
        "first_k_dense_replace": None,
        "moe_layer_freq": None,
        "sliding_window": read.integer("sliding_window"),
        "swa_rope_theta": read.positive("swa_rope_theta"),
    }
    layer = _target(merged, f"{where}: target_config", _fp8_block(read))
    for key in ("hidden_size", "vocab_size", "max_position_embeddings"):
        if getattr(layer, key) != getattr(target, key):
            raise read.fail(
                f"target_config.{key}", f"is {getattr(layer, key)}, but the target's is {getattr(target, key)}"
            )
    trained_for = raw.get("num_target_layers", target.num_layers)
    if trained_for != target.num_layers:
        raise read.fail("num_target_layers", f"is {trained_for!r}, but the target has {target.num_layers} layers")
    return DraftConfig(layer, read.integer("num_draft_slots"))


def load_config(model_dir: str | Path) -> tuple[Q1Config, DraftConfig | None]:
    """Target and draft configs of a checkpoint folder; the draft is None where there is no mtp/config.json.

    Raises ConfigError for what is not computed or cannot be read.
    """
    folder = Path(model_dir)
    path = folder / "config.json"
    target = parse_target(read_json(path), str(path))
    path = folder / "mtp" / "config.json"
    if not is_present(path.parent) or not is_present(path):
        return target, None
    return target, parse_draft(read_json(path), target, str(path))


def load_sampling_defaults(model_dir: str | Path, config: Q1Config) -> SamplingDefaults:
    """generation_config.json's sampling defaults; its stop tokens join those of config.json.

    Without the file the defaults are plain sampling. `do_sample: false` means temperature 0;
    null or absent means true.
    """
    path = Path(model_dir) / "generation_config.json"
    if not is_present(path):
        return SamplingDefaults(stop_tokens=config.eos_token_ids)
    return parse_sampling_defaults(read_json(path), config.eos_token_ids, config.vocab_size, str(path))


def unapplied_settings(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """What generation_config.json's object asks of sampling that is not computed, as `repetition_penalty 1.1`."""
    asked = {key: raw[key] for key, neutral in _UNAPPLIED.items() if raw.get(key) not in (None, [], {}, neutral)}
    return tuple(f"{key} {value}" if isinstance(value, int | float) else key for key, value in asked.items())


def parse_sampling_defaults(
    raw: Mapping[str, Any], eos_token_ids: tuple[int, ...], vocab_size: int, where: str = "generation_config.json"
) -> SamplingDefaults:
    """`load_sampling_defaults` of the file's JSON object; `eos_token_ids` are config.json's."""
    read = Reader(raw, where)
    eos = token_ids(raw.get("eos_token_id"))
    if eos is None or any(token >= vocab_size for token in eos):
        raise read.fail("eos_token_id", f"must be token ids below {vocab_size}, not {raw['eos_token_id']!r}")
    sample = raw.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        raise read.fail("do_sample", f"must be true or false, not {sample!r}")
    temperature = read.number("temperature", 1.0)
    if temperature < 0:
        raise read.fail("temperature", f"must be at least 0, not {temperature!r}")
    top_p = read.number("top_p", 1.0)
    if not 0 < top_p <= 1:
        raise read.fail("top_p", f"must be above 0 and at most 1, not {top_p!r}")
    return SamplingDefaults(
        temperature=0.0 if sample is False else temperature,
        top_k=read.integer("top_k", 0) if raw.get("top_k") is not None else 0,
        top_p=top_p,
        stop_tokens=tuple(dict.fromkeys(eos_token_ids + eos)),
    )
