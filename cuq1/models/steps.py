"""The steps that processing a prompt is made of: launches, and sums over ranks, of any chunk of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from cuq1.cuda.kernels.prefill import CHUNK
from cuq1.models.collect import Tensor, buffer_of
from cuq1.plan.kernel import Kernel
from cuq1.plan.types import Buffer, Launch, Plan, Ref, Value


@dataclass(frozen=True)
class Chunk:
    """Positions start .. start + rows - 1, and settle_from .. settle_to - 1 for a draft (cuq1.models.prefill).

    ValueError for what no chunk can be.
    """

    start: int
    rows: int
    settle_from: int = 0
    settle_to: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= CHUNK or self.start < 0:
            raise ValueError(f"a chunk has 1 to {CHUNK} rows from position 0 on: {self}")
        if self.settle_to > self.settle_from and not self.start - 1 <= self.settle_from < self.settle_to <= self.end:
            raise ValueError(f"the draft can take in rows {self.start - 1} to {self.end - 1}: {self}")

    @property
    def end(self) -> int:
        return self.start + self.rows


Fields = Mapping[str, Value]


def all_rows(chunk: Chunk) -> Fields:
    """What a chunk changes in most steps."""
    return {"rows": chunk.rows}


@dataclass(frozen=True)
class Step:
    """A launch of any chunk.

    make: the kernel for a number of rows, which changes its grid only; args: what no chunk changes; at: what a chunk
    changes, `rows` among it, or None where it has no such launch; weight_bytes: what it reads of the weights.
    """

    label: str
    layer: int
    make: Callable[[int], Kernel]
    args: Fields
    at: Callable[[Chunk], Fields | None]
    weight_bytes: int

    def grid(self, fields: Fields) -> tuple[int, int, int]:
        """The kernel's grid for what `at` returned: for its rows, and attention's splits of the keys."""
        x, y, z = self.make(whole(fields["rows"])).grid
        split = self.label == "attention" and "splits" in fields
        return x, y, whole(fields["splits"]) if split else z


@dataclass(frozen=True)
class Sum:
    """What is in a buffer becomes its sum over ranks: FP32 [rows, width], from the buffer's beginning.

    rows: of a chunk; 0 where it has none. first, columns: where a rank gives these columns alone, the others count as
    zero, whatever is there.
    """

    label: str
    layer: int
    buffer: str
    width: int
    rows: Callable[[Chunk], int]
    first: int
    columns: int


class StepList:
    """Steps in the making. tensors: weights by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.steps: list[Step | Sum] = []

    def weight(self, name: str) -> Ref:
        """Raises KeyError where there is none of that name."""
        if name not in self._tensors:
            raise KeyError(name)
        return Ref(name)

    def maybe(self, name: str) -> Ref | int:
        return Ref(name) if name in self._tensors else 0

    def add(
        self,
        label: str,
        layer: int,
        make: Callable[[int], Kernel],
        args: Fields,
        at: Callable[[Chunk], Fields | None] = all_rows,
    ) -> None:
        names = {value.buffer for value in args.values() if isinstance(value, Ref)} & self._tensors.keys()
        size = sum(_weight_buffer(self._tensors, name).bytes for name in names)
        self.steps.append(
            Step(label, layer, make, {"fault": Ref("fault"), "live": 0, "layer": layer, **args}, at, size)
        )


def plan_over(
    buffers: Iterable[Buffer], tensors: Mapping[str, Tensor], steps: Sequence[Step | Sum], chunk: Chunk
) -> Plan:
    """The steps' launches for a chunk, without sums, over those buffers and weights that they name.

    Bytes count weights alone.
    """
    known = {buffer.name: buffer for buffer in buffers}
    launches = []
    used: dict[str, Buffer] = {}
    for step in steps:
        if isinstance(step, Sum):
            continue
        fields = step.at(chunk)
        if fields is None:
            continue
        args = {**step.args, **fields}
        kernel = replace(step.make(whole(fields["rows"])), grid=step.grid(fields))
        launch = Launch(kernel, step.label, step.layer, args, step.weight_bytes, 0)
        for _, ref in launch.refs():
            used.setdefault(ref.buffer, known.get(ref.buffer) or _weight_buffer(tensors, ref.buffer))
        launches.append(launch)
    return Plan(tuple(used.values()), tuple(launches))


@cache
def maker(function: Callable[..., Kernel], dims: Any, **options: int | bool) -> Callable[[int], Kernel]:
    """One object for equal kernels, so that an executor can tell which launches share one."""
    return cache(partial(function, dims, **options))


def whole(value: Value) -> int:
    """A number of rows or splits, which is no address."""
    assert isinstance(value, int)
    return value


def _weight_buffer(tensors: Mapping[str, Tensor], name: str) -> Buffer:
    tensor = tensors[name]
    return buffer_of(name, tensor.shape, tensor.dtype)
