"""What the checks of the decode loop share: engines, requests, and engines whose launches leave their times."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cuq1.cuda.driver import open_device
from cuq1.cuda.engine import CudaEngine
from cuq1.cuda.execute import Program
from cuq1.cuda.runtime import Runtime
from cuq1.plan.types import Plan
from cuq1.sampling import DecodeParams, Round
from tools.bench import NANO
from tools.tracing import Tracer

Report = dict[str, Any]


def opened(loop: str, **more: Any) -> CudaEngine:
    return CudaEngine(NANO, loop=loop, **more)  # type: ignore[arg-type]


def finished(engine: CudaEngine, ids: Sequence[int], params: DecodeParams) -> tuple[list[Round], str | None]:
    """All rounds of a request on a fresh sequence, and why it ended."""
    engine.rewind(0)
    engine.prefill(ids)
    stream = engine.decode(params)
    return list(stream), stream.finish_reason


def flat(rounds: Sequence[Round]) -> list[int]:
    return [token for step in rounds for token in step]


@contextmanager
def traced(loop: str, labels: Sequence[str], room: int = 1 << 21) -> Iterator[tuple[CudaEngine, Tracer]]:
    """An engine whose launches of these labels leave their times."""
    open_device()
    tracer = Tracer(labels, room)
    bind = Runtime.program

    def program(runtime: Runtime, plan: Plan) -> Program:
        bound = bind(runtime, plan)
        tracer.attach(bound.plan.kernels())
        return bound

    with mock.patch.object(Runtime, "program", program), opened(loop, defines=tracer.defines) as engine:
        yield engine, tracer
    tracer.close()


def timed(engine: CudaEngine, ids: Sequence[int], params: DecodeParams) -> tuple[float, int]:
    """Seconds of decoding, the prompt's not counted, and tokens."""
    engine.prefill(ids)
    start = time.perf_counter()
    count = sum(len(step) for step in engine.decode(params))
    return time.perf_counter() - start, count
