// Down projections of the chosen experts, weighted and summed: out[row] = sum of weight * W_down inner[group][row].
//
// PRECOND: grid HIDDEN / 16 / TILES; block 256; weights and inner 16-byte aligned; a row's expert ids are distinct.
// Waits on gate_up (inner, inner_max). Before that it reads live, expert_ids and expert_weights, which the attention
// tail wrote two launches ago, and weights. Where it is `polled`, the attention tail has cleared the rows of inner that
// are to come, gate_up stores no zero, and inner is polled for (common/flagged.cuh): it comes while gate_up still runs.
// What gate_up and the next attention tail poll for it makes unready again: o and the router's parts, which the attention
// tail has read when inner is there, and routing when gate_up has ended.
// Reads TILES tiles of every group's expert once (TILE_BYTES each, contiguous), their scales, and the rows of inner
// that chose the expert; writes every live row of out: with RANKS > 1 in its inbox and all others (common/exchange.cuh).
//
// A block owns rows of the output and takes all groups, so nothing is added across blocks and a weight is read once.
// Each warp has groups of its own and DEPTH stages of shared memory for them: it refills a stage as soon as it has
// used it, with no barrier among warps. All stages are on their way before inner is waited for.
// inner comes in one piece, only rows that chose the expert: one latency for all groups instead of one for each, and
// a row that did not choose it, where inner holds anything, is a zero in B.
#include "abi_decode.cuh"
#include "common/copy.cuh"
#include "common/exchange.cuh"
#include "common/experts.cuh"
#include "common/experts_mma.cuh"
#include "common/flagged.cuh"
#include "common/pdl.cuh"

constexpr int KERNEL = KERNEL_DOWN;

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int CHUNK_BYTES = 512;
constexpr int CHUNKS = INNER / CHUNK_K;
constexpr int TILE_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int STAGE_BYTES = TILES * TILE_BYTES;
constexpr int RING = WARPS * DEPTH;
constexpr int SCALES = FP8 ? INNER / DOWN_SCALE_K : 1;  // of a tile, along K
constexpr int SCALE_CHUNKS = CHUNKS / SCALES;
constexpr int ROW_BYTES = INNER * 2;
constexpr int ROW_PIECES = ROW_BYTES / 16;
constexpr int PITCH = (ROW_BYTES + 127) / 128 * 128 + 32;  // a group's rows differ in banks where places differ by 1..3
constexpr int TILE_PITCH = 20;  // floats of a token's 16 rows: a lane's stores hit 32 banks
constexpr int SUM_FLOATS = ROWS * TILE_PITCH;
constexpr int SUMS_BYTES = WARPS * TILES * SUM_FLOATS * 4;
constexpr int ROWS_BYTES = PAIRS * PITCH > SUMS_BYTES ? PAIRS * PITCH : SUMS_BYTES;  // sums take the place of inner
constexpr float MOST_E4M3 = 448.0f;

static_assert(HIDDEN % (16 * TILES) == 0 && INNER % CHUNK_K == 0 && ROW_BYTES % 16 == 0, "whole tiles and chunks");
static_assert(!FP8 || (INNER % DOWN_SCALE_K == 0 && DOWN_SCALE_K % CHUNK_K == 0), "a chunk has one scale");
static_assert(SMEM == RING * STAGE_BYTES + ROWS_BYTES, "the host and the kernel agree on shared memory");
static_assert(PAIRS <= 127, "a pair's number is a signed byte");

struct Tables {
    Groups groups;
    alignas(16) float weight[MAX_GROUPS][ROWS];  // routing weight over INNER_SCALE
    signed char pair[MAX_GROUPS][ROWS];     // which row of shared inner; -1 where the row did not choose the group
    int source[PAIRS];                      // group * ROWS + row of a pair; -1 for a dead row's
    float scale[MAX_GROUPS][TILES][SCALES];
    float inverse[MAX_GROUPS][ROWS];        // of inner's E4M3 step; 0 where all is zero
};

// B of one chunk from a row of shared inner, where k points to 4t of the lane's chunk.
__device__ __forceinline__ uint32_t quantise(uint2 x, float inverse) {
    const float2 lo = unpack_f16(x.x), hi = unpack_f16(x.y);
    return uint32_t(float_to_e4m3x2(lo.x * inverse, lo.y * inverse)) |
           uint32_t(float_to_e4m3x2(hi.x * inverse, hi.y * inverse)) << 16;
}

__device__ __forceinline__ Fragment load_fragment(const uint8_t* k, float inverse) {
    Fragment b;
    if constexpr (E4M3) {
        b.k[0].x = quantise(*reinterpret_cast<const uint2*>(k), inverse);
        b.k[0].y = quantise(*reinterpret_cast<const uint2*>(k + 32), inverse);
    } else {
#pragma unroll
        for (int i = 0; i < int(sizeof(b.k) / sizeof(b.k[0])); ++i) b.k[i] = *reinterpret_cast<const uint2*>(k + 32 * i);
    }
    return b;
}

// Whether none of the eight halves is zero.
__device__ __forceinline__ bool written(uint4 x) {
    uint32_t a, b;
    asm("min.u16x2 %0, %1, %2;" : "=r"(a) : "r"(x.x), "r"(x.y));
    asm("min.u16x2 %0, %1, %2;" : "=r"(b) : "r"(x.z), "r"(x.w));
    asm("min.u16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
    return (a & 0xffffu) != 0 && (a >> 16) != 0;
}

// All pairs' rows of inner, each piece as soon as gate_up has stored it.
__device__ __forceinline__ void receive(const DownArgs& a, const Tables& tables, uint8_t* inner) {
    constexpr int EACH = (PAIRS * ROW_PIECES + THREADS - 1) / THREADS;
    int from[EACH];
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const int i = threadIdx.x + j * THREADS, pair = i / ROW_PIECES, piece = i % ROW_PIECES;
        const int source = pair < PAIRS ? tables.source[pair] : -1;
        from[j] = source * INNER + piece * 8;
        if (source >= 0) missing |= 1u << j;
    }
    Polls polls;
    do {
        uint4 x[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (missing >> j & 1) x[j] = load_flagged_16(a.inner + from[j]);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = threadIdx.x + j * THREADS;
            if ((missing >> j & 1) == 0 || !written(x[j])) continue;
            *reinterpret_cast<uint4*>(inner + i / ROW_PIECES * PITCH + i % ROW_PIECES * 16) = x[j];
            missing &= ~(1u << j);
        }
    } while (polls.again(missing == 0, a.fault, KERNEL, a.layer));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) down(const __grid_constant__ DownArgs a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ __align__(16) Tables tables;
    __shared__ __align__(8) uint64_t full[RING];
    uint8_t* const ring = shared;
    uint8_t* const inner = shared + RING * STAGE_BYTES;  // [PAIRS][PITCH]
    Groups& groups = tables.groups;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_tile = blockIdx.x * TILES;
    const Peers peers(a.peers);

    if (threadIdx.x == 0) {
        for (int s = 0; s < RING; ++s) barrier_init(&full[s], 1);
        barrier_init_fence();
    }
    for (int i = threadIdx.x; i < MAX_GROUPS * ROWS; i += THREADS) {
        tables.weight[i / ROWS][i % ROWS] = a.dense_groups > 0 ? 1.0f / INNER_SCALE : 0.0f;
        tables.pair[i / ROWS][i % ROWS] = -1;
    }
    for (int i = threadIdx.x; i < PAIRS; i += THREADS) tables.source[i] = -1;
    const int rows = live_rows(a.live, a.rows);  // written before routing, so as old as that
    __syncthreads();                             // barriers and empty tables are there

    if (warp == 0) {
        if (a.dense_groups > 0) {
            dense_groups_of(a.dense_groups, rows, lane, groups);
            for (int i = lane; i < a.dense_groups * ROWS; i += WARP) {
                if (i % ROWS < rows) tables.pair[i / ROWS][i % ROWS] = static_cast<signed char>(i % PAIRS);
            }
        } else {
            int id[LANE_PAIRS], group[LANE_PAIRS];
            float weight[LANE_PAIRS];
            load_choices(a.expert_ids, lane, id);
#pragma unroll
            for (int j = 0; j < LANE_PAIRS; ++j) {
                const int pair = lane + j * WARP;
                const int* const weights = reinterpret_cast<const int*>(a.expert_weights);
                weight[j] = pair < PAIRS ? __int_as_float(load_past_l1(weights + pair)) : 0.0f;
            }
            number_groups(id, rows, lane, groups, group);
#pragma unroll
            for (int j = 0; j < LANE_PAIRS; ++j) {
                const int pair = lane + j * WARP, row = pair / TOP_K;
                if (group[j] < 0) continue;
                tables.weight[group[j]][row] = weight[j] * (1.0f / INNER_SCALE);
                tables.pair[group[j]][row] = static_cast<signed char>(pair);
                tables.source[pair] = group[j] * ROWS + row;
            }
        }
    }
    __syncthreads();  // the tables are there for all warps

    const int count = groups.count;
    const auto send = [&](int group) {  // one lane
        const int stage = group % WARPS * DEPTH + group / WARPS % DEPTH;
        const int64_t tile = int64_t(groups.expert[group]) * (HIDDEN / 16) + first_tile;
        barrier_expect(&full[stage], STAGE_BYTES);
        bulk_load(ring + stage * STAGE_BYTES, a.weights + tile * TILE_BYTES, STAGE_BYTES, &full[stage]);
    };
    if (lane == 0) {
        for (int group = warp; group < min_int(count, RING); group += WARPS) send(group);
    }
    if constexpr (FP8) {
        for (int i = threadIdx.x; i < count * TILES * SCALES; i += THREADS) {
            const int group = i / (TILES * SCALES), rest = i % (TILES * SCALES);
            const int64_t tile = int64_t(groups.expert[group]) * (HIDDEN / 16) + first_tile;
            (&tables.scale[0][0][0])[i] = a.scales[tile * SCALES + rest];
        }
    }

    if (a.polled) {
        receive(a, tables, inner);
    } else {
        pdl_wait();
    }
    pdl_trigger();

    // The attention tail has read them, since gate_up's results are there. A skipped draft depth has no exchange: peers do
    // not wait for it, and may have pushed into these buffers for the next round already.
    for (int i = blockIdx.x * THREADS + threadIdx.x;
         a.unready != nullptr && (RANKS == 1 || rows > 0) && i < a.unready_pieces; i += gridDim.x * THREADS)
        reinterpret_cast<uint4*>(a.unready)[i] = make_uint4(NOT_READY, NOT_READY, NOT_READY, NOT_READY);

    float total[TILES][4] = {};
    // All chosen groups at once; a dense layer's groups, which have all rows, TOP_K at a time.
    const int step = a.dense_groups > 0 ? TOP_K : MAX_GROUPS;
    for (int first = 0; first < count; first += step) {
        const int end = min_int(count, first + step);
        if (first > 0) __syncthreads();  // every warp has used the last groups' rows
        for (int i = threadIdx.x; !a.polled && i < PAIRS * ROW_PIECES; i += THREADS) {
            const int pair = i / ROW_PIECES, piece = i % ROW_PIECES;
            int source = tables.source[pair];
            if (a.dense_groups > 0) {
                source = pair % ROWS < rows && first + pair / ROWS < end ? first * ROWS + pair : -1;
            }
            if (source >= 0) copy_async_16(inner + pair * PITCH + piece * 16, a.inner + int64_t(source) * INNER + piece * 8);
        }
        copy_async_commit();
        if constexpr (E4M3) {
            for (int i = threadIdx.x; i < count * ROWS; i += THREADS) {
                const int group = i / ROWS, row = i % ROWS;
                const float top = tables.pair[group][row] >= 0 ? a.inner_max[i] : 0.0f;
                if (group < first || group >= end) continue;
                tables.inverse[group][row] = top > 0.0f ? MOST_E4M3 / top : 0.0f;
                tables.weight[group][row] *= top * (1.0f / MOST_E4M3);
            }
        }
        copy_async_wait<0>();
        __syncthreads();  // the rows that all threads fetched are there

        for (int group = first + warp; group < end; group += WARPS) {
            const int turn = group / WARPS, stage = warp * DEPTH + turn % DEPTH;
            const int token = lane / 4, pair = tables.pair[group][token];
            const uint8_t* const row = inner + pair * PITCH + lane % 4 * 8;
            Fragment b[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                b[c] = pair < 0 ? Fragment{} : load_fragment(row + c * CHUNK_K * 2, tables.inverse[group][token]);
            }
            const float2 weight = *reinterpret_cast<const float2*>(&tables.weight[group][lane % 4 * 2]);
            barrier_wait(&full[stage], turn / DEPTH & 1, a.fault, KERNEL, a.layer);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float part[4] = {};
#pragma unroll
                for (int s = 0; s < SCALES; ++s) {
                    float sum[4] = {};
#pragma unroll
                    for (int j = 0; j < SCALE_CHUNKS; ++j) {
                        const int c = s * SCALE_CHUNKS + j;
                        const uint8_t* const chunk = ring + stage * STAGE_BYTES + (tile * CHUNKS + c) * CHUNK_BYTES;
                        multiply(sum, reinterpret_cast<const uint4*>(chunk)[lane], b[c]);
                    }
                    const float scale = FP8 ? tables.scale[group][tile][s] : 1.0f;
#pragma unroll
                    for (int i = 0; i < 4; ++i) part[i] += scale * sum[i];
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) total[tile][i] += (i % 2 == 0 ? weight.x : weight.y) * part[i];
            }
            reads_before_copies();
            __syncwarp();  // all lanes have read: the stage may be filled again
            if (lane == 0 && group + RING < count) send(group + RING);
        }
    }

    __syncthreads();  // every warp has used inner, whose place the sums take
    float* const sums = reinterpret_cast<float*>(inner);  // [WARPS][TILES][ROWS][TILE_PITCH]
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = lane % 4 * 2 + i % 2, row = lane / 4 + i / 2 * 8;
            sums[(warp * TILES + tile) * SUM_FLOATS + token * TILE_PITCH + row] = total[tile][i];
        }
    }
    __syncthreads();  // all warps' sums are there
    for (int i = threadIdx.x; i < TILES * 16 * rows; i += THREADS) {
        const int token = i / (TILES * 16), tile = i / 16 % TILES, row = i % 16;
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) x += sums[(w * TILES + tile) * SUM_FLOATS + token * TILE_PITCH + row];
        float& out = a.out[int64_t(token) * HIDDEN + (first_tile + tile) * 16 + row];
        if constexpr (RANKS > 1)
            peers.push(&out, x);
        else
            out = x;
        if (!is_finite(x)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL, a.layer);
    }
    pdl_settle();
    if (a.routed != nullptr && blockIdx.x == 0) {  // gate_up has ended: nobody polls for it any more
        for (int i = threadIdx.x; i < ROUTED_COPIES * PAIRS; i += THREADS) a.routed[i] = 0;
    }
}
