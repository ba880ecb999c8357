// The chosen experts: gate and up, SiLU, product, down projection, weighted sum. Three quarters of a pass's bytes.
//
// PRECOND: grid: SMS blocks that all fit at once, one a multiprocessor (they wait for each other); block 448; weights,
// normed and inner 16-byte aligned; a row's expert ids are distinct; the half of inner that `epoch` says is zero. Waits
// on the attention tail (normed or codes, expert_ids, expert_weights).
// Reads the chosen experts once; writes and reads inner (L2), 2 * INNER bytes a pair; writes every live row of out.
//
// Two launches leave memory idle while the first drains, the second starts, and its first bytes come. Here a block's
// stream of copies goes on from gate/up units to its own rows of `down`, whose products wait for inner, not for a
// launch. Only routing says which weights to read, so nothing can be fetched before pdl_wait(): what counts is how soon
// the first copy leaves after it, that memory never idles from then on, and how soon the last product follows the last
// byte.
//
// inner goes from block to block without flags: a word that is not zero has been written (a product of zero is stored
// as -0), so that a reader that finds all words has the values, one trip through L2 after they were stored. It has two
// halves, which launches use in turn, each clearing the other's; `epoch`, counted by the last block to look, tells.
//
// All blocks are resident before any of them depends on another: a successor's blocks come only after every block's
// pdl_trigger(), and a predecessor ends without us. So a block that waits for inner waits for blocks that run.
//
// Roles: warp PRODUCER finds the groups and sends copies, DEPTH at a time; warps 0..7 multiply: in gate/up they split
// K, in down tiles and groups; FINISHERS add a unit's sums in turn and store inner; FETCHERS bring complete rows of
// inner into shared memory. Blocks that own more rows of `down` take fewer units, so that all read about as many bytes.
// A successor whose prologue fetches weights needs registers and shared memory beside this kernel: hence 64 registers a
// thread, activations in shared memory, and no more stages.
#include "common/experts_block.cuh"
#include "common/pdl.cuh"

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Adds the warps' sums of every FINISHERS-th unit and stores the products. One warp.
__device__ __forceinline__ void finish(const ExpertsArgs& a, Shared& shared, const float4 (*sums)[CONSUMERS][WARP],
                                       int mine, int lane) {
    const int first = lane % 4 * 2;  // of the two tokens whose sums the lane has, of column lane / 4
    float scale[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < 2 && E4M3; ++i) scale[i] = first + i < a.rows ? a.code_scale[first + i] : 0.0f;
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS - CONSUMERS * WARP) : "memory");  // the producer has found the groups
    if (shared.groups.count == 0) return;
    f16* const inner = a.inner + int64_t(shared.half) * a.inner_half;
    const int odd = lane / 4 % 2, token = first + odd, column = lane / 8 * 2;  // what the lane stores: two columns
    for (uint32_t parity = 0;; parity ^= 1) {
        barrier_wait(&shared.summed[mine], parity, a.fault, KERNEL, a.layer);
        const int unit = shared.summed_unit[mine];
        if (unit < 0) return;
        const int group = unit / UNITS;
        const bool chosen = shared.chose(group, token);
        const int slot = shared.slot(group, token);
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
        uint32_t value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            value[i] = float_to_f16(silu(gate[i]) * up[i] * INNER_SCALE);
            if (value[i] == 0) value[i] = 0x8000;  // zero is what has not been written
        }
        // Neighbours in columns give each other a token, so that each has a word of two columns.
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? value[0] : value[1], 4);
        const uint32_t word = odd ? other | value[1] << 16 : value[0] | other << 16;
        if (chosen) {
            uint32_t* const target = reinterpret_cast<uint32_t*>(inner + slot * INNER + unit % UNITS * 8 + column);
            asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(target), "r"(word) : "memory");
            if ((word & 0x7c00) == 0x7c00 || (word >> 16 & 0x7c00) == 0x7c00)
                report_fault(a.fault, FAULT_NOT_FINITE, KERNEL, a.layer);
        }
        if (lane == 0) shared.finished = unit + 1;
    }
}

__device__ __forceinline__ void produce(const ExpertsArgs& a, Shared& shared, uint8_t* stages, int lane) {
    Groups& groups = shared.groups;
    const int rows = live_rows(a.live, a.rows);
    int half = 0;
    if (lane == 0) half = load_past_l1(a.epoch) & 1;  // on its way beside the ids
    const auto copy = [&](int stage, int expert, int unit, int part) {
        const int64_t start = expert * EXPERT_BYTES + int64_t(unit % UNITS) * UNIT_BYTES;
        const uint32_t bytes = part == PARTS - 1 ? PART_BYTES + SCALE_BYTES : PART_BYTES;
        shared.what[stage] = unit;
        barrier_expect(&shared.full[stage], bytes);
        bulk_load(stages + stage * STAGE_BYTES, a.gate_up + start + part * PART_BYTES, bytes, &shared.full[stage]);
    };
    constexpr int AHEAD = DEPTH < 2 * PARTS ? DEPTH : 2 * PARTS;  // the first copies, one a lane
    int group[LANE_PAIRS];
    bool known = false;
    if (a.dense_groups > 0) {
        dense_groups_of(a.dense_groups, rows, lane, groups);
    } else {
        int id[LANE_PAIRS];
        load_choices(a.expert_ids, lane, id);
        // The first row's choices are the first groups, so that most blocks know their first unit already.
        const int first = blockIdx.x / UNITS;
        if (first < TOP_K && rows > 0) {
            known = __all_sync(0xffffffffu, lane >= TOP_K || uint32_t(id[0]) < EXPERTS) != 0;
            const int expert = __shfl_sync(0xffffffffu, id[0], first);
            if (known && lane < AHEAD && lane < PARTS) copy(lane, expert, blockIdx.x, lane);
            __syncwarp();
        }
        name_groups(id, rows, lane, shared.table, groups, group);
    }
    __syncwarp();  // every lane reads the experts that all lanes wrote
    const int count = groups.count;
    const Share share(count);
    if (count == 0) {
        if (lane == 0) shared.what[0] = -1, barrier_arrive(&shared.full[0]);
        asm volatile("bar.sync 2, %0;" ::"n"(THREADS - CONSUMERS * WARP) : "memory");
        return;
    }
    const int mine = lane < AHEAD ? Share::fixed(lane / PARTS) : share.limit;
    if (mine < share.limit && !(known && lane < PARTS)) copy(lane, groups.expert[mine / UNITS], mine, lane % PARTS);
    int fill = __popc(__ballot_sync(0xffffffffu, mine < share.limit)), stage = fill % STAGES;
    __syncwarp();  // the first copies leave before the masks, which nobody needs until a unit's end
    if (a.dense_groups == 0) {
        mark_rows(group, lane, groups);
#pragma unroll
        for (int j = 0; j < LANE_PAIRS; ++j) {
            if (lane + j * WARP < PAIRS) shared.pair_group[lane + j * WARP] = group[j];
        }
    }
    __syncwarp();  // the masks are there
    const int two[2] = {__popc(groups.rows[2 * lane]), __popc(groups.rows[2 * lane + 1])};
    int sum = two[0] + two[1];
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += below;
    }
    shared.start[2 * lane] = sum - two[0] - two[1];
    shared.start[2 * lane + 1] = sum - two[1];
    if (lane == WARP - 1) shared.pairs = sum;
    if (lane == 0) shared.half = half, shared.live = rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (two[i] > 0) barrier_init(&shared.rows[2 * lane + i], two[i]);
    }
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS - CONSUMERS * WARP) : "memory");  // the groups are there for all warps

    // Waits until the stage may be filled. At most DEPTH copies are on their way, however many stages are free: what
    // others ask memory for, inner above all, waits behind them.
    const auto take = [&]() {
        if (fill >= DEPTH) {
            const int landed = fill - DEPTH;
            barrier_wait(&shared.full[landed % STAGES], landed / STAGES & 1, a.fault, KERNEL, a.layer);
        }
        const int uses = fill / STAGES;
        if (uses > 0) barrier_wait(&shared.empty[stage], (uses - 1) & 1, a.fault, KERNEL, a.layer);
    };
    const auto next = [&]() {
        ++fill;
        if (++stage == STAGES) stage = 0;
    };
    if (lane == 0) {
        Draw draw(share, a.epoch + 2 + 2 * half);
        for (int turn = fill / PARTS, part = fill % PARTS;; ++turn, part = 0) {
            int unit = Share::fixed(turn);
            if (turn < 2 ? unit >= share.limit : !draw.take(unit)) break;
            const int expert = groups.expert[unit / UNITS];
            for (; part < PARTS; ++part) {
                if (part == PARTS - 1) draw.look();  // early, since the answer may be to draw again
                take();
                copy(stage, expert, unit, part);
                next();
            }
        }
    }
    __syncwarp();
    fill = __shfl_sync(0xffffffffu, fill, 0), stage = fill % STAGES;
    const int tiles = tiles_of_block();
    if (tiles == 0) {
        if (lane != 0) return;
        take();
        shared.what[stage] = -1;
        barrier_arrive(&shared.full[stage]);
        return;
    }
    // A lane a tile, group by group: one after the other, their copies would leave too slowly.
    static_assert(STAGE_TILES <= WARP, "a lane sends a tile");
    const int items = count * tiles;
    for (int first = 0; first < items; first += STAGE_TILES) {
        const int item = first + lane, of = item / tiles;
        const bool mine = lane < STAGE_TILES && item < items;
        const int64_t tile = mine ? int64_t(groups.expert[of]) * TILES + first_tile_of_block() + item % tiles : 0;
        take();
        if (lane == 0) {
            shared.what[stage] = -1;
            barrier_expect(&shared.full[stage], min_int(STAGE_TILES, items - first) * TILE_BYTES);
        }
        __syncwarp();  // bytes are expected before they come
        if (mine) {
            bulk_load(stages + stage * STAGE_BYTES + lane * TILE_BYTES, a.down + tile * TILE_BYTES, TILE_BYTES,
                      &shared.full[stage]);
        }
        next();
    }
}

// Brings every FETCHERS-th row of inner as it becomes complete. The first two warps make the tables of `down`, and the
// next launch's half. One warp.
__device__ __forceinline__ void fetch(const ExpertsArgs& a, Shared& shared, uint8_t* rows, int mine, int lane) {
    float weight[LANE_PAIRS];
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j) {
        const int pair = lane + j * WARP;
        weight[j] = mine == 1 && a.dense_groups == 0 && pair < PAIRS ? a.expert_weights[pair] : 0.0f;
    }
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS - CONSUMERS * WARP) : "memory");  // the producer has found the groups
    const int count = shared.groups.count;
    if (count == 0) return;
    const int half = shared.half;
    if (mine == 1) {
        if (a.dense_groups > 0) {
            for (int i = lane; i < count * ROWS; i += WARP) shared.weight[i / ROWS][i % ROWS] = 1.0f / INNER_SCALE;
        } else {
#pragma unroll
            for (int j = 0; j < LANE_PAIRS; ++j) {
                const int pair = lane + j * WARP, group = pair < PAIRS ? shared.pair_group[pair] : -1;
                if (group >= 0) shared.weight[group][pair / TOP_K] = weight[j] * (1.0f / INNER_SCALE);
            }
        }
    }
    float scales[SCALE_LOADS];  // of `down`: a thread's part, all on their way together
    const int each = tiles_of_block() * SCALES, entries = FP8 ? count * each : 0;
#pragma unroll
    for (int j = 0; j < SCALE_LOADS; ++j) {
        const int i = mine * WARP + lane + j * FETCHERS * WARP;
        if (i >= entries) continue;
        const int64_t tile = int64_t(shared.groups.expert[i / each]) * TILES + first_tile_of_block();
        scales[j] = a.down_scales[tile * SCALES + i % each];
    }
    if (mine == 0 && lane == 0) {
        // The last block that has looked at the epoch counts it on, for the next launch.
        int before;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(a.epoch + 1) : "memory");
        if (before == SMS - 1) {
            a.epoch[1] = 0;
            a.epoch[0] = half ^ 1;
            a.epoch[2 + 2 * (half ^ 1)] = a.epoch[3 + 2 * (half ^ 1)] = 0;
        }
    }
    uint4* const other = reinterpret_cast<uint4*>(a.inner + int64_t(half ^ 1) * a.inner_half);
    for (int i = (blockIdx.x * FETCHERS + mine) * WARP + lane; i < a.inner_half / 8; i += SMS * FETCHERS * WARP)
        other[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < SCALE_LOADS; ++j) {
        const int i = mine * WARP + lane + j * FETCHERS * WARP;
        if (i < entries) (&shared.scale[0][0][0])[i] = scales[j];
    }
    __syncwarp();
    asm volatile("bar.arrive 3, %0;" ::"n"((CONSUMERS + FETCHERS) * WARP) : "memory");  // the tables are there
    if (tiles_of_block() == 0) return;

    const f16* const inner = a.inner + int64_t(half) * a.inner_half;
    const int pairs = shared.pairs;
    Row row[AT_ONCE];
    int slot[AT_ONCE], of[AT_ONCE];  // what is on its way: the row, -1 for none, and its group
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) slot[i] = -1;
    int next = mine, group = 0, left = div_up(max_int(0, pairs - mine), FETCHERS);
    for (int tries = 0; left > 0; ++tries) {
        // A row is asked for when all blocks are likely to have stored it, so that the asking costs memory nothing.
        const int known = shared.drained != 0 ? 1 << 30 : shared.finished - LAG;
        bool idle = true;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (slot[i] < 0 && next < pairs) {
                while (group + 1 < count && shared.start[group + 1] <= next) ++group;
                if ((group + 1) * UNITS <= known) slot[i] = next, of[i] = group, next += FETCHERS;
            }
            if (slot[i] >= 0) row[i].load(inner + slot[i] * INNER, lane), idle = false;
        }
        bool got = false;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (slot[i] < 0 || !row[i].complete()) continue;
            row[i].store(rows + slot[i] * PITCH, &shared.top[E4M3 ? slot[i] : 0], lane);
            __syncwarp();  // all lanes have stored
            if (lane == 0) barrier_arrive(&shared.rows[of[i]]);
            slot[i] = -1, --left, got = true;
        }
        if (got) tries = 0;
        if (idle) __nanosleep(100);
        if (tries > (1 << 23)) {
            report_fault(a.fault, FAULT_COPY, KERNEL, a.layer);
            asm volatile("trap;");
        }
    }
}

// Gives the warps' sums of a turn to the finisher whose turn it is. All consumer warps.
template <class Store>
__device__ __forceinline__ void hand_over(const ExpertsArgs& a, Shared& shared, int turn, int unit, int warp, int lane,
                                          const Store& store) {
    const int buffer = turn % FINISHERS, uses = turn / FINISHERS;
    if (uses > 0) barrier_wait(&shared.read[buffer], (uses - 1) & 1, a.fault, KERNEL, a.layer);
    if (warp == 0 && lane == 0) shared.summed_unit[buffer] = unit;
    store(buffer);
    __syncwarp();  // all lanes have written
    if (lane == 0) barrier_arrive(&shared.summed[buffer]);
}

// Tells the finishers that there are no more units.
__device__ __forceinline__ void dismiss(const ExpertsArgs& a, Shared& shared, int turn, int warp, int lane) {
    for (int i = 0; i < FINISHERS; ++i) hand_over(a, shared, turn + i, -1, warp, lane, [](int) {});
}

// The rows of out that the block owns. Consumer warps; stage and parity go on from the units. A warp has one tile, and
// every TEAMS-th group.
template <int N>
__device__ __forceinline__ void project(const ExpertsArgs& a, Shared& shared, const uint8_t* stages,
                                        const uint8_t* inner, float* sums, int stage, uint32_t parity, int turn,
                                        int warp, int lane) {
    constexpr int TEAMS = CONSUMERS / N;
    const int items = shared.groups.count * N, token = lane / 4;
    const int tile = warp % N, team = warp / N;
    float total[4] = {};
    int item = team < TEAMS ? team * N + tile : items;  // the warp's next
    for (int first = 0; first < items; first += STAGE_TILES) {
        barrier_wait(&shared.full[stage], parity, a.fault, KERNEL, a.layer);
        const int end = min_int(items, first + STAGE_TILES);
        for (; item < end; item += TEAMS * N) {
            const int group = item / N;
            barrier_wait(&shared.rows[group], 0, a.fault, KERNEL, a.layer);
            const bool chosen = shared.chose(group, token);
            const uint8_t* const row = inner + (chosen ? shared.slot(group, token) : 0) * PITCH;
            float2 weight = *reinterpret_cast<const float2*>(&shared.weight[group][lane % 4 * 2]);
            if constexpr (E4M3) {
                const int two = lane % 4 * 2;
                weight.x *= shared.chose(group, two) ? shared.top[shared.slot(group, two)] * (1.0f / MOST_E4M3) : 0.0f;
                weight.y *=
                    shared.chose(group, two + 1) ? shared.top[shared.slot(group, two + 1)] * (1.0f / MOST_E4M3) : 0.0f;
            }
            const uint8_t* const weights = stages + stage * STAGE_BYTES + (item - first) * TILE_BYTES;
            float part[4] = {};
#pragma unroll
            for (int s = 0; s < SCALES; ++s) {
                float sum[4] = {};
#pragma unroll
                for (int j = 0; j < SCALE_CHUNKS; ++j) {
                    const int c = s * SCALE_CHUNKS + j;
                    const uint4 w = reinterpret_cast<const uint4*>(weights + c * CHUNK_BYTES)[lane];
                    // What a row that did not choose the group holds was never fetched: it is a zero.
                    multiply(sum, w, chosen ? product(row, c, lane % 4) : Fragment{});
                }
                // The table's rows are as long as the block's own tiles.
                const float scale = FP8 ? (&shared.scale[0][0][0])[item * SCALES + s] : 1.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) part[i] += scale * sum[i];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) total[i] += (i % 2 == 0 ? weight.x : weight.y) * part[i];
        }
        reads_before_copies();
        __syncwarp();  // all lanes have read: the stage may be filled again
        if (lane == 0) barrier_arrive(&shared.empty[stage]);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (first == 0) dismiss(a, shared, turn, warp, lane);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int column = lane % 4 * 2 + i % 2, row = lane / 4 + i / 2 * 8;
        sums[warp * SUM_FLOATS + column * TILE_PITCH + row] = total[i];
    }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * WARP) : "memory");  // all warps' sums are there
    const int rows = shared.live;
    for (int i = threadIdx.x; i < N * 16 * rows; i += CONSUMERS * WARP) {
        const int column = i / (N * 16), which = i / 16 % N, row = i % 16;
        float x = 0.0f;
#pragma unroll
        for (int t = 0; t < TEAMS; ++t) x += sums[(t * N + which) * SUM_FLOATS + column * TILE_PITCH + row];
        a.out[int64_t(column) * HIDDEN + (first_tile_of_block() + which) * 16 + row] = x;
        if (!is_finite(x)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_DOWN, a.layer);
    }
}

extern "C" __global__ void __launch_bounds__(512, 2) experts(const __grid_constant__ ExpertsArgs a) {
    extern __shared__ __align__(128) uint8_t stages[];
    __shared__ __align__(16) Shared shared;
    uint8_t* const inner = stages + STAGES * STAGE_BYTES;  // [SLOTS][PITCH]
    float4(*const unit_sums)[CONSUMERS][WARP] = reinterpret_cast<float4(*)[CONSUMERS][WARP]>(inner + SLOTS * PITCH);
    float* const down_sums = reinterpret_cast<float*>(unit_sums);  // when no unit is left
    uint8_t* const acts = inner + SLOTS * PITCH + SUMS_BYTES;      // [ROWS][ACT_PITCH]
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    for (int i = threadIdx.x; i < MAX_GROUPS; i += THREADS) {
        shared.groups.rows[i] = 0;
        if (i < STAGES) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], CONSUMERS);
        }
        if (i < FINISHERS) {
            barrier_init(&shared.summed[i], CONSUMERS);
            barrier_init(&shared.read[i], 1);
        }
        if (i == 0) barrier_init(&shared.acts, 1), shared.finished = shared.drained = 0;
    }
    barrier_init_fence();
    for (int i = threadIdx.x; i < MAX_GROUPS * ROWS; i += THREADS) (&shared.weight[0][0])[i] = 0.0f;
    __syncthreads();  // barriers and zeros are there for all warps

    // The launch's parameters are fetched into the constant cache while there is time.
    asm volatile("" ::"l"(a.fault), "l"(a.live), "l"(a.normed), "l"(a.codes), "l"(a.gate_up), "l"(a.down), "l"(a.out),
                 "l"(a.expert_ids), "l"(a.inner), "l"(a.epoch), "r"(a.dense_groups), "r"(a.rows));
    pdl_wait();
    pdl_trigger();

    if (warp == PRODUCER) {
        produce(a, shared, stages, lane);
        return;
    }
    if (warp == FETCHER) {
        // In one piece a row, while routing is still on its way: fragments read from L2 would be eight times as many
        // requests, ahead of the one that everything waits for.
        if (lane == 0) barrier_expect(&shared.acts, a.rows * ACT_ROW);
        __syncwarp();  // bytes are expected before they come
        if (lane < a.rows) {
            // Blocks begin with different rows: all of them read the same lines.
            const int row = (lane + blockIdx.x) % a.rows;
            const uint8_t* const source = E4M3 ? a.codes : reinterpret_cast<const uint8_t*>(a.normed);
            bulk_load(acts + row * ACT_PITCH, source + int64_t(row) * ACT_ROW, ACT_ROW, &shared.acts);
        }
        __syncwarp();
    }
    if (warp >= FETCHER) {
        fetch(a, shared, inner, warp - FETCHER, lane);
        return;
    }
    if (warp >= FINISHER) {
        finish(a, shared, unit_sums, warp - FINISHER, lane);
        return;
    }

    barrier_wait(&shared.acts, 0, a.fault, KERNEL, a.layer);
    const uint8_t* const own = acts + lane / 4 * ACT_PITCH;  // the lane's row
    int stage = 0, turn = 0;
    uint32_t parity = 0;
    for (;; ++turn) {
        barrier_wait(&shared.full[stage], parity, a.fault, KERNEL, a.layer);
        const int unit = shared.what[stage];
        if (unit < 0) break;
        float sum[SUMS][4] = {};
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            if (p > 0) barrier_wait(&shared.full[stage], parity, a.fault, KERNEL, a.layer);
            const uint8_t* const part = stages + stage * STAGE_BYTES;
            float2 scale[SUMS];
            if (FP8 && p == PARTS - 1) {
#pragma unroll
                for (int q = 0; q < SUMS; ++q) {
                    const int block = (q * PART_CHUNKS + warp * WARP_CHUNKS) * CHUNK_K / 128;
                    scale[q] = reinterpret_cast<const float2*>(part + PART_BYTES)[block];
                }
            }
#pragma unroll
            for (int j = 0; j < WARP_CHUNKS; ++j) {
                const uint4 w = reinterpret_cast<const uint4*>(part + (warp * WARP_CHUNKS + j) * CHUNK_BYTES)[lane];
                multiply(sum[FP8 ? p : 0], w, activation(own, p * PART_CHUNKS + warp * WARP_CHUNKS + j, lane % 4));
            }
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
        hand_over(a, shared, turn, unit, warp, lane, [&](int buffer) { unit_sums[buffer][warp][lane] = total; });
    }
    if (threadIdx.x == 0) shared.drained = 1;
    if (shared.groups.count == 0) return;
    // The tables of `down` are there.
    asm volatile("bar.sync 3, %0;" ::"n"((CONSUMERS + FETCHERS) * WARP) : "memory");
    if constexpr (MORE > 0) {
        if (int(blockIdx.x) < MORE) {
            project<FEW + 1>(a, shared, stages, inner, down_sums, stage, parity, turn, warp, lane);
            return;
        }
    }
    if constexpr (FEW > 0) {
        project<FEW>(a, shared, stages, inner, down_sums, stage, parity, turn, warp, lane);
    } else {
        dismiss(a, shared, turn, warp, lane);
    }
}
