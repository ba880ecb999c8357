// Decode attention of one KV head's queries over pages that lie in shared memory: what the kernels of one layer and of all
// layers share. Includers define HEAD_SIZE and GROUP, the query heads of a KV head.
//
// A page is the M of m16n8k16: 16 keys by HEAD_SIZE dimensions times 8 queries for the scores, then HEAD_SIZE dimensions by
// 16 keys times 8 queries' probabilities. A query is two halves, high part and low, so that scores are those of FP32
// queries; probabilities are halves. A warp has a page to itself, with a maximum of its own: warps meet once, at the end.
#pragma once
#include "abi_qwen2.cuh"
#include "common/attend.cuh"
#include "common/mma.cuh"

constexpr int ROW_BYTES = HEAD_SIZE * 2;
constexpr int PAGE_BYTES = PAGE * ROW_BYTES;
constexpr int STEPS = HEAD_SIZE / 16;       // of the product with keys; m-tiles of the product with values
constexpr int QUERIES = 8;                  // N of the MMA
constexpr int ITEMS = STEPS * WARP;         // of sums: four a thread and m-tile
constexpr int STATISTICS = QUERIES / 2;     // float4s: maximum and sum of two queries each
constexpr int HEAD_THREADS = HEAD_SIZE / 8; // of a head of q, k or v: dimensions 4 i .. 4 i + 3 and as many half a head on

static_assert(HEAD_SIZE == 64 || HEAD_SIZE == 128, "lanes' shares are laid out for these");
static_assert(PAGE == 16, "a page is an m-tile of keys, and a k-step of values");
static_assert(GROUP >= 1 && GROUP <= QUERIES && KV_HEADS * GROUP == Q_HEADS, "a KV head's queries are N");

// A lane's operands of a step: two words, each its high and its low part. A step more lies 16 bytes further on, so that
// a warp's stores of two queries meet a bank twice at most.
typedef uint4 QueryStep[WARP + 1];

// A matrix of keys or queries, transposed: half of an operand's columns.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ float4 unpacked(uint2 x) {
    const float2 lo = unpack_f16(x.x), hi = unpack_f16(x.y);
    return make_float4(lo.x, lo.y, hi.x, hi.y);
}

// Turns of position * inverse_frequency, less whole ones: in double, since a large float is of another angle.
__device__ __forceinline__ float turns_of(int position, double inverse_frequency) {
    const double turns = position * (inverse_frequency * 0.15915494309189535);  // 1 / (2 pi)
    return float(turns - rint(turns));
}

__device__ __forceinline__ float4 plus(float4 x, float4 y) {
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

__device__ __forceinline__ void turn(float4 (&x)[2], const float4& cosine, const float4& sine) {
    const float4 lo = x[0], hi = x[1];
    x[0] = make_float4(lo.x * cosine.x - hi.x * sine.x, lo.y * cosine.y - hi.y * sine.y, lo.z * cosine.z - hi.z * sine.z,
                       lo.w * cosine.w - hi.w * sine.w);
    x[1] = make_float4(hi.x * cosine.x + lo.x * sine.x, hi.y * cosine.y + lo.y * sine.y, hi.z * cosine.z + lo.z * sine.z,
                       hi.w * cosine.w + lo.w * sine.w);
}

// Four dimensions of a query, from `dim` on, as operands.
__device__ __forceinline__ void store_query(QueryStep* q, int query, int dim, float4 x) {
    const float scale = LOG2E * (HEAD_SIZE == 64 ? 0.125f : 0.08838834764831845f);  // 1 / sqrt(HEAD_SIZE)
    const float values[4] = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t high = pack_f16(values[2 * i], values[2 * i + 1]);
        const float2 rounded = unpack_f16(high);
        const uint32_t low = pack_f16(values[2 * i] - rounded.x, values[2 * i + 1] - rounded.y);
        const int d = dim % 16 + 2 * i;  // lane (query, t) has dimensions 2t, 2t + 1 and, as its second word, 8 on
        uint4* const to = &q[dim / 16][query * 4 + d % 8 / 2];
        reinterpret_cast<uint2*>(to)[d / 8] = make_uint2(high, low);
    }
}

// Four dimensions of this token's key or value: into the tail page in shared memory, and into its page of the cache.
__device__ __forceinline__ void store_row(uint8_t* page, f16* cached, int own, int dim, float4 x) {
    const uint2 halves = make_uint2(pack_f16(x.x, x.y), pack_f16(x.z, x.w));
    const int at = own * HEAD_SIZE + page_piece(own, dim / 8) * 8 + dim % 8;
    *reinterpret_cast<uint2*>(page + at * 2) = halves;
    if (cached != nullptr) *reinterpret_cast<uint2*>(cached + at) = halves;
}

// What a warp, then a block, knows of the pages that it has seen: of queries 2t and 2t + 1.
struct Softmax {
    float top[2];
    float sum[2];
    float4 out[STEPS];  // dimensions 16 j + g, of both queries, then 16 j + g + 8

    struct Page {
        float factor[2];         // of what was summed before
        uint32_t p_low, p_high;  // probabilities, as an operand
    };

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < 2; ++i) top[i] = none(), sum[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < STEPS; ++j) out[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    // Where a lane's row of a page at this address begins. Of ldmatrix's four matrices, lanes 8 o onwards point at rows of
    // matrix o: keys from 8 (o % 2), the piece o / 2.
    static __device__ __forceinline__ uint32_t line(uint32_t page) {
        const int lane = threadIdx.x % WARP;
        return page + lane % 16 * ROW_BYTES + page_piece(lane % 16, lane / 16) * 16;
    }

    // A page's keys: of those of the `tail`, rows 0 .. last are seen.
    __device__ __forceinline__ Page keys(uint32_t line, const QueryStep* queries, bool tail, int last) {
        Page page;
        const int lane = threadIdx.x % WARP, g = lane / 4;
        // Scores of keys g and g + 8, of queries 2t and 2t + 1. Two chains, as one would wait for each MMA.
        float chain[2][4] = {};
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
            uint32_t k[4];
            ldmatrix(k, line ^ (c << 5));
            const uint4 q = queries[c][lane];
            mma_f16(chain[0], k[0], k[1], k[2], k[3], q.x, q.z);
            mma_f16(chain[1], k[0], k[1], k[2], k[3], q.y, q.w);
        }
        float s[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] = chain[0][e] + chain[1][e];
        if (tail) {
            if (g > last) s[0] = s[1] = none();
            if (g + 8 > last) s[2] = s[3] = none();
        }
        float p[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float largest = fmaxf(s[n], s[n + 2]);
#pragma unroll
            for (int offset = 4; offset < WARP; offset *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
            largest = fmaxf(largest, top[n]);  // a number: a page has a visible key
            page.factor[n] = exp2_fast(top[n] - largest);
            top[n] = largest;
            p[n] = exp2_fast(s[n] - largest);
            p[n + 2] = exp2_fast(s[n + 2] - largest);
            sum[n] = fmaf(sum[n], page.factor[n], p[n] + p[n + 2]);
        }
        page.p_low = transposed(pack_f16(p[0], p[1])), page.p_high = transposed(pack_f16(p[2], p[3]));
        return page;
    }

    // The same page's values, PAGE_BYTES behind its keys.
    __device__ __forceinline__ void values(uint32_t line, const Page& page) {
#pragma unroll
        for (int j = 0; j < STEPS; ++j) {
            uint32_t v[4];
            ldmatrix_transposed(v, (line ^ (j << 5)) + PAGE_BYTES);  // dimensions are rows, the second eight keys columns
            float4& o = out[j];
            float sums[4] = {o.x * page.factor[0], o.y * page.factor[1], o.z * page.factor[0], o.w * page.factor[1]};
            mma_f16(sums, v[0], v[2], v[1], v[3], page.p_low, page.p_high);
            o = make_float4(sums[0], sums[1], sums[2], sums[3]);
        }
    }

    __device__ __forceinline__ void end() {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int offset = 4; offset < WARP; offset *= 2) sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], offset);
        }
    }
};

__device__ __forceinline__ float4 weighted(float4 o, float4 x, float2 w) {
    return make_float4(fmaf(w.x, x.x, o.x), fmaf(w.y, x.y, o.y), fmaf(w.x, x.z, o.z), fmaf(w.y, x.w, o.w));
}

// Weights of COUNT maxima (x and z of statistics of two queries), and what the two queries have in all. A part that has seen
// nothing has the maximum -inf: weight 0. Where none has seen anything, so has the whole.
template <int COUNT>
__device__ __forceinline__ float4 joined(const float4 (&statistics)[COUNT], float2 (&weight)[COUNT]) {
    float4 all = make_float4(none(), 0.0f, none(), 0.0f);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) all.x = fmaxf(all.x, statistics[i].x), all.z = fmaxf(all.z, statistics[i].z);
    const float2 base = make_float2(base_of(all.x, 1.0f), base_of(all.z, 1.0f));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        weight[i] = make_float2(exp2_fast(statistics[i].x - base.x), exp2_fast(statistics[i].z - base.y));
        all.y = fmaf(weight[i].x, statistics[i].y, all.y);
        all.w = fmaf(weight[i].y, statistics[i].w, all.w);
    }
    return all;
}
