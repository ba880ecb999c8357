"""A Qwen2 model's weights as FP32 arrays, from a Hugging Face folder or a .nanoqwen file."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from cuq1.checkpoint.int4 import check_finite
from cuq1.checkpoint.nanoqwen import Int4Linear, Nanoqwen
from cuq1.checkpoint.qwen2 import Qwen2Model
from cuq1.checkpoint.qwen2_folder import EMBEDDING, NORM, Qwen2Folder
from cuq1.config_qwen2 import Qwen2Config
from cuq1.errors import DeviceError
from cuq1.reference.ops import F32

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Qwen2Layer:
    """One decoder layer.

    Norms: [hidden]; q: [heads * head_dim, hidden] and its bias; k and v: [kv_heads * head_dim, hidden] and their
    biases; o: [hidden, heads * head_dim]; gate and up: [width, hidden]; down: [hidden, width].
    """

    input_norm: F32
    q: F32
    k: F32
    v: F32
    q_bias: F32
    k_bias: F32
    v_bias: F32
    o: F32
    post_norm: F32
    gate: F32
    up: F32
    down: F32


@dataclass(frozen=True)
class Qwen2Weights:
    """embed_tokens and lm_head: [vocab, hidden], one array where they are tied; norm: [hidden]."""

    embed_tokens: F32
    layers: list[Qwen2Layer]
    norm: F32
    lm_head: F32


def load_qwen2(model: Qwen2Model, progress: Progress | None = None) -> Qwen2Weights:
    """The weights; `progress(done, layers)` is called after each layer.

    Raises CheckpointError for a value that is not finite, DeviceError where they do not fit into memory.
    """
    _refuse_too_large(model.config)
    if isinstance(model, Nanoqwen):
        return _from_file(model, progress)
    return _from_folder(model, progress)


def _from_folder(folder: Qwen2Folder, progress: Progress | None) -> Qwen2Weights:
    def layer(number: int) -> Qwen2Layer:
        prefix = f"model.layers.{number}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return Qwen2Layer(
            input_norm=_read(folder, f"{prefix}input_layernorm.weight"),
            q=_read(folder, f"{attention}q_proj.weight"),
            k=_read(folder, f"{attention}k_proj.weight"),
            v=_read(folder, f"{attention}v_proj.weight"),
            q_bias=_read(folder, f"{attention}q_proj.bias"),
            k_bias=_read(folder, f"{attention}k_proj.bias"),
            v_bias=_read(folder, f"{attention}v_proj.bias"),
            o=_read(folder, f"{attention}o_proj.weight"),
            post_norm=_read(folder, f"{prefix}post_attention_layernorm.weight"),
            gate=_read(folder, f"{mlp}gate_proj.weight"),
            up=_read(folder, f"{mlp}up_proj.weight"),
            down=_read(folder, f"{mlp}down_proj.weight"),
        )

    embedding = _read(folder, EMBEDDING)
    return Qwen2Weights(
        embed_tokens=embedding,
        layers=_layers(folder.config, layer, progress),
        norm=_read(folder, NORM),
        lm_head=embedding if folder.head == EMBEDDING else _read(folder, folder.head),
    )


def _read(folder: Qwen2Folder, name: str) -> F32:
    out = np.empty(folder.index.entry(name).shape, np.float32)
    row = 0
    for piece in folder.pieces(name):
        out[row : row + len(piece)] = piece
        row += len(piece)
    return out


def _from_file(file: Nanoqwen, progress: Progress | None) -> Qwen2Weights:
    def values(tensor: Int4Linear | NDArray[np.float16], name: str) -> F32:
        out = tensor.dequantise() if isinstance(tensor, Int4Linear) else tensor.astype(np.float32)
        check_finite(out, f"{file.path}: {name}")
        return out

    def layer(number: int) -> Qwen2Layer:
        stored = file.layer(number)
        names = [field.name for field in fields(Qwen2Layer)]  # both classes have the same
        return Qwen2Layer(**{name: values(getattr(stored, name), f"layers.{number}.{name}") for name in names})

    embedding = values(file.embed_tokens, "embed_tokens")
    tied = file.config.tie_word_embeddings and not file.int4_head
    return Qwen2Weights(
        embed_tokens=embedding,
        layers=_layers(file.config, layer, progress),
        norm=values(file.norm, "norm"),
        lm_head=embedding if tied else values(file.lm_head, "lm_head"),
    )


def _layers(config: Qwen2Config, load: Callable[[int], Qwen2Layer], progress: Progress | None) -> list[Qwen2Layer]:
    layers = []
    for number in range(config.num_hidden_layers):
        layers.append(load(number))
        if progress is not None:
            progress(number + 1, config.num_hidden_layers)
    return layers


def _refuse_too_large(config: Qwen2Config) -> None:
    """DeviceError where the FP32 weights cannot fit into this machine's memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return  # not every system says
    rows = 2 * (config.q_size + config.kv_size) + 3 * config.intermediate_size  # of hidden_size, or its transpose
    vocab = config.vocab_size * (1 if config.tie_word_embeddings else 2)
    needed = 4 * config.hidden_size * (config.num_hidden_layers * rows + vocab)
    if needed > memory:
        raise DeviceError(
            f"the CPU engine needs {needed / 1e9:.0f} GB for this model's weights in FP32, and this machine has "
            f"{memory / 1e9:.0f} GB: use a smaller model, or a machine with more memory"
        )
