// A matrix of INT4 units times one token: how a block's warps stream its units, and how their sums meet.
//
// A block has a run of units, tile after tile, and each of its warps an equal part of that, with a ring of bulk copies of
// its own: a warp that has a stage in registers sends the next copy into the same place, and nobody waits for anybody
// until all have done. Then the block adds what its warps have of each tile, in their order.
// So the rings fill before pdl_wait(), at the speed of WARPS issuing lanes, and hold what memory delivers while the
// predecessor ends and the token comes in.
//
// Includers define what common/int4_ring.cuh asks for, and TRIGGER (see below).
#pragma once
#include "common/int4_ring.cuh"
#include "common/pdl.cuh"
#include "common/pieces.cuh"

// When the successor's prologue may begin.
constexpr int AT_ONCE = 0;       // beside the predecessor
constexpr int AFTER_WAIT = 1;
constexpr int AFTER_COPIES = 2;  // when all warps have sent their last copies

template <typename A, typename B>
constexpr bool same = false;
template <typename A>
constexpr bool same<A, A> = true;

// What a warp needs, K columns wide, where a block has up to BLOCK_UNITS units.
template <int K, int BLOCK_UNITS>
struct Stream {
    static constexpr int GROUPS = padded(K) / GROUP_SIZE;
    static constexpr int WARP_UNITS = (BLOCK_UNITS + WARPS - 1) / WARPS;
    static constexpr int SEGMENTS = (WARP_UNITS + GROUPS - 2) / GROUPS + 1;  // tiles that a warp's run touches

    // In shared memory, besides the rings and, behind them, the token.
    struct Shared {
        float sums[WARPS][SEGMENTS][TILE_ROWS];
        int2 tiles[WARPS];  // each warp's first and last tile; the last one is -1 where it has none
        uint64_t full[WARPS][STAGES];
        uint64_t token;     // the token is there, where it comes by bulk copies
    };

    const uint8_t* weights;  // of the warp's first unit
    uint8_t* ring;
    uint64_t* full;
    Run run;

    // Sends the units of a stage. One lane.
    __device__ __forceinline__ void copy(int stage, int slot) const {
        const int bytes = min_int(run.units - stage * STAGE_UNITS, STAGE_UNITS) * UNIT_BYTES;
        barrier_expect(&full[slot], bytes);
        bulk_load(ring + slot * STAGE_BYTES, weights + int64_t(stage) * STAGE_BYTES, bytes, &full[slot]);
    }

    // Fills the warp's ring with the first of its part of the block's run.
    __device__ __forceinline__ Stream(Shared& shared, uint8_t* rings, const uint8_t* matrix, Run block) {
        const int warp = threadIdx.x / WARP;
        run = part_of(block, warp, WARPS);
        weights = matrix + int64_t(run.first) * UNIT_BYTES;
        ring = rings + warp * RING_BYTES;
        full = shared.full[warp];
        if (threadIdx.x % WARP == 0) {
#pragma unroll
            for (int slot = 0; slot < STAGES; ++slot) barrier_init(&full[slot], 1);
            barrier_init_fence();
            for (int stage = 0; stage < STAGES && stage * STAGE_UNITS < run.units; ++stage) copy(stage, stage);
            const int last = run.units > 0 ? (run.first + run.units - 1) / GROUPS : -1;
            shared.tiles[warp] = make_int2(run.first / GROUPS, last);
        }
        __syncwarp();  // the barriers exist for all lanes
    }

    // The run times the token [padded(K)], into the warp's sums.
    template <typename Token = TOKEN>
    __device__ __forceinline__ void multiply(Shared& shared, const uint8_t* token, Fault* fault, int kernel, int layer) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        float* sums = &shared.sums[warp][0][g];
        float low = 0.0f, high = 0.0f;
        int group = run.first % GROUPS, slot = 0;
        uint32_t parity = 0;
        typename Token::Columns x[STAGE_UNITS];
        const auto flush = [&]() {
            low = Token::sum(low), high = Token::sum(high);
            if (t == 0) sums[0] = low, sums[8] = high;
            sums += TILE_ROWS;
            low = high = 0.0f;
        };
        if (TRIGGER == AFTER_COPIES && run.units <= STAGES * STAGE_UNITS) pdl_trigger();
        for (int stage = 0, left = run.units; left > 0; ++stage, left -= STAGE_UNITS) {
            barrier_wait(&full[slot], parity, fault, kernel, layer);
            const uint8_t* const units = ring + slot * STAGE_BYTES;
            uint4 w[STAGE_UNITS][2];
            f16 scale[STAGE_UNITS][2];
#pragma unroll
            for (int u = 0; u < STAGE_UNITS; ++u) {  // the last stage's missing units are there as nothing that counts
                const uint8_t* const unit = units + u * UNIT_BYTES;
                w[u][0] = reinterpret_cast<const uint4*>(unit)[lane];
                w[u][1] = reinterpret_cast<const uint4*>(unit)[WARP + lane];
                scale[u][0] = reinterpret_cast<const f16*>(unit + CODE_BYTES)[g];
                scale[u][1] = reinterpret_cast<const f16*>(unit + CODE_BYTES)[g + 8];
            }
            if (left > STAGES * STAGE_UNITS) {
                reads_before_copies();
                __syncwarp();  // every lane has its part before the place is given back
                if (lane == 0) copy(stage + STAGES, slot);
                if (TRIGGER == AFTER_COPIES && left <= (STAGES + 1) * STAGE_UNITS) pdl_trigger();
            }
            if (++slot == STAGES) slot = 0, parity ^= 1;
            float2 c[STAGE_UNITS];
#pragma unroll
            for (int u = 0; u < STAGE_UNITS; ++u) {
                int of = group + u < GROUPS ? group + u : group + u - GROUPS;
                if (STAGE_UNITS > GROUPS) of %= GROUPS;
                x[u].load(token + of * Token::GROUP_BYTES, lane);
            }
#pragma unroll
            for (int u = 0; u < STAGE_UNITS; ++u) c[u] = x[u].times(w[u]);
            const auto add = [&](int u) {
                low += f16_to_float(scale[u][0]) * c[u].x;
                high += f16_to_float(scale[u][1]) * c[u].y;
            };
            if (left >= STAGE_UNITS && group + STAGE_UNITS <= GROUPS) {  // all there, and of one tile
#pragma unroll
                for (int u = 0; u < STAGE_UNITS; ++u) add(u);
                group += STAGE_UNITS;
                if (group == GROUPS) {
                    group = 0;
                    flush();
                }
            } else {
#pragma unroll
                for (int u = 0; u < STAGE_UNITS; ++u) {
                    if (u >= left) break;
                    add(u);
                    if (++group == GROUPS) {
                        group = 0;
                        flush();
                    }
                }
            }
        }
        if (group > 0 && run.units > 0) flush();
    }

    // A row's sum over the block's part of a tile, after a barrier behind multiply().
    static __device__ __forceinline__ float sum(const Shared& shared, int tile, int row) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const int2 tiles = shared.tiles[w];
            if (tile >= tiles.x && tile <= tiles.y) total += shared.sums[w][tile - tiles.x][row];
        }
        return total;
    }
};

// Bytes of the token [padded(K)] from global into shared memory, a part from each warp; `arrived` completes with WARPS
// arrivals.
template <int K, typename Token>
__device__ __forceinline__ void copy_token(uint8_t* token, const void* from, uint64_t* arrived) {
    if (threadIdx.x % WARP != 0) return;
    const Run part = part_of(Run{0, padded(K) / GROUP_SIZE}, threadIdx.x / WARP, WARPS);
    const int first = part.first * Token::GROUP_BYTES, bytes = part.units * Token::GROUP_BYTES;
    barrier_expect(arrived, bytes);
    if (bytes > 0) bulk_load(token + first, static_cast<const uint8_t*>(from) + first, bytes, arrived);
}

// Halves [padded(K)] that the predecessor wrote, as the token in shared memory. The whole block; all of it is there then.
template <int K>
__device__ __forceinline__ void take_token(uint8_t* token, const f16* from, uint64_t* arrived, Fault* fault, int kernel,
                                           int layer) {
    if constexpr (same<TOKEN, Halves>) {
        copy_token<K, Halves>(token, from, arrived);
        barrier_wait(arrived, 0, fault, kernel, layer);
    } else {
        constexpr int EIGHTS = (padded(K) / 8 + THREADS - 1) / THREADS;  // that a thread has
        uint4 x[EIGHTS];
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const int column = (i * THREADS + int(threadIdx.x)) * 8;
            x[i] = column < padded(K) ? __ldcg(reinterpret_cast<const uint4*>(from + column)) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const int column = (i * THREADS + int(threadIdx.x)) * 8;
            store_halves(token, column, x[i], column < padded(K));
        }
        __syncthreads();  // all of the token is there
    }
}

// Of a matrix [R][K], split as Pieces has it: every block a run of units, as long as any other's.
template <int R, int K>
struct SharedTiles {
    using Split = Pieces<R, K, GEMV_BLOCKS>;
    static constexpr int BLOCK_UNITS = (Split::UNITS + Split::TAKERS - 1) / Split::TAKERS;

    static __device__ __forceinline__ Run run() {
        return part_of(Run{0, Split::UNITS}, blockIdx.x, Split::TAKERS);
    }

    // Stores the block's sums of the tiles that it has a part of: out [PIECES][R].
    template <typename S>
    static __device__ __forceinline__ void store(const typename S::Shared& shared, Run block, float scale, float* out,
                                                 Fault* fault, int kernel, int layer) {
        const int first = block.first / Split::GROUPS, last = (block.first + block.units - 1) / Split::GROUPS;
        for (int i = threadIdx.x; i < (last - first + 1) * TILE_ROWS; i += THREADS) {
            const int tile = first + i / TILE_ROWS, row = i % TILE_ROWS;
            const int piece = blockIdx.x - Split::block_of(tile * Split::GROUPS);
            const float value = scale * S::sum(shared, tile, row);
            if (!is_finite(value)) report_fault(fault, FAULT_NOT_FINITE, kernel, layer);
            out[piece * R + tile * TILE_ROWS + row] = value;
        }
    }
};

// Of TILES whole tiles of GROUPS units.
template <int TILES, int GROUPS>
struct WholeTiles {
    static constexpr int TAKERS = GEMV_BLOCKS < TILES ? GEMV_BLOCKS : TILES;
    static constexpr int BLOCK_TILES = (TILES + TAKERS - 1) / TAKERS;

    static __device__ __forceinline__ Run tiles() { return part_of(Run{0, TILES}, blockIdx.x, TAKERS); }
    static __device__ __forceinline__ Run units(Run tiles) { return Run{tiles.first * GROUPS, tiles.units * GROUPS}; }
};
