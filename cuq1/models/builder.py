"""Collects a plan's launches, and the buffers that they name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cuq1.models.q1 import Model, buffer_of, working_buffers
from cuq1.plan.kernel import Kernel
from cuq1.plan.types import Buffer, Launch, Plan, Ref


@dataclass
class Builder:
    """A plan in the making.

    distinct: distinct experts a layer, and context: positions cached, of which the bytes are counted.
    """

    model: Model
    distinct: float
    context: int
    short: bool = False  # full layers see no more than Model.short_context positions
    buffers: dict[str, Buffer] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        for buffer in working_buffers(self.model):
            self.buffers[buffer.name] = buffer

    def weight(self, name: str) -> Ref:
        if name not in self.buffers:
            found = self.model.weights.tensors[name]
            self.buffers[name] = buffer_of(name, found.shape, found.dtype)
        return Ref(name, 0)

    @property
    def peers(self) -> Ref | int:
        """The distances to the ranks' inboxes, for what pushes into them."""
        return Ref("peers") if self.model.inbox is not None else 0

    def maybe(self, name: str) -> Ref | int:
        """A weight that not every layer has, such as the scales of what is not quantised."""
        return self.weight(name) if name in self.model.weights.tensors else 0

    def size(self, *refs: Ref | int) -> int:
        return sum(self.buffers[ref.buffer].bytes for ref in refs if isinstance(ref, Ref))

    def add(self, kernel: Kernel, label: str, layer: int, args: Mapping[str, Any], read: float, write: float) -> None:
        args = {"fault": Ref("fault", 0), "live": 0, "layer": layer, **args}
        known = {name for name, *_ in kernel.args._fields_}
        args = {name: value for name, value in args.items() if name in known}
        self.launches.append(Launch(kernel, label, layer, args, int(read), int(write)))

    def plan(self) -> Plan:
        used = {value.buffer for launch in self.launches for value in launch.args.values() if isinstance(value, Ref)}
        return Plan(tuple(b for b in self.buffers.values() if b.name in used), tuple(self.launches))
