// What follows attention and the experts: sums over ranks, norms, the residual, and the routing.
//
// attn_tail  o = the ranks' partials; h = residual + attn_scale rms(o, attn_out_norm); normed = rms(h, ffn_norm) as
//            halves, and as E4M3 or FP32 where asked for; the router's logits, TOP_K of them, and their softmax.
// mlp_tail   y = the ranks' partials; out = h + ffn_scale y, or h + ffn_scale rms(y, ffn_out_norm); normed =
//            rms(out, next_norm); residual = out, or rms(out, next_norm).
//   PRECOND  grid (rows * PARTS), cluster PARTS; block COLUMN_THREADS, in attn_tail and a warp more where ROUTED. Arrays
//            16-byte aligned, ranks <= MAX_RANKS. Partials, residuals and routing are read after pdl_wait(), norms
//            before. `rows` may exceed ROWS; then ranks' partials lie `rows` rows apart, and nothing is routed.
//   Reads rows * HIDDEN * 4 (ranks + 1) bytes and two norms, attn_tail also rows * EXPERTS * 8 ranks;
//   writes rows * HIDDEN * 6.
//
// One reduction instead of two. With p = w o and k = scale / rms(o), h = x + k p, and so
//     sum(h^2) = sum(x^2) + 2 k sum(x p) + k^2 sum(p^2),
// whose sums need no k: they are taken together with sum(o^2). Where x and k p nearly cancel this loses digits,
// so that a row whose sum comes out below 1/64 of the squares' own is summed again from h itself. 1/64 bounds the
// relative error at about 128 roundings of a tree sum, 1e-5, a hundredth of a half's step.
//
// Routing is one warp's work beside the others' normalisation. 1 / rms(h) scales all logits alike, so the order
// is that of rn + k ra, known with the first reduction; TOP_K rounds of one redux and one ballot.
// How a row is shared among blocks: common/row.cuh.
#include "common/experts.cuh"
#include "common/row.cuh"

constexpr int WARPS = COLUMN_THREADS / WARP;
constexpr float CANCELLED = 1.0f / 64.0f;

struct Sublayer {
    float4 out;      // x + factor * p
    float factor;    // scale / rms(y), or scale
    float in_squares, out_squares;
};

// The thread's columns of out = x + scale * y, or x + scale * rms(y, w), with the row's sums of squares. Uses
// exchange[0], and [1] for a row that cancels. All threads of the row's blocks call it; those without columns with zeros.
template <int W, int COUNT>
__device__ __forceinline__ Sublayer add_sublayer(float4 x, float4 y, float4 w, float scale, bool norm,
                                                 RowExchange<W> (&exchange)[COUNT], Fault* fault, int kernel,
                                                 int layer) {
    static_assert(COUNT >= 2, "two sums");
    Sublayer s;
    if (!norm) {
        s.factor = scale;
        s.out = plus_scaled(x, scale, y);
        const float4 t = row_reduce<false>(make_float4(dot(y, y), dot(s.out, s.out), 0.0f, 0.0f), exchange[0], fault,
                                           kernel, layer);
        s.in_squares = t.x;
        s.out_squares = t.y;
        return s;
    }
    const float4 p = product(w, y);
    const float4 t =
        row_reduce<false>(make_float4(dot(y, y), dot(x, x), dot(x, p), dot(p, p)), exchange[0], fault, kernel, layer);
    s.factor = scale * inverse_rms(t.x);
    s.out = plus_scaled(x, s.factor, p);
    s.in_squares = t.x;
    const float added = s.factor * s.factor * t.w;
    s.out_squares = t.y + added + 2.0f * s.factor * t.z;
    // The same bits in every thread of every part: all of them take the branch, or none.
    if (s.out_squares < CANCELLED * (t.y + added))
        s.out_squares =
            row_reduce<false>(make_float4(dot(s.out, s.out), 0.0f, 0.0f, 0.0f), exchange[1], fault, kernel, layer).x;
    return s;
}

#ifdef ROUTED
constexpr int EXPERTS_A_LANE = EXPERTS / WARP;
static_assert(EXPERTS % WARP == 0 && TOP_K <= WARP, "whole lanes of experts, a lane for each that is chosen");

// A lane's logit parts, summed over ranks; lane l has experts l * EXPERTS_A_LANE onwards.
struct LogitParts {
    float attended[EXPERTS_A_LANE], residual[EXPERTS_A_LANE];
};

__device__ __forceinline__ void load_parts(float (&out)[EXPERTS_A_LANE], const float* address, int ranks,
                                           int64_t stride) {
    if constexpr (EXPERTS_A_LANE % 4 == 0) {
#pragma unroll
        for (int i = 0; i < EXPERTS_A_LANE; i += 4) {
            const float4 x = sum_ranks(address + i, ranks, stride);
            out[i] = x.x, out[i + 1] = x.y, out[i + 2] = x.z, out[i + 3] = x.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < EXPERTS_A_LANE; ++i) {
            out[i] = __ldcg(address + i);
            for (int r = 1; r < ranks; ++r) out[i] += __ldcg(address + r * stride + i);
        }
    }
}

// Floats in the order of unsigned integers, never 0; the two zeros are equal.
__device__ __forceinline__ uint32_t order_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits ^ (bits & 0x80000000u ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float order_value(uint32_t key) {
    return __uint_as_float(key ^ (key & 0x80000000u ? 0x80000000u : 0xffffffffu));
}

// One warp chooses for one row. factor: attn_scale / rms(o).
__device__ __forceinline__ void route(const AttnTailArgs& a, const LogitParts& parts, int row, float factor,
                                      float inverse_h) {
    const int lane = threadIdx.x % WARP;
    uint32_t key[EXPERTS_A_LANE];
#pragma unroll
    for (int i = 0; i < EXPERTS_A_LANE; ++i) key[i] = order_key(fmaf(factor, parts.attended[i], parts.residual[i]));
    int id = 0;
    float value = 0.0f;
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        uint32_t best = key[0];
#pragma unroll
        for (int i = 1; i < EXPERTS_A_LANE; ++i) best = best > key[i] ? best : key[i];
        const uint32_t top = __reduce_max_sync(0xffffffffu, best);
        const int winner = __ffs(__ballot_sync(0xffffffffu, best == top)) - 1;  // the lowest lane has the lowest index
        int mine = 0;
#pragma unroll
        for (int i = EXPERTS_A_LANE - 1; i >= 0; --i) mine = key[i] == top ? i : mine;
#pragma unroll
        for (int i = 0; i < EXPERTS_A_LANE; ++i) key[i] = lane == winner && i == mine ? 0u : key[i];
        const int chosen = __shfl_sync(0xffffffffu, lane * EXPERTS_A_LANE + mine, winner);
        if (lane == k) id = chosen, value = order_value(top);
    }
    float largest_value = __shfl_sync(0xffffffffu, value, 0);
    if (a.forced_ids != nullptr) {
        if (lane < TOP_K) {
            id = __ldcg(a.forced_ids + row * TOP_K + lane);
            const int64_t stride = rank_rows(a.rows) * EXPERTS, at = int64_t(row) * EXPERTS + id;
            float attended = 0.0f, residual = 0.0f;
            for (int r = 0; r < a.ranks; ++r) {
                attended += __ldcg(a.router_attended + r * stride + at);
                residual += __ldcg(a.router_residual + r * stride + at);
            }
            value = fmaf(factor, attended, residual);
        }
        largest_value = warp_max(lane < TOP_K ? value : -3.0e38f);
    }
    const float share = lane < TOP_K ? __expf((value - largest_value) * inverse_h) : 0.0f;
    const float total = warp_sum(share);
    if (lane < TOP_K) {
        a.expert_ids[row * TOP_K + lane] = id;
        a.expert_weights[row * TOP_K + lane] = share / total;
    }
    if (lane == 0 && is_finite(inverse_h) && !is_finite(total))
        report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTN_TAIL, a.layer);
}
constexpr int TAIL_THREADS = COLUMN_THREADS + WARP;
#else
constexpr int TAIL_THREADS = COLUMN_THREADS;
#endif

extern "C" __global__ void __launch_bounds__(TAIL_THREADS) attn_tail(const __grid_constant__ AttnTailArgs a) {
    __shared__ RowExchange<TAIL_THREADS / WARP> exchange[3];
    const int row = int(blockIdx.x) / PARTS, part = int(blockIdx.x) % PARTS;
    const int column = part * COLUMNS + int(threadIdx.x) * 4;
    const bool has_columns = threadIdx.x < COLUMN_THREADS;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 w_out = zero, w_ffn = zero;
    if (has_columns) {
        w_out = __ldg(reinterpret_cast<const float4*>(a.attn_out_norm + column));
        w_ffn = __ldg(reinterpret_cast<const float4*>(a.ffn_norm + column));
    }
    row_begin(exchange);
    pdl_wait();
    pdl_trigger();
    if (row >= a.rows) return;
    const int live = a.live != nullptr ? __ldcg(a.live) : a.rows;
    const int64_t at = int64_t(row) * HIDDEN + column;
    float4 x = zero, o = zero;
    if (has_columns) {
        x = load4(a.residual + at);
        o = sum_ranks(a.o + at, a.ranks, rank_rows(a.rows) * HIDDEN);
    }
#ifdef ROUTED
    LogitParts parts;
    const bool routes = !has_columns && part == 0 && a.router_attended != nullptr;
    if (routes) {
        const int64_t stride = rank_rows(a.rows) * EXPERTS;
        const int64_t first = int64_t(row) * EXPERTS + threadIdx.x % WARP * EXPERTS_A_LANE;
        load_parts(parts.attended, a.router_attended + first, a.ranks, stride);
        load_parts(parts.residual, a.router_residual + first, a.ranks, stride);
    }
#endif
    if (row >= live) return;

    const Sublayer s = add_sublayer(x, o, w_out, a.attn_scale, true, exchange, a.fault, KERNEL_ATTN_TAIL, a.layer);
    const float inverse_h = inverse_rms(s.out_squares);
    const float4 n = product(scaled(s.out, inverse_h), w_ffn);
    float scale = 1.0f;
    if (a.codes != nullptr) {
        // Of the FP32 values, before they are rounded to halves. A row of zeros keeps 1.
        const float top = row_reduce<true>(make_float4(largest(n), 0.0f, 0.0f, 0.0f), exchange[2], a.fault,
                                           KERNEL_ATTN_TAIL, a.layer).x;
        scale = top > 0.0f ? top * (1.0f / 448.0f) : 1.0f;
    }
    if (has_columns) {
        store4(a.h + at, s.out);
        store4(a.normed + at, n);
        if (a.normed32 != nullptr) store4(a.normed32 + at, n);
        if (a.codes != nullptr) {
            const float4 q = make_float4(n.x / scale, n.y / scale, n.z / scale, n.w / scale);
            *reinterpret_cast<uint32_t*>(a.codes + at) =
                float_to_e4m3x2(q.x, q.y) | uint32_t(float_to_e4m3x2(q.z, q.w)) << 16;
            if (part == 0 && threadIdx.x == 0) a.code_scale[row] = scale;
        }
        if (a.inner_max != nullptr && part == 0)
            for (int g = threadIdx.x; g < MAX_GROUPS; g += COLUMN_THREADS) a.inner_max[g * ROWS + row] = 0.0f;
        if (part == 0 && threadIdx.x == 0) {
            if (!is_finite(s.in_squares))
                report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_O_PROJ, a.layer);
            else if (!is_finite(s.out_squares))
                report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTN_TAIL, a.layer);
        }
    }
#ifdef ROUTED
    if (routes) route(a, parts, row, s.factor, inverse_h);
#endif
}

extern "C" __global__ void __launch_bounds__(COLUMN_THREADS) mlp_tail(const __grid_constant__ MlpTailArgs a) {
    __shared__ RowExchange<WARPS> exchange[2];
    const int row = int(blockIdx.x) / PARTS, part = int(blockIdx.x) % PARTS;
    const int column = part * COLUMNS + int(threadIdx.x) * 4;
    const float4 w_next = __ldg(reinterpret_cast<const float4*>(a.next_norm + column));
    float4 w_out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (a.ffn_out_norm != nullptr) w_out = __ldg(reinterpret_cast<const float4*>(a.ffn_out_norm + column));
    row_begin(exchange);
    pdl_wait();
    pdl_trigger();
    if (row >= a.rows) return;
    const int live = a.live != nullptr ? __ldcg(a.live) : a.rows;
    const int64_t at = int64_t(row) * HIDDEN + column;
    const float4 x = load4(a.h + at);
    const float4 y = sum_ranks(a.y + at, a.ranks, rank_rows(a.rows) * HIDDEN);
    if (row >= live) return;

    const Sublayer s = add_sublayer(x, y, w_out, a.ffn_scale, a.ffn_out_norm != nullptr, exchange, a.fault,
                                    KERNEL_MLP_TAIL, a.layer);
    const float4 n = product(scaled(s.out, inverse_rms(s.out_squares)), w_next);
    store4(a.residual + at, a.normed_residual ? n : s.out);
    store4(a.normed + at, n);
    if (part == 0 && threadIdx.x == 0) {
        if (!is_finite(s.in_squares))
            report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_DOWN, a.layer);
        else if (!is_finite(s.out_squares))
            report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_MLP_TAIL, a.layer);
    }
}
