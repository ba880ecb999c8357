"""Copies to the GPU, against a driver that records what it is asked."""

from ctypes import string_at

import numpy as np
import pytest

from cuq1.cuda import memory


class Driver:
    """Copies arrive late, as they may from pageable memory: only when the context has been waited for."""

    def __init__(self):
        self.memory, self.under_way = {}, []

    def CUdeviceptr(self, address):  # noqa: N802  (the driver's names)
        return address

    def cuMemcpyHtoD(self, address, source, nbytes):  # noqa: N802
        self.under_way.append((address, string_at(source, nbytes)))

    def cuCtxSynchronize(self):  # noqa: N802
        self.memory.update(self.under_way)
        self.under_way.clear()


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(memory, "bindings", lambda: found)
    monkeypatch.setattr(memory, "check", lambda result: result)
    return found


@pytest.mark.parametrize("step", [1, 2])
def test_a_copy_has_arrived_when_it_returns(driver, step):
    values = np.arange(10, dtype=np.int32)[::step]  # not contiguous for 2
    memory.copy_in(4096, values)
    assert driver.memory == {4096: values.tobytes()}


def test_a_copy_that_nobody_waits_for_is_noticed(driver, monkeypatch):
    """The control: cuMemcpyHtoD by itself."""
    monkeypatch.setattr(driver, "cuCtxSynchronize", lambda: None)
    memory.copy_in(4096, np.arange(10, dtype=np.int32))
    assert driver.memory == {}
    assert len(driver.under_way) == 1
