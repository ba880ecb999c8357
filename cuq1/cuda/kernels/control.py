"""What decides between graphs, on the device."""

from cuq1.cuda.abi import ControlArgs
from cuq1.cuda.kernels.defines import common
from cuq1.plan.dims import Dims
from cuq1.plan.kernel import Kernel


def control(dims: Dims) -> Kernel:
    """Launches the next draft depth or ends the round; twin: SequenceEngine's rounds.

    Where ranks exchange, by what all of them have agreed on (accept); twin: tests' `control.decide`.
    """
    defines = common(dims)
    return Kernel("control.cu", "control", ControlArgs, defines, (1, 1, 1), 32, max_registers=64, device_runtime=True)


def kernels(dims: Dims) -> list[Kernel]:
    return [control(dims)]
