// Data that is its own ready flag: a consumer that is resident already polls the words that its predecessor writes, and
// skips the launch boundary (half a microsecond until the predecessor's end is known, then a trip to L2 for the data).
//
// A float that nobody has written yet is NOT_READY, a NaN; a writer stores any NaN of its own as another one
// (ready_float). What takes part:
//   the clearer   an older launch stores NOT_READY in all of the buffer, after its last readers have ended. It has ended
//                 before a consumer's first poll: polls must not see what the buffer held before.
//   the writer    stores every float of every live row once.
//   the consumer  polls live rows only, since the others never arrive, then works. Its blocks execute pdl_settle()
//                 before they end, so that the end of a launch still implies the end of all older ones: its successors
//                 may read, and overwrite, whatever older launches wrote or read.
// A load of 16 bytes is as good as four of 4: each word is judged by itself, and no other memory depends on it. Expert ids
// and inner do the same with zero for what is not there: ids are stored plus 1, and a product of +0 as -0.
#pragma once
#include "common/fault.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

constexpr uint32_t NOT_READY = 0xffffffffu;

// Past L1, from where the writer's stores arrive.
__device__ __forceinline__ uint4 load_flagged_16(const void* address) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}

__device__ __forceinline__ uint2 load_flagged_8(const void* address) {
    uint2 x;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(address) : "memory");
    return x;
}

__device__ __forceinline__ bool floats_there(uint4 x) {
    return x.x != NOT_READY && x.y != NOT_READY && x.z != NOT_READY && x.w != NOT_READY;
}

// Halves that are all ones are nobody's result: a NaN of ours is 0x7fff.
__device__ __forceinline__ bool halves_there(uint4 x) {
    const auto both = [](uint32_t w) { return (w & 0xffffu) != 0xffffu && (w >> 16) != 0xffffu; };
    return both(x.x) && both(x.y) && both(x.z) && both(x.w);
}

// What a writer stores: a NaN stays one, and is ready.
__device__ __forceinline__ float ready_float(float x) {
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float(bits < NOT_READY ? bits : NOT_READY - 1);
}

// The same of a half, which is to be finite: another value is reported.
__device__ __forceinline__ f16 ready_half(f16 value, Fault* fault, int kernel, int layer) {
    const bool finite = (value & 0x7c00) != 0x7c00;
    if (!finite) report_fault(fault, FAULT_NOT_FINITE, kernel, layer);
    return finite ? value : f16(0x7fff);
}

// pdl_wait() of a launch that has polled for its predecessor's results, before its end.
__device__ __forceinline__ void pdl_settle() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A warp's loop of polls. Every lane leaves it in the same turn: what follows are shuffles and MMAs of whole warps, and
// with a loop that lanes left one by one, shuffles gave wrong values (seen on an H200).
struct Polls {
    static constexpr int MOST = 4096;  // milliseconds, where a result takes microseconds
    int count;
    __device__ __forceinline__ Polls() : count(0) {
#ifdef TRACE
        if (threadIdx.x == 0) trace_waiting = clock_ns();
#endif
    }
    // Whether there is to be another poll, after one that found all of this lane's words `ready` or not. At last the
    // predecessor's end is waited for, which bounds the loop: what is missing then is reported, and is a NaN.
    __device__ __forceinline__ bool again(bool ready, Fault* fault, int kernel, int layer) {
        if (!__all_sync(0xffffffffu, ready)) {
            if (++count < MOST) return true;
            if (count == MOST) {
                pdl_settle();
                return true;
            }
            if (!ready) report_fault(fault, FAULT_RESULT, kernel, layer);
        }
#ifdef TRACE
        if (threadIdx.x == 0) trace_resumed = clock_ns();
#endif
        return false;
    }
};
