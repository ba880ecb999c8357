"""Every kernel compiles for every size and precision, within its registers and without spills. Needs no GPU."""

import importlib
import pkgutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import cuq1.cuda.kernels
from cuq1.cuda import compile as jit
from cuq1.cuda.abi import BandwidthArgs
from cuq1.cuda.kernels import bandwidth, qwen2_gemv, qwen2_layers
from cuq1.errors import DeviceError
from cuq1.plan.kernel import Kernel
from tests.kernels import qwen2_shapes, shapes
from tests.paths import ROOT

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python")

MODULES = [
    importlib.import_module(f"cuq1.cuda.kernels.{found.name}")
    for found in pkgutil.iter_modules(cuq1.cuda.kernels.__path__)
]
ALL_FAMILIES = {module.__name__.rpartition(".")[2]: module for module in MODULES if hasattr(module, "kernels")}
QWEN2 = {name: module for name, module in ALL_FAMILIES.items() if name.startswith("qwen2_")}
FAMILIES = {name: module for name, module in ALL_FAMILIES.items() if name not in QWEN2}
VARIANTS = {}
for _name, _dims in shapes.variants():
    if _dims not in VARIANTS.values():
        VARIANTS[_name] = _dims

EXCHANGE = '#include "common/exchange.cuh"'

SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(float* x) {
    float kept[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) kept[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = kept[i] * kept[127 - i];
}
"""


def problems(kernels):
    """What compiling these reports, two at a time."""

    def problem(kernel):
        try:
            return jit.over_budget(kernel, jit.compile_kernel(kernel))
        except DeviceError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return [found for found in pool.map(problem, kernels) if found]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_kernels_stay_within_their_registers(family, variant):
    kernels = FAMILIES[family].kernels(VARIANTS[variant])
    assert kernels
    if VARIANTS[variant].ranks > 1:  # the others are what one rank's are
        kernels = [kernel for kernel in kernels if EXCHANGE in (ROOT / "kernels_cu" / kernel.source).read_text()]
    assert problems(kernels) == []


@pytest.mark.parametrize("size", qwen2_shapes.ALL)
@pytest.mark.parametrize("family", QWEN2)
def test_qwen2_kernels_stay_within_their_registers(family, size):
    kernels = QWEN2[family].kernels(qwen2_shapes.ALL[size])
    assert kernels or not QWEN2[family].fits(qwen2_shapes.ALL[size])
    assert problems(kernels) == []


@pytest.mark.parametrize("own_places", [False, True])
@pytest.mark.parametrize(("kernel", "parts"), [(qwen2_gemv.chain, 4), (qwen2_layers.layers, 5)])
def test_what_leaves_its_parts_times_fits_beside_what_it_has(kernel, parts, own_places):
    """tools/tracing.py compiles kernels so; that of all layers has nearly all of the shared memory."""
    places = (("TRACE_LAYERS", 29), ("TRACE_BLOCKS", 512), ("TRACE_PLACES", "1000u"))
    for dims in (qwen2_shapes.ALL["7b"], qwen2_shapes.ALL["0.5b"]):
        plain = kernel(dims)
        traced = replace(
            plain, defines=(*plain.defines, ("TRACE", 3), ("TRACE_PHASES", parts), *places[: 3 * own_places])
        )
        assert problems([traced]) == []


def test_only_sources_know_of_several_ranks():
    for path in (ROOT / "kernels_cu").glob("**/*.cuh"):
        assert EXCHANGE not in path.read_text(), path.name


def test_every_source_is_compiled_by_a_family():
    used = {kernel.source for module in FAMILIES.values() for kernel in module.kernels(shapes.RELEASED)}
    used |= {kernel.source for module in QWEN2.values() for kernel in module.kernels(qwen2_shapes.ALL["7b"])}
    assert {path.name for path in (ROOT / "kernels_cu").glob("*.cu")} == used


def test_a_geometry_is_one_that_a_gpu_can_launch():
    kernels = [kernel for module in FAMILIES.values() for dims in VARIANTS.values() for kernel in module.kernels(dims)]
    kernels += [
        kernel for module in QWEN2.values() for dims in qwen2_shapes.ALL.values() for kernel in module.kernels(dims)
    ]
    for kernel in kernels:
        assert min(kernel.grid) >= 1
        assert max(kernel.grid[1:]) <= 65535
        assert 1 <= kernel.block <= 1024
        assert kernel.block % 32 == 0
        assert 0 <= kernel.smem <= 227 * 1024
        assert 1 <= kernel.cluster <= 16  # above 8 by an attribute that loading sets
        assert kernel.grid[0] % kernel.cluster == 0


def test_too_many_registers_are_found():
    kernel = bandwidth.read_once()
    assert problems([replace(kernel, max_registers=16)]) == ["bandwidth.cu: read_once takes 32 of 16 registers ()"]


def test_too_few_blocks_on_a_multiprocessor_are_found():
    kernel = bandwidth.read_once()
    assert problems([kernel]) == []
    for change, why in (
        ({"min_blocks": 5}, "needs 5 blocks on a multiprocessor, with registers for 4 and"),
        ({"smem": 120 * 1024}, "needs 2 blocks on a multiprocessor, with registers for 4 and shared memory for 1"),
    ):
        (found,) = problems([replace(kernel, **change)])
        assert why in found


def test_a_spill_is_found(tmp_path, monkeypatch):
    (tmp_path / "spills.cu").write_text(SPILLS)
    monkeypatch.setattr(jit, "folder", lambda name: tmp_path)
    found = problems([Kernel("spills.cu", "spills", BandwidthArgs, (), (1, 1, 1), 1024)])
    assert len(found) == 1
    assert "spills.cu: spills spills" in found[0]
