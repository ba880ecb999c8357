// Prompt processing of Qwen2 models: causal attention of a chunk over the pages, its own included.
//
// PRECOND  block 128, SMEM bytes; constants Q_HEADS, KV_HEADS, HEAD_SIZE. Everything is a predecessor's.
//          grid (ceil(rows / 64), Q_HEADS), or, for few rows, (ceil(rows / 16), Q_HEADS): a block has as many rows of a head.
//          Every position up to the last row's has a page.
// Tiles of 64 keys, four pages, pass through two stages, swizzled so that ldmatrix meets no bank twice. Of 64 rows, a warp has
// 16 and all keys; of 16, all and a quarter of each tile's keys, and the warps' parts are joined at the end: few rows would
// leave most of the chip idle otherwise. Softmax is the running one, in base 2, in FP32. Late rows, which see most keys, start
// first. Keys beyond a block's last row are zeros, whatever lies there.
// Reads q once, K and V once for each block and query head from L2; writes rows * Q_HEADS * HEAD_SIZE halves.
#include "abi_qwen2.cuh"
#include "common/activations.cuh"
#include "common/copy.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/prefill_report.cuh"

constexpr int THREADS = 128;
constexpr int KEYS = 64;  // of a tile
constexpr int STAGES = 2;
constexpr int GROUP = Q_HEADS / KV_HEADS;
constexpr int ROW_BYTES = HEAD_SIZE * 2;
constexpr int PIECES = ROW_BYTES / 16;  // of a row
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
constexpr int SMEM = STAGES * 2 * TILE_BYTES;
constexpr int WIDTH_BLOCKS = Q_HEADS * HEAD_SIZE / ACTIVATION_BLOCK;  // blocks of columns of `attended`
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NOTHING = -1e30f;  // the maximum of no keys: finite, so that differences are no NaN
static_assert(HEAD_SIZE == 64 || HEAD_SIZE == 128, "whole blocks of activations");
static_assert(Q_HEADS % KV_HEADS == 0, "whole groups");

// Copies 16 bytes, or writes 16 zero bytes where `bytes` is 0.
__device__ __forceinline__ void copy_async_16_or_zero(void* shared, const void* global, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

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

__device__ __forceinline__ const char* piece_of(const char* tile, int row, int piece) {
    return tile + row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
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

// The block's copies of K and V. A thread copies the same piece of every (THREADS / PIECES)-th row.
struct Copies {
    static constexpr int STEP = THREADS / PIECES;  // rows between a thread's copies
    static constexpr int EACH = KEYS / STEP;
    const int* page_table;
    const f16* k;  // of page 0, the KV head
    const f16* v;
    int high;                  // the last position that counts
    int pages[KEYS / PAGE];    // of the tile that is fetched next; 0 where none counts

    __device__ __forceinline__ void look_up(int tile) {
#pragma unroll
        for (int i = 0; i < KEYS / PAGE; ++i) {
            const int place = tile * (KEYS / PAGE) + i;
            pages[i] = place * PAGE <= high ? max_int(0, __ldcg(page_table + place)) : 0;
        }
    }
    __device__ __forceinline__ void fetch(int tile, char* stage) const {
        const int piece = threadIdx.x % PIECES;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int row = i * STEP + int(threadIdx.x) / PIECES;
            const int64_t from = (int64_t(pages[i * STEP / PAGE]) * KV_HEADS * PAGE + row % PAGE) * HEAD_SIZE +
                                 page_piece(row, piece) * 8;
            const uint32_t bytes = tile * KEYS + row <= high ? 16 : 0;
            char* to = stage + row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
            copy_async_16_or_zero(to, k + from, bytes);
            copy_async_16_or_zero(to + TILE_BYTES, v + from, bytes);
        }
    }
};
static_assert(PAGE % Copies::STEP == 0, "a thread's copy i is of the same page in all threads");

// The warp's running softmax of 16 rows: lane's rows g and g + 8; out[n]: dims 8 n + 2 t and + 1 of both.
struct Softmax {
    float max0 = NOTHING, max1 = NOTHING;
    float sum0 = 0.0f, sum1 = 0.0f;  // this lane's part
    float out[HEAD_SIZE / 8][4] = {};
};

// Scores of COUNT keys from `key` of the tile on, and their values.
template <int COUNT>
__device__ __forceinline__ void attend(Softmax& state, const uint32_t (&q)[HEAD_SIZE / 16][4], const char* stage, int key,
                                       int position0, int key_position, bool masked, float scale) {
    const int lane = threadIdx.x % WARP, t = lane % 4;
    const float minus_infinity = __int_as_float(0xff800000);
    float s[COUNT / 8][4];
#pragma unroll
    for (int n = 0; n < COUNT / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
#pragma unroll
    for (int kk = 0; kk < HEAD_SIZE / 16; ++kk)
#pragma unroll
        for (int n = 0; n < COUNT / 8; n += 2) {
            // keys 8n .. 8n + 15 as four matrices: (keys, dims) low low, low high, high low, high high
            uint32_t b[4];
            load_matrices(b, piece_of(stage, key + n * 8 + (lane & 7) + (lane & 16) / 2, kk * 2 + (lane >> 3 & 1)));
            mma_f16(s[n], q[kk][0], q[kk][1], q[kk][2], q[kk][3], b[0], b[1]);
            mma_f16(s[n + 1], q[kk][0], q[kk][1], q[kk][2], q[kk][3], b[2], b[3]);
        }
    float top0 = state.max0, top1 = state.max1;
#pragma unroll
    for (int n = 0; n < COUNT / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            s[n][j] *= scale;
            s[n][j + 2] *= scale;
            if (masked) {
                const int position = key_position + n * 8 + 2 * t + j;
                s[n][j] = position <= position0 ? s[n][j] : minus_infinity;
                s[n][j + 2] = position <= position0 + 8 ? s[n][j + 2] : minus_infinity;
            }
            top0 = fmaxf(top0, s[n][j]);
            top1 = fmaxf(top1, s[n][j + 2]);
        }
    top0 = quad_max(top0);
    top1 = quad_max(top1);
    const float shrink0 = exp2_fast(state.max0 - top0), shrink1 = exp2_fast(state.max1 - top1);
    state.max0 = top0;
    state.max1 = top1;
    state.sum0 *= shrink0;
    state.sum1 *= shrink1;
#pragma unroll
    for (int n = 0; n < HEAD_SIZE / 8; ++n) {
        state.out[n][0] *= shrink0;
        state.out[n][1] *= shrink0;
        state.out[n][2] *= shrink1;
        state.out[n][3] *= shrink1;
    }
#pragma unroll
    for (int n = 0; n < COUNT / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            s[n][j] = exp2_fast(s[n][j] - top0);
            s[n][j + 2] = exp2_fast(s[n][j + 2] - top1);
            state.sum0 += s[n][j];
            state.sum1 += s[n][j + 2];
        }
#pragma unroll
    for (int kk = 0; kk < COUNT / 16; ++kk) {
        // The accumulators of two groups of 8 keys are the A fragment of 16 keys.
        const uint32_t p0 = pack_f16(s[2 * kk][0], s[2 * kk][1]), p1 = pack_f16(s[2 * kk][2], s[2 * kk][3]);
        const uint32_t p2 = pack_f16(s[2 * kk + 1][0], s[2 * kk + 1][1]);
        const uint32_t p3 = pack_f16(s[2 * kk + 1][2], s[2 * kk + 1][3]);
#pragma unroll
        for (int n = 0; n < HEAD_SIZE / 8; n += 2) {
            // (keys, dims) low low, high low, low high, high high
            uint32_t b[4];
            load_matrices_transposed(b, piece_of(stage + TILE_BYTES, key + kk * 16 + (lane & 15), n + (lane >> 4)));
            mma_f16(state.out[n], p0, p1, p2, p3, b[0], b[1]);
            mma_f16(state.out[n + 1], p0, p1, p2, p3, b[2], b[3]);
        }
    }
}

// ROWS_OF_BLOCK: 64, or 16 that all warps have.
template <int ROWS_OF_BLOCK>
__device__ __forceinline__ bool attend_block(const Qwen2PrefillAttentionArgs& a, char* shared) {
    constexpr bool SPLIT = ROWS_OF_BLOCK == 16;
    constexpr int WARP_KEYS = SPLIT ? KEYS / 4 : KEYS;
    const int head = int(blockIdx.y), kv_head = head / GROUP;
    const int first = (int(gridDim.x) - 1 - int(blockIdx.x)) * ROWS_OF_BLOCK;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    if (first >= a.rows) return true;

    const int low = a.start + first, high = a.start + min_int(first + ROWS_OF_BLOCK, a.rows) - 1;
    const int tiles = high / KEYS + 1;
    const int64_t of_head = int64_t(kv_head) * PAGE * HEAD_SIZE;
    Copies copies{a.page_table, a.k_pages + of_head, a.v_pages + of_head, high, {}};
    copies.look_up(0);
    copies.fetch(0, shared);
    copy_async_commit();
    copies.look_up(1);

    // The warp's queries as A fragments. Dead rows are zero.
    const int row0 = first + (SPLIT ? 0 : warp * 16) + g, row1 = row0 + 8;
    const f16* q_head = a.q + int64_t(head) * HEAD_SIZE;
    uint32_t q[HEAD_SIZE / 16][4];
#pragma unroll
    for (int kk = 0; kk < HEAD_SIZE / 16; ++kk)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int dim = kk * 16 + half * 8 + 2 * t;
            q[kk][half * 2] = q[kk][half * 2 + 1] = 0;
            if (row0 < a.rows)
                q[kk][half * 2] = *reinterpret_cast<const uint32_t*>(q_head + int64_t(row0) * Q_HEADS * HEAD_SIZE + dim);
            if (row1 < a.rows)
                q[kk][half * 2 + 1] =
                    *reinterpret_cast<const uint32_t*>(q_head + int64_t(row1) * Q_HEADS * HEAD_SIZE + dim);
        }
    const float scale = (HEAD_SIZE == 64 ? 0.125f : 0.08838834764831845f) * LOG2_E;
    const int key = SPLIT ? warp * WARP_KEYS : 0;  // the warp's first, in a tile
    Softmax state;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        copy_async_wait<0>();
        // Every thread's copies of this tile are there, and every warp is done with the stage that is filled next.
        __syncthreads();
        if (tile + 1 < tiles) {
            copies.fetch(tile + 1, shared + (tile + 1) % STAGES * (2 * TILE_BYTES));
            copies.look_up(tile + 2);
        }
        copy_async_commit();
        const int key_position = tile * KEYS + key;
        attend<WARP_KEYS>(state, q, shared + tile % STAGES * (2 * TILE_BYTES), key, a.start + row0, key_position,
                          tile * KEYS + KEYS - 1 > low, scale);
    }
    float sum0 = quad_sum(state.sum0), sum1 = quad_sum(state.sum1);

    const int all_rows = activation_rows(a.rows), first_block = head * (HEAD_SIZE / ACTIVATION_BLOCK);
    bool finite = true;
    if constexpr (!SPLIT) {
        const float inverse0 = 1.0f / sum0, inverse1 = 1.0f / sum1;
#pragma unroll
        for (int b = 0; b < HEAD_SIZE / 32; ++b) {  // a piece is dims 32 b + 8 i + 2 t and + 1
            uint32_t words0[4], words1[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&x)[4] = state.out[4 * b + i];
                words0[i] = pack_f16(x[0] * inverse0, x[1] * inverse0);
                words1[i] = pack_f16(x[2] * inverse1, x[3] * inverse1);
                finite = finite && (row0 >= a.rows || (is_finite(x[0] * inverse0) && is_finite(x[1] * inverse0)));
                finite = finite && (row1 >= a.rows || (is_finite(x[2] * inverse1) && is_finite(x[3] * inverse1)));
            }
            const int block = first_block + b / 2, piece = b % 2 * 4 + t;
            if (row0 < a.rows)
                *reinterpret_cast<uint4*>(a.attended + activation_offset(all_rows, block, row0, piece)) =
                    make_uint4(words0[0], words0[1], words0[2], words0[3]);
            if (row1 < a.rows)
                *reinterpret_cast<uint4*>(a.attended + activation_offset(all_rows, block, row1, piece)) =
                    make_uint4(words1[0], words1[1], words1[2], words1[3]);
        }
    } else {
        // The warps' parts: [4][16 rows][HEAD_SIZE] sums, then maxima and sums of weights.
        constexpr int STRIDE = HEAD_SIZE + 4;  // floats of a row, so that rows rotate over the banks
        static_assert((4 * 16 * STRIDE + 2 * 4 * 16) * 4 <= SMEM, "the parts take the stages' place");
        float* parts = reinterpret_cast<float*>(shared);
        float* maxima = parts + 4 * 16 * STRIDE;
        float* sums = maxima + 4 * 16;
        copy_async_wait<0>();
        __syncthreads();  // all warps are done with the stages
#pragma unroll
        for (int n = 0; n < HEAD_SIZE / 8; ++n) {
            float* at = parts + (warp * 16 + g) * STRIDE + n * 8 + 2 * t;
            *reinterpret_cast<float2*>(at) = make_float2(state.out[n][0], state.out[n][1]);
            *reinterpret_cast<float2*>(at + 8 * STRIDE) = make_float2(state.out[n][2], state.out[n][3]);
        }
        if (t == 0) {
            maxima[warp * 16 + g] = state.max0, maxima[warp * 16 + g + 8] = state.max1;
            sums[warp * 16 + g] = sum0, sums[warp * 16 + g + 8] = sum1;
        }
        __syncthreads();  // all parts are there
        for (int i = int(threadIdx.x); i < 16 * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES;
            if (first + row >= a.rows) continue;
            float top = NOTHING, total = 0.0f, weights[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) top = fmaxf(top, maxima[w * 16 + row]);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                weights[w] = exp2_fast(maxima[w * 16 + row] - top);
                total += weights[w] * sums[w * 16 + row];
            }
            const float inverse = 1.0f / total;
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* at = parts + row * STRIDE + piece / 4 * 32 + j * 8 + piece % 4 * 2;
                float2 x = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const float2 part = *reinterpret_cast<const float2*>(at + w * 16 * STRIDE);
                    x.x += weights[w] * part.x;
                    x.y += weights[w] * part.y;
                }
                words[j] = pack_f16(x.x * inverse, x.y * inverse);
                finite = finite && is_finite(x.x * inverse) && is_finite(x.y * inverse);
            }
            *reinterpret_cast<uint4*>(
                a.attended + activation_offset(all_rows, first_block + piece / 8, first + row, piece % 8)) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    if (WIDTH_BLOCKS % 2 != 0 && head == Q_HEADS - 1) {
        // Columns up to the next 128: a block of zeros.
        for (int i = int(threadIdx.x); i < ROWS_OF_BLOCK * 8; i += THREADS)
            if (first + i / 8 < a.rows)
                *reinterpret_cast<uint4*>(a.attended + activation_offset(all_rows, WIDTH_BLOCKS, first + i / 8, i % 8)) =
                    make_uint4(0, 0, 0, 0);
    }
    return finite;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    qwen2_prefill_attention(const __grid_constant__ Qwen2PrefillAttentionArgs a) {
    extern __shared__ __align__(128) char shared[];  // [STAGES][K tile, V tile]
    pdl_wait();
    pdl_trigger();
    const bool finite = int(gridDim.x) * 16 >= a.rows ? attend_block<16>(a, shared) : attend_block<64>(a, shared);
    report_block(finite, a.fault, a.layer);
}
