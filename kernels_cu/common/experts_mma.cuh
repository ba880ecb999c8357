// The experts' products: how many of K a chunk of weights has, and a chunk times the activations of eight rows.
#pragma once
#include "common/mma.cuh"

constexpr bool FP8 = FP8_EXPERTS != 0;
constexpr bool E4M3 = FP8 && FP8_ACTIVATIONS != 0;  // activations as well
constexpr int CHUNK_K = FP8 ? 32 : 16;

// Activations of one chunk as B. Half: k = 4t .. 4t + 3 of a chunk's (half) 16; E4M3: the codes of both halves.
struct Fragment {
    uint2 k[FP8 && !E4M3 ? 2 : 1];
};

__device__ __forceinline__ void multiply(float (&sum)[4], uint4 w, const Fragment& b) {
    if constexpr (E4M3) {
        mma_e4m3(sum, w.x, w.y, w.z, w.w, b.k[0].x, b.k[0].y);
    } else if constexpr (FP8) {
        mma_chunk_fp8_f16(sum, w, b.k[0], b.k[1]);
    } else {
        mma_chunk_f16(sum, w, b.k[0]);
    }
}
