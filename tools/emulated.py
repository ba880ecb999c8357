"""Several ranks of a target on one GPU, in one process: every launch for all of them before the next one.

Whatever a launch polls for has come before it begins, so no two ranks need run at once, and memory can be looked at
between any two launches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.config import Q1Config
from cuq1.cuda import abi, graph
from cuq1.cuda.driver import bindings, check, open_device
from cuq1.cuda.execute import Program
from cuq1.cuda.memory import Arena, MappedFault, copy_in
from cuq1.cuda.weights import Layout
from cuq1.errors import DeviceError
from cuq1.models import q1
from cuq1.plan.types import Plan, Ref

Fill = Callable[[Layout, int, int], None]


class Ranks:
    """The ranks of `layouts`. fill(layout, address, stream) fills a rank's weights. capacity: positions of the caches.

    models: one for each rank, folded. more: sizes in bytes of further memory of each rank.
    """

    def __init__(
        self,
        config: Q1Config,
        layouts: Sequence[Layout],
        fill: Fill,
        capacity: int,
        more: Mapping[str, int] | None = None,
    ) -> None:
        device, count = open_device(), len(layouts)
        self.name, self.arch = device.name, device.arch
        size: dict[str, Any] = {"tp": count, "ranks": count, "capacity": capacity, "sms": device.multiprocessors}
        self.models = [
            q1.resolve(config, None, layout, **size, rank=rank, place=rank) for rank, layout in enumerate(layouts)
        ]
        self.stream = graph.stream()
        self.fault = MappedFault()
        self.addresses: list[dict[str, int]] = []
        for model, layout in zip(self.models, layouts, strict=True):
            buffers = {b.name: b.bytes for b in q1.working_buffers(replace(model, folded=False)) if b.name != "fault"}
            arena = Arena({"weights": layout.nbytes, **buffers, **(more or {})})
            arena.clear()
            base = arena["weights"]
            fill(layout, base, self.stream)
            graph.synchronize(self.stream)
            tensors = {name: base + tensor.offset for name, tensor in layout.tensors.items()}
            self.addresses.append({**arena.addresses, **tensors, "fault": self.fault.address})
        for rank, addresses in enumerate(self.addresses):
            for name, table in self.models[rank].inverse_frequencies.items():
                copy_in(addresses[name], table)
            if count > 1:
                distances = np.zeros(abi.MAX_RANKS, np.int64)
                distances[:count] = [other["inbox"] - addresses["inbox"] for other in self.addresses]
                copy_in(addresses["peers"], distances)
                inbox = self.models[rank].inbox
                assert inbox is not None
                self.set(rank, Ref("inbox"), 0xFF, inbox.bytes)

    def programs(self, plan: Callable[[q1.Model], Plan]) -> list[Program]:
        """A plan of each rank's model, bound to its memory."""
        return [Program(plan(model), own, self.arch) for model, own in zip(self.models, self.addresses, strict=True)]

    def step(self, programs: Sequence[Program], index: int) -> None:
        """Launch number `index` of all ranks, to its end. Raises DeviceError for what kernels report."""
        for program in programs:
            program.issue(self.stream, index, index + 1)
        graph.synchronize(self.stream)
        fault = self.fault.read()
        if fault is not None:
            where = f"{abi.KERNELS.get(fault.kernel)} of layer {fault.layer}"
            raise DeviceError(f"{abi.FAULTS.get(fault.what)} appeared in {where} (detail {fault.detail})")

    def read(self, rank: int, where: Ref | str, shape: Sequence[int], dtype: Any = np.float32) -> NDArray[Any]:
        """An array of that shape and dtype from the start of a buffer, or from an address."""
        out = np.empty(shape, dtype)
        check(bindings().cuMemcpyDtoH(out.ctypes.data, self._pointer(rank, where), out.nbytes))
        return out

    def write(self, rank: int, where: Ref | str, values: NDArray[Any]) -> None:
        copy_in(int(self._pointer(rank, where)), values)

    def set(self, rank: int, where: Ref | str, byte: int, size: int) -> None:
        """Sets `size` bytes."""
        check(bindings().cuMemsetD8(self._pointer(rank, where), byte, size))
        check(bindings().cuCtxSynchronize())

    def _pointer(self, rank: int, where: Ref | str) -> Any:
        ref = Ref(where) if isinstance(where, str) else where
        return bindings().CUdeviceptr(self.addresses[rank][ref.buffer] + ref.offset)
