"""Relocatable machine code linked with CUDA's device runtime, which kernels that launch graphs call. Needs no GPU."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cuq1.cuda.driver import require
from cuq1.errors import DeviceError

LIBRARY = "libcudadevrt.a"
# Where NVIDIA's wheels keep it, inside the `nvidia` package, for CUDA 12 and for CUDA 13.
_WHEELS = ("cuda_runtime/lib", "cu13/lib", "cu13/lib64")


def _folders() -> Iterator[Path]:
    """Where the library may lie, most specific first: the wheels', CUDA_HOME's, nvcc's toolkit, the usual place."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from (Path(root) / part for part in _WHEELS)
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        toolkits.append(Path(nvcc).resolve().parents[1])
    toolkits.append(Path("/usr/local/cuda"))
    for toolkit in toolkits:
        yield from (toolkit / part for part in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"))


@cache
def device_runtime() -> Path:
    """The library's path. Raises DeviceError where no wheel and no toolkit has it."""
    for folder in _folders():
        path = folder / LIBRARY
        if path.is_file():
            return path
    raise DeviceError(
        f"graphs that launch graphs need CUDA's {LIBRARY}, which is in no wheel and no toolkit here: "
        "pip install 'cuq1[cuda12]' or 'cuq1[cuda13]', or set CUDA_HOME to a toolkit"
    )


def _linker() -> Any:
    module = require("cuda.bindings.nvjitlink")
    try:
        module.version()
    except Exception as error:  # the bindings are there, the library is not: its exception's type is theirs
        raise DeviceError(
            f"device cuda needs nvJitLink, which cannot be loaded ({error}): pip install 'cuq1[cuda12]' or, for a "
            "driver of CUDA 13, 'cuq1[cuda13]'"
        ) from None
    return module


@cache
def version() -> str:
    """What decides a link's result besides its input: nvJitLink's version and the library's content."""
    major, minor = _linker().version()
    content = hashlib.sha256(device_runtime().read_bytes()).hexdigest()
    return f"{major}.{minor} {content}"


def link(cubin: bytes, name: str, arch: str) -> bytes:
    """A loadable cubin from a relocatable one. Raises DeviceError with the linker's first complaint."""
    module, library = _linker(), device_runtime()
    handle = module.create(1, [f"-arch={arch}"])
    try:
        module.add_data(handle, module.InputType.CUBIN, cubin, len(cubin), name)
        module.add_file(handle, module.InputType.LIBRARY, str(library))
        module.complete(handle)
        linked = bytearray(module.get_linked_cubin_size(handle))
        module.get_linked_cubin(handle, linked)
    except module.nvJitLinkError as error:
        raise DeviceError(f"{name} cannot be linked with {library}: {_complaint(module, handle) or error}") from None
    finally:
        module.destroy(handle)
    return bytes(linked)


def _complaint(module: Any, handle: Any) -> str:
    log = bytearray(max(2, module.get_error_log_size(handle)))
    module.get_error_log(handle, log)
    return next((line.strip() for line in bytes(log).decode(errors="replace").rstrip("\0").splitlines() if line), "")
