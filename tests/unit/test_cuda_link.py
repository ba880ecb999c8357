"""Linking with CUDA's device runtime, and where it is looked for. Needs no GPU."""

import pytest

from cuq1.cuda import compile as jit
from cuq1.cuda import link
from cuq1.cuda.kernels import control
from cuq1.errors import DeviceError
from tests.kernels import shapes

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python")
pytest.importorskip("nvidia.nvjitlink", reason="needs nvJitLink")

KERNEL = control.control(shapes.NANO)


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """An empty cache of cubins, and what was found out about the linker forgotten."""
    monkeypatch.setenv("CUQ1_CACHE_DIR", str(tmp_path))
    found = link.device_runtime, link.version
    for one in found:
        one.cache_clear()
    yield tmp_path
    for one in found:
        one.cache_clear()


def test_the_control_kernel_is_linked(empty):
    cubin = jit.compile_kernel(KERNEL)
    content = cubin.path.read_bytes()
    assert content[:4] == b"\x7fELF"
    assert content[16] == 2  # an executable; a relocatable file has 1
    assert b"cudaGraphLaunch" in content
    assert cubin.registers
    assert not cubin.spills


def test_without_the_library_it_is_said_where_it_comes_from(empty, monkeypatch):
    monkeypatch.setattr(link, "_folders", lambda: iter(()))
    with pytest.raises(DeviceError, match=r"libcudadevrt\.a, which is in no wheel and no toolkit here: pip install"):
        jit.compile_kernel(KERNEL)


def test_a_toolkit_serves_as_well(empty, monkeypatch):
    here = link.device_runtime()
    (empty / "lib64").mkdir()
    (empty / "lib64" / link.LIBRARY).symlink_to(here)
    link.device_runtime.cache_clear()
    monkeypatch.setattr(link, "_WHEELS", ())
    monkeypatch.setenv("CUDA_HOME", str(empty))
    assert link.device_runtime().parent == empty / "lib64"


def test_what_was_compiled_ahead_needs_neither_linker_nor_library(empty, monkeypatch):
    compiled = jit.compile_kernel(KERNEL)
    monkeypatch.setattr(jit, "_prebuilt", lambda source: (compiled.path, compiled.log))
    monkeypatch.setattr(link, "_linker", None)
    monkeypatch.setattr(link, "_folders", None)
    link.device_runtime.cache_clear()
    link.version.cache_clear()
    monkeypatch.setenv("CUQ1_NO_JIT", "1")
    assert jit.compile_kernel(KERNEL).path == compiled.path


def test_what_cannot_be_linked_is_named(empty):
    with pytest.raises(DeviceError, match=r"garbage\.cu cannot be linked with .*libcudadevrt\.a"):
        link.link(b"\x7fELF" + bytes(200), "garbage.cu", "sm_90a")


def test_another_library_or_linker_is_another_cubin(empty, monkeypatch):
    first = jit.compile_kernel(KERNEL).path
    monkeypatch.setattr(link, "version", lambda: "another")
    assert jit.compile_kernel(KERNEL).path != first
