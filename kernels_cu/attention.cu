// Decode attention of one split of the sequence: all live rows and all query heads of a KV head at once, so that every
// key and value is read once a pass.
//
// PRECOND: grid (splits, KV_HEADS), block 160, dynamic shared memory SMEM bytes; caches and slots in whole tiles of 64
// positions, 16-byte aligned; positions of the live rows within ROWS consecutive ones, in any order; K and V of those
// positions were written by the predecessor, all older ones, `positions` and *live at least two launches ago. Reads
// 512 bytes a position that the live rows see, in units of 16 (kv_split), and q; writes partials of active splits: 512
// bytes of sums and 8 of statistics a row and head. Statistics are in base 2: partial_max is a reference that no
// scale * log2(e) * q.k of the split exceeds by more than log2(HEADROOM). A row's 128 sums are in the order in which
// threads hold them: dimension 16 w + g + 8 i + 64 j lies at 32 w + 4 g + i + 2 j.
//
// How: a query (row, head) is a column m = row * GROUP + head, and 16 of them make an m-tile; only m-tiles with live rows
// are computed. A fifth warp brings keys and values of 64 positions at a time, K0 V0 K1 V1 ..., into a ring of stages by
// bulk copies; they are contiguous in the cache and already swizzled for ldmatrix. L2 is told to give them up first: the
// partials, written for the next launch, would go to memory instead. EARLY copies are under way before the predecessor
// ends: the few rows that it writes itself are copied over them afterwards. Then comes q, without which nothing begins.
// Behind a whole ring of copies it would take 3 us, so the ring is filled when q is there.
//
// Keys and dimensions are the M of wgmma, queries its N: of the 64 keys, and of the 128 dimensions in two halves, a warp
// has 16 each, and holds them in registers. So K and V pass through shared memory's read port once, in the cache's own
// order, and a tile's stages are free again before its values are multiplied. Queries and probabilities are B, which all
// warps read from shared memory. The softmax needs a reference, not the maximum: while no probability exceeds HEADROOM the
// old one stays, which saves the maxima's exchange; whether one did is asked at the barrier that probabilities need anyway,
// the only one of a tile. The next tile's scores are computed behind this one's output.
#include "abi_decode.cuh"
#include "common/attend.cuh"
#include "common/kv.cuh"
#include "common/pdl.cuh"
#include "common/wgmma.cuh"

constexpr int WARPS = 4;
constexpr int CONSUMERS = WARPS * WARP;    // threads; a warp more copies
constexpr int THREADS = CONSUMERS + WARP;
constexpr int M_TILES = (ROWS * GROUP + 15) / 16;
constexpr int M_ROWS = M_TILES * 16;
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int TILE_BYTES = KV_TILE * ROW_BYTES;
constexpr int UNIT_BYTES = SPLIT_UNIT * ROW_BYTES;
constexpr int TILE_UNITS = KV_TILE / SPLIT_UNIT;
constexpr int K_STEPS = HEAD_DIM / 16;  // of the product with keys
constexpr int V_STEPS = KV_TILE / 16;   // of the product with values
constexpr int B_ROW = 128;              // bytes of an operand's row
constexpr float HEADROOM = 1024.0f;     // halves reach 65504
constexpr int EARLY = 4;                // copies before the wait
constexpr int MIDDLE = 5;               // copies before q is there
constexpr int PAIRS = STAGES / 2;
constexpr int FIRST_KEYS = (MIDDLE + 1) / 2;  // tiles whose keys are among those copies
constexpr int FIRST_VALUES = MIDDLE / 2;      // and whose values are

static_assert(HEAD_DIM == 128 && KV_TILE == 64, "the swizzle and the warps' shares are laid out for these");
static_assert(SPLIT_UNIT == 16, "a warp's keys of a tile, and a step of the product with values");
static_assert(M_ROWS * ROW_BYTES / 16 % CONSUMERS == 0, "every thread copies as much of q");
static_assert(KV_HEADS * GROUP == Q_HEADS, "query heads are shared among KV heads evenly");
static_assert(ROWS * GROUP <= CONSUMERS, "a thread writes a query's statistics");
static_assert(M_TILES <= 3, "wgmma_f16 goes up to N = 48");
static_assert(STAGES >= 4 && STAGES % 2 == 0, "keys and values of whole tiles, of which two are in use at a time");
static_assert(2 <= EARLY && EARLY <= MIDDLE && MIDDLE <= STAGES, "copies are numbered by these");

// Every member before `maxima` is a multiple of 1024 bytes, which swizzles need.
struct Shared {
    uint8_t stages[STAGES][TILE_BYTES];
    uint8_t q[2][M_ROWS * B_ROW];  // a half of the dimensions each
    uint8_t p[2][M_ROWS * B_ROW];  // of even and of odd tiles
    float maxima[WARPS][M_ROWS];   // of a warp's keys; sums of probabilities after the last tile
    float reference[M_ROWS];       // after the last tile
    uint64_t full[STAGES], empty[PAIRS], query;  // a tile's keys and values are given back together, by every thread
};
static_assert(sizeof(Shared) <= SMEM, "the host reserves less than this needs");

// A barrier of the warps that compute: the one that copies never waits for them all.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ bool consumers_or(bool x) {
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"(uint32_t(x)), "n"(CONSUMERS)
        : "memory");
    return any != 0;
}

// Lanes of a warp's eight rows g; every one gets the result.
__device__ __forceinline__ float rows_max(float x) {
#pragma unroll
    for (int offset = 4; offset < WARP; offset *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
__device__ __forceinline__ float rows_sum(float x) {
#pragma unroll
    for (int offset = 4; offset < WARP; offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// The split's units of 16 positions, in tiles of four of which the last may have fewer, and where they come from.
struct Share {
    int split;
    int first;       // unit of positions
    int units;
    int count;       // tiles
    int slot_unit;   // where `first` lies
    int slot_units;  // of the cache
    const uint8_t* k;
    const uint8_t* v;
};

// Copies are numbered in the order in which they are read: K0, V0, K1, V1, ...
__device__ __forceinline__ int keys_number(int tile) { return 2 * tile; }
__device__ __forceinline__ int values_number(int tile) { return 2 * tile + 1; }

// Slot unit of the share's unit i: less than twice around, as an extent has at most one tile more than the ring.
__device__ __forceinline__ int slot_unit(const Share& share, int i) {
    const int unit = share.slot_unit + i;
    return unit >= share.slot_units ? unit - share.slot_units : unit;
}

// One thread: copy `number` into its stage, if there is such a copy.
__device__ __forceinline__ void load(Shared& shared, const Share& share, int number, int stage) {
    const int tile = number / 2;
    if (tile >= share.count) return;
    const uint8_t* const from = number % 2 == 0 ? share.k : share.v;
    const int units = min_int(TILE_UNITS, share.units - tile * TILE_UNITS), slot = slot_unit(share, tile * TILE_UNITS);
    const int straight = min_int(units, share.slot_units - slot);
    const uint64_t policy = evict_first();
    barrier_expect(&shared.full[stage], units * UNIT_BYTES);
    bulk_load(shared.stages[stage], from + int64_t(slot) * UNIT_BYTES, straight * UNIT_BYTES, &shared.full[stage],
              policy);
    if (straight < units) {  // the ring's end lies in the tile
        bulk_load(shared.stages[stage] + straight * UNIT_BYTES, from, (units - straight) * UNIT_BYTES,
                  &shared.full[stage], policy);
    }
}

// All that compute, after pdl_wait: K and V of this pass's positions over what the first MIDDLE copies held of them.
__device__ __forceinline__ void renew(const AttentionArgs& a, Shared& shared, const Share& share, const Pass& pass) {
    const int first = min_int(share.units, FIRST_KEYS * TILE_UNITS);
    if (pass.fresh_low / SPLIT_UNIT >= share.first + first || pass.fresh_high / SPLIT_UNIT < share.first) return;
    for (int i = 0; i < FIRST_KEYS; ++i) {  // not before the copies themselves have arrived
        if (i < share.count) barrier_wait(&shared.full[keys_number(i)], 0, a.fault, KERNEL_ATTENTION, a.layer);
    }
    for (int i = 0; i < FIRST_VALUES; ++i) {
        if (i < share.count) barrier_wait(&shared.full[values_number(i)], 0, a.fault, KERNEL_ATTENTION, a.layer);
    }
    constexpr int PIECES = ROW_BYTES / 16;
#pragma unroll
    for (int j = 0; j < 2 * ROWS * PIECES / CONSUMERS; ++j) {
        const int at = j * CONSUMERS + threadIdx.x, row = at / PIECES % ROWS;
        const bool value = at >= ROWS * PIECES;
        const int position = __shfl_sync(0xffffffffu, pass.fresh, row);
        const int unit = position / SPLIT_UNIT - share.first, tile = unit / TILE_UNITS;
        if (row < pass.written && unit >= 0 && unit < share.units && tile < (value ? FIRST_VALUES : FIRST_KEYS)) {
            const int piece = position % SPLIT_UNIT * ROW_BYTES + at % PIECES * 16;
            const int stage = value ? values_number(tile) : keys_number(tile);
            copy_async_16(shared.stages[stage] + unit % TILE_UNITS * UNIT_BYTES + piece,
                          (value ? share.v : share.k) + int64_t(slot_unit(share, unit)) * UNIT_BYTES + piece);
        }
    }
}

// exp2(s - reference) of a thread's two keys and all columns, as halves and summed. True: one exceeds HEADROOM.
template <int N>
__device__ __forceinline__ bool probabilities(const float (&s)[N / 2], const float (&reference)[N / 4], float to_log2,
                                              uint32_t (&packed)[N / 8][2], float (&sums)[N / 4]) {
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
        float p[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            p[e] = exp2_fast(fmaf(s[n * 4 + e], to_log2, -reference[n * 2 + e % 2]));
            most = fmaxf(most, p[e]);
        }
        packed[n][0] = pack_f16(p[0], p[1]);
        packed[n][1] = pack_f16(p[2], p[3]);
        sums[n * 2] = p[0] + p[2];
        sums[n * 2 + 1] = p[1] + p[3];
    }
    return most > HEADROOM;
}

// Into B's rows, which are queries: 16 bytes are eight keys of one.
template <int N>
__device__ __forceinline__ void store_probabilities(uint32_t address, const uint32_t (&packed)[N / 8][2]) {
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
        const uint32_t r[4] = {packed[n][0], packed[n][1], packed[n + 1][0], packed[n + 1][1]};
        store_transposed(address + n * 8 * B_ROW, r);
    }
}

// Softmax with a running reference over the split's tiles. N: columns, a multiple of 16.
template <int N>
__device__ __forceinline__ void consume(const AttentionArgs& a, Shared& shared, const Share& share, const Pass& pass) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int octet = lane / 8, line = lane % 8;  // which row of which of four matrices a lane points at
    const float to_log2 = a.scale * LOG2E;
    constexpr int COLUMNS = N / 4;  // of a thread: 8n + 2t and 8n + 2t + 1
    constexpr float NOTHING = -1e30f;  // the reference of a column without keys: any key's probability is infinite

    // Both operands' matrices are in the order of mma_f16's A: rows 0 to 7, rows 8 to 15, then the same of the next
    // eight columns. Keys' rows are rows; values' rows are columns.
    const uint32_t stages = shared_address(shared.stages);
    const uint32_t k_line = stages + (warp * 16 + (octet & 1) * 8 + line) * ROW_BYTES + (((octet >> 1) ^ line) << 4);
    const uint32_t v_line = stages + ((octet >> 1) * 8 + line) * ROW_BYTES + (((warp * 2 + (octet & 1)) ^ line) << 4);
    const uint32_t p_line = ((octet >> 1) * 8 + line) * B_ROW + (((warp * 2 + (octet & 1)) ^ line) << 4);
    const uint64_t q_operand = wgmma_operand(shared_address(shared.q));
    const uint64_t p_operand = wgmma_operand(shared_address(shared.p));

    float s[N / 2], o[2][N / 2];
    uint32_t k[K_STEPS][4], v[2][V_STEPS][4];
    float reference[COLUMNS], sum[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) reference[c] = NOTHING, sum[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) o[0][i] = o[1][i] = 0.0f;

    const auto arrived = [&](int i, int stage) {
        barrier_wait(&shared.full[stage], (i / PAIRS) & 1, a.fault, KERNEL_ATTENTION, a.layer);
        return stage * TILE_BYTES;
    };
    const auto load_keys = [&](int i) {
        const uint32_t tile = k_line + arrived(i, i % PAIRS * 2);
#pragma unroll
        for (int c = 0; c < K_STEPS; ++c) ldmatrix(k[c], tile ^ (c << 5));
    };
    const auto load_values = [&](int i) {
        const uint32_t tile = v_line + arrived(i, i % PAIRS * 2 + 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int c = 0; c < V_STEPS; ++c) {
                ldmatrix_transposed(v[half][c], (tile + c * 16 * ROW_BYTES) ^ (half << 7));
            }
        }
    };
    const auto begin_scores = [&]() {
#pragma unroll
        for (int c = 0; c < K_STEPS; ++c) {
            wgmma_f16(s, k[c], q_operand + ((c / 4 * (M_ROWS * B_ROW) + c % 4 * 32) >> 4), c > 0);
        }
    };
    const auto begin_output = [&](int i) {
#pragma unroll
        for (int c = 0; c < V_STEPS; ++c) {
            const uint64_t p = p_operand + ((i % 2 * (M_ROWS * B_ROW) + c * 32) >> 4);
            wgmma_f16(o[0], v[0][c], p, 1);
            wgmma_f16(o[1], v[1][c], p, 1);
        }
    };
    const auto finish_products = [&]() {
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(s);
        wgmma_pin(o[0]);
        wgmma_pin(o[1]);
    };

    load_keys(0);
    wgmma_fence();
    begin_scores();
    finish_products();

    const auto softmax = [&](int i) {
        load_values(i);

        // Only tiles at the extent's two ends hold keys that some row does not see, and only the last one is short.
        const int unit = i * TILE_UNITS + warp, first_key = (share.first + unit) * SPLIT_UNIT;
        if (first_key + 15 > pass.low || (a.window > 0 && first_key <= pass.high - a.window) || unit >= share.units) {
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const int row = min_int((c / 2 * 8 + t * 2 + c % 2) / GROUP, ROWS - 1);
                const int newest = __shfl_sync(0xffffffffu, pass.position, row);
                const int hidden = a.window > 0 ? newest - a.window : -1;  // the newest key out of sight
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int key = first_key + half * 8 + g;
                    if (key > newest || key <= hidden || unit >= share.units) {
                        s[c / 2 * 4 + half * 2 + c % 2] = none();
                    }
                }
            }
        }
        if (i == share.count - 1) {  // what lies behind a short tile need not be finite
#pragma unroll
            for (int c = 1; c < V_STEPS; ++c) {
                if (i * TILE_UNITS + c >= share.units) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) v[0][c][e] = v[1][c][e] = 0;
                }
            }
        }

        const uint32_t p_tile = shared_address(shared.p[i % 2]) + p_line;
        uint32_t packed[N / 8][2];
        float together[COLUMNS];
        bool high = true;  // the first tile has no reference yet
        if (i > 0) {
            high = probabilities<N>(s, reference, to_log2, packed, together);
            store_probabilities<N>(p_tile, packed);
        }
        // For wgmma, probabilities; for the copies that take the stages, this thread's reads of them.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();  // all lanes at once
        barrier_arrive(&shared.empty[i % PAIRS]);
        // All warps' probabilities are there. Nobody reads the other tile's any more: each warp has waited for its
        // products.
        if (i == 0 || __any_sync(0xffffffffu, consumers_or(high))) {
            float now[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                now[c] = rows_max(fmaxf(s[c / 2 * 4 + c % 2], s[c / 2 * 4 + 2 + c % 2]));
                if (g == 0) shared.maxima[warp][c / 2 * 8 + t * 2 + c % 2] = now[c];
            }
            consumers_sync();  // all warps' maxima are there
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const int column = c / 2 * 8 + t * 2 + c % 2;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) now[c] = fmaxf(now[c], shared.maxima[w][column]);
                now[c] = fmaxf(reference[c], now[c] * to_log2);
                const float shrink = exp2_fast(reference[c] - now[c]);
                reference[c] = now[c];
                sum[c] *= shrink;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    o[0][c / 2 * 4 + half * 2 + c % 2] *= shrink;
                    o[1][c / 2 * 4 + half * 2 + c % 2] *= shrink;
                }
            }
            probabilities<N>(s, reference, to_log2, packed, together);
            store_probabilities<N>(p_tile, packed);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            consumers_sync();  // all warps' new probabilities are there, and nobody reads maxima any more
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sum[c] += together[c];
    };
    const int last = share.count - 1;
    for (int i = 0; i < last; ++i) {
        softmax(i);
        load_keys(i + 1);
        wgmma_fence();
        begin_output(i);
        begin_scores();
        finish_products();
    }
    softmax(last);
    wgmma_fence();
    begin_output(last);
    finish_products();

    // Nobody reads maxima since a barrier of the first tile or a later one.
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const float x = rows_sum(sum[c]);
        if (g == 0) shared.maxima[warp][c / 2 * 8 + t * 2 + c % 2] = x;
    }
    const int live = pass.rows * GROUP;
    const int64_t split = int64_t(blockIdx.y) * a.splits + share.split;
    float* const out = a.partial_out + split * (ROWS * GROUP * HEAD_DIM) + (warp * 8 + g) * 4;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int m = c / 2 * 8 + t * 2 + c % 2, at = c / 2 * 4 + c % 2;
        if (m < live) {  // eight lanes write 128 contiguous bytes
            const float4 held = make_float4(o[0][at], o[0][at + 2], o[1][at], o[1][at + 2]);
            *reinterpret_cast<float4*>(out + m * HEAD_DIM) = held;
        }
    }
    if (warp == 0 && g == 0) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) shared.reference[c / 2 * 8 + t * 2 + c % 2] = reference[c];
    }
    consumers_sync();  // all warps' sums are there, and references
    if (threadIdx.x < live) {
        const int m = threadIdx.x;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += shared.maxima[w][m];
        const int64_t at = (int64_t(blockIdx.y) * (ROWS * GROUP) + m) * a.splits + share.split;
        a.partial_max[at] = shared.reference[m] == NOTHING ? none() : shared.reference[m];
        a.partial_sum[at] = total;
    }
}

// 208 registers: where a quarter of a multiprocessor holds two of the warps, two of combine's fit beside them.
extern "C" __global__ void __maxnreg__(208) attention(const __grid_constant__ AttentionArgs a) {
    extern __shared__ __align__(1024) uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const Pass pass = read_pass(a.live, a.positions, a.rows, a.written);
    if (pass.rows <= 0) {
        pdl_wait();  // this launch must not end before its predecessor: the successor relies on that
        pdl_trigger();
        return;
    }
    const int live = pass.rows * GROUP, m_tiles = (live + 15) / 16;
    // The last split, which has this pass's positions to see to, belongs to the block that starts first.
    Share share;
    share.split = kv_split(pass.low, pass.high, a.window, a.splits, 0).active - 1 - int(blockIdx.x);
    if (share.split < 0) return;  // the first block always has a split, and its wait is the launch's
    const Split split = kv_split(pass.low, pass.high, a.window, a.splits, share.split);
    share.first = split.first;
    share.units = split.units;
    share.count = div_up(split.units, TILE_UNITS);
    share.slot_units = a.slots / SPLIT_UNIT;
    share.slot_unit = share.first % share.slot_units;
    const int64_t cache = int64_t(blockIdx.y) * share.slot_units * UNIT_BYTES;
    share.k = reinterpret_cast<const uint8_t*>(a.k_cache) + cache;
    share.v = reinterpret_cast<const uint8_t*>(a.v_cache) + cache;

    if (threadIdx.x == CONSUMERS) {
        for (int i = 0; i < STAGES; ++i) barrier_init(&shared.full[i], 1);
        for (int i = 0; i < PAIRS; ++i) barrier_init(&shared.empty[i], CONSUMERS);
        barrier_init(&shared.query, 1);
        barrier_init_fence();
        // The predecessor may still be writing K and V of this pass's positions. Whatever these copies catch of that is
        // finite, and replaced by `renew`; or, where in a ring it takes the place of a position that no row sees any
        // more, masked. All else was written by launches that ended before the predecessor began.
        for (int i = 0; i < EARLY; ++i) load(shared, share, i, i);
    }
    __syncthreads();  // the barriers are initialised
    pdl_wait();
    pdl_trigger();

    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x > CONSUMERS) return;
        for (int i = EARLY; i < MIDDLE; ++i) load(shared, share, i, i);
        barrier_wait(&shared.query, 0, a.fault, KERNEL_ATTENTION, a.layer);
        for (int i = MIDDLE; i < STAGES; ++i) load(shared, share, i, i);
        for (int i = PAIRS; i < share.count; ++i) {
            const int pair = i % PAIRS, parity = (i / PAIRS - 1) & 1;
            barrier_wait(&shared.empty[pair], parity, a.fault, KERNEL_ATTENTION, a.layer);
            load(shared, share, 2 * i, 2 * pair);
            load(shared, share, 2 * i + 1, 2 * pair + 1);
        }
        return;
    }

    // q into shared memory as B; rows of no query are zero, so that nothing strange is computed.
    constexpr int PIECES = ROW_BYTES / 16;
#pragma unroll
    for (int i = 0; i < M_ROWS * PIECES / CONSUMERS; ++i) {
        const int at = i * CONSUMERS + threadIdx.x, m = at / PIECES, piece = at % PIECES;
        // With one KV head, row and head are m itself.
        const int head = KV_HEADS == 1 ? m : m / GROUP * Q_HEADS + blockIdx.y * GROUP + m % GROUP;
        copy_async_or_zeros(shared.q[piece / 8] + m * B_ROW + ((piece % 8 ^ (m & 7)) << 4),
                            a.q + head * HEAD_DIM + piece * 8, m < live);
    }
    renew(a, shared, share, pass);
    copy_async_commit();
    copy_async_wait<0>();
    if (threadIdx.x == 0) {
        // The predecessor wrote K and V with ordinary stores, which its end made visible to ordinary loads; the copies
        // that follow this arrival read through another proxy.
        if (pass.fresh_high / SPLIT_UNIT >= share.first) asm volatile("fence.proxy.async;" ::: "memory");
        barrier_arrive(&shared.query);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads q through another proxy
    consumers_sync();  // q and this pass's keys and values are there

    if (M_TILES >= 3 && m_tiles == 3) {
        consume<(M_TILES >= 3 ? 48 : 16)>(a, shared, share, pass);
    } else if (M_TILES >= 2 && m_tiles == 2) {
        consume<(M_TILES >= 2 ? 32 : 16)>(a, shared, share, pass);
    } else {
        consume<16>(a, shared, share, pass);
    }
}
