"""Copies of a GPU's caches for snapshots (cuq1.snapshots): in memory taken once, and in pinned memory of the host.

Copies within the GPU, and between it and the host, run on the engine's stream, so that they stand between what computes
before and after them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda.driver import bindings, check
from cuq1.cuda.heap import Heap
from cuq1.cuda.memory import Arena, free_memory
from cuq1.cuda.runtime import Runtime
from cuq1.errors import DeviceError
from cuq1.models import q1, qwen2
from cuq1.plan.dims import HEAD_DIM, ROWS
from cuq1.plan.qwen2_dims import PAGE

RESERVE = 256 << 20  # bytes of the GPU that are left to whoever else needs some
SLAB = 256 << 20  # of pinned memory, which is slow to take
HALF = 2
LAST_ROW = ("hidden", "hidden16", "logits")  # whose row 0 belongs to the last position after a prompt


def room_for(wanted: int) -> int:
    """As many of the bytes that are wanted as this GPU has to spare."""
    return max(0, min(wanted, free_memory() - RESERVE))


class PinnedMemory:
    """Memory of the host that copies reach without a detour, taken in slabs up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slabs: list[tuple[int, Heap]] = []

    def take(self, size: int) -> tuple[int, Heap, int] | None:
        """(address, heap, offset) of a piece; None where there is none."""
        for base, heap in self._slabs:
            offset = heap.take(size)
            if offset is not None:
                return base + offset, heap, offset
        held = sum(heap.size for _, heap in self._slabs)
        slab = min(max(SLAB, size + 256), self._limit - held)
        if slab < size:
            return None
        driver = bindings()
        error, base = driver.cuMemHostAlloc(slab, driver.CU_MEMHOSTALLOC_PORTABLE)
        if error != driver.CUresult.CUDA_SUCCESS:
            return None
        self._slabs.append((int(base), Heap(slab)))
        return self.take(size)

    def close(self) -> None:
        """Give everything back."""
        for base, _ in self._slabs:
            bindings().cuMemFreeHost(base)
        self._slabs = []


@dataclass(eq=False)
class DeviceCopy:
    """Bytes at `address`, which lie one part behind the other. parts: offset and size of each."""

    saver: "DeviceSaver"
    nbytes: int
    address: int
    heap: Heap
    offset: int
    parts: list[tuple[int, int]]
    first_tier: bool = True
    pages: tuple[int, int] = (0, 0)  # of a paged cache: the first block, and their number

    def spill(self) -> bool:
        """Into pinned memory."""
        taken = self.saver.pinned.take(self.nbytes)
        if taken is None:
            return False
        address, heap, offset = taken
        self.saver.copy(address, self.address, self.nbytes)
        self.saver.wait()
        self.heap.give(self.offset)
        self.address, self.heap, self.offset, self.first_tier = address, heap, offset, False
        return True

    def free(self) -> None:
        self.heap.give(self.offset)


@dataclass(frozen=True)
class Marks:
    """An engine's counts."""

    done: int
    settled: int
    fresh: bool
    target_end: int
    draft_end: int


class Marked(Protocol):
    """An engine."""

    marks: Marks


@dataclass
class DeviceSaver(ABC):
    """cuq1.snapshots.Saver of a GPU engine. first, second: bytes of the GPU and of pinned memory."""

    engine: Marked
    runtime: Runtime
    first: int
    second: int
    padding: int = 0

    def __post_init__(self) -> None:
        self._arena = Arena({"snapshots": self.first}) if self.first else None
        self._heap = Heap(self.first)
        self.pinned = PinnedMemory(self.second)
        model = self.runtime.model
        held = [*model.layers, *([] if model.draft is None else [model.draft])]
        self._rings = [layer for layer in held if layer.sliding]
        self._whole = [f"{layer.prefix}.{kind}_cache" for layer in self._rings for kind in "kv"]

    def close(self) -> None:
        """Give the memory back."""
        if self._arena is not None:
            self._arena.close()
        self.pinned.close()

    @property
    def slack(self) -> int | None:
        """What rings hold beside a window."""
        return min((ring.slots - ring.window for ring in self._rings), default=None)

    def written(self, marks: Marks) -> int:
        """As in Saver."""
        return max(marks.target_end, marks.draft_end)

    def _state_parts(self) -> list[tuple[str, int]]:
        """Buffers of the state, and how many bytes of each."""
        sizes = self.runtime.sizes
        rows = {"hidden": ROWS, "hidden16": ROWS, "logits": ROWS if "hidden" in sizes else 1}
        last = [(name, sizes[name] // rows[name]) for name in LAST_ROW if name in sizes]
        return [*((name, sizes[name]) for name in self._whole), *last]

    @property
    def state_bytes(self) -> int:
        return sum(_aligned(size) for _, size in self._state_parts())

    def save(self) -> tuple[DeviceCopy, Marks] | None:
        engine, parts = self.engine, self._state_parts()
        copy = self._take([size for _, size in parts])
        if copy is None:
            return None
        for (name, size), (offset, _) in zip(parts, copy.parts, strict=True):
            self.copy(copy.address + offset, self.runtime.addresses[name], size)
        self.wait()
        return copy, engine.marks

    def load(self, state: DeviceCopy, marks: Marks) -> None:
        for (name, size), (offset, _) in zip(self._state_parts(), state.parts, strict=True):
            self.copy(self.runtime.addresses[name], state.address + offset, size)
        self.wait()
        self.engine.marks = marks

    def _take(self, sizes: Sequence[int]) -> DeviceCopy | None:
        """Memory for parts of these sizes, in the first tier."""
        total = sum(map(_aligned, sizes))
        offset = self._heap.take(total)
        if offset is None or self._arena is None:
            return None
        parts, at = [], 0
        for size in sizes:
            parts.append((at, size))
            at += _aligned(size)
        return DeviceCopy(self, total, self._arena["snapshots"] + offset, self._heap, offset, parts)

    def copy(self, target: int, source: int, size: int) -> None:
        """Enqueues a copy between any two kinds of memory."""
        driver = bindings()
        pointer = driver.CUdeviceptr
        check(driver.cuMemcpyAsync(pointer(target), pointer(source), size, driver.CUstream(self.runtime.stream)))

    def _copy_heads(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, heads: int
    ) -> None:
        """`width` bytes of each head."""
        driver = bindings()
        what = driver.CUDA_MEMCPY2D()
        what.srcMemoryType = what.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        what.srcDevice, what.srcPitch = driver.CUdeviceptr(source), source_pitch
        what.dstDevice, what.dstPitch = driver.CUdeviceptr(target), target_pitch
        what.WidthInBytes, what.Height = width, heads
        check(driver.cuMemcpy2DAsync(what, driver.CUstream(self.runtime.stream)))

    def wait(self) -> None:
        """Returns when copies are done."""
        self.runtime.wait()

    @abstractmethod
    def row_bytes(self) -> int: ...

    @abstractmethod
    def copy_rows(self, start: int, end: int) -> DeviceCopy | None: ...

    @abstractmethod
    def put_rows(self, copy: DeviceCopy, first: int, start: int, end: int) -> None: ...


class RowSaver(DeviceSaver):
    """Of caches [KV heads, positions, head size] of halves, a layer's keys and values each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        model = self.runtime.model
        assert isinstance(model, q1.Model)
        full = [layer for layer in model.layers if not layer.sliding]
        self._full = [
            (f"{layer.prefix}.{kind}_cache", layer.dims.kv_heads, layer.slots) for layer in full for kind in "kv"
        ]

    def row_bytes(self) -> int:
        return sum(heads * HEAD_DIM * HALF for _, heads, _ in self._full)

    def copy_rows(self, start: int, end: int) -> DeviceCopy | None:
        row = HEAD_DIM * HALF
        copy = self._take([heads * (end - start) * row for _, heads, _ in self._full])
        if copy is None:
            return None
        for (name, heads, slots), (offset, _) in zip(self._full, copy.parts, strict=True):
            source = self.runtime.addresses[name] + start * row
            self._copy_heads(
                copy.address + offset, (end - start) * row, source, slots * row, (end - start) * row, heads
            )
        self.wait()
        return copy

    def put_rows(self, copy: DeviceCopy, first: int, start: int, end: int) -> None:
        row = HEAD_DIM * HALF
        for (name, heads, slots), (offset, size) in zip(self._full, copy.parts, strict=True):
            source = copy.address + offset + (start - first) * row
            target = self.runtime.addresses[name] + start * row
            self._copy_heads(target, slots * row, source, size // heads, (end - start) * row, heads)
        self.wait()


class PageSaver(DeviceSaver):
    """Of paged caches [pages, KV heads, PAGE, head size]: copies are of whole pages, wherever they lie."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.padding = 2 * PAGE - 2  # a stretch's first and last page may be its own in part
        runtime = self.runtime
        model = runtime.model
        assert isinstance(model, qwen2.Model)
        self._heads = model.sizes.kv_heads
        self._caches = [name for name in runtime.sizes if name.endswith(("k_pages", "v_pages"))]
        self._blocks = runtime.sizes["page_table"] // 4

    def row_bytes(self) -> int:
        return sum(self.runtime.sizes[name] for name in self._caches) // (self._blocks * PAGE)

    def _table(self) -> NDArray[np.int32]:
        table = np.empty(self._blocks, np.int32)
        self.runtime.read("page_table", table)
        return table

    def copy_rows(self, start: int, end: int) -> DeviceCopy | None:
        first, last = start // PAGE, (end - 1) // PAGE + 1
        page = {name: self.runtime.sizes[name] // self._blocks for name in self._caches}
        copy = self._take([(last - first) * size for size in page.values()])
        if copy is None:
            return None
        copy.pages = first, last - first
        for at, number, count in _runs(self._table()[first:last]):
            for (name, size), (offset, _) in zip(page.items(), copy.parts, strict=True):
                source = self.runtime.addresses[name] + number * size
                self.copy(copy.address + offset + at * size, source, count * size)
        self.wait()
        return copy

    def put_rows(self, copy: DeviceCopy, first: int, start: int, end: int) -> None:
        table, (held, count) = self._given((end - 1) // PAGE + 1), copy.pages
        for name, (offset, size) in zip(self._caches, copy.parts, strict=True):
            page, target, source = size // count, self.runtime.addresses[name], copy.address + offset
            for block, low, high in _cut_blocks(start, end):
                self._put_part(target + int(table[block]) * page, source + (block - held) * page, low, high, page)
            first, last = -(-start // PAGE), end // PAGE
            for at, number, pages in _runs(table[first : max(first, last)]):
                self.copy(target + number * page, source + (first - held + at) * page, pages * page)
        self.wait()

    def _put_part(self, target: int, source: int, low: int, high: int, page: int) -> None:
        """Rows low .. high - 1 of a page: those beside them may be another sequence's."""
        pitch = page // self._heads
        row = pitch // PAGE
        self._copy_heads(target + low * row, pitch, source + low * row, pitch, (high - low) * row, self._heads)

    def _given(self, blocks: int) -> NDArray[np.int32]:
        """The page table, whose first blocks have pages now: free ones, as kernels take them, where they had none."""
        runtime, table = self.runtime, self._table()
        lacking = np.flatnonzero(table[:blocks] < 0)
        if len(lacking):
            free, pages = np.empty(self._blocks, np.int32), np.empty(runtime.sizes["pages"] // 4, np.int32)
            runtime.read("free_pages", free)
            runtime.read("pages", pages)
            if pages[0] < len(lacking):
                raise DeviceError("the KV cache has fewer pages than a snapshot needs: report this")
            table[lacking] = free[: pages[0]][::-1][: len(lacking)]
            pages[0] -= len(lacking)
            runtime.write("page_table", table)
            runtime.write("pages", pages)
        return table


def saver_of(engine: Marked, runtime: Runtime, first: int, second: int) -> DeviceSaver:
    """The saver for an engine's kind of caches."""
    kind = PageSaver if "page_table" in runtime.sizes else RowSaver
    return kind(engine, runtime, first, second)


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def _cut_blocks(start: int, end: int) -> list[tuple[int, int, int]]:
    """(block, low, high) of the blocks of which positions start .. end - 1 are only the rows low .. high - 1."""
    parts = [
        (block, max(start - block * PAGE, 0), min(end - block * PAGE, PAGE))
        for block in sorted({start // PAGE, (end - 1) // PAGE})
    ]
    return [(block, low, high) for block, low, high in parts if high - low < PAGE]


def _runs(numbers: NDArray[Any]) -> list[tuple[int, int, int]]:
    """(place, first number, count) of stretches of numbers that follow one another."""
    ends = [*(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    starts = [0, *ends[:-1]]
    return [(start, int(numbers[start]), end - start) for start, end in zip(starts, ends, strict=True) if end > start]
