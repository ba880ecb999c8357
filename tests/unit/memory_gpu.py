"""GPU engines whose memory is the host's and whose kernels only write down, in every row, which tokens it is of.

A row of a cache holds a number that its sequence's tokens up to it give. Whatever computes looks first whether every
row that it would see is the sequence's own, so that one that came back wrong, or not at all, is an AssertionError.
"""

from ctypes import memmove
from types import SimpleNamespace

import numpy as np

from cuq1.config_qwen2 import Qwen2Config
from cuq1.cuda import device_engine, engine, qwen2_engine, snapshot
from cuq1.cuda.engine import CudaEngine
from cuq1.cuda.qwen2_engine import Qwen2CudaEngine
from cuq1.models.family import plans_of
from cuq1.plan.dims import HEAD_DIM
from cuq1.plan.qwen2_dims import PAGE
from cuq1.sampling.rounds import Round

MIX = 0x9E3779B97F4A7C15
VOCABULARY = 401


class Prefixes:
    """A number for each position of a sequence, which all tokens up to it decide."""

    def __init__(self):
        self._tokens, self._values = [], []

    def __call__(self, tokens):
        """int64 [tokens]."""
        tokens = list(tokens)
        if tokens[: len(self._tokens)] != self._tokens:
            self._tokens, self._values = [], []
        for token in tokens[len(self._tokens) :]:
            value = (self._values[-1] if self._values else 1) * MIX + token + 1
            self._values.append((value ^ value >> 29) % (1 << 62))
        self._tokens = tokens
        return np.array(self._values, np.int64)


class MemoryRuntime:
    """The buffers that snapshots copy."""

    def __init__(self, model, weights, rule, progress, defines, ranks):
        self.model, self.ranks, self.lost, self.stream = model, ranks, "", 0
        buffers = {buffer.name: buffer.bytes for buffer in plans_of(model).buffers()}
        kept = {"hidden", "hidden16", "logits", "page_table", "free_pages", "pages"}
        self.sizes = {
            name: size
            for name, size in buffers.items()
            if name in kept or name.endswith(("k_cache", "v_cache", "k_pages", "v_pages"))
        }
        self.memory = {name: np.zeros(size, np.uint8) for name, size in self.sizes.items()}
        self.addresses = {name: memory.ctypes.data for name, memory in self.memory.items()}
        self.engine = None  # whose runtime this is
        self.prefixes, self.rng = Prefixes(), np.random.default_rng()
        self.empty()

    def empty(self):
        for name, values in self.model.empty.items():
            self.write(name, values)

    def write(self, name, values):
        memmove(self.addresses[name], values.ctypes.data, values.nbytes)

    def read(self, name, out):
        memmove(out.ctypes.data, self.addresses[name], out.nbytes)

    def recover(self):
        pass

    def wait(self):
        pass

    def close(self):
        pass

    def rows(self, layer, kind):
        """int64 [heads, positions, what a row holds], and the place of each position in it."""
        if f"{layer.prefix}.{kind}_cache" in self.memory:
            shape = (layer.dims.kv_heads, layer.slots, HEAD_DIM // 4)
            return self.memory[f"{layer.prefix}.{kind}_cache"].view(np.int64).reshape(shape)
        sizes = self.model.sizes
        shape = (-1, sizes.kv_heads, PAGE, sizes.head_size // 4)
        return self.memory[f"{layer.prefix}.{kind}_pages"].view(np.int64).reshape(shape)

    def caches(self):
        for number, layer in enumerate(self.model.layers):
            for place, kind in enumerate("kv"):
                yield layer, self.rows(layer, kind), 2 * number + place

    def put(self, start, values):
        """Rows of positions start, start + 1, … of all layers."""
        places = np.arange(start, start + len(values))
        if "page_table" in self.memory:
            table, pages = self.memory["page_table"].view(np.int32), self.memory["pages"].view(np.int32)
            for page in range(start // PAGE, (start + len(values) - 1) // PAGE + 1):
                if table[page] < 0:
                    pages[0] -= 1
                    table[page] = self.memory["free_pages"].view(np.int32)[pages[0]]
            for _, rows, number in self.caches():
                rows[table[places // PAGE], :, places % PAGE] = (values + number)[:, None, None]
            return
        for layer, rows, number in self.caches():
            rows[:, places % layer.slots] = (values + number)[:, None]

    def check(self, start, values):
        """All that position `start` sees is the sequence's, whose rows hold `values`."""
        places = np.arange(start)
        if "page_table" in self.memory:
            table = self.memory["page_table"].view(np.int32)
            assert (table[places // PAGE] >= 0).all()
            for _, rows, number in self.caches():
                found = rows[table[places // PAGE], :, places % PAGE, :: rows.shape[-1] - 1]
                assert (found == (values[:start] + number)[:, None, None]).all(), "rows that are not the sequence's"
            return
        for layer, rows, number in self.caches():
            seen = places[max(0, start - layer.window + 1) :] if layer.sliding else places
            found = rows[:, seen % layer.slots, :: rows.shape[-1] - 1]
            assert (found == (values[seen] + number)[:, None]).all(), "rows that are not the sequence's"

    @property
    def logits(self):
        return self.memory["logits"].view(np.int64)

    def first(self, params, seed, done, limit):
        values = self.prefixes(self.engine.tokens)
        assert done == len(values)
        assert self.logits[0] == values[-1], "logits that are not the sequence's"
        return int(values[-1]) % VOCABULARY

    def round(self, limit):
        tokens, done = list(self.engine.tokens), len(self.engine.tokens) - 1
        self.check(done, self.prefixes(tokens))
        accepted = int(self.rng.integers(limit + 1))
        for _ in range(accepted + 1):
            tokens.append(int(self.prefixes(tokens)[-1]) % VOCABULARY)
        rejected = self.rng.integers(1 << 40, size=limit - accepted)
        self.put(done, np.concatenate([self.prefixes(tokens)[done:-1], rejected]))
        return Round(tuple(tokens[done + 1 :]), limit, accepted)


class MemoryPrefill:
    def __init__(self, runtime):
        self._runtime = runtime

    def run(self, tokens, start, end, *, settle_from):
        values = self._runtime.prefixes(tokens)
        self._runtime.check(start, values)
        self._runtime.put(start, values[start:end])
        if end == len(tokens):
            self._runtime.logits[0] = values[-1]


class HostArena(dict):
    def __init__(self, sizes):
        self._memory = {name: np.empty(size, np.uint8) for name, size in sizes.items()}
        super().__init__({name: memory.ctypes.data for name, memory in self._memory.items()})

    def close(self):
        self._memory = {}


class HostDriver:
    """What snapshots ask of the driver."""

    CUdeviceptr = CUstream = int
    CU_MEMHOSTALLOC_PORTABLE = 1
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_UNIFIED=4)
    CUDA_MEMCPY2D = SimpleNamespace

    def __init__(self):
        self.pinned = {}

    def cuMemcpyAsync(self, target, source, size, stream):  # noqa: N802
        memmove(target, source, size)
        return (0,)

    def cuMemcpy2DAsync(self, what, stream):  # noqa: N802
        assert what.WidthInBytes <= min(what.srcPitch, what.dstPitch)
        for row in range(what.Height):
            memmove(what.dstDevice + row * what.dstPitch, what.srcDevice + row * what.srcPitch, what.WidthInBytes)
        return (0,)

    def cuMemHostAlloc(self, size, flags):  # noqa: N802
        memory = np.empty(size, np.uint8)
        self.pinned[memory.ctypes.data] = memory
        return 0, memory.ctypes.data

    def cuMemFreeHost(self, address):  # noqa: N802
        del self.pinned[address]


def patch(monkeypatch):
    """GPU engines are of this kind from now on."""
    driver = HostDriver()
    monkeypatch.setattr(device_engine, "Runtime", MemoryRuntime)
    monkeypatch.setattr(device_engine, "Prefill", MemoryPrefill)
    monkeypatch.setattr(device_engine, "HostSampler", lambda runtime, rule: None)
    for module in (engine, qwen2_engine):
        monkeypatch.setattr(module, "open_device", lambda *_: SimpleNamespace(multiprocessors=132, arch="sm_90"))
    monkeypatch.setattr(qwen2_engine, "free_memory", lambda: 100 << 30)
    monkeypatch.setattr(snapshot, "free_memory", lambda: 100 << 30)
    monkeypatch.setattr(snapshot, "bindings", lambda: driver)
    monkeypatch.setattr(snapshot, "Arena", HostArena)
    return driver


def opened(model, positions):
    """A GPU engine of nano's folder, or of a Qwen2 config, for so many positions."""
    if isinstance(model, Qwen2Config):
        made = Qwen2CudaEngine(model, loop="host", context=positions)
    else:
        made = CudaEngine(model, loop="host", capacity=positions)
    made._runtime.engine = made
    return made
