// Which experts have the largest logits: keys in the order of floats, and a key's place among others.
#pragma once
#include "common/types.cuh"

// The order of floats as one of unsigned integers above 0. Both zeros are equal.
__device__ __forceinline__ uint32_t order_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    const uint32_t key = bits ^ (bits & 0x80000000u ? 0xffffffffu : 0x80000000u);
    return key > 1u ? key : 1u;
}
__device__ __forceinline__ float key_value(uint32_t key) {
    return __uint_as_float(key ^ (key & 0x80000000u ? 0x80000000u : 0xffffffffu));
}

// How many of COUNT keys come before key number `index`: larger ones, and equal ones that lie before it.
template <int COUNT>
__device__ __forceinline__ int keys_before(const uint32_t* keys, int index, uint32_t key) {
    static_assert(COUNT % 4 == 0, "whole vectors");
    const uint4* const fours = reinterpret_cast<const uint4*>(keys);
    // Equal keys of its own four; those of earlier fours are more than key - 1.
    const uint4 own = fours[index / 4];
    int before = (index % 4 > 0 && own.x == key) + (index % 4 > 1 && own.y == key) + (index % 4 > 2 && own.z == key);
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
        const uint4 four = fours[i];
        const uint32_t limit = i < index / 4 ? key - 1 : key;
        before += (four.x > limit) + (four.y > limit) + (four.z > limit) + (four.w > limit);
    }
    return before;
}
