// Decoding's routing where it is not folded into the attention's projection: the laboratory's other side of a comparison.
//
// router  logits = router . rms(h, ffn_norm), in FP32, in parts of K; every rank computes all of them.
//   PRECOND  grid (EXPERTS / ROUTER_EXPERTS, ROUTER_SPLITS), block THREADS; pointers 16-byte aligned. Waits on attn_tail
//            (normed32); before that it reads its part of the router, which a bulk copy brings and registers then hold.
//   Reads the router once (3.1 MB at hidden 3072, 256 experts) and normed32 once a block; writes rows of logits.
//   As o_proj's router blocks: a warp has a quarter of the block's columns and half of the tokens, and FP32 FMAs. With K
//   in four parts all multiprocessors take part, and a block reads no more of the tokens than of the router.
// route   sums the parts, takes the TOP_K largest (ties: lower index), and the softmax over them.
//   PRECOND  grid (rows), block EXPERTS. Waits on router. `routed`, if given, was zero when attn_tail began.
//   It triggers first of all, since gate_up polls for `routed`: then attn_tail has ended, as router waited for that.
#include "abi_decode.cuh"
#include "common/choice.cuh"
#include "common/copy.cuh"
#include "common/fault.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int SPLIT_K = HIDDEN / ROUTER_SPLITS;
constexpr int K_PARTS = 4;  // warps along K
constexpr int WARP_TOKENS = ROWS / (WARPS / K_PARTS);
constexpr int PAIRS = SPLIT_K / K_PARTS / (WARP * 2);  // of a lane's columns
constexpr int LOGITS = WARP_TOKENS * ROUTER_EXPERTS;   // of a warp
static_assert(EXPERTS % ROUTER_EXPERTS == 0 && EXPERTS % WARP == 0 && EXPERTS <= 1024, "whole blocks and warps");
static_assert(PAIRS * K_PARTS * WARP * 2 * ROUTER_SPLITS == HIDDEN, "whole vectors a lane");
static_assert(LOGITS == WARP, "a lane gets one of the warp's sums");
static_assert(TOP_K <= WARP, "a lane keeps one choice");

__device__ __forceinline__ float2 load_pair(const float* address) {
    return __ldcg(reinterpret_cast<const float2*>(address));  // past L1, which may hold what an older launch read
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) router(const __grid_constant__ RouterArgs a) {
    __shared__ __align__(128) float weights[ROUTER_EXPERTS][SPLIT_K];
    __shared__ float logits[K_PARTS][ROWS][ROUTER_EXPERTS];
    __shared__ __align__(8) uint64_t arrived;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_expert = int(blockIdx.x) * ROUTER_EXPERTS, first_column = int(blockIdx.y) * SPLIT_K;
    const int first_token = warp / K_PARTS * WARP_TOKENS, column = warp % K_PARTS * (SPLIT_K / K_PARTS) + lane * 2;
    if (threadIdx.x == 0) {
        barrier_init(&arrived, 1);
        barrier_init_fence();
        barrier_expect(&arrived, sizeof(weights));
#pragma unroll
        for (int expert = 0; expert < ROUTER_EXPERTS; ++expert) {
            const float* const source = a.router + int64_t(first_expert + expert) * HIDDEN + first_column;
            bulk_load(weights[expert], source, SPLIT_K * 4, &arrived);
        }
    }
    const int live = live_before(a.live, a.rows);  // written long before normed32
    __syncthreads();                               // the mbarrier is initialised
    barrier_wait(&arrived, 0, a.fault, KERNEL_ROUTER, a.layer);
    float2 w[ROUTER_EXPERTS][PAIRS];
#pragma unroll
    for (int expert = 0; expert < ROUTER_EXPERTS; ++expert) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            w[expert][j] = *reinterpret_cast<const float2*>(&weights[expert][column + j * WARP * 2]);
        }
    }

    pdl_wait();
    pdl_trigger();

    float2 x[WARP_TOKENS][PAIRS];
#pragma unroll
    for (int token = 0; token < WARP_TOKENS; ++token) {
        const int row = min_int(first_token + token, a.rows - 1);  // beyond them, memory that exists
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            x[token][j] = load_pair(a.normed32 + int64_t(row) * HIDDEN + first_column + column + j * WARP * 2);
        }
    }
    float sums[LOGITS];
#pragma unroll
    for (int token = 0; token < WARP_TOKENS; ++token) {
#pragma unroll
        for (int expert = 0; expert < ROUTER_EXPERTS; ++expert) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                sum = fmaf(w[expert][j].x, x[token][j].x, sum);
                sum = fmaf(w[expert][j].y, x[token][j].y, sum);
            }
            sums[token * ROUTER_EXPERTS + expert] = sum;
        }
    }
    logits[warp % K_PARTS][first_token + lane / ROUTER_EXPERTS][lane % ROUTER_EXPERTS] = warp_sums(sums);
    __syncthreads();  // all parts of the columns are there
    const int token = threadIdx.x / ROUTER_EXPERTS, expert = threadIdx.x % ROUTER_EXPERTS;
    if (token < live) {
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < K_PARTS; ++part) sum += logits[part][token][expert];
        a.logits[(int64_t(blockIdx.y) * ROWS + token) * EXPERTS + first_expert + expert] = sum;
    }
}

constexpr int CANDIDATES = EXPERTS / WARP * TOP_K;
constexpr int FINAL_THREADS = (CANDIDATES + WARP - 1) / WARP * WARP;  // of the warps that have them

extern "C" __global__ void __launch_bounds__(EXPERTS) route(const __grid_constant__ RouteArgs a) {
    __shared__ __align__(16) uint32_t keys[EXPERTS], best[CANDIDATES];  // best: the warps' first keys, in order
    __shared__ float shares[TOP_K];
    __shared__ int experts[CANDIDATES], forced[TOP_K], ids[TOP_K];
    __shared__ float values[TOP_K];
    pdl_trigger();
    const int row = int(blockIdx.x), thread = int(threadIdx.x), lane = thread % WARP, warp = thread / WARP;
    if (a.forced_ids != nullptr && thread < TOP_K) forced[thread] = __ldcg(a.forced_ids + row * TOP_K + thread);
    const int live = live_before(a.live, a.rows);
    pdl_wait();
    if (row >= live) return;
    float part[ROUTER_SPLITS];  // on their way together
#pragma unroll
    for (int split = 0; split < ROUTER_SPLITS; ++split)
        part[split] = __ldcg(a.logits + (split * ROWS + row) * EXPERTS + thread);
    float logit = part[0];
#pragma unroll
    for (int split = 1; split < ROUTER_SPLITS; ++split) logit += part[split];
    const uint32_t key = order_key(logit);
    keys[thread] = key;
    __syncwarp();  // the warp's keys are there
    const int first = keys_before<WARP>(keys + warp * WARP, lane, key);
    if (first < TOP_K) {
        best[warp * TOP_K + first] = key;
        experts[warp * TOP_K + first] = thread;
    }
    __syncthreads();  // the warps' first keys are there
    if (thread >= FINAL_THREADS) return;
    if (thread < CANDIDATES) {
        const uint32_t own = best[thread];
        const int place = keys_before<CANDIDATES>(best, thread, own);
        if (place < TOP_K) {
            const int id = a.forced_ids != nullptr ? forced[place] : experts[thread];
            if (a.routed != nullptr) {  // first of all: the experts' weights are on their way as soon as this is seen
#pragma unroll
                for (int copy = 0; copy < ROUTED_COPIES; ++copy) {
                    int* const target = a.routed + (copy * ROWS + row) * TOP_K + place;
                    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(target), "r"(id + 1) : "memory");
                }
            }
            ids[place] = id;
            values[place] = key_value(a.forced_ids != nullptr ? keys[id] : own);
        }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(FINAL_THREADS) : "memory");  // the chosen are there; the other warps have left
    if (thread >= WARP) return;
    const float value = values[lane % TOP_K];
    const float share = __expf(value - warp_max(value));
    if (lane < TOP_K) shares[lane] = share;
    __syncwarp();  // the shares are there
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) total += shares[k];
    if (lane < TOP_K) {
        a.expert_ids[row * TOP_K + lane] = ids[lane];
        a.expert_weights[row * TOP_K + lane] = __fdividef(share, total);  // 1 <= total <= TOP_K
    }
    if (lane == 0 && !is_finite(total)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ROUTER, a.layer);
}
