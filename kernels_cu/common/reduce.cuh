// Sums and maxima over warps and blocks, in a fixed order, so that equal inputs give equal bits.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Sums over the warp of all x at once: lane l gets that of x[l / (WARP / N)].
template <int N, int OFFSET = WARP / 2>
__device__ __forceinline__ float warp_sums(const float (&x)[N]) {
    if constexpr (N == 1) {
        float sum = x[0];
#pragma unroll
        for (int offset = OFFSET; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        return sum;
    } else {
        const bool upper = (threadIdx.x & OFFSET) != 0;
        float half[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const float given = upper ? x[i] : x[i + N / 2], kept = upper ? x[i + N / 2] : x[i];
            half[i] = kept + __shfl_xor_sync(0xffffffffu, given, OFFSET);
        }
        return warp_sums<N / 2, OFFSET / 2>(half);
    }
}

// The block's sum, to every thread. scratch: one float a warp; may be reused after the next __syncthreads().
template <int THREADS>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024, "whole warps");
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < THREADS / WARP; ++w) total += scratch[w];
    return total;
}

template <int THREADS>
__device__ __forceinline__ float block_max(float x, float* scratch) {
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float top = scratch[0];
#pragma unroll
    for (int w = 1; w < THREADS / WARP; ++w) top = fmaxf(top, scratch[w]);
    return top;
}
