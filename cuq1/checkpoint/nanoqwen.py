"""Reading a .nanoqwen file (see NANOQWEN.md): mapped, and checked as a whole before anything of it is used."""

import mmap
import os
import stat
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from cuq1.checkpoint import int4
from cuq1.checkpoint.nanoqwen_dims import Dims, Place
from cuq1.checkpoint.nanoqwen_header import CHUNK_BYTES, FILES, HEADER_BYTES, MAGIC, Header, decode_header
from cuq1.config import is_present, parse_json
from cuq1.config_qwen2 import Qwen2Config, parse_qwen2
from cuq1.errors import CheckpointError

SUFFIX = ".nanoqwen"

Half = npt.NDArray[np.float16]

# Checksums are limited by memory, which a few threads exhaust.
_THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Int4Linear:
    """A linear [rows, cols] in INT4, as views of the mapped file.

    words: uint32 [rows, up(cols) / 8], scales: float16 [rows, up(cols) / 128]; up() rounds to whole groups of 128.
    """

    words: int4.Words
    scales: int4.Scales
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.words), self.cols

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    def dequantise(self) -> int4.Float32:
        """The values, float32 [rows, cols]; each is exactly code x scale."""
        return int4.dequantise(self.words, self.scales, self.cols)


@dataclass(frozen=True, slots=True, eq=False)
class NanoqwenLayer:
    """One decoder layer; norms and biases are float16 views [elements]."""

    input_norm: Half
    q: Int4Linear
    k: Int4Linear
    v: Int4Linear
    q_bias: Half
    k_bias: Half
    v_bias: Half
    o: Int4Linear
    post_norm: Half
    gate: Int4Linear
    up: Int4Linear
    down: Int4Linear


@dataclass(frozen=True, eq=False)
class Nanoqwen:
    """A .nanoqwen file whose every byte has been checked; get it from `Nanoqwen.open`.

    files: the bytes of those of FILES that the file holds, by name. places: each tensor's place, in the file's order.
    The mapping lives as long as a view of it does. The file must not shrink meanwhile.
    """

    path: Path
    config: Qwen2Config
    header: Header
    files: Mapping[str, bytes]
    places: Mapping[str, Place]
    _bytes: npt.NDArray[np.uint8]

    @classmethod
    def open(cls, path: str | Path) -> "Nanoqwen":
        """Map a file and check it: magic, version, layout, dimensions, sizes, checksums, and its config.json.

        Raises CheckpointError for a file that is not what its header says or has been damaged, ConfigError for a
        model that is not computed.
        """
        path = Path(path)
        content, header, checksums_crc = _map(path)
        _check_sums(content, header, checksums_crc, str(path))
        files = {
            name: bytes(content[offset : offset + length])
            for name, (offset, length) in zip(FILES, header.slots, strict=True)
            if length
        }
        config = _config(files, header.dims, str(path))
        places = MappingProxyType(header.dims.places(header.tensors_offset))
        return cls(path, config, header, MappingProxyType(files), places, np.frombuffer(content, np.uint8))

    @property
    def int4_head(self) -> bool:
        return self.header.dims.int4_head

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of the tensor that NANOQWEN.md calls `name`, with its layer: "layers.0.q.words"."""
        place = self.places[name]
        return self._bytes[place.offset : place.end].view(place.dtype).reshape(place.shape)

    @property
    def embed_tokens(self) -> Half:
        """[vocab_size, hidden_size]."""
        return self.tensor("embed_tokens")

    @property
    def norm(self) -> Half:
        """[hidden_size]."""
        return self.tensor("norm")

    @property
    def lm_head(self) -> Half | Int4Linear:
        """The logits' matrix [vocab_size, hidden_size], which may be the embedding."""
        if self.int4_head:
            return self._linear("lm_head", self.config.hidden_size)
        return self.embed_tokens if self.config.tie_word_embeddings else self.tensor("lm_head")

    def layer(self, number: int) -> NanoqwenLayer:
        """One layer's tensors."""
        prefix, config = f"layers.{number}.", self.config
        return NanoqwenLayer(
            input_norm=self.tensor(f"{prefix}input_norm"),
            q=self._linear(f"{prefix}q", config.hidden_size),
            k=self._linear(f"{prefix}k", config.hidden_size),
            v=self._linear(f"{prefix}v", config.hidden_size),
            q_bias=self.tensor(f"{prefix}q.bias"),
            k_bias=self.tensor(f"{prefix}k.bias"),
            v_bias=self.tensor(f"{prefix}v.bias"),
            o=self._linear(f"{prefix}o", config.q_size),
            post_norm=self.tensor(f"{prefix}post_norm"),
            gate=self._linear(f"{prefix}gate", config.hidden_size),
            up=self._linear(f"{prefix}up", config.hidden_size),
            down=self._linear(f"{prefix}down", config.intermediate_size),
        )

    def _linear(self, name: str, cols: int) -> Int4Linear:
        return Int4Linear(self.tensor(f"{name}.words"), self.tensor(f"{name}.scales"), cols)


def is_nanoqwen(path: str | Path) -> bool:
    """Whether a path is to be read as a .nanoqwen file: by its name, or because it is a file and not a folder."""
    return Path(path).suffix == SUFFIX or Path(path).is_file()


def _map(path: Path) -> tuple[mmap.mmap, Header, int]:
    """The mapped file, its header and the checksums' CRC-32."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # to open one would wait for who writes
            raise CheckpointError(f"{path} is a pipe, and a packed model is mapped: name a file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(HEADER_BYTES)
            if path.suffix != SUFFIX and not raw.startswith(MAGIC) and is_present(path.parent / "config.json"):
                raise CheckpointError(f"{path} is one file of a checkpoint: point to its folder, {path.parent}")
            header, checksums_crc = decode_header(raw, size, str(path))
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), header, checksums_crc
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: make it with python -m cuq1.pack") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        problem = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{str(path)!r} cannot be read ({problem}): check the path and its permissions") from None


def _check_sums(content: mmap.mmap, header: Header, checksums_crc: int, where: str) -> None:
    """Refuse a file in which a byte behind the header has changed."""
    table = content[header.checksums_offset : header.file_bytes]
    if zlib.crc32(table) != checksums_crc:
        raise CheckpointError(f"{where} is damaged: its table of checksums has changed; copy the file again")
    sums = np.frombuffer(table, "<u4").tolist()

    def first_wrong(chunks: range) -> int | None:
        with memoryview(content) as view:
            for chunk in chunks:
                start = HEADER_BYTES + chunk * CHUNK_BYTES
                with view[start : min(start + CHUNK_BYTES, header.checksums_offset)] as piece:
                    if zlib.crc32(piece) != sums[chunk]:
                        return chunk
        return None

    threads = min(_THREADS, os.cpu_count() or 1)
    step = max(1, -(-len(sums) // threads))
    parts = [range(start, min(start + step, len(sums))) for start in range(0, len(sums), step)]
    if len(parts) == 1:
        results = [first_wrong(parts[0])]
    else:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(first_wrong, parts))
    wrong = next((chunk for chunk in results if chunk is not None), None)
    if wrong is not None:
        start = HEADER_BYTES + wrong * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, header.checksums_offset)
        raise CheckpointError(
            f"{where} is damaged: its bytes {start} to {end - 1} do not have their checksum; copy the file again"
        )


def _config(files: Mapping[str, bytes], dims: Dims, where: str) -> Qwen2Config:
    raw = {
        name: parse_json(files[name], f"{where}: {name}")
        for name in ("config.json", "generation_config.json")
        if name in files
    }
    config = parse_qwen2(
        raw["config.json"],
        raw.get("generation_config.json"),
        f"{where}: config.json",
        f"{where}: generation_config.json",
    )
    said = Dims.of(config, dims.int4_head)
    for field in fields(Dims):
        inside, outside = getattr(said, field.name), getattr(dims, field.name)
        if inside != outside:
            raise CheckpointError(
                f"{where}: its header's {field.name} is {outside!r}, but the config.json inside says {inside!r}: "
                "pack it again"
            )
    return config
