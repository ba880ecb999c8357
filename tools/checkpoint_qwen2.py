"""Random Qwen2 checkpoints: configs of the Qwen2.5-Coder family, full or scaled down, their tensors and text files.

A tensor's values depend on the seed and on its name alone.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cuq1.checkpoint.qwen2_folder import EMBEDDING, HEAD, NORM, layer_shapes
from cuq1.config_qwen2 import Qwen2Config, parse_qwen2
from cuq1.errors import ConfigError
from tools.checkpoint_tensors import DTYPES, Array, Tensor
from tools.checkpoint_writer import write_json

_PREFIX = "qwen2.5-coder-"
_TINY = "-tiny"
_PIECE = 1 << 22  # bounds memory: no more elements of a tensor are held at once
_FILE_BYTES = 4_000_000_000  # the released shards are of about this size

# The last three tokens of a vocabulary's used part: end of text, and the two that frame a chat's messages.
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_RELEASED_CONTROL = 151643
_TINY_VOCAB = 512


@dataclass(frozen=True)
class _Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool


_FAMILY = {
    "0.5b": _Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5b": _Shape(1536, 8960, 28, 12, 2, 151936, True),
    "3b": _Shape(2048, 11008, 36, 16, 2, 151936, True),
    "7b": _Shape(3584, 18944, 28, 28, 4, 152064, False),
    "14b": _Shape(5120, 13824, 48, 40, 8, 152064, False),
    "32b": _Shape(5120, 27648, 64, 40, 8, 152064, False),
}
NAMES = tuple(f"{_PREFIX}{size}{end}" for end in ("", _TINY) for size in _FAMILY)

# Words that the small tokenizer has a token for; the letters before each word's last have one, too.
_WORDS = (
    "def class return import from self for while if else elif True False None print range len int str list dict "
    "the and of to in is that not with as function value number string array index result error file line code"
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.' }}
{%- endif %}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\nYou may call these functions, described in <tools></tools>:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each call, return a JSON object in <tool_call></tool_call>.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def qwen2_config(name: str, **overrides: Any) -> dict[str, Any]:
    """The raw config.json of one of NAMES; overrides are its keys.

    The scaled-down models keep head_dim, the query heads of a KV head and tied or separate logits; they have two
    layers, a sixteenth of intermediate_size, which is then no multiple of 128, and at most two KV heads.
    """
    size = name.removeprefix(_PREFIX).removesuffix(_TINY)
    if name not in NAMES:
        raise ConfigError(f"{name!r} is none of {', '.join(NAMES)}")
    shape, tiny = _FAMILY[size], name.endswith(_TINY)
    head_dim, control = shape.hidden // shape.heads, _RELEASED_CONTROL
    if tiny:
        kv_heads = 2 if size == "32b" else 1
        heads = shape.heads // shape.kv_heads * kv_heads
        shape = _Shape(heads * head_dim, shape.intermediate // 16, 2, heads, kv_heads, _TINY_VOCAB, shape.tied)
        control = _TINY_VOCAB - 8
    context = 8192 if tiny else 32768
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": control,
        "eos_token_id": control + 2,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": context,
        "max_window_layers": shape.layers,
        "model_type": "qwen2",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": context,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
        **overrides,
    }


def qwen2_tensors(config: Qwen2Config, seed: int, dtype: str = "BF16") -> list[Tensor]:
    """Every tensor, layer by layer. Products and logits are of order 1."""
    hidden = config.hidden_size
    size = config.vocab_size, hidden
    tied = config.tie_word_embeddings
    tensors = [_normal(seed, EMBEDDING, size, dtype, hidden**-0.5 if tied else 1.0)]
    for layer in range(config.num_hidden_layers):
        for name, shape in layer_shapes(config, layer).items():
            if name.endswith("norm.weight"):
                tensors.append(_normal(seed, name, shape, dtype, 0.1, mean=1.0))
            else:
                tensors.append(_normal(seed, name, shape, dtype, shape[1] ** -0.5 if len(shape) == 2 else 0.3))
    tensors.append(_normal(seed, NORM, (hidden,), dtype, 0.1, mean=1.0))
    return tensors if tied else [*tensors, _normal(seed, HEAD, size, dtype, hidden**-0.5)]


def _normal(seed: int, name: str, shape: tuple[int, ...], dtype: str, deviation: float, mean: float = 0.0) -> Tensor:
    def pieces() -> Iterator[Array]:
        digest = hashlib.sha256(f"{seed} qwen2 {name}".encode()).digest()
        random = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))
        height = max(1, _PIECE // (shape[1] if len(shape) > 1 else 1))
        for top in range(0, shape[0], height):
            values = random.standard_normal((min(height, shape[0] - top), *shape[1:]), dtype=np.float32)
            values *= np.float32(deviation)
            values += np.float32(mean)
            yield values.astype(DTYPES[dtype])

    return Tensor(name, dtype, shape, pieces)


def default_shards(tensors: list[Tensor]) -> int:
    """As many files as keep each to about 4 GB."""
    return max(1, -(-sum(tensor.nbytes for tensor in tensors) // _FILE_BYTES))


def write_qwen2_text(folder: Path, raw: dict[str, Any]) -> None:
    """tokenizer.json, tokenizer_config.json with a chat template, and generation_config.json, none replacing another.

    The tokenizer has bytes, some words and the control tokens <|endoftext|>, <|im_start|> and <|im_end|>; most ids
    of a large vocabulary name nothing.
    """
    vocab_size = parse_qwen2(raw).vocab_size
    if vocab_size < 256 + len(_CONTROL):
        raise ConfigError(f"vocab_size {vocab_size} has no room for 256 bytes and {len(_CONTROL)} control tokens")
    control = raw["bos_token_id"] if isinstance(raw.get("bos_token_id"), int) else vocab_size - 3
    _write_new(folder / "tokenizer.json", _tokenizer(min(control, vocab_size - 3)))
    _write_new(
        folder / "tokenizer_config.json",
        {
            "bos_token": None,
            "eos_token": _CONTROL[2],
            "pad_token": _CONTROL[0],
            "tokenizer_class": "Qwen2Tokenizer",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_new(
        folder / "generation_config.json",
        {
            "bos_token_id": raw.get("bos_token_id"),
            "pad_token_id": raw.get("bos_token_id"),
            "do_sample": True,
            "eos_token_id": [
                token for token in (raw.get("eos_token_id"), raw.get("bos_token_id")) if token is not None
            ],
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
        },
    )


def _write_new(path: Path, value: object) -> None:
    if not path.exists():
        write_json(path, value)


def _tokenizer(control: int) -> dict[str, Any]:
    """Byte-level BPE whose merges spell _WORDS from the left, with and without a space in front."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [*map(chr, printable), *(chr(0x100 + order) for order in range(256 - len(printable)))]
    vocab = dict.fromkeys(alphabet)
    merges: dict[tuple[str, str], None] = {}
    # U+0120 stands for a space; words behind one come first, or their letters would be merged without it
    for word in (f"{space}{word}" for space in ("\u0120", "") for word in _WORDS.split()):
        for end in range(1, len(word)):
            pair = word[:end], word[end]
            if len(vocab) + (pair[0] + pair[1] not in vocab) <= control:
                vocab.setdefault(pair[0] + pair[1])
                merges[pair] = None
    ids = {token: order for order, token in enumerate(vocab)} | {token: control + i for i, token in enumerate(_CONTROL)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token], "content": token, **flags} for token in _CONTROL],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
