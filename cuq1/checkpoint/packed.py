"""A Qwen2 model as it is packed, whichever way it is stored: rows of INT4 matrices and of halves, by name.

A .nanoqwen file has them; of a Hugging Face folder each row is rounded when it is read, exactly as cuq1.pack rounds it.
Names are those of NANOQWEN.md without their part: layers.0.q, layers.0.q.bias, embed_tokens. `lm_head` is the logits'
matrix also where that is the embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cuq1.checkpoint import int4
from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.checkpoint.qwen2_folder import EMBEDDING, NORM, Qwen2Folder
from cuq1.config_qwen2 import Qwen2Config
from cuq1.errors import CheckpointError

Half = npt.NDArray[np.float16]

_LAYER_PARTS = {
    "input_norm": "input_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}.bias": f"self_attn.{name}_proj.bias" for name in "qkv"},
    "post_norm": "post_attention_layernorm.weight",
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


@dataclass(frozen=True)
class PackedMatrix:
    """An INT4 matrix [rows, cols]. read(first, last): words and scales of those rows, as cuq1.checkpoint.int4 makes
    them; raises CheckpointError, naming the tensor, for values that are not finite or too large."""

    rows: int
    cols: int
    read: Callable[[int, int], tuple[int4.Words, int4.Scales]]


@dataclass(frozen=True)
class PackedHalves:
    """A tensor of halves. read(first, last): those of its rows, or of its elements; raises as PackedMatrix's."""

    shape: tuple[int, ...]
    read: Callable[[int, int], Half]


@dataclass(frozen=True)
class Packed:
    """int4_head: the logits' matrix is INT4. rounded: values are rounded as they are read."""

    where: str
    config: Qwen2Config
    int4_head: bool
    rounded: bool
    matrix: Callable[[str], PackedMatrix]
    halves: Callable[[str], PackedHalves]


def packed(model: Qwen2Folder | Nanoqwen) -> Packed:
    """The model's tensors, none of which is read yet."""
    return _of_file(model) if isinstance(model, Nanoqwen) else _of_folder(model)


def half(values: npt.NDArray[Any], source: str) -> Half:
    """Values as halves. Raises CheckpointError, with `source` naming the tensor, where one is not finite as such."""
    with np.errstate(over="ignore"):  # reported below, by name
        found = values.astype(np.float16)
    if not _all_finite(found):
        int4.check_finite(values, source)
        largest = np.abs(values).max()
        raise CheckpointError(f"{source} holds a value of {largest:.4g}, which exceeds FP16: use another checkpoint")
    return found


def _all_finite(values: Half) -> bool:
    return not bool((values.view(np.uint16) & 0x7C00 == 0x7C00).any())


def _checked(values: Half, source: str) -> Half:
    if not _all_finite(values):
        raise CheckpointError(f"{source} holds values that are not finite: copy the checkpoint again")
    return values


def _of_file(file: Nanoqwen) -> Packed:
    tied = file.config.tie_word_embeddings and not file.int4_head

    def matrix(name: str) -> PackedMatrix:
        words, scales = file.tensor(f"{name}.words"), file.tensor(f"{name}.scales")
        cols = _columns(file.config, name)

        def read(first: int, last: int) -> tuple[int4.Words, int4.Scales]:
            return words[first:last], _checked(scales[first:last], f"{file.path}: {name}.scales")

        return PackedMatrix(len(words), cols, read)

    def halves(name: str) -> PackedHalves:
        tensor = file.tensor("embed_tokens" if name == "lm_head" and tied else name)
        return PackedHalves(tensor.shape, lambda first, last: _checked(tensor[first:last], f"{file.path}: {name}"))

    return Packed(str(file.path), file.config, file.int4_head, False, matrix, halves)


def _of_folder(folder: Qwen2Folder) -> Packed:
    def stored(name: str) -> str:
        layer, _, part = name.removeprefix("layers.").partition(".")
        if part:
            return f"model.layers.{layer}.{_LAYER_PARTS[part]}"
        return {"embed_tokens": EMBEDDING, "norm": NORM, "lm_head": folder.head}[name]

    def matrix(name: str) -> PackedMatrix:
        weights, source = folder.tensor(stored(name)), folder.source(stored(name))

        def read(first: int, last: int) -> tuple[int4.Words, int4.Scales]:
            codes, scales = int4.quantise(weights[first:last], source)
            return int4.pack(codes), scales

        rows, cols = weights.shape
        return PackedMatrix(rows, cols, read)

    def halves(name: str) -> PackedHalves:
        tensor, source = folder.tensor(stored(name)), folder.source(stored(name))
        return PackedHalves(tensor.shape, lambda first, last: half(tensor[first:last].astype(np.float32), source))

    return Packed(str(folder.path), folder.config, False, True, matrix, halves)


def _columns(config: Qwen2Config, name: str) -> int:
    return {"o": config.q_size, "down": config.intermediate_size}.get(name.rpartition(".")[2], config.hidden_size)
