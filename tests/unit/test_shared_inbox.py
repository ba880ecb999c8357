"""Inboxes that ranks map from each other, and NCCL among them, against a driver that keeps account of mappings."""

import ctypes
import enum
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from cuq1.cuda.abi import MAX_RANKS
from cuq1.errors import DeviceError, LaunchError
from cuq1.parallel import exchange, nccl
from tests.unit.test_rendezvous import serving, together


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_MAP_FAILED = 205


OK = CUresult.CUDA_SUCCESS


class Handle:
    def __init__(self):
        self.bytes = ctypes.create_string_buffer(exchange.HANDLE_BYTES)

    def getPtr(self):  # noqa: N802  (the driver's names, here and below)
        return ctypes.addressof(self.bytes)


class Machine:
    """The memory of all ranks: what is allocated, filled, and mapped by whom. Each rank is a thread."""

    def __init__(self, *, reachable=True, visible=True, mappable=True):
        self.reachable, self.visible, self.mappable = reachable, visible, mappable
        self.filled, self.mapped, self.freed, self.problems = {}, {}, [], []
        self.local = threading.local()
        self.lock = threading.Lock()

    def driver(self, gpu):
        self.local.found = Driver(self, gpu)

    def bindings(self):
        return self.local.found


class Driver:
    """cuda.bindings.driver as one rank sees it."""

    CUipcMemHandle = Handle
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=SimpleNamespace(value=1))

    def __init__(self, machine, gpu):
        self.machine, self.gpu = machine, gpu
        self.next = (gpu + 1) << 32

    def CUdeviceptr(self, address):  # noqa: N802
        return address

    def cuMemAlloc(self, size):  # noqa: N802
        assert size % exchange.GRANULE == 0
        return OK, self.next

    def cuMemsetD8(self, address, value, size):  # noqa: N802
        with self.machine.lock:
            if address in self.machine.mapped.values():
                self.machine.problems.append("filled while it is mapped")
            self.machine.filled[address] = (value, size)
        return (OK,)

    def cuCtxSynchronize(self):  # noqa: N802
        return (OK,)

    def cuCtxGetDevice(self):  # noqa: N802
        return OK, self.gpu

    def cuDeviceGetPCIBusId(self, length, device):  # noqa: N802
        return OK, f"0000:0{device}:00.0\0\0".encode()

    def cuDeviceGetByPCIBusId(self, bus):  # noqa: N802
        gpu = int(bus[5:7])
        if gpu != self.gpu and not self.machine.visible:
            return CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return OK, gpu

    def cuDeviceCanAccessPeer(self, device, peer):  # noqa: N802
        assert device != peer
        return OK, int(self.machine.reachable)

    def cuIpcGetMemHandle(self, address):  # noqa: N802
        handle = Handle()
        handle.bytes.raw = address.to_bytes(8, "little") + bytes(range(8, exchange.HANDLE_BYTES))
        return OK, handle

    def cuIpcOpenMemHandle(self, handle, flags):  # noqa: N802
        assert handle.bytes.raw[8:] == bytes(range(8, exchange.HANDLE_BYTES))
        if not self.machine.mappable:
            return CUresult.CUDA_ERROR_MAP_FAILED, None
        target = int.from_bytes(handle.bytes.raw[:8], "little")
        here = target + ((self.gpu + 1) << 44)
        with self.machine.lock:
            assert target in self.machine.filled
            self.machine.mapped[here] = target
        return OK, here

    def cuIpcCloseMemHandle(self, address):  # noqa: N802
        with self.machine.lock:
            del self.machine.mapped[address]
        return (OK,)

    def cuMemFree(self, address):  # noqa: N802
        with self.machine.lock:
            if address in self.machine.mapped.values():
                self.machine.problems.append("freed while it is mapped")
            self.machine.freed.append(address)
        return (OK,)


def run(monkeypatch, machine, act, ranks=2):
    """`act(meeting)` on each rank, which has a GPU of its own."""

    def one(meeting):
        machine.driver(meeting.rank)
        return act(meeting)

    def check(result):
        if result[0] != OK:
            raise DeviceError(f"the CUDA driver failed with {result[0].name}")
        return result[1] if len(result) > 1 else None

    monkeypatch.setattr(exchange, "bindings", machine.bindings)
    monkeypatch.setattr(exchange, "check", check)
    with serving(ranks) as served:
        return together(served, ranks, one)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_maps_the_others_and_frees_after_they_unmapped(monkeypatch, ranks):
    machine = Machine()

    def act(meeting):
        with exchange.SharedInbox(meeting, 4097) as inbox:
            return inbox.address, inbox.distances.copy(), dict(machine.mapped)

    found = run(monkeypatch, machine, act, ranks)
    addresses = [address for address, _, _ in found]
    for rank, (address, distances, mapped) in enumerate(found):
        assert distances.dtype == np.int64
        assert distances.shape == (MAX_RANKS,)
        assert distances[rank] == 0
        assert not distances[ranks:].any()
        for peer in range(ranks):
            if peer != rank:
                assert mapped[address + int(distances[peer])] == addresses[peer]
    assert machine.filled == dict.fromkeys(addresses, (0xFF, 4097))
    assert machine.mapped == {}
    assert sorted(machine.freed) == sorted(addresses)
    assert machine.problems == []


def test_freeing_without_waiting_for_the_others_is_noticed(monkeypatch):
    """The control: no barrier before the memory is freed."""
    machine = Machine()
    first = threading.Event()

    def act(meeting):
        inbox = exchange.SharedInbox(meeting, 64)
        monkeypatch.setattr(meeting, "barrier", lambda name: None)
        if meeting.rank == 1:
            assert first.wait(10)
        inbox.close()
        first.set()

    assert run(monkeypatch, machine, act) == [None, None]
    assert machine.problems == ["freed while it is mapped"]


def test_close_twice_frees_once(monkeypatch):
    machine = Machine()

    def act(meeting):
        inbox = exchange.SharedInbox(meeting, 64)
        inbox.close()
        inbox.close()

    run(monkeypatch, machine, act)
    assert len(machine.freed) == 2


def test_memory_stays_where_a_peer_has_failed(monkeypatch):
    machine = Machine()

    def act(meeting):
        with exchange.SharedInbox(meeting, 64):
            if meeting.rank == 1:
                raise LaunchError("no such layer")

    first, second = run(monkeypatch, machine, act)
    assert str(first) == "rank 1 failed: no such layer"
    assert str(second) == "no such layer"
    assert machine.freed == []


def test_sizes_that_differ_are_named_on_all_ranks(monkeypatch):
    machine = Machine()
    for error in run(monkeypatch, machine, lambda meeting: exchange.SharedInbox(meeting, 64 + meeting.rank)):
        assert "ranks have inboxes of different sizes, [64, 65] bytes: start all of them alike" in str(error)


@pytest.mark.parametrize("broken", ["reachable", "mappable"])
def test_gpus_that_cannot_share_are_named(monkeypatch, broken):
    machine = Machine(**{broken: False})

    def act(meeting):
        try:
            exchange.SharedInbox(meeting, 64)
        except DeviceError as error:
            return str(error)

    for rank, message in enumerate(run(monkeypatch, machine, act)):
        peer = 1 - rank
        between = f"GPU 0000:0{rank}:00.0 of rank {rank} and GPU 0000:0{peer}:00.0 of rank {peer} "
        ending = "cannot access each other's memory" if broken == "reachable" else "cannot share an inbox"
        assert message.startswith(between + ending)
        assert "\n" not in message


def test_a_gpu_that_the_process_does_not_see_is_tried(monkeypatch):
    machine = Machine(visible=False, reachable=False)

    def act(meeting):
        exchange.SharedInbox(meeting, 64).close()
        return "mapped"

    assert run(monkeypatch, machine, act) == ["mapped", "mapped"]


def test_more_ranks_than_places():
    with pytest.raises(LaunchError, match="9 ranks cannot exchange: start at most 8"):
        exchange.SharedInbox(SimpleNamespace(rank=0, world=9), 64)
    with pytest.raises(ValueError, match="0 bytes"):
        exchange.SharedInbox(SimpleNamespace(rank=0, world=2), 0)


class NcclError(RuntimeError):
    pass


class Library:
    """cupy.cuda.nccl: whether all ranks come with one id, and what they call."""

    NCCL_FLOAT32, NCCL_SUM, NcclError, available = 7, 0, NcclError, True

    def __init__(self, version):
        self.version, self.joined, self.calls = version, {}, []

    def get_unique_id(self):
        signed = tuple((one * 37) % 256 - 128 for one in range(128))
        return bytes(one & 0xFF for one in signed) if self.version >= 14 else signed

    def NcclCommunicator(self, world, unique, rank):  # noqa: N802  (the library's name)
        if unique != self.get_unique_id():
            raise NcclError("another id")
        if world > 2:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")
        self.joined[rank] = world
        note = self.calls.append
        return SimpleNamespace(
            allReduce=lambda *arguments: note(("allReduce", *arguments)),
            allGather=lambda *arguments: note(("allGather", *arguments)),
            destroy=lambda: note(("destroy",)),
            abort=lambda: note(("abort",)),
            check_async_error=self.fail,
        )

    def fail(self):
        raise NcclError("NCCL_ERROR_REMOTE_ERROR")


@pytest.fixture(params=["13.6.0", "14.2.0"])
def library(monkeypatch, request):
    found = Library(int(request.param[:2]))
    modules = {"cupy": SimpleNamespace(__version__=request.param), "cupy.cuda.nccl": found}
    monkeypatch.setattr(nccl, "require", modules.__getitem__)
    monkeypatch.setenv(nccl.NVLS, "")  # so that it is undone
    monkeypatch.delenv(nccl.NVLS)
    return found


def test_ranks_join_with_the_id_of_rank_0(library):
    def act(meeting):
        with nccl.Communicator(meeting) as ranks:
            if meeting.rank == 0:
                ranks.all_reduce(256, 10, 3)
                ranks.all_gather(256, 512, 10, 3)
            meeting.barrier("called")

    with serving(2) as served:
        assert together(served, 2, act) == [None, None]
    assert library.joined == {0: 2, 1: 2}
    assert library.calls == [
        ("allReduce", 256, 256, 10, 7, 0, 3),
        ("allGather", 256, 512, 10, 7, 3),
        ("destroy",),
        ("destroy",),
    ]


def test_a_failure_is_one_sentence_and_ends_without_waiting(library):
    def act(meeting):
        try:
            with nccl.Communicator(meeting) as ranks:
                ranks.check()
        except DeviceError as error:
            return str(error)

    with serving(1) as served:
        (message,) = together(served, 1, act)
    assert message == "NCCL's check failed (NCCL_ERROR_REMOTE_ERROR): NCCL_DEBUG=WARN tells more"
    assert library.calls == [("abort",)]
    with serving(3) as served:
        for message in together(served, 3, act):
            assert "needs a GPU of its own (NCCL_ERROR_INVALID_USAGE: invalid usage)" in message


def test_nccl_makes_no_multicast_objects_unless_the_user_says_so(library, monkeypatch):
    def setting():
        with serving(1) as served:
            together(served, 1, lambda meeting: nccl.Communicator(meeting).close())
        return nccl.os.environ[nccl.NVLS]

    assert setting() == "0"
    monkeypatch.setenv(nccl.NVLS, "1")
    assert setting() == "1"


def test_a_missing_nccl_names_the_extras(library):
    library.available = False
    with pytest.raises(DeviceError, match=r"several GPUs need NCCL.*cuq1\[cuda12\]"):
        nccl.Communicator(SimpleNamespace(rank=0, world=2))
