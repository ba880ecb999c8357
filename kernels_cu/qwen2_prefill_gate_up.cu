// Prompt processing of Qwen2 models: inner = INNER_SCALE * silu(gate) * up.
//
// PRECOND  see common/int4_gemm.cuh; constants OUT_ROWS (gate and up, in tiles of eight rows of each), K, STAGES.
// A lane has gate and up of the same column. An output tile is 64 columns, a block of the tiles in which down reads its
// input, so its tokens' 128 bytes each are one run in memory: they leave through shared memory by one bulk copy.
// Reads OUT_ROWS * K * 0.516 bytes of weights, rows * K halves (once an output tile, from L2); writes rows * OUT_ROWS bytes.
#include "common/int4_gemm.cuh"

constexpr int STAGED = MAX_WIDTH * ACTIVATION_BLOCK * 2;
using Gemm = Int4Gemm<STAGED>;
static_assert(OUT_ROWS % BLOCK_ROWS == 0, "whole blocks of activations");

struct StoreInner {
    const Gemm& gemm;
    f16* inner;
    bool finite = true;

    template <int COUNT>
    __device__ __forceinline__ void operator()(const Gemm::Place& p, const float (&sum)[COUNT]) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        const int column = Gemm::warp() * 8 + g;  // of the block's 64
        if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        consumers_sync();  // the copy of the tile before has read what is overwritten now
        f16* staged = reinterpret_cast<f16*>(gemm.staged());
#pragma unroll
        for (int n = 0; n < COUNT / 4; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float gate = sum[4 * n + j], up = sum[4 * n + 2 + j];
                const int token = 8 * n + 2 * t + j;
                const f16 value = float_to_f16(gate / (1.0f + __expf(-gate)) * up * INNER_SCALE);
                if (p.n * gemm.width + token < gemm.rows) finite = finite && (value & 0x7c00) != 0x7c00;
                staged[activation_offset(0, 0, token, activation_piece(column)) + activation_half(column)] = value;
            }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy reads through another proxy
        consumers_sync();                                            // and it reads what all have written
        if (threadIdx.x == 0) {
            const int first = p.n * gemm.width, tokens = min_int(gemm.width, gemm.rows - first);
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                             inner + activation_offset(gemm.all_rows, p.m, first, 0)),
                         "r"(shared_address(staged)), "r"(tokens * ACTIVATION_BLOCK * 2)
                         : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1)
    qwen2_prefill_gate_up(const __grid_constant__ Qwen2PrefillGateUpArgs a) {
    extern __shared__ __align__(1024) char shared[];
    const Gemm gemm(shared, a.fault, a.layer, a.rows);
    StoreInner result{gemm, a.inner};
    gemm.run(a.weights, a.normed, result);
    report_warp(result.finite, a.fault, a.layer);
    // Shared memory stays until the last copy is done, and its writes come before the kernel's end.
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
