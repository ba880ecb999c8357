// Prompt processing of Qwen2 models: q, k and v of a chunk, with bias, RoPE and the way into the pages.
//
// PRECOND  see common/int4_gemm.cuh; constants OUT_ROWS (all heads' rows), K, STAGES, Q_HEADS, KV_HEADS, HEAD_SIZE. The table
//          of RoPE and the pages' are a predecessor's. Positions without a page are reported by the embedding, and not written.
// An output tile's 128 weight rows are one head of 128 or two of 64. A warp has rows i and i + HEAD_SIZE / 2 of a head, so both
// of a RoPE pair are one lane's. Token rows leave through shared memory, in pieces of 16 bytes.
// Reads OUT_ROWS * K * 0.516 bytes of weights, rows * K halves (once an output tile, from L2); writes rows * OUT_ROWS halves.
#include "common/int4_gemm.cuh"

constexpr int PAIRS = HEAD_SIZE / 2;
constexpr int STAGED_STRIDE = BLOCK_ROWS + 8;  // halves of a token's staged row: 272 bytes, so that rows rotate over the banks
constexpr int STAGED_TOKENS = 64;              // at once
constexpr int PIECES = BLOCK_ROWS / 8;         // of 16 bytes, of a token's staged row
static_assert(HEAD_SIZE == 64 || HEAD_SIZE == 128, "heads fill a block's rows");
static_assert(OUT_ROWS == (Q_HEADS + 2 * KV_HEADS) * HEAD_SIZE, "q, k and v are one matrix");

using Gemm = Int4Gemm<STAGED_TOKENS * STAGED_STRIDE * 2, PAIRS>;

struct StoreHeads {
    const Gemm& gemm;
    const Qwen2PrefillQkvArgs& a;
    bool finite = true;

    template <int COUNT>
    __device__ __forceinline__ void operator()(const Gemm::Place& p, const float (&sum)[COUNT]) {
        const int first = p.n * gemm.width, tokens = min_int(gemm.width, gemm.rows - first);
        constexpr int PART = COUNT < 32 ? COUNT : 32;
#pragma unroll
        for (int i = 0; i < COUNT / PART; ++i) {
            float part[PART];
#pragma unroll
            for (int j = 0; j < PART; ++j) part[j] = sum[i * PART + j];
            store(p, part, first + i * STAGED_TOKENS, min_int(STAGED_TOKENS, tokens - i * STAGED_TOKENS));
        }
    }

    // Tokens `first` and the following ones of the chunk; none where `tokens` is not positive.
    template <int COUNT>
    __device__ __forceinline__ void store(const Gemm::Place& p, const float (&sum)[COUNT], int first, int tokens) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        const int low = Gemm::first_row() + g, high = low + PAIRS;  // of the block's rows
        const int row = p.m * BLOCK_ROWS + low, pair = row % HEAD_SIZE;
        f16* staged = reinterpret_cast<f16*>(gemm.staged());
        consumers_sync();  // what was staged before has been stored
        if (row < OUT_ROWS) {
            const float bias_low = f16_to_float(a.bias[row]), bias_high = f16_to_float(a.bias[row + PAIRS]);
            const bool rotated = row < (Q_HEADS + KV_HEADS) * HEAD_SIZE;
#pragma unroll
            for (int n = 0; n < COUNT / 4; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int token = 8 * n + 2 * t + j;
                    float x = sum[4 * n + j] + bias_low, y = sum[4 * n + 2 + j] + bias_high;
                    if (rotated && token < tokens) {
                        const float2 turn = reinterpret_cast<const float2*>(a.rope)[(first + token) * PAIRS + pair];
                        const float x0 = x;
                        x = x0 * turn.x - y * turn.y;
                        y = y * turn.x + x0 * turn.y;
                    }
                    staged[token * STAGED_STRIDE + low] = float_to_f16(x);
                    staged[token * STAGED_STRIDE + high] = float_to_f16(y);
                }
        }
        consumers_sync();  // whole token rows
        for (int i = int(threadIdx.x); i < tokens * PIECES; i += CONSUMERS) {
            const int token = i / PIECES, piece = i % PIECES;
            const int column = p.m * BLOCK_ROWS + piece * 8, head = column / HEAD_SIZE, dim = column % HEAD_SIZE;
            if (column >= OUT_ROWS) continue;
            const uint4 value = *reinterpret_cast<const uint4*>(staged + token * STAGED_STRIDE + piece * 8);
            const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
            for (int w = 0; w < 4; ++w)  // an exponent of all ones in either half
                finite = finite && (words[w] & 0x7c00u) != 0x7c00u && (words[w] & 0x7c000000u) != 0x7c000000u;
            f16* out;
            if (head < Q_HEADS) {
                out = a.q + (int64_t(first + token) * Q_HEADS + head) * HEAD_SIZE + dim;
            } else {
                const int position = a.start + first + token, page = __ldcg(a.page_table + position / PAGE);
                if (page < 0) continue;
                const int kv_head = (head - Q_HEADS) % KV_HEADS;
                out = (head < Q_HEADS + KV_HEADS ? a.k_pages : a.v_pages) +
                      ((int64_t(page) * KV_HEADS + kv_head) * PAGE + position % PAGE) * HEAD_SIZE +
                      page_piece(position, dim / 8) * 8;
            }
            *reinterpret_cast<uint4*>(out) = value;
        }
    }
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1)
    qwen2_prefill_qkv(const __grid_constant__ Qwen2PrefillQkvArgs a) {
    extern __shared__ __align__(1024) char shared[];
    const Gemm gemm(shared, a.fault, a.layer, a.rows);
    StoreHeads result{gemm, a};
    gemm.run(a.weights, a.normed, result);
    report_warp(result.finite, a.fault, a.layer);
}
