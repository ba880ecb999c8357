// Prompt processing of Qwen2 models: residual += scale * in W, the O projection and down.
//
// PRECOND  see common/int4_gemm.cuh; constants OUT_ROWS, K, STAGES. The residual is a predecessor's and written in place:
//          each of its elements belongs to one lane.
// Reads OUT_ROWS * K * 0.516 bytes of weights, rows * K halves (once a block of 128 weight rows, from L2); reads and writes
// rows * OUT_ROWS floats, whole 32-byte sectors.
#include "common/int4_gemm.cuh"

using Gemm = Int4Gemm<0>;

struct AddToResidual {
    const Gemm& gemm;
    float* residual;
    float scale;
    bool finite = true;

    template <int COUNT>
    __device__ __forceinline__ void operator()(const Gemm::Place& p, const float (&sum)[COUNT]) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        const int row = p.m * BLOCK_ROWS + Gemm::first_row() + g;
        if (row >= OUT_ROWS) return;  // a whole warp's rows
        constexpr int STEP = COUNT < 32 ? COUNT : 32;  // elements whose loads are under way together
#pragma unroll
        for (int first = 0; first < COUNT; first += STEP) {
            float old[STEP];
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                const int at = first + i, token = p.n * gemm.width + at / 4 * 8 + 2 * t + at % 2;
                if (token < gemm.rows) old[i] = residual[int64_t(token) * OUT_ROWS + row + at % 4 / 2 * 8];
            }
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                const int at = first + i, token = p.n * gemm.width + at / 4 * 8 + 2 * t + at % 2;
                if (token >= gemm.rows) continue;
                const float value = fmaf(scale, sum[at], old[i]);
                residual[int64_t(token) * OUT_ROWS + row + at % 4 / 2 * 8] = value;
                finite = finite && is_finite(value);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1)
    qwen2_prefill_projection(const __grid_constant__ Qwen2PrefillProjectionArgs a) {
    extern __shared__ __align__(1024) char shared[];
    const Gemm gemm(shared, a.fault, a.layer, a.rows);
    AddToResidual result{gemm, a.residual, a.scale};
    gemm.run(a.weights, a.in, result);
    report_warp(result.finite, a.fault, a.layer);
}
