"""Complete or refused: every expected tensor is claimed once, and nothing may be left over.

A claim checks name, shape and dtype against the headers and reads no data.
Faults are gathered, so that one message can say how much is wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cuq1.checkpoint.index import Index
from cuq1.checkpoint.linear import BLOCK, Linear
from cuq1.errors import CheckpointError

PLAIN = ("BF16", "F32")
_SHOWN = 3
# More missing tensors than any real model has: its config is damaged, and may ask for billions.
_PATIENCE = 200_000


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A small tensor on the mapping, in its stored dtype; `source` is its file and name, for messages."""

    source: str
    array: npt.NDArray[Any]


def blocks(size: int) -> int:
    """Scale blocks along a dimension."""
    return -(-size // BLOCK)


class Claims:
    """Claims on one folder's tensors; `finish` raises CheckpointError unless every claim held and nothing is left.

    A claim that fails returns a placeholder of the expected rank, so that the walk can go on and find the rest.
    """

    def __init__(
        self, index: Index, declares_fp8: bool, ignore: Callable[[str], bool], config: str = "config.json"
    ) -> None:
        """`config` names, in messages, the file that asks for the tensors."""
        self.index = index
        self._config = config
        self._declares_fp8 = declares_fp8
        self._unclaimed = dict.fromkeys(name for name in index.names if not ignore(name))
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def tensor(self, name: str, *shapes: tuple[int, ...], dtypes: Sequence[str] = PLAIN) -> npt.NDArray[Any]:
        """The tensor's view, in the first of `shapes` (the others are equal but for leading ones)."""
        if name not in self.index:
            self._missing.append(name)
            if len(self._missing) == _PATIENCE:
                self.finish()
            return _nothing(shapes[0])
        self._unclaimed.pop(name, None)
        entry = self.index.entry(name)
        if entry.shape not in shapes:
            self._fault(name, f"has shape {list(entry.shape)}, but {self._config} asks for {list(shapes[0])}")
        elif entry.dtype not in dtypes:
            self._fault(name, f"is {entry.dtype}, and only {' or '.join(dtypes)} is computed")
        else:
            return self.index.view(name).reshape(shapes[0])
        return _nothing(shapes[0])

    def stored(self, name: str, *shapes: tuple[int, ...]) -> Stored:
        """A tensor that is not a linear's."""
        return Stored(self.source(name), self.tensor(name, *shapes))

    def source(self, name: str) -> str:
        """The file and the tensor, as messages name them."""
        return f"{self.index.path(name)}: {name!r}" if name in self.index else repr(name)

    def optional(self, name: str, *shapes: tuple[int, ...]) -> None:
        """A tensor that may be absent and is not used, but must be what its name says."""
        if name in self.index:
            self.tensor(name, *shapes)

    def plain_linear(self, name: str, rows: int, cols: int) -> Linear:
        """A linear that is never quantised."""
        return Linear(self.source(name), self.tensor(name, (rows, cols)))

    def linear(self, prefix: str, rows: int, cols: int) -> Linear:
        """A linear that may be block FP8: `prefix`.weight and, if it is, `prefix`.weight_scale_inv."""
        return Linear(self.source(f"{prefix}.weight"), *self.quantizable(f"{prefix}.weight", (rows, cols)))

    def quantizable(self, name: str, shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """A weight [.., rows, cols], and its scales [.., row blocks, column blocks] if it is FP8."""
        weight = self.tensor(name, shape, dtypes=("F8_E4M3", *PLAIN))
        scale_name = f"{name}_scale_inv"
        quantized = name in self.index and self.index.entry(name).dtype == "F8_E4M3"
        if not quantized:
            # With the weight absent, its scale is part of the same fault, not an unknown tensor.
            if scale_name in self.index:
                self._unclaimed.pop(scale_name, None)
                if name in self.index:
                    self._fault(scale_name, f"scales {name!r}, which is {self.index.entry(name).dtype}, not F8_E4M3")
            return weight, None
        if not self._declares_fp8:
            self._fault(
                name, f"is F8_E4M3, but {self._config} has no quantization_config that gives its weight_block_size"
            )
        if scale_name not in self.index:
            self._fault(name, f"is F8_E4M3, and its scale {scale_name!r} is missing")
            return weight, None
        return weight, self.tensor(scale_name, (*shape[:-2], blocks(shape[-2]), blocks(shape[-1])))

    def finish(self) -> None:
        if self._wrong:
            more = len(self._wrong) - 1
            also = f" (and {more} more such fault{'s' * (more > 1)})" if more else ""
            raise CheckpointError(f"{self._wrong[0]}{also}: use files and {self._config} of one checkpoint")
        problems = []
        if self._missing:
            problems.append(f"lacks {_some(self._missing)}")
        if self._unclaimed:
            problems.append(f"holds {_some(list(self._unclaimed), 'unknown ')}")
        if problems:
            raise CheckpointError(
                f"{self.index.folder} {' and '.join(problems)}: use files and {self._config} of one checkpoint"
            )

    def _fault(self, name: str, problem: str) -> None:
        self._wrong.append(f"{self.source(name)} {problem}")


def _nothing(shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.zeros((1,) * len(shape), np.float32)


def _some(names: list[str], kind: str = "") -> str:
    shown = ", ".join(repr(name[:200]) for name in names[:_SHOWN])
    if len(names) == 1:
        return f"the {kind}tensor {shown}"
    return f"{len(names)} {kind}tensors ({shown}{', ...' * (len(names) > _SHOWN)})"
