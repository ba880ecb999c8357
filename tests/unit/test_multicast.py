"""Multicast objects, against a driver that keeps account: nothing here can reach a real one."""

import threading
import time
from pathlib import Path

import pytest

from cuq1.cuda import driver
from cuq1.errors import DeviceError, LaunchError
from cuq1.parallel import Rendezvous, multicast
from tests.unit.fake_multicast import GRANULE, Machine
from tests.unit.test_rendezvous import join, serving

BYTES = 5 << 20  # not a multiple of either granule
ROUNDED = 8 << 20


@pytest.fixture(autouse=True)
def on_any_machine(monkeypatch):
    """Also on one whose environment switches multicast off; the environment itself is left as it is."""
    monkeypatch.setattr(multicast, "SIGNS", {})


def run(monkeypatch, machine, act, world=2):
    """What `act(meeting)` gives on each rank, or its error, of which the other ranks are told."""
    monkeypatch.setattr(multicast, "bindings", machine.bindings)
    monkeypatch.setattr(driver, "import_module", lambda name: machine.bindings())
    results = [None] * world

    def one(rank):
        machine.enter(rank)
        try:
            with join(served, rank, world) as meeting:
                results[rank] = act(meeting)
        except (DeviceError, LaunchError) as error:
            results[rank] = error

    with serving(world) as served:
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def use(meeting):
    with multicast.Multicast(meeting, BYTES) as shared:
        assert shared.nbytes == ROUNDED
        return shared.own, shared.address


def exported():
    """Descriptors of multicast objects that this process has open."""
    return [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink() and "memfd:team" in str(one.readlink())]


SETUP_0 = ["cuMulticastCreate", "cuMemExportToShareableHandle"]
SETUP_1 = ["cuMemImportFromShareableHandle"]
MAPPED = ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
QUESTIONS = ["cuCtxGetDevice", "cuMulticastGetGranularity", "cuMemGetAllocationGranularity"]
SHARED = [
    "cuMulticastAddDevice",
    "cuMemCreate",
    "cuMulticastBindMem",
    *MAPPED,
    "cuMemsetD8",
    "cuCtxSynchronize",
    *MAPPED,
]
UNMAPPED = ["cuMemUnmap", "cuMemAddressFree"]
END = ["cuCtxSynchronize", *UNMAPPED, *UNMAPPED, "cuMulticastUnbind", "cuMemRelease", "cuMemRelease"]


def test_calls_come_in_order_and_everything_is_given_back(monkeypatch):
    machine = Machine()
    (own0, address0), (own1, address1) = run(monkeypatch, machine, use)
    names = {rank: [name for name, *_ in one.calls] for rank, one in machine.drivers.items()}
    assert names == {0: QUESTIONS + SETUP_0 + SHARED + END, 1: QUESTIONS + SETUP_1 + SHARED + END}
    assert machine.left() == []
    assert machine.problems == []
    assert exported() == []
    calls = {name: arguments for name, *arguments in machine.drivers[1].calls}
    assert calls["cuMulticastBindMem"] == ["team 0", 0, "memory 1", 0, ROUNDED, 0]
    assert calls["cuMulticastUnbind"] == ["team 0", 1, 0, ROUNDED]
    assert calls["cuMemAddressReserve"] == [ROUNDED, GRANULE, 0, 0]
    ends = [one for one in machine.drivers[0].calls if one[0] in ("cuMemUnmap", "cuMemAddressFree", "cuMemRelease")]
    assert ends == [
        ("cuMemUnmap", address0, ROUNDED),
        ("cuMemAddressFree", address0, ROUNDED),
        ("cuMemUnmap", own0, ROUNDED),
        ("cuMemAddressFree", own0, ROUNDED),
        ("cuMemRelease", "memory 0"),
        ("cuMemRelease", "team 0"),
    ]
    assert len({own0, own1, address0, address1}) == 4


def test_more_ranks_share_one_object(monkeypatch):
    machine = Machine()
    results = run(monkeypatch, machine, use, world=8)
    assert not any(isinstance(one, Exception) for one in results)
    assert list(machine.teams) == ["team 0"]
    assert sorted(machine.teams["team 0"].devices) == list(range(8))
    assert machine.left() == []


def numbered(names):
    """(call, which one of that name) of each of a list."""
    return [(name, names[:at].count(name)) for at, name in enumerate(names)]


FAILURES = [(0, *one) for one in numbered(QUESTIONS + SETUP_0 + SHARED)]
FAILURES += [(1, *one) for one in numbered(QUESTIONS + SETUP_1 + SHARED)]


@pytest.mark.parametrize(("rank", "call", "number"), FAILURES)
def test_a_failure_at_any_step_leaves_nothing(monkeypatch, rank, call, number):
    machine = Machine(fails=(rank, call, number))
    results = run(monkeypatch, machine, use)
    assert isinstance(results[rank], DeviceError)
    status = "the CUDA driver failed with CUDA_ERROR_UNKNOWN (as the test wants it)"
    expected = status if call == "cuCtxGetDevice" else f"multicast fails on rank {rank} in {call}: {status}"
    assert str(results[rank]) == expected
    assert isinstance(results[1 - rank], LaunchError)
    assert expected in str(results[1 - rank])
    assert machine.left() == []
    assert machine.problems == []
    assert exported() == []


@pytest.mark.parametrize(("call", "number"), numbered(END[1:]))
def test_a_failure_while_giving_back_is_told_and_the_rest_is_tried(monkeypatch, call, number):
    machine = Machine(fails=(1, call, number))
    first, second = run(monkeypatch, machine, use)
    assert not isinstance(first, Exception)
    assert str(second).startswith(f"multicast fails on rank 1 in {call}: ")
    assert "CUDA_ERROR_UNKNOWN" in str(second)
    assert [name for name, *_ in machine.drivers[1].calls][-len(END) :] == END
    assert machine.left()


def test_nothing_is_given_back_under_a_peer_that_failed(monkeypatch):
    """A kernel of that peer may still load from this rank's memory: all of it goes with the processes."""
    machine = Machine()

    def act(meeting):
        with multicast.Multicast(meeting, BYTES) as shared:
            if meeting.rank == 1:
                raise DeviceError("no such layer")
            shared.close()

    first, second = run(monkeypatch, machine, act)
    assert str(first) == "rank 1 failed: no such layer"
    assert str(second) == "no such layer"
    for one in machine.drivers.values():
        assert not {name for name, *_ in one.calls} & set(END[1:])


def test_a_peer_still_loads_until_all_have_closed(monkeypatch):
    machine = Machine()
    looked = []

    def act(meeting):
        shared = multicast.Multicast(meeting, BYTES)
        if meeting.rank == 1:
            time.sleep(0.3)
            looked.extend(name for name, *_ in machine.drivers[0].calls)
        shared.close()
        shared.close()

    run(monkeypatch, machine, act)
    assert not set(looked) & set(END[1:])
    assert machine.left() == []
    assert machine.problems == []


# --- controls: what the account finds


def without(monkeypatch, name):
    """Multicast objects that leave out one kind of driver call."""
    call = multicast.Multicast._call
    monkeypatch.setattr(
        multicast.Multicast, "_call", lambda self, called, *a: None if called == name else call(self, called, *a)
    )


@pytest.mark.parametrize("name", ["cuMemUnmap", "cuMemAddressFree", "cuMulticastUnbind", "cuMemRelease"])
def test_what_is_not_given_back_is_found(monkeypatch, name):
    machine = Machine()
    without(monkeypatch, name)
    run(monkeypatch, machine, use)
    assert machine.left()


@pytest.mark.parametrize("name", ["cuMulticastAddDevice", "cuMemSetAccess"])
def test_what_is_left_out_is_found(monkeypatch, name):
    machine = Machine()
    without(monkeypatch, name)
    run(monkeypatch, machine, use)
    assert machine.problems


def test_memory_that_is_bound_before_all_devices_are_in_is_found(monkeypatch):
    machine = Machine(slow=(1, "cuMulticastAddDevice"))
    barrier = Rendezvous.barrier
    skipped = {"multicast devices"}
    monkeypatch.setattr(Rendezvous, "barrier", lambda self, name: name in skipped or barrier(self, name))
    run(monkeypatch, machine, use)
    assert any("would wait here" in one for one in machine.problems)


# --- who may


def ask(meeting):
    return multicast.wanted(meeting, asked=True)


def calls(machine):
    return {name for one in machine.drivers.values() for name, *_ in one.calls}


def test_it_is_off_where_nobody_asks(monkeypatch):
    machine = Machine()
    assert run(monkeypatch, machine, lambda meeting: multicast.wanted(meeting, asked=False)) == [False, False]
    assert calls(machine) == set()


def test_it_is_on_where_all_ask_and_all_can(monkeypatch):
    machine = Machine()
    assert run(monkeypatch, machine, ask) == [True, True]
    assert not any(name.startswith("cuMulticast") for name in calls(machine))


def test_ranks_that_disagree_are_named(monkeypatch):
    machine = Machine()
    results = run(monkeypatch, machine, lambda meeting: multicast.wanted(meeting, asked=meeting.rank == 2), world=3)
    for one in results:
        assert "multicast is asked for on rank 2 and not on ranks 0 and 1: ask for it on all or on none" in str(one)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"lacking": [(1, "multicast")]}, "on rank 1, GPU 0000:01:00.0 has no NVLink multicast: leave it off"),
        ({"lacking": [(0, "descriptor")]}, "on rank 0, GPU 0000:00:00.0 has no memory shared by file descriptor"),
        ({"gpus": [3, 3]}, "ranks 0 and 1 share GPU 0000:03:00.0, and each needs its own"),
    ],
)
def test_devices_that_cannot_are_named_on_all_ranks(monkeypatch, how, why):
    machine = Machine(**how)
    for one in run(monkeypatch, machine, ask):
        assert isinstance(one, DeviceError)
        assert str(one).startswith(f"multicast cannot be used: {why}")
        assert "\n" not in str(one)
    assert not any(name.startswith("cuMulticast") for name in calls(machine))


def test_one_rank_has_nobody_to_exchange_with(monkeypatch):
    (one,) = run(monkeypatch, Machine(), ask, world=1)
    assert str(one) == "multicast needs two ranks or more, and there is one: leave it off"


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")],
)
def test_a_machine_that_switches_it_off_is_obeyed(monkeypatch, name, value):
    """Also by Multicast itself; and the driver is not called at all."""
    monkeypatch.undo()
    assert multicast.SIGNS[name] == value
    monkeypatch.setattr(multicast, "SIGNS", {name: value})
    monkeypatch.setenv(name, value)
    machine = Machine()
    why = f"{name}={value} says that this machine's NVLink multicast is not to be used: leave it off"
    for one in run(monkeypatch, machine, ask):
        assert str(one) == f"multicast cannot be used: on rank 0, {why}"
    for one in run(monkeypatch, machine, use):
        assert why in str(one)
    assert calls(machine) == set()


def test_sizes_that_differ_are_named(monkeypatch):
    machine = Machine()
    for one in run(monkeypatch, machine, lambda meeting: multicast.Multicast(meeting, 64 + meeting.rank)):
        assert "ranks ask for multicast objects of [64, 65] bytes: start all of them alike" in str(one)
    assert "cuMulticastCreate" not in calls(machine)
    with pytest.raises(ValueError, match="0 bytes"):
        multicast.Multicast(None, 0)
