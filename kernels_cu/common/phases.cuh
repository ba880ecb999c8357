// Parts of a launch that leave their times as launches do, where TRACE_PHASES, their number, is defined (common/trace.cuh);
// else nothing. A part begins where the one before it ends.
#pragma once
#ifdef TRACE_PHASES
#include "common/trace.cuh"
#endif

// What the part needs from other blocks is there.
__device__ __forceinline__ void phase_resumed(int phase) {
#ifdef TRACE_PHASES
    if (threadIdx.x == 0) trace_phase_resumed[phase] = clock_ns();
#endif
}

// The block has stored its results.
__device__ __forceinline__ void phase_ended(int phase) {
#ifdef TRACE_PHASES
    if (threadIdx.x == 0) trace_phase_end[phase] = clock_ns();
#endif
}
