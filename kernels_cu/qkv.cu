// q, k and v of a layer: projection, RMS norm and RoPE of q's and k's heads, and the write of k and v into the cache.
//
// PRECOND: grid CLUSTER * (Q_HEADS + 2 * KV_HEADS) in clusters of CLUSTER, block THREADS; weights, normed and caches
// 16-byte aligned; rows of q and k heads in the order of repack.head_rows; live rows' positions differ modulo `slots`.
// Waits on the kernel that wrote normed (a tail, embed) or pieces (down, eh_proj); reads weights, norms, frequencies and
// base before that: base was written two launches ago or more. Reads the weights once (48 KB a block at hidden 3072 in
// FP8) and 2 * HIDDEN bytes a row and head, or 4 * HIDDEN for each piece and the base; writes 256 bytes a row and head,
// and in all 4 * HIDDEN of residual. Positions may come in any order: a row is computed and stored by itself.
//
// A cluster has a head, and a block of it HIDDEN / CLUSTER columns of all 128 rows: so a block reads an eighth of the
// activations after the wait (6 KB, where a block with all of K would read 48), and all its weights already lie in
// registers, PINNED tiles of a warp as halves: converting takes as long as multiplying, but a prologue that converted
// all would end after the predecessor. The blocks' sums are exchanged once, and by token: block r receives all of row
// r, so that norm and RoPE need no second exchange. They come by st.async on an mbarrier of the receiver: one trip
// instead of a cluster barrier's round. A ninth warp receives; while the others multiply it has the angles ready.
//
// With ENTRY_PIECES the norm before the projection is done here instead of in a launch of its own: W (x w / rms(x)) is
// (W (x w)) / rms(x), and the blocks of a cluster hold all of x between them, so that the sums of squares travel with
// the projection's sums and the last warp divides. Halves have few exponents, so a warp's columns of a token are
// brought to [1, 2) by a power of two, which multiplies its sums: no bit is lost whatever x's size. Each head's cluster
// writes a row of the residual, x w with 1 / rms(x) beside it: its readers come two launches later and more.
// Pieces that come from several ranks, EH_ROWS columns of each, are polled after the wait; down makes them NOT_READY.
#include "abi_decode.cuh"
#include "common/copy.cuh"
#include "common/exchange.cuh"
#include "common/kv.cuh"
#include "common/pdl.cuh"
#include "common/projection.cuh"
#include "common/reduce.cuh"

constexpr int CLUSTER = 8;
constexpr int MMA_WARPS = 8;
constexpr int MMA_THREADS = MMA_WARPS * WARP;
constexpr int THREADS = MMA_THREADS + WARP;
constexpr int TILES = HEAD_DIM / 16;
constexpr int CHUNKS = HIDDEN / CHUNK_K;        // of a tile
constexpr int BLOCK_CHUNKS = CHUNKS / CLUSTER;  // of them, a block's
constexpr int K_GROUPS = BLOCK_CHUNKS % 4 == 0 ? 4 : BLOCK_CHUNKS % 2 == 0 ? 2 : 1;  // of warps, along K
constexpr int WARP_CHUNKS = BLOCK_CHUNKS / K_GROUPS;
constexpr int COLUMNS = WARP_CHUNKS * CHUNK_K;
constexpr int WARP_TILES = TILES * K_GROUPS / MMA_WARPS;
constexpr int PITCH = HEAD_DIM + 4;  // floats of a token's rows: tokens 2t, rows g of a warp's stores hit 32 banks
constexpr int PAIRS = ROTARY / 2;
constexpr int LANE_DIMS = HEAD_DIM / WARP;
constexpr float HALF_LIMIT = 65504.0f;
// The norm's part: TOKEN_LANES lanes share a token of a group's columns, VECTORS of four each.
constexpr int SHARERS = MMA_WARPS / K_GROUPS;  // warps with the same columns, and other tiles
constexpr int TOKEN_LANES = COLUMNS / 4 < 8 ? COLUMNS / 4 : 8;
constexpr int VECTORS = COLUMNS / 4 / TOKEN_LANES;
constexpr int WARP_TOKENS = WARP / TOKEN_LANES;

static_assert(ROWS == CLUSTER && ROWS == MMA_WARPS, "block r finishes row r, and warp r sends it there");
static_assert(HIDDEN % (CLUSTER * CHUNK_K) == 0 && (!FP8 || HIDDEN % SCALE_K == 0), "whole chunks a block");
static_assert(TILES * K_GROUPS % MMA_WARPS == 0, "whole tiles a warp");
static_assert(COLUMNS / 4 % TOKEN_LANES == 0 && ROWS % WARP_TOKENS == 0 && ROWS / WARP_TOKENS <= SHARERS,
              "whole vectors a lane, and all tokens among a group's warps");
static_assert(ROTARY % 16 == 0 && PAIRS <= WARP && LANE_DIMS == 4, "pairs are two lanes apart, a lane has one angle");

__device__ __forceinline__ uint32_t in_block(uint32_t shared, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

__device__ __forceinline__ void send(uint32_t address, float4 x, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void send(uint32_t address, float x, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(x),
                 "r"(barrier)
                 : "memory");
}

// Turns of position * inverse_frequency, less whole ones: in double, since a large float is of another angle.
__device__ __forceinline__ float turns_of(int position, double inverse_frequency) {
    const double turns = position * (inverse_frequency * 0.15915494309189535);  // 1 / (2 pi)
    return float(turns - rint(turns));
}

struct Head {
    int number;  // of q, then of k, then of v
    bool is_q, is_k;
};

struct Shared {
    uint8_t tokens[MMA_WARPS][ROWS * TOKEN_PITCH<COLUMNS>];
    float sums[K_GROUPS][ROWS][PITCH];
    float received[CLUSTER][HEAD_DIM];  // a row's sums, from each block of the cluster
    float received_squares[CLUSTER];    // of its x
    float squares[K_GROUPS][ROWS];
    float factors[K_GROUPS][ROWS];  // what the halves in tokens were divided by
    uint64_t arrived;
    int rows;
};
constexpr int ARRIVING = sizeof(Shared::received) + (ENTRY_PIECES > 0 ? sizeof(Shared::received_squares) : 0);

// The live rows, and the position of `row` if it is one. One load for both: two would be two trips, since ptxas moves
// the second one behind the first one's use. Called by a whole warp.
__device__ __forceinline__ int2 rows_and_position(const QkvArgs& a, int row) {
    const bool counted = a.live != nullptr;
    const int* const position = a.positions + min_int(row, a.rows - 1);
    const int loaded = load_l2_int(counted && threadIdx.x % WARP == 0 ? a.live : position);
    const int live = __shfl_sync(0xffffffffu, loaded, 0);
    return make_int2(counted ? min_int(live, a.rows) : a.rows, __shfl_sync(0xffffffffu, loaded, 1));
}

__device__ __forceinline__ float4 load_float4(const float* address) {
    const uint4 x = load_l2_16(address);
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}

// A lane's columns of one token on their way to halves: x w, x = base + entry_scale * (the sum of pieces).
struct Entry {
    float4 base[VECTORS], norm[VECTORS];
    int token, column;  // its first

    // sharer: which of the warps with the same columns. In the prologue.
    __device__ __forceinline__ Entry(const QkvArgs& a, int sharer, int first_column) {
        const int lane = threadIdx.x % WARP;
        token = sharer * WARP_TOKENS + lane / TOKEN_LANES;
        column = first_column + lane % TOKEN_LANES * 4;
        if constexpr (ENTRY_PIECES == 0) return;
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) {
            norm[j] = load_float4(a.norm + column + j * TOKEN_LANES * 4);
            base[j] = ENTRY_BASE ? load_float4(a.base + row(a) * HIDDEN + column + j * TOKEN_LANES * 4)
                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    // Memory that exists, also for tokens from `rows` on.
    __device__ __forceinline__ int row(const QkvArgs& a) const { return min_int(token, a.rows - 1); }

#if RANKS > 1 && ENTRY_PIECES > 0
    // Whether peers push the pieces of the lane's columns j: only those of live rows come, and of ranks that exchange.
    __device__ __forceinline__ bool comes(const QkvArgs& a, int live, int j) const {
        return token < (a.live != nullptr ? min_int(live, a.rows) : a.rows) &&
               (column + j * TOKEN_LANES * 4) / EH_ROWS < RANKS;
    }

    // The sums of the lane's columns over the pieces, in their order, and *live. All pieces are asked for at once. What has
    // not come is a NaN, and so are the sums then: no word is looked at otherwise.
    __device__ __forceinline__ int receive(const QkvArgs& a, float4 (&x)[VECTORS]) const {
        int live, missing;
        PeerPolls polls;
        do {
            float4 parts[ENTRY_PIECES][VECTORS];
#pragma unroll
            for (int p = 0; p < ENTRY_PIECES; ++p) {
#pragma unroll
                for (int j = 0; j < VECTORS; ++j) {
                    parts[p][j] =
                        load_pushed_4(a.pieces + (p * ROWS + row(a)) * HIDDEN + column + j * TOKEN_LANES * 4);
                }
            }
            live = load_l2_int(a.live != nullptr ? a.live : a.positions);
            missing = -1;
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                x[j] = parts[0][j];
#pragma unroll
                for (int p = 1; p < ENTRY_PIECES; ++p) {
                    x[j].x += parts[p][j].x, x[j].y += parts[p][j].y, x[j].z += parts[p][j].z, x[j].w += parts[p][j].w;
                }
                const float all = x[j].x + x[j].y + (x[j].z + x[j].w);
                if (all == all || !a.polled || !comes(a, live, j)) continue;
#pragma unroll
                for (int p = 0; p < ENTRY_PIECES; ++p) {
                    if (!has_come(parts[p][j])) missing = (column + j * TOKEN_LANES * 4) / EH_ROWS;
                }
            }
        } while (polls.again(missing, a.fault, KERNEL_QKV, a.layer));
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) {
            if (a.polled && !comes(a, live, j)) x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        return live;
    }
#endif

    // tokens: the group's halves. Ends with its barrier for all SHARERS warps.
    __device__ __forceinline__ void run(const QkvArgs& a, Shared& shared, uint8_t* tokens, int group, int head) {
        const int lane = threadIdx.x % WARP;
        if (token < ROWS) {  // of whole warps
            float most = 0.0f, squares = 0.0f;
            float4 x[VECTORS], scaled[VECTORS];
#if RANKS > 1 && ENTRY_PIECES > 0
            const int live = receive(a, x);
#else
            float4 parts[ENTRY_PIECES > 0 ? ENTRY_PIECES : 1][VECTORS];
#pragma unroll
            for (int p = 0; p < ENTRY_PIECES; ++p) {
#pragma unroll
                for (int j = 0; j < VECTORS; ++j) {
                    parts[p][j] =
                        load_float4(a.pieces + (p * ROWS + row(a)) * HIDDEN + column + j * TOKEN_LANES * 4);
                }
            }
            const int live = load_l2_int(a.live != nullptr ? a.live : a.positions);
#endif
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
#if RANKS == 1 || ENTRY_PIECES == 0
                x[j] = parts[0][j];
#pragma unroll
                for (int p = 1; p < ENTRY_PIECES; ++p) {
                    x[j].x += parts[p][j].x, x[j].y += parts[p][j].y, x[j].z += parts[p][j].z, x[j].w += parts[p][j].w;
                }
#endif
                if (ENTRY_BASE) {
                    x[j].x = fmaf(a.entry_scale, x[j].x, base[j].x), x[j].y = fmaf(a.entry_scale, x[j].y, base[j].y);
                    x[j].z = fmaf(a.entry_scale, x[j].z, base[j].z), x[j].w = fmaf(a.entry_scale, x[j].w, base[j].w);
                }
                scaled[j] = make_float4(x[j].x * norm[j].x, x[j].y * norm[j].y, x[j].z * norm[j].z, x[j].w * norm[j].w);
                most = fmaxf(most, fmaxf(fmaxf(fabsf(scaled[j].x), fabsf(scaled[j].y)),
                                         fmaxf(fabsf(scaled[j].z), fabsf(scaled[j].w))));
                squares += x[j].x * x[j].x + x[j].y * x[j].y + (x[j].z * x[j].z + x[j].w * x[j].w);
            }
#pragma unroll
            for (int offset = TOKEN_LANES / 2; offset > 0; offset /= 2) {
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
            }
            const uint32_t exponent = __float_as_uint(most) & 0x7f800000u;
            const float up = __uint_as_float(0x7f000000u - exponent);  // 1 / 2 ** exponent; 2 ** 127 for zeros
            uint8_t* const to = tokens + token * TOKEN_PITCH<COLUMNS> + lane % TOKEN_LANES * 8;
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                *reinterpret_cast<uint2*>(to + j * TOKEN_LANES * 8) =
                    make_uint2(pack_f16(scaled[j].x * up, scaled[j].y * up), pack_f16(scaled[j].z * up, scaled[j].w * up));
            }
            if (lane % TOKEN_LANES == 0) shared.factors[group][token] = __uint_as_float(exponent);
            const bool mine = token % (Q_HEADS + 2 * KV_HEADS) == head;
            if (mine && token < (a.live != nullptr ? min_int(live, a.rows) : a.rows)) {
#pragma unroll
                for (int j = 0; j < VECTORS; ++j) {
                    *reinterpret_cast<float4*>(a.residual + token * HIDDEN + column + j * TOKEN_LANES * 4) =
                        a.inverse != nullptr ? scaled[j] : x[j];
                }
            }
#pragma unroll
            for (int offset = TOKEN_LANES / 2; offset > 0; offset /= 2) {
                squares += __shfl_xor_sync(0xffffffffu, squares, offset);
            }
            if (lane % TOKEN_LANES == 0) shared.squares[group][token] = squares;
        }
        asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(SHARERS * WARP) : "memory");  // the group's halves are there
    }
};

// Norm, RoPE and store of one row of a head. Lane l has stored rows 4l .. 4l + 3, which are dimensions `dim` .. + 3.
__device__ __forceinline__ void finish(const QkvArgs& a, Shared& shared, Head head, int row, float4 weight, int dim,
                                       double inverse_frequency) {
    const int lane = threadIdx.x % WARP;
    const int2 found = rows_and_position(a, row);
    const int rows = found.x, position = found.y;
    if (lane == 0) shared.rows = rows;
    asm volatile("bar.arrive 1, %0;" ::"n"(THREADS) : "memory");  // the other warps may read it behind their barrier
    if (row >= rows) return;
    float sine, cosine;
    sincospif(2.0f * turns_of(position, inverse_frequency), &sine, &cosine);
    float cosines[LANE_DIMS], sines[LANE_DIMS];
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) {
        const int pair = lane / 4 * 8 + (lane & 1) * 4 + i;
        cosines[i] = __shfl_sync(0xffffffffu, cosine, pair);
        sines[i] = __shfl_sync(0xffffffffu, sine, pair);
    }
    f16* out;
    if (head.is_q) {
        out = a.q + (row * Q_HEADS + head.number) * HEAD_DIM + dim;
    } else {
        f16* const cache = head.is_k ? a.k_cache : a.v_cache;
        const int64_t kv_head = (head.number - Q_HEADS) % KV_HEADS;
        out = cache + kv_head * a.slots * HEAD_DIM + kv_offset(position % a.slots, dim);
    }

    barrier_wait(&shared.arrived, 0, a.fault, KERNEL_QKV, a.layer);
    float x[LANE_DIMS] = {};
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
        const float4 part = *reinterpret_cast<const float4*>(&shared.received[block][lane * LANE_DIMS]);
        x[0] += part.x, x[1] += part.y, x[2] += part.z, x[3] += part.w;
    }
    // The norm's weight and RoPE go ahead of its factor, which a row's sum of squares is the last to arrive for.
    float y[LANE_DIMS] = {x[0] * weight.x, x[1] * weight.y, x[2] * weight.z, x[3] * weight.w};
    const bool normed = head.is_q || head.is_k, second = (lane & 2) != 0;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, y[i], 2);
        if (normed && lane < ROTARY / LANE_DIMS) y[i] = y[i] * cosines[i] + (second ? other : -other) * sines[i];
    }
    const float squares = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
    float entered = 1.0f;  // 1 / rms of the row
    if constexpr (ENTRY_PIECES > 0) {
        float total = 0.0f;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) total += shared.received_squares[block];
        entered = rsqrtf(total * (1.0f / HIDDEN) + EPS);
        if (head.number == 0 && lane == 0) {
            if (a.inverse != nullptr) a.inverse[row] = entered;
            if (!is_finite(total)) {
                report_fault(a.fault, FAULT_NOT_FINITE, ENTRY_BASE ? KERNEL_DOWN : KERNEL_EH_PROJ, a.layer - ENTRY_BASE);
            }
        }
    }
    const float inverse = normed ? entered * rsqrtf(squares * entered * entered * (1.0f / HEAD_DIM) + EPS) : entered;
    x[0] = y[0] * inverse, x[1] = y[1] * inverse, x[2] = y[2] * inverse, x[3] = y[3] * inverse;
    *reinterpret_cast<uint2*>(out) = make_uint2(pack_f16(x[0], x[1]), pack_f16(x[2], x[3]));
    const float most = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
    if (!is_finite(squares) || most > HALF_LIMIT) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_QKV, a.layer);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER)
    qkv(const __grid_constant__ QkvArgs a) {
    __shared__ __align__(16) Shared shared;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int rank = blockIdx.x % CLUSTER;
    const Head head{int(blockIdx.x) / CLUSTER, int(blockIdx.x) / CLUSTER < Q_HEADS,
                    int(blockIdx.x) / CLUSTER >= Q_HEADS && int(blockIdx.x) / CLUSTER < Q_HEADS + KV_HEADS};

    if (threadIdx.x == MMA_THREADS) {
        barrier_init(&shared.arrived, 1);
        barrier_expect(&shared.arrived, ARRIVING);
        barrier_init_fence();
    }
    __syncwarp();
    // The other blocks may send once this block's mbarrier is there; they wait for it at the end of their prologues.
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");

    if (warp == MMA_WARPS) {
        int dim = lane * LANE_DIMS;
        if ((head.is_q || head.is_k) && dim < ROTARY) dim = lane / 4 * 8 + (lane & 1) * 4 + (lane & 2) / 2 * PAIRS;
        float4 weight = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        if (head.is_q || head.is_k) weight = *reinterpret_cast<const float4*>((head.is_q ? a.q_norm : a.k_norm) + dim);
        const double inverse_frequency = a.inverse_frequencies[lane % PAIRS];
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // every thread that arrived must wait
        pdl_wait();
        pdl_trigger();
        finish(a, shared, head, rank, weight, dim, inverse_frequency);
        return;
    }

    const int k_group = warp % K_GROUPS, first_tile = warp / K_GROUPS * WARP_TILES;
    const int first_chunk = rank * BLOCK_CHUNKS + k_group * WARP_CHUNKS;
    uint4 raw[WARP_TILES][WARP_CHUNKS];
#pragma unroll
    for (int tile = 0; tile < WARP_TILES; ++tile) {
        const int64_t chunk = (int64_t(head.number) * TILES + first_tile + tile) * CHUNKS + first_chunk;
#pragma unroll
        for (int c = 0; c < WARP_CHUNKS; ++c) {
            raw[tile][c] = load_weights(a.weights + (chunk + c) * CHUNK_BYTES + lane * 16);
        }
    }
    float scale[WARP_CHUNKS];
#pragma unroll
    for (int c = 0; c < WARP_CHUNKS; ++c) {
        scale[c] = FP8 ? a.scales[head.number * (HIDDEN / SCALE_K) + (first_chunk + c) / SCALE_CHUNKS] : 1.0f;
    }
    Halves early[WARP_TILES][WARP_CHUNKS];
#pragma unroll
    for (int tile = 0; tile < WARP_TILES; ++tile) {
#pragma unroll
        for (int c = 0; c < WARP_CHUNKS; ++c) {
            if (tile < PINNED) early[tile][c] = to_halves(raw[tile][c]);
        }
    }
    uint8_t* const tokens = shared.tokens[ENTRY_PIECES > 0 ? k_group : warp];
    const int first_column = first_chunk * CHUNK_K;
    // Of these two, one is used.
    Fetch<COLUMNS> fetch(tokens, a.normed + first_column, HIDDEN, a.rows);
    Entry entry(a, warp / K_GROUPS, first_column);
    if (a.rows < 1) {  // see spoil()
        if (ENTRY_PIECES == 0) fetch.spoil();
#pragma unroll
        for (int i = 0; i < WARP_TILES * WARP_CHUNKS; ++i) {
            if (i / WARP_CHUNKS < PINNED) spoil(early[i / WARP_CHUNKS][i % WARP_CHUNKS]);
        }
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks run, and can receive

    pdl_wait();
    pdl_trigger();

    if constexpr (ENTRY_PIECES > 0) {
        entry.run(a, shared, tokens, k_group, head.number);
    } else {
        fetch.run();
    }
    float acc[WARP_TILES][4] = {};
#pragma unroll
    for (int c = 0; c < WARP_CHUNKS; ++c) {
        const Activations x = read_tokens<COLUMNS>(tokens, c);
#pragma unroll
        for (int tile = 0; tile < WARP_TILES; ++tile) {
            accumulate(acc[tile], tile < PINNED ? early[tile][c] : to_halves(raw[tile][c]), x, scale[c]);
        }
    }
    float factor[2] = {1.0f, 1.0f};  // of tokens 2t and 2t + 1
    if constexpr (ENTRY_PIECES > 0) {
        factor[0] = shared.factors[k_group][lane % 4 * 2];
        factor[1] = shared.factors[k_group][lane % 4 * 2 + 1];
    }
#pragma unroll
    for (int tile = 0; tile < WARP_TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = lane % 4 * 2 + i % 2, row = (first_tile + tile) * 16 + lane / 4 + i / 2 * 8;
            shared.sums[k_group][column][row] = acc[tile][i] * factor[i % 2];
        }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");  // the sums of all groups are there, and `rows`
    if (warp >= shared.rows) return;  // nobody waits for a dead row
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int group = 0; group < K_GROUPS; ++group) {
        const float4 part = *reinterpret_cast<const float4*>(&shared.sums[group][warp][lane * 4]);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    // A receiver ends only after it has everything, so its shared memory is there for as long as anyone writes to it.
    send(in_block(shared_address(&shared.received[rank][lane * 4]), warp), sum,
         in_block(shared_address(&shared.arrived), warp));
    if (ENTRY_PIECES > 0 && lane == 0) {
        float squares = 0.0f;
#pragma unroll
        for (int group = 0; group < K_GROUPS; ++group) squares += shared.squares[group][warp];
        send(in_block(shared_address(&shared.received_squares[rank]), warp), squares,
             in_block(shared_address(&shared.arrived), warp));
    }
}
