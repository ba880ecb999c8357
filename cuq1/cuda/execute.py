"""A plan on the GPU: its kernels loaded, its buffers bound to addresses."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from cuq1.cuda.compile import compile_kernel
from cuq1.cuda.launch import launch
from cuq1.cuda.module import Function, load
from cuq1.plan.kernel import Kernel
from cuq1.plan.types import Plan


class Program:
    """Issues a plan's launches. addresses: {buffer name: device address}, of every buffer that the plan names.

    Raises ValueError for a buffer without an address, and DeviceError where a kernel does not compile or load.
    """

    def __init__(self, plan: Plan, addresses: Mapping[str, int], arch: str = "sm_90a") -> None:
        missing = [buffer.name for buffer in plan.buffers if buffer.name not in addresses]
        if missing:
            raise ValueError(f"no address for {', '.join(missing)}")
        self.plan = plan
        functions = load_all(plan.kernels(), arch)
        known = dict(addresses)
        self._calls = [(functions[one.kernel], one.structure(known)) for one in plan.launches]

    def issue(self, stream: int, first: int = 0, last: int | None = None) -> None:
        """Enqueues the launches first .. last - 1 (all of them as it stands) on a stream, in order."""
        for function, args in self._calls[first:last]:
            launch(function, args, stream)


def load_all(kernels: list[Kernel], arch: str = "sm_90a") -> dict[Kernel, Function]:
    """Every kernel compiled, several at a time where the cache does not hold them, and loaded."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        cubins = list(pool.map(lambda kernel: compile_kernel(kernel, arch), kernels))
    return {kernel: load(cubin.path, kernel) for kernel, cubin in zip(kernels, cubins, strict=True)}
