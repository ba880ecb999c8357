"""Where the dimensions in a .nanoqwen header place every tensor: NANOQWEN.md's table, in code."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuq1.checkpoint.int4 import CODES_A_WORD, GROUP, padded
from cuq1.config_qwen2 import Qwen2Config

ALIGNMENT = 128

BIAS, TIED, INT4_HEAD = 1, 2, 4

_HALF, _WORD = np.dtype("<f2"), np.dtype("<u4")

# The header's dimensions, in its order, under the config's names.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
NUMBERS = ("rope_theta", "rms_norm_eps")


def aligned(position: int) -> int:
    """The first multiple of ALIGNMENT that is not below `position`."""
    return -(-position // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor's bytes [offset, offset + nbytes) of the file, its dtype (little-endian) and shape."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


_Shapes = list[tuple[str, np.dtype[Any], tuple[int, ...]]]


@dataclass(frozen=True)
class Dims:
    """The dimensions that a header holds, under the names of Qwen2Config.

    Fields of their own: a header is decoded before the config.json inside, to be compared with it, and the format stays
    as it is where the config changes.
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
    int4_head: bool

    @classmethod
    def of(cls, config: Qwen2Config, int4_head: bool) -> "Dims":
        values = {key: getattr(config, key) for key in (*SIZES, *NUMBERS)}
        return cls(**values, tie_word_embeddings=config.tie_word_embeddings, int4_head=int4_head)

    @property
    def flags(self) -> int:
        return BIAS | TIED * self.tie_word_embeddings | INT4_HEAD * self.int4_head

    def places(self, start: int) -> dict[str, Place]:
        """Every tensor's place by name, in the file's order; the first begins at `start`."""
        result = {}
        for name, dtype, shape in self._all():
            result[name] = Place(start, dtype, shape)
            start = aligned(result[name].end)
        return result

    def tensor_bytes(self) -> int:
        """From the first tensor to the end of the last one's alignment, however many layers there are."""
        layers = self.num_hidden_layers * _space(self._layer(""))
        return _space([self._embedding()]) + layers + _space(self._last())

    def _all(self) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        yield self._embedding()
        for layer in range(self.num_hidden_layers):
            yield from self._layer(f"layers.{layer}.")
        yield from self._last()

    def _embedding(self) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
        return "embed_tokens", _HALF, (self.vocab_size, self.hidden_size)

    def _layer(self, prefix: str) -> _Shapes:
        hidden, width = self.hidden_size, self.intermediate_size
        attention = [
            (f"{prefix}q", self.num_attention_heads * self.head_dim),
            (f"{prefix}k", self.num_key_value_heads * self.head_dim),
            (f"{prefix}v", self.num_key_value_heads * self.head_dim),
        ]
        gate_up = [(f"{prefix}gate", width), (f"{prefix}up", width)]
        return [
            (f"{prefix}input_norm", _HALF, (hidden,)),
            *(_words(name, rows, hidden) for name, rows in attention),
            *(_scales(name, rows, hidden) for name, rows in attention),
            *((f"{name}.bias", _HALF, (rows,)) for name, rows in attention),
            _words(f"{prefix}o", hidden, attention[0][1]),
            _scales(f"{prefix}o", hidden, attention[0][1]),
            (f"{prefix}post_norm", _HALF, (hidden,)),
            *(_words(name, rows, hidden) for name, rows in gate_up),
            *(_scales(name, rows, hidden) for name, rows in gate_up),
            _words(f"{prefix}down", hidden, width),
            _scales(f"{prefix}down", hidden, width),
        ]

    def _last(self) -> _Shapes:
        tensors: _Shapes = [("norm", _HALF, (self.hidden_size,))]
        if self.int4_head:
            size = self.vocab_size, self.hidden_size
            tensors += [_words("lm_head", *size), _scales("lm_head", *size)]
        elif not self.tie_word_embeddings:
            tensors.append(("lm_head", _HALF, (self.vocab_size, self.hidden_size)))
        return tensors


def _words(name: str, rows: int, cols: int) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    return f"{name}.words", _WORD, (rows, padded(cols) // CODES_A_WORD)


def _scales(name: str, rows: int, cols: int) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    return f"{name}.scales", _HALF, (rows, padded(cols) // GROUP)


def _space(tensors: _Shapes) -> int:
    return sum(aligned(math.prod(shape) * dtype.itemsize) for _, dtype, shape in tensors)
