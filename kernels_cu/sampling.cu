// The rejection rule and the drafts' sampling, on the device: cuq1.sampling.verify and the engine's draft loop.
//
// PRECOND  grid: a block a request (the engine launches one): block b has state[b] and candidate lists
//          [b][ROWS][pieces][MAX_TOP_K]. accept: ROWS * ROW_WARPS warps; draft_sample: ROW_WARPS warps. The lists are the
//          predecessor's (or the exchange's), sorted, as top_k writes them. pieces may be any number; ROW_WARPS, a
//          power of two, is chosen for it.
// READS    pieces * 256 bytes a row, and the State.  WRITES  the State alone.
//
// Why so: both are pure latency, once to eight times a round. A row's lists are merged by ROW_WARPS warps with shuffles,
// all rows at once; then one warp a row has the distribution in its lanes, and each row decides and, where its
// draft falls, draws the replacement at once, whatever the rows before it say: the first row that fell decides.
// Doubles are used for at most 32 candidates a row.
#include "abi.cuh"
#include "common/fault.cuh"
#include "common/pdl.cuh"
#include "common/sampling.cuh"

static_assert(MAX_TOP_K == WARP, "a candidate a lane");
static_assert((ROW_WARPS & (ROW_WARPS - 1)) == 0 && ROWS * ROW_WARPS * WARP <= 1024, "a tree of merges, in one block");

typedef Key Lists[ROW_WARPS][WARP];

__device__ __forceinline__ Key load_key(const float* values, const int* ids, int piece, int lane) {
    return make_key(values[piece * MAX_TOP_K + lane], ids[piece * MAX_TOP_K + lane]);
}

// The 32 largest of a row's lists, sorted, to the row's warp 0. All threads of the block take part; a row that
// is not `wanted` reads nothing.
__device__ __forceinline__ Key merged(const float* values, const int* ids, int pieces, bool wanted, Lists& lists, int part,
                                      int lane) {
    Key key = NO_KEY;
    if (wanted && part < pieces) {
        key = load_key(values, ids, part, lane);
        Key next = part + ROW_WARPS < pieces ? load_key(values, ids, part + ROW_WARPS, lane) : NO_KEY;
        for (int piece = part + ROW_WARPS; piece < pieces; piece += ROW_WARPS) {
            const Key other = next;
            if (piece + ROW_WARPS < pieces) next = load_key(values, ids, piece + ROW_WARPS, lane);
            key = warp_merge(key, other, lane);
        }
    }
#pragma unroll
    for (int half = ROW_WARPS / 2; half > 0; half /= 2) {
        if (part >= half && part < 2 * half) lists[part][lane] = key;
        __syncthreads();  // the upper half's lists are there; each is written once, so nothing else needs to wait
        if (part < half) key = warp_merge(key, lists[part + half][lane], lane);
    }
    return key;
}

// normalize(max(0, p - q)) over the ids of p, or p where rounding leaves nothing of it.
__device__ __forceinline__ Distribution residual(const Distribution& p, const Distribution& q, double* scratch,
                                                 int lane) {
    double q_of = 0.0;
    for (int j = 0; j < q.count; ++j) {
        const int id = __shfl_sync(ALL_LANES, q.id, j);
        const double prob = __shfl_sync(ALL_LANES, q.prob, j);
        if (id == p.id) q_of = prob;
    }
    const double rest = lane < p.count && p.prob > q_of ? p.prob - q_of : 0.0;
    const double total = warp_total(rest, p.count, scratch, lane);
    if (!(total > 0.0)) return p;
    return Distribution{p.id, rest / total, p.count};
}

// What is sampled with: a row whose largest logit is not finite is reported, and gives its first candidate, so that
// later kernels find a token that exists.
__device__ __forceinline__ double checked_temperature(float value, double temperature, Fault* fault, int kernel,
                                                      int layer, int lane) {
    if (is_finite(__shfl_sync(ALL_LANES, value, 0))) return temperature;
    if (lane == 0) report_fault(fault, FAULT_NOT_FINITE, kernel, layer);
    return 0.0;
}

extern "C" __global__ void __launch_bounds__(ROWS* ROW_WARPS* WARP) accept(const __grid_constant__ AcceptArgs a) {
    __shared__ Lists lists[ROWS];
    __shared__ __align__(16) double scratch[ROWS][WARP];
    __shared__ int replacement[ROWS];  // the token drawn in the row, or -1 where its draft stands
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int row = warp / ROW_WARPS, part = warp % ROW_WARPS;

    pdl_wait();  // the lists, live
    pdl_trigger();
    const int rows = a.live != nullptr ? min_int(a.rows, *a.live) : a.rows;
    if (rows <= 0) return;
    State& state = a.state[blockIdx.x];
    const int64_t first_list = (int64_t(blockIdx.x) * ROWS + row) * a.pieces * MAX_TOP_K;
    const int drafted = a.first ? 0 : min_int(state.drafts, rows - 1);
    const int done = state.done;
    const Key key = merged(a.values + first_list, a.ids + first_list, a.pieces, row <= drafted, lists[row], part, lane);

    if (part == 0 && row <= drafted) {
        const uint32_t seed_lo = state.seed_lo, seed_hi = state.seed_hi;
        const int position = done + (a.first ? 0 : 1) + row;  // of the token that is decided about
        const int draft = state.tokens[row < drafted ? row + 1 : 0];
        Distribution q{-1, 0.0, 0};
        if (row < drafted) {  // loaded here, so that it is there by the time that p is
            q.count = state.q_count[row];
            q.id = lane < q.count ? state.q_ids[row][lane] : -1;
            q.prob = lane < q.count ? state.q_probs[row][lane] : 0.0;
        }
        const double temperature =
            checked_temperature(key_value(key), state.temperature, a.fault, KERNEL_ACCEPT, a.layer, lane);
        Distribution p =
            filtered(key_value(key), key_id(key), temperature, state.top_k, state.top_p, scratch[row], lane);
        bool stands = false;
        if (row < drafted) {
            const double u = uniform(seed_lo, seed_hi, position, PURPOSE_ACCEPT);
            // Strictly below, so that u = 0 does not accept a token that p excludes.
            stands = u * prob_of(q, draft) < prob_of(p, draft);
            if (!stands) p = residual(p, q, scratch[row], lane);
        }
        int token = -1;
        if (!stands) {
            token = max_int(0, draw(p, uniform(seed_lo, seed_hi, position, PURPOSE_TARGET), scratch[row], lane));
        }
        if (lane == 0) replacement[row] = token;
    }
    __syncthreads();  // all rows have decided, and read of the State what they need
    if (warp != 0) return;

    const int drawn = lane <= drafted ? replacement[lane] : -1;
    const int accepted = __ffs(__ballot_sync(ALL_LANES, drawn >= 0)) - 1;  // the last row always draws
    const int pending = __shfl_sync(ALL_LANES, drawn, accepted);
    const int draft = lane < drafted ? state.tokens[lane + 1] : pending;
    const int committed = lane < accepted ? draft : pending;  // lane i: the token at done + 1 + i
    const int newest = __shfl_sync(ALL_LANES, committed, (accepted - lane) & 31);
    const int now_done = a.first ? done : done + accepted + 1;
    if (lane <= accepted) {
        state.log_tokens[lane] = committed;
        state.draft_tokens[lane] = newest;  // row 0 is the newest position; its next token is the pending one
        state.draft_positions[lane] = now_done - 1 - lane;
        state.draft_hidden[lane] = accepted - lane;
    }
    if (lane < ROWS) state.depth_rows[lane] = lane == 0 ? accepted + 1 : 0;
    __syncwarp();  // tokens have been read
    if (lane == 0) {
        state.tokens[0] = pending;
        state.positions[0] = now_done;
        state.done = now_done;
        state.drafts = 0;
        state.log_count = accepted + 1;
        state.log_drafted = drafted;
        state.log_accepted = accepted;
        state.log_rounds += 1;
    }
}

// cuq1.sampling.depth: whether one draft more is worth its cost. served and entropy: lane i's are draft i's, of
// `count` drafts, MIN_AUTO_DRAFTS at least. To every lane.
__device__ __forceinline__ bool worth_more(const State& state, double served, double entropy, int count, double* scratch,
                                           int lane) {
    const double chance = lane < count ? log(served > 1e-9 ? served : 1e-9) : 0.0;
    double lowest = chance;  // 0 in the other lanes, which no logarithm of a probability exceeds
#pragma unroll
    for (int offset = 1; offset < ROWS; offset *= 2) {
        const double other = __shfl_xor_sync(ALL_LANES, lowest, offset);
        lowest = other < lowest ? other : lowest;
    }
    const double features[FEATURES] = {1.0,
                                       warp_total(chance, count, scratch, lane),
                                       __shfl_sync(ALL_LANES, chance, count - 1),
                                       __shfl_sync(ALL_LANES, lowest, 0),
                                       __shfl_sync(ALL_LANES, entropy, count - 1),
                                       warp_total(lane < count ? entropy : 0.0, count, scratch, lane) / count};
    double score = 0.0;
#pragma unroll
    for (int i = 0; i < FEATURES; ++i) score += state.rule_weights[count - MIN_AUTO_DRAFTS][i] * features[i];
    score = score > 60.0 ? 60.0 : score < -60.0 ? -60.0 : score;
    return 1.0 / (1.0 + exp(-score)) > state.rule_threshold;
}

extern "C" __global__ void __launch_bounds__(ROW_WARPS* WARP)
    draft_sample(const __grid_constant__ DraftSampleArgs a) {
    __shared__ Lists lists;
    __shared__ __align__(16) double scratch[WARP];
    const int part = threadIdx.x / WARP, lane = threadIdx.x % WARP, depth = a.depth;

    pdl_wait();  // the lists, live
    pdl_trigger();
    const int rows = a.live != nullptr ? min_int(a.rows, *a.live) : a.rows;
    if (rows <= 0) return;
    State& state = a.state[blockIdx.x];
    const int64_t first_list = int64_t(blockIdx.x) * ROWS * a.pieces * MAX_TOP_K;
    const int done = state.done;
    const bool automatic = state.auto_depth != 0;
    // Of the drafts before this one; asked for with the lists.
    double served = automatic && lane < depth ? state.served[lane] : 0.0;
    double entropy = automatic && lane < depth ? state.entropy[lane] : 0.0;
    const Key key = merged(a.values + first_list, a.ids + first_list, a.pieces, true, lists, part, lane);
    if (part != 0) return;

    const float value = key_value(key);
    const int id = key_id(key);
    const double temperature =
        checked_temperature(value, state.temperature, a.fault, KERNEL_DRAFT_SAMPLE, a.layer, lane);
    const double u = uniform(state.seed_lo, state.seed_hi, done + 1 + depth, PURPOSE_DRAFT);
    const Distribution q = filtered(value, id, temperature, state.top_k, state.top_p, scratch, lane);
    const int token = max_int(0, draw(q, u, scratch, lane));
    const int count = depth + 1;
    bool more = count < min_int(state.draft_limit, MAX_DRAFTS);
    if (automatic) {
        // What is drawn from says nothing about a greedy request's draft.
        const Distribution shape =
            temperature > 0.0 ? q : filtered(value, id, 1.0, FEATURE_TOP_K, 1.0, scratch, lane);
        const double served_now = prob_of(shape, token), entropy_now = entropy_of(shape, scratch, lane);
        if (lane == depth) {
            served = state.served[depth] = served_now;
            entropy = state.entropy[depth] = entropy_now;
        }
        if (more && count >= MIN_AUTO_DRAFTS) more = worth_more(state, served, entropy, count, scratch, lane);
    }
    state.q_ids[depth][lane] = q.id;
    state.q_probs[depth][lane] = q.prob;
    if (lane > depth && lane < ROWS) state.depth_rows[lane] = lane == count && more ? 1 : 0;
    if (lane == 0) {
        state.q_count[depth] = q.count;
        state.tokens[count] = token;
        state.positions[count] = done + count;
        state.drafts = count;
        if (more) {
            state.draft_tokens[0] = token;
            state.draft_positions[0] = done + depth;
            state.draft_hidden[0] = -1;
        }
    }
}
