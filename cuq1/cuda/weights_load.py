"""From a checkpoint's mapped files into an arena: which rows go where, read once, a bounded piece at a time.

A matrix travels as its rows in the order in which they are packed, in the dtype in which they are stored; the arena
(HostArena in NumPy, DeviceArena on the GPU) permutes the elements of each tile of 16 rows. So the host only copies
runs of rows, which threads do side by side: NumPy lets go of the interpreter's lock meanwhile, and page faults of one
thread don't hold up the others.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuq1.checkpoint import DenseShare, DraftShare, LayerShare, Linear
from cuq1.cuda.repack import TILE, block_scales, head_runs
from cuq1.cuda.weights import LayerLayout, Layout, RankWeights, Tensor
from cuq1.errors import CheckpointError
from cuq1.plan.dims import HEAD_DIM

Bytes = NDArray[np.uint8]
Progress = Callable[[int, int], None]

E4M3, BF16, F32 = 0, 1, 2  # what staged elements are
ELEMENT_BYTES = (1, 2, 4)
NOT_FINITE, TOO_LARGE = 0, 1  # what a report's lowest byte says
NO_REPORT = 2**64 - 1
PIECE_BYTES = 64 << 20
_ITEM_TILES = 64
_THREADS = 8
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Piece:
    """Whole tiles of one tensor, staged as [tiles][16 rows][k] elements, then [tiles][tail] bytes.

    offset: in the arena, of the first tile; a tile takes tile_bytes, its chunks and then its tail.
    scales: in the arena, of the first row's FP32 scale, where BF16 or FP32 rows are to become E4M3; else None.
    key: (job << 40) + (first row / 8 << 8); a report adds (row in the piece / 8 << 8) and what is wrong.
    """

    offset: int
    tiles: int
    k: int
    kind: int
    fp8: bool
    tail: int
    key: int
    scales: int | None = None

    @property
    def tile_bytes(self) -> int:
        return TILE * self.k * (1 if self.fp8 else 2) + self.tail

    @property
    def nbytes(self) -> int:
        return self.tiles * self.tile_bytes

    @property
    def staged(self) -> int:
        return self.tiles * (TILE * self.k * ELEMENT_BYTES[self.kind] + self.tail)


@dataclass(frozen=True)
class Fold:
    """Offsets in the arena of what folded routing is made of, and of where it goes; scales None where o is F16."""

    router: int
    ffn_norm: int
    attn_out_norm: int
    o: int
    o_scales: int | None
    out: int
    experts: int
    hidden: int
    q_heads: int
    slice_width: int
    slice_start: int


class Arena(Protocol):
    """Takes what the loader stages. Reports come back as the smallest key, NO_REPORT where there is none."""

    def stage(self, nbytes: int) -> Bytes:
        """Host memory for the next piece; it is the arena's again from the next call on."""

    def put(self, offset: int, nbytes: int) -> None:
        """Bytes as they are staged."""

    def table(self, offset: int, rows: int, k: int, key: int) -> None:
        """Staged BF16 rows as they are; those that are not finite are reported."""

    def pack(self, piece: Piece) -> None:
        """Staged rows as tiles; where it has scales, each row is divided by its own, its largest magnitude over 448."""

    def fold(self, fold: Fold) -> None:
        """Folded routing, from tensors that are in the arena already."""

    def report(self) -> int:
        """Waits until everything is in the arena."""


@dataclass(frozen=True)
class _Fetch:
    """Rows of a linear, to rows start .. stop of every `period` rows of an item."""

    linear: Linear
    period: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Item:
    """Some tiles, and the rows that fill them; `tails` uint8 [tiles, tail]."""

    tiles: int
    fetches: tuple[_Fetch, ...]
    tails: Bytes | None = None


def load(weights: RankWeights, arena: Arena, progress: Progress | None = None) -> None:
    """Fill an arena of weights.layout.nbytes; `progress(done, layers)` is called after each layer, the draft's too.

    Raises CheckpointError, naming the tensor, for values that are not finite or do not fit the arena's dtype.
    """
    threads = min(_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        _Loader(weights, arena, pool, threads).run(progress)


class _Loader:
    def __init__(self, weights: RankWeights, arena: Arena, pool: ThreadPoolExecutor, threads: int) -> None:
        self.weights = weights
        self.layout: Layout = weights.layout
        self.arena = arena
        self.pool = pool
        self.threads = threads
        self.written: list[tuple[int, int]] = []
        self.sources: list[Callable[[int], str]] = []  # of each job: from row / 8 to the tensor

    def run(self, progress: Progress | None) -> None:
        target, draft, layout = self.weights.target, self.weights.draft, self.layout
        total = len(layout.layers) + (draft is not None)
        self._table("embed", target.embed_tokens)
        for i, (layer, plan) in enumerate(zip(target.layers, layout.layers, strict=True)):
            self._layer(layer, plan, i)
            self._check()
            if progress is not None:
                progress(i + 1, total)
        self._array("norm", target.norm)
        self._matrix("lm_head", target.lm_head)
        if draft is not None and layout.draft is not None:
            self._draft(draft, layout.draft)
            if progress is not None:
                progress(total, total)
        self._check()
        self._complete()

    def _draft(self, draft: DraftShare, plan: LayerLayout) -> None:
        self._table("draft.embed", draft.embed_tokens)
        self._array("draft.enorm", draft.enorm)
        self._array("draft.hnorm", draft.hnorm)
        self._array("draft.final_norm", draft.final_layernorm)
        self._matrix("draft.eh_proj", draft.eh_proj)
        self._layer(draft.layer, plan, -1)
        self._matrix("draft.lm_head.weights", draft.lm_head, scales="draft.lm_head.scales")

    def _layer(self, layer: LayerShare, plan: LayerLayout, number: int) -> None:
        prefix, attention, mlp = plan.prefix, layer.attention, layer.mlp
        self._array(f"{prefix}attention_norm", layer.attention_norm)
        self._array(f"{prefix}attn_out_norm", layer.attn_out_norm)
        self._array(f"{prefix}ffn_norm", layer.feed_forward_norm)
        if layer.ffn_out_norm is not None:
            self._array(f"{prefix}ffn_out_norm", layer.ffn_out_norm)
        self._array(f"{prefix}q_norm", attention.q_norm)
        self._array(f"{prefix}k_norm", attention.k_norm)
        self._array(f"{prefix}sink_k", attention.sink_k)
        self._attention(layer, plan, self.layout.dims(number).rotary)
        if isinstance(mlp, DenseShare):
            cuts = [slice(e * plan.inner, (e + 1) * plan.inner) for e in range(plan.groups)]
            self._experts(
                plan,
                [mlp.gate.part(cut) for cut in cuts],
                [mlp.up.part(cut) for cut in cuts],
                [mlp.down.part(slice(None), cut) for cut in cuts],
            )
            return
        self._array(f"{prefix}router", mlp.router)
        self._fold(plan, number)
        self._experts(plan, mlp.gate, mlp.up, mlp.down)

    def _attention(self, layer: LayerShare, plan: LayerLayout, rotary: int) -> None:
        share, prefix = layer.attention, plan.prefix
        natural = [(0, 0, HEAD_DIM)]
        items = []
        for linear, runs in ((share.q, head_runs(rotary)), (share.k, head_runs(rotary)), (share.v, natural)):
            for top in range(0, linear.shape[0], HEAD_DIM):
                fetches = [
                    _Fetch(linear.part(slice(top + row, top + row + count)), HEAD_DIM, place, place + count)
                    for place, row, count in runs
                ]
                items.append(_Item(HEAD_DIM // TILE, tuple(fetches)))
        self._tiles(f"{prefix}qkv.weights", items, fp8=plan.fp8_attention)
        self._matrix(f"{prefix}o.weights", share.o, fp8=plan.fp8_attention)
        if plan.fp8_attention:
            scales = [block_scales([linear], HEAD_DIM, 128)[0] for linear in (share.q, share.k, share.v)]
            self._array(f"{prefix}qkv.scales", np.concatenate(scales))
            self._array(f"{prefix}o.scales", block_scales([share.o], TILE, HEAD_DIM)[0])

    def _experts(self, plan: LayerLayout, gate: Sequence[Linear], up: Sequence[Linear], down: Sequence[Linear]) -> None:
        prefix, units = plan.prefix, plan.inner // 8
        tails: Sequence[Bytes | None] = _unit_tails(gate, up) if plan.fp8_experts else [None] * len(gate)
        items = (
            _Item(units, (_Fetch(g, TILE, 0, 8), _Fetch(u, TILE, 8, TILE)), tail)
            for g, u, tail in zip(gate, up, tails, strict=True)
        )
        self._tiles(f"{prefix}gate_up", items, fp8=plan.fp8_experts)
        rows = down[0].shape[0]
        self._tiles(
            f"{prefix}down.weights",
            (_Item(rows // TILE, (_Fetch(linear, rows, 0, rows),)) for linear in down),
            fp8=plan.fp8_experts,
        )
        if plan.fp8_experts:
            self._array(f"{prefix}down.scales", block_scales(down, TILE, plan.down_scale_k))

    def _fold(self, plan: LayerLayout, number: int) -> None:
        tensors, dims = self.layout.tensors, self.layout.dims(number)
        self.arena.fold(fold_of(plan, tensors, dims.hidden, dims.q_heads, dims.slice_width, self.layout.rank))
        self._wrote(tensors[f"{plan.prefix}fold"])

    def _array(self, name: str, values: NDArray[Any]) -> None:
        """A small tensor that is in host memory already."""
        tensor = self.layout.tensors[name]
        if values.shape != tensor.shape:
            raise AssertionError(f"{name} is {values.shape}, and was planned as {tensor.shape}")
        self.arena.stage(tensor.nbytes).view(tensor.dtype).reshape(tensor.shape)[...] = values
        self.arena.put(tensor.offset, tensor.nbytes)
        self._wrote(tensor)

    def _table(self, name: str, linear: Linear) -> None:
        """An embedding table, as BF16."""
        tensor = self.layout.tensors[name]
        rows, k = linear.shape
        job = self._job(lambda row8: linear.source)
        step = _ITEM_TILES * TILE
        height = max(1, PIECE_BYTES // (2 * k * step)) * step
        for top in range(0, rows, height):
            count = min(height, rows - top)
            staged = self.arena.stage(2 * count * k).reshape(count, 2 * k)
            part = linear.part(slice(top, top + count))
            cuts = [slice(first, first + step) for first in range(0, count, step)]
            self._side_by_side([partial(_fetch_bf16, staged[cut], part.part(cut)) for cut in cuts])
            self.arena.table(tensor.offset + 2 * top * k, count, k, (job << 40) + (top // 8 << 8))
            self.written.append((tensor.offset + 2 * top * k, 2 * count * k))

    def _matrix(self, name: str, linear: Linear, *, fp8: bool = False, scales: str | None = None) -> None:
        """A matrix in its own order of rows, padded to whole tiles. scales: as for `_tiles`."""
        rows, step = linear.shape[0], _ITEM_TILES * TILE
        items = []
        for top in range(0, rows, step):
            count = min(step, rows - top)
            tiles = -(-count // TILE)
            items.append(_Item(tiles, (_Fetch(linear.part(slice(top, top + count)), tiles * TILE, 0, count),)))
        self._tiles(name, items, fp8=fp8, scales=scales)

    def _tiles(self, name: str, items: Iterable[_Item], *, fp8: bool, scales: str | None = None) -> None:
        """A packed tensor from its items, several of them a piece.

        scales: the tensor for a scale a row, where the items' plain rows are to become E4M3.
        """
        items = list(items)
        tensor = self.layout.tensors[name]
        kind = _kind([fetch.linear for item in items for fetch in item.fetches], fp8=fp8)
        k = items[0].fetches[0].linear.shape[1]
        ends = np.cumsum([item.tiles for item in items])
        job = self._job(lambda row8: _source(items, ends, row8))
        tail = 0 if items[0].tails is None else items[0].tails.shape[1]
        tile = 0
        for group in _groups(items, TILE * k * ELEMENT_BYTES[kind] + tail):
            tiles = sum(item.tiles for item in group)
            piece = Piece(0, tiles, k, kind, fp8 or scales is not None, tail, (job << 40) + (2 * tile << 8))
            offset = tensor.offset + tile * piece.tile_bytes
            piece = replace(piece, offset=offset)
            if scales is not None:
                at = self.layout.tensors[scales].offset + 4 * TILE * tile
                piece = replace(piece, scales=at)
                self.written.append((at, 4 * TILE * tiles))
            self._stage(piece, group)
            self.arena.pack(piece)
            self.written.append((offset, piece.nbytes))
            tile += tiles

    def _stage(self, piece: Piece, items: Sequence[_Item]) -> None:
        staged = self.arena.stage(piece.staged)
        width = piece.k * ELEMENT_BYTES[piece.kind]
        rows = staged[: piece.tiles * TILE * width].reshape(-1, width)
        tails = staged[piece.tiles * TILE * width :].reshape(piece.tiles, piece.tail)
        fetches, tile = [], 0
        for item in items:
            mine = rows[tile * TILE : (tile + item.tiles) * TILE]
            for fetch in item.fetches:
                runs = mine.reshape(-1, fetch.period, width)
                fetches.append(partial(_fetch, runs[:, fetch.start : fetch.stop], fetch.linear, piece.kind))
                if len(item.fetches) == 1 and fetch.stop < fetch.period:
                    runs[:, fetch.stop :] = 0
            if item.tails is not None:
                tails[tile : tile + item.tiles] = item.tails
            tile += item.tiles
        self._side_by_side(fetches)

    def _side_by_side(self, fetches: Sequence[Callable[[], None]]) -> None:
        """Runs all of them; several a task, since handing over a task takes as long as copying a small matrix."""
        size = -(-len(fetches) // (4 * self.threads))
        tasks = [fetches[first : first + size] for first in range(0, len(fetches), size)]
        list(self.pool.map(_run, tasks))

    def _job(self, source: Callable[[int], str]) -> int:
        self.sources.append(source)
        return len(self.sources) - 1

    def _wrote(self, tensor: Tensor) -> None:
        self.written.append((tensor.offset, tensor.nbytes))

    def _check(self) -> None:
        key = self.arena.report()
        if key == NO_REPORT:
            return
        source = self.sources[key >> 40](key >> 8 & 0xFFFFFFFF)
        if key & 0xFF == TOO_LARGE:
            raise CheckpointError(
                f"{source} holds values beyond 65504, the largest half: the CUDA engine cannot compute with it, "
                "use --device cpu"
            )
        raise CheckpointError(f"{source} holds values that are not finite: copy the checkpoint again")

    def _complete(self) -> None:
        """Every byte of every tensor was written once."""
        written = iter(sorted(self.written))
        for tensor in self.layout.tensors.values():
            position = tensor.offset
            while position < tensor.end:
                begin, size = next(written, (-1, 0))
                if begin != position or size <= 0:
                    raise AssertionError(f"{tensor.name}: byte {position} was not written, or {begin} twice")
                position += size
            if position != tensor.end:
                raise AssertionError(f"{tensor.name} was written beyond its end")
        if next(written, None) is not None:
            raise AssertionError("something outside the layout was written")


def fold_of(
    plan: LayerLayout, tensors: dict[str, Tensor], hidden: int, q_heads: int, slice_width: int, rank: int
) -> Fold:
    """The offsets that a layer's folded routing takes."""
    prefix = plan.prefix
    scales = tensors.get(f"{prefix}o.scales")
    return Fold(
        router=tensors[f"{prefix}router"].offset,
        ffn_norm=tensors[f"{prefix}ffn_norm"].offset,
        attn_out_norm=tensors[f"{prefix}attn_out_norm"].offset,
        o=tensors[f"{prefix}o.weights"].offset,
        o_scales=None if scales is None else scales.offset,
        out=tensors[f"{prefix}fold"].offset,
        experts=plan.groups,
        hidden=hidden,
        q_heads=q_heads,
        slice_width=slice_width,
        slice_start=rank * slice_width,
    )


def _unit_tails(gate: Sequence[Linear], up: Sequence[Linear]) -> list[Bytes]:
    """Of each expert uint8 [units, tail]: scales of gate and up for each 128 columns, padded to 128 bytes."""
    pairs = np.stack((block_scales(gate, 8, 128), block_scales(up, 8, 128)), axis=-1)
    experts, units, blocks, _ = pairs.shape
    tails = np.zeros((experts, units, -(-blocks * 8 // 128) * 32), np.float32)
    tails[:, :, : 2 * blocks] = pairs.reshape(experts, units, -1)
    return list(tails.view(np.uint8))


def _groups(items: Sequence[_Item], tile_bytes: int) -> Iterator[list[_Item]]:
    """Consecutive items of at most PIECE_BYTES together, at least one."""
    group: list[_Item] = []
    size = 0
    for item in items:
        if group and size + item.tiles * tile_bytes > PIECE_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += item.tiles * tile_bytes
    yield group


def _source(items: Sequence[_Item], ends: NDArray[np.intp], row8: int) -> str:
    """The tensor that a report's row belongs to."""
    number = int(np.searchsorted(ends, row8 // 2, side="right"))
    item = items[number]
    row = 8 * row8 - TILE * (int(ends[number]) - item.tiles)
    found = [fetch for fetch in item.fetches if fetch.start <= row % fetch.period < fetch.stop]
    return (found or item.fetches)[0].linear.source


def _kind(linears: Sequence[Linear], *, fp8: bool) -> int:
    """In which dtype rows travel: as they are stored, or as FP32 where they must be dequantised or differ."""
    if fp8:
        return E4M3
    return BF16 if all(linear.weight.dtype == _BF16 for linear in linears) else F32


def _run(fetches: Sequence[Callable[[], None]]) -> None:
    for fetch in fetches:
        fetch()


def _fetch(target: Bytes, linear: Linear, kind: int) -> None:
    """A linear's elements into staged rows, uint8 [.., bytes of a row]."""
    if kind != F32 or linear.weight.dtype == np.float32:
        _copy(target, linear.weight.view(np.uint8))
    else:
        target[...] = linear.dequantize().view(np.uint8).reshape(target.shape)


def _fetch_bf16(target: Bytes, linear: Linear) -> None:
    if linear.weight.dtype == _BF16:
        _copy(target, linear.weight.view(np.uint8))
    else:
        with np.errstate(over="ignore"):  # to infinity, which is reported
            target[...] = linear.dequantize().astype(_BF16).view(np.uint8)


def _copy(target: Bytes, source: Bytes) -> None:
    """The one place where a mapped matrix is read as it is."""
    np.copyto(target, source.reshape(target.shape))
