// Random weights, for benchmarks at sizes of which there is no checkpoint at hand.
//
// A number depends on the seed and on its index alone (a counter through splitmix64), so that equal seeds give equal
// weights whatever the grid. Writes every byte of every run once.
#include "abi_weights.cuh"

__device__ __forceinline__ uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Four random codes; those that are NaN lose their lowest bit.
__device__ __forceinline__ uint32_t codes(uint32_t w) {
    return w ^ ((((w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) >> 7);
}

// Two normal numbers (Box-Muller).
__device__ __forceinline__ float2 normal(const FillArgs& a, uint64_t index) {
    const uint64_t x = mix(a.seed + (index + 1) * 0x9E3779B97F4A7C15ull);
    const float u = (uint32_t(x >> 32) + 0.5f) * 0x1p-32f;  // in (0, 1]
    const float radius = sqrtf(fmaxf(-2.0f * __logf(u), 0.0f)) * a.deviation;
    const float angle = uint32_t(x) * (6.2831853f * 0x1p-32f);
    return make_float2(a.mean + radius * __cosf(angle), a.mean + radius * __sinf(angle));
}

__device__ __forceinline__ uint32_t pack_bf16(float2 x) {
    return ((__float_as_uint(x.x) + 0x8000u) >> 16) | ((__float_as_uint(x.y) + 0x8000u) & 0xffff0000u);
}

// PRECOND: block 256; target and stride 16-byte aligned, and bytes of a run a multiple of 16, unless kind is FP32,
// which needs 4. A thread writes 16 bytes, or one FP32.
extern "C" __global__ void __launch_bounds__(256) fill(const __grid_constant__ FillArgs a) {
    const uint64_t words = a.kind == 2 ? a.run : a.kind == 0 ? a.run / 16 : a.run / 8;  // of a run
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.runs * words; i += step) {
        uint8_t* run = a.target + i / words * a.stride;
        const uint64_t word = i % words;
        if (a.kind == 2) {
            reinterpret_cast<float*>(run)[word] = normal(a, i).x;
            continue;
        }
        uint4 out;
        if (a.kind == 0) {
            const uint64_t x = mix(a.seed + (2 * i + 1) * 0x9E3779B97F4A7C15ull);
            const uint64_t y = mix(a.seed + (2 * i + 2) * 0x9E3779B97F4A7C15ull);
            out = make_uint4(codes(uint32_t(x)), codes(uint32_t(x >> 32)), codes(uint32_t(y)),
                             codes(uint32_t(y >> 32)));
        } else {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 x = normal(a, 4 * i + j);
                pairs[j] = a.kind == 1 ? pack_bf16(x) : pack_f16(x.x, x.y);
            }
            out = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        reinterpret_cast<uint4*>(run)[word] = out;
    }
}
