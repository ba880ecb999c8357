"""An arena in host memory, packed by NumPy: what the GPU's must hold, byte for byte."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuq1.checkpoint.linear import BLOCK
from cuq1.cuda.qwen2_weights import Qwen2Layout
from cuq1.cuda.repack import TILE, quantised, tiles, untile
from cuq1.cuda.weights import Layout
from cuq1.cuda.weights_load import BF16, E4M3, F32, NO_REPORT, NOT_FINITE, TOO_LARGE, Bytes, Fold, Piece

_DTYPES: dict[int, Any] = {E4M3: np.uint8, BF16: ml_dtypes.bfloat16, F32: np.float32}


class HostArena:
    """`data`: uint8 [layout.nbytes], `fill` where nothing was written."""

    def __init__(self, layout: Layout | Qwen2Layout, fill: int = 0) -> None:
        self.layout = layout
        self.data: Bytes = np.full(layout.nbytes, fill, np.uint8)
        self._staged: Bytes = np.empty(0, np.uint8)
        self._report = NO_REPORT

    def tensor(self, name: str) -> NDArray[Any]:
        """A tensor as a view of the arena."""
        found = self.layout.tensors[name]
        return self.data[found.offset : found.end].view(found.dtype).reshape(found.shape)

    def stage(self, nbytes: int) -> Bytes:
        self._staged = np.empty(nbytes, np.uint8)
        return self._staged

    def put(self, offset: int, nbytes: int) -> None:
        self.data[offset : offset + nbytes] = self._staged

    def table(self, offset: int, rows: int, k: int, key: int) -> None:
        self._refuse(self._staged.view(np.uint16).reshape(rows, k) & 0x7F80 == 0x7F80, key, NOT_FINITE)
        self.put(offset, 2 * rows * k)

    def pack(self, piece: Piece) -> None:
        dtype = _DTYPES[piece.kind]
        size = piece.tiles * TILE * piece.k * np.dtype(dtype).itemsize
        rows = self._staged[:size].view(dtype).reshape(piece.tiles * TILE, piece.k)
        if piece.scales is not None:
            rows, scales = quantised(rows.astype(np.float32))
            self._refuse(~np.isfinite(scales), piece.key, NOT_FINITE)
            self.data[piece.scales : piece.scales + scales.nbytes] = scales.view(np.uint8).ravel()
        elif piece.fp8:
            self._refuse(rows & 0x7F == 0x7F, piece.key, NOT_FINITE)
        else:
            values = rows.astype(np.float32)
            with np.errstate(over="ignore"):
                rows = values.astype(np.float16)
            self._refuse(~np.isfinite(values), piece.key, NOT_FINITE)
            self._refuse(np.isinf(rows) & np.isfinite(values), piece.key, TOO_LARGE)
        out = self.data[piece.offset : piece.offset + piece.nbytes].reshape(piece.tiles, piece.tile_bytes)
        out[:, : piece.tile_bytes - piece.tail] = tiles(rows).reshape(piece.tiles, -1)
        out[:, piece.tile_bytes - piece.tail :] = self._staged[size:].reshape(piece.tiles, piece.tail)

    def fold(self, fold: Fold) -> None:
        hidden, width = fold.hidden, fold.q_heads * BLOCK

        def floats(offset: int, count: int) -> NDArray[Any]:
            return self.data[offset : offset + 4 * count].view(np.float32).astype(np.float64)

        routed = floats(fold.router, fold.experts * hidden).reshape(-1, hidden) * floats(fold.ffn_norm, hidden)
        o = untile(self.data[fold.o :], hidden, width, fp8=fold.o_scales is not None).astype(np.float64)
        if fold.o_scales is not None:
            scales = floats(fold.o_scales, hidden // TILE * fold.q_heads).reshape(-1, fold.q_heads)
            o *= np.repeat(np.repeat(scales, TILE, axis=0), BLOCK, axis=1)
        out = np.empty((fold.experts, width + fold.slice_width), np.float32)
        out[:, :width] = (routed * floats(fold.attn_out_norm, hidden)) @ o
        out[:, width:] = routed[:, fold.slice_start : fold.slice_start + fold.slice_width]
        self.data[fold.out : fold.out + out.nbytes] = out.view(np.uint8).ravel()

    def report(self) -> int:
        return self._report

    def _refuse(self, wrong: NDArray[np.bool_], key: int, what: int) -> None:
        found = np.flatnonzero(wrong.any(axis=1))
        if len(found):
            self._report = min(self._report, key + (int(found[0]) // 8 << 8) + what)
