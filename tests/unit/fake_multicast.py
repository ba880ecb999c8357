"""A driver with multicast that keeps account: what each rank called, and what it has not given back."""

import enum
import os
import threading
import time
from types import SimpleNamespace

GRANULE, PAGE = 4 << 20, 2 << 20  # of multicast objects, and of memory


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_UNKNOWN = 999


OK = CUresult.CUDA_SUCCESS


class HandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class Machine:
    """All ranks' devices and the switch.

    fails: (rank, call, n): that rank's n-th call of that name fails, from 0. slow: (rank, call) that takes 0.5 s.
    """

    def __init__(self, *, fails=None, slow=None, lacking=(), gpus=range(64)):
        self.fails, self.slow, self.lacking, self.gpus = fails, slow, lacking, list(gpus)
        self.drivers, self.teams, self.problems = {}, {}, []
        self.local, self.lock = threading.local(), threading.Lock()

    def enter(self, rank):
        """This thread is a rank from now on."""
        self.local.driver = self.drivers[rank] = Driver(self, rank)

    def bindings(self):
        return self.local.driver

    def left(self):
        """What has not been given back."""
        kept = [f"rank {rank} keeps {one}" for rank, driver in self.drivers.items() for one in driver.kept]
        return kept + [f"bound: {team.bound}" for team in self.teams.values() if team.bound]


class Driver:
    """cuda.bindings.driver as one rank sees it. What a real one would refuse, or wait for, is a problem."""

    CUresult = CUresult
    CUmemAllocationHandleType = HandleType
    CUmulticastGranularity_flags = SimpleNamespace(CU_MULTICAST_GRANULARITY_RECOMMENDED="recommended")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED="multicast",
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED="descriptor",
    )
    CUmulticastObjectProp = SimpleNamespace

    def __init__(self, machine, rank):
        self.machine, self.rank, self.device = machine, rank, machine.gpus[rank]
        self.calls, self.counts, self.kept = [], {}, []
        self.memory, self.mapped, self.accessible, self.reserved = {}, {}, set(), {}
        self.next = (rank + 1) << 40

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        return self._recorded(name, found) if name.startswith("cu") else found

    def _recorded(self, name, call):
        def recorded(*arguments):
            if self.machine.slow == (self.rank, name):
                time.sleep(0.5)
            with self.machine.lock:
                number = self.counts[name] = self.counts.get(name, -1) + 1
                self.calls.append((name, *arguments))
                if self.machine.fails == (self.rank, name, number):
                    return CUresult.CUDA_ERROR_UNKNOWN, None
                try:
                    result = call(*arguments)
                except (AssertionError, KeyError, ValueError) as error:
                    self.machine.problems.append(f"{name}{arguments}: {error!r}")
                    return CUresult.CUDA_ERROR_INVALID_VALUE, None
                return (OK,) if result is None else (OK, result)

        return recorded if name not in ("cuGetErrorName", "cuGetErrorString") else call

    def CUmemAllocationProp(self):  # noqa: N802  (the driver's names, here and below)
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def CUdeviceptr(self, address):  # noqa: N802
        return address

    def cuGetErrorName(self, status):  # noqa: N802
        return OK, status.name.encode()

    def cuGetErrorString(self, status):  # noqa: N802
        return OK, b"as the test wants it"

    def cuCtxGetDevice(self):  # noqa: N802
        return self.device

    def cuDeviceGetPCIBusId(self, length, device):  # noqa: N802
        return f"0000:0{device}:00.0\0\0".encode()

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        return int((device, attribute) not in self.machine.lacking)

    def cuMulticastGetGranularity(self, prop, option):  # noqa: N802
        assert (option, prop.numDevices > 1, prop.size > 0, prop.handleTypes) == ("recommended", True, True, 1)
        return GRANULE

    def cuMemGetAllocationGranularity(self, prop, option):  # noqa: N802
        assert option == "minimum"
        self._check_memory(prop)
        return PAGE

    def _check_memory(self, prop):
        assert prop.type == "pinned"
        assert prop.requestedHandleTypes is HandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        assert (prop.location.type, prop.location.id) == ("device", self.device)

    def cuMulticastCreate(self, prop):  # noqa: N802
        assert prop.size % GRANULE == 0
        assert (prop.handleTypes, prop.flags) == (1, 0)
        assert not self.machine.teams
        team = SimpleNamespace(size=prop.size, world=prop.numDevices, devices=[], bound={})
        self.machine.teams["team 0"] = team
        return self._keep("team 0")

    def _keep(self, handle):
        self.kept.append(handle)
        return handle

    def cuMemExportToShareableHandle(self, handle, kind, flags):  # noqa: N802
        assert handle in self.kept
        assert (kind, flags) == (1, 0)
        descriptor = os.memfd_create("team")
        os.write(descriptor, handle.encode())
        return descriptor

    def cuMemImportFromShareableHandle(self, descriptor, kind):  # noqa: N802
        assert kind == 1
        return self._keep(os.pread(descriptor, 100, 0).decode())

    def cuMulticastAddDevice(self, team, device):  # noqa: N802
        found = self.machine.teams[team]
        assert device == self.device
        assert device not in found.devices
        assert len(found.devices) < found.world
        found.devices.append(device)

    def _complete(self, team):
        found = self.machine.teams[team]
        assert len(found.devices) == found.world, "the driver would wait here for the other devices"
        return found

    def cuMemCreate(self, size, prop, flags):  # noqa: N802
        assert size % PAGE == 0
        assert flags == 0
        self._check_memory(prop)
        handle = f"memory {self.rank}"
        self.memory[handle] = size
        return self._keep(handle)

    def cuMulticastBindMem(self, team, offset, memory, memory_offset, size, flags):  # noqa: N802
        found = self._complete(team)
        assert (offset, memory_offset, flags) == (0, 0, 0)
        assert size % GRANULE == 0
        assert size <= min(found.size, self.memory[memory])
        assert self.device not in found.bound
        found.bound[self.device] = (memory, size)

    def cuMulticastUnbind(self, team, device, offset, size):  # noqa: N802
        assert team not in self.mapped.values(), "this rank could still load from what it unbinds"
        memory, bound = self.machine.teams[team].bound.pop(device)
        assert (offset, size) == (0, bound)
        assert memory in self.kept

    def cuMemAddressReserve(self, size, alignment, address, flags):  # noqa: N802
        assert size % alignment == 0 == alignment % GRANULE
        assert (address, flags) == (0, 0)
        self.next += size
        self.reserved[self.next] = size
        return self._keep(self.next)

    def cuMemAddressFree(self, address, size):  # noqa: N802
        assert address not in self.mapped
        assert self.reserved.pop(address) == size
        self.kept.remove(address)

    def cuMemMap(self, address, size, offset, handle, flags):  # noqa: N802
        assert self.reserved[address] == size
        assert (offset, flags) == (0, 0)
        assert handle in self.kept
        if handle in self.machine.teams:
            assert self._complete(handle).size == size
        else:
            assert self.memory[handle] == size
        self.mapped[address] = handle
        self.kept.append(("mapping", address))

    def cuMemUnmap(self, address, size):  # noqa: N802
        assert self.reserved[address] == size
        del self.mapped[address]
        self.accessible.discard(address)
        self.kept.remove(("mapping", address))

    def cuMemSetAccess(self, address, size, access, count):  # noqa: N802
        assert (self.reserved[address], count) == (size, len(access))
        assert address in self.mapped
        (one,) = access
        assert (one.location.type, one.location.id, one.flags) == ("device", self.device, "read and write")
        self.accessible.add(address)

    def cuMemsetD8(self, address, value, size):  # noqa: N802
        assert address in self.accessible
        assert self.mapped[address] in self.memory, "only multimem instructions may be used on the multicast address"
        assert (value, size) == (0xFF, self.reserved[address])

    def cuCtxSynchronize(self):  # noqa: N802
        pass

    def cuMemRelease(self, handle):  # noqa: N802
        bound = [one.bound.get(self.device, (None,))[0] for one in self.machine.teams.values()]
        assert handle not in bound, "still bound"
        assert handle not in self.mapped.values()
        self.kept.remove(handle)
