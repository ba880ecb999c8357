// Parts of a launch that leave their times as launches do, where TRACE_PHASES, their number, is defined (common/trace.cuh);
// else nothing. A block's part begins where the one before it ends: every block ends each of them, in their order.
//
// layer: where a launch has several, from 0.
#pragma once
#ifdef TRACE_PHASES
#include "common/trace.cuh"
#endif

// What the part needs from other blocks is there.
__device__ __forceinline__ void phase_resumed(int layer, int phase) {
#ifdef TRACE_PHASES
    if (threadIdx.x == 0) trace_resumed = clock_ns();
#endif
}

// The block has stored its results.
__device__ __forceinline__ void phase_ended(int layer, int phase) {
#ifdef TRACE_PHASES
    if (threadIdx.x == 0) trace_part(layer, phase);
#endif
}

__device__ __forceinline__ void phase_resumed(int phase) { phase_resumed(0, phase); }
__device__ __forceinline__ void phase_ended(int phase) { phase_ended(0, phase); }
