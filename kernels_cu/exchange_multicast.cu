// Exchange through the switch: a multicast object binds one buffer of each rank (cuq1/parallel/multicast.py), and a
// load at its multicast address returns the buffers' sum, which the switch forms (NVLink SHARP). Off unless a user
// asks for it, and never run by the tests, which read plain memory in its place: tools/check_multicast.py qualifies a
// machine for it.
//
// multicast_send  stands for a kernel that makes partials: this rank's go to its own buffer, or are pushed to all
//                 inboxes.
//   PRECOND  grid (rows * PARTS), block COLUMN_THREADS. Reads and writes rows * HIDDEN * 4 bytes (peers: RANKS times).
// multicast_tail  y = the ranks' partials, summed by the switch; the rest as mlp_tail (tails.cu).
//   PRECOND  grid (rows * PARTS), cluster PARTS, block TAIL_THREADS. Its predecessor is the launch that writes this
//            rank's partials, which stores nothing before its pdl_wait(). h, norms and *live were written two launches
//            ago or more, and what the tail writes was read for the last time before its predecessor began. *live is
//            1 at least.
//   Reads rows * HIDDEN * 4 bytes of each rank a look, and two norms; writes rows * HIDDEN * 6, and ROWS * HIDDEN * 4
//   of the buffer of the exchange before.
//
// Data is the ready flag. A buffer's words are NOT_READY, a NaN, before their rank writes them, and any NaN among the
// terms makes the sum a NaN: a vector without one is whole. A NaN can also be the sum itself, where a rank computed
// one or two ranks' infinities, or overflows, cancel. So a look that stays a NaN is settled now and then by the
// largest of the ranks' words as unsigned integers: it is NOT_READY, all bits set, exactly where a rank has not
// written, since no rank stores that pattern (ready_float). Thus every value passes, and one that is not finite is
// reported, by all ranks, as an error.
//
// Readers and norm work are apart. READERS groups of threads, as many as hold columns, look at the same vectors; the
// first group's first look leaves at the kernel's entry, before the predecessor has ended, while the others stage
// norms and h. The groups look STAGGER cycles apart: less of a trip to the switch is lost where a look comes just
// before the last partial. The first whole result claims its vector (`taken`), and the thread with its columns goes on
// from shared memory.
//
// Re-arming. Exchange i uses buffer i % 3, and a rank's steps are send(i), tail(i), send(i + 1), tail(i + 1) and so on.
//   A word of i + 1 from rank r means that r's tail(i) has ended: send(i + 1) stores behind a pdl_wait(). So whoever
//   has a whole vector of i + 1 knows that no rank reads buffer i any more, and makes its own part of it NOT_READY:
//   tail(i + 1) does so for all ROWS rows, however many it has itself: the exchange before may have had more.
//   Buffer i is used next by i + 3. Rank q looks at it after its tail(i + 2), so after r's send(i + 2), which stored
//   behind the end of r's tail(i + 1): the words that q sees are NOT_READY or those of i + 3, never those of i.
//   With two buffers q could look at i + 2 once r's send(i + 1) has stored, when r's tail(i + 1) may not have begun.
//   tests/unit/test_multicast_order.py walks all interleavings.
// Each rank's stores, its re-arming and the switch's loads meet in that rank's L2, where a launch's writes are
// performed at its end. That end is also what orders accesses to one memory by two addresses, which within a launch
// would take fence.proxy.alias: a word's re-arming and the next look at it are launches apart, and a look at a word
// that is being written needs no order, as it is judged by itself. A late look of a claimed vector finds it taken,
// whatever it returns, and its block waits for it before it ends.
//
// The sum's order and precision are the switch's own: the PTX ISA names neither. Bits can differ from those of the push
// path, which adds in the order of ranks; ranks have the same ones if the switch gives every reader the same.
#include "abi_measure.cuh"
#include "common/exchange.cuh"
#include "common/sublayer.cuh"

#ifndef STAGGER
#define STAGGER 1000  // cycles between the looks of the two groups; about half a trip to the switch, not measured
#endif
constexpr int READERS = 2;
constexpr int TAIL_THREADS = COLUMN_THREADS * (1 + READERS);
constexpr int LOOKS = 64;  // that stay a NaN before one is settled, and the clock and the fault are looked at
static_assert(TAIL_THREADS <= 1024, "one block");

// What the switch makes of the ranks' words at a multicast address; no other instruction may be used on one.
// [reads
__device__ __forceinline__ float4 sum_of_ranks(const float* address) {
    float4 x;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ uint32_t largest_of_ranks(const float* address) {
    uint32_t x;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.max.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}
__device__ __forceinline__ int largest_of_ranks(const int* address) {
    int x;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.max.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}
// reads]

__device__ __forceinline__ bool has_nan(float4 x) { return x.x != x.x || x.y != x.y || x.z != x.z || x.w != x.w; }

// Whether every rank has written the four words.
__device__ __forceinline__ bool all_written(const float* address) {
    bool written = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) written = written && largest_of_ranks(address + i) != NOT_READY;
    return written;
}

// The first rank that has sent less often than another; -1 where all have sent as often, and a word was lost.
__device__ __forceinline__ int missing_place(const int* sent) {
    if (sent == nullptr) return -1;
    int count[RANKS], most = -1, place = -1;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
        count[r] = largest_of_ranks(sent + r);
        most = max_int(most, count[r]);
    }
#pragma unroll
    for (int r = RANKS - 1; r >= 0; --r) place = count[r] < most ? r : place;
    return place;
}

// A block's vectors on their way from readers to the threads with their columns.
struct Vectors {
    float4 value[COLUMN_THREADS];
    int taken[COLUMN_THREADS];
    uint64_t all;  // an arrival a vector
};

__device__ __forceinline__ bool is_taken(const Vectors& v, int vector) {
    return *reinterpret_cast<const volatile int*>(&v.taken[vector]) != 0;
}

// Looks until this vector is whole, or taken by another reader, or given up. x: what the first look returned. Returns
// whether this reader claimed it. Lanes leave one by one: nothing behind it is done by whole warps.
__device__ __forceinline__ bool read_vector(const MulticastTailArgs& a, const float* from, float4 x, int vector,
                                            Vectors& v) {
    uint64_t begun = 0;
    for (int count = 1;; ++count) {
        bool whole = !has_nan(x);
        if (!whole && count % LOOKS == 0) {
            if (all_written(from)) {
                // Behind the branch: this look leaves after the answer has come, so what it returns is the sum.
                x = sum_of_ranks(from);
                whole = true;
            } else {
                const uint64_t now = clock_ns();
                if (begun == 0) begun = now;
                const bool late = now - begun > uint64_t(PEER_TIMEOUT_MS) * 1000000u;
                const bool known =
                    a.fault != nullptr && *reinterpret_cast<const volatile int*>(&a.fault->what) != FAULT_NONE;
                if (late && !known) report_fault(a.fault, FAULT_PEER, KERNEL_EXCHANGE, a.layer, missing_place(a.sent));
                whole = late || known;  // given up: it is the NaN that it is
            }
        }
        if (whole) {
            if (atomicExch(&v.taken[vector], 1) != 0) return false;
            v.value[vector] = x;
            barrier_arrive(&v.all);  // releases the value to those who wait
            return true;
        }
        if (is_taken(v, vector)) return false;
        x = sum_of_ranks(from);
    }
}

extern "C" __global__ void __launch_bounds__(COLUMN_THREADS) multicast_send(
    const __grid_constant__ MulticastSendArgs a) {
    const int row = int(blockIdx.x) / PARTS, part = int(blockIdx.x) % PARTS;
    const int64_t at = int64_t(row) * HIDDEN + part * COLUMNS + int(threadIdx.x) * 4;
    pdl_wait();  // behind it, this rank's tail of the exchange before has ended: see above
    pdl_trigger();
    if (row >= live_before(a.live, a.rows)) return;
    if (a.sent != nullptr && blockIdx.x == 0 && threadIdx.x == 0)  // the only writer of this word
        asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(a.sent), "r"(load_pushed(a.sent) + 1) : "memory");
    const float4 x = load4(a.source + at);
    if (a.delay > 0) {
        const uint64_t until = clock_ns() + uint64_t(a.delay) * (1 + blockIdx.x) / gridDim.x;
        while (clock_ns() < until) {
        }
    }
    if constexpr (RANKS > 1) {
        if (a.peers != nullptr) {
            const Peers peers(a.peers);
            peers.push(a.out + at, x.x);
            peers.push(a.out + at + 1, x.y);
            peers.push(a.out + at + 2, x.z);
            peers.push(a.out + at + 3, x.w);
            return;
        }
    }
    asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(a.out + at), "f"(ready_float(x.x)),
                 "f"(ready_float(x.y)), "f"(ready_float(x.z)), "f"(ready_float(x.w))
                 : "memory");
}

extern "C" __global__ void __launch_bounds__(TAIL_THREADS) multicast_tail(const __grid_constant__ MulticastTailArgs a) {
    __shared__ RowExchange exchange[2];
    __shared__ Vectors vectors;
    const int row = int(blockIdx.x) / PARTS, part = int(blockIdx.x) % PARTS;
    const int thread = int(threadIdx.x) % COLUMN_THREADS, group = int(threadIdx.x) / COLUMN_THREADS;
    const int column = part * COLUMNS + thread * 4;
    const int64_t at = int64_t(row) * HIDDEN + column;
    if (group > 0) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (group == 1) x = sum_of_ranks(a.y + at);  // under way until it is looked at; of a dead row nobody does
        const int live = live_before(a.live, a.rows);
        row_begin(exchange);  // nothing is taken yet, and the barrier is armed
        if (row >= live) return;
        if (group == 2) {
            const uint32_t begun = uint32_t(clock());
            while (uint32_t(clock()) - begun < STAGGER) {
            }
            if (is_taken(vectors, thread)) return;
            x = sum_of_ranks(a.y + at);
        }
        const bool claimed = read_vector(a, a.y + at, x, thread, vectors);
        if (!claimed || a.unready == nullptr) return;
        for (int r = row; r < ROWS; r += live) make_unready_4(a.unready + int64_t(r) * HIDDEN + column);
        return;
    }
    vectors.taken[thread] = 0;
    if (thread == 0) barrier_init(&vectors.all, COLUMN_THREADS);
    const float4 w_next = __ldg(reinterpret_cast<const float4*>(a.next_norm + column));
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < a.rows) x = load4(a.h + at);
    float4 w_out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (a.ffn_out_norm != nullptr) w_out = __ldg(reinterpret_cast<const float4*>(a.ffn_out_norm + column));
    const int live = live_before(a.live, a.rows);
    row_begin(exchange);
    if (row >= live) {
        pdl_settle();
        return;
    }
    // The readers' clocks bound it, since each vector is claimed. A warp leaves whole: shuffles follow.
    while (!__all_sync(0xffffffffu, barrier_try(&vectors.all, 0))) {
    }
    const float4 y = vectors.value[thread];
    pdl_trigger();

    const Sublayer s = add_sublayer(x, y, w_out, a.ffn_scale, a.ffn_out_norm != nullptr, exchange, a.fault,
                                    KERNEL_EXCHANGE, a.layer, [] {});
    const float4 n = product(scaled(s.out, inverse_rms(s.out_squares)), w_next);
    store4(a.residual + at, a.normed_residual ? n : s.out);
    store4(a.normed + at, n);
    if (part == 0 && thread == 0 && !(is_finite(s.in_squares) && is_finite(s.out_squares)))
        report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_EXCHANGE, a.layer);
    pdl_settle();  // the launch's end implies the end of all older ones (common/flagged.cuh)
}
