// Fixed-width names and 16-bit floats without any header, so that a kernel's hash covers all of its source.
#pragma once

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif

// An IEEE half as its bits: arithmetic happens in FP32 or in the tensor cores.
typedef uint16_t f16;
// A bfloat16 as its bits, for tables that are copied from the checkpoint as they are.
typedef uint16_t bf16;

constexpr int ROWS = 8;        // rows of a verification pass: N of the MMA
constexpr int HEAD_DIM = 128;  // the only head size that the kernels are written for
constexpr int KV_TILE = 64;    // positions in a tile of the KV cache
constexpr int WARP = 32;

__device__ __forceinline__ float f16_to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ __forceinline__ f16 float_to_f16(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// lo in bits 0..15, hi in bits 16..31: the order in which they lie in memory.
__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

__device__ __forceinline__ float2 unpack_f16(uint32_t x) {
    return make_float2(f16_to_float(uint16_t(x)), f16_to_float(uint16_t(x >> 16)));
}

__device__ __forceinline__ float bf16_to_float(bf16 x) { return __uint_as_float(uint32_t(x) << 16); }

// Two E4M3 codes as two halves: exact, since every E4M3 value is a half.
__device__ __forceinline__ uint32_t e4m3_to_f16x2(uint16_t codes) {
    uint32_t y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(codes));
    return y;
}

// Two floats as E4M3 codes, round to nearest even, saturating at 448: lo in bits 0..7.
__device__ __forceinline__ uint16_t float_to_e4m3x2(float lo, float hi) {
    uint16_t y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
    return y;
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

__device__ __host__ __forceinline__ constexpr int min_int(int a, int b) { return a < b ? a : b; }

// Rows to compute (abi.cuh), where *live may lie in L1 as it was before an older launch wrote it.
__device__ __forceinline__ int live_before(const int* live, int rows) {
    return live != nullptr ? min_int(rows, __ldcg(live)) : rows;
}
__device__ __host__ __forceinline__ constexpr int max_int(int a, int b) { return a > b ? a : b; }
__device__ __host__ __forceinline__ constexpr int div_up(int a, int b) { return (a + b - 1) / b; }
