"""Launches and memory without a GPU: what is refused, and what reaches the driver."""

import ctypes
import enum
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cuq1.cuda import driver, launch, memory
from cuq1.cuda.abi import BandwidthArgs, Fault, PackArgs
from cuq1.cuda.kernels.bandwidth import read_once
from cuq1.cuda.module import Function
from cuq1.errors import DeviceError


class Status(enum.IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1


class Driver:
    """Remembers what is asked of it. free, whole: memory in bytes."""

    CUlaunchConfig = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="pdl", CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster"
    )
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE = 2, 1
    CUstream = CUfunction = CUdeviceptr = staticmethod(int)

    def __init__(self, free=10 << 30, whole=140 << 30, status=Status.SUCCESS, mapped=0):
        self.free, self.whole, self.status, self.mapped = free, whole, status, mapped
        self.launched, self.allocated, self.freed = [], [], []
        self.host = []

    @staticmethod
    def CUlaunchAttribute():  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802
        address = ctypes.c_void_p.from_address(parameters).value
        self.launched.append((config, function, BandwidthArgs.from_buffer_copy(BandwidthArgs.from_address(address))))
        return (self.status,)

    def cuMemGetInfo(self):  # noqa: N802
        return Status.SUCCESS, self.free, self.whole

    def cuMemAlloc(self, size):  # noqa: N802
        self.allocated.append(size)
        return Status.SUCCESS, 0x7000000000

    def cuMemFree(self, address):  # noqa: N802
        self.freed.append(address)
        return (Status.SUCCESS,)

    def cuMemHostAlloc(self, size, flags):  # noqa: N802
        assert flags == 3
        self.host.append(ctypes.create_string_buffer(b"\xff" * size, size))
        return Status.SUCCESS, ctypes.addressof(self.host[-1])

    def cuMemHostGetDevicePointer(self, address, flags):  # noqa: N802
        return Status.SUCCESS, address + self.mapped

    def cuMemFreeHost(self, address):  # noqa: N802
        self.freed.append(address)
        return (Status.SUCCESS,)


@pytest.fixture
def fake(monkeypatch):
    def install(**options):
        found = Driver(**options)
        for module in (launch, memory):
            monkeypatch.setattr(module, "bindings", lambda: found)
        monkeypatch.setattr(driver, "describe", lambda status: f"the CUDA driver failed with {status.name}")
        return found

    return install


def test_arguments_of_another_kernel_are_refused(fake):
    driver = fake()
    with pytest.raises(TypeError, match="read_once takes BandwidthArgs, not PackArgs"):
        launch.launch(Function(read_once(), 5, None), PackArgs(), 9)
    assert driver.launched == []


@pytest.mark.parametrize(("pdl", "cluster"), [(True, 1), (False, 1), (True, 4), (False, 2)])
def test_a_launch_carries_its_geometry_attributes_and_arguments(fake, pdl, cluster):
    driver = fake()
    kernel = replace(read_once(), grid=(8, 3, 2), block=96, cluster=cluster, smem=1000, pdl=pdl)
    launch.launch(Function(kernel, 5, None), BandwidthArgs(1, 2, 3), 9)
    ((config, function, args),) = driver.launched
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (8, 3, 2)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (96, 1, 1)
    assert (config.sharedMemBytes, config.hStream, function) == (1000, 9, 5)
    assert (args.data, args.out, args.count) == (1, 2, 3)
    found = {attribute.id: attribute.value for attribute in config.attrs}
    assert config.numAttrs == len(config.attrs) == len(found)
    assert ("pdl" in found) == pdl
    assert ("cluster" in found) == (cluster > 1)
    if pdl:
        assert found["pdl"].programmaticStreamSerializationAllowed == 1
    if cluster > 1:
        size = found["cluster"].clusterDim
        assert (size.x, size.y, size.z) == (cluster, 1, 1)


def test_a_refused_launch_says_which(fake):
    fake(status=Status.INVALID_VALUE)
    with pytest.raises(DeviceError, match=r"read_once cannot be launched with grid 528x1x1, block 512, cluster 1"):
        launch.launch(Function(read_once(), 5, None), BandwidthArgs(), 9)


def test_an_arena_gives_aligned_pieces_that_do_not_overlap(fake):
    driver = fake()
    sizes = {"a": 1, "b": 256, "c": 257, "d": 5}
    arena = memory.Arena(sizes)
    assert driver.allocated == [arena.total] == [256 + 256 + 512 + 256]
    ends = 0x7000000000
    for name, size in sizes.items():
        assert arena[name] >= ends
        assert arena[name] % 256 == 0
        ends = arena[name] + size
    assert ends <= 0x7000000000 + arena.total
    arena.close()
    arena.close()
    assert driver.freed == [0x7000000000]


def test_too_little_memory_is_refused_before_any_is_taken(fake):
    driver = fake(free=8 << 30)
    sizes = {f"small {i}": 1 << 20 for i in range(7)} | {"kv": 3 << 30, "weights": 6 << 30}
    with pytest.raises(DeviceError) as told:
        memory.Arena(sizes)
    message = str(told.value)
    assert driver.allocated == []
    assert message.startswith(
        "the model needs 9.01 GiB of GPU memory (weights 6.00 GiB, kv 3.00 GiB, small 0 1.00 MiB,"
    )
    assert "3 more 3.00 MiB)" in message
    assert "8.00 GiB of 140.00 GiB are free" in message
    assert "\n" not in message
    memory.Arena({"weights": 8 << 30})  # just fits


def test_a_piece_of_nothing_is_a_defect(fake):
    fake()
    with pytest.raises(ValueError, match="kv has 0 bytes"):
        memory.Arena({"kv": 0})


def test_a_fault_record_starts_empty_and_is_read_once_reported(fake):
    driver = fake()
    record = memory.MappedFault()
    assert record.read() is None
    record.view().what, record.view().layer = 2, 11
    found = record.read()
    assert isinstance(found, Fault)
    assert (found.what, found.layer) == (2, 11)
    record.clear()
    assert record.read() is None
    assert found.what == 2  # a copy
    address = record.address
    record.close()
    record.close()
    assert driver.freed == [address]
    assert record.read() is None


def test_mapped_memory_needs_one_address(fake):
    fake(mapped=16)
    with pytest.raises(DeviceError, match="unified addressing"):
        memory.Mapped(64)
