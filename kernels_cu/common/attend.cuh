// What the decode attention kernels share: ldmatrix, the softmax's small parts, and copies that may be of nothing.
#pragma once
#include "common/copy.cuh"

constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // 2^-22 relative; exactly 0 for -inf
    return y;
}

// 16 bytes, or zeros without reading anything.
__device__ __forceinline__ void copy_async_or_zeros(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// The maximum over no key.
__device__ __forceinline__ float none() { return __uint_as_float(0xff800000u); }

// It is no number to subtract.
__device__ __forceinline__ float base_of(float top, float to_log2) { return top == none() ? 0.0f : top * to_log2; }
