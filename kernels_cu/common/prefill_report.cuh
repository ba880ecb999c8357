// Reports of a prompt's kernels: one of a block or a warp. A damaged value soon reaches all of a chunk, and a million threads
// that each touch host memory would take minutes to say the same.
#pragma once
#include "common/fault.cuh"
#include "common/types.cuh"

// All threads of the block call it.
__device__ __forceinline__ void report_block(bool finite, Fault* fault, int layer) {
    if (__syncthreads_or(!finite) && threadIdx.x == 0) report_fault(fault, FAULT_NOT_FINITE, KERNEL_PREFILL, layer);
}

// All threads of the warp call it.
__device__ __forceinline__ void report_warp(bool finite, Fault* fault, int layer) {
    if (__any_sync(0xffffffffu, !finite) && threadIdx.x % WARP == 0)
        report_fault(fault, FAULT_NOT_FINITE, KERNEL_PREFILL, layer);
}
