// The rejection rule and the drafts' sampling, on the device: cuq1.sampling.verify and the engine's draft loop.
//
// PRECOND  grid: a block a request (the engine launches one): block b has state[b] and candidate lists
//          [b][ROWS][pieces][MAX_TOP_K]. accept: ROWS * ROW_WARPS warps; draft_sample: ROW_WARPS + 1 warps. The lists are the
//          predecessor's, sorted, as top_k writes them. pieces may be any number; ROW_WARPS, a power of two, is chosen
//          for it. The State and *live were written at least two launches ago (lm_head and top_k lie between any two of
//          these kernels), so that all of them are read in the prologue.
//          Of several ranks: pieces is RANKS, and the lists are what all ranks push. live and rows are top_k's, on all of
//          them. Where `statuses` and `loop` are given, top_k has `mirror` and `status` on all of them, and the grid is 1.
// READS    pieces * 256 bytes a row, and the State.  WRITES  the State alone; of several ranks also NOT_READY over all
//          that it has read, and loop->agreed.
//
// Why so: both are pure latency, once to eight times a round. A row's lists are merged by ROW_WARPS warps with shuffles,
// all rows at once; then one warp a row has the distribution in its lanes, and each row decides and, where its
// draft falls, draws the replacement at once, whatever the rows before it say: the first row that fell decides.
// Doubles are used for at most 32 candidates a row. Random numbers, and all that the stop rule takes from earlier
// drafts, are computed while the predecessor runs. What the rule wants to know of the last draft is computed by a warp of
// its own while another draws.
//
// Of several ranks, each merges all lists in the order of ranks and draws with the same number, so that all have the same
// token without telling each other. A list's word is read by one thread, which makes it NOT_READY again, and every word
// that top_k pushed is read, also where nothing is to be drawn: what is left would be taken for the next round's.
#include "abi_loop.cuh"
#include "common/clock.cuh"
#include "common/exchange.cuh"
#include "common/fault.cuh"
#include "common/pdl.cuh"
#include "common/sampling.cuh"

static_assert(MAX_TOP_K == WARP, "a candidate a lane");
static_assert((ROW_WARPS & (ROW_WARPS - 1)) == 0 && ROWS * ROW_WARPS * WARP <= 1024, "a tree of merges, in one block");
static_assert(RANKS == 1 || (ROW_WARPS > 1 && RANKS <= 4 * ROW_WARPS), "one reader a list, four lists a warp");
static_assert(RANKS * STATUS_WORDS <= WARP, "a status word a lane");

typedef Key Lists[ROW_WARPS][WARP];

__device__ __forceinline__ Key load_key(const float* values, const int* ids, int piece, int lane) {
    return make_key(values[piece * MAX_TOP_K + lane], ids[piece * MAX_TOP_K + lane]);
}

// warp_merge, for the many lists of ranks with one comparison a step.
__device__ __forceinline__ Key merge(Key a, Key b, int lane) {
    if constexpr (RANKS == 1) return warp_merge(a, b, lane);
    Key key = max_key(a, __shfl_sync(ALL_LANES, b, WARP - 1 - lane));
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const Key other = __shfl_xor_sync(ALL_LANES, key, offset);
        key = (key > other) == ((lane & offset) == 0) ? key : other;
    }
    return key;
}

// Of the ranks' lists those that are this warp's, as they come. NO_KEY for what never came, which is reported.
__device__ __forceinline__ void receive_keys(Key (&keys)[4], float* values, int* ids, int part, int lane, Fault* fault,
                                             int kernel, int layer) {
    float value[4];
    int id[4], missing;
    PeerPolls polls;
    do {
        missing = -1;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int rank = part + i * ROW_WARPS;
            value[i] = rank < RANKS ? load_pushed(values + rank * MAX_TOP_K + lane) : 0.0f;
            id[i] = rank < RANKS ? load_pushed(ids + rank * MAX_TOP_K + lane) : 0;
        }
#pragma unroll
        for (int i = 3; i >= 0; --i) {
            missing = has_come(value[i]) & has_come(id[i]) ? missing : part + i * ROW_WARPS;
        }
    } while (polls.again(missing, fault, kernel, layer));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int rank = part + i * ROW_WARPS;
        const bool is = (rank < RANKS) & has_come(value[i]) & has_come(id[i]);
        keys[i] = is ? make_key(value[i], id[i]) : NO_KEY;
        if (rank >= RANKS) continue;
        make_unready(values + rank * MAX_TOP_K + lane);
        make_unready(ids + rank * MAX_TOP_K + lane);
    }
}

// The 32 largest of a row's lists, sorted, to the row's warp 0. All threads of the block take part; a row that is not
// `wanted` reads nothing. kernel: for reports, with its arguments.
template <typename Args>
__device__ __forceinline__ Key merged(const Args& a, int kernel, int64_t first_list, bool wanted, Lists& lists, int part,
                                      int lane) {
    float* const values = a.values + first_list;
    int* const ids = a.ids + first_list;
    const int pieces = RANKS > 1 ? RANKS : a.pieces;
    Key key = NO_KEY;
    for (int first = part; wanted && first < pieces; first += 4 * ROW_WARPS) {
        Key four[4];  // under way together, and merged as a tree
        if constexpr (RANKS > 1) {
            receive_keys(four, values, ids, part, lane, a.fault, kernel, a.layer);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int piece = first + i * ROW_WARPS;
                four[i] = piece < pieces ? load_key(values, ids, piece, lane) : NO_KEY;
            }
        }
        const bool two = first + ROW_WARPS < pieces;
        const Key some = two ? merge(merge(four[0], four[1], lane), merge(four[2], four[3], lane), lane)
                             : four[0];
        key = first == part ? some : merge(key, some, lane);
    }
#pragma unroll
    for (int half = ROW_WARPS / 2; half > 0; half /= 2) {
        if (part >= half && part < 2 * half) lists[part][lane] = key;
        __syncthreads();  // the upper half's lists are there; each is written once, so nothing else needs to wait
        if (part < half) key = merge(key, lists[part + half][lane], lane);
    }
    return key;
}

// normalize(max(0, p - q)) over the ids of p, or p where rounding leaves nothing of it.
__device__ __forceinline__ Distribution residual(const Distribution& p, const Distribution& q, double* scratch,
                                                 int lane) {
    double q_of = 0.0;
    for (int j = 0; j < q.count; j += 8) {  // q.id is -1 and q.prob 0 beyond q.count
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int id = __shfl_sync(ALL_LANES, q.id, j + i);
            const double prob = __shfl_sync(ALL_LANES, q.prob, j + i);
            if (id == p.id) q_of = prob;
        }
    }
    const double rest = lane < p.count && p.prob > q_of ? p.prob - q_of : 0.0;
    const double total = warp_total(rest, p.count, scratch, lane);
    if (!(total > 0.0)) return p;
    return Distribution{p.id, rest / total, p.count};
}

// What a request asks of the sampler. Loads go past L1, where an older launch may have left what was there before.
struct Asked {
    double temperature, top_p;
    uint32_t seed_lo, seed_hi;
    int top_k, draft_limit, done;
};

__device__ __forceinline__ Asked load_asked(const State& state) {
    return Asked{__ldcg(&state.temperature), __ldcg(&state.top_p), __ldcg(&state.seed_lo),    __ldcg(&state.seed_hi),
                 __ldcg(&state.top_k),       __ldcg(&state.draft_limit), __ldcg(&state.done)};
}

// What is sampled with: a row whose largest logit is not finite is reported, and gives its first candidate, so that
// later kernels find a token that exists.
__device__ __forceinline__ double checked_temperature(float value, double temperature, Fault* fault, int kernel,
                                                      int layer, int lane) {
    if (is_finite(__shfl_sync(ALL_LANES, value, 0))) return temperature;
    if (lane == 0) report_fault(fault, FAULT_NOT_FINITE, kernel, layer);
    return 0.0;
}

// A barrier of the block's THREADS, of which some only arrive.
template <int THREADS>
__device__ __forceinline__ void all_decided() {
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void nothing_to_decide() {
    asm volatile("bar.arrive 2, %0;" ::"n"(THREADS) : "memory");
}

// One warp: what all ranks' hosts and faults say, to loop->agreed. What a rank did not say is all bits set, which ends
// the request for a fault.
__device__ __forceinline__ void agree(const AcceptArgs& a, int lane) {
    const int rank = lane / STATUS_WORDS, kind = lane % STATUS_WORDS;
    const bool mine = rank < RANKS && kind <= STATUS_READ;
    int x, missing;
    PeerPolls polls;
    do {
        x = mine ? load_pushed(a.statuses + lane) : 0;
        missing = has_come(x) ? -1 : rank;
    } while (polls.again(missing, a.fault, KERNEL_ACCEPT, a.layer));
    if (mine) make_unready(a.statuses + lane);
    constexpr int MOST = 0x7fffffff;
    const int ended = int(__reduce_or_sync(ALL_LANES, mine && kind == STATUS_ENDED ? uint32_t(x) : 0u));
    const int taken = __reduce_min_sync(ALL_LANES, mine && kind == STATUS_TAKEN ? x : MOST);
    // Counts of 31 bits that wrap, a log's length apart at the most.
    const int one = __shfl_sync(ALL_LANES, x, STATUS_READ);
    const int ahead = int(uint32_t(x - one) << 1) >> 1;
    const int least = __reduce_min_sync(ALL_LANES, mine && kind == STATUS_READ ? ahead : MOST);
    if (lane == 0) {
        a.loop->agreed[STATUS_ENDED] = ended & 3;
        a.loop->agreed[STATUS_TAKEN] = taken;
        a.loop->agreed[STATUS_READ] = (one + least) & MOST;
    }
}

extern "C" __global__ void __launch_bounds__(ROWS* ROW_WARPS* WARP, RANKS > 1) accept(const __grid_constant__ AcceptArgs a) {
    __shared__ Lists lists[ROWS];
    __shared__ __align__(16) double scratch[ROWS][WARP];
    __shared__ int replacement[ROWS];  // the token drawn in the row, or -1 where its draft stands
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int row = warp / ROW_WARPS, part = warp % ROW_WARPS;

    State& state = a.state[blockIdx.x];
    const Asked asked = load_asked(state);
    const int drafts = a.first ? 0 : __ldcg(&state.drafts);
    const int my_draft = lane < ROWS - 1 ? __ldcg(&state.tokens[lane + 1]) : 0;
    const int log_rounds = __ldcg(&state.log_rounds);
    Distribution q{-1, 0.0, 0};
    double u_accept = 0.0, u_target = 0.0;
    if (part == 0) {
        if (row < drafts) {
            q.count = __ldcg(&state.q_count[row]);
            q.id = lane < q.count ? __ldcg(&state.q_ids[row][lane]) : -1;
            q.prob = lane < q.count ? __ldcg(&state.q_probs[row][lane]) : 0.0;
        }
        const int position = asked.done + (a.first ? 0 : 1) + row;  // of the token that is decided about
        u_accept = uniform(asked.seed_lo, asked.seed_hi, position, PURPOSE_ACCEPT);
        u_target = uniform(asked.seed_lo, asked.seed_hi, position, PURPOSE_TARGET);
    }
    const int draft = __shfl_sync(ALL_LANES, my_draft, row);

    const int rows = live_before(a.live, a.rows);

    pdl_wait();  // the lists
    pdl_trigger();
    if (rows <= 0) return;
    const int drafted = min_int(drafts, rows - 1);
    const int64_t first_list = (int64_t(blockIdx.x) * ROWS + row) * a.pieces * MAX_TOP_K;
    // Of several ranks all rows that were pushed, whatever the drafts.
    const bool wanted = RANKS > 1 ? row < rows : row <= drafted;
    const Key key = merged(a, KERNEL_ACCEPT, first_list, wanted, lists[row], part, lane);
    constexpr int THREADS = ROWS * ROW_WARPS * WARP;
    if (RANKS > 1 && warp == 1) {  // part 1 of row 0: free from here on, and nobody waits for it
        nothing_to_decide<THREADS>();
        if (a.statuses != nullptr && a.loop != nullptr) agree(a, lane);
        return;
    }

    if (part == 0 && row <= drafted) {
        const float value = key_value(key);
        const double temperature =
            checked_temperature(value, asked.temperature, a.fault, KERNEL_ACCEPT, a.layer, lane);
        Exponents exponents;
        Distribution p =
            filtered(value, key_id(key), temperature, asked.top_k, asked.top_p, scratch[row], lane, exponents);
        bool stands = false;
        if (row < drafted) {
            // Strictly below, so that u = 0 does not accept a token that p excludes.
            stands = u_accept * prob_of(q, draft) < prob_of(p, draft);
#ifdef FORCE_ACCEPT  // for benchmarks: so many drafts, whatever they are
            stands = row < FORCE_ACCEPT;
#endif
#if TEST_FAULT == 1  // for tests: rules that are wrong
            stands = prob_of(p, draft) > 0.0;
#endif
#if TEST_FAULT != 2
            if (!stands) p = residual(p, q, scratch[row], lane);
#endif
        }
        int token = -1;
        if (!stands) token = max_int(0, draw(p, u_target, scratch[row], lane));
        if (lane == 0) replacement[row] = token;
    }
    if (RANKS > 1) {
        all_decided<THREADS>();
    } else {
        __syncthreads();  // all rows have decided
    }
    if (warp != 0) return;

    const int drawn = lane <= drafted ? replacement[lane] : -1;
    const int accepted = __ffs(__ballot_sync(ALL_LANES, drawn >= 0)) - 1;  // the last row always draws
    const int pending = __shfl_sync(ALL_LANES, drawn, accepted);
    const int committed = lane < accepted ? my_draft : pending;  // lane i: the token at done + 1 + i
    const int newest = __shfl_sync(ALL_LANES, committed, (accepted - lane) & 31);
    const int now_done = a.first ? asked.done : asked.done + accepted + 1;
    if (lane <= accepted) {
        state.log_tokens[lane] = committed;
        state.draft_tokens[lane] = newest;  // row 0 is the newest position; its next token is the pending one
        state.draft_positions[lane] = now_done - 1 - lane;
        state.draft_hidden[lane] = accepted - lane;
    }
    // Also where nothing will be drafted: the draft's cache takes in what was committed.
    if (lane < ROWS) state.depth_rows[lane] = lane == 0 ? accepted + 1 : 0;
    if (lane == 0) {
        state.tokens[0] = pending;
        state.positions[0] = now_done;
        state.done = now_done;
        state.drafts = 0;
        state.log_count = accepted + 1;
        state.log_drafted = drafted;
        state.log_accepted = accepted;
        state.log_rounds = log_rounds + 1;
        state.log_verified = clock_ns();
    }
}

// cuq1.sampling.depth's rule, as far as it is known before the draft that it looks at last.
struct Rule {
    double weights[FEATURES];
    double sum, lowest;  // of the logarithms of earlier drafts' probabilities; lowest is 0 where there are none
    double entropies;    // sum
    double least_score;  // the threshold's logit: what the score must exceed
};

constexpr double UNSURE = 0.4;  // probabilities below count as this
constexpr double LOG_UNSURE = -0.916290731874155;

__device__ __forceinline__ Rule load_rule(const State& state, int depth, double* scratch, int lane) {
    Rule rule;
    const int decision = max_int(0, min_int(depth + 1, MAX_DRAFTS - 1) - MIN_AUTO_DRAFTS);
#pragma unroll
    for (int i = 0; i < FEATURES; ++i) rule.weights[i] = __ldcg(&state.rule_weights[decision][i]);
    const double served = lane < depth ? __ldcg(&state.served[lane]) : 1.0;
    const double chance = log(served > UNSURE ? served : UNSURE);
    rule.sum = warp_total(chance, depth, scratch, lane);
    rule.entropies = warp_total(lane < depth ? __ldcg(&state.entropy[lane]) : 0.0, depth, scratch, lane);
    rule.lowest = chance;  // 0 in the other lanes, which no logarithm of a probability exceeds
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const double other = __shfl_xor_sync(ALL_LANES, rule.lowest, offset);
        rule.lowest = other < rule.lowest ? other : rule.lowest;
    }
    const double threshold = __ldcg(&state.rule_threshold);
    // 1 / (1 + exp(-score)) > threshold
    rule.least_score = threshold > 0.0 ? log(threshold / (1.0 - threshold)) : -1e300;
    return rule;
}

// Whether one draft more is worth its cost, after `count` drafts; chance and entropy are the last one's.
__device__ __forceinline__ bool worth_more(const Rule& rule, double chance, double entropy, int count) {
    double score = rule.weights[0] + rule.weights[1] * (rule.sum + chance) + rule.weights[2] * chance +
                   rule.weights[3] * (chance < rule.lowest ? chance : rule.lowest) + rule.weights[4] * entropy +
                   rule.weights[5] * ((rule.entropies + entropy) / count);
    score = score > 60.0 ? 60.0 : score < -60.0 ? -60.0 : score;
    return score > rule.least_score;
}

// The two warps that stay to the end.
__device__ __forceinline__ void both_warps() { asm volatile("bar.sync 1, 64;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__((ROW_WARPS + 1) * WARP)
    draft_sample(const __grid_constant__ DraftSampleArgs a) {
    pdl_trigger();  // at once: control's prologue is longer than this kernel, and reads what is older than top_k
    __shared__ Lists lists;
    __shared__ Key merged_key[WARP];
    __shared__ __align__(16) double scratch[2][WARP];
    __shared__ Rule rule;
    __shared__ int drawn_token;
    const int part = threadIdx.x / WARP, lane = threadIdx.x % WARP, depth = a.depth, count = depth + 1;
    const bool watches = part == ROW_WARPS;  // for the stop rule, beside the warp that draws

    State& state = a.state[blockIdx.x];
    const Asked asked = load_asked(state);
    const bool automatic = __ldcg(&state.auto_depth) != 0;
    double u = 0.0;
    if (watches && automatic) {
        const Rule loaded = load_rule(state, depth, scratch[1], lane);
        if (lane == 0) rule = loaded;  // registers would be spilled over the calls of exp and log
        __syncwarp();                  // the rule is there
    }
    if (part == 0) u = uniform(asked.seed_lo, asked.seed_hi, asked.done + count, PURPOSE_DRAFT);

    const int rows = live_before(a.live, a.rows);

    pdl_wait();  // the lists
    const bool wanted = depth < asked.draft_limit;  // depth 0 is computed also where no draft is
    if (rows <= 0 || (RANKS == 1 && !wanted)) return;
    const int64_t first_list = int64_t(blockIdx.x) * ROWS * a.pieces * MAX_TOP_K;
    Key key;
    if (ROW_WARPS == 1) {
        key = merged(a, KERNEL_DRAFT_SAMPLE, first_list, true, lists, 0, lane);
    } else {
        key = merged(a, KERNEL_DRAFT_SAMPLE, first_list, !watches, lists, part, lane);
        if (part == 0) merged_key[lane] = key;
        __syncthreads();  // the merged list is there
        if (watches) key = merged_key[lane];
    }
    if (RANKS > 1 && !wanted) return;  // what was pushed has been read
    if (part != 0 && !(watches && automatic)) return;

    const float value = key_value(key);
    const int id = key_id(key);
    const bool may = count < min_int(asked.draft_limit, MAX_DRAFTS);
    const bool decides = automatic && may && count >= MIN_AUTO_DRAFTS;
    Exponents exponents;
    int token = 0;
    bool more = may;
    if (watches) {
        // What is drawn from says nothing about a greedy request's draft.
        const bool greedy = asked.temperature == 0.0 || !is_finite(__shfl_sync(ALL_LANES, value, 0));
        const Distribution shape =
            filtered(value, id, greedy ? 1.0 : asked.temperature, greedy ? FEATURE_TOP_K : asked.top_k,
                     greedy ? 1.0 : asked.top_p, scratch[1], lane, exponents);
        const double log_total = log(exponents.total);
        const double term = lane < shape.count ? shape.prob * exponents.exponent : 0.0;
        const double entropy = log_total - warp_total(term, shape.count, scratch[1], lane);
        both_warps();  // the token is drawn
        token = drawn_token;
        const double served = prob_of(shape, token);
        const uint32_t drawn = __ballot_sync(ALL_LANES, lane < shape.count && shape.id == token);
        const double chance = __shfl_sync(ALL_LANES, exponents.exponent, drawn != 0 ? __ffs(drawn) - 1 : 0) - log_total;
        if (decides) more = worth_more(rule, chance > LOG_UNSURE ? chance : LOG_UNSURE, entropy, count);
        if (lane == 0) {
            state.served[depth] = served;
            state.entropy[depth] = entropy;
        }
    } else {
        const double temperature =
            checked_temperature(value, asked.temperature, a.fault, KERNEL_DRAFT_SAMPLE, a.layer, lane);
        const Distribution q =
            filtered(value, id, temperature, asked.top_k, asked.top_p, scratch[0], lane, exponents);
        token = max_int(0, draw(q, u, scratch[0], lane));
        if (automatic) {
            if (lane == 0) drawn_token = token;
            both_warps();  // the stop rule's warp has it
        }
        state.q_ids[depth][lane] = q.id;
        state.q_probs[depth][lane] = q.prob;
        if (lane == 0) {
            state.q_count[depth] = q.count;
            state.tokens[count] = token;
            state.positions[count] = asked.done + count;
            state.drafts = count;
        }
    }
    if (watches != decides) return;  // the rest is written by the warp that knows whether there will be more
    if (lane > depth && lane < ROWS) state.depth_rows[lane] = lane == count && more ? 1 : 0;
    if (lane == 0 && more) {
        state.draft_tokens[0] = token;
        state.draft_positions[0] = asked.done + depth;
        state.draft_hidden[0] = -1;
    }
}
