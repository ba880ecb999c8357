// Exchange among ranks: producers push their partial results into every rank's inbox as they finish, consumers poll their
// own inbox, and the data is its own ready flag (common/flagged.cuh: a word that has not come is NOT_READY).
//
// An inbox is one allocation of each rank, laid out alike on all of them, that every rank maps. `peers` holds, for each
// rank, the distance in bytes from an address in this rank's inbox to the same place in that rank's, as it is mapped here;
// 0 for its own. Every place is written by one rank, once between two times that its owner makes it NOT_READY.
//
// Why reuse is safe. A round's exchanges follow one another; each is of a kind: O (o_proj's partials and the router's), M
// (down's), E (the draft's entry), C (candidates and statuses). A kind's INBOXES buffers take turns, from layer to layer
// and draft depth to draft depth. Say two uses of one buffer are numbers i and j of the sequence.
//   The owner's consumer of i reads the buffer, and the owner makes it NOT_READY: rearm(i). M and C are rearmed by their
//   reader, O and E by down of the same layer, or by rearm in a graph that only settles. It has ended before the owner's
//   producer of some exchange m, i < m < j, stores its first word: producers store behind a pdl_wait(), which implies that
//   all older launches have ended; down behind what gate_up stored, and so behind the attention tail's end.
//   Every peer pushes j only after its consumer of m, which waited for the owner's part of m, has ended.
// So rearm(i) comes before any part of j, on every rank, however far one is ahead. Within a layer m must not be M, which
// down stores while it rearms O: what follows serves, O of the next layer, C of a round's end. Two buffers would do;
// with one, M alone would lie between two layers' O. What nothing lies between is kept apart by the hosts: a prompt's NCCL
// sums come before a request's first C, and all ranks' logits have reached the host, where that samples, before anything is
// launched again. A draft depth that is skipped, on all ranks alike, pushes nothing and must not rearm: no peer waits for
// it, and what it cleared could be the next round's.
// cuq1/models/order.py checks this of the launches of every succession of graphs; tests/unit/test_exchange_order.py walks
// all interleavings of a small model, and finds the loss where rearm comes one exchange too late.
// The device side of "has ended before": a launch's writes are performed at its end (griddepcontrol.wait of a successor
// returns only then), and both they and the peers' stores meet in the owner's L2. No order is asked of a peer's stores
// among each other: every word is waited for by itself.
//
// Sums are taken in the order of ranks, from FP32, by every rank alike: all have the same bits, whatever came first.
#pragma once
#include "common/fault.cuh"
#include "common/flagged.cuh"
#include "common/clock.cuh"

#ifndef RANKS
#define RANKS 1  // that exchange: those of the tensor-parallel group, or fewer in a benchmark
#endif
static_assert(RANKS >= 1 && RANKS <= MAX_RANKS, "inboxes have places for MAX_RANKS");

#ifndef PEER_TIMEOUT_MS
#define PEER_TIMEOUT_MS DEFAULT_PEER_TIMEOUT_MS
#endif

// x to the same place of one rank's inbox, `distance` away. A NaN is stored as one that is ready.
__device__ __forceinline__ void push_to(int64_t distance, float* own, float x) {
    asm volatile("st.relaxed.sys.global.f32 [%0], %1;" ::"l"(reinterpret_cast<uint8_t*>(own) + distance),
                 "f"(ready_float(x))
                 : "memory");
}
// An integer that is not NOT_READY.
__device__ __forceinline__ void push_to(int64_t distance, int* own, int x) {
    asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(reinterpret_cast<uint8_t*>(own) + distance), "r"(x)
                 : "memory");
}

// Distances to the ranks' inboxes, loaded in a prologue.
struct Peers {
    int64_t distance[RANKS];
    __device__ __forceinline__ explicit Peers(const int64_t* peers) {
        if constexpr (RANKS == 1) return;  // null: nothing is pushed
#pragma unroll
        for (int r = 0; r < RANKS; ++r) distance[r] = __ldg(reinterpret_cast<const long long*>(peers) + r);
    }
    // x to the same place of every rank's inbox.
    __device__ __forceinline__ void push(float* own, float x) const {
#pragma unroll
        for (int r = 0; r < RANKS; ++r) push_to(distance[r], own, x);
    }
    __device__ __forceinline__ void push(int* own, int x) const {
#pragma unroll
        for (int r = 0; r < RANKS; ++r) push_to(distance[r], own, x);
    }
};

__device__ __forceinline__ float load_pushed(const float* address) {
    float x;
    asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(x) : "l"(address) : "memory");
    return x;
}
__device__ __forceinline__ int load_pushed(const int* address) {
    int x;
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}
__device__ __forceinline__ float4 load_pushed_4(const float* address) {
    float4 x;
    asm volatile("ld.relaxed.sys.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ bool has_come(int x) { return uint32_t(x) != NOT_READY; }
__device__ __forceinline__ bool has_come(float x) { return __float_as_uint(x) != NOT_READY; }
__device__ __forceinline__ bool has_come(float4 x) {
    return has_come(x.x) && has_come(x.y) && has_come(x.z) && has_come(x.w);
}
__device__ __forceinline__ void make_unready(void* address) {  // four bytes
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(NOT_READY) : "memory");
}
__device__ __forceinline__ void make_unready_4(float* address) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%1,%1,%1};" ::"l"(address), "r"(NOT_READY) : "memory");
}

// A warp's loop of polls for what peers push: as Polls, but nothing on this GPU bounds it. After PEER_TIMEOUT_MS, or at
// once where any kernel has reported a fault already, what is missing is given up, reported, and read as the NaN that it is.
struct PeerPolls {
    static constexpr int LOOKS = 1024;  // polls between two looks at the clock and the fault: some hundred microseconds
    int count;
    uint64_t begun;
    __device__ __forceinline__ PeerPolls() : count(0), begun(0) {
#ifdef TRACE
        if (threadIdx.x == 0) trace_waiting = clock_ns();
#endif
    }
    // Whether there is to be another poll, after one in which this lane missed words of rank `missing`; -1: of none. The
    // whole warp calls it.
    __device__ __forceinline__ bool again(int missing, Fault* fault, int kernel, int layer) {
        if (!__all_sync(0xffffffffu, missing < 0)) {
            if (++count % LOOKS != 0) return true;
            const uint64_t now = clock_ns();
            if (begun == 0) begun = now;
            const bool known = fault != nullptr && *reinterpret_cast<const volatile int*>(&fault->what) != FAULT_NONE;
            const bool late = now - begun > uint64_t(PEER_TIMEOUT_MS) * 1000000u;
            // One answer for the warp: clocks and faults may be read as they change.
            if (!__any_sync(0xffffffffu, known || late)) return true;
            if (missing >= 0) report_fault(fault, FAULT_PEER, kernel, layer, missing);
        }
#ifdef TRACE
        if (threadIdx.x == 0) trace_resumed = clock_ns();
#endif
        return false;
    }
};
