// The GPU's clock, in nanoseconds: the same on all multiprocessors, and coarse.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ uint64_t clock_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Its lower half, for differences of less than two seconds.
__device__ __forceinline__ uint32_t clock_ns_low() {
    uint32_t t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
    return t;
}
