// A block of the experts' kernel: sizes, shared memory, fragments, who computes which units, and rows of inner.
#pragma once
#include "common/copy.cuh"
#include "common/experts.cuh"
#include "common/mma.cuh"

constexpr bool FP8 = FP8_EXPERTS != 0;
constexpr bool E4M3 = FP8 && FP8_ACTIVATIONS != 0;  // activations as well
constexpr int KERNEL = KERNEL_GATE_UP;

constexpr int CONSUMERS = 8;
constexpr int PRODUCER = CONSUMERS, FINISHER = CONSUMERS + 1;
constexpr int FINISHERS = 2;
constexpr int FETCHER = FINISHER + FINISHERS;
constexpr int FETCHERS = 3;
constexpr int THREADS = (FETCHER + FETCHERS) * WARP;
constexpr int CHUNK_BYTES = 512;
constexpr int CHUNK_K = FP8 ? 32 : 16;

// gate/up
constexpr int CHUNKS = HIDDEN / CHUNK_K;
// Chunks of a warp in a part. Not more than a scale's 128 columns: then a part has one scale a warp.
constexpr int WARP_CHUNKS = CHUNKS % (4 * CONSUMERS) == 0 ? 4 : CHUNKS % (2 * CONSUMERS) == 0 ? 2 : 1;
constexpr int PART_CHUNKS = WARP_CHUNKS * CONSUMERS;
constexpr int PARTS = CHUNKS / PART_CHUNKS;  // copies of a unit
constexpr int SCALE_BYTES = FP8 ? (HIDDEN / 128 * 8 + 127) / 128 * 128 : 0;
constexpr int PART_BYTES = PART_CHUNKS * CHUNK_BYTES;
constexpr int UNIT_BYTES = CHUNKS * CHUNK_BYTES + SCALE_BYTES;
constexpr int UNITS = INNER / 8;        // of an expert
constexpr int SUMS = FP8 ? PARTS : 1;   // accumulators that await different scales
constexpr int64_t EXPERT_BYTES = int64_t(UNITS) * UNIT_BYTES;
constexpr int ACT_ROW = HIDDEN * (E4M3 ? 1 : 2);
constexpr int ACT_PITCH = ACT_ROW + (E4M3 ? 16 : 32);  // eight rows' fragments lie in different banks

// down
constexpr int TILES = HIDDEN / 16;
constexpr int FEW = TILES / SMS, MORE = TILES % SMS;  // blocks below MORE own FEW + 1 tiles, the others FEW
constexpr int MOST = FEW + (MORE > 0 ? 1 : 0);
constexpr int DOWN_CHUNKS = INNER / CHUNK_K;
constexpr int TILE_BYTES = DOWN_CHUNKS * CHUNK_BYTES;
constexpr int SCALES = FP8 ? INNER / DOWN_SCALE_K : 1;  // of a tile, along K
constexpr int SCALE_CHUNKS = DOWN_CHUNKS / SCALES;
constexpr int SCALE_LOADS = (MAX_GROUPS * MOST * SCALES + FETCHERS * WARP - 1) / (FETCHERS * WARP);  // of a thread
// A row of inner in shared memory: halves, or codes. Neighbours differ in banks.
constexpr int PITCH = E4M3 ? (INNER + 127) / 128 * 128 + 16 : (INNER * 2 + 127) / 128 * 128 + 32;
constexpr int VECTORS = INNER / 8;                        // of 16 bytes, that a row of inner has
constexpr int LANE_VECTORS = (VECTORS + WARP - 1) / WARP;
constexpr int AT_ONCE = LANE_VECTORS > 2 ? 1 : (E4M3 ? 2 : 4) / LANE_VECTORS;  // rows on their way to a fetching warp
constexpr int TILE_PITCH = 20;  // floats of a token's 16 rows: a lane's stores hit 32 banks
constexpr int SUM_FLOATS = ROWS * TILE_PITCH;
constexpr float MOST_E4M3 = 448.0f;
constexpr int64_t INT32_LIMIT = 0x7fffffff;

// Shared memory: stages, rows of inner, and the warps' sums of either phase.
constexpr int STAGE_BYTES = PART_BYTES + SCALE_BYTES > TILE_BYTES ? PART_BYTES + SCALE_BYTES : TILE_BYTES;
constexpr int STAGE_TILES = STAGE_BYTES / TILE_BYTES;  // a stage holds a unit's part with scales, or as many tiles
constexpr int DOWN_SUMS = CONSUMERS * SUM_FLOATS * 4;
constexpr int UNIT_SUMS = FINISHERS * CONSUMERS * WARP * 16;
constexpr int SUMS_BYTES = UNIT_SUMS > DOWN_SUMS ? UNIT_SUMS : DOWN_SUMS;
constexpr int ACTS = ROWS * ACT_PITCH;

static_assert(HIDDEN % 128 == 0 && INNER % CHUNK_K == 0, "whole scales and chunks");
static_assert(CHUNKS % CONSUMERS == 0, "K is split among the warps");
static_assert(!FP8 || (INNER % DOWN_SCALE_K == 0 && DOWN_SCALE_K % CHUNK_K == 0), "a chunk has one scale");
static_assert(DEPTH <= STAGES && DEPTH <= WARP, "a lane sends one of the first copies");
static_assert(SMEM == STAGES * STAGE_BYTES + SLOTS * PITCH + SUMS_BYTES + ACTS, "the host and the kernel agree");
static_assert(SLOTS >= PAIRS, "every pair has a row");
static_assert(MAX_GROUPS == 2 * WARP, "a lane has two groups");
static_assert(MAX_GROUPS * EXPERT_BYTES + SMS * UNIT_BYTES < INT32_LIMIT, "bytes of a launch are an int");
static_assert(MOST <= CONSUMERS, "a warp has one of a block's tiles");

struct Shared {
    alignas(16) float weight[MAX_GROUPS][ROWS];  // routing weight over INNER_SCALE
    float top[E4M3 ? SLOTS : 1];                 // the largest magnitude of a row of inner
    float scale[MAX_GROUPS][MOST][SCALES];
    int start[MAX_GROUPS];   // of a group's rows among all: its pairs are start, start + 1, ... by row
    int pairs;
    int live;                // rows
    int pair_group[PAIRS];   // -1 for a dead row's
    int half;                // of inner, that this launch uses
    volatile int finished;   // the last unit that this block has finished, plus one
    volatile int drained;    // 1: it has computed all of its units
    int what[STAGES];        // a stage's unit, or -1: tiles of `down`, or nothing
    int summed_unit[FINISHERS];  // -1: there are no more
    int table[EXPERTS];
    Groups groups;
    alignas(8) uint64_t full[STAGES], empty[STAGES], acts, rows[MAX_GROUPS], summed[FINISHERS], read[FINISHERS];

    // Which of all pairs a row's choice of a group is.
    __device__ __forceinline__ int slot(int group, int row) const {
        return start[group] + __popc(groups.rows[group] & ((1 << row) - 1));
    }
    __device__ __forceinline__ bool chose(int group, int row) const { return (groups.rows[group] >> row & 1) != 0; }
};
// Numbers the distinct experts of live rows in the order in which pairs name them first, so that the first row's are the
// first TOP_K groups: count and expert[] of `groups` (in shared memory), and the group of each of the lane's pairs, -1 for
// a dead row's. `table` is shared memory, of any content. A whole warp calls it; a __syncwarp() must follow.
__device__ __forceinline__ void name_groups(const int (&id)[LANE_PAIRS], int rows, int lane, int (&table)[EXPERTS],
                                              Groups& groups, int (&group)[LANE_PAIRS]) {
    bool live[LANE_PAIRS];
#pragma unroll
    for (int j = LANE_PAIRS - 1; j >= 0; --j) {  // an earlier pair's entry replaces a later one's
        live[j] = lane + j * WARP < rows * TOP_K && uint32_t(id[j]) < EXPERTS;
        const uint32_t same = __match_any_sync(0xffffffffu, live[j] ? id[j] : -1);
        if (live[j] && __ffs(same) - 1 == lane) table[id[j]] = lane + j * WARP;
        __syncwarp();  // these entries are there before those of earlier pairs
    }
    int count = 0;
    bool first[LANE_PAIRS];
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j) {
        first[j] = live[j] && table[id[j]] == lane + j * WARP;
        const uint32_t lanes = __ballot_sync(0xffffffffu, first[j]);
        group[j] = count + __popc(lanes & ((1u << lane) - 1));
        count += __popc(lanes);
    }
    __syncwarp();  // all have looked: groups take the entries' place
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j) {
        if (first[j]) groups.expert[group[j]] = id[j], table[id[j]] = group[j];
    }
    if (lane == 0) groups.count = count;
    __syncwarp();  // the groups are there for pairs that name them again
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j) group[j] = live[j] ? table[id[j]] : -1;
}

// B of one chunk. Half: k = 4t .. 4t + 3 of a chunk's (half) 16; E4M3: the codes of both halves.
constexpr int KS = FP8 && !E4M3 ? 2 : 1;
struct Fragment {
    uint2 k[KS];
};

__device__ __forceinline__ void multiply(float (&sum)[4], uint4 w, const Fragment& b) {
    if constexpr (E4M3) {
        mma_e4m3(sum, w.x, w.y, w.z, w.w, b.k[0].x, b.k[0].y);
    } else if constexpr (FP8) {
        mma_chunk_fp8_f16(sum, w, b.k[0], b.k[1]);
    } else {
        mma_chunk_f16(sum, w, b.k[0]);
    }
}

// acts points to the lane's row of activations.
__device__ __forceinline__ Fragment activation(const uint8_t* acts, int chunk, int t) {
    Fragment b;
    if constexpr (E4M3) {
        const uint8_t* const k = acts + chunk * CHUNK_K + 4 * t;
        b.k[0] = make_uint2(*reinterpret_cast<const uint32_t*>(k), *reinterpret_cast<const uint32_t*>(k + 16));
    } else {
        const uint8_t* const k = acts + (chunk * CHUNK_K + 4 * t) * 2;
#pragma unroll
        for (int i = 0; i < KS; ++i) b.k[i] = *reinterpret_cast<const uint2*>(k + 32 * i);
    }
    return b;
}

__device__ __forceinline__ uint32_t quantise(uint2 x, float inverse) {
    const float2 lo = unpack_f16(x.x), hi = unpack_f16(x.y);
    return uint32_t(float_to_e4m3x2(lo.x * inverse, lo.y * inverse)) |
           uint32_t(float_to_e4m3x2(hi.x * inverse, hi.y * inverse)) << 16;
}

// row is the lane's row of shared inner.
__device__ __forceinline__ Fragment product(const uint8_t* row, int chunk, int t) {
    Fragment b;
    if constexpr (E4M3) {
        const uint8_t* const k = row + chunk * CHUNK_K + 4 * t;
        b.k[0] = make_uint2(*reinterpret_cast<const uint32_t*>(k), *reinterpret_cast<const uint32_t*>(k + 16));
    } else {
        const uint8_t* const k = row + (chunk * CHUNK_K + 4 * t) * 2;
#pragma unroll
        for (int i = 0; i < KS; ++i) b.k[i] = *reinterpret_cast<const uint2*>(k + 32 * i);
    }
    return b;
}

// Which units a block computes. Multiprocessors do not get equal shares of the bandwidth, so that only the first two
// are fixed; then blocks draw the next one that nobody has. Blocks with more tiles of `down` stop at unit `common`, so
// that those with fewer make up for the difference. A unit's result does not depend on who computes it.
struct Share {
    int units;   // of all blocks
    int common;  // the first ones, which blocks of both kinds draw
    int limit;   // of this block's
    __device__ __forceinline__ explicit Share(int count) : units(count * UNITS) {
        const int rest = MORE > 0 ? count * (SMS - MORE) * TILE_BYTES / UNIT_BYTES : 0;
        common = min_int(units, max_int(units - rest, SMS + (SMS - MORE)));
        limit = few() ? units : common;
    }
    __device__ __forceinline__ static bool few() { return int(blockIdx.x) >= MORE; }
    // The block's first two; `limit` or more: it has no such unit. The second ones go to blocks with fewer tiles first.
    __device__ __forceinline__ static int fixed(int turn) {
        return turn == 0 ? blockIdx.x : 2 * SMS - 1 - blockIdx.x;
    }
};

// The next unit, drawn early, so that it is known when it is needed. One thread.
struct Draw {
    const Share& share;
    int* const drawn;  // units that have been drawn, of the common ones and of the others
    enum { COMMON, REST, NONE } from;
    int unit;
    __device__ __forceinline__ Draw(const Share& share, int* drawn) : share(share), drawn(drawn), unit(0) {
        from = 2 * SMS < share.common ? COMMON : share.limit > share.common ? REST : NONE;
        ask();
    }
    __device__ __forceinline__ void ask() {
        if (from == COMMON) unit = 2 * SMS + atomicAdd(drawn, 1);
        if (from == REST) unit = share.common + atomicAdd(drawn + 1, 1);
    }
    // Looks at what was drawn, and draws from the others where the common ones are used up.
    __device__ __forceinline__ void look() {
        if (from != COMMON || unit < share.common) return;
        from = share.limit > share.common ? REST : NONE;
        ask();
    }
    // False: there is none.
    __device__ __forceinline__ bool take(int& next) {
        look();
        if (from == NONE || unit >= share.limit) return false;
        next = unit;
        ask();
        return true;
    }
};

__device__ __forceinline__ int tiles_of_block() { return int(blockIdx.x) < MORE ? FEW + 1 : FEW; }
__device__ __forceinline__ int first_tile_of_block() { return blockIdx.x * FEW + min_int(blockIdx.x, MORE); }

__device__ __forceinline__ uint4 load_relaxed(const void* address) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}

// A row of inner, as one warp fetches it.
struct Row {
    uint4 x[LANE_VECTORS];

    __device__ __forceinline__ void load(const f16* row, int lane) {
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; ++i) {
            const int vector = lane + i * WARP;
            x[i] = vector < VECTORS ? load_relaxed(row + vector * 8) : make_uint4(1, 1, 1, 1);
        }
    }
    __device__ __forceinline__ bool complete() const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; ++i) all = all && x[i].x != 0 && x[i].y != 0 && x[i].z != 0 && x[i].w != 0;
        return __all_sync(0xffffffffu, all);
    }
    __device__ __forceinline__ void store(uint8_t* row, float* top, int lane) const {
        float inverse = 0.0f;
        if constexpr (E4M3) {
            float most = 0.0f;
#pragma unroll
            for (int i = 0; i < LANE_VECTORS; ++i) {
                if (lane + i * WARP >= VECTORS) continue;
                const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const float2 v = unpack_f16(words[w]);
                    most = fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y)));
                }
            }
#pragma unroll
            for (int offset = 1; offset < WARP; offset *= 2)
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
            inverse = most > 0.0f ? MOST_E4M3 / most : 0.0f;
            if (lane == 0) *top = most;
        }
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; ++i) {
            const int vector = lane + i * WARP;
            if (vector >= VECTORS) continue;
            if constexpr (E4M3) {
                const uint2 low = make_uint2(x[i].x, x[i].y), high = make_uint2(x[i].z, x[i].w);
                reinterpret_cast<uint2*>(row)[vector] = make_uint2(quantise(low, inverse), quantise(high, inverse));
            } else {
                reinterpret_cast<uint4*>(row)[vector] = x[i];
            }
        }
    }
};
