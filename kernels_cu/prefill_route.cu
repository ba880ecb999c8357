// Prompt processing: which experts a chunk's tokens go to.
//
// prefill_router  FP32 logits. FP32 FMA rather than tensor cores: routing is a choice, and TF32's 10 bits change it.
//   PRECOND  grid (ceil(rows / 64), EXPERTS / EXPERT_TILE, ROUTER_SPLITS), block EXPERT_TILE * 2.
//   A thread has 8 tokens x 4 experts; K goes in steps of 16 through two stages, transposed on the way into shared memory.
//   The splits of K, summed by prefill_route, fill the chip. Reads normed32 EXPERTS / EXPERT_TILE times and the router
//   rows / 64 times, from L2.
// prefill_route  sums the splits, takes the TOP_K largest (ties: lower index), and the softmax over them.
//   PRECOND  grid (ceil(rows / 8)), block 256: a warp a token.
#include "abi_prefill.cuh"
#include "common/fault.cuh"
#include "common/pdl.cuh"
#include "common/prefill_report.cuh"
#include "common/reduce.cuh"

constexpr int ROUTER_TOKENS = 64;
constexpr int ROUTER_K = 16;
constexpr int ROUTER_THREADS = ROUTER_TOKENS / 8 * (EXPERT_TILE / 4);
constexpr int SPLIT_K = HIDDEN / ROUTER_SPLITS;
static_assert(EXPERTS % EXPERT_TILE == 0 && EXPERT_TILE % 4 == 0, "whole blocks");
static_assert(SPLIT_K * ROUTER_SPLITS == HIDDEN && SPLIT_K % ROUTER_K == 0, "whole steps");
static_assert((ROUTER_TOKENS * ROUTER_K / 4) % ROUTER_THREADS == 0 && (EXPERT_TILE * ROUTER_K / 4) % ROUTER_THREADS == 0,
              "each thread moves whole float4s");

extern "C" __global__ void __launch_bounds__(ROUTER_THREADS)
    prefill_router(const __grid_constant__ PrefillRouterArgs a) {
    // Rows of K, so that a thread's tokens and experts are contiguous. The padding spreads the transposing stores.
    __shared__ __align__(16) float tokens[2][ROUTER_K][ROUTER_TOKENS + 4];
    __shared__ __align__(16) float experts[2][ROUTER_K][EXPERT_TILE + 4];
    constexpr int TOKEN_LOADS = ROUTER_TOKENS * ROUTER_K / 4 / ROUTER_THREADS;
    constexpr int EXPERT_LOADS = EXPERT_TILE * ROUTER_K / 4 / ROUTER_THREADS;
    const int first_token = int(blockIdx.x) * ROUTER_TOKENS, first_expert = int(blockIdx.y) * EXPERT_TILE;
    const int first_k = int(blockIdx.z) * SPLIT_K;
    pdl_wait();
    pdl_trigger();

    float4 token_next[TOKEN_LOADS], expert_next[EXPERT_LOADS];
    auto load = [&](int k) {
#pragma unroll
        for (int i = 0; i < TOKEN_LOADS; ++i) {
            const int j = i * ROUTER_THREADS + int(threadIdx.x);
            const int row = min_int(first_token + j / (ROUTER_K / 4), a.rows - 1);
            token_next[i] = *reinterpret_cast<const float4*>(a.normed32 + int64_t(row) * HIDDEN + k + j % (ROUTER_K / 4) * 4);
        }
#pragma unroll
        for (int i = 0; i < EXPERT_LOADS; ++i) {
            const int j = i * ROUTER_THREADS + int(threadIdx.x);
            const int row = first_expert + j / (ROUTER_K / 4);
            expert_next[i] = *reinterpret_cast<const float4*>(a.router + int64_t(row) * HIDDEN + k + j % (ROUTER_K / 4) * 4);
        }
    };
    auto store = [&](int stage) {
#pragma unroll
        for (int i = 0; i < TOKEN_LOADS; ++i) {
            const int j = i * ROUTER_THREADS + int(threadIdx.x), row = j / (ROUTER_K / 4), k = j % (ROUTER_K / 4) * 4;
            tokens[stage][k][row] = token_next[i].x;
            tokens[stage][k + 1][row] = token_next[i].y;
            tokens[stage][k + 2][row] = token_next[i].z;
            tokens[stage][k + 3][row] = token_next[i].w;
        }
#pragma unroll
        for (int i = 0; i < EXPERT_LOADS; ++i) {
            const int j = i * ROUTER_THREADS + int(threadIdx.x), row = j / (ROUTER_K / 4), k = j % (ROUTER_K / 4) * 4;
            experts[stage][k][row] = expert_next[i].x;
            experts[stage][k + 1][row] = expert_next[i].y;
            experts[stage][k + 2][row] = expert_next[i].z;
            experts[stage][k + 3][row] = expert_next[i].w;
        }
    };

    const int token = int(threadIdx.x) / (EXPERT_TILE / 4) * 8, expert = int(threadIdx.x) % (EXPERT_TILE / 4) * 4;
    float sum[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = 0.0f;
    load(first_k);
    store(0);
    __syncthreads();  // the first stage is there
#pragma unroll 1
    for (int step = 0; step < SPLIT_K / ROUTER_K; ++step) {
        const bool more = step + 1 < SPLIT_K / ROUTER_K;
        if (more) load(first_k + (step + 1) * ROUTER_K);
#pragma unroll
        for (int k = 0; k < ROUTER_K; ++k) {
            const float4 t0 = *reinterpret_cast<const float4*>(&tokens[step % 2][k][token]);
            const float4 t1 = *reinterpret_cast<const float4*>(&tokens[step % 2][k][token + 4]);
            const float4 e = *reinterpret_cast<const float4*>(&experts[step % 2][k][expert]);
            const float x[8] = {t0.x, t0.y, t0.z, t0.w, t1.x, t1.y, t1.z, t1.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum[i][0] = fmaf(x[i], e.x, sum[i][0]);
                sum[i][1] = fmaf(x[i], e.y, sum[i][1]);
                sum[i][2] = fmaf(x[i], e.z, sum[i][2]);
                sum[i][3] = fmaf(x[i], e.w, sum[i][3]);
            }
        }
        if (more) store((step + 1) % 2);
        // The next stage is there, and nobody still reads the one that the next store overwrites.
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = first_token + token + i;
        if (row < a.rows)
            *reinterpret_cast<float4*>(a.logits + (int64_t(blockIdx.z) * a.rows + row) * EXPERTS + first_expert + expert) =
                make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
}

constexpr int LANE_EXPERTS = (EXPERTS + WARP - 1) / WARP;

extern "C" __global__ void __launch_bounds__(256) prefill_route(const __grid_constant__ PrefillRouteArgs a) {
    pdl_wait();
    pdl_trigger();
    const int row = int(blockIdx.x) * 8 + int(threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (row >= a.rows) return;
    const float minus_infinity = __int_as_float(0xff800000);
    float logits[LANE_EXPERTS];
    bool finite = true;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i) {
        const int expert = i * WARP + lane;
        logits[i] = minus_infinity;
        if (expert < EXPERTS) {
            float sum = 0.0f;
#pragma unroll
            for (int split = 0; split < ROUTER_SPLITS; ++split)
                sum += a.logits[(int64_t(split) * a.rows + row) * EXPERTS + expert];
            finite = finite && is_finite(sum);
            logits[i] = is_finite(sum) ? sum : -3.0e38f;  // a choice exists even where a report follows
        }
    }
    report_warp(finite, a.fault, a.layer);
    float mine = 0.0f, first = 0.0f, total = 0.0f;  // lane k: exp(k-th largest - largest)
    int id = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        float top = minus_infinity;
        int where = EXPERTS;
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; ++i)
            if (logits[i] > top) top = logits[i], where = i * WARP + lane;  // the lowest of this lane's equals
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, top, offset);
            const int other_where = __shfl_xor_sync(0xffffffffu, where, offset);
            if (other > top || (other == top && other_where < where)) top = other, where = other_where;
        }
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; ++i)
            if (where == i * WARP + lane) logits[i] = minus_infinity;
        if (k == 0) first = top;
        const float weight = expf(top - first);
        total += weight;
        if (lane == k) mine = weight, id = where;
    }
    if (lane < TOP_K) {
        a.expert_ids[row * TOP_K + lane] = id;
        a.expert_weights[row * TOP_K + lane] = mine / total;
    }
}
static_assert(TOP_K <= WARP, "a lane keeps one choice");
