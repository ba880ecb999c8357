// Programmatic dependent launch.
//
// Every kernel of a pass is launched with the programmatic serialisation attribute and is written as
//     prologue (weights, shared memory, barriers)  ->  pdl_wait()  ->  pdl_trigger()  ->  work.
// pdl_wait() returns once the predecessor has ended and its writes are visible. Since each kernel triggers
// only after its own wait, everything older than the predecessor is complete when a prologue runs: a prologue
// may read weights and whatever was written at least two launches earlier, and must not write global memory.
//
// A kernel whose successor needs long for its prologue may trigger first of all: combine, o_proj, draft_sample, and the
// mlp_tail of several ranks do. Then its successor's prologue runs before the predecessor's end, and may read only what
// was written three launches before it (four after two such kernels), or weights.
//
// Where the predecessor's results are their own ready flags, a kernel polls for them instead and waits at its end
// (common/flagged.cuh).
#pragma once

#ifndef TRACE
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
#include "common/trace.cuh"
__device__ __forceinline__ void pdl_wait() {
    if (threadIdx.x == 0) trace_waiting = clock_ns();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0) trace_resumed = clock_ns();
}
#endif
__device__ __forceinline__ void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
