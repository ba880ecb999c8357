"""Prompt processing on the GPU: the steps of cuq1.models.prefill, bound to addresses once and issued for any chunk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from cuq1.cuda.driver import bindings, check
from cuq1.cuda.execute import load_all
from cuq1.cuda.launch import Call
from cuq1.cuda.ranks import Ranks
from cuq1.models.steps import Chunk, Step, Sum
from cuq1.plan.types import set_field


class Chunks:
    """Issues steps for one chunk after another.

    addresses: {buffer name: device address}, of every buffer that a step names. ranks: who sums, where there are steps
    that do. A step's kernel is loaded once: the rows of a chunk change its grid alone. Raises DeviceError where a
    kernel does not compile or load, KeyError for a buffer without an address.
    """

    def __init__(
        self,
        steps: Sequence[Step | Sum],
        addresses: Mapping[str, int],
        ranks: Ranks | None = None,
        arch: str = "sm_90a",
    ) -> None:
        self._addresses = dict(addresses)
        self._ranks = ranks
        makers = dict.fromkeys(step.make for step in steps if isinstance(step, Step))
        kernels = {make: make(1) for make in makers}
        functions = load_all(list(dict.fromkeys(kernels.values())), arch)
        self._calls: list[tuple[Step, Call] | tuple[Sum, None]] = []
        for step in steps:
            if isinstance(step, Sum):
                self._calls.append((step, None))
                continue
            args = kernels[step.make].args()
            for name, value in step.args.items():
                set_field(args, name, value, addresses)
            self._calls.append((step, Call(functions[kernels[step.make]], args)))

    def issue(self, chunk: Chunk, stream: int) -> None:
        """Enqueues the chunk's launches on a stream, in order."""
        for _, issue in self.launches(chunk):
            issue(stream)

    def launches(self, chunk: Chunk) -> Iterator[tuple[str, Callable[[int], None]]]:
        """(label, what enqueues it on a stream) of the chunk's launches; each is to be called before the next."""
        for step, call in self._calls:
            if isinstance(step, Sum):
                if step.rows(chunk):
                    yield step.label, partial(self._sum, step, step.rows(chunk))
                continue
            fields = step.at(chunk)
            if fields is None:
                continue
            assert call is not None
            for name, value in fields.items():
                set_field(call.args, name, value, self._addresses)
            yield step.label, partial(call.issue, grid=step.grid(fields))

    def _sum(self, step: Sum, rows: int, stream: int) -> None:
        """NCCL's kernel comes without programmatic serialisation: it waits for the end of what is before it."""
        assert self._ranks is not None
        address = self._addresses[step.buffer]
        end = step.first + step.columns
        for first, columns in ((0, step.first), (end, step.width - end)):
            if columns:
                driver = bindings()
                at = driver.CUdeviceptr(address + first * 4)
                check(driver.cuMemsetD2D32Async(at, step.width * 4, 0, columns, rows, driver.CUstream(stream)))
        self._ranks.sum(address, rows * step.width, stream)
