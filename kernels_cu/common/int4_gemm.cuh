// The matrix product of prompt processing with INT4 weights: sum[weight row][token], units of abi_qwen2.cuh times
// activations in tiles (common/activations.cuh).
//
//   PRECOND  constants OUT_ROWS, K (whole groups), STAGES; block 384, SMEM bytes of dynamic shared memory and no static ones (wgmma's swizzle wants 1024-byte alignment);
//            any grid: blocks take output tiles in turn. Weights may be read before pdl_wait(), activations after it.
//
// An output tile is 128 weight rows (8 tiles of 16) x WIDTH tokens, 32 to 128 of them. Warp 8 copies: a stage is one group
// of K for all of it, two bulk copies of activations and eight of units. Two groups of four warps multiply, 64 weight rows
// each: codes become halves in registers, A of wgmma, exactly; B is the stage. A group's products are summed in FP32 for
// themselves (`part`) and added with their scale, so nothing is rounded that decoding does not round.
//
// Two multiplying groups, since one alone leaves the tensor cores idle while it adds its part; the chunk of codes that comes
// next is made into halves while products run. Weights are A, not B, because A may come from registers: the halves of
// dequantised weights never pass through shared memory.
#pragma once
#include "abi_qwen2.cuh"
#include "common/activations.cuh"
#include "common/copy.cuh"
#include "common/pdl.cuh"
#include "common/prefill_report.cuh"
#include "common/wgmma.cuh"

constexpr int GROUP_K = 128;              // inputs that share a scale
constexpr int UNIT_BYTES = 1056;          // 16 rows of a group: codes, then scales
constexpr int CODE_BYTES = 1024;
constexpr int BLOCK_TILES = 8;
constexpr int BLOCK_ROWS = BLOCK_TILES * 16;
constexpr int MAX_WIDTH = 128;            // tokens of an output tile
constexpr int CONSUMERS = 256;
constexpr int GEMM_THREADS = CONSUMERS + 4 * WARP;

// The eight codes of a word as halves: pairs of columns 8 t + 2 i.
__device__ __forceinline__ void int4_to_f16(uint32_t word, uint32_t (&pairs)[4]) {
    // A code c of four bits, its sign bit flipped, is c + 8. In the low bits of the half 1024 it makes 1024 + c + 8; four
    // bits higher, 1024 + 16 (c + 8). Both differences are exact. Volatile, so that they stay among the products that they
    // are written between, which hide them.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t shifted = word >> (8 * i);
        uint32_t low, high;  // (shifted & mask) ^ bits, in one instruction where one constant is a register
        asm volatile("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(low) : "r"(shifted), "n"(0x000f000f), "r"(0x64086408u));
        asm volatile("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(high) : "r"(shifted), "n"(0x00f000f0), "r"(0x64806480u));
        asm volatile("sub.rn.f16x2 %0, %1, %2;" : "=r"(pairs[2 * i]) : "r"(low), "r"(0x64086408u));  // 1032
        asm volatile("fma.rn.f16x2 %0, %1, %2, %3;"
            : "=r"(pairs[2 * i + 1])
            : "r"(high), "r"(0x2c002c00u), "r"(0xd480d480u));  // 1 / 16, -72
    }
}

// A's registers of the four products of 64 columns. words: row g, row g + 8, row g and g + 8 of the columns from 32 on.
__device__ __forceinline__ void dequantise(const uint4& words, uint32_t (&a)[4][4]) {
    const uint32_t rows[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t pairs[4];
        int4_to_f16(rows[i], pairs);
        const int step = i / 2 * 2, row = i % 2;
        a[step][row] = pairs[0];
        a[step][row + 2] = pairs[1];
        a[step + 1][row] = pairs[2];
        a[step + 1][row + 2] = pairs[3];
    }
}

// Consumers only.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// STAGED: bytes of shared memory for the results. SPREAD: 0, or how far apart the weight rows g and g + 8 of a warp are
// (RoPE's pairs): the warp then has half of the rows of two tiles instead of one tile.
template <int STAGED, int SPREAD = 0>
struct Int4Gemm {
    static_assert(K % GROUP_K == 0 && OUT_ROWS % 16 == 0, "whole units");
    static_assert(SPREAD == 0 || SPREAD == 32 || SPREAD == 64, "half of a head");
    static constexpr int GROUPS = K / GROUP_K;
    static constexpr int TILES = OUT_ROWS / 16;
    static constexpr int M_BLOCKS = (TILES + BLOCK_TILES - 1) / BLOCK_TILES;
    static constexpr int B_STAGE = MAX_WIDTH * GROUP_K * 2;
    static constexpr int A_STAGE = BLOCK_TILES * UNIT_BYTES;
    static constexpr int A_AT = STAGES * B_STAGE;
    static constexpr int STAGED_AT = A_AT + STAGES * A_STAGE;
    static constexpr int BARRIERS_AT = STAGED_AT + STAGED;
    static constexpr int SMEM = BARRIERS_AT + 128;
    static_assert(STAGED % 16 == 0 && 2 * STAGES * 8 <= 128, "aligned, and room for the barriers");

    char* shared;
    Fault* fault;
    int layer;
    int rows;
    int all_rows;      // of the activations' buffer
    int width;         // tokens of an output tile: 32, 64 or 128
    int token_blocks;

    // An output tile, and a step of K in it.
    struct Place {
        int block, m, n, group;
    };

    __device__ __forceinline__ Int4Gemm(char* shared, Fault* fault, int layer, int rows)
        : shared(shared), fault(fault), layer(layer), rows(rows), all_rows(activation_rows(rows)) {
        // The width that costs least: rounds of all blocks, times tokens and what a round costs besides.
        int least = 1 << 30;
#pragma unroll
        for (int w = MAX_WIDTH; w >= 32; w /= 2) {
            const int cost = div_up(M_BLOCKS * div_up(rows, w), int(gridDim.x)) * (w + ROUND_COST);
            if (cost < least) least = cost, width = w;
        }
        token_blocks = div_up(rows, width);
    }
    static constexpr int ROUND_COST = 32;  // in tokens

    __device__ __forceinline__ uint64_t* full(int stage) const {
        return reinterpret_cast<uint64_t*>(shared + BARRIERS_AT) + stage;
    }
    __device__ __forceinline__ uint64_t* empty(int stage) const { return full(STAGES + stage); }
    __device__ __forceinline__ char* staged() const { return shared + STAGED_AT; }

    __device__ __forceinline__ Place first_place() const { return place_of(int(blockIdx.x)); }
    __device__ __forceinline__ Place place_of(int block) const {
        return Place{block, block / token_blocks, block % token_blocks, 0};
    }
    __device__ __forceinline__ bool exists(const Place& p) const { return p.m < M_BLOCKS; }
    __device__ __forceinline__ void next(Place& p) const {
        if (++p.group == GROUPS) p = place_of(p.block + int(gridDim.x));
    }
    __device__ __forceinline__ int tiles_of(const Place& p) const { return min_int(BLOCK_TILES, TILES - p.m * BLOCK_TILES); }
    __device__ __forceinline__ int tokens_of(const Place& p) const { return min_int(width, all_rows - p.n * width); }

    __device__ __forceinline__ void load_a(const Place& p, int stage, const uint8_t* weights) const {
        const int tiles = tiles_of(p);
        barrier_expect(full(stage), uint32_t(tiles * UNIT_BYTES + tokens_of(p) * (GROUP_K * 2)));
        const uint8_t* from = weights + (int64_t(p.m) * BLOCK_TILES * GROUPS + p.group) * UNIT_BYTES;
        char* to = shared + A_AT + stage * A_STAGE;
        for (int i = 0; i < tiles; ++i)
            bulk_load(to + i * UNIT_BYTES, from + int64_t(i) * GROUPS * UNIT_BYTES, UNIT_BYTES, full(stage));
    }
    __device__ __forceinline__ void load_b(const Place& p, int stage, const f16* in) const {
        const uint32_t bytes = uint32_t(tokens_of(p)) * (ACTIVATION_BLOCK * 2);
        char* to = shared + stage * B_STAGE;
#pragma unroll
        for (int c = 0; c < 2; ++c)
            bulk_load(to + c * width * (ACTIVATION_BLOCK * 2),
                      in + activation_offset(all_rows, 2 * p.group + c, p.n * width, 0), bytes, full(stage));
    }

    // Warp 8, one lane.
    __device__ __forceinline__ void produce(const uint8_t* weights, const f16* in) const {
        Place a = first_place(), b = a;
        int early = 0;
        for (; early < STAGES && exists(a); ++early, next(a)) load_a(a, early, weights);
        pdl_wait();
        // The predecessor's stores, which its end made visible to loads, are read through another proxy here.
        asm volatile("fence.proxy.async;" ::: "memory");
        pdl_trigger();
        for (int stage = 0; stage < early; ++stage, next(b)) load_b(b, stage, in);
        int stage = 0;
        uint32_t phase = 0;
        for (; exists(a); next(a)) {
            barrier_wait(empty(stage), phase, fault, KERNEL_PREFILL, layer);
            load_a(a, stage, weights);
            load_b(a, stage, in);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }

    static __device__ __forceinline__ int warp() { return int(threadIdx.x) / WARP; }
    // Where the warp's rows begin among the block's 128: row g is first_row() + g, row g + 8 is second_row() + g.
    static __device__ __forceinline__ int first_row() {
        constexpr int HEAD_WARPS = SPREAD == 0 ? 1 : SPREAD / 8;
        return SPREAD == 0 ? warp() * 16 : warp() / HEAD_WARPS * (2 * SPREAD) + warp() % HEAD_WARPS * 8;
    }
    static __device__ __forceinline__ int second_row() { return first_row() + (SPREAD == 0 ? 8 : SPREAD); }

    __device__ __forceinline__ uint4 load_words(int stage, int chunk) const {
        const char* at = shared + A_AT + stage * A_STAGE + chunk * (CODE_BYTES / 2) + threadIdx.x % WARP * 16;
        const uint4 first = *reinterpret_cast<const uint4*>(at + first_row() / 16 * UNIT_BYTES);
        if constexpr (SPREAD == 0) {
            return first;
        } else {
            const uint4 second = *reinterpret_cast<const uint4*>(at + second_row() / 16 * UNIT_BYTES);
            return first_row() % 16 == 0 ? make_uint4(first.x, second.x, first.z, second.z)
                                         : make_uint4(first.y, second.y, first.w, second.w);
        }
    }
    __device__ __forceinline__ float load_scale(int stage, int row) const {
        const char* unit = shared + A_AT + stage * A_STAGE + row / 16 * UNIT_BYTES + CODE_BYTES;
        return f16_to_float(reinterpret_cast<const f16*>(unit)[row % 16 + threadIdx.x % WARP / 4]);
    }

    // All output tiles of the block, by the consumers. result(place, sum): sum[4 n + j] is first_row() + g, token
    // 8 n + 2 t + j of the tile's; sum[4 n + 2 + j] is second_row() + g.
    template <int WIDTH, class Result>
    __device__ __forceinline__ void consume(Result& result) const {
        int stage = 0;
        uint32_t phase = 0;
        float sum[WIDTH / 2], part[WIDTH / 2];
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) part[i] = 0.0f;
        for (Place p = first_place(); exists(p); p = place_of(p.block + int(gridDim.x))) {
#pragma unroll
            for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0.0f;
            barrier_wait(full(stage), phase, fault, KERNEL_PREFILL, layer);
            uint4 words[2] = {load_words(stage, 0), load_words(stage, 1)};
            uint32_t a[2][4][4];
            dequantise(words[0], a[0]);
#pragma unroll 1
            for (int group = 0; group < GROUPS; ++group) {
                const uint64_t b = wgmma_operand(shared_address(shared + stage * B_STAGE));
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; ++s) wgmma_f16(part, a[0][s], b + (s * 32 >> 4), s > 0);
                wgmma_commit();
                dequantise(words[1], a[1]);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; ++s)
                    wgmma_f16(part, a[1][s], b + ((WIDTH * ACTIVATION_BLOCK * 2 + s * 32) >> 4), 1);
                wgmma_commit();
                const float scale0 = load_scale(stage, first_row()), scale1 = load_scale(stage, second_row());
                const int used = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
                if (group + 1 < GROUPS) {
                    barrier_wait(full(stage), phase, fault, KERNEL_PREFILL, layer);
                    words[0] = load_words(stage, 0);
                    words[1] = load_words(stage, 1);
                }
                wgmma_wait<1>();
                pin(a[0]);
                dequantise(words[0], a[0]);
                wgmma_wait<0>();
                pin(a[1]);
                wgmma_pin(part);
                reads_before_copies();
                __syncwarp();  // all lanes have read their words
                if (threadIdx.x % WARP == 0) barrier_arrive(empty(used));
#pragma unroll
                for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        sum[4 * n + j] = fmaf(scale0, part[4 * n + j], sum[4 * n + j]);
                        sum[4 * n + 2 + j] = fmaf(scale1, part[4 * n + 2 + j], sum[4 * n + 2 + j]);
                    }
            }
            result(p, sum);
        }
    }

    // Registers that a product under way reads: not given to anything else before this.
    static __device__ __forceinline__ void pin(uint32_t (&a)[4][4]) {
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[s][i])::"memory");
    }

    // The whole of it, by all threads. result(place, sum) takes sums of 16, 32 or 64.
    template <class Result>
    __device__ __forceinline__ void run(const uint8_t* weights, const f16* in, Result& result) const {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int s = 0; s < STAGES; ++s) {
                barrier_init(full(s), 1);
                barrier_init(empty(s), CONSUMERS / WARP);
            }
            barrier_init_fence();
        }
        __syncthreads();  // the barriers are there
        // Registers of a multiprocessor's quarter: two warps that multiply take most of what three could have.
        if (threadIdx.x >= CONSUMERS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            if (threadIdx.x == CONSUMERS) produce(weights, in);
            return;
        }
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        pdl_wait();
        pdl_trigger();
        if (width == 128) {
            consume<128>(result);
        } else if (width == 64) {
            consume<64>(result);
        } else {
            consume<32>(result);
        }
    }
};
