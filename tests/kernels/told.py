"""tell.cu: a slow predecessor for launches that poll for its results."""

from ctypes import Structure, c_int32, c_uint64
from pathlib import Path

from cuq1.cuda.launch import launch
from cuq1.cuda.module import build
from cuq1.plan.kernel import Kernel

BLOCKS = 3


class TellArgs(Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("ids", "routed", "source", "target")),
        *((name, c_int32) for name in ("words", "rows", "top_k", "pause")),
    )


TELL = Kernel(str(Path(__file__).with_name("tell.cu")), "tell", TellArgs, (), (BLOCKS, 1, 1), 128)


def tell(source=None, target=None, ids=None, routed=None, *, rows=0, pause=0):
    """TELL's arguments: words of `source` go to `target`, and `rows` rows of ids to `routed`; pause: nanoseconds."""
    args = TellArgs(rows=rows, pause=pause, top_k=0 if ids is None else ids.shape[1])
    for name, array in (("ids", ids), ("routed", routed), ("source", source), ("target", target)):
        setattr(args, name, 0 if array is None else array.data.ptr)
    args.words = 0 if source is None else source.nbytes // 4
    return args


def run_chain(gpu, calls):
    """Launches [(kernel, arguments, patch)] one after the other, each as soon as its predecessor allows, and waits."""
    functions = [build(kernel, gpu.device.arch, patch) for kernel, _, patch in calls]
    gpu.cupy.cuda.Device().synchronize()
    for function, (_, args, _) in zip(functions, calls, strict=True):
        launch(function, args, gpu.stream)
    gpu.wait()
