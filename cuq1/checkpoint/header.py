"""The safetensors header: which bytes of a file hold which tensor.

A file is an 8-byte little-endian length, that many bytes of JSON, then the
tensors' bytes. The JSON maps a name to {dtype, shape, data_offsets}, offsets
counted from the end of the header. Everything is checked here, so that later
code may slice the file without looking.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from cuq1.config import unique_keys
from cuq1.errors import CheckpointError

LENGTH_BYTES = 8
# The format's own bound; a longer header is a damaged length, and would be read into memory.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSION = 2**63 - 1
MAX_RANK = 8

DTYPE_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "C64": 64,
    "I64": 64,
    "U64": 64,
    "I32": 32,
    "U32": 32,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}

_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: dtype as the header spells it, shape, and its bytes [begin, end) counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """The length of the JSON that follows `prefix`, the file's first 8 bytes (fewer in a shorter file)."""
    if prefix.startswith(b"version "):
        raise CheckpointError(f"{where} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(
            f"{where} is truncated: it has {file_bytes} bytes, less than the {LENGTH_BYTES} of a safetensors "
            "length field; copy the file again"
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where} is not a safetensors file, or is damaged: its header would be {length} bytes long; "
            "copy the file again"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{where} is truncated: its header ends at byte {LENGTH_BYTES + length}, but the file has "
            f"{file_bytes} bytes; copy the file again"
        )
    return length


def parse_header(raw: bytes, file_bytes: int, where: str) -> dict[str, Entry]:
    """The entries of a header's JSON, `raw`, in a file of `file_bytes` bytes.

    Raises CheckpointError, with `where` naming the file, unless the JSON is well formed and the
    tensors tile the rest of the file exactly: no overlap, no hole, nothing missing or left at its end.
    """
    try:
        root = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        _damaged(where, f"its header is not valid JSON ({error})")
    if not isinstance(root, dict):
        _damaged(where, "its header is not a JSON object")
    metadata = root.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _damaged(where, "__metadata__ is not an object of strings")
    start = LENGTH_BYTES + len(raw)
    entries = {name: _entry(name, fields, start, where) for name, fields in root.items()}
    _check_tiling(entries.items(), start, file_bytes, where)
    return entries


def _damaged(where: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{where} is damaged: {problem}; copy the file again") from None


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_DIMENSION


def _entry(name: str, fields: Any, start: int, where: str) -> Entry:
    label = f"tensor {name[:200]!r}"
    if not isinstance(fields, dict) or fields.keys() != _ENTRY_KEYS:
        _damaged(where, f"{label} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _damaged(where, f"{label} has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_whole, shape)):
        _damaged(where, f"{label} has a shape that is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        _damaged(where, f"{label} has data_offsets that are not two positions")
    begin, end = offsets
    if (end - begin) * 8 != prod(shape) * DTYPE_BITS[dtype]:  # in bits: an F4 or F6 tensor need not fill whole bytes
        _damaged(where, f"{label}, {dtype} {shape}, does not fit its data_offsets {offsets}")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _check_tiling(items: Iterable[tuple[str, Entry]], start: int, file_bytes: int, where: str) -> None:
    position = start
    for name, entry in sorted(items, key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            what = "overlaps another" if entry.begin < position else "leaves a hole before it"
            _damaged(where, f"tensor {name[:200]!r} {what}, at byte {entry.begin} of the file")
        position = entry.end
    if position > file_bytes:
        raise CheckpointError(
            f"{where} is truncated: its header describes {position} bytes, but the file has {file_bytes}; "
            "copy the file again"
        )
    if position < file_bytes:
        _damaged(where, f"its header describes {position} bytes, but the file has {file_bytes}")
