"""The specifications of chain.cu's kernels, and a folder in which they compile."""

from ctypes import Structure, c_int32, c_uint64
from pathlib import Path

from cuq1.cuda import compile as jit
from cuq1.plan.kernel import Kernel
from tests.paths import ROOT


class ChainArgs(Structure):
    _fields_ = (
        ("fault", c_uint64),
        ("input", c_uint64),
        ("output", c_uint64),
        ("times", c_uint64),
        ("sleep", c_int32),
        ("reserved", c_int32),
    )


def swap_in_cluster(blocks=8, **how):
    return Kernel("chain.cu", "swap_in_cluster", ChainArgs, (), (blocks, 1, 1), 32, **{"cluster": 2, **how})


def die():
    return Kernel("chain.cu", "die", ChainArgs, (), (1, 1, 1), 32)


def kernels_folder(where):
    """A kernels_cu of the tests' own: the shared headers, and chain.cu."""
    where = Path(where)
    for name in ("abi.cuh", "common"):
        (where / name).symlink_to(ROOT / "kernels_cu" / name)
    (where / "chain.cu").symlink_to(Path(__file__).parent / "chain.cu")
    return where


def compile_from(where, setattr_=setattr):
    """Lets compile_kernel find kernels in `where` (pass monkeypatch.setattr to undo it)."""
    folder = jit.folder
    setattr_(jit, "folder", lambda name: where if name == "kernels_cu" else folder(name))
