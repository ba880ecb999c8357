"""The way out of a process whose GPU no longer answers."""

import ctypes

from cuq1.cuda import module


def let_go() -> None:
    """Lets the process end by itself, with its own exit status, though a kernel runs for ever.

    Python unloads modules when it ends, and the driver's library waits for the GPU in its exit handler: neither would
    return. So the modules are kept for good, and the last handler to be registered, which runs first, ends the process.
    The kernel goes with it. Only glibc has handlers that are told the exit status; elsewhere the process may have to be
    killed.
    """
    keep = ctypes.pythonapi.Py_IncRef
    keep.argtypes = [ctypes.py_object]
    keep(module._module)
    libc = ctypes.CDLL(None)
    on_exit = getattr(libc, "on_exit", None)
    if on_exit is not None:
        on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
