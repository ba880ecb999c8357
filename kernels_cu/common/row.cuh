// A row of HIDDEN columns shared by the PARTS blocks of a cluster, one float4 a thread, and sums over it.
//
// A row kernel is pure latency: it moves a few tens of kilobytes between two reductions. One block would pull a row
// through one multiprocessor's 64 bytes a cycle and push its shuffles through one shuffle unit; PARTS blocks have
// PARTS of each. What they owe each other, 16 bytes a block, travels by st.async into the peers' shared
// memory and completes on the peers' mbarriers, so that no cluster-wide barrier lies on the path.
//
// Includers define PARTS (1, 2, 4 or 8; the cluster's size along x) and HIDDEN.
#pragma once
#include "common/copy.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

constexpr int COLUMNS = HIDDEN / PARTS;     // of a block
constexpr int COLUMN_THREADS = COLUMNS / 4;  // threads that hold columns; a kernel may have more warps beyond them
constexpr int MAX_RANKS = 8;
static_assert(HIDDEN % (PARTS * 4 * WARP) == 0, "whole warps of float4");
static_assert(COLUMN_THREADS <= 992, "room for one more warp in a block");
static_assert((PARTS & (PARTS - 1)) == 0 && PARTS <= 8, "a portable cluster size");

// One reduction of a kernel. Each has slots and a barrier of its own: a block that is ahead may send its share of the
// second reduction before this block has everything of the first, and must not complete the first one's count.
template <int WARPS>
struct RowExchange {
    float4 warps[WARPS];
    float4 parts[PARTS];
    uint64_t arrived;
};

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w); }
__device__ __forceinline__ float4 product(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 scaled(float4 a, float s) { return make_float4(a.x * s, a.y * s, a.z * s, a.w * s); }
__device__ __forceinline__ float4 sum(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
// x + s * y
__device__ __forceinline__ float4 plus_scaled(float4 x, float s, float4 y) {
    return make_float4(fmaf(s, y.x, x.x), fmaf(s, y.y, x.y), fmaf(s, y.z, x.z), fmaf(s, y.w, x.w));
}
__device__ __forceinline__ float largest(float4 a) {
    return fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w)));
}

// What a predecessor wrote: from L2, since L1 may hold the line as it was before.
__device__ __forceinline__ float4 load4(const float* address) {
    return __ldcg(reinterpret_cast<const float4*>(address));
}
__device__ __forceinline__ void store4(float* address, float4 x) { *reinterpret_cast<float4*>(address) = x; }
__device__ __forceinline__ void store4(f16* address, float4 x) {
    *reinterpret_cast<uint2*>(address) = make_uint2(pack_f16(x.x, x.y), pack_f16(x.z, x.w));
}

// Rows from one rank's partials to the next one's: decode's buffers have ROWS, a prompt chunk's as many as it has.
__device__ __forceinline__ int64_t rank_rows(int rows) { return max_int(rows, ROWS); }

// The ranks' partials added in rank order, with all loads in flight together.
__device__ __forceinline__ float4 sum_ranks(const float* address, int ranks, int64_t stride) {
    float4 total = load4(address);
    if (ranks > 1) {
        float4 part[MAX_RANKS];
#pragma unroll
        for (int r = 1; r < MAX_RANKS; ++r)
            part[r] = r < ranks ? load4(address + r * stride) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int r = 1; r < MAX_RANKS; ++r) total = sum(total, part[r]);
    }
    return total;
}

// In a kernel's prologue: arms the barriers of every exchange, and waits until the peers have armed theirs.
template <int WARPS, int COUNT>
__device__ __forceinline__ void row_begin(RowExchange<WARPS> (&exchanges)[COUNT]) {
    if constexpr (PARTS > 1) {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) barrier_init(&exchanges[i].arrived, 1);
            barrier_init_fence();  // remote completions must find them initialised
#pragma unroll
            for (int i = 0; i < COUNT; ++i) barrier_expect(&exchanges[i].arrived, PARTS * sizeof(float4));
        }
        // No message may be sent to a block that has not started or armed; hidden behind the predecessor.
        asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

__device__ __forceinline__ void send_to_part(const float4* slot, const uint64_t* barrier, int part, float4 x) {
    uint32_t remote_slot, remote_barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_slot) : "r"(shared_address(slot)), "r"(part));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(part));
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_slot),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(remote_barrier)
        : "memory");
}

// As barrier_wait for phase 0, for data that other blocks of the cluster wrote.
__device__ __forceinline__ void wait_for_parts(uint64_t* barrier, Fault* fault, int kernel, int layer) {
    for (int tries = 0;; ++tries) {
        uint32_t done;
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier))
            : "memory");
        if (done) return;
        if (tries > (1 << 22)) {
            report_fault(fault, FAULT_COPY, kernel, layer);
            asm volatile("trap;");
        }
    }
}

// Four sums over a warp in six shuffles instead of twenty: halves of the warp take over half of the sums each,
// twice. Lane l gets sum number l / 8.
__device__ __forceinline__ float warp_sum4(float4 x) {
    const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    float a = upper ? x.z : x.x, b = upper ? x.w : x.y;
    a += __shfl_xor_sync(0xffffffffu, upper ? x.x : x.z, 16);
    b += __shfl_xor_sync(0xffffffffu, upper ? x.y : x.w, 16);
    float s = odd ? b : a;
    s += __shfl_xor_sync(0xffffffffu, odd ? a : b, 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) s += __shfl_xor_sync(0xffffffffu, s, offset);
    return s;
}

__device__ __forceinline__ float4 combine(float4 a, float4 b, bool maximum) {
    return maximum ? make_float4(fmaxf(a.x, b.x), 0.0f, 0.0f, 0.0f) : sum(a, b);
}

// Four sums over the row, or the maximum of x.x, to every thread of every part, with the same bits. All threads call.
template <bool MAXIMUM, int WARPS>
__device__ __forceinline__ float4 row_reduce(float4 x, RowExchange<WARPS>& exchange, Fault* fault, int kernel,
                                             int layer) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if constexpr (MAXIMUM) {
        x.x = warp_max(x.x);
        if (lane == 0) exchange.warps[warp] = make_float4(x.x, 0.0f, 0.0f, 0.0f);
    } else {
        const float s = warp_sum4(x);
        if (lane % 8 == 0) reinterpret_cast<float*>(&exchange.warps[warp])[lane / 8] = s;
    }
    __syncthreads();  // every warp's share is there
    float4 total;
    if (PARTS == 1 || warp == 0) {
        if constexpr (WARPS <= 8 || MAXIMUM) {
            total = exchange.warps[0];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) total = combine(total, exchange.warps[w], MAXIMUM);
        } else {  // one load a lane instead of WARPS
            const float s = warp_sum4(lane < WARPS ? exchange.warps[lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            total = make_float4(__shfl_sync(0xffffffffu, s, 0), __shfl_sync(0xffffffffu, s, 8),
                                __shfl_sync(0xffffffffu, s, 16), __shfl_sync(0xffffffffu, s, 24));
        }
    }
    if constexpr (PARTS > 1) {
        // A block leaves only after all that is sent to it has come, so no message finds its receiver gone.
        if (warp == 0 && lane < PARTS)
            send_to_part(&exchange.parts[blockIdx.x % PARTS], &exchange.arrived, lane, total);
        wait_for_parts(&exchange.arrived, fault, kernel, layer);
        total = exchange.parts[0];
#pragma unroll
        for (int p = 1; p < PARTS; ++p) total = combine(total, exchange.parts[p], MAXIMUM);
    }
    return total;
}

__device__ __forceinline__ float inverse_rms(float squares) { return rsqrtf(squares * (1.0f / HIDDEN) + EPS); }
