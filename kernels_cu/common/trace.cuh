// When each block of a launch began, waited and ended, by the GPU's clock. Only where TRACE, the kernel's number, is
// defined: tools/tracing.py compiles kernels so, and points `trace_buffer` of each module at its memory.
//
// Entries take the next free places, which costs each launch the trip of an atomic behind its end. Where TRACE_LAYERS is
// defined too, launches of layers 0 .. TRACE_LAYERS - 1 have places of their own instead: one launch of a kernel and layer
// is kept then.
//
// Where TRACE_PHASES is defined, the parts of a launch (common/phases.cuh) leave entries instead of it, as kernels
// TRACE + 1, TRACE + 2, ...
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
#ifdef TRACE_PHASES
__shared__ uint64_t trace_phase_resumed[TRACE_PHASES], trace_phase_end[TRACE_PHASES];
#endif

// Lives as long as the kernel's body; thread 0 speaks for its block.
struct TraceScope {
    int layer;
    __device__ __forceinline__ explicit TraceScope(int layer) : layer(layer) {
        if (threadIdx.x != 0) return;
        trace_to = trace_buffer;
        trace_begin = clock_ns();
        trace_waiting = trace_resumed = 0;
#ifdef TRACE_PHASES
        for (int phase = 0; phase < TRACE_PHASES; ++phase) trace_phase_resumed[phase] = trace_phase_end[phase] = 0;
#endif
    }
    __device__ __forceinline__ ~TraceScope() {
        if (threadIdx.x != 0) return;
        const uint64_t end = clock_ns();
        if (trace_to == nullptr) return;
#ifndef TRACE_PHASES
        put(TRACE, trace_begin, trace_waiting, trace_resumed, end);
#else
        uint64_t begin = trace_begin;
        for (int phase = 0; phase < TRACE_PHASES && trace_phase_end[phase] != 0; ++phase) {
            const uint64_t waiting = phase == 0 ? trace_waiting : begin;
            put(TRACE + 1 + phase, begin, waiting, trace_phase_resumed[phase], trace_phase_end[phase]);
            begin = trace_phase_end[phase];
        }
#endif
    }

    __device__ __forceinline__ void put(int kernel, uint64_t begin, uint64_t waiting, uint64_t resumed, uint64_t end) const {
        TraceBuffer* const buffer = trace_to;
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
        entry.begin = begin;
        entry.waiting = waiting;
        entry.resumed = resumed;
        entry.end = end;
        entry.kernel = kernel;
        entry.layer = layer;
        entry.block = block;
        entry.sm = sm;
    }
};
