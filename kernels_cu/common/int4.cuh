// INT4 weights in registers: the units of abi_qwen2.cuh as operands of the tensor cores.
//
// A word has codes of eight neighbouring columns, those of a pair 16 bits apart (cuq1/checkpoint/NANOQWEN.md): one AND
// and one XOR make a pair two halves 1024 + code + 8, since a half from 1024 on counts in ones; for the pairs four bits
// further up, in sixteenths. What is then taken off leaves the code, exactly.
// The MMA sums over k in any order, as long as A and B agree on it: of a row's 64 columns of a chunk, lane t = lane % 4
// has columns 8t .. 8t + 7 and 32 + 8t .. 32 + 8t + 7, so that B is 16 contiguous bytes of activations for each.
#pragma once
#include "abi_qwen2.cuh"
#include "common/mma.cuh"

constexpr int GROUP_SIZE = 128;  // columns that share a scale
constexpr int TILE_ROWS = 16;
constexpr int CODE_BYTES = TILE_ROWS * GROUP_SIZE / 2;
constexpr int UNIT_BYTES = CODE_BYTES + TILE_ROWS * 2;
constexpr float INNER_SCALE = 0.0625f;  // of what lies between gate_up and down, so that no half overflows

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
// Every column of the product is this token's: c[0] is row g, c[2] row g + 8.
__device__ __forceinline__ void multiply_words(float (&c)[4], uint32_t low, uint32_t high, uint4 x) {
    uint32_t a[4], b[4];
    int4_to_f16(a, low);
    int4_to_f16(b, high);
    mma_f16(c, a[0], b[0], a[1], b[1], x.x, x.y);
    mma_f16(c, a[2], b[2], a[3], b[3], x.z, x.w);
}

// A token of halves, in the order of its columns.
struct Halves {
    static constexpr int GROUP_BYTES = GROUP_SIZE * 2;

    // A unit's codes, a lane's 16 bytes of both chunks, times the token's group: rows g and g + 8, the same in all lanes
    // of a quad.
    static __device__ __forceinline__ float2 times(const uint4 (&w)[2], const uint8_t* group, int t) {
        const uint4* const x = reinterpret_cast<const uint4*>(group) + t;
        float c[2][4] = {};  // two chains of products, as one would wait for each MMA
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            multiply_words(c[0], w[chunk].x, w[chunk].y, x[8 * chunk]);
            multiply_words(c[1], w[chunk].z, w[chunk].w, x[8 * chunk + 4]);
        }
        return make_float2(c[0][0] + c[1][0], c[0][2] + c[1][2]);
    }

    // Of what a quad's lanes have.
    static __device__ __forceinline__ float sum(float x) { return x; }
};
