// Decode attention of one split of the sequence: all live rows and all query heads of a KV head at once, so that every
// key and value is read once a pass.
//
// PRECOND: grid (splits, KV_HEADS, M_SPLITS), block WARPS * 32, dynamic shared memory SMEM bytes; caches and slots in
// whole tiles of 64 positions, 16-byte aligned; positions of the live rows within ROWS consecutive ones, in any order; K
// and V of those positions were written by the predecessor, all older ones, `positions` and *live at least two launches
// ago. Where STAGES == 1, no split has more than one tile. Reads 32 KB a tile that the live rows see (kv_extent), and q;
// writes partials of active splits: 512 bytes of sums and 8 of statistics a row and head. Statistics are in base 2:
// partial_max is the maximum of scale * log2(e) * q.k.
//
// How: a query (row, head) is a row m = row * GROUP + head of M; 16 of them make an m-tile, and only m-tiles with live
// rows are computed. Bulk copies bring tiles of 64 keys into a ring of stages; a tile is contiguous in the cache and
// already swizzled for ldmatrix. All of the first ones are under way before the predecessor ends: the few rows that it
// writes itself are copied over them afterwards. There is no producer warp: it would take registers from the others, and
// the barrier that a tile needs anyway, between scores and softmax, also says that the stage before is free.
//
// The block's warps compute a tile together: for the scores each has 64 / WARPS keys, for the output 128 / WARPS
// dimensions, and all m-tiles of the block in both, so that K and V pass through shared memory's read port once. In
// between the warps exchange maxima and probabilities (6 KB); accumulators are never exchanged or merged, and the last
// tile, whose time nothing hides, is done with as fast as all warps can. Splits of a single tile, the case of sliding
// layers, leave multiprocessors over: there each m-tile has a block of its own (M_SPLITS).
#include "abi.cuh"
#include "common/attend.cuh"
#include "common/kv.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int M_TILES = ((ROWS * GROUP + 15) / 16 + M_SPLITS - 1) / M_SPLITS;  // of a block
constexpr int M_ROWS = M_TILES * 16;
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int TILE_BYTES = KV_TILE * ROW_BYTES;
constexpr int K_STEPS = HEAD_DIM / 16;               // of the product with keys
constexpr int V_STEPS = KV_TILE / 16;                // of the product with values
constexpr int KEY_TILES = KV_TILE / WARPS / 8;       // of a warp's scores
constexpr int N_TILES = HEAD_DIM / WARPS / 8;        // of a warp's output
constexpr int STEPS_A_LOAD = 2 / KEY_TILES;          // of the product with keys

static_assert(HEAD_DIM == 128 && KV_TILE == 64, "the swizzle and the warps' shares are laid out for these");
static_assert(M_ROWS * ROW_BYTES / 16 % THREADS == 0, "every thread copies as much of q");
static_assert(WARPS == 4 || WARPS == 8, "a warp has one or two tiles of eight keys");
static_assert(KV_HEADS * GROUP == Q_HEADS, "query heads are shared among KV heads evenly");
static_assert(M_TILES <= 3, "accumulators of more m-tiles do not fit into registers");

// ldmatrix addresses are formed by XOR, which needs rows aligned to their size; every member before `maxima` keeps that.
struct Shared {
    uint8_t k[STAGES][TILE_BYTES];
    uint8_t v[STAGES][TILE_BYTES];
    uint8_t q[M_ROWS * ROW_BYTES];
    uint8_t p[M_ROWS * KV_TILE * 2];
    float4 maxima[M_ROWS][WARPS / 4];  // a component for each warp's keys; sums of probabilities after the last tile
    uint64_t k_full[STAGES], v_full[STAGES];
};
static_assert(sizeof(Shared) <= SMEM, "the host reserves less than this needs");

// The split's tiles, and where they come from.
struct Share {
    int first;       // tile of positions
    int count;
    int slot_tile;   // where `first` lies
    int slot_tiles;  // of the cache
    const uint8_t* k;
    const uint8_t* v;
    int first_m;     // the block's first row of M
    int m_tiles;     // and its m-tiles with live rows
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

// Online softmax over the split's tiles.
template <int MT>
__device__ __forceinline__ void consume(const AttentionArgs& a, Shared& shared, const Share& share, const Pass& pass) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int octet = lane / 8, line = lane % 8;  // which row of which of ldmatrix's four matrices a lane points at
    const float to_log2 = a.scale * LOG2E;

    uint32_t q[MT][K_STEPS][4];
    const uint32_t q_line =
        shared_address(shared.q) + ((octet & 1) * 8 + line) * ROW_BYTES + (((octet >> 1) ^ line) << 4);
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int c = 0; c < K_STEPS; ++c) ldmatrix(q[mt][c], (q_line + mt * 16 * ROW_BYTES) ^ (c << 5));
    }

    // Four matrices of keys: two steps of eight keys, or one step of 16.
    const uint32_t k_line =
        KEY_TILES == 2 ? (warp * 16 + (octet >> 1) * 8 + line) * ROW_BYTES + (((octet & 1) ^ line) << 4)
                       : (warp * 8 + line) * ROW_BYTES + ((octet ^ line) << 4);
    const uint32_t v_line = ((octet & 1) * 8 + line) * ROW_BYTES + (((warp * N_TILES + (octet >> 1)) ^ line) << 4);
    const uint32_t p_read =
        shared_address(shared.p) + ((octet & 1) * 8 + line) * (KV_TILE * 2) + (((octet >> 1) ^ line) << 4);
    uint8_t* const p_write = shared.p + g * (KV_TILE * 2) + t * 4;

    float acc[MT][N_TILES][4] = {};
    float top[MT][2], sum[MT][2];  // top: the block's; sum: of this lane's keys
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
        top[mt][0] = top[mt][1] = none();
        sum[mt][0] = sum[mt][1] = 0.0f;
    }

    for (int i = 0; i < share.count; ++i) {
        const int stage = i % STAGES, parity = (i / STAGES) & 1;
        barrier_wait(&shared.k_full[stage], parity, a.fault, KERNEL_ATTENTION, a.layer);
        // Few tiles would be as few chains of dependent MMAs: two halves of them are quicker.
        constexpr int CHAINS = MT * KEY_TILES <= 3 ? 2 : 1;
        float s[CHAINS][MT][KEY_TILES][4] = {};
        const uint32_t k_tile = shared_address(shared.k[stage]) + k_line;
#pragma unroll
        for (int load = 0; load < K_STEPS / STEPS_A_LOAD; ++load) {
            uint32_t b[4];
            ldmatrix(b, k_tile ^ (load * STEPS_A_LOAD << 5));
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const int c = load * STEPS_A_LOAD + (KEY_TILES == 2 ? 0 : pair), n = KEY_TILES == 2 ? pair : 0;
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    mma_f16(s[c % CHAINS][mt][n], q[mt][c][0], q[mt][c][1], q[mt][c][2], q[mt][c][3], b[pair * 2],
                            b[pair * 2 + 1]);
                }
            }
        }
        if constexpr (CHAINS == 2) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) s[0][mt][n][e] += s[CHAINS - 1][mt][n][e];
                }
            }
        }

        // Only tiles at the extent's two ends hold keys that some row does not see.
        const int first_key = (share.first + i) * KV_TILE + warp * (KEY_TILES * 8);
        if (first_key + KEY_TILES * 8 - 1 > pass.low || (a.window > 0 && first_key <= pass.high - a.window)) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = min_int((share.first_m + mt * 16 + half * 8 + g) / GROUP, ROWS - 1);
                    const int newest = __shfl_sync(0xffffffffu, pass.position, row);
                    const int hidden = a.window > 0 ? newest - a.window : -1;  // the newest key out of sight
#pragma unroll
                    for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int key = first_key + n * 8 + t * 2 + e;
                            if (key > newest || key <= hidden) s[0][mt][n][half * 2 + e] = none();
                        }
                    }
                }
            }
        }

#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x = fmaxf(s[0][mt][0][half * 2], s[0][mt][0][half * 2 + 1]);
#pragma unroll
                for (int n = 1; n < KEY_TILES; ++n) {
                    x = fmaxf(x, fmaxf(s[0][mt][n][half * 2], s[0][mt][n][half * 2 + 1]));
                }
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
                if (t == 0) (&shared.maxima[mt * 16 + half * 8 + g][0].x)[warp] = x;
            }
        }
        // All warps' maxima are there. It also means that every warp is done with the last tile: with its probabilities,
        // and with its stage, which the copy engine may therefore overwrite.
        __syncthreads();
        if (threadIdx.x == 0 && i > 0 && i - 1 + STAGES < share.count) load_tile(shared, share, i - 1 + STAGES);

        float now[MT][2], shrink[MT][2];
        bool grown = false;
        // Loads before any store below: the compiler can't know that they touch different arrays, and would wait for each.
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                now[mt][half] = top[mt][half];
#pragma unroll
                for (int w = 0; w < WARPS / 4; ++w) {
                    const float4 x = shared.maxima[mt * 16 + half * 8 + g][w];
                    now[mt][half] = fmaxf(now[mt][half], fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
                }
            }
        }
        uint32_t packed[MT][2][KEY_TILES];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float base = base_of(now[mt][half], to_log2);
                shrink[mt][half] = exp2_fast(fmaf(top[mt][half], to_log2, -base));
                grown |= now[mt][half] > top[mt][half];
                top[mt][half] = now[mt][half];
                float together = 0.0f;
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) {
                    const float x = exp2_fast(fmaf(s[0][mt][n][half * 2], to_log2, -base));
                    const float y = exp2_fast(fmaf(s[0][mt][n][half * 2 + 1], to_log2, -base));
                    together += x + y;
                    packed[mt][half][n] = pack_f16(x, y);
                }
                sum[mt][half] = fmaf(sum[mt][half], shrink[mt][half], together);
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint8_t* const row = p_write + (mt * 16 + half * 8) * (KV_TILE * 2);
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) {
                    *reinterpret_cast<uint32_t*>(row + (((warp * KEY_TILES + n) ^ g) << 4)) = packed[mt][half][n];
                }
            }
        }
        if (__any_sync(0xffffffffu, grown)) {  // rare after the first tiles
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[mt][n][e] *= shrink[mt][e / 2];
                }
            }
        }
        // All warps' probabilities are there; and nobody reads maxima any more.
        __syncthreads();

        barrier_wait(&shared.v_full[stage], parity, a.fault, KERNEL_ATTENTION, a.layer);
        const uint32_t v_tile = shared_address(shared.v[stage]) + v_line;
#pragma unroll
        for (int step = 0; step < V_STEPS; ++step) {
            uint32_t b[N_TILES / 2][4];
#pragma unroll
            for (int pair = 0; pair < N_TILES / 2; ++pair) {
                ldmatrix_transposed(b[pair], (v_tile + step * 16 * ROW_BYTES) ^ (pair << 5));
            }
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                uint32_t p[4];
                ldmatrix(p, (p_read + mt * 16 * KV_TILE * 2) ^ (step << 5));
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) {
                    mma_f16(acc[mt][n], p[0], p[1], p[2], p[3], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
                }
            }
        }
    }

    // Nobody reads maxima since the last tile's second barrier.
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x = sum[mt][half];
            x += __shfl_xor_sync(0xffffffffu, x, 1);
            x += __shfl_xor_sync(0xffffffffu, x, 2);
            if (t == 0) (&shared.maxima[mt * 16 + half * 8 + g][0].x)[warp] = x;
        }
    }
    __syncthreads();  // all warps' sums are there

    const int live = pass.rows * GROUP;
    const int64_t partial = (int64_t(blockIdx.y) * a.splits + blockIdx.x) * (ROWS * GROUP) + share.first_m;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int m = mt * 16 + half * 8 + g;
            const bool write = share.first_m + m < live;
            // Neighbours swap halves of two n-tiles: stores of 16 bytes, 64 contiguous ones a row, instead of 8 and 32.
            const bool odd = t % 2 != 0;
            float* const out =
                a.partial_out + (partial + m) * HEAD_DIM + warp * (HEAD_DIM / WARPS) + (odd ? 8 : 0) + t / 2 * 4;
#pragma unroll
            for (int n = 0; n < N_TILES; n += 2) {
                const float* x = acc[mt][n] + half * 2;
                const float* y = acc[mt][n + 1] + half * 2;
                const float from_0 = __shfl_xor_sync(0xffffffffu, odd ? x[0] : y[0], 1);
                const float from_1 = __shfl_xor_sync(0xffffffffu, odd ? x[1] : y[1], 1);
                if (write) {
                    *reinterpret_cast<float4*>(out + n * 8) =
                        odd ? make_float4(from_0, from_1, y[0], y[1]) : make_float4(x[0], x[1], from_0, from_1);
                }
            }
            if (write && warp == 0 && t == 0) {
                float total = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS / 4; ++w) {
                    const float4 x = shared.maxima[m][w];
                    total += (x.x + x.y) + (x.z + x.w);
                }
                const int64_t at =
                    (int64_t(blockIdx.y) * (ROWS * GROUP) + share.first_m + m) * a.splits + blockIdx.x;
                a.partial_max[at] = top[mt][half] * to_log2;
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
    share.first_m = blockIdx.z * M_ROWS;
    share.m_tiles = min_int((live - share.first_m + 15) / 16, M_TILES);
    // The first split's first m-tiles are always active, and their wait is the launch's.
    if (int(blockIdx.x) >= extent.active || share.first_m >= live) return;
    share.first = extent.first + blockIdx.x * extent.per_split;
    share.count = min_int(extent.per_split, extent.first + extent.tiles - share.first);
    share.slot_tiles = a.slots / KV_TILE;
    share.slot_tile = share.first % share.slot_tiles;
    const int64_t cache = int64_t(blockIdx.y) * share.slot_tiles * TILE_BYTES;
    share.k = reinterpret_cast<const uint8_t*>(a.k_cache) + cache;
    share.v = reinterpret_cast<const uint8_t*>(a.v_cache) + cache;

    const int initial = min_int(share.count, STAGES);
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

    // q into shared memory, swizzled as keys are; rows of no query are zero, so that nothing strange is computed.
    constexpr int PIECES = ROW_BYTES / 16;
#pragma unroll
    for (int i = 0; i < M_ROWS * PIECES / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x, m = at / PIECES, piece = at % PIECES, query = share.first_m + m;
        // With one KV head, row and head are m itself.
        const int head = KV_HEADS == 1 ? query : query / GROUP * Q_HEADS + blockIdx.y * GROUP + query % GROUP;
        copy_async_or_zeros(shared.q + m * ROW_BYTES + ((piece ^ (m & 7)) << 4), a.q + head * HEAD_DIM + piece * 8,
                            query < live);
    }
    renew(a, shared, share, pass, initial);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // q and this pass's keys and values are there

    if (M_TILES >= 3 && share.m_tiles == 3) {
        consume<(M_TILES >= 3 ? 3 : 1)>(a, shared, share, pass);
    } else if (M_TILES >= 2 && share.m_tiles == 2) {
        consume<(M_TILES >= 2 ? 2 : 1)>(a, shared, share, pass);
    } else {
        consume<1>(a, shared, share, pass);
    }
}
