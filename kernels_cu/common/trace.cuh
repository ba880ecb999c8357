// When each block of a launch began, waited and ended, by the GPU's clock. Only where TRACE, the kernel's number, is
// defined: tools/trace_round.py compiles kernels so, and points `trace_buffer` of each module at its memory.
#pragma once
#include "common/clock.cuh"

struct TraceEntry {
    uint64_t begin, waiting, resumed, end;  // nanoseconds; waiting and resumed are 0 where thread 0 never waits
    int kernel, layer, block, sm;
};

struct TraceBuffer {
    unsigned int count, room;
    uint64_t reserved;
    TraceEntry entries[1];  // [room]
};

__device__ TraceBuffer* trace_buffer;
__shared__ uint64_t trace_waiting, trace_resumed;

// Lives as long as the kernel's body; thread 0 speaks for its block.
struct TraceScope {
    uint64_t begin;
    int layer;
    __device__ __forceinline__ explicit TraceScope(int layer) : begin(0), layer(layer) {
        if (threadIdx.x != 0) return;
        begin = clock_ns();
        trace_waiting = trace_resumed = 0;
    }
    __device__ __forceinline__ ~TraceScope() {
        if (threadIdx.x != 0 || trace_buffer == nullptr) return;
        const uint64_t end = clock_ns();
        const unsigned int place = atomicAdd(&trace_buffer->count, 1u);
        if (place >= trace_buffer->room) return;
        TraceEntry& entry = trace_buffer->entries[place];
        int sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        entry.begin = begin;
        entry.waiting = trace_waiting;
        entry.resumed = trace_resumed;
        entry.end = end;
        entry.kernel = TRACE;
        entry.layer = layer;
        entry.block = int(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
        entry.sm = sm;
    }
};
