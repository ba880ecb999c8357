"""CUDA graphs: a stream's work, captured once and replayed with one call."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from cuq1.cuda.driver import bindings, check


class Graph:
    """An executable graph. Use as a context manager, or call close."""

    def __init__(self, graph: Any, *, device: bool = False) -> None:
        """Instantiates `graph` (a CUgraph), which is destroyed. device: kernels may launch it, once it is uploaded."""
        driver = bindings()
        self._executable: Any = None
        try:
            self.nodes = int(check(driver.cuGraphGetNodes(graph, 0))[1])
            flags = driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH.value if device else 0
            self._executable = check(driver.cuGraphInstantiate(graph, flags))
        finally:
            check(driver.cuGraphDestroy(graph))

    @property
    def handle(self) -> int:
        """What a kernel launches it by."""
        return int(self._executable)

    def upload(self, stream: int) -> None:
        """Prepares the first launch, so that it costs no more than the later ones."""
        driver = bindings()
        check(driver.cuGraphUpload(self._executable, driver.CUstream(stream)))

    def launch(self, stream: int) -> None:
        driver = bindings()
        check(driver.cuGraphLaunch(self._executable, driver.CUstream(stream)))

    def close(self) -> None:
        """Frees the graph; it must not be running."""
        if self._executable is not None:
            check(bindings().cuGraphExecDestroy(self._executable))
            self._executable = None

    def __enter__(self) -> "Graph":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Capture:
    """What a `capture` recorded: instantiate it once the block has ended."""

    _graph: Any = None

    def instantiate(self, *, device: bool = False) -> Graph:
        """device: as in Graph."""
        if self._graph is None:
            raise ValueError("nothing was captured, or it has been instantiated already")
        graph, self._graph = self._graph, None
        return Graph(graph, device=device)


@contextmanager
def capture(stream: int) -> Iterator[Capture]:
    """Records what the block enqueues on `stream` instead of running it.

    Strict: whatever would synchronise or allocate in this thread meanwhile is an error. Where the block raises,
    the recording is ended and thrown away.
    """
    driver = bindings()
    handle, recorded = driver.CUstream(stream), Capture()
    check(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    try:
        yield recorded
    except BaseException:
        status, graph = driver.cuStreamEndCapture(handle)
        if int(status) == 0 and int(graph) != 0:
            driver.cuGraphDestroy(graph)
        raise
    recorded._graph = check(driver.cuStreamEndCapture(handle))


def stream() -> int:
    """A new stream that does not wait for the legacy default stream (a CUstream)."""
    driver = bindings()
    return int(check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)))


def busy(handle: int) -> bool:
    """Whether the stream has work that has not ended. Raises DeviceError for what failed there."""
    driver = bindings()
    status = driver.cuStreamQuery(driver.CUstream(handle))
    if status[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
        return True
    check(status)
    return False


def synchronize(handle: int) -> None:
    driver = bindings()
    check(driver.cuStreamSynchronize(driver.CUstream(handle)))
