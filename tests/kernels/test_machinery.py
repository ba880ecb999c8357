"""Launching, capturing, timing and failing on a GPU."""

import subprocess
import sys

import numpy as np
import pytest

from cuq1.cuda.abi import BandwidthArgs
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.graph import capture
from cuq1.cuda.kernels import bandwidth
from cuq1.cuda.launch import launch
from cuq1.cuda.memory import Arena
from cuq1.cuda.module import build
from cuq1.errors import DeviceError
from tests.kernels import chain
from tests.paths import ROOT

pytestmark = pytest.mark.gpu
BLOCKS, STEPS, REPLAYS = 8, 6, 3


@pytest.fixture
def folder(tmp_path, monkeypatch):
    chain.compile_from(chain.kernels_folder(tmp_path), monkeypatch.setattr)


def run_chain(gpu, sleep=0, **how):
    """STEPS launches in a graph that is replayed: the final values, what they should be, and every launch's times."""
    kernel = chain.swap_in_cluster(BLOCKS, **how)
    values = np.random.default_rng().integers(0, 1000, BLOCKS).astype(np.float32)
    buffers = [gpu.array(values), gpu.poison(BLOCKS, np.float32)]
    times = gpu.array(np.zeros((STEPS, 2), np.uint64))
    function = build(kernel, gpu.device.arch)
    gpu.cupy.cuda.Device().synchronize()
    with capture(gpu.stream) as captured:
        for step in range(STEPS):
            source, target = (buffers[(step + end) % 2].data.ptr for end in range(2))
            launch(function, chain.ChainArgs(0, source, target, times[step].data.ptr, sleep, 0), gpu.stream)
    with captured.instantiate() as graph:
        assert graph.nodes == STEPS
        graph.upload(gpu.stream)
        for _ in range(REPLAYS):
            graph.launch(gpu.stream)
        gpu.wait()
    return buffers[0].get(), values + STEPS * REPLAYS, times.get()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("pdl", [True, False])
def test_a_graph_of_programmatic_launches_of_clusters_is_replayed(gpu, pdl):
    got, want, _ = run_chain(gpu, pdl=pdl)
    np.testing.assert_array_equal(got, want)  # an even number of swaps


@pytest.mark.usefixtures("folder")
def test_without_its_cluster_a_block_sees_no_other(gpu):
    """The control: an odd number of swaps tells a cluster from none."""

    def once(cluster):
        values = np.arange(BLOCKS, dtype=np.float32)
        source, target = gpu.array(values), gpu.poison(BLOCKS, np.float32)
        gpu.run(chain.swap_in_cluster(BLOCKS, cluster=cluster), chain.ChainArgs(0, source.data.ptr, target.data.ptr))
        return target.get() - 1, values

    swapped, values = once(2)
    np.testing.assert_array_equal(swapped, values.reshape(-1, 2)[:, ::-1].ravel())
    alone, values = once(1)
    np.testing.assert_array_equal(alone, values)


@pytest.mark.usefixtures("folder")
def test_a_programmatic_launch_begins_before_its_predecessor_ends(gpu):
    _, _, times = run_chain(gpu, sleep=30, pdl=True)
    assert (times[1:, 0] < times[:-1, 1]).all()
    _, _, times = run_chain(gpu, sleep=30, pdl=False)
    assert (times[1:, 0] >= times[:-1, 1]).all()


DYING = """
import sys
from tests.kernels import chain
from tests.kernels.harness import Gpu
from cuq1.errors import DeviceError
chain.compile_from(chain.kernels_folder(sys.argv[1]))
gpu = Gpu()
try:
    gpu.run(chain.die(), chain.ChainArgs(gpu.fault.address))
except DeviceError as error:
    print(error)
found = gpu.fault.read()
print(found.what, found.kernel, found.layer)
"""


def test_a_fault_can_be_read_after_the_context_has_died(gpu, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    message, *rest = done.stdout.splitlines()
    assert "a copy that did not arrive in down, layer 7" in message, done
    assert rest == ["2 8 7"]


def test_a_reported_fault_is_raised_and_cleared(gpu):
    gpu.fault.view().what = 3
    with pytest.raises(DeviceError, match="a token outside the vocabulary"):
        gpu.wait()
    gpu.wait()


def test_what_the_driver_refuses_is_one_sentence(gpu):
    kernel = bandwidth.read_once()
    for change in ({"block": 2048}, {"smem": 1 << 20}, {"grid": (3, 1, 1), "cluster": 2}):
        with pytest.raises(DeviceError, match=r"read_once .* CUDA_ERROR"):
            gpu.run(type(kernel)(**{**vars(kernel), **change}), BandwidthArgs())


def test_capturing_what_cannot_be_captured_leaves_the_stream_usable(gpu):
    with pytest.raises(DeviceError, match="CAPTURE"), capture(gpu.stream):
        check(bindings().cuStreamSynchronize(bindings().CUstream(gpu.stream)))
    gpu.wait()


def test_an_arena_is_aligned_cleared_and_refused(gpu):
    arena = Arena({"weights": 1000, "kv": 257, "small": 1})
    try:
        assert [arena[name] % 256 for name in arena.sizes] == [0, 0, 0]
        assert arena["kv"] - arena["weights"] == 1024
        assert arena["small"] - arena["kv"] == 512
        arena.clear()
    finally:
        arena.close()
    with pytest.raises(DeviceError, match=r"weights 1024.00 GiB, kv 2.00 MiB.*are free"):
        Arena({"kv": 2 << 20, "weights": 1 << 40})


def test_times_agree_with_the_read_ceiling(gpu):
    ceiling = gpu.read_ceiling()
    words = (1 << 30) // 16 // bandwidth.WORDS * bandwidth.WORDS
    args = []
    for _ in range(2):  # twice 1 GiB: far more than L2 holds
        data, out = gpu.cupy.empty(words * 16, np.uint8), gpu.array(np.zeros(bandwidth.BLOCKS, np.uint32))
        args.append((data, out, BandwidthArgs(data.data.ptr, out.data.ptr, words)))
        gpu.run(bandwidth.fill_random(), args[-1][2])
    sample = args[0][0][: 1 << 20].get().view(np.uint32)
    assert len(np.unique(sample)) > 0.999 * len(sample)
    median, (low, high) = gpu.median_us([(bandwidth.read_once(), one) for *_, one in args], repeats=10)
    rate = 2 * words * 16 / median / 1e3
    print(f"\nread ceiling {ceiling:.0f} GB/s, a chain of reads {rate:.0f}: {median:.1f} us ({low:.1f} to {high:.1f})")
    assert low <= median <= high
    assert rate == pytest.approx(ceiling, rel=0.1)
