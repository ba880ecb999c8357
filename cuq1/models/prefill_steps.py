"""The steps that prompt processing is made of (cuq1.models.prefill): launches and sums of any chunk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod

from cuq1.cuda.kernels.prefill import CHUNK
from cuq1.models import q1
from cuq1.models.prefill_buffers import working_buffers
from cuq1.models.q1 import ITEM, Model, buffer_of
from cuq1.plan.dims import Dims
from cuq1.plan.kernel import Kernel
from cuq1.plan.types import Buffer, Launch, Plan, Ref, Value


@dataclass(frozen=True)
class Chunk:
    """Positions start .. start + rows - 1, and settle_from .. settle_to - 1 for the draft (see above).

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
        return x, y, whole(fields["splits"]) if self.label == "attention" else z


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


@dataclass
class Steps:
    """Steps in the making."""

    model: Model
    steps: list[Step | Sum] = field(default_factory=list)

    def weight(self, name: str) -> Ref:
        if name not in self.model.weights.tensors:
            raise KeyError(name)
        return Ref(name)

    def maybe(self, name: str) -> Ref | int:
        return Ref(name) if name in self.model.weights.tensors else 0

    def add(
        self,
        label: str,
        layer: int,
        make: Callable[[int], Kernel],
        args: Fields,
        at: Callable[[Chunk], Fields | None] = lambda chunk: {"rows": chunk.rows},
    ) -> None:
        tensors = self.model.weights.tensors
        names = {value.buffer for value in args.values() if isinstance(value, Ref)} & tensors.keys()
        size = sum(prod(tensors[name].shape) * ITEM[tensors[name].dtype] for name in names)
        self.steps.append(
            Step(label, layer, make, {"fault": Ref("fault"), "live": 0, "layer": layer, **args}, at, size)
        )

    def sum(
        self,
        buffer: str,
        layer: int,
        rows: Callable[[Chunk], int] = lambda chunk: chunk.rows,
        *,
        first: int = 0,
        columns: int | None = None,
    ) -> None:
        """Over ranks, of [rows, hidden], where there are several."""
        d = self.model.dims
        if d.ranks > 1:
            own = d.hidden if columns is None else columns
            self.steps.append(Sum("sum", layer, f"prefill.{buffer}", d.hidden, rows, first, own))


def plan_of(model: Model, steps: Sequence[Step | Sum], chunk: Chunk) -> Plan:
    """The steps' launches for a chunk, over the buffers that they name, without sums. Bytes count weights alone."""
    known = {buffer.name: buffer for buffer in (*q1.working_buffers(model), *working_buffers(model))}
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
            used.setdefault(ref.buffer, known.get(ref.buffer) or _weight_buffer(model, ref.buffer))
        launches.append(launch)
    return Plan(tuple(used.values()), tuple(launches))


def plain(dims: Dims) -> Dims:
    """The sizes that these kernels are compiled for: activations are halves in all precisions.

    Ranks' parts are summed between these kernels, not by them.
    """
    return replace(dims, fp8_activations=False, ranks=1)


@cache
def maker(function: Callable[..., Kernel], dims: Dims, **options: int | bool) -> Callable[[int], Kernel]:
    """One object for equal kernels, so that an executor can tell which launches share one."""
    return cache(partial(function, dims, **options))


def whole(value: Value) -> int:
    """A number of rows or splits, which is no address."""
    assert isinstance(value, int)
    return value


def _weight_buffer(model: Model, name: str) -> Buffer:
    tensor = model.weights.tensors[name]
    return buffer_of(name, tensor.shape, tensor.dtype)
