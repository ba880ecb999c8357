"""The CUDA driver: its bindings, its errors as one sentence, and the device."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from cuq1.errors import DeviceError

# Compute capabilities with kernels, and what these are compiled for.
ARCHITECTURES = {(9, 0): "sm_90a"}


def require(name: str) -> Any:
    """The module `name` of a CUDA package; DeviceError that names the extra to install where it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise DeviceError(
            f"device cuda needs the Python module {name}, which cannot be imported ({error}): install it with "
            "pip install 'cuq1[cuda12]' or, for a driver of CUDA 13, 'cuq1[cuda13]', or use --device cpu"
        ) from None


@cache
def bindings() -> Any:
    """cuda.bindings.driver, initialised. Raises DeviceError where there is no driver or no GPU."""
    driver = require("cuda.bindings.driver")
    try:
        status = driver.cuInit(0)[0]
    except (RuntimeError, ImportError, OSError):  # the library itself is not there
        raise DeviceError(
            "device cuda needs NVIDIA's driver, which is not installed on this machine: install it, or use --device cpu"
        ) from None
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DeviceError(
            "device cuda needs an NVIDIA GPU, and the driver sees none: check CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    check((status,))
    return driver


def check(result: tuple[Any, ...]) -> Any:
    """What a call into cuda.bindings returned, without its status: a value, a tuple of several, or None.

    Raises DeviceError with the status's name and text for any status but success; works for driver and NVRTC.
    """
    status, *values = result
    if int(status) != 0:
        raise DeviceError(describe(status))
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def describe(status: Any) -> str:
    """A status of the driver or of NVRTC as a sentence."""
    if type(status).__name__ == "nvrtcResult":
        text = require("cuda.bindings.nvrtc").nvrtcGetErrorString(status)[1]
        return f"NVRTC failed with {_text(text)}"
    driver = require("cuda.bindings.driver")
    known, name = driver.cuGetErrorName(status)
    if int(known) != 0:
        return f"the CUDA driver failed with unknown status {int(status)}"
    return f"the CUDA driver failed with {_text(name)} ({_text(driver.cuGetErrorString(status)[1])})"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class Device:
    """An opened GPU; its primary context is current. memory, l2 and smem (a block's most) in bytes."""

    ordinal: int
    name: str
    arch: str
    multiprocessors: int
    memory: int
    l2: int
    smem: int


def require_devices(count: int) -> None:
    """Raises DeviceError where the driver sees fewer than `count` GPUs, one for each rank. No GPU is opened."""
    found = int(check(bindings().cuDeviceGetCount()))
    if found < count:
        raise DeviceError(
            f"tp {count} needs {count} GPUs, one for each rank, and the driver sees {found}: "
            "choose a smaller tp, check CUDA_VISIBLE_DEVICES, or use --device cpu"
        )


def open_device(ordinal: int = 0) -> Device:
    """Opens a GPU: its primary context, which CuPy uses as well, is retained once and made the calling thread's.

    Raises DeviceError for a missing package, driver or GPU, and for an architecture without kernels.
    """
    found, context = _open(ordinal)
    check(bindings().cuCtxSetCurrent(context))
    require("cupy").cuda.Device(ordinal).use()
    return found


@cache
def _open(ordinal: int) -> tuple[Device, Any]:
    driver = bindings()
    count = check(driver.cuDeviceGetCount())
    if not 0 <= ordinal < count:
        raise DeviceError(f"GPU {ordinal} does not exist: the driver sees {count}, numbered from 0")
    handle = check(driver.cuDeviceGet(ordinal))
    name = _text(check(driver.cuDeviceGetName(128, handle))).partition("\0")[0].strip()
    ids = driver.CUdevice_attribute

    def attribute(suffix: str) -> int:
        return int(check(driver.cuDeviceGetAttribute(getattr(ids, f"CU_DEVICE_ATTRIBUTE_{suffix}"), handle)))

    arch = architecture(name, (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")))
    require("cupy")  # before a context takes memory
    context = check(driver.cuDevicePrimaryCtxRetain(handle))
    return (
        Device(
            ordinal=ordinal,
            name=name,
            arch=arch,
            multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
            memory=int(check(driver.cuDeviceTotalMem(handle))),
            l2=attribute("L2_CACHE_SIZE"),
            smem=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        ),
        context,
    )


def architecture(name: str, capability: tuple[int, int]) -> str:
    """What kernels are compiled for on a GPU of this compute capability; DeviceError where there are none."""
    if capability not in ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise DeviceError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, for which cuq1 has no kernels: "
            f"use a GPU of compute capability {known} (H100, H200)"
        )
    return ARCHITECTURES[capability]
