// A row of HIDDEN columns shared by the PARTS blocks of a cluster, one float4 a thread, and sums over it.
//
// A row kernel is pure latency: it moves a few tens of kilobytes between two reductions. One block would pull a row
// through one multiprocessor's 64 bytes a cycle and push its shuffles through one shuffle unit; PARTS blocks have
// PARTS of each, and what they owe each other is 16 bytes a block (common/cluster.cuh).
//
// Includers define PARTS (2, 4 or 8; the cluster's size along x) and HIDDEN. Threads 0 .. COLUMN_THREADS - 1 of a block
// hold columns and take part in sums; a kernel may have more, which can wait for the results.
#pragma once
#include "common/cluster.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

constexpr int COLUMNS = HIDDEN / PARTS;      // of a block
constexpr int COLUMN_THREADS = COLUMNS / 4;
constexpr int COLUMN_WARPS = COLUMN_THREADS / WARP;
static_assert(HIDDEN % (PARTS * 4 * WARP) == 0, "whole warps of float4");
static_assert(COLUMN_WARPS <= 8, "a thread adds the warps' shares one by one");
static_assert(PARTS == 2 || PARTS == 4 || PARTS == 8, "a cluster of a portable size");

// One reduction of a kernel. Each has slots and a barrier of its own: a block that is ahead may send its share of the
// second reduction before this block has everything of the first, and must not complete the first one's count.
struct RowExchange {
    float4 warps[COLUMN_WARPS];
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
template <int COUNT>
__device__ __forceinline__ void row_begin(RowExchange (&exchanges)[COUNT]) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) barrier_init(&exchanges[i].arrived, 1);
        barrier_init_fence();  // remote completions must find them initialised
#pragma unroll
        for (int i = 0; i < COUNT; ++i) barrier_expect(&exchanges[i].arrived, PARTS * sizeof(float4));
    }
    cluster_sync();
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

template <bool MAXIMUM>
__device__ __forceinline__ float4 joined(float4 a, float4 b) {
    return MAXIMUM ? make_float4(fmaxf(a.x, b.x), a.y, a.z, a.w) : sum(a, b);
}

// What all parts sent, to every thread that asks, with the same bits: four sums, or the maximum of x.
template <bool MAXIMUM>
__device__ __forceinline__ float4 row_result(RowExchange& exchange, Fault* fault, int kernel, int layer) {
    cluster_receive(&exchange.arrived, fault, kernel, layer);
    float4 total = exchange.parts[0];
#pragma unroll
    for (int p = 1; p < PARTS; ++p) {
        total = joined<MAXIMUM>(total, exchange.parts[p]);
    }
    return total;
}

// The block's share of row_result(), to all of the row's blocks. All column threads of the row's blocks call it.
template <bool MAXIMUM>
__device__ __forceinline__ void row_send(float4 x, RowExchange& exchange) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if constexpr (MAXIMUM) {
        x.x = warp_max(x.x);
        if (lane == 0) exchange.warps[warp] = make_float4(x.x, 0.0f, 0.0f, 0.0f);
    } else {
        const float s = warp_sum4(x);
        if (lane % 8 == 0) reinterpret_cast<float*>(&exchange.warps[warp])[lane / 8] = s;
    }
    // Every warp's share is there. Of the column threads alone: the others may have left, or be elsewhere.
    asm volatile("bar.sync 1, %0;" ::"n"(COLUMN_THREADS) : "memory");
    if (threadIdx.x < PARTS) {
        float4 total = exchange.warps[0];
#pragma unroll
        for (int w = 1; w < COLUMN_WARPS; ++w) {
            total = joined<MAXIMUM>(total, exchange.warps[w]);
        }
        // A block leaves only after all that is sent to it has come, so no message finds its receiver gone.
        cluster_send(&exchange.parts[blockIdx.x % PARTS], &exchange.arrived, threadIdx.x, total);
    }
}

// Four sums over the row, or the maximum of x.x. All column threads of the row's blocks call it.
template <bool MAXIMUM>
__device__ __forceinline__ float4 row_reduce(float4 x, RowExchange& exchange, Fault* fault, int kernel, int layer) {
    row_send<MAXIMUM>(x, exchange);
    return row_result<MAXIMUM>(exchange, fault, kernel, layer);
}

__device__ __forceinline__ float inverse_rms(float squares) { return rsqrtf(squares * (1.0f / HIDDEN) + EPS); }
