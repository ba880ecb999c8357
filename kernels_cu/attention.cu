// Decode attention of one split of the sequence: all live rows and all query heads of a KV head at once, so that every
// key and value is read once a pass.
//
// PRECOND: grid (splits, KV_HEADS), block 128, dynamic shared memory SMEM bytes; caches and slots in whole tiles of 64
// positions, 16-byte aligned; positions of the live rows within ROWS consecutive ones, in any order; K and V of those
// positions were written by the predecessor, all older ones, `positions` and *live at least two launches ago. Reads
// 32 KB a tile that the live rows see (kv_extent), and q; writes partials of active splits: 512 bytes of sums and 8 of
// statistics a row and head. Statistics are in base 2: partial_max is a reference that no scale * log2(e) * q.k of the
// split exceeds by more than log2(HEADROOM).
//
// How: a query (row, head) is a column m = row * GROUP + head, and 16 of them make an m-tile; only m-tiles with live rows
// are computed. Bulk copies bring tiles of 64 keys into a ring of stages; a tile is contiguous in the cache and already
// swizzled for ldmatrix. The first one is under way before the predecessor ends: the few rows that it writes itself are
// copied over it afterwards. The others are asked for behind q, which would wait for them.
//
// Keys and dimensions are the M of wgmma, queries its N: of the 64 keys, and of the 128 dimensions in two halves, a warp
// has 16 each, and holds them in registers. So K and V pass through shared memory's read port once, in the cache's own
// order, and a stage is free again as soon as its tile has been read, before anything is multiplied. Queries and
// probabilities are B, which all warps read from shared memory. The softmax needs a reference, not the maximum: while no
// probability exceeds HEADROOM the old one stays, which saves the maxima's exchange; whether one did is asked at the
// barrier that probabilities need anyway, the only one of a tile. The next tile's scores are computed behind this one's
// output.
#include "abi.cuh"
#include "common/attend.cuh"
#include "common/kv.cuh"
#include "common/pdl.cuh"
#include "common/wgmma.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int M_TILES = (ROWS * GROUP + 15) / 16;
constexpr int M_ROWS = M_TILES * 16;
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int TILE_BYTES = KV_TILE * ROW_BYTES;
constexpr int K_STEPS = HEAD_DIM / 16;  // of the product with keys
constexpr int V_STEPS = KV_TILE / 16;   // of the product with values
constexpr int B_ROW = 128;              // bytes of an operand's row
constexpr int EARLY = 1;                // tiles copied before the wait: q, asked for behind it, waits for those
constexpr float HEADROOM = 1024.0f;     // halves reach 65504

static_assert(HEAD_DIM == 128 && KV_TILE == 64, "the swizzle and the warps' shares are laid out for these");
static_assert(M_ROWS * ROW_BYTES / 16 % THREADS == 0, "every thread copies as much of q");
static_assert(KV_HEADS * GROUP == Q_HEADS, "query heads are shared among KV heads evenly");
static_assert(M_TILES <= 3, "wgmma_f16 goes up to N = 48");

// Every member before `maxima` is a multiple of 1024 bytes, which swizzles need.
struct Shared {
    uint8_t k[STAGES][TILE_BYTES];
    uint8_t v[STAGES][TILE_BYTES];
    uint8_t q[2][M_ROWS * B_ROW];  // a half of the dimensions each
    uint8_t p[2][M_ROWS * B_ROW];  // of even and of odd tiles
    float maxima[WARPS][M_ROWS];   // of a warp's keys; sums of probabilities after the last tile
    uint64_t k_full[STAGES], v_full[STAGES];
};
static_assert(sizeof(Shared) <= SMEM, "the host reserves less than this needs");

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

// The split's tiles, and where they come from.
struct Share {
    int first;       // tile of positions
    int count;
    int slot_tile;   // where `first` lies
    int slot_tiles;  // of the cache
    const uint8_t* k;
    const uint8_t* v;
    int m_tiles;     // with live rows
};

// Bytes from the start of a KV head's cache to the split's tile i: less than twice around, as an extent has at most one
// tile more than the ring.
__device__ __forceinline__ int64_t tile_offset(const Share& share, int i) {
    const int tile = share.slot_tile + i;
    return int64_t(tile >= share.slot_tiles ? tile - share.slot_tiles : tile) * TILE_BYTES;
}

// One thread: the copies of the split's tile i into its stage.
__device__ __forceinline__ void load_tile(Shared& shared, const Share& share, int i) {
    const int stage = i % STAGES;
    const int64_t from = tile_offset(share, i);
    barrier_expect(&shared.k_full[stage], TILE_BYTES);
    bulk_load(shared.k[stage], share.k + from, TILE_BYTES, &shared.k_full[stage]);
    barrier_expect(&shared.v_full[stage], TILE_BYTES);
    bulk_load(shared.v[stage], share.v + from, TILE_BYTES, &shared.v_full[stage]);
}

// Whole block, after pdl_wait: K and V of this pass's positions over what the first `initial` tiles held of them when
// they were copied.
__device__ __forceinline__ void renew(const AttentionArgs& a, Shared& shared, const Share& share, const Pass& pass,
                                      int initial) {
    const int from = max_int(pass.fresh_low / KV_TILE - share.first, 0);
    const int to = min_int(pass.fresh_high / KV_TILE - share.first, initial - 1);
    if (from > to) return;
    for (int i = from; i <= to; ++i) {  // not before the tile itself has arrived
        barrier_wait(&shared.k_full[i], 0, a.fault, KERNEL_ATTENTION, a.layer);
        barrier_wait(&shared.v_full[i], 0, a.fault, KERNEL_ATTENTION, a.layer);
    }
    constexpr int PIECES = ROW_BYTES / 16;
#pragma unroll
    for (int j = 0; j < 2 * ROWS * PIECES / THREADS; ++j) {
        const int at = j * THREADS + threadIdx.x, row = at / PIECES % ROWS;
        const bool value = at >= ROWS * PIECES;
        const int position = __shfl_sync(0xffffffffu, pass.fresh, row);
        const int i = position / KV_TILE - share.first;
        if (row < pass.written && i >= from && i <= to) {
            const int within = position % KV_TILE * ROW_BYTES + at % PIECES * 16;
            copy_async_16((value ? shared.v[i] : shared.k[i]) + within,
                          (value ? share.v : share.k) + tile_offset(share, i) + within);
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
    const uint32_t k_line = (warp * 16 + (octet & 1) * 8 + line) * ROW_BYTES + (((octet >> 1) ^ line) << 4);
    const uint32_t v_line = ((octet >> 1) * 8 + line) * ROW_BYTES + (((warp * 2 + (octet & 1)) ^ line) << 4);
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

    const auto load_keys = [&](int i) {
        const int stage = i % STAGES;
        barrier_wait(&shared.k_full[stage], (i / STAGES) & 1, a.fault, KERNEL_ATTENTION, a.layer);
        const uint32_t tile = shared_address(shared.k[stage]) + k_line;
#pragma unroll
        for (int c = 0; c < K_STEPS; ++c) ldmatrix(k[c], tile ^ (c << 5));
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
    // From tile i's scores to its probabilities in shared memory, and its values to registers.
    const auto softmax = [&](int i) {
        const int stage = i % STAGES;
        barrier_wait(&shared.v_full[stage], (i / STAGES) & 1, a.fault, KERNEL_ATTENTION, a.layer);
        const uint32_t v_tile = shared_address(shared.v[stage]) + v_line;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int c = 0; c < V_STEPS; ++c) {
                ldmatrix_transposed(v[half][c], (v_tile + c * 16 * ROW_BYTES) ^ (half << 7));
            }
        }
        // Only tiles at the extent's two ends hold keys that some row does not see.
        const int first_key = (share.first + i) * KV_TILE + warp * 16;
        if (first_key + 15 > pass.low || (a.window > 0 && first_key <= pass.high - a.window)) {
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const int row = min_int((c / 2 * 8 + t * 2 + c % 2) / GROUP, ROWS - 1);
                const int newest = __shfl_sync(0xffffffffu, pass.position, row);
                const int hidden = a.window > 0 ? newest - a.window : -1;  // the newest key out of sight
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int key = first_key + half * 8 + g;
                    if (key > newest || key <= hidden) s[c / 2 * 4 + half * 2 + c % 2] = none();
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
        // For wgmma, probabilities; for the copies that take the stage, this thread's reads of it.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        // All warps' probabilities are there, and all have read the stage. Nobody reads the other tile's probabilities
        // any more: each warp has waited for its products.
        if (i == 0 || __syncthreads_or(high)) {
            float now[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                now[c] = rows_max(fmaxf(s[c / 2 * 4 + c % 2], s[c / 2 * 4 + 2 + c % 2]));
                if (g == 0) shared.maxima[warp][c / 2 * 8 + t * 2 + c % 2] = now[c];
            }
            __syncthreads();  // all warps' maxima are there
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
            __syncthreads();  // all warps' new probabilities are there, and nobody reads maxima any more
        }
        if (threadIdx.x == 0 && i + STAGES < share.count) load_tile(shared, share, i + STAGES);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sum[c] += together[c];
    };

    load_keys(0);
    wgmma_fence();
    begin_scores();
    finish_products();
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
    const int64_t split = int64_t(blockIdx.y) * a.splits + blockIdx.x;
    float* const out = a.partial_out + split * (ROWS * GROUP * HEAD_DIM) + warp * 16 + g;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int m = c / 2 * 8 + t * 2 + c % 2;
        if (m < live) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // eight lanes write 32 contiguous bytes
                out[m * HEAD_DIM + i / 2 * 64 + i % 2 * 8] = o[i / 2][c / 2 * 4 + i % 2 * 2 + c % 2];
            }
        }
    }
    __syncthreads();  // all warps' sums are there
    if (warp == 0 && g == 0) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int m = c / 2 * 8 + t * 2 + c % 2;
            if (m < live) {
                float total = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) total += shared.maxima[w][m];
                const int64_t at = (int64_t(blockIdx.y) * (ROWS * GROUP) + m) * a.splits + blockIdx.x;
                a.partial_max[at] = reference[c] == NOTHING ? none() : reference[c];
                a.partial_sum[at] = total;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ AttentionArgs a) {
    extern __shared__ __align__(1024) uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const Pass pass = read_pass(a.live, a.positions, a.rows, a.written);
    if (pass.rows <= 0) {
        pdl_wait();  // this launch must not end before its predecessor: the successor relies on that
        pdl_trigger();
        return;
    }
    const Extent extent = kv_extent(pass.low, pass.high, a.window, a.splits);
    const int live = pass.rows * GROUP;
    Share share;
    share.m_tiles = (live + 15) / 16;
    if (int(blockIdx.x) >= extent.active) return;  // the first split is always active, and its wait is the launch's
    share.first = extent.first + blockIdx.x * extent.per_split;
    share.count = min_int(extent.per_split, extent.first + extent.tiles - share.first);
    share.slot_tiles = a.slots / KV_TILE;
    share.slot_tile = share.first % share.slot_tiles;
    const int64_t cache = int64_t(blockIdx.y) * share.slot_tiles * TILE_BYTES;
    share.k = reinterpret_cast<const uint8_t*>(a.k_cache) + cache;
    share.v = reinterpret_cast<const uint8_t*>(a.v_cache) + cache;

    const int initial = min_int(share.count, EARLY);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.k_full[i], 1);
            barrier_init(&shared.v_full[i], 1);
        }
        barrier_init_fence();
        // The predecessor may still be writing K and V of this pass's positions. Whatever these copies catch of that is
        // finite, and replaced by `renew`; or, where in a ring it takes the place of a position that no row sees any
        // more, masked. All else was written by launches that ended before the predecessor began.
        for (int i = 0; i < initial; ++i) load_tile(shared, share, i);
    }
    __syncthreads();  // the barriers are initialised
    pdl_wait();
    pdl_trigger();

    if (STAGES > 1 && threadIdx.x == 0) {
        // This thread copies later tiles. The predecessor wrote K and V with ordinary stores, which its end made visible
        // to ordinary loads; the copy engine reads through another proxy. Not later: it waits for copies under way.
        asm volatile("fence.proxy.async;" ::: "memory");
    }

    // q into shared memory as B; rows of no query are zero, so that nothing strange is computed.
    constexpr int PIECES = ROW_BYTES / 16;
#pragma unroll
    for (int i = 0; i < M_ROWS * PIECES / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x, m = at / PIECES, piece = at % PIECES;
        // With one KV head, row and head are m itself.
        const int head = KV_HEADS == 1 ? m : m / GROUP * Q_HEADS + blockIdx.y * GROUP + m % GROUP;
        copy_async_or_zeros(shared.q[piece / 8] + m * B_ROW + ((piece % 8 ^ (m & 7)) << 4),
                            a.q + head * HEAD_DIM + piece * 8, m < live);
    }
    if (threadIdx.x == 0) {  // behind q, which is asked for first
        for (int i = initial; i < min_int(share.count, STAGES); ++i) load_tile(shared, share, i);
    }
    renew(a, shared, share, pass, initial);
    copy_async_commit();
    copy_async_wait<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads q through another proxy
    __syncthreads();  // q and this pass's keys and values are there

    if (M_TILES >= 3 && share.m_tiles == 3) {
        consume<(M_TILES >= 3 ? 48 : 16)>(a, shared, share, pass);
    } else if (M_TILES >= 2 && share.m_tiles == 2) {
        consume<(M_TILES >= 2 ? 32 : 16)>(a, shared, share, pass);
    } else {
        consume<16>(a, shared, share, pass);
    }
}
