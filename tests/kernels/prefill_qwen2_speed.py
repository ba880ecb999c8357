"""Time of each of Qwen2's prefill kernels, of a layer of them, and the TTFT that they add up to.

    python -m tests.kernels.prefill_qwen2_speed [model] [rows ...]

Kernels run with the weights of several layers in turn, so that L2 does not hold them; a layer's kernels as a prompt has
them, by dependent launch. Each of the model's kernels is checked against its twin first. TTFT is the layers' total:
embedding, the logits of one token and the host's launches come on top (about a millisecond).
"""

import sys

import numpy as np

from cuq1.config_qwen2 import parse_qwen2
from cuq1.cuda import abi
from cuq1.cuda.kernels import qwen2_prefill as prefill
from cuq1.plan.qwen2_dims import PAGE, UNIT_BYTES, padded, qwen2_dims, tiles
from tests.kernels import qwen2_prefill_checks as checks
from tests.kernels.harness import Gpu
from tools.checkpoint_qwen2 import qwen2_config

COPIES = 4  # layers whose weights take turns


def units(xp, count, k):
    """Random codes, scales of 0.01."""
    out = xp.random.randint(0, 256, (count, padded(k) // 128, UNIT_BYTES), np.uint8)
    out.view(np.float16)[..., 512:] = 0.01
    return out


def layer_calls(gpu, d, rows, start, weights, b):
    """A layer's launches, in order: {name: (kernel, arguments)}."""
    p = {name: array.data.ptr for name, array in b.items()}
    w = {name: array.data.ptr for name, array in weights.items()}
    head = (gpu.fault.address, 0, 0, rows)
    norm = prefill.norm(d, rows), abi.Qwen2PrefillNormArgs(*head, p["residual"], p["norm"], p["normed"])
    return {
        "norm": norm,
        "qkv": (prefill.qkv(d, rows), abi.Qwen2PrefillQkvArgs(
            *head, p["normed"], w["qkv"], p["bias"], p["rope"], p["table"], p["q"], p["k"], p["v"], start)),
        "attention": (prefill.attention(d, rows), abi.Qwen2PrefillAttentionArgs(
            *head, p["q"], p["table"], p["k"], p["v"], p["attended"], start)),
        "o_proj": (prefill.o_proj(d, rows), abi.Qwen2PrefillProjectionArgs(
            *head, p["attended"], w["o"], p["residual"], 1.0)),
        "norm 2": norm,
        "gate_up": (prefill.gate_up(d, rows), abi.Qwen2PrefillGateUpArgs(*head, p["normed"], w["gate_up"], p["inner"])),
        "down": (prefill.down(d, rows), abi.Qwen2PrefillProjectionArgs(
            *head, p["inner"], w["down"], p["residual"], 16.0)),
    }  # fmt: skip


def measure(gpu, name, rows, start=0, patches=None):
    """Prints the times; patches: {kernel's name: patch}. Returns a layer's microseconds."""
    config = parse_qwen2(qwen2_config(f"qwen2.5-coder-{name}"))
    d, xp = qwen2_dims(config), gpu.cupy
    end = start + rows

    def halves(*shape):
        return xp.random.standard_normal(shape, np.float32).astype(np.float16)

    pages = -(-end // PAGE)
    b = {
        "residual": xp.random.standard_normal((rows, d.hidden), np.float32), "norm": halves(d.hidden),
        "normed": halves(prefill.tile_bytes(rows, d.hidden) // 2), "bias": halves(d.qkv_rows),
        "rope": xp.random.standard_normal((rows, d.head_size // 2, 2), np.float32),
        "table": gpu.array(np.random.default_rng(0).permutation(pages).astype(np.int32)),
        "q": halves(rows, d.q_width), "k": halves(pages, d.kv_heads, PAGE, d.head_size),
        "v": halves(pages, d.kv_heads, PAGE, d.head_size), "attended": halves(prefill.tile_bytes(rows, d.q_width) // 2),
        "inner": halves(prefill.tile_bytes(rows, d.inner) // 2),
    }  # fmt: skip
    weights = [
        {"qkv": units(xp, tiles(d.qkv_rows), d.hidden), "o": units(xp, tiles(d.hidden), d.q_width),
         "gate_up": units(xp, d.gate_up_tiles, d.hidden), "down": units(xp, tiles(d.hidden), d.inner)}
        for _ in range(COPIES)
    ]  # fmt: skip
    layers = [layer_calls(gpu, d, rows, start, w, b) for w in weights]
    flops = {
        "qkv": 2 * rows * d.qkv_rows * d.hidden, "o_proj": 2 * rows * d.hidden * d.q_width,
        "attention": 4 * d.q_width * rows * (start + (rows + 1) / 2), "gate_up": 4 * rows * d.inner * d.hidden,
        "down": 2 * rows * d.hidden * d.inner,
    }  # fmt: skip
    print(f"{name}, {rows} tokens from {start}")
    patched = {n: (*call, patch) for n, patch in (patches or {}).items() for call in [layers[0][n]]}
    total = 0.0
    for n in layers[0]:
        calls = [(*layer[n], patched[n][2]) if n in patched else layer[n] for layer in layers]
        middle, (low, high) = (x / COPIES if np.isscalar(x) else tuple(y / COPIES for y in x)
                               for x in gpu.median_us(calls, repeats=20, copies=4))  # fmt: skip
        total += middle
        rate = f"{flops[n] / middle / 1e6:6.0f} TFLOP/s" if n in flops else ""
        print(f"  {n:10} {middle:8.1f} us ({low:.1f} to {high:.1f}) {rate}")
    chain = [(*layer[n], patched[n][2]) if n in patched else layer[n] for layer in layers for n in layer]
    middle, (low, high) = gpu.median_us(chain, repeats=20, copies=2)
    middle, low, high = middle / COPIES, low / COPIES, high / COPIES
    whole = middle * config.num_hidden_layers / 1e3
    rate = sum(flops.values()) / middle / 1e6
    print(f"  layer {middle:8.1f} us ({low:.1f} to {high:.1f}; kernels alone {total:.1f}), {rate:.0f} TFLOP/s")
    print(f"  {config.num_hidden_layers} layers {whole:.2f} ms")
    return middle


def check(gpu, name):
    d = qwen2_dims(parse_qwen2(qwen2_config(f"qwen2.5-coder-{name}")))
    checks.check_qkv(gpu, d, 300, 100)
    checks.check_attention(gpu, d, 300, 100)
    checks.check_projection(gpu, d, 300)
    checks.check_projection(gpu, d, 300, down=True)


def main(name="7b", *rows):
    gpu = Gpu()
    check(gpu, name)
    print(f"read ceiling {gpu.read_ceiling():.0f} GB/s")
    for count in rows or (512, 2048, 64):
        measure(gpu, name, int(count))


if __name__ == "__main__":
    main(*sys.argv[1:])
