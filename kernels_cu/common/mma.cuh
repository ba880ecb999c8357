// Tensor-core products in which a weight matrix is M and eight tokens are N, and the order in which weights lie
// in memory for it.
//
// A "tile" is 16 weight rows. Its K dimension is cut into chunks of 512 contiguous bytes, 16 bytes a lane, which
// a warp loads with one coalesced 128-bit access. With g = lane / 4 and t = lane % 4:
//   FP8 chunk, k from 32c:  word 0: row g,     k = 32c + 4t .. +3       word 1: row g + 8, the same k
//                           word 2: row g,     k = 32c + 16 + 4t .. +3  word 3: row g + 8, the same k
//   F16 chunk, k from 16c:  word 0: row g,     k = 16c + 4t, +1         word 1: row g + 8, the same k
//                           word 2: row g,     k = 16c + 4t + 2, +3     word 3: row g + 8, the same k
// An FP8 chunk is one m16n8k32 with E4M3 activations, or two m16n8k16 with half ones: the MMA sums over k in any
// order, as long as A and B agree on it, so lane (g, t) takes k = 4t .. 4t + 3 of token g as B, 8 contiguous bytes.
// Accumulators: c[0], c[1] are row g, tokens 2t and 2t + 1; c[2], c[3] are row g + 8, the same tokens.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_e4m3(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One FP8 chunk times half activations. b_lo: token g, k = 32c + 4t .. +3; b_hi: the same from 32c + 16.
__device__ __forceinline__ void mma_chunk_fp8_f16(float (&c)[4], uint4 w, uint2 b_lo, uint2 b_hi) {
    mma_f16(c, e4m3_to_f16x2(uint16_t(w.x)), e4m3_to_f16x2(uint16_t(w.y)), e4m3_to_f16x2(uint16_t(w.x >> 16)),
            e4m3_to_f16x2(uint16_t(w.y >> 16)), b_lo.x, b_lo.y);
    mma_f16(c, e4m3_to_f16x2(uint16_t(w.z)), e4m3_to_f16x2(uint16_t(w.w)), e4m3_to_f16x2(uint16_t(w.z >> 16)),
            e4m3_to_f16x2(uint16_t(w.w >> 16)), b_hi.x, b_hi.y);
}

// One F16 chunk times half activations. b: token g, k = 16c + 4t .. +3.
__device__ __forceinline__ void mma_chunk_f16(float (&c)[4], uint4 w, uint2 b) {
    mma_f16(c, w.x, w.y, w.z, w.w, b.x, b.y);
}

// A weight is read once: past L1, and not kept there.
__device__ __forceinline__ uint4 load_weights(const void* address) {
    uint4 w;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(address));
    return w;
}
