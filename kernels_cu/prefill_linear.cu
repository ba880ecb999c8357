// Prompt processing: a plain projection of a chunk into FP32: O projection, the draft's eh_proj, lm_head of all rows.
//
// PRECOND  grid (ceil(OUT_ROWS / 128), ceil(rows / 128)), block 256, SMEM bytes of shared memory; constants IN, OUT_ROWS, LINEAR_FP8.
//          weights may be read before pdl_wait(); the input is a predecessor's.
// Blocks of one weight block and all tokens lie far apart in launch order, blocks of one token block close together: a chunk's
// input (12 MB at most) and the weights stay in L2 meanwhile.
// Reads OUT_ROWS * IN weights and rows * IN halves once from memory; writes rows * OUT_ROWS floats, whole 32-byte sectors.
#include "abi_prefill.cuh"
#include "common/pdl.cuh"
#include "common/prefill_gemm.cuh"
#include "common/prefill_report.cuh"

constexpr int TOKENS = 128;
constexpr int TILES = (OUT_ROWS + 15) / 16;
using Gemm = PrefillGemm<TOKENS, IN, LINEAR_FP8 != 0, 128>;

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1)
    prefill_linear(const __grid_constant__ PrefillLinearArgs a) {
    extern __shared__ __align__(128) char shared[];
    const int first_tile = int(blockIdx.x) * GEMM_TILES, first = int(blockIdx.y) * TOKENS;
    Gemm gemm;
    gemm.shared = shared;
    gemm.set_a(a.weights + int64_t(first_tile) * Gemm::TILE_BYTES, Gemm::TILE_BYTES, TILES - first_tile);
    gemm.begin_a();
    pdl_wait();
    pdl_trigger();
#pragma unroll
    for (int i = 0; i < Gemm::B_ROWS; ++i) {
        const int row = first + Gemm::b_row(i);
        gemm.set_b(i, a.in + int64_t(min_int(row, a.rows - 1)) * IN, row < a.rows);
    }
    gemm.begin_b();
    gemm.run([&](int m, int block) {
        const int tile = min_int(first_tile + Gemm::first_tile() + m, TILES - 1);
        const float s = a.scales[tile * (IN / 128) + block];
        return make_float2(s, s);
    });
    float* out = a.out + a.first_column;
    bool finite = true;
    gemm.for_each([&](int row, int token, float value) {
        const int column = first_tile * 16 + row;
        if (first + token < a.rows && column < OUT_ROWS) {
            out[int64_t(first + token) * a.out_stride + column] = value * a.scale;
            finite = finite && is_finite(value);
        }
    });
    report_block(finite, a.fault, a.layer);
}
