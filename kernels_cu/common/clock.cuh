// The GPU's clock, in nanoseconds: the same on all multiprocessors, and coarse.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ uint64_t clock_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
