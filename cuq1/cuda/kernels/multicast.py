"""The exchange through the switch, for those who ask for it (kernels_cu/exchange_multicast.cu).

A rank's memory of the multicast object holds abi.INBOXES buffers of partials, float32 [ROWS, hidden], which exchanges
take in turn, and behind them int32 [MAX_RANKS]: how often each rank has sent.
"""

from ctypes import Structure

from cuq1.cuda.abi import INBOXES, MAX_RANKS, MulticastSendArgs, MulticastTailArgs
from cuq1.cuda.kernels import defines
from cuq1.cuda.kernels.rows import parts_of
from cuq1.plan.dims import ROWS, Dims
from cuq1.plan.kernel import Kernel

GROUPS = 3  # of threads in a tail's block: one with the columns, two that read


def buffer(dims: Dims, number: int) -> int:
    """Where the buffer of an exchange begins, in bytes. number: of the exchange, from 0."""
    return number % INBOXES * ROWS * dims.hidden * 4


def sent(dims: Dims) -> int:
    """Where the ranks' counts begin, in bytes."""
    return INBOXES * ROWS * dims.hidden * 4


def nbytes(dims: Dims) -> int:
    """Of all of a rank's memory; all bits set before the first exchange."""
    return sent(dims) + MAX_RANKS * 4


def send(dims: Dims) -> Kernel:
    """Partials to this rank's memory, or pushed into every rank's inbox."""
    return _kernel("multicast_send", MulticastSendArgs, dims, 1, cluster=1)


def tail(dims: Dims) -> Kernel:
    """As rows.mlp_tail, with partials that the switch sums: twins.rows.mlp_tail."""
    return _kernel("multicast_tail", MulticastTailArgs, dims, GROUPS, cluster=parts_of(dims))


def _kernel(entry: str, args: type[Structure], dims: Dims, groups: int, cluster: int) -> Kernel:
    parts = parts_of(dims)
    return Kernel(
        "exchange_multicast.cu",
        entry,
        args,
        (*defines.common(dims), ("PARTS", parts)),
        (ROWS * parts, 1, 1),
        dims.hidden // parts // 4 * groups,
        cluster=cluster,
        max_registers=80,
    )


def kernels(dims: Dims) -> list[Kernel]:
    """All of the family."""
    return [send(dims), tail(dims)]
