// The matrix product of prompt processing with INT4 weights: sum[weight row][token], units of abi_qwen2.cuh times
// activations in tiles (common/activations.cuh).
//
//   PRECOND  constants OUT_ROWS, K (whole groups), STAGES; block 384, SMEM bytes of dynamic shared memory and no static
//            ones (wgmma's swizzle wants 1024-byte alignment); any grid: blocks take output tiles in turn. Weights may be
//            read before pdl_wait(), activations after it.
//
// An output tile is 128 weight rows (8 tiles of 16) x WIDTH tokens, 32 to 128 of them. Warp 8 copies: a stage of activations
// is one group of K, two bulk copies; one of weights is four groups, a copy for each tile. (A copy costs about 60 ns of a
// multiprocessor's copy engine, however small: tools/decisions/019-prompt-products.md.) Two groups of
// four warps multiply, 64 weight rows each: codes become halves in registers, A of wgmma, exactly; B is the stage. A group's
// products are summed in FP32 for themselves (`part`) and added with their scale, so nothing is rounded that decoding does
// not round.
//
// Two multiplying groups, since one alone leaves the tensor cores idle while it adds its part; the codes that come next are
// made into halves while products run. Weights are A, not B, because A may come from registers: the halves of dequantised
// weights never pass through shared memory.
#pragma once
#include "common/activations.cuh"
#include "common/copy.cuh"
#include "common/int4.cuh"
#include "common/pdl.cuh"
#include "common/prefill_report.cuh"
#include "common/wgmma.cuh"

constexpr int BLOCK_TILES = 8;
constexpr int BLOCK_ROWS = BLOCK_TILES * 16;
constexpr int A_GROUPS = 4;               // groups of a stage of weights: few copies, each of whole 128-byte lines
constexpr int A_STAGES = 2;
constexpr int MAX_WIDTH = 128;            // tokens of an output tile
constexpr int CONSUMERS = 256;
constexpr int GEMM_THREADS = CONSUMERS + 4 * WARP;

// A's registers of the four products of 64 columns. words: row g, row g + 8, row g and g + 8 of the columns from 32 on.
__device__ __forceinline__ void dequantise(const uint4& words, uint32_t (&a)[4][4]) {
    const uint32_t rows[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t pairs[4];
        int4_to_f16(pairs, rows[i]);
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
    static_assert(K % GROUP_SIZE == 0 && OUT_ROWS % 16 == 0, "whole units");
    static_assert(SPREAD == 0 || SPREAD == 32 || SPREAD == 64, "half of a head");
    static constexpr int GROUPS = K / GROUP_SIZE;
    static constexpr int TILES = OUT_ROWS / 16;
    static constexpr int M_BLOCKS = (TILES + BLOCK_TILES - 1) / BLOCK_TILES;
    static constexpr int B_STAGE = MAX_WIDTH * GROUP_SIZE * 2;
    static constexpr int A_TILE = A_GROUPS * UNIT_BYTES;  // a multiple of 128: where GROUPS is one of 4, copies are aligned
    static constexpr int A_STAGE = BLOCK_TILES * A_TILE;
    static constexpr int A_AT = STAGES * B_STAGE;
    static constexpr int STAGED_AT = A_AT + A_STAGES * A_STAGE;
    static constexpr int BARRIERS_AT = STAGED_AT + STAGED;
    static constexpr int SMEM = BARRIERS_AT + 128;
    static_assert(STAGED % 16 == 0 && 2 * (STAGES + A_STAGES) * 8 <= 128, "aligned, and room for the barriers");

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
    __device__ __forceinline__ uint64_t* a_full(int stage) const { return full(2 * STAGES + stage); }
    __device__ __forceinline__ uint64_t* a_empty(int stage) const { return full(2 * STAGES + A_STAGES + stage); }
    __device__ __forceinline__ char* staged() const { return shared + STAGED_AT; }

    __device__ __forceinline__ Place place_of(int block) const {
        return Place{block, block / token_blocks, block % token_blocks, 0};
    }
    __device__ __forceinline__ Place first_place() const { return place_of(int(blockIdx.x)); }
    __device__ __forceinline__ Place place_after(const Place& p) const { return place_of(p.block + int(gridDim.x)); }
    __device__ __forceinline__ bool exists(const Place& p) const { return p.m < M_BLOCKS; }
    __device__ __forceinline__ void next(Place& p) const {
        if (++p.group == GROUPS) p = place_after(p);
    }
    __device__ __forceinline__ void next_groups(Place& p) const {
        if ((p.group += A_GROUPS) >= GROUPS) p = place_after(p);
    }
    __device__ __forceinline__ int tiles_of(const Place& p) const {
        return min_int(BLOCK_TILES, TILES - p.m * BLOCK_TILES);
    }
    __device__ __forceinline__ int tokens_of(const Place& p) const { return min_int(width, all_rows - p.n * width); }

    // Lane i < 8 copies tile i's units of up to A_GROUPS groups.
    __device__ __forceinline__ void load_a(const Place& p, int stage, const uint8_t* weights) const {
        const int tiles = tiles_of(p), lane = threadIdx.x % WARP;
        const uint32_t bytes = uint32_t(min_int(A_GROUPS, GROUPS - p.group)) * UNIT_BYTES;
        if (lane == 0) barrier_expect(a_full(stage), tiles * bytes);
        __syncwarp();  // the barrier knows what comes
        if (lane < tiles)
            bulk_load(shared + A_AT + stage * A_STAGE + lane * A_TILE,
                      weights + ((int64_t(p.m) * BLOCK_TILES + lane) * GROUPS + p.group) * UNIT_BYTES, bytes,
                      a_full(stage));
    }
    // Lanes 0 and 1 copy 64 columns each.
    __device__ __forceinline__ void load_b(const Place& p, int stage, const f16* in) const {
        const int c = threadIdx.x % WARP;
        const uint32_t bytes = uint32_t(tokens_of(p)) * (ACTIVATION_BLOCK * 2);
        if (c == 0) barrier_expect(full(stage), 2 * bytes);
        __syncwarp();  // the barrier knows what comes
        if (c < 2)
            bulk_load(shared + stage * B_STAGE + c * width * (ACTIVATION_BLOCK * 2),
                      in + activation_offset(all_rows, 2 * p.group + c, p.n * width, 0), bytes, full(stage));
    }

    // Warp 8.
    __device__ __forceinline__ void produce(const uint8_t* weights, const f16* in) const {
        Place p = first_place();
        for (int stage = 0; stage < A_STAGES && exists(p); ++stage, next_groups(p)) load_a(p, stage, weights);
        pdl_wait();
        // The predecessor's stores, which its end made visible to loads, are read through another proxy here.
        asm volatile("fence.proxy.async;" ::: "memory");
        pdl_trigger();
        int stage = 0, a_stage = 0;
        uint32_t phase = 1, a_phase = 1;  // of the phase before the first one, which counts as complete
        bool early = true;                // this stage of weights has been loaded
        for (p = first_place(); exists(p); next(p)) {
            if (p.group % A_GROUPS == 0) {
                if (!early) {
                    barrier_wait(a_empty(a_stage), a_phase, fault, KERNEL_PREFILL, layer);
                    load_a(p, a_stage, weights);
                }
                if (++a_stage == A_STAGES) a_stage = 0, a_phase ^= 1, early = false;
            }
            barrier_wait(empty(stage), phase, fault, KERNEL_PREFILL, layer);
            load_b(p, stage, in);
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

    // What a consumer stands at: a group, its stages, and the words of its second chunk.
    struct At {
        int stage = 0, a_stage = 0, group = 0;
        uint32_t phase = 0, a_phase = 0;
        uint4 next;
    };
    __device__ __forceinline__ const char* unit(const At& at, int row) const {
        return shared + A_AT + at.a_stage * A_STAGE + row / 16 * A_TILE + at.group % A_GROUPS * UNIT_BYTES;
    }
    __device__ __forceinline__ uint4 load_words(const At& at, int chunk) const {
        const int lane_at = chunk * (CODE_BYTES / 2) + threadIdx.x % WARP * 16;
        const uint4 first = *reinterpret_cast<const uint4*>(unit(at, first_row()) + lane_at);
        if constexpr (SPREAD == 0) {
            return first;
        } else {
            const uint4 second = *reinterpret_cast<const uint4*>(unit(at, second_row()) + lane_at);
            return first_row() % 16 == 0 ? make_uint4(first.x, second.x, first.z, second.z)
                                         : make_uint4(first.y, second.y, first.w, second.w);
        }
    }
    __device__ __forceinline__ float load_scale(const At& at, int row) const {
        const f16* scales = reinterpret_cast<const f16*>(unit(at, row) + CODE_BYTES);
        return f16_to_float(scales[row % 16 + threadIdx.x % WARP / 4]);
    }

    // One group's products, scaled and added. a: halves of its first chunk, made before; c takes those of its second one,
    // d those of the next group's first.
    template <int WIDTH>
    __device__ __forceinline__ void one_group(At& at, float (&sum)[WIDTH / 2], float (&part)[WIDTH / 2],
                                              uint32_t (&a)[4][4], uint32_t (&c)[4][4], uint32_t (&d)[4][4]) const {
        const uint64_t b = wgmma_operand(shared_address(shared + at.stage * B_STAGE));
        barrier_wait(full(at.stage), at.phase, fault, KERNEL_PREFILL, layer);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; ++s) wgmma_f16(part, a[s], b + (s * 32 >> 4), s > 0);
        wgmma_commit();
        dequantise(at.next, c);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; ++s)
            wgmma_f16(part, c[s], b + ((WIDTH * ACTIVATION_BLOCK * 2 + s * 32) >> 4), 1);
        wgmma_commit();
        const float scale0 = load_scale(at, first_row()), scale1 = load_scale(at, second_row());
        if (++at.group % A_GROUPS == 0 || at.group == GROUPS) {
            // Every lane for its own words and scales: once in four groups that costs nothing.
            reads_before_copies();
            barrier_arrive(a_empty(at.a_stage));
            if (++at.a_stage == A_STAGES) at.a_stage = 0, at.a_phase ^= 1;
            if (at.group < GROUPS) barrier_wait(a_full(at.a_stage), at.a_phase, fault, KERNEL_PREFILL, layer);
        }
        if (at.group < GROUPS) {
            at.next = load_words(at, 1);
            dequantise(load_words(at, 0), d);
        }
        wgmma_wait<0>();
        pin(a);
        pin(c);
        wgmma_pin(part);
        // The warp's products have ended, and nothing else of it reads activations.
        if (threadIdx.x % WARP == 0) barrier_arrive(empty(at.stage));
        if (++at.stage == STAGES) at.stage = 0, at.phase ^= 1;
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                sum[4 * n + j] = fmaf(scale0, part[4 * n + j], sum[4 * n + j]);
                sum[4 * n + 2 + j] = fmaf(scale1, part[4 * n + 2 + j], sum[4 * n + 2 + j]);
            }
    }

    // All output tiles of the block, by the consumers. result(place, sum): sum[4 n + j] is first_row() + g, token
    // 8 n + 2 t + j of the tile's; sum[4 n + 2 + j] is second_row() + g.
    template <int WIDTH, class Result>
    __device__ __forceinline__ void consume(Result& result) const {
        At at;
        float sum[WIDTH / 2], part[WIDTH / 2];
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) part[i] = 0.0f;
        for (Place p = first_place(); exists(p); p = place_after(p)) {
#pragma unroll
            for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0.0f;
            at.group = 0;
            barrier_wait(a_full(at.a_stage), at.a_phase, fault, KERNEL_PREFILL, layer);
            uint32_t a[4][4], c[4][4], d[4][4];
            dequantise(load_words(at, 0), a);
            at.next = load_words(at, 1);
#pragma unroll 1
            for (int i = 0; i < GROUPS / 2; ++i) {
                one_group<WIDTH>(at, sum, part, a, c, d);
                one_group<WIDTH>(at, sum, part, d, c, a);
            }
            if constexpr (GROUPS % 2 == 1) one_group<WIDTH>(at, sum, part, a, c, d);
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
#pragma unroll
            for (int s = 0; s < A_STAGES; ++s) {
                barrier_init(a_full(s), 1);
                barrier_init(a_empty(s), CONSUMERS);
            }
            barrier_init_fence();
        }
        __syncthreads();  // the barriers are there
        // Registers of a multiprocessor's quarter: two warps that multiply take most of what three could have.
        if (threadIdx.x >= CONSUMERS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            if (threadIdx.x < CONSUMERS + WARP) produce(weights, in);
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
