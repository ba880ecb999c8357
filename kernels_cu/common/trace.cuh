// When each block of a launch began, waited and ended, by the GPU's clock. Only where TRACE, the kernel's number, is
// defined: tools/tracing.py compiles kernels so, and points `trace_buffer` of each module at its memory.
//
// Entries take the next free places, which costs each launch the trip of an atomic behind its end. Where TRACE_LAYERS is
// defined too, launches of layers 0 .. TRACE_LAYERS - 1 have places of their own instead: one launch of a kernel and layer
// is kept then.
//
// Where TRACE_PHASES is defined, the parts of a launch (common/phases.cuh) leave entries instead of it, as kernels
// TRACE + 1, TRACE + 2, ..., each when it ends: what a block keeps of them takes no more room for more layers.
#pragma once
#include "common/clock.cuh"

struct TraceEntry {
    uint64_t begin, waiting, resumed, end;  // nanoseconds; waiting and resumed are 0 where thread 0 never waits
    int kernel, layer, block, sm;
};

struct TraceBuffer {
    unsigned int count, room;
    uint64_t reserved;
    TraceEntry entries[1];  // [TRACE_PLACES], if there are own places, and [room]
};

__device__ TraceBuffer* trace_buffer;
// In shared memory rather than in registers, of which some kernels have none to spare.
__shared__ uint64_t trace_begin, trace_waiting, trace_resumed;
__shared__ TraceBuffer* trace_to;
__shared__ int trace_layer;

// An entry of thread 0's block.
__device__ __forceinline__ void trace_put(int kernel, int layer, uint64_t end) {
    TraceBuffer* const buffer = trace_to;
    if (buffer == nullptr) return;
    const int block = int(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    unsigned int place;
#ifdef TRACE_LAYERS
    if (unsigned(layer) < TRACE_LAYERS && block < TRACE_BLOCKS) {
        place = (kernel * TRACE_LAYERS + layer) * TRACE_BLOCKS + block;
    } else
#else
    constexpr unsigned int TRACE_PLACES = 0;
#endif
    {
        place = atomicAdd(&buffer->count, 1u);
        if (place >= buffer->room) return;
        place += TRACE_PLACES;
    }
    TraceEntry& entry = buffer->entries[place];
    int sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    entry.begin = trace_begin;
    entry.waiting = trace_waiting;
    entry.resumed = trace_resumed;
    entry.end = end;
    entry.kernel = kernel;
    entry.layer = layer;
    entry.block = block;
    entry.sm = sm;
}

#ifdef TRACE_PHASES
// A part has ended, and the next one begins, and waits.
__device__ __forceinline__ void trace_part(int layer, int phase) {
    const uint64_t end = clock_ns();
    trace_put(TRACE + 1 + phase, trace_layer + layer, end);
    trace_begin = trace_waiting = end;
    trace_resumed = 0;
}
#endif

// Lives as long as the kernel's body; thread 0 speaks for its block.
struct TraceScope {
    __device__ __forceinline__ explicit TraceScope(int layer) {
        if (threadIdx.x != 0) return;
        trace_to = trace_buffer;
        trace_layer = layer;
        trace_begin = clock_ns();
        trace_waiting = trace_resumed = 0;
    }
    __device__ __forceinline__ ~TraceScope() {
#ifndef TRACE_PHASES
        if (threadIdx.x == 0) trace_put(TRACE, trace_layer, clock_ns());
#endif
    }
};
