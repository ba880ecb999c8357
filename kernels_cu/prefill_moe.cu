// Prompt processing: the experts of a chunk, grouped by expert (prefill_route.cu makes the groups). A dense layer is the
// same with DENSE groups as experts: every row chose each of them with weight 1.
//
// prefill_gate_up  gate and up of a tile of 64 (row, choice) pairs of one expert, SiLU, product.
//   PRECOND  grid (ceil(INNER / 64), tiles at most), block 256, SMEM bytes. Everything is a predecessor's: the expert is.
//   A block's 8 weight tiles are 8 units of 8 gate and 8 up rows: a lane's accumulators hold gate and up of a column.
//   Reads each chosen expert's gate and up once (and again for each further tile, from L2), rows * TOP_K * HIDDEN halves from
//   L2; writes rows * TOP_K * INNER halves.
// prefill_down  the down projection of a tile.
//   PRECOND  grid (ceil(HIDDEN / 128), tiles at most), block 256, SMEM bytes.
//   Reads the experts' down once, inner from L2; writes rows * TOP_K * HIDDEN floats: each pair's row apart, so that the sum
//   over a row's experts has a fixed order. Floats, since no norm bounds them.
// prefill_combine  that sum.
//   PRECOND  grid (rows), block 256. Reads rows * TOP_K * HIDDEN floats, writes rows * HIDDEN.
#include "abi_prefill.cuh"
#include "common/experts.cuh"
#include "common/pdl.cuh"
#include "common/prefill_gemm.cuh"
#include "common/prefill_report.cuh"

constexpr int TOKENS = 64;
constexpr bool FP8 = FP8_EXPERTS != 0;
static_assert(INNER % 8 == 0, "whole units of gate/up");
static_assert(HIDDEN % 128 == 0, "whole scale blocks, and whole blocks of down");

using GateUp = PrefillGemm<TOKENS, HIDDEN, FP8, 128>;
constexpr int UNIT_BYTES = GateUp::TILE_BYTES + (FP8 ? (HIDDEN / 128 * 8 + 127) / 128 * 128 : 0);
constexpr int INNER_STRIDE = 64 + 8;  // halves of a token's staged row
static_assert(GateUp::SMEM >= TOKENS * INNER_STRIDE * 2, "the epilogue reuses the stages");

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 2)
    prefill_gate_up(const __grid_constant__ PrefillGateUpArgs a) {
    extern __shared__ __align__(128) char shared[];
    pdl_wait();
    pdl_trigger();
    if (int(blockIdx.y) >= *a.tile_count) return;
    const PrefillTile tile = a.tiles[blockIdx.y];
    const int first_unit = int(blockIdx.x) * GEMM_TILES, units_here = min_int(GEMM_TILES, INNER / 8 - first_unit);
    const uint8_t* units = a.weights + (int64_t(tile.expert) * (INNER / 8) + first_unit) * UNIT_BYTES;
    GateUp gemm;
    gemm.shared = shared;
    gemm.set_a(units, UNIT_BYTES, units_here);
#pragma unroll
    for (int i = 0; i < GateUp::B_ROWS; ++i) {
        const int token = GateUp::b_row(i);
        const int row = a.pairs[tile.first + min_int(token, tile.count - 1)] / TOP_K;
        gemm.set_b(i, a.normed + int64_t(row) * HIDDEN, token < tile.count);
    }
    gemm.begin_a();
    gemm.begin_b();
    gemm.run([&](int m, int block) {
        const int unit_number = min_int(GateUp::first_tile() + m, units_here - 1);
        const uint8_t* unit = units + int64_t(unit_number) * UNIT_BYTES + GateUp::TILE_BYTES;
        return reinterpret_cast<const float2*>(unit)[block];
    });
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    f16* staged = reinterpret_cast<f16*>(shared);
#pragma unroll
    for (int m = 0; m < GateUp::M; ++m)
#pragma unroll
        for (int n = 0; n < GateUp::N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float gate = gemm.sum[m][n][j], up = gemm.sum[m][n][j + 2];
                const float value = gate / (1.0f + __expf(-gate)) * up * INNER_SCALE;
                staged[(GateUp::first_token() + n * 8 + 2 * t + j) * INNER_STRIDE + (GateUp::first_tile() + m) * 8 + g] =
                    float_to_f16(value);
            }
    __syncthreads();  // whole token rows, which are written out in pieces of 16 bytes
    bool finite = true;
    for (int i = int(threadIdx.x); i < tile.count * 8; i += GEMM_THREADS) {
        if (i % 8 >= units_here) continue;
        const uint4 value = *reinterpret_cast<const uint4*>(staged + i / 8 * INNER_STRIDE + i % 8 * 8);
        const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
            finite = finite && (words[w] & 0x7c00u) != 0x7c00u && (words[w] & 0x7c000000u) != 0x7c000000u;
        *reinterpret_cast<uint4*>(a.inner + int64_t(tile.first + i / 8) * INNER + int(blockIdx.x) * 64 + i % 8 * 8) = value;
    }
    report_block(finite, a.fault, a.layer);
}

using Down = PrefillGemm<TOKENS, INNER, FP8, DOWN_SCALE_K>;

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 2) prefill_down(const __grid_constant__ PrefillDownArgs a) {
    extern __shared__ __align__(128) char shared[];
    pdl_wait();
    pdl_trigger();
    if (int(blockIdx.y) >= *a.tile_count) return;
    const PrefillTile tile = a.tiles[blockIdx.y];
    const int first_tile = int(blockIdx.x) * GEMM_TILES;
    const int64_t weight_tile = int64_t(tile.expert) * (HIDDEN / 16) + first_tile;
    Down gemm;
    gemm.shared = shared;
    gemm.set_a(a.weights + weight_tile * Down::TILE_BYTES, Down::TILE_BYTES, GEMM_TILES);
#pragma unroll
    for (int i = 0; i < Down::B_ROWS; ++i) {
        const int token = Down::b_row(i);
        gemm.set_b(i, a.inner + int64_t(tile.first + min_int(token, tile.count - 1)) * INNER, token < tile.count);
    }
    gemm.begin_a();
    gemm.begin_b();
    gemm.run([&](int m, int block) {
        const float s = a.scales[(weight_tile + Down::first_tile() + m) * (INNER / DOWN_SCALE_K) + block];
        return make_float2(s, s);
    });
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < Down::N; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = Down::first_token() + n * 8 + 2 * t + j;
            if (token >= tile.count) continue;
            float* out = a.out + int64_t(a.pairs[tile.first + token]) * HIDDEN + first_tile * 16;
#pragma unroll
            for (int m = 0; m < Down::M; ++m) {
                out[(Down::first_tile() + m) * 16 + g] = gemm.sum[m][n][j] * (1.0f / INNER_SCALE);
                out[(Down::first_tile() + m) * 16 + 8 + g] = gemm.sum[m][n][j + 2] * (1.0f / INNER_SCALE);
            }
        }
}

extern "C" __global__ void __launch_bounds__(256) prefill_combine(const __grid_constant__ PrefillCombineArgs a) {
    pdl_wait();
    pdl_trigger();
    const int row = int(blockIdx.x);
    if (row >= a.rows) return;
    const float4* out = reinterpret_cast<const float4*>(a.out + int64_t(row) * TOP_K * HIDDEN);
    float4* y = reinterpret_cast<float4*>(a.y + int64_t(row) * HIDDEN);
    bool finite = true;
    for (int i = int(threadIdx.x); i < HIDDEN / 4; i += 256) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            const float w = a.expert_weights == nullptr ? 1.0f : a.expert_weights[row * TOP_K + k];
            const float4 x = out[k * (HIDDEN / 4) + i];
            sum.x += w * x.x, sum.y += w * x.y, sum.z += w * x.z, sum.w += w * x.w;
        }
        y[i] = sum;
        finite = finite && is_finite(sum.x) && is_finite(sum.y) && is_finite(sum.z) && is_finite(sum.w);
    }
    report_block(finite, a.fault, a.layer);
}
