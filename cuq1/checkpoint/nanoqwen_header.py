"""The header of a .nanoqwen file, as NANOQWEN.md specifies it."""

import math
import struct
import zlib
from dataclasses import dataclass
from typing import NoReturn

from cuq1.checkpoint.int4 import GROUP
from cuq1.checkpoint.nanoqwen_dims import BIAS, INT4_HEAD, NUMBERS, SIZES, TIED, Dims, aligned
from cuq1.config_qwen2 import HEAD_DIMS
from cuq1.errors import CheckpointError

MAGIC = b"NANOQWEN"
VERSION = 1
LAYOUT = 1
HEADER_BYTES = 256
CHUNK_BYTES = 1 << 20
CRC_BYTES = 4

# Slots of the header, in their order.
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_HEADER = struct.Struct("<8s12I2d3Q10Q72sI")  # and header_crc
_LARGEST = 2**31 - 1


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
            *(getattr(dims, key) for key in (*SIZES, *NUMBERS)),
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
    values = dict(zip((*SIZES, *NUMBERS), numbers, strict=True))
    dims = Dims(**values, tie_word_embeddings=bool(flags & TIED), int4_head=bool(flags & INT4_HEAD))
    _check_dims(dims, where)
    header = Header(dims, tuple(positions[4::2]))
    _check_sizes(header, positions, file_bytes, where)
    return header, checksums_crc


def _check_dims(dims: Dims, where: str) -> None:
    for key in SIZES:
        value = getattr(dims, key)
        if not 1 <= value <= _LARGEST:
            _damaged(where, f"its header's {key} is {value}")
    for key in NUMBERS:
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
