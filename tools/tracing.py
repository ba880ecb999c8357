"""Timelines of launches from the GPU's own clock: kernels compiled with TRACE, their entries collected and grouped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda.compile import compile_kernel
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.memory import Arena, copy_in
from cuq1.cuda.module import load
from cuq1.plan.dims import DRAFT
from cuq1.plan.kernel import Kernel
from cuq1.plan.types import Defines

# kernels_cu/common/trace.cuh: TraceEntry, and what stands before the entries of a TraceBuffer.
ENTRY = np.dtype(
    [
        *((name, np.uint64) for name in ("begin", "waiting", "resumed", "end")),
        *((name, np.int32) for name in ("kernel", "layer", "block", "sm")),
    ]
)
HEADER = 16
BLOCKS = 512  # of a launch that has places of its own


class Tracer:
    """Memory for entries, and the constants that make kernels write them. labels: of the launches to trace.

    A label with a dot names a part of a launch, which leaves its times in the launch's stead: `chain.down`. All of a
    launch's parts stand behind its label, in their order.

    layers: how many layers' launches have places of their own, which costs them less time. Then one round is kept, and
    of what has no place of its own (the draft's launches) as much as there is room for.
    """

    def __init__(self, labels: Iterable[str], room: int = 1 << 20, layers: int = 0) -> None:
        self.labels = tuple(labels)
        self.room, self._layers = room, layers
        self._places = len(self.labels) * layers * BLOCKS
        self._arena = Arena({"trace": HEADER + (self._places + room) * ENTRY.itemsize})
        self._arena.clear()
        self.clear()

    @property
    def defines(self) -> Mapping[str, Defines]:
        """For Plan.with_defines."""
        own: Defines = (("TRACE_LAYERS", self._layers), ("TRACE_BLOCKS", BLOCKS), ("TRACE_PLACES", f"{self._places}u"))
        found: dict[str, Defines] = {}
        for number, label in enumerate(self.labels):
            parts = sum(other.startswith(f"{label}.") for other in self.labels)
            phases: Defines = (("TRACE_PHASES", parts),) if parts else ()
            found[label] = (("TRACE", number), *phases, *own[: 3 * bool(self._layers)])
        return found

    def attach(self, kernels: Iterable[Kernel]) -> None:
        """Points the modules of those kernels that are traced at the memory."""
        driver = bindings()
        value = np.array([self._arena["trace"]], np.uint64)
        for kernel in kernels:
            if any(name == "TRACE" for name, _ in kernel.defines):
                module = load(compile_kernel(kernel).path, kernel).module
                pointer, _ = check(driver.cuModuleGetGlobal(driver.CUmodule(module.ptr), b"trace_buffer"))
                copy_in(int(pointer), value)

    def clear(self) -> None:
        """Forgets all entries."""
        self.forget(0)
        check(bindings().cuCtxSynchronize())
        header = np.array([0, self.room, 0, 0], np.uint32)
        copy_in(self._arena["trace"], header)

    def forget(self, stream: int) -> None:
        """Enqueues what forgets all entries of what runs before it."""
        driver, start = bindings(), self._arena["trace"]
        on = driver.CUstream(stream)
        check(driver.cuMemsetD32Async(driver.CUdeviceptr(start), 0, 1, on))
        if self._places:
            size = self._places * ENTRY.itemsize
            check(driver.cuMemsetD8Async(driver.CUdeviceptr(start + HEADER), 0, size, on))

    def read(self) -> NDArray[np.void]:
        """The entries (dtype ENTRY), in the order in which blocks ended, if none has a place of its own."""
        driver = bindings()
        header = np.empty(4, np.uint32)
        check(driver.cuMemcpyDtoH(header.ctypes.data, driver.CUdeviceptr(self._arena["trace"]), HEADER))
        if header[0] > self.room:
            raise ValueError(f"{header[0]} entries do not fit {self.room}: trace fewer rounds")
        found = np.empty(self._places + int(header[0]), ENTRY)
        if len(found):
            source = driver.CUdeviceptr(self._arena["trace"] + HEADER)
            check(driver.cuMemcpyDtoH(found.ctypes.data, source, found.nbytes))
        return found[found["end"] > 0]

    def close(self) -> None:
        self._arena.close()


@dataclass(frozen=True)
class Span:
    """One launch, nanoseconds: begin and end of its first and last block; `resumed` when the first block had waited
    for the predecessor, `last_begin` when the last block came to a multiprocessor. waiting: when the first block that
    waited began to; `come`: when the last block had what it waited for."""

    label: str
    layer: int
    begin: int
    last_begin: int
    waiting: int
    resumed: int
    end: int
    blocks: int
    come: int


@dataclass(frozen=True)
class Step:
    """All launches of one name in a round, microseconds of all of them together.

    wait: from the predecessor's end until the last block had what it waited for: the launch boundary, and what peers
    push; work: from then on to the launch's end.
    """

    count: float
    wait: float
    work: float


def steps(rounds: Sequence[Sequence[Span]]) -> dict[str, Step]:
    """By `target LABEL` or `draft LABEL`, of an average of several rounds. A round's first launch is left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in rounds:
        for before, span in pairwise(one):
            name = ("draft " if span.layer == DRAFT else "target ") + span.label
            found.setdefault(name, []).append(((span.come - before.end) / 1e3, (span.end - span.come) / 1e3))
    parts = {
        name: [sum(column) / len(rounds) for column in zip(*values, strict=True)] for name, values in found.items()
    }
    return {name: Step(len(found[name]) / len(rounds), wait, work) for name, (wait, work) in parts.items()}


def spans(entries: NDArray[np.void], labels: tuple[str, ...]) -> list[Span]:
    """Entries as launches, in order. Launches of one label and layer must not overlap, as in a round they don't."""
    found = []
    keys = np.unique(entries[["kernel", "layer"]])
    for key in keys:
        own = entries[(entries["kernel"] == key["kernel"]) & (entries["layer"] == key["layer"])]
        own = own[np.argsort(own["begin"], kind="stable")]
        ends = np.maximum.accumulate(own["end"])
        starts = [0, *(np.flatnonzero(own["begin"][1:] > ends[:-1]) + 1), len(own)]
        for first, last in pairwise(starts):
            part = own[first:last]
            waited = part[part["resumed"] > 0]
            resumed = int(waited["resumed"].min()) if len(waited) else int(part["begin"].min())
            found.append(
                Span(
                    labels[int(key["kernel"])],
                    int(key["layer"]),
                    int(part["begin"].min()),
                    int(part["begin"].max()),
                    int(waited["waiting"].min()) if len(waited) else resumed,
                    resumed,
                    int(part["end"].max()),
                    len(part),
                    int(waited["resumed"].max()) if len(waited) else int(part["begin"].max()),
                )
            )
    return sorted(found, key=lambda span: (span.begin, span.end))
