"""An arena on the GPU: pinned staging buffers, copies and packing on a stream, and random weights.

Two pinned buffers take turns: while one is copied and packed, threads fill the other. HostArena is the twin.
"""

from ctypes import Structure, c_uint8
from dataclasses import dataclass, replace
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np

from cuq1.cuda.abi import FillArgs, FoldArgs, PackArgs
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.kernels import packing
from cuq1.cuda.launch import launch
from cuq1.cuda.memory import copy_in
from cuq1.cuda.module import Function, build
from cuq1.cuda.qwen2_load import load_qwen2
from cuq1.cuda.qwen2_weights import Qwen2Layout, Qwen2Random, Qwen2Source
from cuq1.cuda.weights import LayerLayout, Layout, RankWeights
from cuq1.cuda.weights_load import NO_REPORT, PIECE_BYTES, Bytes, Fold, Piece, Progress, fold_of, load
from cuq1.cuda.weights_random import FILL_E4M3, FILL_F32, Fill, fills, qwen2_fills
from cuq1.plan.kernel import Kernel

Source = RankWeights | Qwen2Source | Qwen2Random


def load_weights(weights: Source, address: int, stream: int, progress: Progress | None = None) -> None:
    """Fill the arena at `address`, weights.layout.nbytes on the GPU, from its source; returns when all is there.

    stream: a CUstream. Raises CheckpointError, naming the tensor, for values that are not finite or do not fit, and
    DeviceError where there is no memory for staging.
    """
    if isinstance(weights, Qwen2Random):
        random_weights(weights.layout, address, stream, weights.seed)
        return
    with DeviceArena(address, stream) as arena:
        if isinstance(weights, Qwen2Source):
            load_qwen2(weights, arena, progress)
        else:
            load(weights, arena, progress)


def random_weights(layout: Layout | Qwen2Layout, address: int, stream: int, seed: int = 0) -> None:
    """Fill an arena with random finite weights of such sizes that every product's results are of order 1.

    The same seed gives the same bytes, and all ranks the same of what is not split. Norms are about 1, folded routing
    is that of the random router.
    """
    with DeviceArena(address, stream) as arena:
        arena.clear(layout.nbytes)
        if isinstance(layout, Qwen2Layout):
            for number, fill in enumerate(qwen2_fills(layout)):
                arena.fill(fill, fill.seed(seed, number, 0))
            arena.report()
            return
        for number, fill in enumerate(fills(layout)):
            arena.fill(fill, fill.seed(seed, number, layout.rank))
        for layer, plan in enumerate(layout.layers):
            if plan.moe:
                arena.fold(_fold(layout, layer, plan))
        if layout.draft is not None:
            arena.fold(_fold(layout, -1, layout.draft))
        arena.report()


def _fold(layout: Layout, layer: int, plan: LayerLayout) -> Fold:
    dims = layout.dims(layer)
    return fold_of(plan, layout.tensors, dims.hidden, dims.q_heads, dims.slice_width, layout.rank)


@dataclass(frozen=True)
class _Buffer:
    """A pinned buffer, the GPU's memory that it is copied to, and an event after which it is free again."""

    size: int
    pinned: Any
    host: Bytes
    device: int
    free: Any


class DeviceArena:
    """See weights_load.Arena. `address`: of the arena on the GPU; `stream`: a CUstream."""

    def __init__(self, address: int, stream: int) -> None:
        self.address = address
        self.stream = stream
        self._driver = bindings()
        self._handle = self._driver.CUstream(stream)
        self._buffers: list[_Buffer | None] = [None, None]
        self._turn = 0
        self._word = np.full(1, NO_REPORT, np.uint64)
        self._report = int(check(self._driver.cuMemAlloc(8)))
        copy_in(self._report, self._word)

    def __enter__(self) -> "DeviceArena":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives staging memory back, once the stream is done with it."""
        self._driver.cuStreamSynchronize(self._handle)
        for index, buffer in enumerate(self._buffers):
            if buffer is not None:
                self._buffers[index] = None
                self._free(buffer)
        self._driver.cuMemFree(self._driver.CUdeviceptr(self._report))

    def stage(self, nbytes: int) -> Bytes:
        self._turn ^= 1
        buffer = self._buffers[self._turn]
        if buffer is not None:
            check(self._driver.cuEventSynchronize(buffer.free))
            if buffer.size < nbytes:
                self._buffers[self._turn] = None
                check(self._driver.cuStreamSynchronize(self._handle))  # packing reads the GPU's half
                self._free(buffer)
                buffer = None
        if buffer is None:
            buffer = self._buffers[self._turn] = self._allocate(max(nbytes, PIECE_BYTES))
        return buffer.host[:nbytes]

    def put(self, offset: int, nbytes: int) -> None:
        self._copy(self.address + offset, nbytes)

    def table(self, offset: int, rows: int, k: int, key: int) -> None:
        self._copy(self.address + offset, 2 * rows * k)
        args = PackArgs(target=self.address + offset, report=self._report, key=key, tiles=rows, k=k)
        self._launch(packing.check_table(rows), args)

    def pack(self, piece: Piece) -> None:
        buffer = self._staged()
        self._copy(buffer.device, piece.staged)
        args = PackArgs(
            source=buffer.device,
            target=self.address + piece.offset,
            report=self._report,
            key=piece.key,
            tiles=piece.tiles,
            k=piece.k,
            kind=piece.kind,
            tail=piece.tail,
            fp8=piece.fp8,
            scales=0 if piece.scales is None else self.address + piece.scales,
        )
        self._launch(packing.pack(piece.tiles) if piece.scales is None else packing.quantise(piece.tiles), args)

    def fold(self, fold: Fold) -> None:
        args = FoldArgs(
            router=self.address + fold.router,
            ffn_norm=self.address + fold.ffn_norm,
            attn_out_norm=self.address + fold.attn_out_norm,
            o=self.address + fold.o,
            o_scales=0 if fold.o_scales is None else self.address + fold.o_scales,
            fold=self.address + fold.out,
            experts=fold.experts,
            hidden=fold.hidden,
            q_heads=fold.q_heads,
            slice=fold.slice_width,
            slice_start=fold.slice_start,
        )
        self._launch(packing.fold_router(fold.q_heads, fold.slice_width, fold.experts), args)

    def report(self) -> int:
        driver = self._driver
        source = driver.CUdeviceptr(self._report)
        check(driver.cuMemcpyDtoHAsync(self._word.ctypes.data, source, 8, self._handle))
        check(driver.cuStreamSynchronize(self._handle))
        return int(self._word[0])

    def clear(self, nbytes: int) -> None:
        """Zeros all of the arena."""
        check(self._driver.cuMemsetD8Async(self._driver.CUdeviceptr(self.address), 0, nbytes, self._handle))

    def fill(self, fill: Fill, seed: int) -> None:
        per_word = {FILL_E4M3: 16, FILL_F32: 1}.get(fill.kind, 8)
        args = FillArgs(
            target=self.address + fill.offset,
            runs=fill.runs,
            run=fill.run,
            stride=fill.stride,
            seed=seed % 2**64,
            kind=fill.kind,
            mean=fill.mean,
            deviation=fill.deviation,
        )
        self._launch(packing.fill(fill.runs * fill.run // per_word), args)

    def _staged(self) -> _Buffer:
        buffer = self._buffers[self._turn]
        if buffer is None:
            raise ValueError("nothing was staged")
        return buffer

    def _copy(self, target: int, nbytes: int) -> None:
        buffer = self._staged()
        driver = self._driver
        check(driver.cuMemcpyHtoDAsync(driver.CUdeviceptr(target), buffer.host.ctypes.data, nbytes, self._handle))
        check(driver.cuEventRecord(buffer.free, self._handle))

    def _launch(self, kernel: Kernel, args: Structure) -> None:
        launch(replace(_function(kernel.entry), kernel=kernel), args, self.stream)

    def _allocate(self, size: int) -> _Buffer:
        driver = self._driver
        pinned = check(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE))
        host = np.ctypeslib.as_array((c_uint8 * size).from_address(int(pinned)))
        device = int(check(driver.cuMemAlloc(size)))
        free = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))
        return _Buffer(size, pinned, host, device, free)

    def _free(self, buffer: _Buffer) -> None:
        # Not checked: on the way out of an error they would hide it.
        self._driver.cuEventDestroy(buffer.free)
        self._driver.cuMemFree(self._driver.CUdeviceptr(buffer.device))
        self._driver.cuMemFreeHost(buffer.pinned)


@cache
def _function(entry: str) -> Function:
    """Loaded once: a kernel's grid is no part of its code."""
    kernel = {
        "pack": packing.pack(1),
        "quantise": packing.quantise(1),
        "check_table": packing.check_table(1),
        "fold_router": packing.fold_router(1, 1, 1),
        "fill": packing.fill(1),
    }[entry]
    return build(kernel)
