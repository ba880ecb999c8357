// A warp's ring of INT4 units, runs of them, and tokens that come as halves: what streams of one matrix (common/int4_stream.cuh)
// and of several (qwen2_chain.cu) share.
//
// Includers define WARPS, STAGE_UNITS (of a copy), STAGES (of a warp's ring) and TOKEN, what the token is multiplied as:
// Halves or Digits.
#pragma once
#include "common/copy.cuh"
#include "common/int4.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int STAGE_BYTES = STAGE_UNITS * UNIT_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int TOKEN_AT = WARPS * RING_BYTES;  // where the token begins in dynamic shared memory, behind the rings

struct Run {
    int first, units;
};

// Part `part` of `parts` equal ones.
__device__ __forceinline__ Run part_of(Run run, int part, int parts) {
    const int first = run.units * part / parts;
    return Run{run.first + first, run.units * (part + 1) / parts - first};
}

// Eight neighbouring halves, as TOKEN::store takes them.
__device__ __forceinline__ void store_halves(uint8_t* token, int column, uint4 x, bool there) {
    const float2 a = unpack_f16(x.x), b = unpack_f16(x.y), c = unpack_f16(x.z), d = unpack_f16(x.w);
    const float eight[8] = {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
    TOKEN::store(token, column, eight, there);
}
