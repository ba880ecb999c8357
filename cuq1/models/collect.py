"""Buffers by name, and plans in the making: what all models' plans are put together with."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Protocol

from cuq1.plan.kernel import Kernel
from cuq1.plan.types import Buffer, Launch, Plan, Ref

ITEM = {"float32": 4, "float16": 2, "uint8": 1, "int32": 4, "float64": 8, "uint16": 2, "int64": 8}


class Tensor(Protocol):
    """A tensor of a rank's weights."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


def buffer_of(name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
    """A buffer, its bytes counted; dtype is one of ITEM's."""
    return Buffer(name, shape, dtype, prod(shape) * ITEM[dtype])


class Collector:
    """Collects a plan's launches, and the buffers that they name. tensors: weights by name."""

    def __init__(self, tensors: Mapping[str, Tensor], buffers: Iterable[Buffer]) -> None:
        self._tensors = tensors
        self.buffers = {buffer.name: buffer for buffer in buffers}
        self.launches: list[Launch] = []

    def weight(self, name: str) -> Ref:
        """Raises KeyError where there is none of that name."""
        if name not in self.buffers:
            found = self._tensors[name]
            self.buffers[name] = buffer_of(name, found.shape, found.dtype)
        return Ref(name, 0)

    def maybe(self, name: str) -> Ref | int:
        """A weight that not every layer has, such as the scales of what is not quantised."""
        return self.weight(name) if name in self._tensors else 0

    def size(self, *refs: Ref | int) -> int:
        """Bytes of whole buffers."""
        return sum(self.buffers[ref.buffer].bytes for ref in refs if isinstance(ref, Ref))

    def add(
        self,
        kernel: Kernel,
        label: str,
        layer: int,
        args: Mapping[str, Any],
        read: float,
        write: float,
        variant: str = "",
    ) -> None:
        """A launch; arguments that its kernel does not have are left out."""
        args = {"fault": Ref("fault", 0), "live": 0, "layer": layer, **args}
        known = {name for name, *_ in kernel.args._fields_}
        args = {name: value for name, value in args.items() if name in known}
        self.launches.append(Launch(kernel, label, layer, args, int(read), int(write), variant))

    def plan(self) -> Plan:
        """The launches, and of the buffers those that they name."""
        used = {ref.buffer for launch in self.launches for _, ref in launch.refs()}
        return Plan(tuple(b for b in self.buffers.values() if b.name in used), tuple(self.launches))
