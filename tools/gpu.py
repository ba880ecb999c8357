"""Timing on the GPU: replays of graphs between events, and the read bandwidth that they are judged by."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cuq1.cuda import graph
from cuq1.cuda.abi import BandwidthArgs
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.kernels import bandwidth
from cuq1.cuda.launch import launch
from cuq1.cuda.memory import Arena
from cuq1.cuda.module import build


class Spread(NamedTuple):
    """Microseconds: the median, the 10th and the 90th percentile."""

    median: float
    low: float
    high: float


def spread_of(times: Sequence[float]) -> Spread:
    low, middle, high = np.percentile(times, [10, 50, 90])
    return Spread(float(middle), float(low), float(high))


def spread_us(enqueue: Callable[[], None], stream: int, repeats: int = 30, warm_up: int = 5) -> Spread:
    """The spread of `times_us`."""
    return spread_of(times_us(enqueue, stream, repeats, warm_up))


def times_us(enqueue: Callable[[], None], stream: int, repeats: int = 30, warm_up: int = 5) -> list[float]:
    """Microseconds between events before and after what `enqueue` puts on the stream, one measurement a call."""
    driver = bindings()
    handle = driver.CUstream(stream)
    flags = driver.CUevent_flags.CU_EVENT_DEFAULT.value
    events = [(check(driver.cuEventCreate(flags)), check(driver.cuEventCreate(flags))) for _ in range(repeats)]
    try:
        for _ in range(warm_up):
            enqueue()
        for begin, end in events:
            check(driver.cuEventRecord(begin, handle))
            enqueue()
            check(driver.cuEventRecord(end, handle))
        graph.synchronize(stream)
        return [1e3 * float(check(driver.cuEventElapsedTime(begin, end))) for begin, end in events]
    finally:
        for pair in events:
            for event in pair:
                check(driver.cuEventDestroy(event))


def read_ceiling(stream: int, arch: str = "sm_90a") -> float:
    """GB/s of reading 4 GiB of random data once, 16 bytes a load: the median of ten."""
    words = (4 << 30) // 16 // bandwidth.WORDS * bandwidth.WORDS
    arena = Arena({"data": words * 16, "out": bandwidth.BLOCKS * 4})
    try:
        args = BandwidthArgs(arena["data"], arena["out"], words)
        launch(build(bandwidth.fill_random(), arch), args, stream)
        reader = build(bandwidth.read_once(), arch)
        spread = spread_us(lambda: launch(reader, args, stream), stream, repeats=10, warm_up=2)
    finally:
        graph.synchronize(stream)
        arena.close()
    return words * 16 / spread.median / 1e3


def alternating_us(
    ready: Mapping[str, graph.Graph], stream: int, blocks: int, repeats: int, before: Callable[[], object] = bool
) -> dict[str, list[float]]:
    """Microseconds of each graph's replays, in `blocks` blocks of `repeats` that take turns; `before`: each block."""
    found: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(blocks):
        for name, one in ready.items():
            before()
            found[name] += times_us(lambda one=one: one.launch(stream), stream, repeats)  # type: ignore[misc]
    return found
