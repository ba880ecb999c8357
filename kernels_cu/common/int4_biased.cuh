// INT4 weights as operands of the tensor cores without making them whole: a code stays on top of what makes it a half.
//
// A pair of codes under the exponent of 1024 (common/int4.cuh) is 1024 + 8 + code, or 1024 + 16 (8 + code) for the pairs four
// bits further up. The product with a token is then what the codes alone would give, and a multiple of the token's own sum,
// which is the same for all rows: it is computed once, with the token, and taken off once a group. That leaves of eight codes
// a shift and four logical instructions. Columns of the upper pairs are held as a sixteenth, so that their products count
// alike. Sums are some 250 times what they would be, in FP32: an error of 2^-24 of that is a hundredth of what rounding the
// token to halves costs.
#pragma once
#include "common/int4.cuh"

struct Biased {
    static constexpr int GROUP_BYTES = GROUP_SIZE * 2 + 16;  // the columns as halves, then what is to be taken off

    // Eight neighbouring columns. All lanes of a warp call it, which have neighbouring eights.
    static __device__ __forceinline__ void store(uint8_t* token, int column, const float (&x)[8], bool there) {
        constexpr float SIXTEENTH = 0.0625f, ONES = 1024.0f + 8.0f, SIXTEENS = 1024.0f + 16.0f * 8.0f;
        const uint4 halves = make_uint4(pack_f16(x[0], x[1]), pack_f16(x[2] * SIXTEENTH, x[3] * SIXTEENTH),
                                        pack_f16(x[4], x[5]), pack_f16(x[6] * SIXTEENTH, x[7] * SIXTEENTH));
        const float2 a = unpack_f16(halves.x), b = unpack_f16(halves.y), c = unpack_f16(halves.z), d = unpack_f16(halves.w);
        float bias = ONES * (a.x + a.y + c.x + c.y) + SIXTEENS * (b.x + b.y + d.x + d.y);
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) bias += __shfl_xor_sync(0xffffffffu, bias, offset);  // of the group
        if (!there) return;
        uint8_t* const group = token + column / GROUP_SIZE * GROUP_BYTES;
        const int inside = column % GROUP_SIZE;
        *reinterpret_cast<uint4*>(group + inside * 2) = halves;
        if (inside == 0) *reinterpret_cast<float*>(group + 2 * GROUP_SIZE) = bias;
    }

    // The token's columns of a group, as a warp multiplies them: the MMA has eight columns for one token, of which the first
    // has it, in lanes 0 to 3, and the others are zero. So a load takes one turn of shared memory and not four.
    struct Columns {
        uint4 x[4] = {};

        __device__ __forceinline__ void load(uint4& to, const uint4* from, bool mine) {
            asm volatile(
                "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
                : "r"(shared_address(from)), "r"(uint32_t(mine))
                : "memory");
        }

        // A unit's codes, a lane's 16 bytes of both chunks, times the token's group: rows g and g + 8, in lanes 4g alone.
        __device__ __forceinline__ float2 times(const uint4 (&w)[2], const uint8_t* group, int lane) {
            const uint4* const from = reinterpret_cast<const uint4*>(group) + lane % 4;
            const float bias = *reinterpret_cast<const float*>(group + 2 * GROUP_SIZE);
#pragma unroll
            for (int i = 0; i < 4; ++i) load(x[i], from + 4 * i, lane < 4);
            float c[2][4] = {};  // two chains of products, as one would wait for each MMA
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                product(c[0], w[chunk].x, w[chunk].y, x[2 * chunk]);
                product(c[1], w[chunk].z, w[chunk].w, x[2 * chunk + 1]);
            }
            return make_float2(c[0][0] + c[1][0] - bias, c[0][2] + c[1][2] - bias);
        }

        static __device__ __forceinline__ void product(float (&c)[4], uint32_t low, uint32_t high, uint4 b) {
            constexpr uint32_t FIRST = 0x000f000f, SECOND = 0x00f000f0;
            constexpr uint32_t ONES = 0x64086408, SIXTEENS = 0x64806480;  // as the codes' signs flip
            const uint32_t low8 = low >> 8, high8 = high >> 8;
            mma_f16(c, int4_pick(low, FIRST, ONES), int4_pick(high, FIRST, ONES), int4_pick(low, SECOND, SIXTEENS),
                    int4_pick(high, SECOND, SIXTEENS), b.x, b.y);
            mma_f16(c, int4_pick(low8, FIRST, ONES), int4_pick(high8, FIRST, ONES), int4_pick(low8, SECOND, SIXTEENS),
                    int4_pick(high8, SECOND, SIXTEENS), b.z, b.w);
        }
    };
};
