// A Qwen2 token's way in and out: its row of the embedding and its page of the KV cache; the norm before the logits.
#include "abi_qwen2.cuh"
#include "common/fault.cuh"
#include "common/flagged.cuh"
#include "common/pdl.cuh"
#include "common/pieces.cuh"
#include "common/reduce.cuh"

constexpr int EMBED_THREADS = 128;
constexpr int NORM_THREADS = 512;
constexpr int PADDED = (HIDDEN + 127) / 128 * 128;
constexpr int VECTORS = (PADDED / 4 + NORM_THREADS - 1) / NORM_THREADS;  // of four columns, that a thread has
using DownPieces = Pieces<HIDDEN, INNER, GEMV_BLOCKS>;

static_assert(HIDDEN % 8 == 0, "a row of halves is whole vectors of 16 bytes");

// residual = table[token]. A position whose page is not there yet takes the last free one. A token outside the vocabulary
// is reported and taken as 0; so is a position without a page, which then stays without.
// What blocks of later launches poll is made NOT_READY.
//   PRECOND  grid ceil(HIDDEN / 8 / 128) or more, block 128. table and residual 16-byte aligned. tokens, positions, pages and
//            page_table may be the predecessor's: all are read behind pdl_wait(). No other launch changes pages meanwhile.
//   Reads HIDDEN * 2 bytes of the table, writes HIDDEN * 4 and 16 * unready_pieces.
// Why so: one trip for the token, one for its row; more than one block, so that the row comes through several
// multiprocessors. What is cleared is stored while the token is on its way, by more blocks than the row takes: all of it
// goes to L2. Pages are handed out here, in every token's graph, instead of in a graph of their own: one thread's
// three loads hide behind the row's (tools/decisions/017-page-boundaries.md).
extern "C" __global__ void __launch_bounds__(EMBED_THREADS) qwen2_embed(const __grid_constant__ Qwen2EmbedArgs a) {
    const int column = (int(blockIdx.x) * EMBED_THREADS + int(threadIdx.x)) * 8;
    pdl_wait();
    pdl_trigger();
    const int given = __ldcg(a.tokens);
    for (int i = int(blockIdx.x) * EMBED_THREADS + int(threadIdx.x); i < a.unready_pieces; i += int(gridDim.x) * EMBED_THREADS)
        a.unready[i] = make_uint4(NOT_READY, NOT_READY, NOT_READY, NOT_READY);
    const bool known = given >= 0 && given < VOCAB;
    const int token = known ? given : 0;
    if (column < HIDDEN) {
        const uint4 x = __ldg(reinterpret_cast<const uint4*>(a.table + int64_t(token) * HIDDEN + column));
        const float2 x0 = unpack_f16(x.x), x1 = unpack_f16(x.y), x2 = unpack_f16(x.z), x3 = unpack_f16(x.w);
        float4* const to = reinterpret_cast<float4*>(a.residual + column);
        to[0] = make_float4(x0.x, x0.y, x1.x, x1.y);
        to[1] = make_float4(x2.x, x2.y, x3.x, x3.y);
    }
    if (blockIdx.x > 0) return;
    if (threadIdx.x == 0 && !known) report_fault(a.fault, FAULT_TOKEN, KERNEL_EMBED, a.layer, given);
    if (threadIdx.x == WARP) {  // another warp than the report's
        const int position = __ldcg(a.positions), place = position / PAGE;
        if (position < 0 || place >= a.max_pages) {
            report_fault(a.fault, FAULT_PAGES, KERNEL_EMBED, a.layer, position);
        } else if (__ldcg(a.page_table + place) < 0) {
            const int free = __ldcg(&a.pages->free);
            if (free > 0) {
                a.page_table[place] = __ldcg(a.free_pages + free - 1);
                a.pages->free = free - 1;
            } else {
                report_fault(a.fault, FAULT_PAGES, KERNEL_EMBED, a.layer, position);
            }
        }
    }
}

// normed = rms(x, norm) as halves, of x = residual + pieces of the last layer's down.
//   PRECOND  grid 1, block 512. Arrays 16-byte aligned. residual and pieces may be the predecessor's; norm is a weight.
//   Reads HIDDEN * 4 bytes of the residual and of each piece, writes PADDED * 2.
// Why so: once a token, a few tens of kilobytes from L2. All of a thread's loads are under way together.
extern "C" __global__ void __launch_bounds__(NORM_THREADS, 1) qwen2_norm(const __grid_constant__ Qwen2NormArgs a) {
    __shared__ float scratch[NORM_THREADS / WARP];
    uint2 norm[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (i * NORM_THREADS + int(threadIdx.x)) * 4;
        norm[i] = column < HIDDEN ? __ldg(reinterpret_cast<const uint2*>(a.norm + column)) : make_uint2(0u, 0u);
    }
    pdl_wait();
    pdl_trigger();
    float4 x[VECTORS], piece[VECTORS][DOWN_PIECES];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (i * NORM_THREADS + int(threadIdx.x)) * 4;
        const int pieces = a.pieces != nullptr && column < HIDDEN ? DownPieces::of_row(column) : 0;
        x[i] = column < HIDDEN ? __ldcg(reinterpret_cast<const float4*>(a.residual + column)) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int p = 0; p < DOWN_PIECES; ++p) {
            piece[i][p] = p < pieces ? __ldcg(reinterpret_cast<const float4*>(a.pieces + p * HIDDEN + column))
                                     : make_float4(0, 0, 0, 0);
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int p = 0; p < DOWN_PIECES; ++p) {
            x[i].x += piece[i][p].x;
            x[i].y += piece[i][p].y;
            x[i].z += piece[i][p].z;
            x[i].w += piece[i][p].w;
        }
        squares += x[i].x * x[i].x + x[i].y * x[i].y + (x[i].z * x[i].z + x[i].w * x[i].w);
    }
    squares = block_sum<NORM_THREADS>(squares, scratch);
    const float inverse = rsqrtf(squares * (1.0f / HIDDEN) + EPS);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (i * NORM_THREADS + int(threadIdx.x)) * 4;
        const float2 n0 = unpack_f16(norm[i].x), n1 = unpack_f16(norm[i].y);
        if (column < PADDED) {
            *reinterpret_cast<uint2*>(a.normed + column) =
                make_uint2(pack_f16(x[i].x * inverse * n0.x, x[i].y * inverse * n0.y),
                           pack_f16(x[i].z * inverse * n1.x, x[i].w * inverse * n1.y));
        }
    }
    if (threadIdx.x == 0 && !is_finite(squares)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_NORM, a.layer);
}
