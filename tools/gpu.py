"""Timing on the GPU: replays of graphs between events, and the read bandwidth that they are judged by."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cuq1.cuda import graph
from cuq1.cuda.abi import BandwidthArgs
from cuq1.cuda.driver import bindings, check, open_device
from cuq1.cuda.kernels import bandwidth
from cuq1.cuda.launch import launch
from cuq1.cuda.memory import Arena
from cuq1.cuda.module import build


class Spread(NamedTuple):
    """Microseconds: the median, the 10th and the 90th percentile."""

    median: float
    low: float
    high: float


def spread_us(enqueue: Callable[[], None], stream: int, repeats: int = 30, warm_up: int = 5) -> Spread:
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
        times = [1e3 * check(driver.cuEventElapsedTime(begin, end)) for begin, end in events]
    finally:
        for pair in events:
            for event in pair:
                check(driver.cuEventDestroy(event))
    low, middle, high = np.percentile(times, [10, 50, 90])
    return Spread(float(middle), float(low), float(high))


def read_ceiling(stream: int) -> float:
    """GB/s of reading 4 GiB of random data once, 16 bytes a load: the median of ten."""
    arch = open_device().arch
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
