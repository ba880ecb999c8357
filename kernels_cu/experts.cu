// The chosen experts in one launch: gate and up, SiLU, product, down projection, weighted sum.
//
// PRECOND: grid: SMS blocks that all fit at once, one a multiprocessor (they wait for each other); block 448; weights
// and normed 16-byte aligned; a row's expert ids are distinct; arrived is zero. Waits on the attention tail (normed or
// codes, expert_ids, expert_weights, inner_max cleared).
// Reads the chosen experts once; writes and reads inner (L2), 2 * INNER bytes a pair; writes every live row of out.
//
// Two launches leave memory idle while the first drains, the second starts, and its first bytes come. Here a block's
// stream of copies goes on from gate/up units to its own rows of `down`, whose products wait for inner, not for a
// launch: a group of rows is complete when its INNER / 8 units have arrived at its counter, and groups are computed in
// order, so all but the last are complete long before any block needs them.
//
// Roles: warp 8 finds the groups and sends copies, STAGES deep; warps 0..7 multiply: in gate/up they split K (the
// activations' fragments stay in registers), in down they split groups; warp 9 fetches complete groups' inner into
// shared memory; warps 10..13 add a unit's sums in turn, store inner and count it. These have warps of their own since a
// release waits about a microsecond for its stores, longer than a unit takes. Blocks that own more rows of `down` take fewer units, so that all read the same number of bytes.
#include "common/copy.cuh"
#include "common/experts.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"

constexpr bool FP8 = FP8_EXPERTS != 0;
constexpr bool E4M3 = FP8 && FP8_ACTIVATIONS != 0;  // activations as well
constexpr int KERNEL = KERNEL_GATE_UP;

constexpr int CONSUMERS = 8;
constexpr int PRODUCER = CONSUMERS, FETCHER = CONSUMERS + 1, FINISHER = CONSUMERS + 2;
constexpr int FINISHERS = 4;
constexpr int THREADS = (FINISHER + FINISHERS) * WARP;
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
constexpr int SCALE_LOADS = (MAX_GROUPS * MOST * SCALES + CONSUMERS * WARP - 1) / (CONSUMERS * WARP);  // of a thread
constexpr int PITCH = (INNER * 2 + 127) / 128 * 128 + 32;
constexpr int TILE_PITCH = 20;  // floats of a token's 16 rows: a lane's stores hit 32 banks
constexpr int SUM_FLOATS = ROWS * TILE_PITCH;
constexpr float MOST_E4M3 = 448.0f;

// Shared memory: stages, rows of inner, and the warps' sums of either phase.
constexpr int LEAST_STAGE = MOST * TILE_BYTES;  // a stage holds a unit's part with scales, or some groups' tiles
constexpr int STAGE_BYTES = PART_BYTES + SCALE_BYTES > LEAST_STAGE ? PART_BYTES + SCALE_BYTES : LEAST_STAGE;
constexpr int ACT_STAGES = (ROWS * ACT_PITCH + STAGE_BYTES - 1) / STAGE_BYTES;  // where activations lie at first
constexpr int FREE_STAGES = STAGES - ACT_STAGES;
constexpr int DOWN_SUMS = CONSUMERS * MOST * SUM_FLOATS * 4;
constexpr int UNIT_SUMS = FINISHERS * CONSUMERS * WARP * 16;

static_assert(HIDDEN % 128 == 0 && INNER % CHUNK_K == 0, "whole scales and chunks");
static_assert(CHUNKS % CONSUMERS == 0, "K is split among the warps");
static_assert(!FP8 || (INNER % DOWN_SCALE_K == 0 && DOWN_SCALE_K % CHUNK_K == 0), "a chunk has one scale");
static_assert(FREE_STAGES > 0, "weights start to arrive beside the activations");
static_assert(FREE_STAGES <= WARP, "a lane sends one of the first copies");
static_assert(SMEM == STAGES * STAGE_BYTES + SLOTS * PITCH + UNIT_SUMS + DOWN_SUMS, "the host and the kernel agree");
static_assert(SLOTS >= PAIRS && SLOTS < 32768, "every pair has a row");

struct Shared {
    alignas(16) float weight[MAX_GROUPS][ROWS];  // routing weight over INNER_SCALE
    float top[E4M3 ? MAX_GROUPS : 1][ROWS];      // of inner's magnitudes
    float scale[MAX_GROUPS][MOST][SCALES];
    short pair[MAX_GROUPS][ROWS];  // which row of shared inner; -1 where the row did not choose the group
    short pair_group[PAIRS];       // -1 for a dead row's
    Groups groups;
    alignas(8) uint64_t full[STAGES], empty[STAGES], acts, rows[MAX_GROUPS], summed[FINISHERS], read[FINISHERS];
};

// B of one chunk. Half: k = 4t .. 4t + 3 of a chunk's (half) 16; E4M3: the codes of both halves.
struct Fragment {
    uint2 k[FP8 && !E4M3 ? 2 : 1];
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
        for (int i = 0; i < int(sizeof(b.k) / sizeof(b.k[0])); ++i) b.k[i] = *reinterpret_cast<const uint2*>(k + 32 * i);
    }
    return b;
}

__device__ __forceinline__ uint32_t quantise(uint2 x, float inverse) {
    const float2 lo = unpack_f16(x.x), hi = unpack_f16(x.y);
    return uint32_t(float_to_e4m3x2(lo.x * inverse, lo.y * inverse)) |
           uint32_t(float_to_e4m3x2(hi.x * inverse, hi.y * inverse)) << 16;
}

// row points to 4t of the lane's row of inner.
__device__ __forceinline__ Fragment product(const uint8_t* row, int chunk, float inverse) {
    const uint8_t* const k = row + chunk * CHUNK_K * 2;
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

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// The units of a block: unit i is first + i * SMS in the rounds that all blocks take part in, then only those with
// fewer tiles go on. They share `count` groups' bytes of both phases evenly.
struct Share {
    int units;   // of all blocks
    int rounds;  // of all blocks
    __device__ __forceinline__ explicit Share(int count) : units(count * UNITS) {
        const int64_t ahead = int64_t(count) * TILE_BYTES * (SMS - MORE);  // what blocks with fewer tiles make up for
        const int64_t even = int64_t(units) * UNIT_BYTES - ahead + int64_t(SMS) * UNIT_BYTES / 2;
        rounds = MORE == 0 ? units : max_int(0, int(even / (int64_t(SMS) * UNIT_BYTES)));
    }
    // Unit i of this block; `units` or more: it has no such unit.
    __device__ __forceinline__ int unit(int i) const {
        if (i < rounds) return i * SMS + blockIdx.x;
        if (int(blockIdx.x) < MORE) return units;
        return rounds * SMS + (i - rounds) * (SMS - MORE) + (blockIdx.x - MORE);
    }
};

__device__ __forceinline__ int tiles_of_block() { return int(blockIdx.x) < MORE ? FEW + 1 : FEW; }
__device__ __forceinline__ int first_tile_of_block() { return blockIdx.x * FEW + min_int(blockIdx.x, MORE); }

// Adds the warps' sums of every FINISHERS-th unit, stores the products and counts the units as arrived. One warp.
__device__ __forceinline__ void finish(const ExpertsArgs& a, Shared& shared, const float4 (*sums)[CONSUMERS][WARP],
                                       int mine, int lane) {
    const int token = lane % 4 * 2;
    float scale[2] = {1.0f, 1.0f};
    if constexpr (E4M3) {
#pragma unroll
        for (int i = 0; i < 2; ++i) scale[i] = token + i < a.rows ? a.code_scale[token + i] : 0.0f;
    }
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");  // the producer has found the groups
    const Share share(shared.groups.count);
    uint32_t parity = 0;
    int turn = mine;
    for (int unit = share.unit(turn); unit < share.units; unit = share.unit(turn += FINISHERS), parity ^= 1) {
        const int group = unit / UNITS, column = unit % UNITS * 8 + lane / 4;
        const int chose = shared.groups.rows[group] >> token;
        barrier_wait(&shared.summed[mine], parity, a.fault, KERNEL, a.layer);
        float4 sum = sums[mine][0][lane];
#pragma unroll
        for (int w = 1; w < CONSUMERS; ++w) {
            const float4 x = sums[mine][w][lane];
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        __syncwarp();  // all lanes have read: the next sums may come here
        if (lane == 0) barrier_arrive(&shared.read[mine]);
        const float gate[2] = {sum.x * scale[0], sum.y * scale[1]};
        const float up[2] = {sum.z * scale[0], sum.w * scale[1]};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const f16 value = float_to_f16(silu(gate[i]) * up[i] * INNER_SCALE);
            const bool chosen = (chose >> i & 1) != 0;
            if (chosen) {
                a.inner[(int64_t(group) * ROWS + token + i) * INNER + column] = value;
                if ((value & 0x7c00) == 0x7c00) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL, a.layer);
            }
            if constexpr (E4M3) {
                float top = f16_to_float(value & 0x7fff);
#pragma unroll
                for (int offset = 4; offset < WARP; offset *= 2) {
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
                }
                // Floats that are not negative compare as their bits do, and a maximum does not depend on its order.
                int* const target = reinterpret_cast<int*>(a.inner_max) + group * ROWS + token + i;
                if (chosen && lane < 4) atomicMax(target, __float_as_int(top));
            }
        }
        __syncwarp();  // all lanes have stored, and the release covers what they stored
        if (lane == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(a.arrived + group) : "memory");
    }
}

__device__ __forceinline__ void produce(const ExpertsArgs& a, Shared& shared, uint8_t* stages, int lane) {
    Groups& groups = shared.groups;
    const int rows = live_rows(a.live, a.rows);
    int group[LANE_PAIRS];
    if (a.dense_groups > 0) {
        dense_groups_of(a.dense_groups, rows, lane, groups);
    } else {
        int id[LANE_PAIRS];
        load_choices(a.expert_ids, lane, id);
        number_groups(id, rows, lane, groups, group);
    }
    __syncwarp();  // lane 0 reads the experts that all lanes wrote
    const int count = groups.count;
    const Share share(count);
    int fill = 0, stage = 0, part = 0, turn = 0, unit = share.unit(0);
    // The stage's next use: the first needs no wait, except where activations lie before.
    const auto take = [&]() {
        const int uses = fill / STAGES + (stage >= FREE_STAGES ? 1 : 0);
        if (uses > 0) barrier_wait(&shared.empty[stage], (uses - 1) & 1, a.fault, KERNEL, a.layer);
    };
    const auto next = [&]() {
        ++fill;
        if (++stage == STAGES) stage = 0;
    };
    const auto send_part = [&]() {
        take();
        const int64_t start = groups.expert[unit / UNITS] * EXPERT_BYTES + int64_t(unit % UNITS) * UNIT_BYTES;
        const uint32_t bytes = part == PARTS - 1 ? PART_BYTES + SCALE_BYTES : PART_BYTES;
        barrier_expect(&shared.full[stage], bytes);
        bulk_load(stages + stage * STAGE_BYTES, a.gate_up + start + part * PART_BYTES, bytes, &shared.full[stage]);
        if (++part == PARTS) part = 0, unit = share.unit(++turn);
        next();
    };
    const int mine = lane < FREE_STAGES ? share.unit(lane / PARTS) : share.units;
    if (mine < share.units) {  // the first copies, one a lane
        const int64_t start = groups.expert[mine / UNITS] * EXPERT_BYTES + int64_t(mine % UNITS) * UNIT_BYTES;
        const uint32_t bytes = lane % PARTS == PARTS - 1 ? PART_BYTES + SCALE_BYTES : PART_BYTES;
        barrier_expect(&shared.full[lane], bytes);
        bulk_load(stages + lane * STAGE_BYTES, a.gate_up + start + lane % PARTS * PART_BYTES, bytes, &shared.full[lane]);
    }
    fill = stage = __popc(__ballot_sync(0xffffffffu, mine < share.units));
    part = fill % PARTS, turn = fill / PARTS, unit = share.unit(turn);
    __syncwarp();  // the first copies leave before the masks, which nobody needs until a unit's end
    if (a.dense_groups == 0) {
        mark_rows(group, lane, groups);
#pragma unroll
        for (int j = 0; j < LANE_PAIRS; ++j) {
            if (lane + j * WARP < PAIRS) shared.pair_group[lane + j * WARP] = short(group[j]);
        }
    }
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");  // the groups are there for all warps
    if (lane != 0) return;
    while (unit < share.units) send_part();
    const int tiles = tiles_of_block();
    if (tiles == 0) return;
    const uint32_t bytes = tiles * TILE_BYTES;
    const int per_stage = STAGE_BYTES / bytes;
    for (int first = 0; first < count; first += per_stage) {
        take();
        const int here = min_int(per_stage, count - first);
        barrier_expect(&shared.full[stage], here * bytes);
        for (int i = 0; i < here; ++i) {
            const int64_t tile = int64_t(groups.expert[first + i]) * TILES + first_tile_of_block();
            bulk_load(stages + stage * STAGE_BYTES + i * bytes, a.down + tile * TILE_BYTES, bytes, &shared.full[stage]);
        }
        next();
    }
}

__device__ __forceinline__ int load_acquire(const int* address) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

// Brings inner of the groups as they become complete. One warp.
__device__ __forceinline__ void fetch(const ExpertsArgs& a, Shared& shared, uint8_t* inner, int lane) {
    float weight[LANE_PAIRS];
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j) {
        const int pair = lane + j * WARP;
        weight[j] = a.dense_groups == 0 && pair < PAIRS ? a.expert_weights[pair] : 0.0f;
    }
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");  // the producer has found the groups
    const int count = shared.groups.count, tiles = tiles_of_block();
    if (a.dense_groups > 0) {
        for (int i = lane; i < count * ROWS; i += WARP) {
            const bool mine = (shared.groups.rows[i / ROWS] >> (i % ROWS) & 1) != 0;
            shared.weight[i / ROWS][i % ROWS] = 1.0f / INNER_SCALE;
            shared.pair[i / ROWS][i % ROWS] = mine ? short(i) : short(-1);
        }
    } else {
        for (int i = lane; i < count * ROWS; i += WARP) {
            shared.weight[i / ROWS][i % ROWS] = 0.0f;
            shared.pair[i / ROWS][i % ROWS] = -1;
        }
        __syncwarp();  // empty tables are there before choices are entered
#pragma unroll
        for (int j = 0; j < LANE_PAIRS; ++j) {
            const int pair = lane + j * WARP, group = pair < PAIRS ? shared.pair_group[pair] : -1;
            if (group < 0) continue;
            shared.weight[group][pair / TOP_K] = weight[j] * (1.0f / INNER_SCALE);
            shared.pair[group][pair / TOP_K] = short(pair);
        }
    }
    __syncwarp();
    asm volatile("bar.arrive 3, %0;" ::"n"((CONSUMERS + 1) * WARP) : "memory");  // the tables are there for consumers
    if (tiles == 0 || count == 0) return;

    // A lane asks for its groups and copies its pairs' rows, so that any number of groups costs the same few instructions.
    static_assert(MAX_GROUPS == 64, "a group is a bit");
    const int slots = a.dense_groups > 0 ? count * ROWS : PAIRS;
    uint64_t waiting = count == 64 ? ~0ull : (1ull << count) - 1;
    for (int tries = 0; waiting != 0; ++tries) {
        const bool lower = (waiting >> lane & 1) != 0 && load_acquire(a.arrived + lane) == UNITS;
        const bool upper = (waiting >> (lane + WARP) & 1) != 0 && load_acquire(a.arrived + lane + WARP) == UNITS;
        // The ballots order what the lanes acquired before every lane's copies.
        const uint64_t ready =
            __ballot_sync(0xffffffffu, lower) | uint64_t(__ballot_sync(0xffffffffu, upper)) << 32;
        if (ready == 0) {
            __nanosleep(64);
            if (tries > (1 << 24)) {
                report_fault(a.fault, FAULT_COPY, KERNEL, a.layer);
                asm volatile("trap;");
            }
            continue;
        }
        waiting ^= ready;
        __syncwarp();
        // inner was written through ordinary stores, and the copy engine is to see them.
        asm volatile("fence.proxy.async.global;" ::: "memory");
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int group = lane + half * WARP;
            if ((ready >> group & 1) == 0) continue;
            const uint32_t bytes = __popc(shared.groups.rows[group]) * INNER * 2;
            barrier_expect(&shared.rows[group], bytes + (E4M3 ? ROWS * 4 : 0));
            // 0 where a row did not choose the group, as the tail has left it.
            if (E4M3) bulk_load(shared.top[group], a.inner_max + group * ROWS, ROWS * 4, &shared.rows[group]);
        }
        __syncwarp();  // bytes are expected before they come
        for (int slot = lane; slot < slots; slot += WARP) {
            int group = slot / ROWS, row = slot % ROWS;
            if (a.dense_groups == 0) {
                group = shared.pair_group[slot], row = slot / TOP_K;
            } else if (shared.pair[group][row] < 0) {
                continue;
            }
            if (group < 0 || (ready >> group & 1) == 0) continue;
            bulk_load(inner + slot * PITCH, a.inner + (int64_t(group) * ROWS + row) * INNER, INNER * 2,
                      &shared.rows[group]);
        }
    }
    // The last block that needs the counters no more leaves them zero for the next launch.
    int last = 0;
    if (lane == 0) last = atomicAdd(a.arrived + MAX_GROUPS, 1) == min_int(SMS, TILES) - 1;
    if (__shfl_sync(0xffffffffu, last, 0) != 0) {
        for (int i = lane; i <= MAX_GROUPS; i += WARP) a.arrived[i] = 0;
    }
}

// The rows of out that the block owns. Consumer warps; stage and parity go on from the units.
template <int N>
__device__ __forceinline__ void project(const ExpertsArgs& a, Shared& shared, const uint8_t* stages, const uint8_t* inner,
                                        float* sums, int stage, uint32_t parity, int warp, int lane) {
    constexpr int PER_STAGE = STAGE_BYTES / (N * TILE_BYTES);
    const int count = shared.groups.count, token = lane / 4;
    float total[N][4] = {};
    for (int first = 0; first < count; first += PER_STAGE) {
        barrier_wait(&shared.full[stage], parity, a.fault, KERNEL, a.layer);
        const int end = min_int(count, first + PER_STAGE);
        for (int group = first + ((warp - first) & (CONSUMERS - 1)); group < end; group += CONSUMERS) {
            barrier_wait(&shared.rows[group], 0, a.fault, KERNEL, a.layer);
            const int pair = shared.pair[group][token];
            const uint8_t* const row = inner + pair * PITCH + lane % 4 * 8;
            float inverse = 1.0f;
            float2 weight = *reinterpret_cast<const float2*>(&shared.weight[group][lane % 4 * 2]);
            if constexpr (E4M3) {
                const float top = shared.top[group][token];
                const float2 step = *reinterpret_cast<const float2*>(&shared.top[group][lane % 4 * 2]);
                inverse = top > 0.0f ? MOST_E4M3 / top : 0.0f;
                weight.x *= step.x * (1.0f / MOST_E4M3), weight.y *= step.y * (1.0f / MOST_E4M3);
            }
            Fragment b[DOWN_CHUNKS];
#pragma unroll
            for (int c = 0; c < DOWN_CHUNKS; ++c) {
                // What a row that did not choose the group holds was never fetched: it is a zero.
                b[c] = pair < 0 ? Fragment{} : product(row, c, inverse);
            }
            const uint8_t* const tiles = stages + stage * STAGE_BYTES + (group - first) * N * TILE_BYTES;
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                float part[4] = {};
#pragma unroll
                for (int s = 0; s < SCALES; ++s) {
                    float sum[4] = {};
#pragma unroll
                    for (int j = 0; j < SCALE_CHUNKS; ++j) {
                        const int c = s * SCALE_CHUNKS + j;
                        const uint8_t* const chunk = tiles + (tile * DOWN_CHUNKS + c) * CHUNK_BYTES;
                        multiply(sum, reinterpret_cast<const uint4*>(chunk)[lane], b[c]);
                    }
                    // The table's rows are as long as the block's own tiles.
                    const float scale = FP8 ? (&shared.scale[group][0][0])[tile * SCALES + s] : 1.0f;
#pragma unroll
                    for (int i = 0; i < 4; ++i) part[i] += scale * sum[i];
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) total[tile][i] += (i % 2 == 0 ? weight.x : weight.y) * part[i];
            }
        }
        reads_before_copies();
        __syncwarp();  // all lanes have read: the stage may be filled again
        if (lane == 0) barrier_arrive(&shared.empty[stage]);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
#pragma unroll
    for (int tile = 0; tile < N; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = lane % 4 * 2 + i % 2, row = lane / 4 + i / 2 * 8;
            sums[(warp * N + tile) * SUM_FLOATS + column * TILE_PITCH + row] = total[tile][i];
        }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * WARP) : "memory");  // all warps' sums are there
    const int rows = live_rows(a.live, a.rows);
    for (int i = threadIdx.x; i < N * 16 * rows; i += CONSUMERS * WARP) {
        const int column = i / (N * 16), tile = i / 16 % N, row = i % 16;
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < CONSUMERS; ++w) x += sums[(w * N + tile) * SUM_FLOATS + column * TILE_PITCH + row];
        a.out[int64_t(column) * HIDDEN + (first_tile_of_block() + tile) * 16 + row] = x;
        if (!is_finite(x)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_DOWN, a.layer);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts(const __grid_constant__ ExpertsArgs a) {
    extern __shared__ __align__(128) uint8_t stages[];
    __shared__ __align__(16) Shared shared;
    uint8_t* const inner = stages + STAGES * STAGE_BYTES;  // [SLOTS][PITCH]
    float4(*const unit_sums)[CONSUMERS][WARP] = reinterpret_cast<float4(*)[CONSUMERS][WARP]>(inner + SLOTS * PITCH);
    float* const down_sums = reinterpret_cast<float*>(inner + SLOTS * PITCH + UNIT_SUMS);
    uint8_t* const acts = stages + FREE_STAGES * STAGE_BYTES;  // [ROWS][ACT_PITCH], before weights come there
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    for (int i = threadIdx.x; i < MAX_GROUPS; i += THREADS) {
        shared.groups.rows[i] = 0;
        barrier_init(&shared.rows[i], 1);
        if (i < STAGES) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], CONSUMERS);
        }
        if (i < FINISHERS) {
            barrier_init(&shared.summed[i], CONSUMERS);
            barrier_init(&shared.read[i], 1);
        }
        if (i == 0) barrier_init(&shared.acts, 1);
    }
    barrier_init_fence();
    __syncthreads();  // barriers and zeros are there for all warps

    pdl_wait();
    pdl_trigger();

    if (warp == PRODUCER) {
        produce(a, shared, stages, lane);
        return;
    }
    if (warp == FETCHER) {
        if (lane == 0) {
            // In one piece a row, while routing is still on its way: fragments read from L2 would be eight times as
            // many requests, ahead of the one that everything waits for.
            barrier_expect(&shared.acts, a.rows * ACT_ROW);
            for (int row = 0; row < a.rows; ++row) {
                const uint8_t* const source = E4M3 ? a.codes : reinterpret_cast<const uint8_t*>(a.normed);
                bulk_load(acts + row * ACT_PITCH, source + int64_t(row) * ACT_ROW, ACT_ROW, &shared.acts);
            }
        }
        __syncwarp();
        fetch(a, shared, inner, lane);
        return;
    }

    if (warp >= FINISHER) {
        finish(a, shared, unit_sums, warp - FINISHER, lane);
        return;
    }

    barrier_wait(&shared.acts, 0, a.fault, KERNEL, a.layer);
    Fragment b[PARTS][WARP_CHUNKS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
#pragma unroll
        for (int j = 0; j < WARP_CHUNKS; ++j) {
            const int chunk = p * PART_CHUNKS + warp * WARP_CHUNKS + j;
            b[p][j] = activation(acts + lane / 4 * ACT_PITCH, chunk, lane % 4);
        }
    }
    reads_before_copies();
    __syncwarp();  // all lanes have read: weights may come here
    if (lane == 0) {
        for (int s = FREE_STAGES; s < STAGES; ++s) barrier_arrive(&shared.empty[s]);
    }
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");  // the producer has found the groups

    const Share share(shared.groups.count);
    // A thread's part of down's scales: on its way while units are computed.
    float scales[SCALE_LOADS];
    const int each = tiles_of_block() * SCALES, entries = FP8 ? shared.groups.count * each : 0;
#pragma unroll
    for (int j = 0; j < SCALE_LOADS; ++j) {
        const int i = threadIdx.x + j * CONSUMERS * WARP;
        if (i >= entries) continue;
        const int64_t tile = int64_t(shared.groups.expert[i / each]) * TILES + first_tile_of_block();
        scales[j] = a.down_scales[tile * SCALES + i % each];
    }
    int stage = 0, turn = 0;
    uint32_t parity = 0;
    for (int unit = share.unit(0); unit < share.units; unit = share.unit(++turn)) {
        float sum[SUMS][4] = {};
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            barrier_wait(&shared.full[stage], parity, a.fault, KERNEL, a.layer);
            const uint8_t* const part = stages + stage * STAGE_BYTES;
            uint4 w[WARP_CHUNKS];
#pragma unroll
            for (int j = 0; j < WARP_CHUNKS; ++j) {
                w[j] = reinterpret_cast<const uint4*>(part + (warp * WARP_CHUNKS + j) * CHUNK_BYTES)[lane];
            }
            float2 scale[SUMS];
            if (FP8 && p == PARTS - 1) {
#pragma unroll
                for (int q = 0; q < SUMS; ++q) {
                    const int block = (q * PART_CHUNKS + warp * WARP_CHUNKS) * CHUNK_K / 128;
                    scale[q] = reinterpret_cast<const float2*>(part + PART_BYTES)[block];
                }
            }
#pragma unroll
            for (int j = 0; j < WARP_CHUNKS; ++j) multiply(sum[FP8 ? p : 0], w[j], b[p][j]);
            reads_before_copies();
            __syncwarp();  // all lanes have read: the stage may be filled again
            if (lane == 0) barrier_arrive(&shared.empty[stage]);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (p == PARTS - 1) {
#pragma unroll
                for (int q = 0; q < SUMS; ++q) {
                    const float2 s = FP8 ? scale[q] : make_float2(1.0f, 1.0f);
                    total.x += s.x * sum[q][0], total.y += s.x * sum[q][1];
                    total.z += s.y * sum[q][2], total.w += s.y * sum[q][3];
                }
            }
        }
        const int buffer = turn % FINISHERS, uses = turn / FINISHERS;
        if (uses > 0) barrier_wait(&shared.read[buffer], (uses - 1) & 1, a.fault, KERNEL, a.layer);
        unit_sums[buffer][warp][lane] = total;
        __syncwarp();  // all lanes have written
        if (lane == 0) barrier_arrive(&shared.summed[buffer]);
    }
#pragma unroll
    for (int j = 0; j < SCALE_LOADS; ++j) {
        const int i = threadIdx.x + j * CONSUMERS * WARP;
        if (i < entries) (&shared.scale[i / each][0][0])[i % each] = scales[j];
    }
    // The tables of `down` are there.
    asm volatile("bar.sync 3, %0;" ::"n"((CONSUMERS + 1) * WARP) : "memory");
    if constexpr (MORE > 0) {
        if (int(blockIdx.x) < MORE) {
            project<FEW + 1>(a, shared, stages, inner, down_sums, stage, parity, warp, lane);
            return;
        }
    }
    if constexpr (FEW > 0) project<FEW>(a, shared, stages, inner, down_sums, stage, parity, warp, lane);
}
