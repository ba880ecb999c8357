"""Compiling kernels, and the cache of what was compiled. Needs NVRTC, no GPU."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from cuq1.cuda import compile as jit
from cuq1.cuda.abi import BandwidthArgs
from cuq1.errors import DeviceError
from cuq1.plan.kernel import Kernel
from tests.paths import ROOT

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python")

KERNEL = Kernel("add.cu", "add", BandwidthArgs, (("STEP", 3),), (1, 1, 1), 32)
SOURCE = """#include "common/one.cuh"
extern "C" __global__ void add(int* x) { x[threadIdx.x] += STEP + ONE; }
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A kernels_cu of its own with add.cu and two headers, an empty ptx and an empty cache."""
    root = tmp_path / "tree"
    (root / "kernels_cu" / "common").mkdir(parents=True)
    (root / "ptx").mkdir()
    (root / "kernels_cu" / "add.cu").write_text(SOURCE)
    (root / "kernels_cu" / "common" / "one.cuh").write_text(
        '#pragma once\n#include "common/two.cuh"\n#define ONE TWO - 1\n'
    )
    (root / "kernels_cu" / "common" / "two.cuh").write_text("#pragma once\n#define TWO 2\n")
    monkeypatch.setattr(jit, "folder", lambda name: root / name)
    monkeypatch.setenv("CUQ1_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUQ1_NO_JIT", raising=False)
    return root


@pytest.fixture
def compilations(monkeypatch):
    """How often NVRTC was called."""
    calls = []
    real = jit._compile
    monkeypatch.setattr(jit, "_compile", lambda *args: calls.append(args) or real(*args))
    return calls


def test_a_kernel_is_compiled_once(tree, compilations, tmp_path):
    first = jit.compile_kernel(KERNEL)
    second = jit.compile_kernel(KERNEL)
    assert first == second
    assert len(compilations) == 1
    assert first.path.parent == tmp_path / "cache"
    assert first.path.read_bytes()[:4] == b"\x7fELF"
    assert (0 < first.registers < 32, first.spills, first.smem) == (True, 0, 0)
    assert "Compiling entry function 'add'" in first.log
    notes = json.loads(first.path.with_suffix(".json").read_text())
    assert notes["kernels"]["add"]["registers"] == first.registers


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "kernels_cu" / "add.cu").write_text(SOURCE + "// more\n"),
        lambda root: (root / "kernels_cu" / "common" / "one.cuh").write_text("#define ONE 5\n"),
        lambda root: (root / "kernels_cu" / "common" / "two.cuh").write_text("#define TWO 9\n"),  # at depth two
    ],
)
def test_whatever_a_kernel_is_made_of_is_in_its_key(tree, change):
    before = jit.digest(KERNEL, "sm_90a")
    (tree / "kernels_cu" / "other.cuh").write_text("#define OTHER 1\n")
    assert jit.digest(KERNEL, "sm_90a") == before  # not included
    change(tree)
    assert jit.digest(KERNEL, "sm_90a") != before


def test_constants_architecture_flags_and_compiler_are_in_the_key(tree, compilations, monkeypatch):
    digests = {jit.digest(KERNEL, "sm_90a"), jit.digest(KERNEL, "sm_90")}
    digests |= {jit.digest(replace(KERNEL, defines=(("STEP", 4),)), "sm_90a")}
    digests |= {jit.digest(KERNEL, "sm_90a", jit.source_text(KERNEL, ("ONE;", "2;")))}
    assert jit.digest(replace(KERNEL, grid=(7, 1, 1), block=64), "sm_90a") in digests  # a launch's, not the code's
    monkeypatch.setattr(jit, "FLAGS", (*jit.FLAGS, "--ftz=true"))
    digests |= {jit.digest(KERNEL, "sm_90a")}
    assert len(digests) == 5
    jit.compile_kernel(KERNEL)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "99.0")
    jit.compile_kernel(KERNEL)
    assert len(compilations) == 2


@pytest.mark.parametrize("damage", ["cut short", "other bytes", "no notes", "foreign notes", "lost"])
def test_a_damaged_cache_entry_is_compiled_again(tree, compilations, damage):
    path = jit.compile_kernel(KERNEL).path
    whole = path.read_bytes()
    notes = path.with_suffix(".json")
    if damage == "cut short":
        path.write_bytes(whole[:100])
    elif damage == "other bytes":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "no notes":
        notes.unlink()
    elif damage == "foreign notes":
        notes.write_text('{"sha256": 3}')
    else:
        path.unlink()
    again = jit.compile_kernel(KERNEL)
    assert len(compilations) == 2
    assert again.path.read_bytes() == whole
    jit.compile_kernel(KERNEL)
    assert len(compilations) == 2


RACER = """
import sys, time
from cuq1.cuda.compile import compile_kernel
from cuq1.cuda.kernels.bandwidth import read_once
while time.time() < float(sys.argv[1]): pass
print(compile_kernel(read_once()).registers)
"""


def test_processes_that_compile_at_once_agree(tmp_path, monkeypatch):
    import time  # noqa: PLC0415

    monkeypatch.setenv("CUQ1_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", RACER, str(time.time() + 1)]
    racers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert len(set(said)) == 1
    (cubin,) = tmp_path.glob("*.cubin")
    assert sorted(path.name for path in tmp_path.iterdir()) == [cubin.name, cubin.stem + ".json"]
    assert jit._cached(tmp_path, cubin.stem) is not None


def torn_reads(write, tmp_path):
    """How often a reader sees neither of two contents while a thread writes them in turn."""
    path, size = tmp_path / "x", 1 << 18
    contents = [bytes([value]) * size for value in (1, 2)]
    write(path, contents[0])
    stop = threading.Event()

    def writer():
        while not stop.is_set():
            for content in contents:
                write(path, content)

    thread = threading.Thread(target=writer)
    thread.start()
    try:
        return sum(path.read_bytes() not in contents for _ in range(300))
    finally:
        stop.set()
        thread.join()


def in_halves(path, content):
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        time.sleep(0.001)
        file.write(content[len(content) // 2 :])


def test_a_file_is_replaced_whole(tmp_path):
    assert torn_reads(jit.replace_file, tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert torn_reads(in_halves, tmp_path) > 0  # the control


def test_no_jit_takes_only_what_was_compiled_ahead(tree, compilations, monkeypatch):
    compiled = jit.compile_kernel(KERNEL)
    monkeypatch.setenv("CUQ1_NO_JIT", "1")
    with pytest.raises(DeviceError, match=r"add\.cu is not among the compiled kernels in .*ptx.*CUQ1_NO_JIT=1") as told:
        jit.compile_kernel(KERNEL)
    assert "\n" not in str(told.value)
    (tree / "ptx" / "add.cubin").write_bytes(compiled.path.read_bytes())
    entry = {"file": "add.cubin", "log": compiled.log}
    manifest = {"cubins": {jit.digest(KERNEL, "sm_90a"): entry}}
    (tree / "ptx" / "MANIFEST.json").write_text(json.dumps(manifest))
    jit._manifest.cache_clear()
    assert jit.compile_kernel(KERNEL) == replace(compiled, path=tree / "ptx" / "add.cubin")
    with pytest.raises(DeviceError, match="CUQ1_NO_JIT"):  # other sizes
        jit.compile_kernel(replace(KERNEL, defines=(("STEP", 4),)))
    (tree / "kernels_cu" / "common" / "two.cuh").write_text("#define TWO 9\n")
    with pytest.raises(DeviceError, match="CUQ1_NO_JIT"):  # the sources have changed since
        jit.compile_kernel(KERNEL)
    assert len(compilations) == 1


def test_a_compile_error_names_the_file_and_the_first_error(tree):
    (tree / "kernels_cu" / "add.cu").write_text('\nextern "C" __global__ void add(int* x) { y[0] = 1; z[0] = 1; }\n')
    with pytest.raises(DeviceError) as told:
        jit.compile_kernel(KERNEL)
    assert str(told.value) == 'add.cu does not compile for sm_90a: add.cu(2): error: identifier "y" is undefined'


def test_a_kernel_that_a_file_lacks_is_named(tree):
    with pytest.raises(DeviceError, match=r"add\.cu holds no kernel subtract"):
        jit.compile_kernel(replace(KERNEL, entry="subtract"))


@pytest.mark.parametrize("included", ["missing.cuh", "../../secret.cuh"])
def test_an_include_from_elsewhere_is_refused(tree, included):
    (tree.parent / "secret.cuh").write_text("")
    (tree / "kernels_cu" / "add.cu").write_text(f'#include "{included}"\n' + SOURCE)
    with pytest.raises(DeviceError, match=rf"add\.cu includes {included}, which is not in .*kernels_cu"):
        jit.digest(KERNEL, "sm_90a")


def test_a_missing_source_is_one_sentence(tree):
    with pytest.raises(DeviceError, match=r"gone\.cu cannot be read \(No such file or directory\)"):
        jit.compile_kernel(replace(KERNEL, source="gone.cu"))


@pytest.mark.parametrize(("old", "times"), [("nothing of it", 0), ("x", 5)])
def test_a_patch_fits_one_place(tree, old, times):
    assert jit.source_text(KERNEL, ("STEP + ONE", "7")).count("7") == 1
    with pytest.raises(ValueError, match=rf"occurs {times} times in add\.cu, not once"):
        jit.source_text(KERNEL, (old, "y"))


def test_a_patched_kernel_has_a_key_of_its_own(tree, compilations):
    paths = {jit.compile_kernel(KERNEL, patch=patch).path for patch in (None, ("ONE;", "8;"))}
    assert len(paths) == len(compilations) == 2
    assert len({hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}) == 2


def test_where_the_cache_lies(tmp_path, monkeypatch):
    for name in ("CUQ1_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert jit.cache_dir() == tmp_path / "home" / ".cache" / "cuq1"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_dir() == tmp_path / "xdg" / "cuq1"
    monkeypatch.setenv("CUQ1_CACHE_DIR", str(tmp_path / "own"))
    assert jit.cache_dir() == tmp_path / "own"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUQ1_CACHE_DIR", str(tmp_path / "file" / "below"))  # no folder can be made there
    temporary = jit.cache_dir()
    assert temporary.is_dir()
    assert tmp_path not in temporary.parents or temporary.name.startswith("cuq1-")
    assert jit.cache_dir() == temporary  # one for the whole process
