"""What INT4 codes are multiplied with: python3 -m tests.kernels.speed_int8 [SIZE ...]

For each matrix of a Qwen2 size (7b where none is given), as the projection kernel has it, in chains of many different
matrices: microseconds and share of the read ceiling with the token as halves, as digits, as INT8 codes that are there
already (tests/kernels/int8_lab.cu), and as codes with the launch that makes them; and the errors of the three, of the
result's root mean square in float64.
"""

import sys
import tempfile
from ctypes import Structure, c_uint64
from dataclasses import replace

import numpy as np

from cuq1.cuda.abi import Qwen2ProjectionArgs
from cuq1.cuda.kernels import qwen2_gemv
from cuq1.cuda.repack import int4_units
from cuq1.plan.kernel import Kernel
from cuq1.plan.qwen2_dims import matrix_bytes, padded, pieces
from tests.kernels.harness import Gpu
from tests.kernels.qwen2_shapes import ALL
from tests.kernels.speed_qwen2 import compile_beside, random_units
from tests.kernels.twins import qwen2_gemv as twin

BYTES = 600 << 20  # of different matrices in a chain
RING = qwen2_gemv.Ring(4, 2, qwen2_gemv.AFTER_WAIT)


class QuantiseArgs(Structure):
    _fields_ = (("input", c_uint64), ("codes", c_uint64))


def projection(rows, k, ring, *, digits):
    """The product's projection kernel for a matrix [rows, k]."""
    return qwen2_gemv.projection("down", replace(ALL["7b"], hidden=rows), k, replace(ring, digits=digits))


def codes(rows, k, ring):
    kernel = projection(rows, k, ring, digits=False)
    smem = ring.nbytes + padded(k) // 128 * 144
    return replace(kernel, source="int8_lab.cu", entry="int8_projection", smem=smem)


def quantise(kernel, k):
    return Kernel("int8_lab.cu", "quantise", QuantiseArgs, kernel.defines, (-(-padded(k) // 1024), 1, 1), 256)


def project(gpu, source, weights, out):
    return Qwen2ProjectionArgs(
        fault=gpu.fault.address, rows=1, weights=weights.data.ptr, out=out.data.ptr, scale=1.0,
        **{"in": source.data.ptr},
    )  # fmt: skip


def measure(gpu, name, rows, k, ring=RING):
    rng, xp = np.random.default_rng(3), gpu.cupy
    size = matrix_bytes(rows, k)
    x = gpu.array(rng.standard_normal(padded(k)).astype(np.float16))
    coded = xp.zeros((padded(k) // 128, 144), np.uint8)
    out = xp.zeros((pieces(rows, k), rows), np.float32)
    halves, digits = (projection(rows, k, ring, digits=choice) for choice in (False, True))
    coding = codes(rows, k, ring)
    quantiser, to_codes = quantise(coding, k), QuantiseArgs(x.data.ptr, coded.data.ptr)

    words = rng.integers(0, 1 << 32, (rows, padded(k) // 8), np.uint32)
    scales = (rng.uniform(0.1, 1.0, (rows, padded(k) // 128)) * 0.2 * k**-0.5).astype(np.float16)
    units = gpu.array(int4_units([(words, scales)]))
    expected = twin.product(gpu.array(words), gpu.array(scales), x, xp).get()
    errors = []
    for calls in ([(halves, x)], [(digits, x)], [(quantiser, None), (coding, coded)]):
        for kernel, source in calls:
            gpu.run(kernel, to_codes if source is None else project(gpu, source, units, out))
        found = np.where(twin.written(rows, k, qwen2_gemv.MULTIPROCESSORS), out.get(), 0).sum(axis=0, dtype=np.float64)
        errors.append(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))

    many = [random_units(gpu, size, k) for _ in range(max(4, BYTES // size))]
    chains = (
        [(halves, project(gpu, x, w, out)) for w in many],
        [(digits, project(gpu, x, w, out)) for w in many],
        [(coding, project(gpu, coded, w, out)) for w in many],
        [call for w in many for call in ((quantiser, to_codes), (coding, project(gpu, coded, w, out)))],
    )
    times = [gpu.median_us(calls, repeats=20, copies=4)[0] / len(many) for calls in chains]
    shares = [f"{us:7.2f} us {size / us / 1e3 / gpu.read_ceiling():4.0%}" for us in times]
    print(f"  {name:8}{rows:6} x {k:5} {' '.join(shares)}   {' '.join(f'{e:.1e}' for e in errors)}", flush=True)


def main():
    gpu = Gpu()
    with tempfile.TemporaryDirectory() as where:
        compile_beside(where, "int8_lab.cu")
        print(f"read ceiling {gpu.read_ceiling():.0f} GB/s")
        print(f"  {'':22}{'halves':>16}{'digits':>16}{'codes':>16}{'and quantising':>16}   errors")
        for size in sys.argv[1:] or ["7b"]:
            print(size)
            d = ALL[size]
            measure(gpu, "qkv", d.qkv_rows, d.hidden)
            measure(gpu, "o", d.hidden, d.q_width)
            measure(gpu, "gate_up", d.gate_up_tiles * 16, d.hidden)
            measure(gpu, "down", d.hidden, d.inner)
    gpu.close()


if __name__ == "__main__":
    main()
