"""Writing tensors as safetensors files, piece by piece, so that memory stays bounded whatever their size."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuq1.errors import ConfigError
from tools.checkpoint_tensors import DTYPES, Tensor


def write_json(path: Path, value: object) -> None:
    """One indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: Path, needed: int) -> Iterator[Path]:
    """A folder to fill, which takes the name `folder`, new or empty, once the block has ended well.

    Raises ConfigError where the name is taken or the disk has not the `needed` bytes; nothing is left then, nor
    where the block raises.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder: choose another, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise ConfigError(f"{folder} needs {needed} bytes, and its disk has {free} free: choose another disk")
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_shards(shards: int, most: int) -> None:
    """ConfigError unless `shards` files can each have one of `most` tensors."""
    if not 1 <= shards <= most:
        raise ConfigError(f"shards must be from 1 to {most}, so that no file is empty, not {shards}")


def write_weights(folder: Path, tensors: list[Tensor], shards: int) -> None:
    """model.safetensors, or `shards` files of about equal size and their index; at most one file a tensor."""
    if shards == 1:
        _write_file(folder / "model.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for number, part in enumerate(_divide(tensors, shards), 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        _write_file(folder / name, part)
        weight_map |= {tensor.name: name for tensor in part}
    total = sum(tensor.nbytes for tensor in tensors)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _divide(tensors: list[Tensor], shards: int) -> Iterator[list[Tensor]]:
    """Consecutive parts of about equal bytes, none of them empty."""
    left, start = sum(tensor.nbytes for tensor in tensors), 0
    for remaining in range(shards, 0, -1):
        stop, size = start + 1, tensors[start].nbytes
        while len(tensors) - stop > remaining - 1 and size + tensors[stop].nbytes / 2 <= left / remaining:
            size += tensors[stop].nbytes
            stop += 1
        if remaining == 1:
            stop = len(tensors)
        yield tensors[start:stop]
        left, start = left - size, stop


def _write_file(path: Path, tensors: list[Tensor]) -> None:
    # widest elements first: every tensor is then aligned for its dtype
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in ordered:
        offsets = [position, position + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            for piece in tensor.pieces():
                file.write(piece.tobytes())
        if file.tell() != 8 + len(text) + position:
            raise AssertionError(
                f"{path}: wrote {file.tell()} bytes, but the header describes {8 + len(text) + position}"
            )
