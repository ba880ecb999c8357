// The rank's part of the O projection, and in a MoE layer of the router's logits (folded routing).
//
// PRECOND: grid ROUTER_BLOCKS + HIDDEN / 16 / TILES, block THREADS, BLOCKS of them a multiprocessor; all pointers
// 16-byte aligned. Waits on combine (attended, attended32). Before that it reads weights, scales and fold, and
// `residual` with `inverse`, which qkv or a launch before it wrote: the router's share of it is complete when the wait
// ends.
// Reads weights and fold once (2.4 and 1.2 MB at 6 heads, hidden 3072, 256 experts), activations once a block; writes
// rows of out, router_attended and router_residual, which are their own ready flags (common/flagged.cuh). With RANKS > 1
// they lie in this rank's inbox, and go to the same places of all others (common/exchange.cuh), 128 bytes of out a warp.
//
// Tile blocks: TILES tiles of 16 rows, K split among the warps, so that a block reads the activations once, and every
// warp's weights have arrived in registers, as halves, before the wait. Router blocks: ROUTER_EXPERTS rows of fold, one
// bulk copy; a warp has a quarter of the columns and half of the tokens, its part of fold in registers. FP32 FMAs: a
// tensor core's operands would lose what routing is to be decided by. Both kinds, and the next launch's, fit beside
// each other: a block that had to wait for room would start its weights late.
#include "abi_decode.cuh"
#include "common/copy.cuh"
#include "common/exchange.cuh"
#include "common/flagged.cuh"
#include "common/pdl.cuh"
#include "common/projection.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int K = Q_HEADS * HEAD_DIM;
constexpr int CHUNKS = K / CHUNK_K;
constexpr int WARP_CHUNKS = CHUNKS / WARPS;
constexpr int COLUMNS = WARP_CHUNKS * CHUNK_K;
constexpr int BLOCK_ROWS = TILES * 16;
constexpr int PITCH = BLOCK_ROWS + 4;  // floats of a token's rows: tokens 2t, rows g of a warp's stores hit 32 banks

constexpr int ROUTER_BLOCKS = MOE ? EXPERTS / ROUTER_EXPERTS : 0;
constexpr int FOLD_WIDTH = K + SLICE;
constexpr int FOLD_BYTES = ROUTER_EXPERTS * FOLD_WIDTH * 4;
constexpr int K_PARTS = 4;                            // warps along a row of fold
constexpr int WARP_TOKENS = ROWS / (WARPS / K_PARTS);
constexpr int PAIRS = K / K_PARTS / (WARP * 2);       // of a lane's columns, for each token
constexpr int SINGLES = SLICE / K_PARTS / WARP;       // of a lane's columns of the residual's slice
constexpr int LOGITS = WARP_TOKENS * ROUTER_EXPERTS;  // of a warp

static_assert(CHUNKS % WARPS == 0 && HIDDEN % BLOCK_ROWS == 0, "whole chunks a warp, whole tiles a block");
static_assert(BLOCK_ROWS == WARP && ROWS * BLOCK_ROWS == THREADS, "PITCH is 4 modulo 32, a thread stores one sum");
static_assert(!MOE || (EXPERTS % ROUTER_EXPERTS == 0 && K % (K_PARTS * WARP * 2) == 0 && SLICE % (K_PARTS * WARP) == 0),
              "whole vectors a lane");
static_assert(LOGITS == 8 || LOGITS == 16 || LOGITS == 32, "a warp's sums are halved until one is left");

struct TileShared {
    uint8_t tokens[WARPS][ROWS * TOKEN_PITCH<COLUMNS>];
    float sums[WARPS][ROWS][PITCH];
};
struct RouterShared {
    float fold[ROUTER_EXPERTS][FOLD_WIDTH];
    float logits[2][K_PARTS][ROWS][ROUTER_EXPERTS];  // of attended, of the residual
    uint64_t arrived;
};
constexpr int SHARED_BYTES =
    MOE && sizeof(RouterShared) > sizeof(TileShared) ? sizeof(RouterShared) : sizeof(TileShared);

__device__ __forceinline__ void check(const OProjArgs& a, float x) {
    if (!is_finite(x)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_O_PROJ, a.layer);
}

// A result, to whoever polls for it.
__device__ __forceinline__ void give(const Peers& peers, float& out, float x) {
    if constexpr (RANKS > 1)
        peers.push(&out, x);
    else
        out = ready_float(x);
}

// Loaded whether it counts or not: ptxas issues a load that has no condition beside others, and not behind them.
__device__ __forceinline__ int rows_of(const OProjArgs& a) {
    const int live = load_l2_int(a.live != nullptr ? a.live : reinterpret_cast<const int*>(a.attended32));
    return a.live != nullptr ? min_int(a.rows, live) : a.rows;
}

__device__ __forceinline__ void project(const OProjArgs& a, TileShared& shared, int block) {
    const Peers peers(a.peers);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    uint4 raw[TILES][WARP_CHUNKS];
    float scale[TILES][WARP_CHUNKS];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int64_t chunk = int64_t(block * TILES + tile) * CHUNKS + warp * WARP_CHUNKS;
#pragma unroll
        for (int c = 0; c < WARP_CHUNKS; ++c) {
            raw[tile][c] = load_weights(a.weights + (chunk + c) * CHUNK_BYTES + lane * 16);
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int c = 0; c < WARP_CHUNKS; ++c) {
            const int head = (warp * WARP_CHUNKS + c) / SCALE_CHUNKS;
            scale[tile][c] = FP8 ? a.scales[(block * TILES + tile) * Q_HEADS + head] : 1.0f;
        }
    }
    Halves weights[TILES][WARP_CHUNKS];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int c = 0; c < WARP_CHUNKS; ++c) weights[tile][c] = to_halves(raw[tile][c]);
    }
    Fetch<COLUMNS> fetch(shared.tokens[warp], a.attended + warp * COLUMNS, K, a.rows);
    if (a.rows < 1) {  // see spoil()
        fetch.spoil();
#pragma unroll
        for (int i = 0; i < TILES * WARP_CHUNKS; ++i) spoil(weights[i / WARP_CHUNKS][i % WARP_CHUNKS]);
    }

    pdl_wait();

    const int rows = rows_of(a);  // on its way beside the tokens
    fetch.run();
    float acc[TILES][4] = {};
#pragma unroll
    for (int c = 0; c < WARP_CHUNKS; ++c) {
        const Activations x = read_tokens<COLUMNS>(shared.tokens[warp], c);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) accumulate(acc[tile], weights[tile][c], x, scale[tile][c]);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            shared.sums[warp][lane % 4 * 2 + i % 2][tile * 16 + lane / 4 + i / 2 * 8] = acc[tile][i];
        }
    }
    __syncthreads();  // all warps' sums are there
    const int token = threadIdx.x / BLOCK_ROWS, row = threadIdx.x % BLOCK_ROWS;
    if (token < rows) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += shared.sums[w][token][row];
        give(peers, a.out[token * HIDDEN + block * BLOCK_ROWS + row], sum);
        check(a, sum);
    }
}

__device__ __forceinline__ void route(const OProjArgs& a, RouterShared& shared, int block) {
    const Peers peers(a.peers);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int part = warp % K_PARTS, first_token = warp / K_PARTS * WARP_TOKENS;
    const int first_expert = block * ROUTER_EXPERTS;
    if (threadIdx.x == 0) {
        barrier_init(&shared.arrived, 1);
        barrier_init_fence();
        barrier_expect(&shared.arrived, FOLD_BYTES);
        bulk_load(shared.fold, a.fold + int64_t(first_expert) * FOLD_WIDTH, FOLD_BYTES, &shared.arrived);
    }
    float residual[WARP_TOKENS][SINGLES];
    const int slice_column = part * (SLICE / K_PARTS) + lane, column = part * (K / K_PARTS) + lane * 2;
#pragma unroll
    for (int token = 0; token < WARP_TOKENS; ++token) {
        const int row = min_int(first_token + token, a.rows - 1);  // beyond them, memory that exists
        const float* const x = a.residual + row * HIDDEN + a.slice_start + slice_column;
#pragma unroll
        for (int j = 0; j < SINGLES; ++j) residual[token][j] = load_l2_float(x + j * WARP);
    }
    // Of what a lane will have of the residual's logits. Loaded whether it counts or not, as in rows_of().
    const int logit = lane / (WARP / LOGITS);  // what a lane holds of a warp's sums; the first of its group stores it
    const int token_of = first_token + logit / ROUTER_EXPERTS, expert_of = logit % ROUTER_EXPERTS;
    const float* const inverse = a.inverse != nullptr ? a.inverse : a.residual;
    const float factor = load_l2_float(inverse + min_int(token_of, a.rows - 1));
    __syncthreads();  // the mbarrier is initialised
    barrier_wait(&shared.arrived, 0, a.fault, KERNEL_O_PROJ, a.layer);

    float sums[LOGITS] = {};
#pragma unroll
    for (int expert = 0; expert < ROUTER_EXPERTS; ++expert) {
#pragma unroll
        for (int j = 0; j < SINGLES; ++j) {
            const float w = shared.fold[expert][K + slice_column + j * WARP];
#pragma unroll
            for (int token = 0; token < WARP_TOKENS; ++token) {
                sums[token * ROUTER_EXPERTS + expert] += w * residual[token][j];
            }
        }
    }
    const float of_residual = warp_sums(sums) * (a.inverse != nullptr ? factor : 1.0f);
    if (lane % (WARP / LOGITS) == 0) shared.logits[1][part][token_of][expert_of] = of_residual;

    float2 fold[ROUTER_EXPERTS][PAIRS];
#pragma unroll
    for (int expert = 0; expert < ROUTER_EXPERTS; ++expert) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            fold[expert][j] = *reinterpret_cast<const float2*>(&shared.fold[expert][column + j * WARP * 2]);
        }
    }

    pdl_wait();

    uint2 attended[WARP_TOKENS][PAIRS];
#pragma unroll
    for (int token = 0; token < WARP_TOKENS; ++token) {
        const float* const x = a.attended32 + min_int(first_token + token, a.rows - 1) * K + column;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) attended[token][j] = load_l2_8(x + j * WARP * 2);
    }
    const int rows = rows_of(a);
#pragma unroll
    for (int token = 0; token < WARP_TOKENS; ++token) {
#pragma unroll
        for (int expert = 0; expert < ROUTER_EXPERTS; ++expert) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const float2 w = fold[expert][j];
                sum += w.x * __uint_as_float(attended[token][j].x);
                sum += w.y * __uint_as_float(attended[token][j].y);
            }
            sums[token * ROUTER_EXPERTS + expert] = sum;
        }
    }
    const float of_attended = warp_sums(sums);
    if (lane % (WARP / LOGITS) == 0) shared.logits[0][part][token_of][expert_of] = of_attended;
    __syncthreads();  // all parts of the columns are there
    const int which = threadIdx.x / (ROWS * ROUTER_EXPERTS), rest = threadIdx.x % (ROWS * ROUTER_EXPERTS);
    const int token = rest / ROUTER_EXPERTS, expert = rest % ROUTER_EXPERTS;
    if (which < 2 && token < rows) {
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < K_PARTS; ++p) sum += shared.logits[which][p][token][expert];
        give(peers, (which == 0 ? a.router_attended : a.router_residual)[token * EXPERTS + first_expert + expert], sum);
        check(a, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) o_proj(const __grid_constant__ OProjArgs a) {
    __shared__ __align__(128) uint8_t shared[SHARED_BYTES];
    pdl_trigger();  // at once: attn_tail's prologue reads norms, and what qkv wrote
    const int block = blockIdx.x;
    if constexpr (MOE) {
        if (block < ROUTER_BLOCKS) {
            route(a, *reinterpret_cast<RouterShared*>(shared), block);
            return;
        }
    }
    project(a, *reinterpret_cast<TileShared*>(shared), block - ROUTER_BLOCKS);
}
