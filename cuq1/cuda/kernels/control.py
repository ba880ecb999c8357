"""What decides between graphs, on the device."""

from cuq1.cuda.abi import ControlArgs
from cuq1.cuda.kernels.defines import common
from cuq1.plan.dims import Dims
from cuq1.plan.kernel import Kernel


def control(dims: Dims, *, stall_at: int | None = None) -> Kernel:
    """Launches the next draft depth or ends the round; twin: SequenceEngine's rounds.

    stall_at: for tests alone, the round (from 0) that never ends.
    """
    defines = common(dims) if stall_at is None else (*common(dims), ("STALL_AT", stall_at))
    return Kernel("control.cu", "control", ControlArgs, defines, (1, 1, 1), 32, max_registers=64, device_runtime=True)


def kernels(dims: Dims) -> list[Kernel]:
    return [control(dims)]
