// What follows attention and the experts: sums over ranks, norms, the residual, and the routing.
//
// attn_tail  o = the ranks' partials; h = residual + attn_scale rms(o, attn_out_norm); normed = rms(h, ffn_norm) as
//            halves, and as E4M3 or FP32 where asked for; the router's logits, TOP_K of them, and their softmax.
// mlp_tail   y = the ranks' partials; out = h + ffn_scale y, or h + ffn_scale rms(y, ffn_out_norm); normed =
//            rms(out, next_norm); residual = out, or rms(out, next_norm).
//   PRECOND  grid (rows * PARTS), cluster PARTS; block COLUMN_THREADS, in attn_tail ROUTE_THREADS more where ROUTED.
//            Arrays 16-byte aligned, ranks <= MAX_RANKS. Partials and routing are read after pdl_wait(), norms before,
//            and so are attn_tail's residual and mlp_tail's h, written two launches ago or more. `rows` may exceed
//            ROWS; then ranks' partials lie `rows` rows apart, and nothing is routed.
//   Reads rows * HIDDEN * 4 (ranks + 1) bytes and two norms, attn_tail also rows * EXPERTS * 8 ranks;
//   writes rows * HIDDEN * 6.
//
// One reduction instead of two. With p = w o and k = scale / rms(o), h = x + k p, and so
//     sum(h^2) = sum(x^2) + 2 k sum(x p) + k^2 sum(p^2),
// whose sums need no k: they are taken together with sum(o^2). Where x and k p nearly cancel this loses digits,
// so that a row whose sum comes out below 1/64 of the squares' own is summed again from h itself. 1/64 bounds the
// relative error at about 128 roundings of a tree sum, 1e-5, a hundredth of a half's step.
//
// Routing is one warp's work beside the normalisation. 1 / rms(h) scales all logits alike, so the order is that of
// rn + k ra, known with the first reduction. A lane has EXPERTS / 32 keys. The TOP_K lanes whose largest keys are
// largest give a bound that at least TOP_K keys reach, few more, and 64 at most where no keys are equal: those are
// packed together, and a key's place is the number of keys that come before it. TOP_K rounds of a warp's maximum took
// longer; they are left for what does not fit, floods of equal keys.
// How a row is shared among blocks: common/row.cuh.
#include "common/experts.cuh"
#include "common/row.cuh"

constexpr float CANCELLED = 1.0f / 64.0f;

struct Sublayer {
    float4 out;    // x + factor * p
    float factor;  // scale / rms(y), or scale
    float in_squares, out_squares;
};

// From the sums over the row of y^2, x^2, x p and p^2. True: too little is left of out's; sum it again.
__device__ __forceinline__ bool from_sums(float4 t, float scale, Sublayer& s) {
    s.factor = scale * inverse_rms(t.x);
    s.in_squares = t.x;
    const float added = s.factor * s.factor * t.w;
    s.out_squares = t.y + added + 2.0f * s.factor * t.z;
    return s.out_squares < CANCELLED * (t.y + added);
}

// The thread's columns of out = x + scale * y, or x + scale * rms(y, w), with the row's sums of squares. Uses
// exchange[0], and [1] for a row that cancels. All column threads of the row's blocks call it.
template <int COUNT>
__device__ __forceinline__ Sublayer add_sublayer(float4 x, float4 y, float4 w, float scale, bool norm,
                                                 RowExchange (&exchange)[COUNT], Fault* fault, int kernel, int layer) {
    static_assert(COUNT >= 2, "two sums");
    Sublayer s;
    if (!norm) {
        s.factor = scale;
        s.out = plus_scaled(x, scale, y);
        const float4 squares = make_float4(dot(y, y), dot(s.out, s.out), 0.0f, 0.0f);
        const float4 t = row_reduce<false>(squares, exchange[0], fault, kernel, layer);
        s.in_squares = t.x;
        s.out_squares = t.y;
        return s;
    }
    const float4 p = product(w, y);
    const float4 products = make_float4(dot(y, y), dot(x, x), dot(x, p), dot(p, p));
    const bool again = from_sums(row_reduce<false>(products, exchange[0], fault, kernel, layer), scale, s);
    s.out = plus_scaled(x, s.factor, p);
    // The same bits in every thread of every part: all of them take the branch, or none.
    if (again)
        s.out_squares =
            row_reduce<false>(make_float4(dot(s.out, s.out), 0.0f, 0.0f, 0.0f), exchange[1], fault, kernel, layer).x;
    return s;
}

#ifdef ROUTED
constexpr int A_LANE = EXPERTS / WARP;  // experts of a lane of the choosing warp, neighbours
constexpr int ROUTE_THREADS = EXPERTS / 2 > WARP ? EXPERTS / 2 : WARP;  // each loads four numbers
constexpr int CANDIDATES = 64;
constexpr int AT_ONCE = 16;  // keys that a candidate is compared with in one go
static_assert(EXPERTS % WARP == 0 && ROUTE_THREADS % WARP == 0, "whole warps, whole lanes of experts");
static_assert(TOP_K == 8, "two vectors of shares");

struct Routing {
    alignas(16) float attended[EXPERTS];  // the logits' parts, summed over ranks
    alignas(16) float residual[EXPERTS];
    alignas(16) uint32_t most[WARP];  // the lanes' largest
    alignas(16) uint32_t keys[CANDIDATES + AT_ONCE + WARP];  // by ascending expert, then zeros; the last is for no one
    int experts[CANDIDATES + AT_ONCE + WARP];
    alignas(16) float shares[TOP_K];  // of the chosen, in order: exp(logit - largest logit)
    int ids[TOP_K];
};

// The order of floats as one of unsigned integers above 0. Both zeros are equal.
__device__ __forceinline__ uint32_t order_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    const uint32_t key = bits ^ (bits & 0x80000000u ? 0xffffffffu : 0x80000000u);
    return key > 1u ? key : 1u;
}
__device__ __forceinline__ float key_value(uint32_t key) {
    return __uint_as_float(key ^ (key & 0x80000000u ? 0x80000000u : 0xffffffffu));
}

// How many of `count` keys come before key number `index`: larger ones, and equal ones that lie before it.
__device__ __forceinline__ int keys_before(const uint32_t* keys, int count, int index, uint32_t key) {
    const uint4* fours = reinterpret_cast<const uint4*>(keys);
    // Equal keys of its own four; those of earlier fours are more than key - 1.
    const uint4 own = fours[index / 4];
    int before = (index % 4 > 0 && own.x == key) + (index % 4 > 1 && own.y == key) + (index % 4 > 2 && own.z == key);
    for (int first = 0; first < count; first += AT_ONCE) {
#pragma unroll
        for (int i = 0; i < AT_ONCE / 4; ++i) {
            const uint4 four = fours[first / 4 + i];
            const uint32_t limit = first / 4 + i < index / 4 ? key - 1 : key;
            before += (four.x > limit) + (four.y > limit) + (four.z > limit) + (four.w > limit);
        }
    }
    return before;
}

// A warp's choice of the TOP_K first keys: their experts and shares, in order.
__device__ __forceinline__ void choose(uint32_t (&key)[A_LANE], float inverse_h, Routing& r) {
    const int lane = threadIdx.x % WARP;
    uint32_t most[A_LANE];
#pragma unroll
    for (int i = 0; i < A_LANE; ++i) most[i] = key[i];
#pragma unroll
    for (int width = A_LANE / 2; width > 0; width /= 2)
#pragma unroll
        for (int i = 0; i < width; ++i) most[i] = most[i] > most[i + width] ? most[i] : most[i + width];
    const float top = key_value(__reduce_max_sync(0xffffffffu, most[0]));
    r.most[lane] = most[0];
    __syncwarp();  // every lane's largest is there
    const bool among = keys_before(r.most, WARP, lane, most[0]) < TOP_K;
    const uint32_t least = __reduce_min_sync(0xffffffffu, among ? most[0] : 0xffffffffu);

    int count = 0, at = 0;  // candidates, and those of lower lanes
#pragma unroll
    for (int i = 0; i < A_LANE; ++i) {
        const uint32_t lanes = __ballot_sync(0xffffffffu, key[i] >= least);
        count += __popc(lanes);
        at += __popc(lanes & ((1u << lane) - 1));
    }
    if (count <= CANDIDATES) {
#pragma unroll
        for (int i = 0; i < A_LANE; ++i) {
            const bool candidate = key[i] >= least;
            const int slot = candidate ? at : CANDIDATES + AT_ONCE + lane;  // a store without a branch
            r.keys[slot] = key[i];
            r.experts[slot] = lane * A_LANE + i;
            at += candidate;
        }
        if (lane < AT_ONCE) r.keys[count + lane] = 0;
        __syncwarp();  // the candidates are there
        for (int index = lane; index < count; index += WARP) {
            const uint32_t own = r.keys[index];
            const float share = __expf((key_value(own) - top) * inverse_h);
            const int place = keys_before(r.keys, count, index, own);
            if (place < TOP_K) {
                r.shares[place] = share;
                r.ids[place] = r.experts[index];
            }
        }
        return;
    }
#pragma unroll 1
    for (int place = 0; place < TOP_K; ++place) {
        uint32_t mine = 0;
        int which = 0;
#pragma unroll
        for (int i = 0; i < A_LANE; ++i) {
            which = key[i] > mine ? i : which;
            mine = key[i] > mine ? key[i] : mine;
        }
        const uint32_t first = __reduce_max_sync(0xffffffffu, mine);
        // The lowest lane has the lowest expert.
        const int winner = __ffs(__ballot_sync(0xffffffffu, mine == first)) - 1;
        if (lane == winner) {
            r.shares[place] = __expf((key_value(first) - top) * inverse_h);
            r.ids[place] = lane * A_LANE + which;
        }
#pragma unroll
        for (int i = 0; i < A_LANE; ++i) key[i] = lane == winner && i == which ? 0u : key[i];
    }
}

// The routing of a row by ROUTE_THREADS threads, of which the first warp chooses.
__device__ __forceinline__ void route(const AttnTailArgs& a, int row, int thread, RowExchange* exchange, Routing& r) {
    const int lane = thread % WARP;
    const int live = a.live != nullptr ? __ldcg(a.live) : a.rows;
    // On its way beside the logits: a benchmark's forced routing is not to take longer than what it stands for.
    const int forced = a.forced_ids != nullptr ? __ldcg(a.forced_ids + row * TOP_K + lane % TOP_K) : 0;
    if (thread < EXPERTS / 2) {
        const bool second = thread >= EXPERTS / 4;
        const int first = thread % (EXPERTS / 4) * 4;
        const float* parts = (second ? a.router_residual : a.router_attended) + int64_t(row) * EXPERTS + first;
        store4((second ? r.residual : r.attended) + first, sum_ranks(parts, a.ranks, rank_rows(a.rows) * EXPERTS));
    }
    if (row >= live) return;
    asm volatile("bar.sync 2, %0;" ::"n"(ROUTE_THREADS) : "memory");  // the parts are there
    if (thread >= WARP) return;

    float attended[A_LANE], residual[A_LANE];
#pragma unroll
    for (int i = 0; i < A_LANE; ++i) {
        attended[i] = r.attended[lane * A_LANE + i];
        residual[i] = r.residual[lane * A_LANE + i];
    }
    Sublayer s;
    if (from_sums(row_result<false>(exchange[0], a.fault, KERNEL_ATTN_TAIL, a.layer), a.attn_scale, s))
        s.out_squares = row_result<false>(exchange[1], a.fault, KERNEL_ATTN_TAIL, a.layer).x;
    const float inverse_h = inverse_rms(s.out_squares);
    uint32_t key[A_LANE];
#pragma unroll
    for (int i = 0; i < A_LANE; ++i) key[i] = order_key(fmaf(s.factor, attended[i], residual[i]));
    choose(key, inverse_h, r);
    __syncwarp();  // the chosen are there
    int id = r.ids[lane % TOP_K];
    if (a.forced_ids != nullptr) {
        id = forced;
        const float value = fmaf(s.factor, r.attended[id], r.residual[id]);
        const float forced_share = __expf((value - warp_max(value)) * inverse_h);
        __syncwarp();  // every lane has its id; the shares may go
        r.shares[lane % TOP_K] = forced_share;
        __syncwarp();  // the new shares are there
    }
    const float4* shares = reinterpret_cast<const float4*>(r.shares);
    const float4 pairs = sum(shares[0], shares[1]);
    const float total = (pairs.x + pairs.y) + (pairs.z + pairs.w);
    if (lane < TOP_K) {
        a.expert_ids[row * TOP_K + lane] = id;
        a.expert_weights[row * TOP_K + lane] = __fdividef(r.shares[lane], total);  // 1 <= total <= TOP_K
    }
    // What is wrong with h itself is reported as such.
    if (lane == 0 && is_finite(inverse_h) && !is_finite(total))
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
        pdl_wait();
        pdl_trigger();
        if (row < a.rows) route(a, row, int(threadIdx.x) - COLUMN_THREADS, exchange, routing);
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
    row_begin(exchange);
    pdl_wait();
    pdl_trigger();
    if (row >= a.rows) return;
    const int live = a.live != nullptr ? __ldcg(a.live) : a.rows;
    const float4 o = sum_ranks(a.o + at, a.ranks, rank_rows(a.rows) * HIDDEN);
    if (row >= live) return;

    const Sublayer s = add_sublayer(x, o, w_out, a.attn_scale, true, exchange, a.fault, KERNEL_ATTN_TAIL, a.layer);
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
    if (a.inner_max != nullptr && part == 0)
        for (int g = threadIdx.x; g < MAX_GROUPS; g += COLUMN_THREADS) a.inner_max[g * ROWS + row] = 0.0f;
    if (first) {
        if (!is_finite(s.in_squares))
            report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_O_PROJ, a.layer);
        else if (!is_finite(s.out_squares))
            report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTN_TAIL, a.layer);
    }
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
    row_begin(exchange);
    pdl_wait();
    pdl_trigger();
    if (row >= a.rows) return;
    const int live = a.live != nullptr ? __ldcg(a.live) : a.rows;
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
