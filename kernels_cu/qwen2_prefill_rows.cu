// Prompt processing of Qwen2 models: a chunk's rows of the embedding and its pages of the KV cache, and norms.
#include "abi_qwen2.cuh"
#include "common/activations.cuh"
#include "common/pdl.cuh"
#include "common/prefill_report.cuh"
#include "common/reduce.cuh"

constexpr int THREADS = 256;
constexpr int PADDED = (HIDDEN + 127) / 128 * 128;
constexpr int EACH = (PADDED / 8 + THREADS - 1) / THREADS;  // pieces of eight columns of a thread
static_assert(HIDDEN % 64 == 0, "whole blocks of activations");

// residual = table[token]. Positions whose page is not there yet take free ones, the last free one first. A token outside the
// vocabulary is reported and taken as 0; so is a position without a page, which then stays without.
//   PRECOND  grid (rows), block 256. All but the table may be a predecessor's. No other launch changes pages meanwhile.
//   A chunk's positions lie in 129 pages at most, one a thread: a page's place among those that are missing is a count of bits.
//   Reads rows * HIDDEN * 2 bytes, writes rows * HIDDEN * 4.
extern "C" __global__ void __launch_bounds__(THREADS) qwen2_prefill_embed(const __grid_constant__ Qwen2PrefillEmbedArgs a) {
    __shared__ int counts[THREADS / WARP];
    pdl_wait();
    pdl_trigger();
    const int row = int(blockIdx.x);
    if (row >= a.rows) return;
    int token = __ldcg(a.tokens + row);
    if (token < 0 || token >= VOCAB) {
        if (threadIdx.x == 0) report_fault(a.fault, FAULT_TOKEN, KERNEL_PREFILL, a.layer, token);
        token = 0;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int column = (i * THREADS + int(threadIdx.x)) * 8;
        if (column >= HIDDEN) break;
        const uint4 x = __ldg(reinterpret_cast<const uint4*>(a.table + int64_t(token) * HIDDEN + column));
        const float2 x0 = unpack_f16(x.x), x1 = unpack_f16(x.y), x2 = unpack_f16(x.z), x3 = unpack_f16(x.w);
        float4* const to = reinterpret_cast<float4*>(a.residual + int64_t(row) * HIDDEN + column);
        to[0] = make_float4(x0.x, x0.y, x1.x, x1.y);
        to[1] = make_float4(x2.x, x2.y, x3.x, x3.y);
    }
    if (row > 0) return;

    const int free = __ldcg(&a.pages->free);
    int given = 0;  // to the pages before
    for (int first = a.start / PAGE; first <= (a.start + a.rows - 1) / PAGE; first += THREADS) {
        const int place = first + int(threadIdx.x);
        const bool mine = place <= (a.start + a.rows - 1) / PAGE, fits = place < a.max_pages;
        const bool missing = mine && fits && __ldcg(a.page_table + place) < 0;
        const unsigned mask = __ballot_sync(0xffffffffu, missing);
        if (threadIdx.x % WARP == 0) counts[threadIdx.x / WARP] = __popc(mask);
        __syncthreads();  // all warps' counts are there
        int before = given;
#pragma unroll
        for (int w = 0; w < THREADS / WARP; ++w) {
            if (w < int(threadIdx.x) / WARP) before += counts[w];
            given += counts[w];
        }
        before += __popc(mask & ((1u << threadIdx.x % WARP) - 1));
        if (missing && before < free) a.page_table[place] = __ldcg(a.free_pages + free - 1 - before);
        if (mine && (!fits || (missing && before >= free)))
            report_fault(a.fault, FAULT_PAGES, KERNEL_PREFILL, a.layer, max_int(place * PAGE, a.start));
        __syncthreads();  // counts may be overwritten
    }
    if (threadIdx.x == 0) a.pages->free = max_int(0, free - given);
}

// normed = rms(residual, norm) as halves, in tiles or row by row.
//   PRECOND  grid (rows), block 256. Norms may be read before pdl_wait().
//   A row is read into registers once, by pieces as the tiles have them: four pairs of columns, eight apart.
//   Reads rows * HIDDEN * 4 bytes, writes rows * PADDED * 2.
template <bool TILED>
__device__ __forceinline__ void norm_row(const Qwen2PrefillNormArgs& a) {
    __shared__ float scratch[THREADS / WARP];
    pdl_wait();
    pdl_trigger();
    const int row = int(blockIdx.x);
    if (row >= a.rows) return;
    // The first column of pair `t` of a thread's piece `i`.
    auto column_of = [](int i, int t) {
        const int piece = i * THREADS + int(threadIdx.x);
        return TILED ? piece / 4 * 32 + 8 * t + piece % 4 * 2 : piece * 8 + 2 * t;
    };
    float2 x[EACH][4];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int column = column_of(i, t);
            x[i][t] = make_float2(0.0f, 0.0f);
            if (column < HIDDEN)
                x[i][t] = *reinterpret_cast<const float2*>(a.residual + int64_t(row) * HIDDEN + column);
            square += x[i][t].x * x[i][t].x + x[i][t].y * x[i][t].y;
        }
    const float inverse = rsqrtf(block_sum<THREADS>(square, scratch) * (1.0f / HIDDEN) + EPS);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int piece = i * THREADS + int(threadIdx.x);
        if (piece >= PADDED / 8) break;
        uint32_t out[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int column = column_of(i, t);
            const float2 w =
                unpack_f16(column < HIDDEN ? *reinterpret_cast<const uint32_t*>(a.norm + column) : 0u);
            out[t] = pack_f16(x[i][t].x * inverse * w.x, x[i][t].y * inverse * w.y);
        }
        const int64_t at = TILED ? activation_offset(activation_rows(a.rows), piece / 8, row, piece % 8)
                                 : int64_t(row) * PADDED + piece * 8;
        *reinterpret_cast<uint4*>(a.normed + at) = make_uint4(out[0], out[1], out[2], out[3]);
    }
    // The square may have overflowed.
    if (threadIdx.x == 0 && !(is_finite(inverse) && inverse > 0.0f))
        report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_PREFILL, a.layer);
}

extern "C" __global__ void __launch_bounds__(THREADS) qwen2_prefill_norm(const __grid_constant__ Qwen2PrefillNormArgs a) {
    norm_row<true>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    qwen2_prefill_norm_rows(const __grid_constant__ Qwen2PrefillNormArgs a) {
    norm_row<false>(a);
}
