// Decode attention of a short extent (a sliding layer's window, or a full layer's first positions) in one launch: the
// splits of the sequence are the blocks of a cluster, which combine their partials through distributed shared memory.
//     o = sum_k 2^(s_k - M) v_k / (sum_k 2^(s_k - M) + 2^(z - M)),   s = scale log2(e) q.k,   z = scale log2(e) q.sink_k.
//
// PRECOND: grid (CLUSTER, KV_HEADS, m-tiles of `rows` rows), cluster (CLUSTER, 1, 1), block WARPS * 32, dynamic shared
// memory SMEM bytes; the live rows' extent (kv_extent) is at most CLUSTER * UNITS units of 16 keys; caches and slots in
// whole tiles of 64 positions, 16-byte aligned; positions of the live rows within ROWS consecutive ones, in any order. K
// and V of those positions were written by the predecessor, all older ones, `positions` and *live at least two launches
// ago. Reads 8 KB a unit that the live rows see and m-tile, and q; writes a head's 128 outputs in FP32 and F16.
//
// How: a query (row, head) is a row m = row * GROUP + head of M; a cluster has an m-tile of 16 of them, and a block of
// it some units of keys, all of which it copies to shared memory before the predecessor ends; the few rows that the
// predecessor writes itself are copied over them afterwards. What remains behind the wait is latency: q's trip, two
// products, and the exchange. A warp has every WARPS-th tile of eight keys in the scores, and 128 / WARPS dimensions in
// the output; probabilities pass through shared memory. Then block r of the cluster receives all blocks' sums of
// dimensions 128 / CLUSTER * r onwards, by st.async on an mbarrier of its own: one trip instead of partials in memory
// and another launch. Statistics are sent before the second product, so that weights are known when the sums arrive.
#include "abi_decode.cuh"
#include "common/attend.cuh"
#include "common/cluster.cuh"
#include "common/kv.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int M_ROWS = 16;
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int UNIT = 16;  // keys
constexpr int UNIT_BYTES = UNIT * ROW_BYTES;
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int N_TILES = HEAD_DIM / WARPS / 8;  // of a warp's output
constexpr int KEY_GROUP = WARPS == 4 ? 3 : 2;  // tiles of eight keys that a warp computes together
constexpr int GROUP_TILES = KEY_GROUP * WARPS;
constexpr int GROUPS = (2 * UNITS + GROUP_TILES - 1) / GROUP_TILES;
constexpr int P_UNITS = GROUPS * GROUP_TILES / 2;
constexpr int P_PITCH = P_UNITS * UNIT * 2 + 16;  // an odd multiple of 16: rows of ldmatrix hit all banks
constexpr int STEPS = WARPS == 4 ? 3 : 4;         // units of the product with values that are loaded together
constexpr int PART = HEAD_DIM / CLUSTER;          // dimensions that a block finishes
constexpr int FINISHERS = M_ROWS * 8;             // threads, eight a query
constexpr int OWN = PART / 8;                     // dimensions of such a thread

static_assert(HEAD_DIM == 128 && KV_TILE % UNIT == 0, "the swizzle and the warps' shares are laid out for these");
static_assert(WARPS == 4 || WARPS == 8, "a warp has two or four tiles of eight dimensions");
static_assert(CLUSTER == 8 || CLUSTER == 16, "a finishing thread has one or two dimensions");
static_assert(P_UNITS % STEPS == 0, "whole groups of units");
static_assert(KV_HEADS * GROUP == Q_HEADS, "query heads are shared among KV heads evenly");

struct Shared {
    uint8_t k[UNITS * UNIT_BYTES];
    uint8_t v[UNITS * UNIT_BYTES];
    uint8_t q[M_ROWS * ROW_BYTES];
    uint8_t p[M_ROWS * P_PITCH];
    float parts[CLUSTER][M_ROWS][PART];  // each block's sums of this block's dimensions
    float4 statistics[CLUSTER][M_ROWS / 2];  // maximum and sum, of two queries
    float4 maxima[M_ROWS][WARPS / 4];
    float4 sums[M_ROWS][WARPS / 4];
    uint64_t k_full, v_full, statistics_full, parts_full;
};
static_assert(sizeof(Shared) <= SMEM, "the host reserves less than this needs");

__device__ __forceinline__ float largest(const float4 (&x)[WARPS / 4]) {
    float top = fmaxf(fmaxf(x[0].x, x[0].y), fmaxf(x[0].z, x[0].w));
#pragma unroll
    for (int w = 1; w < WARPS / 4; ++w) top = fmaxf(top, fmaxf(fmaxf(x[w].x, x[w].y), fmaxf(x[w].z, x[w].w)));
    return top;
}
__device__ __forceinline__ float total(const float4 (&x)[WARPS / 4]) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS / 4; ++w) sum += (x[w].x + x[w].y) + (x[w].z + x[w].w);
    return sum;
}

__device__ __forceinline__ float4 as_floats(uint4 x) {
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}

// The block's keys, and where they lie.
struct Share {
    int first;   // unit of positions
    int count;   // units, 0 for a block that has none
    int before;  // of them, those that lie before the ring's end; the others follow from its beginning
    const uint8_t* k;
    const uint8_t* v;
    int64_t at;  // of `first`, in bytes
};

__device__ __forceinline__ int64_t unit_offset(const Share& share, int i) {
    return i < share.before ? share.at + i * UNIT_BYTES : (i - share.before) * UNIT_BYTES;
}

__device__ __forceinline__ void load_units(uint8_t* shared, const uint8_t* cache, const Share& share, uint64_t* full) {
    barrier_expect(full, share.count * UNIT_BYTES);
    bulk_load(shared, cache + share.at, share.before * UNIT_BYTES, full);
    if (share.before < share.count) {
        bulk_load(shared + share.before * UNIT_BYTES, cache, (share.count - share.before) * UNIT_BYTES, full);
    }
}

// Whole block, after pdl_wait: K and V of this pass's positions over what the copies held of them.
__device__ __forceinline__ void renew(const ShortAttentionArgs& a, Shared& shared, const Share& share, const Pass& pass) {
    if (pass.fresh_low / UNIT >= share.first + share.count || pass.fresh_high / UNIT < share.first) return;
    // Not before the copies have arrived.
    barrier_wait(&shared.k_full, 0, a.fault, KERNEL_ATTENTION, a.layer);
    barrier_wait(&shared.v_full, 0, a.fault, KERNEL_ATTENTION, a.layer);
    constexpr int PIECES = ROW_BYTES / 16;
#pragma unroll
    for (int j = 0; j < 2 * ROWS * PIECES / THREADS; ++j) {
        const int at = j * THREADS + threadIdx.x, row = at / PIECES % ROWS;
        const bool value = at >= ROWS * PIECES;
        const int position = __shfl_sync(0xffffffffu, pass.fresh, row);
        const int i = position / UNIT - share.first;
        if (row < pass.written && i >= 0 && i < share.count) {
            const int within = position % UNIT * ROW_BYTES + at % PIECES * 16;
            copy_async_16((value ? shared.v : shared.k) + i * UNIT_BYTES + within,
                          (value ? share.v : share.k) + unit_offset(share, i) + within);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_short(const __grid_constant__ ShortAttentionArgs a) {
    extern __shared__ __align__(1024) uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int rank = blockIdx.x, first_m = blockIdx.z * M_ROWS;
    if (threadIdx.x == 0) {
        barrier_init(&shared.k_full, 1);
        barrier_init(&shared.v_full, 1);
        barrier_init(&shared.statistics_full, 1);
        barrier_init(&shared.parts_full, 1);
        barrier_expect(&shared.statistics_full, sizeof(shared.statistics));
        barrier_expect(&shared.parts_full, sizeof(shared.parts));
        barrier_init_fence();
    }
    __syncwarp();
    // The other blocks may send once these mbarriers are there; each block waits for that at the end of its prologue.
    // Relaxed, since the fence above releases what counts: a release would wait for every load under way.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    // A finishing thread's query, and its eighth of the result's dimensions and of q.sink. Its loads go ahead of the
    // copies, behind which they would wait.
    const int query = threadIdx.x / 8 % M_ROWS, eighth = threadIdx.x % 8;
    uint4 sink[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sink[i] = load_weights(a.sink_k + blockIdx.y * HEAD_DIM + eighth * 16 + i * 4);
    const Pass pass = read_pass(a.live, a.positions, a.rows, a.written);
    const int live = pass.rows * GROUP;
    // The first cluster's wait is the launch's; a cluster without live queries needs none.
    if (first_m >= live) {
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // every thread that arrived must wait
        if (blockIdx.z > 0) return;
        pdl_wait();  // this launch must not end before its predecessor: the successor relies on that
        pdl_trigger();
        return;
    }
    const Extent extent = kv_extent<UNIT>(pass.low, pass.high, a.window, CLUSTER);
    Share share;
    share.first = extent.first + rank * extent.per_split;
    share.count = max_int(0, min_int(extent.per_split, extent.first + extent.tiles - share.first));
    const int slot_units = a.slots / UNIT, slot_unit = share.first % slot_units;
    share.before = min_int(share.count, slot_units - slot_unit);
    share.at = int64_t(slot_unit) * UNIT_BYTES;
    const int64_t cache = int64_t(blockIdx.y) * slot_units * UNIT_BYTES;
    share.k = reinterpret_cast<const uint8_t*>(a.k_cache) + cache;
    share.v = reinterpret_cast<const uint8_t*>(a.v_cache) + cache;

    if (threadIdx.x == 0 && share.count > 0) {
        // The predecessor may still be writing K and V of this pass's positions. Whatever these copies catch of that is
        // finite, and replaced by `renew`; or, where in a ring it takes the place of a position that no row sees any
        // more, masked. All else was written by launches that ended before the predecessor began.
        load_units(shared.k, share.k, share, &shared.k_full);
        load_units(shared.v, share.v, share, &shared.v_full);
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks run, and can receive
    pdl_wait();
    pdl_trigger();

    // q into shared memory, swizzled as keys are; rows of no query are zero, so that nothing strange is computed.
    constexpr int PIECES = ROW_BYTES / 16;
#pragma unroll
    for (int i = 0; i < M_ROWS * PIECES / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x, m = at / PIECES, piece = at % PIECES, wanted = first_m + m;
        // With one KV head, row and head are m itself.
        const int head = KV_HEADS == 1 ? wanted : wanted / GROUP * Q_HEADS + blockIdx.y * GROUP + wanted % GROUP;
        copy_async_or_zeros(shared.q + m * ROW_BYTES + ((piece ^ (m & 7)) << 4), a.q + head * HEAD_DIM + piece * 8,
                            wanted < live);
    }
    renew(a, shared, share, pass);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // q and this pass's keys and values are there

    const float to_log2 = a.scale * LOG2E;
    const auto send_statistics = [&](int pair, float4 x) {
        cluster_send(&shared.statistics[rank][pair], &shared.statistics_full, threadIdx.x / (M_ROWS / 2), x);
    };
    // Four dimensions of query g in an even lane, of query g + 8 in an odd one.
    const auto send_part = [&](int n, float4 x) {
        const int dim = (warp * N_TILES + n) * 8;
        const float* slot = &shared.parts[rank][g + t % 2 * 8][dim % PART + t / 2 * 4];
        cluster_send(reinterpret_cast<const float4*>(slot), &shared.parts_full, dim / PART, x);
    };
    if (share.count > 0) {
        const int octet = lane / 8, line = lane % 8;  // which row of which of ldmatrix's four matrices a lane points at
        uint32_t q[K_STEPS][4];
        const uint32_t q_line =
            shared_address(shared.q) + ((octet & 1) * 8 + line) * ROW_BYTES + (((octet >> 1) ^ line) << 4);
#pragma unroll
        for (int c = 0; c < K_STEPS; ++c) ldmatrix(q[c], q_line ^ (c << 5));

        // Scores: s[group][i] are of keys (group * GROUP_TILES + i * WARPS + warp) * 8 onwards.
        const int tiles = share.count * 2;
        const uint32_t k_line = shared_address(shared.k) + line * ROW_BYTES + ((octet ^ line) << 4);
        float s[GROUPS][KEY_GROUP][4];
        float top[2] = {none(), none()};
        barrier_wait(&shared.k_full, 0, a.fault, KERNEL_ATTENTION, a.layer);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (group * GROUP_TILES >= tiles) break;
            // Two chains of dependent MMAs a tile. Beyond the block's keys its last ones are computed again, and left out.
            float chain[2][KEY_GROUP][4] = {};
            uint32_t k_tile[KEY_GROUP];
#pragma unroll
            for (int i = 0; i < KEY_GROUP; ++i) {
                k_tile[i] = k_line + min_int(group * GROUP_TILES + i * WARPS + warp, tiles - 1) * (8 * ROW_BYTES);
            }
            uint32_t b[K_STEPS / 2][KEY_GROUP][4];  // all loads before the first product, which would wait for each
#pragma unroll
            for (int load = 0; load < K_STEPS / 2; ++load) {
#pragma unroll
                for (int i = 0; i < KEY_GROUP; ++i) ldmatrix(b[load][i], k_tile[i] ^ (load << 6));
            }
#pragma unroll
            for (int c = 0; c < K_STEPS; ++c) {
#pragma unroll
                for (int i = 0; i < KEY_GROUP; ++i) {
                    const uint32_t(&y)[4] = b[c / 2][i];
                    mma_f16(chain[c % 2][i], q[c][0], q[c][1], q[c][2], q[c][3], y[c % 2 * 2], y[c % 2 * 2 + 1]);
                }
            }
#pragma unroll
            for (int i = 0; i < KEY_GROUP; ++i) {
                const int tile = group * GROUP_TILES + i * WARPS + warp;
                const int first_key = share.first * UNIT + tile * 8;
#pragma unroll
                for (int e = 0; e < 4; ++e) s[group][i][e] = chain[0][i][e] + chain[1][i][e];
                // Only tiles at the extent's two ends hold keys that some row does not see.
                if (first_key + 7 > pass.low || (a.window > 0 && first_key <= pass.high - a.window) || tile >= tiles) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = min_int((first_m + half * 8 + g) / GROUP, ROWS - 1);
                        const int newest = __shfl_sync(0xffffffffu, pass.position, row);
                        const int hidden = a.window > 0 ? newest - a.window : -1;  // the newest key out of sight
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int key = first_key + t * 2 + e;
                            if (key > newest || key <= hidden || tile >= tiles) s[group][i][half * 2 + e] = none();
                        }
                    }
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[group][i][e]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
            top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
            if (t == 0) (&shared.maxima[half * 8 + g][0].x)[warp] = top[half];
        }
        __syncthreads();  // all warps' maxima are there

        uint8_t* const p_write = shared.p + g * P_PITCH + t * 4 + warp * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float base = base_of(largest(shared.maxima[half * 8 + g]), to_log2);
            float sum = 0.0f;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if (group * GROUP_TILES >= tiles) break;
#pragma unroll
                for (int i = 0; i < KEY_GROUP; ++i) {
                    const float x = exp2_fast(fmaf(s[group][i][half * 2], to_log2, -base));
                    const float y = exp2_fast(fmaf(s[group][i][half * 2 + 1], to_log2, -base));
                    sum += x + y;
                    *reinterpret_cast<uint32_t*>(p_write + half * 8 * P_PITCH +
                                                 (group * GROUP_TILES + i * WARPS) * 16) = pack_f16(x, y);
                }
            }
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (t == 0) (&shared.sums[half * 8 + g][0].x)[warp] = sum;
        }
        __syncthreads();  // all warps' probabilities and sums are there

        if (threadIdx.x < CLUSTER * (M_ROWS / 2)) {
            const int pair = threadIdx.x % (M_ROWS / 2);
            send_statistics(pair, make_float4(largest(shared.maxima[pair * 2]) * to_log2, total(shared.sums[pair * 2]),
                                              largest(shared.maxima[pair * 2 + 1]) * to_log2,
                                              total(shared.sums[pair * 2 + 1])));
        }

        // Two chains a tile of the output; units beyond the block's have probability 0, and are another unit's values.
        const uint32_t v_line = shared_address(shared.v) + ((octet & 1) * 8 + line) * ROW_BYTES +
                                (((warp * N_TILES + (octet >> 1)) ^ line) << 4);
        const uint32_t p_read = shared_address(shared.p) + ((octet & 1) * 8 + line) * P_PITCH + ((octet >> 1) << 4);
        float acc[2][N_TILES][4] = {};
        barrier_wait(&shared.v_full, 0, a.fault, KERNEL_ATTENTION, a.layer);
#pragma unroll 2
        for (int first = 0; first < share.count; first += STEPS) {
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const int unit = first + i;
                uint32_t p[4], b[N_TILES / 2][4];
                ldmatrix(p, p_read + unit * (UNIT * 2));
#pragma unroll
                for (int pair = 0; pair < N_TILES / 2; ++pair) {
                    ldmatrix_transposed(b[pair], (v_line + min_int(unit, share.count - 1) * UNIT_BYTES) ^ (pair << 5));
                }
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) {
                    mma_f16(acc[i % 2][n], p[0], p[1], p[2], p[3], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
                }
            }
        }
        // Neighbours swap: an even lane gets four dimensions of query g, an odd one of query g + 8.
        const bool odd = t % 2 != 0;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = acc[0][n][e] + acc[1][n][e];
            const float from_0 = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[2], 1);
            const float from_1 = __shfl_xor_sync(0xffffffffu, odd ? x[1] : x[3], 1);
            send_part(n, odd ? make_float4(from_0, from_1, x[2], x[3]) : make_float4(x[0], x[1], from_0, from_1));
        }
    } else {  // every block sends, so that what a receiver waits for and adds does not depend on the extent
        if (threadIdx.x < CLUSTER * (M_ROWS / 2)) {
            send_statistics(threadIdx.x % (M_ROWS / 2), make_float4(none(), 0.0f, none(), 0.0f));
        }
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) send_part(n, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
    if (threadIdx.x >= FINISHERS) return;

    float z = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 x =
            *reinterpret_cast<const uint4*>(shared.q + query * ROW_BYTES + (((eighth * 2 + i) ^ (query & 7)) << 4));
        const float2 x0 = unpack_f16(x.x), x1 = unpack_f16(x.y), x2 = unpack_f16(x.z), x3 = unpack_f16(x.w);
        const float4 lo = as_floats(sink[i * 2]), hi = as_floats(sink[i * 2 + 1]);
        z += ((x0.x * lo.x + x0.y * lo.y) + (x1.x * lo.z + x1.y * lo.w)) +
             ((x2.x * hi.x + x2.y * hi.y) + (x3.x * hi.z + x3.y * hi.w));
    }
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) z += __shfl_xor_sync(0xffffffffu, z, offset);
    z *= to_log2;

    cluster_receive(&shared.statistics_full, a.fault, KERNEL_ATTENTION, a.layer);
    float2 found[CLUSTER];
    float peak = z;
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
        found[block] = reinterpret_cast<const float2*>(shared.statistics[block])[query];
        peak = fmaxf(peak, found[block].x);
    }
    // z takes part in the maximum, which therefore is a number. A block without visible keys has weight 0.
    float weight[CLUSTER], denominator = exp2f(z - peak);
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
        weight[block] = exp2_fast(found[block].x - peak);
        denominator = fmaf(weight[block], found[block].y, denominator);
    }
    const float inverse = 1.0f / denominator;
    cluster_receive(&shared.parts_full, a.fault, KERNEL_ATTENTION, a.layer);
    float o[OWN] = {};
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) o[i] = fmaf(weight[block], shared.parts[block][query][eighth * OWN + i], o[i]);
    }
    const int m = first_m + query;
    if (m >= live) return;
    const int head = KV_HEADS == 1 ? m : m / GROUP * Q_HEADS + blockIdx.y * GROUP + m % GROUP;
    const int at = head * HEAD_DIM + rank * PART + eighth * OWN;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        o[i] *= inverse;
        finite = finite && is_finite(o[i]);
    }
    if constexpr (OWN == 2) {
        *reinterpret_cast<float2*>(a.attended32 + at) = make_float2(o[0], o[OWN - 1]);
        *reinterpret_cast<uint32_t*>(a.attended + at) = pack_f16(o[0], o[OWN - 1]);
    } else {
        a.attended32[at] = o[0];
        a.attended[at] = float_to_f16(o[0]);
    }
    if (!finite) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTENTION, a.layer);
}
