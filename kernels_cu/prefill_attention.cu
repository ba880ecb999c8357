// Prompt processing: causal attention of a chunk over the cache, and the way between a ring and the staging buffer.
//
// prefill_attention
//   PRECOND  grid (ceil(rows / 64), Q_HEADS, splits), block 128, SMEM bytes. Everything is a predecessor's.
//            k and v hold, from slot 0 = first_position on, every position that a row sees, the chunk's own included.
//   A block has 64 rows of one query head, a warp 16 of them; tiles of 64 keys pass through two stages, each tile one
//   bulk copy as it lies in memory (kv.cuh's swizzle makes ldmatrix conflict-free). Softmax is the running one, in base 2;
//   it starts from the sink: maximum z, sum 1, value 0. Late blocks, which see most keys, start first.
//   Few rows would leave most of the chip idle: then the keys are split too, and prefill_merge joins the parts.
//   Slots that no row sees may hold anything: their scores are replaced, their values cleared in shared memory.
//   Reads q once, K and V once for each (64 rows, query head) from L2; writes rows * Q_HEADS * 256 bytes.
// prefill_merge  sums the splits' parts in their order.
//   PRECOND  grid (ceil(rows * Q_HEADS / 8)), block 256: a warp a row and head.
// prefill_ring  copies rows of K and V between a sliding layer's ring, which a chunk would overrun, and the staging
//   buffer, which holds the window before the chunk and the chunk.
//   PRECOND  grid (ceil(rows / 16), KV_HEADS, 2), block 256; rows <= ring_slots, rows <= staged_slots. A row's place
//            within its swizzle is the same in both, since slots and first_position are multiples of 64.
#include "abi_prefill.cuh"
#include "common/copy.cuh"
#include "common/kv.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/prefill_report.cuh"
#include "common/reduce.cuh"

constexpr int THREADS = 128;
constexpr int QUERIES = 64;
constexpr int TILE_HALVES = KV_TILE * HEAD_DIM;
constexpr int TILE_BYTES = TILE_HALVES * 2;
constexpr int STAGES = 2;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NOTHING = -1e30f;  // the maximum of no keys: finite, so that differences are no NaN

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const char* address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(address))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const char* address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(address))
                 : "memory");
}

// A piece of 8 halves of a tile's row, swizzled as in kv_offset.
__device__ __forceinline__ const char* piece_of(const char* tile, int row, int piece) {
    return tile + row * (HEAD_DIM * 2) + ((piece ^ (row & 7)) << 4);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prefill_attention(const __grid_constant__ PrefillAttentionArgs a) {
    extern __shared__ __align__(128) char shared[];  // [STAGES][K tile, V tile]
    __shared__ uint64_t full[STAGES];
    const int head = int(blockIdx.y), kv_head = head / GROUP;
    const int first_row = (int(gridDim.x) - 1 - int(blockIdx.x)) * QUERIES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) barrier_init(&full[s], 1);
        barrier_init_fence();
    }
    __syncthreads();  // nobody waits for a barrier that is not there yet
    pdl_wait();
    pdl_trigger();
    if (first_row >= a.rows) return;

    const int low = a.start + first_row;                                  // positions of the block's queries
    const int high = a.start + min_int(first_row + QUERIES, a.rows) - 1;
    const int oldest = a.window > 0 ? max_int(0, low - a.window + 1) : 0;  // seen by any of them
    const int all_tiles = high / KV_TILE + 1 - oldest / KV_TILE, per_split = div_up(all_tiles, a.splits);
    const int split = int(blockIdx.z), first_tile = oldest / KV_TILE + split * per_split;
    const int tiles = max_int(0, min_int(per_split, all_tiles - split * per_split));  // of this split, none perhaps
    const f16* k = a.k + int64_t(kv_head) * a.slots * HEAD_DIM - int64_t(a.first_position) * HEAD_DIM;
    const f16* v = a.v + int64_t(kv_head) * a.slots * HEAD_DIM - int64_t(a.first_position) * HEAD_DIM;
    auto fetch = [&](int tile) {
        char* stage = shared + tile % STAGES * 2 * TILE_BYTES;
        barrier_expect(&full[tile % STAGES], 2 * TILE_BYTES);
        bulk_load(stage, k + int64_t(first_tile + tile) * TILE_HALVES, TILE_BYTES, &full[tile % STAGES]);
        bulk_load(stage + TILE_BYTES, v + int64_t(first_tile + tile) * TILE_HALVES, TILE_BYTES, &full[tile % STAGES]);
    };
    if (threadIdx.x == 0)
        for (int tile = 0; tile < min_int(STAGES, tiles); ++tile) fetch(tile);

    // The warp's queries as A fragments: rows g and g + 8 of its 16. Dead rows are zero.
    const int row0 = first_row + warp * 16 + g, row1 = row0 + 8;
    const float* sink = a.sink_k + kv_head * HEAD_DIM;
    uint32_t q[HEAD_DIM / 16][4];
    float sink0 = 0.0f, sink1 = 0.0f;
#pragma unroll
    for (int kk = 0; kk < HEAD_DIM / 16; ++kk)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int dim = kk * 16 + half * 8 + 2 * t;
            q[kk][half * 2] = q[kk][half * 2 + 1] = 0;
            if (row0 < a.rows)
                q[kk][half * 2] = *reinterpret_cast<const uint32_t*>(a.q + (int64_t(row0) * Q_HEADS + head) * HEAD_DIM + dim);
            if (row1 < a.rows)
                q[kk][half * 2 + 1] =
                    *reinterpret_cast<const uint32_t*>(a.q + (int64_t(row1) * Q_HEADS + head) * HEAD_DIM + dim);
            const float2 s = *reinterpret_cast<const float2*>(sink + dim);
            const float2 x0 = unpack_f16(q[kk][half * 2]), x1 = unpack_f16(q[kk][half * 2 + 1]);
            sink0 += x0.x * s.x + x0.y * s.y;
            sink1 += x1.x * s.x + x1.y * s.y;
        }
    const float scale = a.scale * LOG2_E;
    float max0 = quad_sum(sink0) * scale, max1 = quad_sum(sink1) * scale;
    float sum0 = t == 0 ? 1.0f : 0.0f, sum1 = sum0;  // this lane's part; the sink counts once
    if (split > 0) max0 = max1 = NOTHING, sum0 = sum1 = 0.0f;
    float out[HEAD_DIM / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;

    const float minus_infinity = __int_as_float(0xff800000);
    const int position0 = a.start + row0, position1 = a.start + row1;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        char* k_tile = shared + tile % STAGES * 2 * TILE_BYTES;
        char* v_tile = k_tile + TILE_BYTES;
        const int tile_position = (first_tile + tile) * KV_TILE;
        barrier_wait(&full[tile % STAGES], uint32_t(tile / STAGES) & 1, a.fault, KERNEL_PREFILL, a.layer);
        if (tile_position < oldest || tile_position + KV_TILE - 1 > high) {
            // Zero times what was never written could be NaN.
            for (int i = int(threadIdx.x); i < TILE_BYTES / 16; i += THREADS) {
                const int position = tile_position + i / (HEAD_DIM / 8);
                if (position < oldest || position > high)
                    reinterpret_cast<uint4*>(v_tile)[i] = make_uint4(0, 0, 0, 0);
            }
            __syncthreads();  // other warps' rows are cleared too
        }

        float s[KV_TILE / 8][4];
#pragma unroll
        for (int n = 0; n < KV_TILE / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
#pragma unroll
        for (int kk = 0; kk < HEAD_DIM / 16; ++kk)
#pragma unroll
            for (int n = 0; n < KV_TILE / 8; n += 2) {
                // keys 8n .. 8n + 15 as four matrices: (keys, dims) low low, low high, high low, high high
                uint32_t b[4];
                load_matrices(b, piece_of(k_tile, n * 8 + (lane & 7) + (lane & 16) / 2, kk * 2 + (lane >> 3 & 1)));
                mma_f16(s[n], q[kk][0], q[kk][1], q[kk][2], q[kk][3], b[0], b[1]);
                mma_f16(s[n + 1], q[kk][0], q[kk][1], q[kk][2], q[kk][3], b[2], b[3]);
            }
        const bool masked =
            tile_position + KV_TILE - 1 > low || (a.window > 0 && high - tile_position >= a.window);
        float top0 = max0, top1 = max1;
#pragma unroll
        for (int n = 0; n < KV_TILE / 8; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                s[n][j] *= scale;
                s[n][j + 2] *= scale;
                if (masked) {
                    const int key = tile_position + n * 8 + 2 * t + j;
                    const bool see0 = key <= position0 && (a.window == 0 || position0 - key < a.window);
                    const bool see1 = key <= position1 && (a.window == 0 || position1 - key < a.window);
                    s[n][j] = see0 ? s[n][j] : minus_infinity;
                    s[n][j + 2] = see1 ? s[n][j + 2] : minus_infinity;
                }
                top0 = fmaxf(top0, s[n][j]);
                top1 = fmaxf(top1, s[n][j + 2]);
            }
        top0 = quad_max(top0);
        top1 = quad_max(top1);
        const float shrink0 = exp2_fast(max0 - top0), shrink1 = exp2_fast(max1 - top1);
        max0 = top0;
        max1 = top1;
        sum0 *= shrink0;
        sum1 *= shrink1;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
            out[n][0] *= shrink0;
            out[n][1] *= shrink0;
            out[n][2] *= shrink1;
            out[n][3] *= shrink1;
        }
#pragma unroll
        for (int n = 0; n < KV_TILE / 8; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                s[n][j] = exp2_fast(s[n][j] - max0);
                s[n][j + 2] = exp2_fast(s[n][j + 2] - max1);
                sum0 += s[n][j];
                sum1 += s[n][j + 2];
            }
#pragma unroll
        for (int kk = 0; kk < KV_TILE / 16; ++kk) {
            // The accumulators of two groups of 8 keys are the A fragment of 16 keys.
            const uint32_t p0 = pack_f16(s[2 * kk][0], s[2 * kk][1]), p1 = pack_f16(s[2 * kk][2], s[2 * kk][3]);
            const uint32_t p2 = pack_f16(s[2 * kk + 1][0], s[2 * kk + 1][1]);
            const uint32_t p3 = pack_f16(s[2 * kk + 1][2], s[2 * kk + 1][3]);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n += 2) {
                // (keys, dims) low low, high low, low high, high high
                uint32_t b[4];
                load_matrices_transposed(b, piece_of(v_tile, kk * 16 + (lane & 15), n + (lane >> 4)));
                mma_f16(out[n], p0, p1, p2, p3, b[0], b[1]);
                mma_f16(out[n + 1], p0, p1, p2, p3, b[2], b[3]);
            }
        }
        // Every warp is done with the stage. Where it was cleared by ordinary stores, those must come before the copy.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0 && tile + STAGES < tiles) fetch(tile + STAGES);
    }

    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    if (a.splits > 1) {
        const int64_t at0 = (int64_t(split) * a.rows + row0) * Q_HEADS + head, at1 = at0 + 8 * Q_HEADS;
        if (t == 0 && row0 < a.rows) reinterpret_cast<float2*>(a.partial_stats)[at0] = make_float2(max0, sum0);
        if (t == 0 && row1 < a.rows) reinterpret_cast<float2*>(a.partial_stats)[at1] = make_float2(max1, sum1);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
            const int dim = n * 8 + 2 * t;
            if (row0 < a.rows)
                *reinterpret_cast<float2*>(a.partial_out + at0 * HEAD_DIM + dim) = make_float2(out[n][0], out[n][1]);
            if (row1 < a.rows)
                *reinterpret_cast<float2*>(a.partial_out + at1 * HEAD_DIM + dim) = make_float2(out[n][2], out[n][3]);
        }
        return;
    }
    const float inverse0 = 1.0f / sum0, inverse1 = 1.0f / sum1;
    bool finite = true;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
        const int dim = n * 8 + 2 * t;
        if (row0 < a.rows) {
            *reinterpret_cast<uint32_t*>(a.attended + (int64_t(row0) * Q_HEADS + head) * HEAD_DIM + dim) =
                pack_f16(out[n][0] * inverse0, out[n][1] * inverse0);
            finite = finite && is_finite(out[n][0] * inverse0) && is_finite(out[n][1] * inverse0);
        }
        if (row1 < a.rows) {
            *reinterpret_cast<uint32_t*>(a.attended + (int64_t(row1) * Q_HEADS + head) * HEAD_DIM + dim) =
                pack_f16(out[n][2] * inverse1, out[n][3] * inverse1);
            finite = finite && is_finite(out[n][2] * inverse1) && is_finite(out[n][3] * inverse1);
        }
    }
    report_block(finite, a.fault, a.layer);
}

extern "C" __global__ void __launch_bounds__(256) prefill_merge(const __grid_constant__ PrefillMergeArgs a) {
    pdl_wait();
    pdl_trigger();
    const int item = int(blockIdx.x) * 8 + int(threadIdx.x) / WARP, lane = threadIdx.x % WARP;  // row and head
    if (item >= a.rows * Q_HEADS) return;
    const float2* stats = reinterpret_cast<const float2*>(a.partial_stats) + item;
    const float4* parts = reinterpret_cast<const float4*>(a.partial_out) + int64_t(item) * (HEAD_DIM / 4) + lane;
    const int64_t stride = int64_t(a.rows) * Q_HEADS;
    float top = NOTHING;
    for (int s = 0; s < a.splits; ++s) top = fmaxf(top, stats[s * stride].x);
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float total = 0.0f;
    for (int s = 0; s < a.splits; ++s) {
        const float2 stat = stats[s * stride];
        const float weight = exp2_fast(stat.x - top);
        const float4 part = parts[s * stride * (HEAD_DIM / 4)];
        total += weight * stat.y;
        out.x += weight * part.x, out.y += weight * part.y, out.z += weight * part.z, out.w += weight * part.w;
    }
    const float inverse = 1.0f / total;
    out.x *= inverse, out.y *= inverse, out.z *= inverse, out.w *= inverse;
    reinterpret_cast<uint2*>(a.attended)[int64_t(item) * (HEAD_DIM / 4) + lane] =
        make_uint2(pack_f16(out.x, out.y), pack_f16(out.z, out.w));
    report_warp(is_finite(out.x) && is_finite(out.y) && is_finite(out.z) && is_finite(out.w), a.fault, a.layer);
}

extern "C" __global__ void __launch_bounds__(256) prefill_ring(const __grid_constant__ PrefillRingArgs a) {
    pdl_wait();
    pdl_trigger();
    const int row = int(blockIdx.x) * 16 + int(threadIdx.x) / 16, piece = threadIdx.x % 16;
    if (row >= a.rows) return;
    const int position = a.start + row, kv_head = int(blockIdx.y);
    uint4* ring = reinterpret_cast<uint4*>(blockIdx.z == 0 ? a.k_ring : a.v_ring);
    uint4* staged = reinterpret_cast<uint4*>(blockIdx.z == 0 ? a.k_staged : a.v_staged);
    ring += (int64_t(kv_head) * a.ring_slots + position % a.ring_slots) * 16 + piece;
    staged += (int64_t(kv_head) * a.staged_slots + (position - a.first_position)) * 16 + piece;
    if (a.to_ring)
        *ring = *staged;
    else
        *staged = *ring;
}
