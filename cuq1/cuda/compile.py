"""Kernels to machine code: NVRTC, and a cache of its results that processes share.

A cubin's key is the hash of everything that decides its bits: the source, every header that it includes, the
flags, the constants and NVRTC's version. Nothing here needs a GPU.
"""

import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuq1.cuda import link
from cuq1.cuda.driver import check, require
from cuq1.cuda.folders import folder
from cuq1.errors import DeviceError
from cuq1.plan.kernel import Kernel

# No flushing of subnormals, IEEE division and square root; products and sums contract to FMAs, as the tensor
# cores' do. No fast-math: its approximations would be the largest error of a layer.
FLAGS = ("--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=true", "--ptxas-options=-v")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(
    r"Compiling entry function '(?P<entry>\w+)'.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_BODY = re.compile(r'^extern "C" __global__ [^{;]*\(const __grid_constant__ \w+ a\) \{', re.MULTILINE)
_STATIC = re.compile(r"(\d+) bytes smem")
# A multiprocessor of compute capability 9.0: 32-bit registers, bytes of shared memory, and what a block takes besides.
_REGISTERS, _SHARED, _RESERVED = 65536, 228 * 1024, 1024


@dataclass(frozen=True)
class Cubin:
    """Machine code of one file, and the compiler's log. Of one kernel in it: registers, spilled bytes, and bytes of
    shared memory besides the dynamic ones."""

    path: Path
    registers: int
    spills: int
    log: str
    smem: int


def source_text(kernel: Kernel, patch: tuple[str, str] | None = None) -> str:
    """The kernel's source, with the one place of `patch` replaced; ValueError where there isn't exactly one."""
    path = folder("kernels_cu") / kernel.source
    text = _read(path)
    if any(name == "TRACE" for name, _ in kernel.defines):  # see common/trace.cuh
        text = _BODY.sub(r"\g<0> TraceScope trace_scope(a.layer);", text)
    if patch is None:
        return text
    if text.count(patch[0]) != 1:
        raise ValueError(f"{patch[0]!r} occurs {text.count(patch[0])} times in {kernel.source}, not once")
    return text.replace(*patch)


def digest(kernel: Kernel, arch: str, text: str | None = None) -> str:
    """Hash of the source with its headers, the flags and the constants: the same for all compilers."""
    text = source_text(kernel) if text is None else text
    files = {kernel.source: text, **_headers(folder("kernels_cu"), kernel.source, text)}
    content = [sorted(files.items()), _options(kernel, arch)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def compile_kernel(kernel: Kernel, arch: str = "sm_90a", patch: tuple[str, str] | None = None) -> Cubin:
    """The kernel's machine code, from ptx/, from the cache, or compiled now.

    patch: (old, new) in the source, for tests. Raises DeviceError where it does not compile, or where nothing fits
    and CUQ1_NO_JIT=1 forbids to compile.
    """
    text = source_text(kernel, patch)
    source = digest(kernel, arch, text)
    prebuilt = _prebuilt(source)
    if prebuilt is not None:
        return _figures(kernel, *prebuilt)
    if os.environ.get("CUQ1_NO_JIT") == "1":
        raise DeviceError(
            f"{kernel.source} is not among the compiled kernels in {folder('ptx')} for these sizes and {arch}, and "
            "CUQ1_NO_JIT=1 forbids to compile it: unset it, or run tools/build_ptx.py for this model"
        )
    linker = link.version() if kernel.device_runtime else ""
    key = hashlib.sha256(f"{source} {nvrtc_version()}{linker}".encode()).hexdigest()
    cache_folder = cache_dir()
    found = _cached(cache_folder, key)
    if found is None:
        cubin, log = _compile(kernel, arch, text)
        found = _store(cache_folder, key, cubin, log)
    return _figures(kernel, *found)


def over_budget(kernel: Kernel, cubin: Cubin) -> str | None:
    """What a kernel takes that its specification does not allow, or None."""
    sizes = " ".join(f"{name}={value}" for name, value in kernel.defines)
    if cubin.spills:
        return f"{kernel.source}: {kernel.entry} spills {cubin.spills} bytes of registers ({sizes})"
    if cubin.registers > kernel.max_registers:
        return f"{kernel.source}: {kernel.entry} takes {cubin.registers} of {kernel.max_registers} registers ({sizes})"
    # Registers are given to a warp by 256, so to a thread by 8.
    by_registers = _REGISTERS // (-(-cubin.registers // 8) * 8 * kernel.block)
    by_memory = _SHARED // (cubin.smem + kernel.smem + _RESERVED)
    if min(by_registers, by_memory) < kernel.min_blocks:
        return (
            f"{kernel.source}: {kernel.entry} needs {kernel.min_blocks} blocks on a multiprocessor, with registers "
            f"for {by_registers} and shared memory for {by_memory} ({sizes})"
        )
    return None


@dataclass(frozen=True)
class Figures:
    """What ptxas reports of a kernel: registers, bytes of spill stores and loads, bytes of static shared memory."""

    registers: int
    spills: int
    smem: int


def entries(log: str) -> dict[str, Figures]:
    """Each kernel that ptxas reports in a compiler's log."""
    found = {}
    for entry in _ENTRY.finditer(log):
        static = _STATIC.search(entry["rest"])
        spills = int(entry["stores"]) + int(entry["loads"])
        found[entry["entry"]] = Figures(int(entry["registers"]), spills, int(static[1]) if static else 0)
    return found


@cache
def nvrtc_version() -> str:
    """NVRTC's version, as 12.9."""
    try:
        major, minor = check(require("cuda.bindings.nvrtc").nvrtcVersion())
    except (RuntimeError, OSError):  # the bindings are there, the library is not
        raise DeviceError(
            "device cuda needs NVRTC, which is not installed: pip install 'cuq1[cuda12]' or 'cuq1[cuda13]'"
        ) from None
    return f"{major}.{minor}"


def cache_dir() -> Path:
    """Where cubins are kept: CUQ1_CACHE_DIR, XDG_CACHE_HOME/cuq1 or ~/.cache/cuq1; a temporary folder where that
    cannot be written."""
    chosen = os.environ.get("CUQ1_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    wanted = Path(chosen) if chosen else (Path(base) if base else Path("~/.cache").expanduser()) / "cuq1"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError:
        return _temporary()


@cache
def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="cuq1-"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"{path} cannot be read ({error.strerror}): cuq1's installation is incomplete") from None


def _headers(root: Path, name: str, text: str) -> dict[str, str]:
    """Every header that a file includes in quotes, at any depth: paths relative to `root`, and their texts.

    Names are relative to `root` wherever the #include stands, since nothing else is on the compiler's path.
    """
    found: dict[str, str] = {}
    waiting = [(name, text)]
    while waiting:
        parent, content = waiting.pop()
        for included in _INCLUDE.findall(content):
            relative = Path(os.path.normpath(included)).as_posix()
            if relative.startswith("..") or not (root / relative).is_file():
                raise DeviceError(f"{parent} includes {included}, which is not in {root}")
            if relative not in found and relative != name:
                found[relative] = _read(root / relative)
                waiting.append((relative, found[relative]))
    return found


def _options(kernel: Kernel, arch: str) -> list[str]:
    flags = (*FLAGS, "--relocatable-device-code=true") if kernel.device_runtime else FLAGS
    return [*flags, f"--gpu-architecture={arch}", *(f"--define-macro={name}={value}" for name, value in kernel.defines)]


def _compile(kernel: Kernel, arch: str, text: str) -> tuple[bytes, str]:
    """Machine code and log."""
    nvrtc = require("cuda.bindings.nvrtc")
    program = check(nvrtc.nvrtcCreateProgram(text.encode(), kernel.source.encode(), 0, [], []))
    try:
        # The folder of headers is named last: it is no part of the key. No other folder is searched.
        # Without NVRTC's own cache: sizes that give the same PTX twice would get a log without the registers.
        own = ["--no-cache", "--no-source-include", f"--include-path={folder('kernels_cu')}"]
        options = [*_options(kernel, arch), *own]
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        log = _filled(nvrtc.nvrtcGetProgramLog, program, check(nvrtc.nvrtcGetProgramLogSize(program)))
        if int(status) != 0:
            raise DeviceError(f"{kernel.source} does not compile for {arch}: {_first_error(log, status)}")
        cubin = _filled(nvrtc.nvrtcGetCUBIN, program, check(nvrtc.nvrtcGetCUBINSize(program)))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if kernel.device_runtime:
        cubin = link.link(cubin, kernel.source, arch)
    return cubin, log.rstrip(b"\0").decode(errors="replace")


def _filled(call: Any, program: Any, size: int) -> bytes:
    room = bytes(max(size, 2))  # the bindings write into it; Python shares objects of fewer than two bytes
    check(call(program, room))
    return room[:size]


def _first_error(log: bytes, status: Any) -> str:
    lines = log.rstrip(b"\0").decode(errors="replace").splitlines()
    return next((line.strip() for line in lines if "error" in line.lower()), f"NVRTC reports {status.name}")


def _figures(kernel: Kernel, path: Path, log: str) -> Cubin:
    found = entries(log).get(kernel.entry)
    if found is None:
        raise DeviceError(f"{kernel.source} holds no kernel {kernel.entry} for its constants")
    return Cubin(path, found.registers, found.spills, log, found.smem)


def _prebuilt(source: str) -> tuple[Path, str] | None:
    """What tools/build_ptx.py left for this source."""
    entry = _manifest(folder("ptx")).get(source)
    if entry is None:
        return None
    path = folder("ptx") / entry["file"]
    return (path, entry["log"]) if path.is_file() else None


@cache
def _manifest(where: Path) -> dict[str, Any]:
    path = where / "MANIFEST.json"
    return dict(json.loads(_read(path))["cubins"]) if path.is_file() else {}


def _cached(where: Path, key: str) -> tuple[Path, str] | None:
    """A file that a crash cut short, or that anything else changed, is as good as none."""
    path = where / f"{key}.cubin"
    try:
        notes = json.loads((where / f"{key}.json").read_text(encoding="utf-8"))
        whole = hashlib.sha256(path.read_bytes()).hexdigest() == notes["sha256"]
        return (path, str(notes["log"])) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(where: Path, key: str, cubin: bytes, log: str) -> tuple[Path, str]:
    figures = {name: asdict(figures) for name, figures in entries(log).items()}
    notes = {"sha256": hashlib.sha256(cubin).hexdigest(), "kernels": figures, "log": log}
    path = where / f"{key}.cubin"
    replace_file(path, cubin)
    replace_file(where / f"{key}.json", json.dumps(notes).encode())
    return path, log


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, however many processes write it at once."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
