"""A Qwen2 model's tensors into an arena: packed into the kernels' units in staging memory, by threads side by side.

A piece is a number of whole tiles, at most PIECE_BYTES of them; threads take parts of it. Nothing is held besides what
is staged: rows are read from the mapped file, or rounded from a folder's, as they are packed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cuq1.checkpoint.packed import PackedHalves
from cuq1.cuda.qwen2_weights import Qwen2Source
from cuq1.cuda.repack import TILE, f16_tiles, int4_units
from cuq1.cuda.weights import Tensor
from cuq1.cuda.weights_load import PIECE_BYTES, Arena, Bytes, Progress

_THREADS = 8
_TASK_TILES = 16  # of a thread at once: a few megabytes


@dataclass(frozen=True)
class _Rows:
    """A tensor in the making. write(out, first, last): items first .. last - 1 of `count` into uint8 [.., bytes]."""

    tensor: Tensor
    write: Callable[[Bytes, int, int], None]

    @property
    def count(self) -> int:
        return self.tensor.shape[0]

    @property
    def bytes(self) -> int:
        """Of an item: a tile, a row, or an element."""
        return self.tensor.nbytes // self.count


def load_qwen2(source: Qwen2Source, arena: Arena, progress: Progress | None = None) -> None:
    """Fill an arena of source.layout.nbytes; `progress(done, layers)` is called after each layer.

    Raises CheckpointError, naming the tensor, for values that are not finite or do not fit.
    """
    threads = min(_THREADS, os.cpu_count() or 1)
    written: set[str] = set()
    layers = source.layout.config.num_hidden_layers
    with ThreadPoolExecutor(threads) as pool:

        def put(rows: _Rows) -> None:
            _put(rows, arena, pool, threads)
            written.add(rows.tensor.name)

        put(_halves(source, "embed", "embed_tokens"))
        for layer in range(layers):
            for one in _layer(source, f"layers.{layer}."):
                put(one)
            if progress is not None:
                arena.report()  # the last layer's copies included
                progress(layer + 1, layers)
        put(_halves(source, "norm", "norm"))
        put(_units(source, "lm_head", ["lm_head"]) if source.packed.int4_head else _head(source))
    arena.report()
    missing = source.layout.tensors.keys() - written
    if missing:
        raise AssertionError(f"{', '.join(sorted(missing))} were not written")


def _put(rows: _Rows, arena: Arena, pool: ThreadPoolExecutor, threads: int) -> None:
    height = max(1, PIECE_BYTES // rows.bytes)
    for top in range(0, rows.count, height):
        count = min(height, rows.count - top)
        staged = arena.stage(count * rows.bytes).reshape(count, rows.bytes)
        step = max(_TASK_TILES, -(-count // (4 * threads)))
        starts = range(0, count, step)

        def write(start: int, staged: Bytes = staged, top: int = top, step: int = step, count: int = count) -> None:
            end = min(start + step, count)
            rows.write(staged[start:end], top + start, top + end)

        list(pool.map(write, starts))
        arena.put(rows.tensor.offset + top * rows.bytes, count * rows.bytes)


def _layer(source: Qwen2Source, prefix: str) -> Iterator[_Rows]:
    def name(part: str) -> str:
        return f"{prefix}{part}"

    yield _halves(source, name("input_norm"), name("input_norm"))
    yield _stacked(source, name("qkv"), [name(part) for part in "qkv"])
    yield _biases(source, name("qkv_bias"), [name(f"{part}.bias") for part in "qkv"])
    yield _units(source, name("o"), [name("o")])
    yield _halves(source, name("post_norm"), name("post_norm"))
    yield _units(source, name("gate_up"), [name("gate"), name("up")])
    yield _units(source, name("down"), [name("down")])


def _units(source: Qwen2Source, target: str, names: Sequence[str]) -> _Rows:
    """Tiles that take 16 / len(names) rows of each matrix, the same ones."""
    matrices = [source.packed.matrix(name) for name in names]
    tensor, share = source.layout.tensors[target], TILE // len(names)

    def write(out: Bytes, first: int, last: int) -> None:
        read = [matrix.read(min(first * share, matrix.rows), min(last * share, matrix.rows)) for matrix in matrices]
        int4_units(read, last - first, out.reshape(last - first, *tensor.shape[1:]))

    return _Rows(tensor, write)


def _stacked(source: Qwen2Source, target: str, names: Sequence[str]) -> _Rows:
    """Matrices whose rows follow one another; each has whole tiles, as heads have."""
    matrices = [source.packed.matrix(name) for name in names]
    tensor = source.layout.tensors[target]

    def write(out: Bytes, first: int, last: int) -> None:
        begin = 0
        for matrix in matrices:
            end = begin + matrix.rows // TILE
            low, high = max(first, begin), min(last, end)
            if low < high:
                part = out[low - first : high - first].reshape(high - low, *tensor.shape[1:])
                int4_units([matrix.read((low - begin) * TILE, (high - begin) * TILE)], high - low, part)
            begin = end

    return _Rows(tensor, write)


def _halves(source: Qwen2Source, target: str, name: str) -> _Rows:
    return _copied(source.layout.tensors[target], [source.packed.halves(name)])


def _biases(source: Qwen2Source, target: str, names: Sequence[str]) -> _Rows:
    return _copied(source.layout.tensors[target], [source.packed.halves(name) for name in names])


def _copied(tensor: Tensor, parts: Sequence[PackedHalves]) -> _Rows:
    """Tensors of halves, one behind the other."""

    def write(out: Bytes, first: int, last: int) -> None:
        begin = 0
        for part in parts:
            end = begin + part.shape[0]
            low, high = max(first, begin), min(last, end)
            if low < high:
                values = part.read(low - begin, high - begin).reshape(high - low, -1)
                out[low - first : high - first].view(np.float16)[...] = values
            begin = end

    return _Rows(tensor, write)


def _head(source: Qwen2Source) -> _Rows:
    """The logits' matrix as chunks of halves, rows and columns padded with zeros."""
    tensor, matrix = source.layout.tensors["lm_head"], source.packed.halves("lm_head")
    rows, cols = matrix.shape

    def write(out: Bytes, first: int, last: int) -> None:
        values = np.zeros(((last - first) * TILE, tensor.shape[1] * TILE), np.float16)
        found = matrix.read(first * TILE, min(last * TILE, rows))
        values[: len(found), :cols] = found
        out[...] = f16_tiles(values).reshape(out.shape)

    return _Rows(tensor, write)
