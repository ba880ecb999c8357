// What follows attention and the experts: sums over ranks, norms, the residual, and the routing.
//
// attn_tail  o = the ranks' partials; h = residual + attn_scale rms(o, attn_out_norm); normed = rms(h, ffn_norm) as
//            halves, and as E4M3 or FP32 where asked for; the router's logits, TOP_K of them, and their softmax.
// mlp_tail   y = the ranks' partials; out = h + ffn_scale y, or h + ffn_scale rms(y, ffn_out_norm); normed =
//            rms(out, next_norm); residual = out, or rms(out, next_norm).
//   PRECOND  grid (rows * PARTS), cluster PARTS; block COLUMN_THREADS, in attn_tail ROUTE_THREADS more where ROUTED.
//            Arrays 16-byte aligned, ranks <= MAX_RANKS. Partials and routing are read after pdl_wait(), norms before,
//            and so are attn_tail's *live, its residual and mlp_tail's h, written two launches ago or more. Where
//            attn_tail is `polled`, o and the router's parts were NOT_READY before o_proj wrote them
//            (common/flagged.cuh), and whatever attn_tail writes had been read for the last time before o_proj began.
//            `rows` may exceed ROWS; then ranks' partials lie `rows` rows apart, and nothing is routed.
//   RANKS > 1 o, the router's parts and y are this rank's inbox, which the ranks push into (common/exchange.cuh) and
//            both tails poll, whatever `polled` says; rows <= ROWS. mlp_tail reads *live before it polls, too; what it
//            writes had been read for the last time before down began; it leaves y NOT_READY: a word has one reader.
//   Reads rows * HIDDEN * 4 (ranks + 1) bytes and two norms, attn_tail also rows * EXPERTS * 8 ranks;
//   writes rows * HIDDEN * 6, mlp_tail of an inbox also what it read of y.
//
// Routing is done beside the normalisation. 1 / rms(h) scales all logits alike, so the order is that of rn + k ra, which
// needs the sum of o's squares alone: of one rank's o the routing threads, an expert each, take it themselves, an
// exchange earlier than the cluster has it. A key's place is the number of keys that come before it, first in its warp,
// then among the warps' first TOP_K: many independent comparisons instead of one warp's chain of dependent ones.
// How a row is shared among blocks: common/row.cuh; one reduction instead of two: common/sublayer.cuh.
#include "abi_decode.cuh"
#include "common/exchange.cuh"
#include "common/choice.cuh"
#include "common/experts.cuh"
#include "common/flagged.cuh"
#include "common/row.cuh"
#include "common/sublayer.cuh"

__device__ __forceinline__ float4 load4_flagged(const float* address) {
    const uint4 x = load_flagged_16(address);
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}
__device__ __forceinline__ float load_flagged(const float* address) {
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(address) : "memory");
    return x;
}

// The sum over ranks of what they push to `from` and, a rank each, ROWS * HIDDEN further on. All loads leave together,
// and all of them again while any word has not come: to pick those that are missing takes longer.
__device__ __forceinline__ float4 sum_pushed(const float* from, Fault* fault, int kernel, int layer) {
    float4 part[RANKS];
    int missing;
    PeerPolls polls;
    do {
#pragma unroll
        for (int r = 0; r < RANKS; ++r) part[r] = load_pushed_4(from + r * (ROWS * HIDDEN));
        missing = -1;
#pragma unroll
        for (int r = RANKS - 1; r >= 0; --r) missing = has_come(part[r]) ? missing : r;
    } while (polls.again(missing, fault, kernel, layer));
    float4 total = part[0];
#pragma unroll
    for (int r = 1; r < RANKS; ++r) total = sum(total, part[r]);
    return total;
}

__device__ __forceinline__ bool is_polled(const AttnTailArgs& a) { return RANKS > 1 || a.polled; }

#ifdef ROUTED
constexpr int ROUTE_THREADS = EXPERTS;  // an expert each
constexpr int ROUTE_WARPS = ROUTE_THREADS / WARP;
constexpr int CANDIDATES = ROUTE_WARPS * TOP_K;
constexpr int FINAL_THREADS = (CANDIDATES + WARP - 1) / WARP * WARP;  // of the warps that have them
static_assert(EXPERTS % WARP == 0 && COLUMN_THREADS + ROUTE_THREADS <= 1024, "whole warps, in one block");
static_assert(TOP_K == 8, "two vectors of shares");
constexpr int ROW_VECTORS = HIDDEN / 4;
constexpr int THREAD_VECTORS = (ROW_VECTORS + ROUTE_THREADS - 1) / ROUTE_THREADS;  // of a thread; the last may be none

struct Routing {
    alignas(16) uint32_t keys[EXPERTS];
    alignas(16) uint32_t best[CANDIDATES];  // the warps' first keys, in order
    alignas(16) float squares[(ROUTE_WARPS + 3) / 4 * 4];  // of o, the warps' parts
    alignas(16) float shares[TOP_K];  // of the chosen, in order: exp(logit - largest logit)
    int experts[CANDIDATES];
    int forced[TOP_K];
    int ids[TOP_K];
    float values[TOP_K];  // logits of the chosen, times rms(h)
};

__device__ __forceinline__ float sum_ranks_1(const float* address, int ranks, int64_t stride) {
    float total = __ldcg(address);
    for (int r = 1; r < ranks; ++r) total += __ldcg(address + r * stride);
    return total;
}

// The thread's part of the sum of a row's squares of o, and its expert's logit in two parts.
__device__ __forceinline__ float inputs_of(const AttnTailArgs& a, int row, int thread, float& attended, float& residual) {
    constexpr int EACH = THREAD_VECTORS;
    const auto has = [&](int i) {
        return ROW_VECTORS % ROUTE_THREADS == 0 || thread + i * ROUTE_THREADS < ROW_VECTORS;
    };
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float* const o = a.o + int64_t(row) * HIDDEN + thread * 4;
    const int64_t at = int64_t(row) * EXPERTS + thread, stride = rank_rows(a.rows) * EXPERTS;
    float total = 0.0f;
    if (a.polled) {
        float4 x[EACH];
        Polls polls;
        bool here;
        do {
            here = true;
#pragma unroll
            for (int i = 0; i < EACH; ++i) x[i] = has(i) ? load4_flagged(o + i * ROUTE_THREADS * 4) : none;
            attended = load_flagged(a.router_attended + at);
            residual = load_flagged(a.router_residual + at);
#pragma unroll
            for (int i = 0; i < EACH; ++i) here = here && has_come(x[i]);
        } while (polls.again(here && has_come(attended) && has_come(residual), a.fault, KERNEL_ATTN_TAIL, a.layer));
#pragma unroll
        for (int i = 0; i < EACH; ++i) total += dot(x[i], x[i]);
        return total;
    }
    attended = sum_ranks_1(a.router_attended + at, a.ranks, stride);
    residual = sum_ranks_1(a.router_residual + at, a.ranks, stride);
    if (a.ranks == 1) {
        float4 x[EACH];  // on their way together
#pragma unroll
        for (int i = 0; i < EACH; ++i) x[i] = has(i) ? load4(o + i * ROUTE_THREADS * 4) : none;
#pragma unroll
        for (int i = 0; i < EACH; ++i) total += dot(x[i], x[i]);
        return total;
    }
#pragma unroll 1
    for (int i = 0; i < EACH && has(i); ++i) {
        const float4 x = sum_ranks(o + i * ROUTE_THREADS * 4, a.ranks, rank_rows(a.rows) * HIDDEN);
        total += dot(x, x);
    }
    return total;
}

// The sums over ranks of the two parts of an expert's logit.
__device__ __forceinline__ void sum_pushed_logits(const AttnTailArgs& a, int row, int expert, float& attended,
                                                  float& residual) {
    const int64_t at = int64_t(row) * EXPERTS + expert;
    float parts[2][RANKS];
    int missing;
    PeerPolls polls;
    do {
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            parts[0][r] = load_pushed(a.router_attended + at + r * (ROWS * EXPERTS));
            parts[1][r] = load_pushed(a.router_residual + at + r * (ROWS * EXPERTS));
        }
        missing = -1;
#pragma unroll
        for (int r = RANKS - 1; r >= 0; --r)
            missing = has_come(parts[0][r]) && has_come(parts[1][r]) ? missing : r;
    } while (polls.again(missing, a.fault, KERNEL_ATTN_TAIL, a.layer));
    attended = parts[0][0];
    residual = parts[1][0];
#pragma unroll
    for (int r = 1; r < RANKS; ++r) {
        attended += parts[0][r];
        residual += parts[1][r];
    }
}

// The routing of a row by ROUTE_THREADS threads.
__device__ __forceinline__ void route(const AttnTailArgs& a, int row, int thread, RowExchange* exchange, Routing& r) {
    const int lane = thread % WARP, warp = thread / WARP;
    // On its way beside the logits: a benchmark's forced routing is not to take longer than what it stands for.
    if (a.forced_ids != nullptr && thread < TOP_K) r.forced[thread] = __ldcg(a.forced_ids + row * TOP_K + thread);
    // The order needs the sum of o's squares, and nothing else of the row. The cluster's sum comes an exchange later than
    // one of their own, but one multiprocessor would take longer than that to read a row of several ranks.
    float attended, residual, total = 0.0f;
    if constexpr (RANKS > 1) {
        sum_pushed_logits(a, row, thread, attended, residual);
        total = row_result<false>(exchange[0], a.fault, KERNEL_ATTN_TAIL, a.layer).x;
    } else {
        const float squares = warp_sum(inputs_of(a, row, thread, attended, residual));
        if (lane == 0) r.squares[warp] = squares;
        asm volatile("bar.sync 2, %0;" ::"n"(ROUTE_THREADS) : "memory");  // the warps' parts are there
#pragma unroll
        for (int w = 0; w < ROUTE_WARPS; ++w) total += r.squares[w];
    }
    const float factor = a.attn_scale * inverse_rms(total);
    const uint32_t key = order_key(fmaf(factor, attended, residual));
    r.keys[thread] = key;
    __syncwarp();  // the warp's keys are there
    const int first = keys_before<WARP>(r.keys + warp * WARP, lane, key);
    if (first < TOP_K) {
        r.best[warp * TOP_K + first] = key;
        r.experts[warp * TOP_K + first] = thread;
    }
    asm volatile("bar.sync 2, %0;" ::"n"(ROUTE_THREADS) : "memory");  // the warps' first keys are there
    if (thread >= FINAL_THREADS) return;
    if (thread < CANDIDATES) {
        const uint32_t own = r.best[thread];
        const int place = keys_before<CANDIDATES>(r.best, thread, own);
        if (place < TOP_K) {
            const int id = a.forced_ids != nullptr ? r.forced[place] : r.experts[thread];
            if (a.routed != nullptr) {  // first of all: the experts' weights are on their way as soon as this is seen
#pragma unroll
                for (int copy = 0; copy < ROUTED_COPIES; ++copy) {
                    int* const target = a.routed + (copy * ROWS + row) * TOP_K + place;
                    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(target), "r"(id + 1) : "memory");
                }
            }
            r.ids[place] = id;
            r.values[place] = key_value(a.forced_ids != nullptr ? r.keys[id] : own);
        }
    }
    asm volatile("bar.sync 3, %0;" ::"n"(FINAL_THREADS) : "memory");  // the chosen are there
    if (thread >= WARP) return;
    Sublayer s;
    if (from_sums(row_result<false>(exchange[0], a.fault, KERNEL_ATTN_TAIL, a.layer), a.attn_scale, s))
        s.out_squares = row_result<false>(exchange[1], a.fault, KERNEL_ATTN_TAIL, a.layer).x;
    const float inverse_h = inverse_rms(s.out_squares);
    const float value = r.values[lane % TOP_K];
    const float share = __expf((value - warp_max(value)) * inverse_h);
    if (lane < TOP_K) r.shares[lane] = share;
    __syncwarp();  // the shares are there
    const float4* const shares = reinterpret_cast<const float4*>(r.shares);
    const float4 pairs = sum(shares[0], shares[1]);
    const float sum_of_shares = (pairs.x + pairs.y) + (pairs.z + pairs.w);
    if (lane < TOP_K) {
        a.expert_ids[row * TOP_K + lane] = r.ids[lane];
        a.expert_weights[row * TOP_K + lane] = __fdividef(share, sum_of_shares);  // 1 <= the sum <= TOP_K
    }
    // What is wrong with h itself is reported as such.
    if (lane == 0 && is_finite(inverse_h) && !is_finite(sum_of_shares))
        report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTN_TAIL, a.layer);
}
constexpr int TAIL_THREADS = COLUMN_THREADS + ROUTE_THREADS;
#else
constexpr int TAIL_THREADS = COLUMN_THREADS;
#endif

extern "C" __global__ void __launch_bounds__(TAIL_THREADS) attn_tail(const __grid_constant__ AttnTailArgs a) {
    __shared__ RowExchange exchange[3];
    const int row = int(blockIdx.x) / PARTS, part = int(blockIdx.x) % PARTS;
    const int column = part * COLUMNS + int(threadIdx.x) * 4;
#ifdef ROUTED
    __shared__ Routing routing;
    if (threadIdx.x >= COLUMN_THREADS) {
        row_begin(exchange);
        // The cluster's blocks are all of one size; the first one's warps route.
        if (part > 0 || a.router_attended == nullptr) return;
        if (!is_polled(a)) pdl_wait();
        if (row < live_rows(a.live, a.rows)) route(a, row, int(threadIdx.x) - COLUMN_THREADS, exchange, routing);
        return;
    }
#endif
    const float4 w_out = __ldg(reinterpret_cast<const float4*>(a.attn_out_norm + column));
    const float4 w_ffn = __ldg(reinterpret_cast<const float4*>(a.ffn_norm + column));
    const int64_t at = int64_t(row) * HIDDEN + column;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < a.rows) {
        x = load4(a.residual + at);
        if (a.inverse != nullptr) x = scaled(x, __ldcg(a.inverse + row));
    }
    const int live = a.live != nullptr ? __ldcg(a.live) : a.rows;  // as old as the residual
    row_begin(exchange);
    if (!is_polled(a)) {
        pdl_wait();
        pdl_trigger();
    }
    if (row >= min_int(live, a.rows)) {
        pdl_settle();
        return;
    }
    float4 o;
    if constexpr (RANKS > 1) {
        o = sum_pushed(a.o + at, a.fault, KERNEL_ATTN_TAIL, a.layer);
        pdl_trigger();
    } else if (a.polled) {
        Polls polls;
        do {
            o = load4_flagged(a.o + at);
        } while (polls.again(has_come(o), a.fault, KERNEL_ATTN_TAIL, a.layer));
        pdl_trigger();
    } else {
        o = sum_ranks(a.o + at, a.ranks, rank_rows(a.rows) * HIDDEN);
    }

    const Sublayer s =
        add_sublayer(x, o, w_out, a.attn_scale, true, exchange, a.fault, KERNEL_ATTN_TAIL, a.layer, [] {});
    const float4 n = product(scaled(s.out, inverse_rms(s.out_squares)), w_ffn);
    store4(a.h + at, s.out);
    store4(a.normed + at, n);
    if (a.normed32 != nullptr) store4(a.normed32 + at, n);
    const bool first = part == 0 && threadIdx.x == 0;
    if (a.codes != nullptr) {
        // Of the FP32 values, before they are rounded to halves. A row of zeros keeps 1.
        const float4 mine = make_float4(largest(n), 0.0f, 0.0f, 0.0f);
        const float top = row_reduce<true>(mine, exchange[2], a.fault, KERNEL_ATTN_TAIL, a.layer).x;
        const float scale = top > 0.0f ? top * (1.0f / 448.0f) : 1.0f;
        *reinterpret_cast<uint32_t*>(a.codes + at) =
            float_to_e4m3x2(n.x / scale, n.y / scale) | uint32_t(float_to_e4m3x2(n.z / scale, n.w / scale)) << 16;
        if (first) a.code_scale[row] = scale;
    }
    if (a.inner != nullptr) {
        constexpr int PIECES = INNER * 2 / 16;  // of 16 bytes, that a row of inner has
        for (int i = part * COLUMN_THREADS + threadIdx.x; i < min_int(live, a.rows) * TOP_K * PIECES;
             i += PARTS * COLUMN_THREADS)
            reinterpret_cast<uint4*>(a.inner)[(i / PIECES * ROWS + row) * PIECES + i % PIECES] = make_uint4(0, 0, 0, 0);
    }
    if (a.inner_max != nullptr && part == 0)
        for (int g = threadIdx.x; g < MAX_GROUPS; g += COLUMN_THREADS) a.inner_max[g * ROWS + row] = 0.0f;
    if (first) {
        if (!is_finite(s.in_squares))
            report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_O_PROJ, a.layer);
        else if (!is_finite(s.out_squares))
            report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTN_TAIL, a.layer);
    }
    pdl_settle();
}

extern "C" __global__ void __launch_bounds__(COLUMN_THREADS) mlp_tail(const __grid_constant__ MlpTailArgs a) {
    __shared__ RowExchange exchange[2];
    const int row = int(blockIdx.x) / PARTS, part = int(blockIdx.x) % PARTS;
    const int column = part * COLUMNS + int(threadIdx.x) * 4;
    const float4 w_next = __ldg(reinterpret_cast<const float4*>(a.next_norm + column));
    const int64_t at = int64_t(row) * HIDDEN + column;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < a.rows) x = load4(a.h + at);
    float4 w_out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (a.ffn_out_norm != nullptr) w_out = __ldg(reinterpret_cast<const float4*>(a.ffn_out_norm + column));
    float4 y;
    if constexpr (RANKS > 1) {
        pdl_trigger();  // at once: qkv and lm_head read nothing but weights and old counts before their waits
        const int live = a.live != nullptr ? __ldcg(a.live) : a.rows;  // as old as h
        row_begin(exchange);
        if (row >= min_int(live, a.rows)) {
            pdl_settle();
            return;
        }
        y = sum_pushed(a.y + at, a.fault, KERNEL_MLP_TAIL, a.layer);
    } else {
        row_begin(exchange);
        pdl_wait();
        pdl_trigger();
        if (row >= a.rows) return;
        const int live = a.live != nullptr ? __ldcg(a.live) : a.rows;
        y = sum_ranks(a.y + at, a.ranks, rank_rows(a.rows) * HIDDEN);
        if (row >= live) return;
    }

    const Sublayer s = add_sublayer(x, y, w_out, a.ffn_scale, a.ffn_out_norm != nullptr, exchange, a.fault,
                                    KERNEL_MLP_TAIL, a.layer, [&] {
                                        if constexpr (RANKS > 1) {  // the thread has read them, and nobody else does
#pragma unroll
                                            for (int r = 0; r < RANKS; ++r)
                                                make_unready_4(a.y + at + r * (ROWS * HIDDEN));
                                        }
                                    });
    const float4 n = product(scaled(s.out, inverse_rms(s.out_squares)), w_next);
    store4(a.residual + at, a.normed_residual ? n : s.out);
    store4(a.normed + at, n);
    if (part == 0 && threadIdx.x == 0) {
        if (!is_finite(s.in_squares))
            report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_DOWN, a.layer);
        else if (!is_finite(s.out_squares))
            report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_MLP_TAIL, a.layer);
    }
    if constexpr (RANKS > 1) pdl_settle();
}
