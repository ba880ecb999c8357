"""Where every tensor of a folder lies: one file, or shards with an index.

Only headers are read. The files are mapped, and a tensor is a view of the
mapping: a page is fetched when it is first used, so a rank that slices its
share reads no other bytes.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cuq1.checkpoint.header import LENGTH_BYTES, Entry, header_length, parse_header
from cuq1.config import is_present, read_json
from cuq1.errors import CheckpointError, ConfigError

SINGLE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"

# The dtypes that a model's tensors may have; others are indexed, but cannot be viewed.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


class TensorFile:
    """One mapped safetensors file; `entries` maps each name to its place.

    The mapping lives as long as a view of it does. The file must not shrink meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                length = header_length(file.read(LENGTH_BYTES), size, str(path))
                self.entries = parse_header(file.read(length), size, str(path))
                self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist: the checkpoint is incomplete, copy the file") from None
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}): check the path and its permissions"
            ) from None

    def view(self, name: str) -> npt.NDArray[Any]:
        """The tensor as a read-only array on the mapping; its dtype must be one of NUMPY_DTYPES."""
        entry = self.entries[name]
        # A header of any length is legal, so the view may be unaligned; NumPy handles that.
        return self._bytes[entry.begin : entry.end].view(NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)


@dataclass(frozen=True)
class Index:
    """The tensors of one folder by name; `names` is in the files' own order."""

    folder: Path
    files: dict[str, TensorFile]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def entry(self, name: str) -> Entry:
        return self.files[name].entries[name]

    def path(self, name: str) -> Path:
        return self.files[name].path

    def view(self, name: str) -> npt.NDArray[Any]:
        return self.files[name].view(name)


def present(path: Path) -> bool:
    """`is_present` of one of a checkpoint's files, by CheckpointError."""
    try:
        return is_present(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def open_index(folder: Path) -> Index:
    """Index a folder's model.safetensors, or the shards that model.safetensors.index.json names.

    Raises CheckpointError for files that are missing or damaged, and where the index and the
    shards disagree about which shard holds which tensor.
    """
    if not present(folder / SHARD_INDEX):
        if not present(folder / SINGLE):
            raise CheckpointError(
                f"{folder} has neither {SINGLE} nor {SHARD_INDEX}: copy the weights there, or point to their folder"
            )
        file = TensorFile(folder / SINGLE)
        return Index(folder, dict.fromkeys(file.entries, file))
    weight_map = _weight_map(folder / SHARD_INDEX)
    shards = {name: TensorFile(folder / name) for name in sorted(set(weight_map.values()))}
    if present(folder / SINGLE) and SINGLE not in shards:
        raise CheckpointError(f"{folder} has both {SINGLE} and {SHARD_INDEX}: remove the one that is out of date")
    for shard, file in shards.items():
        for name in file.entries:
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{file.path} holds {name[:200]!r}, which {SHARD_INDEX} does not place there: "
                    "copy the index and its shards from the same checkpoint"
                )
    for name, shard in weight_map.items():
        if name not in shards[shard].entries:
            raise CheckpointError(
                f"{folder / shard} lacks {name[:200]!r}, which {SHARD_INDEX} places there: "
                "copy the index and its shards from the same checkpoint"
            )
    return Index(folder, {name: shards[shard] for name, shard in weight_map.items()})


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = read_json(path).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must map tensor names to shard files: copy the file again")
    for shard in weight_map.values():
        # Shards lie beside their index: a path could reach any file of the machine.
        named = isinstance(shard, str) and shard.isprintable() and shard.endswith(".safetensors")
        if not named or Path(shard).name != shard:
            raise CheckpointError(
                f"{path}: weight_map names {str(shard)[:200]!r}, and a shard must be a .safetensors file of that folder"
            )
    return weight_map
