// What a kernel says when it can't go on; the record lies in host memory, so that it outlives a dead context.
#pragma once
#include "abi.cuh"

// Keeps the first report only. `what` is one of FAULT_*; `kernel` one of KERNEL_*.
__device__ __forceinline__ void report_fault(Fault* fault, int what, int kernel, int layer, int detail = 0) {
    if (fault == nullptr) return;
    if (atomicCAS_system(&fault->what, 0, -1) == 0) {
        fault->kernel = kernel;
        fault->layer = layer;
        fault->detail = detail;
        __threadfence_system();  // the fields are there before `what` says so
        *reinterpret_cast<volatile int*>(&fault->what) = what;
    }
}
