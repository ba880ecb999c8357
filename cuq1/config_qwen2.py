"""The configuration of the Qwen2 architecture, which is that of every Qwen2.5-Coder.

Dense layers of grouped-query attention with biases on Q, K and V and RoPE over
the whole head, then SwiGLU. Anything else that a config.json may ask for is
refused here, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuq1.config import (
    FULL,
    Reader,
    SamplingDefaults,
    is_present,
    parse_sampling_defaults,
    read_json,
    refuse_other_models,
    refuse_other_values,
    token_ids,
)

MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"
HEAD_DIMS = (64, 128)

# Keys that change the computation when they are set to anything but these values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (None, True),
    "qkv_bias": (None, True),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "use_mrope": (None, False),
    "qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "rotary_dim": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleave": (None, False),
    "use_alibi": (None, False),
    "use_logn_attn": (None, False),
    "use_dynamic_ntk": (None, False),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "softmax_scale": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "num_experts": (None, 0),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class Qwen2Config:
    """A Qwen2 model; sizes are in elements.

    num_attention_heads x head_dim is hidden_size; head_dim is 64 or 128. With tie_word_embeddings the logits'
    matrix is the embedding. eos_token_ids are config.json's; `sampling` holds generation_config.json's defaults, and
    its stop_tokens are those of both files.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults

    @property
    def q_size(self) -> int:
        """Rows of q_proj, and columns of o_proj."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.num_key_value_heads * self.head_dim

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self.sampling.stop_tokens


def _rope_theta(read: Reader) -> float:
    """RoPE's base, which newer files keep in rope_parameters; any scaling is refused."""
    theta = read.raw.get("rope_theta")
    base = None if theta is None else read.positive("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):  # the older and the newer spelling
        scaling = read.raw.get(key)
        if scaling is None:
            continue
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else scaling
        if kind != "default":
            raise read.fail(key, f"has type {kind!r}, and only the default (unscaled) RoPE is computed")
        inner = Reader(scaling, f"{read.where}: {key}")
        refuse_other_values(inner, {"partial_rotary_factor": (None, 1, 1.0), "mrope_section": (None,)})
        if base is None and scaling.get("rope_theta") is not None:
            base = inner.positive("rope_theta")
        elif base is not None:
            inner.same("rope_theta", scaling.get("rope_theta"), base, "rope_theta")
    return read.positive("rope_theta") if base is None else base


def _head_dim(read: Reader, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise read.fail("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = hidden // heads
    read.same("head_dim", read.raw.get("head_dim"), head_dim, "hidden_size / num_attention_heads")
    if head_dim not in HEAD_DIMS:
        raise read.fail(
            "hidden_size",
            f"{hidden} makes heads of {head_dim} for num_attention_heads {heads}, "
            f"and only heads of {' or '.join(map(str, HEAD_DIMS))} are computed",
        )
    return head_dim


def _tied(read: Reader) -> bool:
    tied = read.raw.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise read.fail("tie_word_embeddings", f"must be true or false, not {tied!r}")
    return bool(tied)


def _refuse_sliding_layers(read: Reader, layers: int) -> None:
    if read.raw.get("layer_types") is None:
        return
    types = read.strings("layer_types")
    if len(types) != layers:
        raise read.fail("layer_types", f"gives {len(types)} layers, but num_hidden_layers is {layers}")
    for kind in types:
        if kind != FULL:
            raise read.fail("layer_types", f"names {kind!r}, and only {FULL} is computed for this model")


def parse_qwen2(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    where: str = "config.json",
    generation_where: str = "generation_config.json",
) -> Qwen2Config:
    """The config of config.json's object and generation_config.json's, if there is one; `where`s name them in errors.

    Raises ConfigError for malformed values and for anything cuq1 does not compute: sliding windows in use, scaled
    RoPE, quantised weights, other head sizes.
    """
    read = Reader(raw, where)
    refuse_other_models(read, (MODEL_TYPE,), (ARCHITECTURE,))
    refuse_other_values(read, _ONLY)
    hidden, layers = read.integer("hidden_size"), read.integer("num_hidden_layers")
    heads, kv_heads = read.integer("num_attention_heads"), read.integer("num_key_value_heads")
    if heads % kv_heads:
        raise read.fail("num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {kv_heads}")
    _refuse_sliding_layers(read, layers)
    vocab = read.integer("vocab_size")
    eos = token_ids(raw.get("eos_token_id"))
    if eos is None or any(token >= vocab for token in eos):
        raise read.fail("eos_token_id", f"must be token ids below vocab_size {vocab}, not {raw.get('eos_token_id')!r}")
    bos = token_ids(raw.get("bos_token_id"))  # nothing here adds one, so it may even be outside the vocabulary
    if bos is None or len(bos) > 1:
        raise read.fail("bos_token_id", f"must be null or one token id, not {raw.get('bos_token_id')!r}")
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(read, hidden, heads),
        vocab_size=vocab,
        max_position_embeddings=read.integer("max_position_embeddings"),
        rope_theta=_rope_theta(read),
        rms_norm_eps=read.positive("rms_norm_eps"),
        tie_word_embeddings=_tied(read),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        sampling=SamplingDefaults(stop_tokens=eos)
        if generation is None
        else parse_sampling_defaults(generation, eos, vocab, generation_where),
    )


def load_qwen2_config(model_dir: str | Path) -> Qwen2Config:
    """The config of a Hugging Face folder, from its config.json and, where there is one, generation_config.json.

    Raises ConfigError as `parse_qwen2`, and for files that are missing or cannot be read.
    """
    path, generation_path = Path(model_dir) / "config.json", Path(model_dir) / "generation_config.json"
    raw = read_json(path)
    generation = read_json(generation_path) if is_present(generation_path) else None
    return parse_qwen2(raw, generation, str(path), str(generation_path))
