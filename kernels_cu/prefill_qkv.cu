// Prompt processing: q, k and v of a chunk, with per-head norm, RoPE and the KV write.
//
// prefill_rope  the chunk's cosines and sines, once for each RoPE base.
//   PRECOND  grid (ceil(rows * ROTARY / 2 / 256)), block 256.
//   The angle is a double: position * frequency reaches 10^5 radians, where a float has no fraction left. In half turns, as
//   sincospi takes it, no reduction of large arguments is needed.
//   Reads ROTARY * 4 bytes, writes rows * ROTARY * 4.
// prefill_qkv  the projection.
//   PRECOND  grid (heads from first_head on, ceil(rows / 128)), block 256, SMEM bytes of shared memory.
//            slots >= rows, so that no two rows of a chunk share a slot.
//            weights may be read before pdl_wait(); all else is a predecessor's.
//   A block's 128 weight rows are one head, so the norm needs no other block; rows of a query or key head are stored so
//   that the two of a RoPE pair are 8 rows apart in a tile, accumulators of one lane (repack.head_rows).
//   Reads (heads * 128 * HIDDEN) weights once from memory, normed once a head (L2); writes rows * heads * 256 bytes.
#include "abi_prefill.cuh"
#include "common/pdl.cuh"
#include "common/prefill_gemm.cuh"
#include "common/prefill_report.cuh"
#include "common/kv.cuh"
#include "common/reduce.cuh"

constexpr int PAIRS = ROTARY / 2;
static_assert(ROTARY % 16 == 0 && ROTARY <= HEAD_DIM, "RoPE pairs fill whole tiles");
static_assert(HIDDEN % 128 == 0, "whole scale blocks");

extern "C" __global__ void __launch_bounds__(256) prefill_rope(const __grid_constant__ PrefillRopeArgs a) {
    pdl_wait();
    pdl_trigger();
    const int i = int(blockIdx.x * 256 + threadIdx.x);
    if (i >= a.rows * PAIRS) return;
    double sine, cosine;
    sincospi(double(a.start + i / PAIRS) * a.inverse_frequencies[i % PAIRS] * 0.31830988618379067, &sine, &cosine);
    reinterpret_cast<float2*>(a.table)[i] = make_float2(float(cosine), float(sine));
}

constexpr int TOKENS = 128;
using Gemm = PrefillGemm<TOKENS, HIDDEN, FP8_ATTENTION != 0, 128>;
constexpr int OUT_STRIDE = HEAD_DIM + 8;  // halves of a token's staged row: 272 bytes, so that rows rotate over the banks
static_assert(Gemm::SMEM >= TOKENS * OUT_STRIDE * 2 + 4 * TOKENS * 4, "the epilogue reuses the stages");

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1) prefill_qkv(const __grid_constant__ PrefillQkvArgs a) {
    extern __shared__ __align__(128) char shared[];
    const int head = a.first_head + int(blockIdx.x), first = int(blockIdx.y) * TOKENS;
    Gemm gemm;
    gemm.shared = shared;
    gemm.set_a(a.weights + int64_t(head) * GEMM_TILES * Gemm::TILE_BYTES, Gemm::TILE_BYTES, GEMM_TILES);
    gemm.begin_a();
    pdl_wait();
    pdl_trigger();
#pragma unroll
    for (int i = 0; i < Gemm::B_ROWS; ++i) {
        const int row = first + Gemm::b_row(i);
        gemm.set_b(i, a.normed + int64_t(min_int(row, a.rows - 1)) * HIDDEN, row < a.rows);
    }
    gemm.begin_b();
    const float* head_scales = a.scales + head * (HIDDEN / 128);
    gemm.run([&](int, int block) {
        const float s = head_scales[block];
        return make_float2(s, s);
    });

    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    f16* staged = reinterpret_cast<f16*>(shared);
    float* squares = reinterpret_cast<float*>(shared + TOKENS * OUT_STRIDE * 2);  // [4 warps over the rows][TOKENS]
    const bool is_value = head >= Q_HEADS + KV_HEADS;
    if (!is_value) {
        // Each warp has 32 of a head's 128 rows: a lane's sums, then its 8 lanes g, then the 4 warps through shared memory.
#pragma unroll
        for (int n = 0; n < Gemm::N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float square = 0.0f;
#pragma unroll
                for (int m = 0; m < Gemm::M; ++m)
                    square += gemm.sum[m][n][j] * gemm.sum[m][n][j] + gemm.sum[m][n][j + 2] * gemm.sum[m][n][j + 2];
#pragma unroll
                for (int offset = 4; offset < WARP; offset *= 2) square += __shfl_xor_sync(0xffffffffu, square, offset);
                if (g == 0) squares[Gemm::warp_m() * TOKENS + Gemm::first_token() + n * 8 + 2 * t + j] = square;
            }
        __syncthreads();  // all four parts of every token's sum are there
    }
    const float* weight = head < Q_HEADS ? a.q_norm : a.k_norm;
#pragma unroll
    for (int m = 0; m < Gemm::M; ++m) {
        const int tile = Gemm::first_tile() + m;
        const bool rotated = !is_value && tile < ROTARY / 16;
        const int low = rotated ? tile * 8 + g : tile * 16 + g;             // the dim of row g of the tile
        const int high = rotated ? PAIRS + tile * 8 + g : tile * 16 + 8 + g;  // and of row g + 8
        const float w_low = is_value ? 1.0f : weight[low], w_high = is_value ? 1.0f : weight[high];
#pragma unroll
        for (int n = 0; n < Gemm::N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int token = Gemm::first_token() + n * 8 + 2 * t + j;
                float x = gemm.sum[m][n][j], y = gemm.sum[m][n][j + 2];
                if (!is_value) {
                    const float total = (squares[token] + squares[TOKENS + token]) +
                                        (squares[2 * TOKENS + token] + squares[3 * TOKENS + token]);
                    const float inverse = rsqrtf(total * (1.0f / HEAD_DIM) + EPS);
                    x *= inverse * w_low;
                    y *= inverse * w_high;
                    if (rotated && first + token < a.rows) {
                        const float2 turn =
                            reinterpret_cast<const float2*>(a.rope)[(first + token) * PAIRS + tile * 8 + g];
                        const float x0 = x;
                        x = x0 * turn.x - y * turn.y;
                        y = y * turn.x + x0 * turn.y;
                    }
                }
                staged[token * OUT_STRIDE + low] = float_to_f16(x);
                staged[token * OUT_STRIDE + high] = float_to_f16(y);
            }
    }
    __syncthreads();  // whole token rows, which are written out in pieces of 16 bytes

    const int kv_head = (head - Q_HEADS) % KV_HEADS;
    f16* cache = is_value ? a.v_cache : a.k_cache;
    bool finite = true;
    for (int i = int(threadIdx.x); i < TOKENS * (HEAD_DIM / 8); i += GEMM_THREADS) {
        const int token = i / (HEAD_DIM / 8), piece = i % (HEAD_DIM / 8), row = first + token;
        if (row >= a.rows) break;  // tokens ascend with i
        const uint4 value = *reinterpret_cast<const uint4*>(staged + token * OUT_STRIDE + piece * 8);
        // an exponent of all ones in any of the eight halves
        const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
            finite = finite && (words[w] & 0x7c00u) != 0x7c00u && (words[w] & 0x7c000000u) != 0x7c000000u;
        f16* out;
        if (head < Q_HEADS)
            out = a.q + (int64_t(row) * Q_HEADS + head) * HEAD_DIM + piece * 8;
        else
            out = cache + int64_t(kv_head) * a.slots * HEAD_DIM +
                  kv_offset((a.start + row - a.first_position) % a.slots, piece * 8);
        *reinterpret_cast<uint4*>(out) = value;
    }
    report_block(finite, a.fault, a.layer);
}
