"""The exchange through the switch, with plain memory in the switch's place: nothing here makes a multicast object.

The ranks' buffers lie in one allocation, and the few lines of exchange_multicast.cu that name multimem instructions are
replaced by loops over them, in the order of ranks. What is tested is all the rest: readers, claims, re-arming, norms,
settled NaNs, faults.
"""

import re
from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda import compile as jit
from cuq1.cuda.driver import check
from cuq1.cuda.graph import stream, synchronize
from cuq1.cuda.kernels import multicast as family
from cuq1.cuda.launch import launch
from cuq1.cuda.memory import MappedFault
from cuq1.cuda.module import build
from cuq1.plan.dims import ROWS
from tests.kernels.shapes import EXCHANGED, RELEASED
from tests.kernels.test_rows import EXACT, HALF, assert_close, assert_untouched, norm_weights
from tests.kernels.twins import rows as twin
from tools.peer_loads import patch

NOT_READY = 0xFFFFFFFF
NOT_FINITE, PEER = 1, 6
SHAPES = {**EXCHANGED, "released, 3 ranks": replace(RELEASED, ranks=3)}


def without_multicast(kernel, nbytes, *changes):
    """A patch of the source: loops in place of the switch, over memory of `nbytes` each, and `changes` besides."""
    return patch(kernel, [rank * nbytes for rank in range(dict(kernel.defines)["RANKS"])], *changes)


def ptx(kernel, patch=None):
    """What NVRTC makes of each entry of a kernel's source: {entry: PTX}."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python")
    program = check(nvrtc.nvrtcCreateProgram(jit.source_text(kernel, patch).encode(), b"test.cu", 0, [], []))
    options = [f"--define-macro={name}={value}" for name, value in kernel.defines]
    options += ["--std=c++17", "--gpu-architecture=compute_90a", f"--include-path={jit.folder('kernels_cu')}"]
    check(nvrtc.nvrtcCompileProgram(program, len(options), [one.encode() for one in options]))
    text = bytes(check(nvrtc.nvrtcGetPTXSize(program)))
    check(nvrtc.nvrtcGetPTX(program, text))
    check(nvrtc.nvrtcDestroyProgram(program))
    entries = text.decode().split(".visible .entry ")[1:]
    return {one.partition("(")[0]: one for one in entries}


@pytest.mark.parametrize("name", SHAPES)
def test_the_tail_alone_loads_through_the_switch(name):
    found = ptx(family.tail(SHAPES[name]))
    instructions = set(re.findall(r"multimem\.[\w.]+", found["multicast_tail"]))
    begin = "multimem.ld_reduce.relaxed.sys.global"
    assert instructions == {f"{begin}.add.v4.f32", f"{begin}.max.u32", f"{begin}.max.s32"}
    assert "multimem" not in found["multicast_send"]
    assert "st.relaxed.sys.global.v4.f32" in found["multicast_send"]


def test_what_runs_in_tests_has_none_of_it():
    kernel = family.tail(SHAPES["released, 2 ranks"])
    found = ptx(kernel, without_multicast(kernel, 1 << 20))
    assert found.keys() == {"multicast_tail", "multicast_send"}
    assert not any("multimem" in text for text in found.values())


class Ranks:
    """All ranks' memory, and a stream and a fault record for each of them."""

    def __init__(self, gpu, dims, *changes, timeout_ms=300, sandwich=True, normed_residual=False, scale=0.37):
        self.gpu, self.dims, self.scale = gpu, dims, scale
        self.count = dims.ranks
        size = -(-family.nbytes(dims) // 256) * 256
        defines = (("PEER_TIMEOUT_MS", timeout_ms),)
        tail, send = family.tail(dims), family.send(dims)
        tail, send = replace(tail, defines=tail.defines + defines), replace(send, defines=send.defines + defines)
        patch = without_multicast(tail, size, *changes)
        self.send, self.tail = (build(kernel, gpu.device.arch, patch) for kernel in (send, tail))
        self.memory = gpu.cupy.full((self.count, size // 4), NOT_READY, np.uint32)
        self.streams = [stream() for _ in range(self.count)]
        self.apart = stream()
        self.faults = [MappedFault() for _ in range(self.count)]
        self.number = 0
        rng = np.random.default_rng()
        self.norms = [norm_weights(rng, dims.hidden) for _ in range(2)]
        self.on_gpu = [gpu.array(norm) for norm in self.norms]
        self.sandwich, self.normed_residual = sandwich, normed_residual
        self.kept = []

    def close(self):
        for fault in self.faults:
            fault.close()

    def buffer(self, number):
        """Words uint32 [ranks, ROWS, hidden]."""
        begin = family.buffer(self.dims, number) // 4
        size = ROWS * self.dims.hidden
        return self.memory.get()[:, begin : begin + size].reshape(self.count, ROWS, -1)

    def exchange(self, partials, h, rows, *, skipped=(), delays=None, tails_first=False, lost=None):
        """One exchange of partials [ranks, ROWS, hidden]: (residual, normed) [ranks, ROWS, hidden], and the faults."""
        gpu, dims = self.gpu, self.dims
        base, between = self.memory.data.ptr, self.memory.strides[0]
        here, before = family.buffer(dims, self.number), family.buffer(dims, self.number - 1)
        residual = gpu.poison((self.count, ROWS, dims.hidden), np.float32)
        normed = gpu.poison((self.count, ROWS, dims.hidden), np.float16)
        source, residual_in = gpu.array(partials), gpu.array(h)
        self.kept = [residual, normed, source, residual_in]
        gpu.cupy.cuda.Device().synchronize()

        def send(rank):
            if rank in skipped:
                return
            args = self.send.kernel.args(fault=self.faults[rank].address, rows=rows, layer=self.number)
            args.source = source[rank].data.ptr
            args.out = base + rank * between + here
            args.sent = base + rank * between + family.sent(dims) + 4 * rank
            args.delay = 0 if delays is None else int(delays[rank])
            launch(self.send, args, self.streams[rank])

        def tail(rank, on):
            args = self.tail.kernel.args(fault=self.faults[rank].address, rows=rows, layer=self.number)
            args.y, args.sent = base + here, base + family.sent(dims)
            args.unready = base + rank * between + before
            args.h, args.next_norm = residual_in.data.ptr, self.on_gpu[1].data.ptr
            args.ffn_out_norm = self.on_gpu[0].data.ptr if self.sandwich else 0
            args.residual, args.normed = residual[rank].data.ptr, normed[rank].data.ptr
            args.ffn_scale, args.normed_residual = self.scale, self.normed_residual
            launch(self.tail, args, on)

        ranks = range(self.count)
        if tails_first:  # of rank 0: it waits for what is sent on other streams
            tail(0, self.apart)
        for rank in ranks:
            send(rank)
        if lost is not None:
            for one in self.streams:
                synchronize(one)
            self.memory[lost, here // 4 + 5] = NOT_READY
            gpu.cupy.cuda.Device().synchronize()
        for rank in ranks[1:] if tails_first else ranks:
            tail(rank, self.streams[rank])
        for one in [self.apart, *self.streams]:
            synchronize(one)
        self.number += 1
        found = [fault.read() for fault in self.faults]
        for fault in self.faults:
            fault.clear()
        return residual.get(), normed.get(), [one and (one.what, one.kernel, one.layer, one.detail) for one in found]

    def expected(self, partials, h, rows):
        out_norm = self.norms[0] if self.sandwich else None
        return twin.mlp_tail(
            partials[:, :rows], h[:rows], out_norm, self.norms[1], self.scale, self.dims.eps,
            normed_residual=self.normed_residual,
        )  # fmt: skip


def check_sequence(gpu, rng, dims, *changes, exchanges=10, **how):
    """Exchanges of changing widths, one after the other, in the buffers that they take in turn."""
    ranks = Ranks(gpu, dims, *changes, **how)
    try:
        for number in range(exchanges):
            rows = int(rng.choice([1, 2, 5, 8]))
            partials = rng.standard_normal((dims.ranks, ROWS, dims.hidden), np.float32)
            partials[:, rows:] = np.nan
            h = rng.standard_normal((ROWS, dims.hidden), np.float32)
            h[rows:] = np.nan
            delays = rng.integers(0, 20_000, dims.ranks) if number % 2 else None
            residual, normed, faults = ranks.exchange(partials, h, rows, delays=delays, tails_first=number % 4 == 3)
            assert faults == [None] * dims.ranks, f"exchange {number}: {faults}"
            expected = ranks.expected(partials, h, rows)
            for rank in range(dims.ranks):
                where = f"exchange {number}, rank {rank}"
                assert_close(residual[rank, :rows], expected[0], EXACT, f"{where}, residual")
                assert_close(normed[rank, :rows], expected[1], HALF, f"{where}, normed")
                assert_untouched(residual[rank], rows, "residual")
                assert_untouched(normed[rank], rows, "normed")
                assert residual[rank].tobytes() == residual[0].tobytes(), where
                assert normed[rank].tobytes() == normed[0].tobytes(), where
            assert (ranks.buffer(number)[:, :rows] == partials[:, :rows].view(np.uint32)).all(), "what was sent"
            assert (ranks.buffer(number - 1) == NOT_READY).all(), f"exchange {number}: the buffer before is not armed"
    finally:
        ranks.close()


@pytest.fixture
def rng():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # shown where a test fails
    return np.random.default_rng(seed)


@pytest.mark.gpu
@pytest.mark.parametrize("sandwich", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_a_sequence_of_exchanges(gpu, rng, name, sandwich):
    check_sequence(gpu, rng, SHAPES[name], sandwich=sandwich, normed_residual=not sandwich)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        ("for (int r = row; r < ROWS; r += live) make_unready_4", "for (int r = row; r < 0; r += live) make_unready_4"),
        ("r < ROWS; r += live", "r < live; r += live"),
        ("bool whole = !has_nan(x);", "bool whole = true;"),
        ("const float4 y = vectors.value[thread];", "const float4 y = vectors.value[0];"),
    ],
)
def test_a_sequence_tells_broken_kernels(gpu, rng, change):
    with pytest.raises(AssertionError):
        check_sequence(gpu, rng, SHAPES["nano, 2 ranks"], change, exchanges=40)


SUM = {"sandwich": False, "scale": 1.0}  # with h = -0 the residual is the sum itself, signs of zeros included


def sums(gpu, dims, partials, rows=ROWS, changes=(), **how):
    """The sums' bits on all ranks, and the faults."""
    ranks = Ranks(gpu, dims, *changes, **SUM, **how)
    try:
        residual, _, faults = ranks.exchange(partials, np.full((ROWS, dims.hidden), -0.0, np.float32), rows)
    finally:
        ranks.close()
    return residual, faults


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 8])
def test_every_finite_value_passes(gpu, rng, count):
    dims = SHAPES[f"released, {count} ranks"]
    values = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.0, -1.0, 2.0**24, -(2.0**24), 1e15, 3.0]
    partials = rng.choice(np.array(values, np.float32), (count, ROWS, dims.hidden))
    residual, faults = sums(gpu, dims, partials)
    expected = partials[0].copy()
    for rank in range(1, count):
        expected += partials[rank]
    assert faults == [None] * count
    for rank in range(count):
        assert residual[rank].tobytes() == expected.tobytes()


@pytest.mark.gpu
def test_the_largest_values_pass_and_their_norm_is_an_error(gpu):
    """Sums that reach infinity on the way, in some order: the sum is a NaN or not, and never a hang."""
    dims = SHAPES["released, 3 ranks"]
    most = np.finfo(np.float32).max
    partials = np.zeros((3, ROWS, dims.hidden), np.float32)
    partials[:, 2, 7] = most, most, -most
    partials[0, 3, 9] = most
    residual, faults = sums(gpu, dims, partials)
    assert [one[:2] for one in faults] == [(NOT_FINITE, 18)] * 3
    assert residual[0, 2, 7] == np.inf
    assert residual[0, 3, 9] == most


def check_not_finite(gpu, dims, values, *changes):
    """values: of the ranks, at one place. All ranks report what is not finite, and nothing else."""
    partials = np.ones((dims.ranks, ROWS, dims.hidden), np.float32)
    partials.view(np.uint32)[:, 4, 77] = np.array(values, np.float32).view(np.uint32) if isinstance(
        values[0], float
    ) else np.array(values, np.uint32)  # fmt: skip
    residual, faults = sums(gpu, dims, partials, changes=changes)
    assert [one[:2] for one in faults] == [(NOT_FINITE, 18)] * dims.ranks, faults
    clean = np.delete(residual, 77, axis=2)
    assert (clean == dims.ranks).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "values",
    [[np.nan, 1.0], [np.inf, -np.inf], [np.inf, 1.0], [NOT_READY, 0], [0xFF800001, 0], [0x7FFFFFFF, NOT_READY]],
)
def test_what_is_not_finite_is_an_error_on_all_ranks(gpu, values):
    check_not_finite(gpu, SHAPES["released, 2 ranks"], values)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("values", "change"),
    [
        ([np.inf, -np.inf], ("if (all_written(from)) {", "if (false) {")),
        ([NOT_READY, 0], ('"f"(ready_float(x.y)), ', '"f"(x.y), ')),  # column 77 is the second of its four
    ],
)
def test_a_nan_that_looks_not_ready_is_told(gpu, values, change):
    with pytest.raises(AssertionError, match="6, 18"):
        check_not_finite(gpu, SHAPES["released, 2 ranks"], values, change)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "skipped"), [("released, 2 ranks", 1), ("released, 8 ranks", 5), ("nano, 2 ranks", 0)]
)
def test_a_rank_that_does_not_send_is_named(gpu, rng, name, skipped):
    dims = SHAPES[name]
    ranks = Ranks(gpu, dims, **SUM)
    try:
        partials = rng.standard_normal((dims.ranks, ROWS, dims.hidden), np.float32)
        h = np.zeros((ROWS, dims.hidden), np.float32)
        for _ in range(2):
            assert ranks.exchange(partials, h, 3)[2] == [None] * dims.ranks
        faults = ranks.exchange(partials, h, 5, skipped=[skipped])[2]
        assert faults == [(PEER, 18, 2, skipped)] * dims.ranks
    finally:
        ranks.close()


@pytest.mark.gpu
def test_a_word_that_was_lost_ends_the_wait(gpu, rng):
    dims = SHAPES["released, 2 ranks"]
    ranks = Ranks(gpu, dims, **SUM)
    try:
        partials = rng.standard_normal((2, ROWS, dims.hidden), np.float32)
        faults = ranks.exchange(partials, np.zeros((ROWS, dims.hidden), np.float32), 8, lost=1)[2]
        assert faults == [(PEER, 18, 0, -1)] * 2
    finally:
        ranks.close()
