// The matrix product of prompt processing: out[token][weight row], weights in the decode layout (common/mma.cuh).
//
// A block computes 128 weight rows (8 tiles of 16) x TOKENS tokens with 8 warps, 4 over the rows and 2 over the
// tokens, so a warp has two weight tiles and TOKENS / 2 tokens. K goes in steps of 64 (fewer where a scale block or K is
// no multiple of that) through four stages of shared
// memory, filled by 16-byte asynchronous copies. A weight chunk lies in shared memory as it does in device memory: a
// fragment is one 128-bit load a lane, without bank conflicts, then exact E4M3 -> half conversions. A token's row of
// a step is 128 bytes padded to 160: the 8-byte B fragments of 4 tokens x 4 lanes then cover all 32 banks once.
//
// FP8 block scales multiply FP32 sums: a second set of accumulators holds one scale block of K and is added, scaled, at
// its end. Scaling the halves instead would round every weight.
//
// mma.sync rather than wgmma: A has to pass through registers for the conversion anyway, and the whole prompt pass
// needs less than a tenth of the chip's tensor throughput.
#pragma once
#include "common/copy.cuh"
#include "common/mma.cuh"

constexpr int GEMM_THREADS = 256;
constexpr int GEMM_ROWS = 128;  // weight rows of a block
constexpr int GEMM_TILES = GEMM_ROWS / 16;
constexpr int GEMM_STAGES = 4;

// Copies 16 bytes, or writes 16 zero bytes where `bytes` is 0: dead tokens are finite, and nothing past the end is read.
__device__ __forceinline__ void copy_async_16_or_zero(void* shared, const void* global, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

// d = a b, without accumulators to clear.
__device__ __forceinline__ void mma_f16_first(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

// TOKENS: 64 or 128; FP8: E4M3 weights with a scale for every SCALE_K of K, else halves. K: multiple of 32 or 16.
template <int TOKENS, int K, bool FP8, int SCALE_K>
struct PrefillGemm {
    static_assert(TOKENS == 64 || TOKENS == 128, "two warps over the tokens, at least four n tiles each");
    static constexpr int CHUNK_K = FP8 ? 32 : 16;
    static constexpr int SCALED_K = FP8 ? SCALE_K : K;
    static constexpr int STEP_K = SCALED_K % 64 == 0 ? 64 : SCALED_K % 32 == 0 ? 32 : 16;
    static_assert(K % SCALED_K == 0 && STEP_K % CHUNK_K == 0, "whole chunks and scale blocks");
    static constexpr int STEP_CHUNKS = STEP_K / CHUNK_K;
    static constexpr int B_STRIDE = STEP_K * 2 + 32;  // bytes of a token's row in a stage
    static constexpr int B_PIECES = STEP_K / 8;       // of 16 bytes, of a token's row
    static constexpr int A_TILE = STEP_CHUNKS * 512;  // bytes of a tile's chunks in a step
    static constexpr int A_STAGE = GEMM_TILES * A_TILE;
    static constexpr int STAGE = A_STAGE + TOKENS * B_STRIDE;
    static constexpr int SMEM = GEMM_STAGES * STAGE;
    static constexpr int TILE_BYTES = K / CHUNK_K * 512;  // of one weight tile in device memory, without scales
    static constexpr int STEPS = K / STEP_K;
    static constexpr int M = 2;            // weight tiles of a warp
    static constexpr int N = TOKENS / 16;  // groups of 8 tokens of a warp
    static constexpr int BLOCK_STEPS = FP8 ? SCALED_K / STEP_K : 1;
    static constexpr int A_COPIES = A_STAGE / 16 / GEMM_THREADS;  // pieces that a thread copies, each step
    static constexpr int B_ROWS = (TOKENS * B_PIECES + GEMM_THREADS - 1) / GEMM_THREADS;

    float sum[M][N][4];  // rows g, g, g + 8, g + 8 of tile `first_tile() + m`; tokens 2t, 2t + 1, 2t, 2t + 1

    char* shared;
    const uint8_t* a[A_COPIES];  // this thread's pieces of the weight tiles, at K = 0
    const f16* b[B_ROWS];        // this thread's pieces of its token rows, at K = 0
    uint32_t b_bytes[B_ROWS];    // 16, or 0 for a dead token

    static __device__ __forceinline__ int warp_m() { return int(threadIdx.x) / WARP % 4; }
    static __device__ __forceinline__ int warp_n() { return int(threadIdx.x) / WARP / 4; }
    static __device__ __forceinline__ int first_tile() { return warp_m() * M; }
    static __device__ __forceinline__ int first_token() { return warp_n() * (TOKENS / 2); }
    // Token rows that this thread copies a piece of; one from TOKENS on is nobody's.
    static __device__ __forceinline__ int b_row(int i) {
        return int(threadIdx.x) / B_PIECES + GEMM_THREADS / B_PIECES * i;
    }

    // The block's tiles begin at `tiles`, `stride` bytes apart; those beyond the `count` that exist repeat the last.
    __device__ __forceinline__ void set_a(const uint8_t* tiles, int64_t stride, int count) {
#pragma unroll
        for (int j = 0; j < A_COPIES; ++j) {
            const int i = int(threadIdx.x) + j * GEMM_THREADS;
            a[j] = tiles + min_int(i / (A_TILE / 16), count - 1) * stride + i % (A_TILE / 16) * 16;
        }
    }

    // Token `b_row(i)` of the block is `row` (any readable row where `alive` is false).
    __device__ __forceinline__ void set_b(int i, const f16* row, bool alive) {
        b[i] = row + threadIdx.x % B_PIECES * 8;
        b_bytes[i] = alive ? 16 : 0;
    }

    __device__ __forceinline__ void load_a(int step) {
        char* stage = shared + step % GEMM_STAGES * STAGE;
#pragma unroll
        for (int j = 0; j < A_COPIES; ++j)
            copy_async_16(stage + (int(threadIdx.x) + j * GEMM_THREADS) * 16, a[j] + step * A_TILE);
    }

    __device__ __forceinline__ void load_b(int step) {
        char* stage = shared + step % GEMM_STAGES * STAGE + A_STAGE;
#pragma unroll
        for (int i = 0; i < B_ROWS; ++i)
            if (TOKENS * B_PIECES % GEMM_THREADS == 0 || b_row(i) < TOKENS)
                copy_async_16_or_zero(stage + b_row(i) * B_STRIDE + threadIdx.x % B_PIECES * 16, b[i] + step * STEP_K,
                                      b_bytes[i]);
    }

    // The stages before the first product. Weights may come before pdl_wait(), tokens after it; one commit a step.
    __device__ __forceinline__ void begin_a() {
#pragma unroll
        for (int step = 0; step < GEMM_STAGES - 1; ++step)
            if (step < STEPS) load_a(step);
    }
    __device__ __forceinline__ void begin_b() {
#pragma unroll
        for (int step = 0; step < GEMM_STAGES - 1; ++step) {
            if (step < STEPS) load_b(step);
            copy_async_commit();
        }
    }

    // One step's products into `part`; `first` overwrites it.
    __device__ __forceinline__ void step_products(int step, float (&part)[M][N][4], bool first) {
        const char* stage = shared + step % GEMM_STAGES * STAGE;
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        const char* a_lane = stage + first_tile() * A_TILE + lane * 16;
        const char* b_lane = stage + A_STAGE + (first_token() + g) * B_STRIDE + t * 8;
#pragma unroll
        for (int c = 0; c < STEP_CHUNKS; ++c) {
            uint4 w[M];
#pragma unroll
            for (int m = 0; m < M; ++m) w[m] = *reinterpret_cast<const uint4*>(a_lane + m * A_TILE + c * 512);
            if constexpr (FP8) {
                uint32_t lo[M][4], hi[M][4];
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    lo[m][0] = e4m3_to_f16x2(uint16_t(w[m].x)), lo[m][1] = e4m3_to_f16x2(uint16_t(w[m].y));
                    lo[m][2] = e4m3_to_f16x2(uint16_t(w[m].x >> 16)), lo[m][3] = e4m3_to_f16x2(uint16_t(w[m].y >> 16));
                    hi[m][0] = e4m3_to_f16x2(uint16_t(w[m].z)), hi[m][1] = e4m3_to_f16x2(uint16_t(w[m].w));
                    hi[m][2] = e4m3_to_f16x2(uint16_t(w[m].z >> 16)), hi[m][3] = e4m3_to_f16x2(uint16_t(w[m].w >> 16));
                }
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const char* row = b_lane + n * 8 * B_STRIDE + c * 64;
                    const uint2 b_lo = *reinterpret_cast<const uint2*>(row);
                    const uint2 b_hi = *reinterpret_cast<const uint2*>(row + 32);
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        if (first && c == 0)
                            mma_f16_first(part[m][n], lo[m][0], lo[m][1], lo[m][2], lo[m][3], b_lo.x, b_lo.y);
                        else
                            mma_f16(part[m][n], lo[m][0], lo[m][1], lo[m][2], lo[m][3], b_lo.x, b_lo.y);
                    }
#pragma unroll
                    for (int m = 0; m < M; ++m)
                        mma_f16(part[m][n], hi[m][0], hi[m][1], hi[m][2], hi[m][3], b_hi.x, b_hi.y);
                }
            } else {
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const uint2 k4 = *reinterpret_cast<const uint2*>(b_lane + n * 8 * B_STRIDE + c * 32);
#pragma unroll
                    for (int m = 0; m < M; ++m) mma_chunk_f16(part[m][n], w[m], k4);
                }
            }
        }
    }

    // Waits for a step's copies and sends for the one that takes the place of the step before it.
    __device__ __forceinline__ void next_stage(int step) {
        copy_async_wait<GEMM_STAGES - 2>();
        // Every thread's copies of this step are there, and every warp is done with the stage that is filled next.
        __syncthreads();
        if (step + GEMM_STAGES - 1 < STEPS) {
            load_a(step + GEMM_STAGES - 1);
            load_b(step + GEMM_STAGES - 1);
        }
        copy_async_commit();  // an empty group too: the wait counts groups
    }

    // All of K. scales(m, block): the scales of rows 0..7 and 8..15 of the warp's tile m in a block of SCALE_K; called at
    // the start of the block, so that the loads are hidden behind its products.
    template <class Scales>
    __device__ __forceinline__ void run(Scales scales) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.0f;
        if constexpr (FP8) {
#pragma unroll 1
            for (int block = 0; block < STEPS / BLOCK_STEPS; ++block) {
                float2 factor[M];
#pragma unroll
                for (int m = 0; m < M; ++m) factor[m] = scales(m, block);
                float part[M][N][4];
#pragma unroll
                for (int i = 0; i < BLOCK_STEPS; ++i) {
                    next_stage(block * BLOCK_STEPS + i);
                    step_products(block * BLOCK_STEPS + i, part, i == 0);
                }
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        sum[m][n][0] = fmaf(factor[m].x, part[m][n][0], sum[m][n][0]);
                        sum[m][n][1] = fmaf(factor[m].x, part[m][n][1], sum[m][n][1]);
                        sum[m][n][2] = fmaf(factor[m].y, part[m][n][2], sum[m][n][2]);
                        sum[m][n][3] = fmaf(factor[m].y, part[m][n][3], sum[m][n][3]);
                    }
            }
        } else {
#pragma unroll 1
            for (int step = 0; step < STEPS; ++step) {
                next_stage(step);
                step_products(step, sum, false);
            }
        }
        copy_async_wait<0>();
        __syncthreads();  // the stages may be used for other things from here on
    }

    // Calls each(row of the block, token of the block, value) for all that this lane holds.
    template <class Each>
    __device__ __forceinline__ void for_each(Each each) const {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    each((first_tile() + m) * 16 + g + (i / 2) * 8, first_token() + n * 8 + 2 * t + i % 2,
                         sum[m][n][i]);
    }
};
