"""Kernels that check and time the exchange among ranks (kernels_cu/exchange_probe.cu)."""

from ctypes import Structure

from cuq1.cuda.abi import ExchangeProbeArgs, ExchangePushArgs
from cuq1.plan.dims import ROWS, Dims
from cuq1.plan.kernel import Kernel

THREADS = 256
WATCHERS = THREADS // 32  # warps of part() that note times


def push(dims: Dims, places: int = 1, timeout_ms: int | None = None) -> Kernel:
    """Pushes the partials of `places` of the dims.ranks places, and re-arms."""
    return _kernel("probe_push", dims, (_blocks(ROWS * dims.hidden), places), timeout_ms)


def take(dims: Dims, places: int = 1, timeout_ms: int | None = None) -> Kernel:
    """Polls, sums and compares. timeout_ms: of waits, where not the usual one."""
    return _kernel("probe_take", dims, (_blocks(ROWS * dims.hidden // 4), places), timeout_ms)


def count(dims: Dims) -> Kernel:
    """Ends a graph of exchanges."""
    return _kernel("probe_count", dims, (1, 1), block=32)


def both(dims: Dims, threads: int = 64) -> Kernel:
    """Push and poll in one launch, timed. threads: of a block."""
    return _kernel("probe_both", dims, (_blocks(ROWS * dims.hidden // 4, threads), 1), block=threads)


def part(dims: Dims, words: int, *, signs: bool) -> Kernel:
    """Pushes `words` of a piece. signs: notes when the last ones come."""
    return _kernel("probe_part", dims, (_blocks(words) + int(signs), 1), args=ExchangePushArgs)


def _blocks(threads: int, block: int = THREADS) -> int:
    return -(-threads // block)


def _kernel(
    entry: str,
    dims: Dims,
    grid: tuple[int, int],
    timeout_ms: int | None = None,
    block: int = THREADS,
    args: type[Structure] = ExchangeProbeArgs,
) -> Kernel:
    timeout = () if timeout_ms is None else (("PEER_TIMEOUT_MS", timeout_ms),)
    return Kernel(
        "exchange_probe.cu",
        entry,
        args,
        (("HIDDEN", dims.hidden), ("RANKS", dims.ranks), *timeout),
        (*grid, 1),
        block,
        max_registers=96,
    )


def kernels(dims: Dims) -> list[Kernel]:
    """All of the family."""
    return [push(dims), take(dims), count(dims), both(dims), part(dims, ROWS * dims.hidden, signs=True)]
