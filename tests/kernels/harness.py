"""Runs single kernels on a GPU: compile, launch, time.

Nothing here imports CuPy or CUDA until a Gpu is made.
"""

from contextlib import contextmanager

import numpy as np
import pytest

from cuq1.cuda.abi import FAULTS, KERNELS, BandwidthArgs
from cuq1.cuda.driver import bindings, check, open_device, require
from cuq1.cuda.graph import capture, stream, synchronize
from cuq1.cuda.kernels import bandwidth
from cuq1.cuda.launch import launch
from cuq1.cuda.memory import MappedFault
from cuq1.cuda.module import build
from cuq1.errors import DeviceError
from tests.paths import ROOT

POISON = 0x7F  # a byte of an integer that no kernel has written


@contextmanager
def tells():
    """A check fails, or a kernel reports what it met; not: a patch that fits nowhere, or does not compile."""
    with pytest.raises((AssertionError, DeviceError)) as found:
        yield
    assert "does not compile" not in str(found.value)


def replaced(text, *pairs):
    """The text after several replacements (old, new), one behind the other; ValueError where one has not one place."""
    for old, new in pairs:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} occurs {text.count(old)} times")
        text = text.replace(old, new)
    return text


def inclusion(name):
    """What includes a header in a source, and what stands there instead: the header's text."""
    return f'#include "{name}"', (ROOT / "kernels_cu" / name).read_text().replace("#pragma once", "")


def in_header(name, old, new):
    """A patch of a header, in the place where a kernel's source includes it: for Gpu.run. ValueError where there is
    not one place for it."""
    include, text = inclusion(name)
    return include, replaced(text, (old, new))


class Gpu:
    """A GPU with one stream. Arrays are CuPy's: x.data.ptr is the address, x.get() copies back."""

    def __init__(self, ordinal=0):
        self.cupy = require("cupy")
        self.device = open_device(ordinal)
        self.stream = stream()
        self.fault = MappedFault()  # gpu.fault.address goes into args.fault; run raises on what is reported there
        self._ceiling = None

    def close(self):
        self.fault.close()

    def array(self, values):
        """A copy on the GPU, of the same dtype and shape, contiguous."""
        return self.cupy.asarray(np.ascontiguousarray(values))

    def poison(self, shape, dtype):
        """What no kernel has written: NaN in floats, bytes of 0x7F in integers."""
        dtype = np.dtype(dtype)
        if dtype.kind == "f":
            return self.cupy.full(shape, np.nan, dtype)
        return self.array(np.full(np.prod(shape, dtype=int) * dtype.itemsize, POISON, np.uint8).view(dtype)).reshape(
            shape
        )

    def run(self, kernel, args, patch=None):
        """Compiles, launches and waits. patch: (old, new) in the kernel's source. DeviceError for what goes wrong."""
        self.cupy.cuda.Device().synchronize()  # CuPy's own stream has filled the arrays
        launch(build(kernel, self.device.arch, patch), args, self.stream)
        self.wait()

    def wait(self):
        """Waits for the stream. Raises DeviceError for a fault that a kernel reported through gpu.fault."""
        try:
            synchronize(self.stream)
        except DeviceError as error:
            raise DeviceError(f"{error}{self._report()}") from None
        report = self._report()
        if report:
            self.fault.clear()
            raise DeviceError(f"a kernel reported a fault{report}")

    def _report(self):
        found = self.fault.read()
        if found is None:
            return ""
        what, kernel = FAULTS.get(found.what, found.what), KERNELS.get(found.kernel, found.kernel)
        return f" ({what} in {kernel}, layer {found.layer})"

    def median_us(self, calls, repeats=50, copies=None):
        """Microseconds of all `calls` [(kernel, args[, patch])] in order, once: (median, (10th, 90th percentile)).

        Timed are replays of a graph that holds the calls several times over, so that what starting a graph costs
        does not count. Give calls enough different weights: what one replay leaves in L2, the next one finds.
        """
        functions = [(build(kernel, self.device.arch, *patch), args) for kernel, args, *patch in calls]
        copies = copies or max(1, 64 // len(functions))
        self.cupy.cuda.Device().synchronize()
        with capture(self.stream) as captured:
            for _ in range(copies):
                for function, args in functions:
                    launch(function, args, self.stream)
        driver = bindings()
        flags = driver.CUevent_flags.CU_EVENT_DEFAULT.value
        events = [(check(driver.cuEventCreate(flags)), check(driver.cuEventCreate(flags))) for _ in range(repeats)]
        handle = driver.CUstream(self.stream)
        with captured.instantiate() as graph:
            graph.upload(self.stream)
            for _ in range(5):
                graph.launch(self.stream)
            for begin, end in events:
                check(driver.cuEventRecord(begin, handle))
                graph.launch(self.stream)
                check(driver.cuEventRecord(end, handle))
            self.wait()
        times = [1e3 * check(driver.cuEventElapsedTime(begin, end)) / copies for begin, end in events]
        for pair in events:
            for event in pair:
                check(driver.cuEventDestroy(event))
        low, middle, high = np.percentile(times, [10, 50, 90])
        return float(middle), (float(low), float(high))

    def read_ceiling(self):
        """GB/s of reading 4 GiB once: a median, measured when first asked for."""
        if self._ceiling is None:
            words = (4 << 30) // 16 // bandwidth.WORDS * bandwidth.WORDS
            data = self.cupy.empty(words * 16, np.uint8)
            out = self.cupy.zeros(bandwidth.BLOCKS, np.uint32)
            args = BandwidthArgs(data.data.ptr, out.data.ptr, words)
            self.run(bandwidth.fill_random(), args)
            median, _ = self.median_us([(bandwidth.read_once(), args)], repeats=10, copies=4)
            self._ceiling = words * 16 / median / 1e3
        return self._ceiling
