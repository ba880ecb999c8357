"""Time of each prefill kernel at the released sizes, and the tokens a second that they add up to.

    python -m tests.kernels.prefill_speed [rows] [history]
    python -m tests.kernels.prefill_speed prompt [tokens] ...
    python -m tests.kernels.prefill_speed apart rows

One rank's share at TP8, without exchanges. The first form times kernels (embed and the tails are memory passes that
other tests time), the second whole prompts of a model with random weights, from the host's first launch to the end, the
third every launch of one chunk of it.
"""

import sys
import time

import numpy as np

from cuq1.config import load_config
from cuq1.cuda import abi, repack
from cuq1.cuda.chunks import Chunks
from cuq1.cuda.kernels import prefill
from cuq1.cuda.memory import Arena
from cuq1.cuda.weights import weights_plan
from cuq1.cuda.weights_device import random_weights
from cuq1.models import q1
from cuq1.models.prefill import CHUNK, Chunk, chunk_steps, working_buffers
from cuq1.plan.dims import HEAD_DIM
from tests import paths
from tests.kernels.harness import Gpu
from tests.kernels.shapes import RELEASED

FULL, SLIDING = 25, 63
WINDOW, RING = 4096, 4160


def main(rows=2048, history=6144):
    gpu, d = Gpu(), RELEASED
    xp = gpu.cupy
    random = xp.random.RandomState(0)

    def halves(*shape):
        return random.standard_normal(shape, np.float32).astype(np.float16)

    def floats(*shape):
        return random.standard_normal(shape, np.float32)

    def codes(*shape):
        return random.randint(0, 0x58, shape).astype(np.uint8)

    scales = random.uniform(0.001, 0.002, d.experts * (d.hidden // 16) * 16).astype(np.float32)
    heads, width = d.q_heads + 2 * d.kv_heads, d.q_width
    units = codes(d.experts, d.inner // 8, repack.unit_bytes(d.hidden, fp8=True))
    units.view(np.float32)[:, :, d.hidden * 4 :] = 0.0015  # their scales
    slots = -(-(history + rows) // 64) * 64
    first = max(0, history - WINDOW + 1) // 64 * 64
    b = {
        "normed": halves(rows, d.hidden), "normed32": floats(rows, d.hidden), "qkv": codes(heads, 128, d.hidden),
        "norms": 1 + 0.1 * floats(2, HEAD_DIM), "inverse": xp.asarray(1e4 ** (-np.arange(16) / 16)),
        "rope": floats(rows, 16, 2), "q": halves(rows, d.q_heads, 128), "k": halves(d.kv_heads, slots, 128),
        "v": halves(d.kv_heads, slots, 128), "sink": floats(d.kv_heads, 128), "attended": halves(rows, width),
        "o": codes(d.hidden, width), "out": floats(rows, d.hidden), "router": 0.02 * floats(d.experts, d.hidden),
        "logits": floats(4, rows, d.experts), "ids": xp.zeros((rows, 8), np.int32), "weights": floats(rows, 8),
        "pairs": xp.zeros(rows * 8, np.int32), "tiles": xp.zeros((prefill.tiles_bound(d, rows), 4), np.int32),
        "count": xp.zeros(1, np.int32), "inner": halves(rows * 8, d.inner), "down": codes(d.experts, d.hidden, d.inner),
        "apart": floats(rows, 8, d.hidden), "y": floats(rows, d.hidden), "units": units, "scales": scales,
        "parts": floats(2 * 132 * 64, 128), "stats": floats(2 * 132 * 64, 2),
        "ring_k": halves(d.kv_heads, RING, 128), "ring_v": halves(d.kv_heads, RING, 128),
        "entry": halves(rows, 2 * d.hidden), "eh": halves(d.eh_rows, 2 * d.hidden), "head": halves(d.vocab, d.hidden),
        "head_out": floats(min(rows, 512), d.vocab),
    }  # fmt: skip
    p = {name: array.data.ptr for name, array in b.items()}
    start = (gpu.fault.address, 0, 0, rows)
    lists = (p["pairs"], p["tiles"], p["count"])
    caches = (p["k"], p["v"])
    staged = (p["ring_k"], p["ring_v"], *caches, RING, slots)
    scale = HEAD_DIM**-0.5
    parts = (p["attended"], p["parts"], p["stats"])
    full = prefill.splits_for(d, rows, history + rows, 132)
    near = prefill.splits_for(d, rows, min(history, WINDOW) + rows, 132)
    eh = abi.PrefillLinearArgs(*start, p["entry"], p["eh"], 0, p["out"], d.hidden, 0, 1.0)
    head_rows = min(rows, 512)
    calls = {
        "rope": (prefill.rope(d, rows), abi.PrefillRopeArgs(*start, p["inverse"], p["rope"], history)),
        "qkv": (prefill.qkv(d, rows), abi.PrefillQkvArgs(
            *start, p["normed"], p["qkv"], p["scales"], p["norms"], p["norms"] + 512, p["rope"], p["q"], *caches, slots,
            history, 0, 0)),
        "attention full": (prefill.attention(d, rows, full), abi.PrefillAttentionArgs(
            *start, p["q"], *caches, p["sink"], *parts, slots, history, 0, 0, scale, full)),
        "attention window": (prefill.attention(d, rows, near), abi.PrefillAttentionArgs(
            *start, p["q"], *caches, p["sink"], *parts, slots, history, first, WINDOW, scale, near)),
        "merge": (prefill.merge(d, rows), abi.PrefillMergeArgs(
            *start, p["parts"], p["stats"], p["attended"], max(full, near))),
        "ring out": (prefill.ring(d, max(1, history - first)), abi.PrefillRingArgs(
            gpu.fault.address, 0, 0, max(1, history - first), *staged, first, first, 0)),
        "ring in": (prefill.ring(d, rows), abi.PrefillRingArgs(*start, *staged, history, first, 1)),
        "o_proj": (prefill.o_proj(d, rows), abi.PrefillLinearArgs(
            *start, p["attended"], p["o"], p["scales"], p["out"], d.hidden, 0, 1.0)),
        "router": (prefill.router(d, rows), abi.PrefillRouterArgs(*start, p["normed32"], p["router"], p["logits"])),
        "route": (prefill.route(d, rows), abi.PrefillRouteArgs(*start, p["logits"], p["ids"], p["weights"])),
        "group": (prefill.group(d, rows), abi.PrefillGroupArgs(*start, p["ids"], *lists)),
        "gate_up": (prefill.gate_up(d, rows), abi.PrefillGateUpArgs(
            *start, p["normed"], p["units"], *lists, p["inner"])),
        "down": (prefill.down(d, rows), abi.PrefillDownArgs(
            *start, p["inner"], p["down"], p["scales"], *lists, p["apart"])),
        "combine": (prefill.combine(d, rows), abi.PrefillCombineArgs(*start, p["apart"], p["weights"], p["y"])),
        "eh_proj": (prefill.eh_proj(d, rows), eh),
        "lm_head 512": (prefill.lm_head(d, head_rows), abi.PrefillLinearArgs(
            gpu.fault.address, 0, 0, head_rows, p["normed"], p["head"], 0, p["head_out"], d.vocab, 0, 1.0)),
    }  # fmt: skip
    pairs = rows * 8
    flops = {
        "qkv": 2 * rows * heads * 128 * d.hidden,
        "attention full": 4 * d.q_heads * 128 * rows * (history + rows / 2),
        "attention window": 4 * d.q_heads * 128 * sum(min(WINDOW, history + i + 1) for i in range(rows)),
        "o_proj": 2 * rows * width * d.hidden,
        "router": 2 * rows * d.experts * d.hidden,
        "gate_up": 4 * pairs * d.inner * d.hidden,
        "down": 2 * pairs * d.inner * d.hidden,
        "eh_proj": 4 * rows * d.hidden * d.eh_rows,
        "lm_head 512": 2 * head_rows * d.vocab * d.hidden,
    }
    for call in calls.values():
        gpu.run(*call)
    times = {}
    print(f"rows {rows}, history {history}, {int(b['count'].get()[0])} tiles")
    for name, call in calls.items():
        middle, (low, high) = gpu.median_us([call], repeats=10)
        times[name] = middle
        rate = f"{flops[name] / middle / 1e6:6.0f} TFLOP/s" if name in flops else ""
        print(f"{name:18} {middle:8.1f} us ({low:.1f} to {high:.1f}) {rate}")
    common = sum(times[n] for n in ("qkv", "o_proj", "router", "route", "group", "gate_up", "down", "combine"))
    whole = FULL * times["attention full"] + SLIDING * (
        times["attention window"] + times["ring in"] + times["ring out"]
    ) + (FULL + SLIDING) * common  # fmt: skip
    print(f"88 layers: {whole / 1e3:.1f} ms, {rows / whole * 1e6:.0f} tokens/s without embed and tails")


def prompts(*lengths, apart=False):
    """Whole prompts through all layers and the draft's cache; apart: each launch timed by itself, summed by label."""
    gpu = Gpu()
    config, draft = load_config(paths.RELEASED)
    layout = weights_plan(config, draft, 8)
    model = q1.resolve(config, draft, layout, tp=8, capacity=max(lengths))
    buffers = [b for b in (*q1.working_buffers(model), *working_buffers(model)) if b.name != "fault"]
    arena = Arena({"weights": layout.nbytes, **{b.name: b.bytes for b in buffers}})
    arena.clear()
    random_weights(layout, arena["weights"], gpu.stream)
    gpu.wait()
    addresses = {b.name: arena[b.name] for b in buffers} | {"fault": gpu.fault.address}
    addresses |= {name: layout.address(arena["weights"], name) for name in layout.tensors}
    print(f"{arena.total / 1e9:.1f} GB on the GPU")
    run = Chunks(chunk_steps(model), addresses)
    if apart:
        _apart(gpu, run, Chunk(0, lengths[0]))
        return
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, max(lengths) + 1).astype(np.int32)
    pointer = gpu.cupy.ndarray(
        CHUNK + 1, np.int32, gpu.cupy.cuda.MemoryPointer(
            gpu.cupy.cuda.UnownedMemory(addresses["prefill.tokens"], 4 * (CHUNK + 1), None), 0)
    )  # fmt: skip
    for length in (*lengths, *lengths):  # the first round warms up
        begin = time.perf_counter()
        issued = 0.0
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            gpu.wait()
            pointer[: end - start + 1] = gpu.array(tokens[start : end + 1])
            gpu.cupy.cuda.Device().synchronize()
            before = time.perf_counter()
            run.issue(Chunk(start, end - start, start, min(end, length - 1)), gpu.stream)
            issued += time.perf_counter() - before
        gpu.wait()
        took = time.perf_counter() - begin
        print(f"{length:6} tokens: {1e3 * took:7.1f} ms, {length / took:6.0f} tokens/s, {1e3 * issued:.1f} ms to issue")
    arena.close()


def _apart(gpu, run, chunk):
    stream = gpu.cupy.cuda.ExternalStream(gpu.stream)
    for _ in range(2):
        marks = []
        for label, issue in run.launches(chunk):
            begin, end = gpu.cupy.cuda.Event(), gpu.cupy.cuda.Event()
            begin.record(stream)
            issue(gpu.stream)
            end.record(stream)
            marks.append((label, begin, end))
        gpu.wait()
    total = {}
    for label, begin, end in marks:
        times = total.setdefault(label, [])
        times.append(1e3 * gpu.cupy.cuda.get_elapsed_time(begin, end))
    for label, times in total.items():
        print(f"{label:12} {len(times):4} launches, {np.median(times):8.1f} us each, {sum(times) / 1e3:8.2f} ms in all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["apart"]:
        prompts(int(sys.argv[2]), apart=True)
    elif sys.argv[1:2] == ["prompt"]:
        prompts(*map(int, sys.argv[2:] or (1, 8, 512, 2048, 8192)))
    else:
        main(*map(int, sys.argv[1:]))
