// A token's distribution, held by one warp: lane i has the i-th most likely candidate. The arithmetic is that of
// cuq1/sampling in double precision and in NumPy's order of summation, so that equal logits give equal tokens:
// the only operations that may differ in their last bit are exp, log, and what the stop rule makes of them (its
// logarithms come from the exponents, not from the rounded probabilities).
#pragma once
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr uint32_t ALL_LANES = 0xffffffffu;

// ---- Random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) ----

enum Purpose { PURPOSE_DRAFT = 0, PURPOSE_ACCEPT = 1, PURPOSE_TARGET = 2 };

// A multiple of 2^-24 in [0, 1), for one decision about the token at `position`.
__device__ __forceinline__ double uniform(uint32_t seed_lo, uint32_t seed_hi, int position, int purpose) {
    uint32_t c0 = uint32_t(position), c1 = 0, c2 = uint32_t(purpose), c3 = 0;
    uint32_t k0 = seed_lo, k1 = seed_hi;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return double(c0 >> 8) * 0x1p-24;
}

// ---- Candidates: one integer that orders by value and then by lower id ----

typedef uint64_t Key;

// No candidate: id -1, value -inf; below every real one, -inf included.
constexpr Key NO_KEY = 0x007fffff00000000ull;

// value is not NaN.
__device__ __forceinline__ Key make_key(float value, int id) {
    const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 equals 0: ties must go to the lower id
    const uint32_t ordered = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return (Key(ordered) << 32) | uint32_t(~id);
}

__device__ __forceinline__ float key_value(Key key) {
    const uint32_t ordered = uint32_t(key >> 32);
    return __uint_as_float(ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ int key_id(Key key) { return ~int(uint32_t(key)); }

__device__ __forceinline__ Key max_key(Key a, Key b) { return a > b ? a : b; }
__device__ __forceinline__ Key min_key(Key a, Key b) { return a < b ? a : b; }

// The warp's keys, largest in lane 0.
__device__ __forceinline__ Key warp_sort(Key key, int lane) {
#pragma unroll
    for (int size = 2; size <= WARP; size *= 2) {
#pragma unroll
        for (int offset = size / 2; offset > 0; offset /= 2) {
            const Key other = __shfl_xor_sync(ALL_LANES, key, offset);
            const bool larger = ((lane & offset) == 0) == ((lane & size) == 0);
            key = larger ? max_key(key, other) : min_key(key, other);
        }
    }
    return key;
}

// The 32 largest of two sorted lists, sorted: the larger of each pair (i-th, i-th from the end) are the 32 largest,
// and form a bitonic sequence.
__device__ __forceinline__ Key warp_merge(Key a, Key b, int lane) {
    Key key = max_key(a, __shfl_sync(ALL_LANES, b, WARP - 1 - lane));
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const Key other = __shfl_xor_sync(ALL_LANES, key, offset);
        key = (lane & offset) == 0 ? max_key(key, other) : min_key(key, other);
    }
    return key;
}

// How many of the LISTS - 1 sorted lists that follow list `own`, cyclically, are larger. The searches go side by side,
// as each step waits for shared memory.
template <int LISTS>
__device__ __forceinline__ int count_larger(const Key (*lists)[WARP], int own, Key key) {
    int count[LISTS - 1] = {};
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < LISTS - 1; ++i) {
            count[i] += lists[(own + 1 + i) % LISTS][count[i] + step - 1] > key ? step : 0;
        }
    }
    int total = 0;
#pragma unroll
    for (int i = 0; i < LISTS - 1; ++i) {
        total += count[i] + (lists[(own + 1 + i) % LISTS][count[i]] > key ? 1 : 0);
    }
    return total;
}

// ---- Sums of a warp's doubles, in NumPy's order ----

// Lane i: x[0] + ... + x[i], one after the other (numpy.cumsum). x is 0 from `count` on; scratch: 32 doubles of the
// warp's own, 16-byte aligned.
__device__ __forceinline__ double warp_cumsum(double x, int count, double* scratch, int lane) {
    __syncwarp();  // whoever read scratch before has done so
    scratch[lane] = x;
    __syncwarp();  // all terms are there
    double sum = 0.0;
    for (int j = 0; j < count; j += 4) {  // at most 31: beyond count lie zeros, which change no bit
        const double2 ab = *reinterpret_cast<const double2*>(scratch + j);
        const double2 cd = *reinterpret_cast<const double2*>(scratch + j + 2);
        sum += j <= lane ? ab.x : 0.0;
        sum += j + 1 <= lane ? ab.y : 0.0;
        sum += j + 2 <= lane ? cd.x : 0.0;
        sum += j + 3 <= lane ? cd.y : 0.0;
    }
    return sum;
}

// To every lane: numpy.sum of the first `count`. Up to 7 terms one after the other; else eight partial sums with
// stride 8, added as a tree, and then the last count % 8 terms one after the other.
__device__ __forceinline__ double warp_total(double x, int count, double* scratch, int lane) {
    __syncwarp();  // whoever read scratch before has done so
    scratch[lane] = x;
    __syncwarp();  // all terms are there
    const int whole = count & ~7;
    double sum = 0.0;
    if (whole > 0) {
        sum = scratch[lane & 7];
        if (whole > 8) sum += scratch[8 + (lane & 7)];
        if (whole > 16) sum += scratch[16 + (lane & 7)];
        if (whole > 24) sum += scratch[24 + (lane & 7)];
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    }
    for (int j = whole; j < count; ++j) sum += scratch[j];
    return sum;
}

// ---- Distributions ----

struct Distribution {
    int id;       // of this lane's token; -1 from `count` on
    double prob;  // 0 from `count` on
    int count;    // the same in all lanes, 1 to 32
};

// What a distribution's logarithms follow from: log prob = exponent - log(total).
struct Exponents {
    double exponent;  // (logit - largest) / temperature
    double total;     // sum of exp(exponent) over what was kept
};

// cuq1.sampling.filtered of sorted candidates: temperature, the top_k most likely, the smallest set of them that
// reaches top_p. The largest value is finite.
__device__ __forceinline__ Distribution filtered(float value, int id, double temperature, int top_k, double top_p,
                                                 double* scratch, int lane, Exponents& exponents) {
    Distribution out;
    exponents = Exponents{0.0, 1.0};
    if (temperature == 0.0) {
        out.count = 1;
        out.prob = lane == 0 ? 1.0 : 0.0;
    } else {
        const double peak = __shfl_sync(ALL_LANES, value, 0);
        const bool kept = lane < top_k && id >= 0;
        exponents.exponent = (double(value) - peak) / temperature;
        double weight = kept ? exp(exponents.exponent) : 0.0;
        int count = __popc(__ballot_sync(ALL_LANES, kept));
        if (top_p < 1.0) {
            const double cumulative = warp_cumsum(weight, count, scratch, lane);
            const double goal = top_p * __shfl_sync(ALL_LANES, cumulative, WARP - 1);
            // The token that reaches the goal is kept.
            count = __popc(__ballot_sync(ALL_LANES, lane < count && cumulative < goal)) + 1;
            if (lane >= count) weight = 0.0;
        }
        out.count = __popc(__ballot_sync(ALL_LANES, weight > 0.0));  // sorted: what underflowed is the tail
        exponents.total = warp_total(weight, out.count, scratch, lane);
        out.prob = weight / exponents.total;
    }
    out.id = lane < out.count ? id : -1;
    return out;
}

// To every lane: the probability of a token; 0 where the filter left it out.
__device__ __forceinline__ double prob_of(const Distribution& p, int token) {
    const uint32_t found = __ballot_sync(ALL_LANES, p.id == token && p.id >= 0);
    return found == 0 ? 0.0 : __shfl_sync(ALL_LANES, p.prob, __ffs(found) - 1);
}

// To every lane: the token at u in [0, 1) of the cumulative distribution, in the candidates' order. Tokens of
// probability 0 may lie among them; they are never drawn.
__device__ __forceinline__ int draw(const Distribution& p, double u, double* scratch, int lane) {
    const double cumulative = warp_cumsum(p.prob, p.count, scratch, lane);
    const double goal = u * __shfl_sync(ALL_LANES, cumulative, WARP - 1);
    const uint32_t above = __ballot_sync(ALL_LANES, lane < p.count && cumulative > goal);
    // u * total can round up to the total itself: then the last token that has any probability.
    const uint32_t possible = __ballot_sync(ALL_LANES, lane < p.count && p.prob > 0.0);
    const int index = above != 0 ? __ffs(above) - 1 : possible != 0 ? 31 - __clz(possible) : 0;
    return __shfl_sync(ALL_LANES, p.id, index);
}
