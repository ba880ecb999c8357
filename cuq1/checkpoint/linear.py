"""A linear's weight, or a rank's share of it, and its values.

Block FP8: an E4M3 weight [rows, cols] with one scale for every 128 x 128 block
of the unsplit matrix; value = weight x scale. A share keeps its position in
the unsplit matrix and the whole scale grid, so it may begin or end anywhere
inside a block.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cuq1.errors import CheckpointError

Float32 = npt.NDArray[np.float32]

BLOCK = 128

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_E4M3_VALUES: Float32 = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)
# np.take widens the codes to 8-byte indices: pieces of this many elements keep them in the L2 cache.
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """One rank's share of a linear's weight; nothing is read until it is used.

    source: the file and the tensor, for messages; `[E]` follows the name of a fused tensor.
    weight: [rows, cols] float8_e4m3fn, bfloat16 or float32, a view of the mapped file.
    scale_inv: [ceil(R / 128), ceil(C / 128)] float32 or bfloat16, the scales of the unsplit R x C
        matrix; None where the weight is not quantised.
    row0, col0: the position of weight[0, 0] in the unsplit matrix. In a fused gate-and-up tensor the
        unsplit matrix is the fused one, so an up projection's row0 begins at the expert's width.
    """

    source: str
    weight: npt.NDArray[Any]
    scale_inv: npt.NDArray[Any] | None = None
    row0: int = 0
    col0: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.weight.shape
        return rows, cols

    @property
    def nbytes(self) -> int:
        """Bytes of the share: the weight, and those scales that it uses."""
        scales = self.scales()
        return self.weight.nbytes + (0 if scales is None else scales.nbytes)

    def part(self, rows: slice, cols: slice = slice(None)) -> "Linear":
        """The share [rows, cols] of this one; slices of step 1, counted within this share."""
        first_row, first_col = rows.indices(self.shape[0])[0], cols.indices(self.shape[1])[0]
        return Linear(
            self.source, self.weight[rows, cols], self.scale_inv, self.row0 + first_row, self.col0 + first_col
        )

    def scales(self) -> npt.NDArray[Any] | None:
        """The part of scale_inv whose blocks this share touches, a view; None where it is not quantised."""
        if self.scale_inv is None:
            return None
        rows, cols = self.shape
        return self.scale_inv[
            self.row0 // BLOCK : -(-(self.row0 + rows) // BLOCK), self.col0 // BLOCK : -(-(self.col0 + cols) // BLOCK)
        ]

    def dequantize(self, out: Float32 | None = None) -> Float32:
        """The values, float32 [rows, cols], written to `out` where one is given.

        Raises CheckpointError where a value is NaN or infinite: the file is damaged.
        """
        if out is None:
            out = np.empty(self.shape, np.float32)
        elif out.shape != self.shape or out.dtype != np.float32:
            raise ValueError(f"out is {out.dtype} {out.shape}, but {self.source} needs float32 {self.shape}")
        rows, cols = self.shape
        columns = self._column_scales()
        # Pieces end where a block of rows ends, so that one row of scales serves a whole piece.
        height = max(1, min(BLOCK, _PIECE // max(cols, 1)))
        top = 0
        while top < rows:
            position = self.row0 + top
            bottom = min(rows, top + height, top + BLOCK - position % BLOCK)
            piece = out[top:bottom]
            _decode(self.weight[top:bottom], piece)
            if columns is not None:
                with np.errstate(over="ignore"):  # reported below, by name
                    np.multiply(piece, columns[position // BLOCK - self.row0 // BLOCK], out=piece)
            if not np.isfinite(piece).all():
                raise CheckpointError(
                    f"{self.source} holds values that are not finite, in rows {position} to "
                    f"{self.row0 + bottom - 1}: copy the checkpoint again"
                )
            top = bottom
        return out

    def _column_scales(self) -> Float32 | None:
        """[row blocks touched, cols]: each block's scale repeated over the share's columns of that block."""
        scales = self.scales()
        if scales is None:
            return None
        first = self.col0 % BLOCK
        return np.repeat(scales.astype(np.float32), BLOCK, axis=1)[:, first : first + self.shape[1]]


def _decode(weight: npt.NDArray[Any], out: Float32) -> None:
    """The unscaled float32 values of a piece of a weight."""
    if weight.dtype == _E4M3:
        # Codes are below 256, so no index wraps; the mode only spares take's bounds check.
        np.take(_E4M3_VALUES, weight.view(np.uint8), out=out, mode="wrap")
    elif weight.dtype == _BF16:
        # BF16 is the upper half of a float32
        np.left_shift(weight.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, weight)
