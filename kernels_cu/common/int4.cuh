// INT4 weights in registers: the units of abi_qwen2.cuh as operands of the tensor cores.
//
// A word has codes of eight neighbouring columns, those of a pair 16 bits apart (cuq1/checkpoint/NANOQWEN.md): one AND
// and one XOR make a pair two halves 1024 + code + 8, since a half from 1024 on counts in ones; for the pairs four bits
// further up, in sixteenths. What is then taken off leaves the code, exactly.
// The MMA sums over k in any order, as long as A and B agree on it: of a row's 64 columns of a chunk, lane t = lane % 4
// has columns 8t .. 8t + 7 and 32 + 8t .. 32 + 8t + 7, so that B is 16 contiguous bytes of activations for each.
#pragma once
#include "abi_qwen2.cuh"
#include "common/inner.cuh"
#include "common/mma.cuh"

constexpr int GROUP_SIZE = 128;  // columns that share a scale
constexpr int TILE_ROWS = 16;
constexpr int CODE_BYTES = TILE_ROWS * GROUP_SIZE / 2;
constexpr int UNIT_BYTES = CODE_BYTES + TILE_ROWS * 2;

__device__ __host__ constexpr int padded(int width) { return (width + GROUP_SIZE - 1) / GROUP_SIZE * GROUP_SIZE; }

// (word & mask) ^ magic
__device__ __forceinline__ uint32_t int4_pick(uint32_t word, uint32_t mask, uint32_t magic) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(word), "r"(mask), "r"(magic));
    return y;
}

// Eight codes as four pairs of halves, in the order of their columns.
__device__ __forceinline__ void int4_to_f16(uint32_t (&pairs)[4], uint32_t word) {
    constexpr uint32_t ONES = 0x64086408, SIXTEENTHS = 0x64806480;  // 1024 + 8 and 1024 + 16 * 8, as the code's bits flip
    constexpr uint32_t LESS = 0x64086408, SIXTEENTH = 0x2c002c00, LESS_72 = 0xd480d480;
    const uint32_t upper = word >> 8;
    pairs[0] = int4_pick(word, 0x000f000f, ONES);
    pairs[1] = int4_pick(word, 0x00f000f0, SIXTEENTHS);
    pairs[2] = int4_pick(upper, 0x000f000f, ONES);
    pairs[3] = int4_pick(upper, 0x00f000f0, SIXTEENTHS);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(pairs[i]) : "r"(LESS));
        asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(pairs[i + 1]) : "r"(SIXTEENTH), "r"(LESS_72));
    }
}

// c += 16 rows of 32 columns times one token: low has rows g, high rows g + 8, x the token's columns 8t .. 8t + 7.
// In lanes 4g, c[0] is row g, c[2] row g + 8.
__device__ __forceinline__ void multiply_words(float (&c)[4], uint32_t low, uint32_t high, uint4 x) {
    uint32_t a[4], b[4];
    int4_to_f16(a, low);
    int4_to_f16(b, high);
    mma_f16(c, a[0], b[0], a[1], b[1], x.x, x.y);
    mma_f16(c, a[2], b[2], a[3], b[3], x.z, x.w);
}

// Shared memory into the registers of those lanes that are `mine`. The MMA has eight columns for one token: lanes that have
// none of its columns keep the zeros that they began with, and the load takes one turn of shared memory, not four.
__device__ __forceinline__ void load_for(uint4& to, const uint4* from, bool mine) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(uint32_t(mine)));
}

// A token as halves, in the order of its columns.
struct Halves {
    static constexpr int GROUP_BYTES = GROUP_SIZE * 2;

    // Eight neighbouring columns. All lanes of a warp call it, which have neighbouring eights.
    static __device__ __forceinline__ void store(uint8_t* token, int column, const float (&x)[8], bool there) {
        if (!there) return;
        *reinterpret_cast<uint4*>(token + column * 2) =
            make_uint4(pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]), pack_f16(x[6], x[7]));
    }

    // The token's columns of a group, as a warp multiplies them.
    struct Columns {
        uint4 x[4] = {};

        __device__ __forceinline__ void load(const uint8_t* group, int lane) {
            const uint4* const from = reinterpret_cast<const uint4*>(group) + lane % 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) load_for(x[i], from + 4 * i, lane < 4);
        }

        // A unit's codes, a lane's 16 bytes of both chunks, times the columns: rows g and g + 8, in lanes 4g.
        __device__ __forceinline__ float2 times(const uint4 (&w)[2]) const {
            float c[2][4] = {};  // two chains of products, as one would wait for each MMA
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                multiply_words(c[0], w[chunk].x, w[chunk].y, x[2 * chunk]);
                multiply_words(c[1], w[chunk].z, w[chunk].w, x[2 * chunk + 1]);
            }
            return make_float2(c[0][0] + c[1][0], c[0][2] + c[1][2]);
        }

        __device__ __forceinline__ float2 times(const uint4 (&w)[2], const uint8_t* group, int lane) {
            load(group, lane);
            return times(w);
        }
    };

    // Of what a quad's lanes have.
    static __device__ __forceinline__ float sum(float x) { return x; }
};

__device__ __forceinline__ void mma_u8_s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                          uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Both digits of a token's columns of a chunk times a lane's 16 bytes of codes: of the codes in the lower halves of bytes, plus
// 8, into ones; of those in the upper halves, times 16 and plus 128, into sixteens.
__device__ __forceinline__ void multiply_codes(int (&ones)[4], int (&sixteens)[4], uint4 a, uint4 b) {
    constexpr uint32_t LOWER = 0x0f0f0f0fu, UPPER = 0xf0f0f0f0u, PLUS_8 = 0x08080808u, PLUS_128 = 0x80808080u;
    mma_u8_s8(ones, int4_pick(a.x, LOWER, PLUS_8), int4_pick(a.y, LOWER, PLUS_8), int4_pick(a.z, LOWER, PLUS_8),
              int4_pick(a.w, LOWER, PLUS_8), b.x, b.y);
    mma_u8_s8(sixteens, int4_pick(a.x, UPPER, PLUS_128), int4_pick(a.y, UPPER, PLUS_128), int4_pick(a.z, UPPER, PLUS_128),
              int4_pick(a.w, UPPER, PLUS_128), b.z, b.w);
}

// The larger magnitude, or NaN where one is.
__device__ __forceinline__ float max_magnitude(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(fabsf(a)), "f"(fabsf(b)));
    return y;
}

// A token as numbers of 16 bits with a scale for each group: x = scale * (256 high + low), two digits of eight bits. The
// largest of a group has 15 bits after its sign, more than a half has. The MMA has a column for each digit. And codes cost
// a quarter of what makes them halves: an AND and an XOR give four of them plus 8 as bytes, in
// the bytes' lower halves or, times 16, in the upper ones. What the 8s add up to is known when the digits are made.
//
// A group lies as lanes take it: for each chunk of 64 columns and each digit 16 bytes for t = 0 .. 3, which are lane t's
// columns 0, 4, 1, 5 of both of the chunk's runs of 32, and then 2, 6, 3, 7 of both, as a word's bytes have their codes:
// first the lower halves, then the upper ones. Behind those 256 bytes come the scale, over 16 as all products are in
// sixteenths, and the 8s' sum, negative.
struct Digits {
    static constexpr int GROUP_BYTES = GROUP_SIZE * 2 + 16;
    static constexpr float LARGEST = 32600.0f;  // so that 128 more than it is below 2^15

    // As Halves::store. What is not finite makes the group's scale so.
    static __device__ __forceinline__ void store(uint8_t* token, int column, const float (&x)[8], bool there) {
        // 1.5 * 2^23, to which whole numbers are added in the low bits, and 128: byte 1 is then the high digit, and byte 0
        // the low one, -128 .. 127, plus 128.
        constexpr int WHOLE = 0x4b400080;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = max_magnitude(largest, x[i]);
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2)
            largest = max_magnitude(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        const float factor = largest < 1e-30f ? 0.0f : __fdividef(LARGEST, largest);
        uint32_t v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __float_as_uint(fmaf(x[i], factor, __int_as_float(WHOLE)));
        const auto bytes = [&](int first, uint32_t pick) {
            const uint32_t a = __byte_perm(v[first], v[first + 4], pick);
            return __byte_perm(a, __byte_perm(v[first + 1], v[first + 5], pick), 0x5410);
        };
        const uint32_t high[2] = {bytes(0, 0x51), bytes(2, 0x51)};
        const uint32_t low[2] = {bytes(0, 0x40) ^ 0x80808080u, bytes(2, 0x40) ^ 0x80808080u};
        constexpr int ONES = 0x01010101;
        int sum = 256 * __dp4a(int(high[0]), ONES, __dp4a(int(high[1]), ONES, 0));
        sum = __dp4a(int(low[0]), ONES, __dp4a(int(low[1]), ONES, sum));
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (!there) return;
        const int inside = column % GROUP_SIZE;
        uint8_t* const group = token + column / GROUP_SIZE * GROUP_BYTES;
        uint32_t* const to = reinterpret_cast<uint32_t*>(group + inside / 64 * 128 + inside / 8 % 4 * 16 + inside / 32 % 2 * 4);
        to[0] = high[0];
        to[2] = high[1];
        to[16] = low[0];
        to[18] = low[1];
        if (inside == 0) {
            const float scale = largest * (1.0f / LARGEST / 16.0f);
            *reinterpret_cast<uint2*>(group + 2 * GROUP_SIZE) = make_uint2(__float_as_uint(scale), uint32_t(-128 * sum));
        }
    }

    // As Halves::Columns.
    struct Columns {
        uint4 x[2] = {};
        uint2 of;  // scale, and what the 8s add up to

        __device__ __forceinline__ void load(const uint8_t* group, int lane) {
            const uint4* const from = reinterpret_cast<const uint4*>(group) + lane % 8;
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) load_for(x[chunk], from + 8 * chunk, lane < 8);
            of = *reinterpret_cast<const uint2*>(group + 2 * GROUP_SIZE);
        }

        __device__ __forceinline__ float2 times(const uint4 (&w)[2]) const {
            int ones[4] = {}, sixteens[4] = {};  // lanes 4g have in [0] and [1] row g's high and low digit
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) multiply_codes(ones, sixteens, w[chunk], x[chunk]);
            const float scale = __uint_as_float(of.x);
            const int eights = int(of.y);
            return make_float2(
                scale * float(256 * (16 * ones[0] + sixteens[0]) + (16 * ones[1] + sixteens[1]) + eights),
                scale * float(256 * (16 * ones[2] + sixteens[2]) + (16 * ones[3] + sixteens[3]) + eights));
        }

        __device__ __forceinline__ float2 times(const uint4 (&w)[2], const uint8_t* group, int lane) {
            load(group, lane);
            return times(w);
        }
    };

    static __device__ __forceinline__ float sum(float x) { return x; }
};
