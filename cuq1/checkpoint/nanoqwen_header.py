"""The header of a .nanoqwen file, and where its dimensions place every tensor: NANOQWEN.md, in code."""

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from cuq1.checkpoint.int4 import CODES_A_WORD, GROUP, padded
from cuq1.config_qwen2 import HEAD_DIMS, Qwen2Config
from cuq1.errors import CheckpointError

MAGIC = b"NANOQWEN"
VERSION = 1
LAYOUT = 1
HEADER_BYTES = 256
ALIGNMENT = 128
CHUNK_BYTES = 1 << 20
CRC_BYTES = 4

# Slots of the header, in their order.
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

BIAS, TIED, INT4_HEAD = 1, 2, 4

_HEADER = struct.Struct("<8s12I2d3Q10Q72sI")  # and header_crc
_LARGEST = 2**31 - 1
_HALF, _WORD = np.dtype("<f2"), np.dtype("<u4")

# The header's dimensions, in its order, under the config's names.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_NUMBERS = ("rope_theta", "rms_norm_eps")


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
    """The dimensions that a header holds, under the names of Qwen2Config."""

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
        values = {key: getattr(config, key) for key in (*_SIZES, *_NUMBERS)}
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


@dataclass(frozen=True)
class Header:
    """A header whose offsets follow from `dims` and from the files' lengths, one for each of FILES (0: not there)."""

    dims: Dims
    lengths: tuple[int, ...]

    @property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """Offset and length of each of FILES; (0, 0) for those that are not there."""
        slots, position = [], HEADER_BYTES
        for length in self.lengths:
            slots.append((position, length) if length else (0, 0))
            position = aligned(position + length)
        return tuple(slots)

    @property
    def tensors_offset(self) -> int:
        return HEADER_BYTES + sum(map(aligned, self.lengths))

    @property
    def checksums_offset(self) -> int:
        return self.tensors_offset + self.dims.tensor_bytes()

    @property
    def chunks(self) -> int:
        return -(-(self.checksums_offset - HEADER_BYTES) // CHUNK_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.checksums_offset + CRC_BYTES * self.chunks

    def encode(self, checksums_crc: int) -> bytes:
        """The header's 256 bytes."""
        dims = self.dims
        raw = _HEADER.pack(
            MAGIC,
            VERSION,
            LAYOUT,
            GROUP,
            dims.flags,
            *(getattr(dims, key) for key in (*_SIZES, *_NUMBERS)),
            *self._positions(),
            bytes(72),
            checksums_crc,
        )
        return raw + zlib.crc32(raw).to_bytes(CRC_BYTES, "little")

    def _positions(self) -> tuple[int, ...]:
        slots = [number for slot in self.slots for number in slot]
        return (self.file_bytes, self.tensors_offset, self.checksums_offset, *slots)


def decode_header(raw: bytes, file_bytes: int, where: str) -> tuple[Header, int]:
    """The header in a file's first 256 bytes (fewer in a shorter file), and the checksums' CRC-32.

    Raises CheckpointError, with `where` naming the file of `file_bytes` bytes, unless every number is one that this
    version defines, and dimensions, offsets and lengths agree with each other and with the file.
    """
    if raw.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{where} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
    if not raw or raw[:8] != MAGIC[: len(raw)]:
        raise CheckpointError(
            f"{where} is not a .nanoqwen file, which begins with {MAGIC.decode()}: make one with python -m cuq1.pack"
        )
    if len(raw) < HEADER_BYTES:
        raise CheckpointError(
            f"{where} is truncated: it has {file_bytes} bytes, less than the {HEADER_BYTES} of a header; "
            "copy the file again"
        )
    fields = _HEADER.unpack_from(raw)
    for name, value, only in zip(
        ("version", "layout", "group size"), fields[1:4], (VERSION, LAYOUT, GROUP), strict=True
    ):
        if value != only:
            raise CheckpointError(
                f"{where} has {name} {value}, and only {only} is read here: pack it again with python -m cuq1.pack"
            )
    if zlib.crc32(raw[: _HEADER.size]).to_bytes(CRC_BYTES, "little") != raw[_HEADER.size : HEADER_BYTES]:
        _damaged(where, "its header does not have its checksum")
    flags, numbers, positions, reserved, checksums_crc = fields[4], fields[5:15], fields[15:28], fields[28], fields[29]
    if flags & ~(BIAS | TIED | INT4_HEAD) or not flags & BIAS:
        _damaged(where, f"its flags are {flags:#x}, which this version does not define")
    if any(reserved):
        _damaged(where, "its header's reserved bytes are not 0")
    values = dict(zip((*_SIZES, *_NUMBERS), numbers, strict=True))
    dims = Dims(**values, tie_word_embeddings=bool(flags & TIED), int4_head=bool(flags & INT4_HEAD))
    _check_dims(dims, where)
    header = Header(dims, tuple(positions[4::2]))
    _check_sizes(header, positions, file_bytes, where)
    return header, checksums_crc


def _check_dims(dims: Dims, where: str) -> None:
    for key in _SIZES:
        value = getattr(dims, key)
        if not 1 <= value <= _LARGEST:
            _damaged(where, f"its header's {key} is {value}")
    for key in _NUMBERS:
        value = getattr(dims, key)
        if not (math.isfinite(value) and value > 0):
            _damaged(where, f"its header's {key} is {value}")
    if dims.head_dim not in HEAD_DIMS:
        _damaged(where, f"its header's head_dim is {dims.head_dim}, not {' or '.join(map(str, HEAD_DIMS))}")
    if dims.num_attention_heads * dims.head_dim != dims.hidden_size:
        _damaged(
            where,
            f"its header's {dims.num_attention_heads} heads of {dims.head_dim} are not its hidden_size "
            f"{dims.hidden_size}",
        )
    if dims.num_attention_heads % dims.num_key_value_heads:
        _damaged(
            where,
            f"its header's {dims.num_attention_heads} heads are no multiple of its {dims.num_key_value_heads} KV heads",
        )


def _check_sizes(header: Header, positions: tuple[int, ...], file_bytes: int, where: str) -> None:
    if not header.lengths[0]:
        _damaged(where, f"it holds no {FILES[0]}")
    wanted = header.file_bytes
    if positions[0] != wanted:
        _damaged(
            where, f"its header says that it has {positions[0]} bytes, but its dimensions and files make it {wanted}"
        )
    if file_bytes < wanted:
        raise CheckpointError(
            f"{where} is truncated: its header describes {wanted} bytes, but the file has {file_bytes}; "
            "copy the file again"
        )
    if file_bytes > wanted:
        _damaged(where, f"its header describes {wanted} bytes, but the file has {file_bytes}")
    if positions != header._positions():
        _damaged(where, "its header's offsets are not those that its dimensions and files make")


def _damaged(where: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{where} is damaged: {problem}; copy the file again, or pack it again")
