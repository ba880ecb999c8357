"""kernels_cu/abi*.cuh, as abi.py reads them and as NVRTC compiles them."""

import ctypes
import re

import pytest

from cuq1.cuda import abi
from cuq1.cuda import compile as jit
from cuq1.cuda.ranks import PEER_TIMEOUT
from cuq1.errors import Cuq1Error, DeviceError
from cuq1.plan import dims
from cuq1.plan.kernel import Kernel
from tests.paths import ROOT

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python")

HEADERS = sorted((ROOT / "kernels_cu").glob("abi*.cuh"))
HEADER = "".join(path.read_text() for path in HEADERS)
TYPES = (ROOT / "kernels_cu" / "common" / "types.cuh").read_text()
STRUCTURES = {
    name: value
    for name, value in vars(abi).items()
    if isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure
}


def assertions(name, structure):
    """C++ that compiles only where a structure has this size, and these fields at these places.

    NVRTC has no offsetof; __INTADDR__ is what the macro of its headers would expand to.
    """
    lines = [f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}");']
    for field, *_ in structure._fields_:
        found = getattr(structure, field)
        lines.append(f'static_assert(__INTADDR__(&(({name}*)0)->{field}) == {found.offset}, "{name}.{field}");')
        lines.append(f'static_assert(sizeof((({name}*)0)->{field}) == {found.size}, "size of {name}.{field}");')
    return lines


def compile_lines(lines, tmp_path, monkeypatch):
    """Compiles lines that come after the headers."""
    for path in (*HEADERS, ROOT / "kernels_cu" / "common"):
        (tmp_path / path.name).symlink_to(path)
    text = [*(f'#include "{path.name}"' for path in HEADERS), *lines, 'extern "C" __global__ void nothing() {}']
    (tmp_path / "abi_test.cu").write_text("\n".join(text))
    monkeypatch.setattr(jit, "folder", lambda name: tmp_path)
    monkeypatch.setenv("CUQ1_CACHE_DIR", str(tmp_path / "cache"))
    jit.compile_kernel(Kernel("abi_test.cu", "nothing", abi.Fault, (), (1, 1, 1), 32))


def test_every_structure_has_its_name():
    assert set(re.findall(r"^struct (\w+)", HEADER, re.MULTILINE)) == set(STRUCTURES)


def test_sizes_and_offsets_agree(tmp_path, monkeypatch):
    compile_lines([line for item in STRUCTURES.items() for line in assertions(*item)], tmp_path, monkeypatch)


@pytest.mark.parametrize(("old", "new"), [("k_norm", "positions"), ("slots", None)])
def test_a_field_that_moved_is_refused(old, new, tmp_path, monkeypatch):
    """The control: two fields of equal size swapped, or one left out."""
    fields = [name for name, *_ in abi.QkvArgs._fields_]
    kinds = dict(abi.QkvArgs._fields_)
    if new is None:
        fields.remove(old)
    else:
        one, two = fields.index(old), fields.index(new)
        fields[one], fields[two] = fields[two], fields[one]
    moved = type("QkvArgs", (ctypes.Structure,), {"_fields_": [(name, kinds[name]) for name in fields]})
    with pytest.raises(DeviceError, match=r"abi_test\.cu does not compile for sm_90a: .*QkvArgs"):
        compile_lines(assertions("QkvArgs", moved), tmp_path, monkeypatch)


def test_kernels_wait_for_a_peer_as_long_as_errors_say(tmp_path, monkeypatch):
    compile_lines(waits_for(PEER_TIMEOUT), tmp_path, monkeypatch)


def test_another_wait_is_refused(tmp_path, monkeypatch):
    with pytest.raises(DeviceError, match="static assertion failed"):
        compile_lines(waits_for(PEER_TIMEOUT + 0.001), tmp_path, monkeypatch)


def waits_for(seconds):
    return ['#include "common/exchange.cuh"', f"static_assert(PEER_TIMEOUT_MS == {round(seconds * 1000)});"]


def test_fields_by_hand():
    text = """struct Some {
    const Other* one;
    int two, three;
    uint64_t four[MAX_DRAFTS - MIN_AUTO_DRAFTS][2];
};"""
    assert abi.fields("Some", text) == [
        ("one", ctypes.c_uint64),
        ("two", ctypes.c_int32),
        ("three", ctypes.c_int32),
        ("four", (ctypes.c_uint64 * 2) * 4),
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("struct Some {\n    Other one;\n};", "a field that ctypes is not told of: 'Other one'"),
        ("struct Some {\n    int (*one)(int);\n};", "a field that ctypes is not told of"),
        ("struct Some {\n    int one[NOWHERE];\n};", "no constant NOWHERE"),
        ("struct Other {\n    int one;\n};", "no structure Some"),
    ],
)
def test_what_ctypes_cannot_have_is_refused(text, what):
    with pytest.raises(Cuq1Error, match=what):
        abi.fields("Some", text)


def constants(text):
    return {name: int(value) for name, value in re.findall(r"^constexpr int (\w+) = (\d+);", text, re.MULTILINE)}


def enumerators(prefix):
    return {name: int(value) for name, value in re.findall(rf"\b{prefix}_(\w+) = (\d+)", HEADER)}


def test_constants_agree():
    c = constants(TYPES) | constants(HEADER)
    for module in (abi, dims):
        shared = {name: value for name, value in vars(module).items() if name in c}
        assert shared == {name: c[name] for name in shared}
    assert {"ROWS", "MAX_TOP_K", "MAX_DRAFTS", "MIN_AUTO_DRAFTS", "FEATURES"} <= vars(abi).keys() & c.keys()
    assert {"ROWS", "HEAD_DIM", "KV_TILE", "MAX_TOP_K"} <= vars(dims).keys() & c.keys()


def test_kernel_and_fault_numbers_agree():
    assert {number: name.lower() for name, number in enumerators("KERNEL").items()} == abi.KERNELS
    faults = enumerators("FAULT")
    assert faults.pop("NONE") == 0
    assert sorted(faults.values()) == sorted(abi.FAULTS)
    words = {"NOT_FINITE": "not finite", "COPY": "copy", "TOKEN": "token", "ROUTING": "routing"}
    words |= {"RESULT": "result", "PEER": "peer", "PAGES": "page"}
    assert faults.keys() == words.keys()
    assert all(words[name] in abi.FAULTS[number] for name, number in faults.items())
