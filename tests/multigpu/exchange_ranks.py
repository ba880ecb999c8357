"""What the ranks of test_exchange do."""

import os
from pathlib import Path

import numpy as np

from cuq1.cuda import graph
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.memory import Arena, copy_in
from cuq1.errors import DeviceError
from cuq1.parallel.exchange import SharedInbox
from cuq1.parallel.nccl import Communicator
from tools.exchange_probe import Probe, Setting, in_order, open_rank, partials

COLUMNS = 3072


def setting(exchanges, seed, **more):
    values = partials("all", 4, 2, COLUMNS, np.random.default_rng(seed))
    return Setting(exchanges, values, in_order(values), seed=seed, **more)


def exchange(meeting, exchanges, seed):
    """A short run that has to be right."""
    open_rank(meeting)
    with Probe(meeting, setting(exchanges, seed)) as probe:
        found = probe.run()
    return {name: found[name] for name in ("wrong", "fault", "launched", "compared")}


def exchange_on(meeting, folder):
    """Exchanges without an end; each rank notes its process once they are under way."""
    open_rank(meeting)
    with Probe(meeting, setting(1 << 30, 3)) as probe:
        probe.launch()
        probe.wait()
        draft = Path(folder) / f"{meeting.rank}.new"
        draft.write_text(str(os.getpid()))
        draft.rename(draft.with_suffix(".pid"))
        found = probe.run()
        if found["fault"]:
            raise DeviceError(found["fault"])
    return found


def inboxes(meeting, times, size):
    """Made, stored into by the peer, and closed again and again: free memory before and after, and what was read."""
    open_rank(meeting)
    driver, seen, free = bindings(), [], []
    for number in range(times):
        with SharedInbox(meeting, size) as inbox:
            words = np.empty(size // 4, np.uint32)
            check(driver.cuMemcpyDtoH(words.ctypes.data, driver.CUdeviceptr(inbox.address), size))
            fresh = bool((words == 0xFFFFFFFF).all())
            meeting.barrier("read")
            peer = 1 - meeting.rank
            copy_in(
                inbox.address + int(inbox.distances[peer]), np.full(size // 4, 100 * number + meeting.rank, np.uint32)
            )
            meeting.barrier("stored")
            check(driver.cuMemcpyDtoH(words.ctypes.data, driver.CUdeviceptr(inbox.address), size))
            seen.append(fresh and bool((words == 100 * number + peer).all()))
        free.append(int(check(driver.cuMemGetInfo())[0]))
    return {"seen": seen, "free": free}


def sum_with_nccl(meeting, count):
    """All-reduce and all-gather, at once and as a graph."""
    open_rank(meeting)
    rng = np.random.default_rng(5)
    values = rng.standard_normal((meeting.world, count)).astype(np.float32)
    stream = graph.stream()
    arena = Arena({"sum": 4 * count, "whole": 4 * count * meeting.world})

    def read(name, shape):
        found = np.empty(shape, np.float32)
        graph.synchronize(stream)
        check(bindings().cuMemcpyDtoH(found.ctypes.data, bindings().CUdeviceptr(arena[name]), found.nbytes))
        return found

    with Communicator(meeting) as ranks:
        copy_in(arena["sum"], values[meeting.rank])
        ranks.all_gather(arena["sum"], arena["whole"], count, stream)
        gathered = bool((read("whole", values.shape) == values).all())
        ranks.all_reduce(arena["sum"], count, stream)
        summed = bool((read("sum", count) == values[0] + values[1]).all())
        copy_in(arena["sum"], values[meeting.rank])
        with graph.capture(stream) as captured:
            ranks.all_reduce(arena["sum"], count, stream)
        with captured.instantiate() as replayed:
            replayed.launch(stream)
            again = bool((read("sum", count) == values[0] + values[1]).all())
    arena.close()
    return {"gathered": gathered, "summed": summed, "again": again}
