// What gate/up and down share: the groups of rows that chose the same expert, and the layout of an expert.
//
// A unit of gate/up is 8 inner columns: a tile whose rows 0..7 are the gate's rows 8u .. 8u + 7 and whose rows 8..15
// are the up's, so that a lane's accumulators hold gate and up of the same column. Its chunks are followed by its
// scales, HIDDEN / 128 pairs (gate, up) of floats, padded to 128 bytes.
#pragma once
#include "common/inner.cuh"
#include "common/types.cuh"

constexpr int MAX_GROUPS = ROWS * TOP_K > 64 ? ROWS * TOP_K : 64;

struct Groups {
    int count;
    int expert[MAX_GROUPS];  // ascending
    int rows[MAX_GROUPS];    // bit r: row r chose it
};

#ifdef EXPERTS
// A pair is one of the choices: row pair / TOP_K, place pair % TOP_K. A lane holds pairs lane, lane + 32, ...
constexpr int PAIRS = ROWS * TOP_K;
constexpr int LANE_PAIRS = (PAIRS + WARP - 1) / WARP;
constexpr int EXPERT_WORDS = (EXPERTS + 31) / 32;

// A value of an earlier launch, past L1: a prologue that is older than the value may share a multiprocessor, and an L1
// line, with a kernel that read what lay there before.
__device__ __forceinline__ int load_past_l1(const int* address) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

__device__ __forceinline__ int live_rows(const int* live, int rows) {
    return live == nullptr ? rows : max_int(0, min_int(rows, load_past_l1(live)));
}

__device__ __forceinline__ uint32_t warp_or(uint32_t x) {
    uint32_t y;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// The lane's choices; all loads leave before the first is looked at.
__device__ __forceinline__ void load_choices(const int* expert_ids, int lane, int (&id)[LANE_PAIRS]) {
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j) {
        const int pair = lane + j * WARP;
        id[j] = pair < PAIRS ? load_past_l1(expert_ids + pair) : -1;
    }
}

// Numbers the distinct experts of live rows in ascending order: count and expert[] of `groups` (in shared memory), and
// the group of each of the lane's pairs, -1 for a dead row's. A whole warp calls it; a __syncwarp() must follow.
// Experts are bits of a mask that every lane holds, so a group's number is a population count: no sort, no scan.
__device__ __forceinline__ void number_groups(const int (&id)[LANE_PAIRS], int rows, int lane, Groups& groups,
                                              int (&group)[LANE_PAIRS]) {
    uint32_t chosen[EXPERT_WORDS];
    int count = 0;
#pragma unroll
    for (int w = 0; w < EXPERT_WORDS; ++w) {
        uint32_t mine = 0;
#pragma unroll
        for (int j = 0; j < LANE_PAIRS; ++j) {
            const bool live = lane + j * WARP < rows * TOP_K && uint32_t(id[j]) < EXPERTS;
            if (live && id[j] / 32 == w) mine |= 1u << (id[j] & 31);
        }
        chosen[w] = warp_or(mine);
        count += __popc(chosen[w]);
    }
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j) {
        const bool live = lane + j * WARP < rows * TOP_K && uint32_t(id[j]) < EXPERTS;
        int below = 0;
#pragma unroll
        for (int w = 0; w < EXPERT_WORDS; ++w) {
            const uint32_t lower = id[j] / 32 > w ? chosen[w] : chosen[w] & ((1u << (id[j] & 31)) - 1);
            if (id[j] / 32 >= w) below += __popc(lower);
        }
        group[j] = live ? below : -1;
        if (live) groups.expert[below] = id[j];  // rows that agree write the same
    }
    if (lane == 0) groups.count = count;
}

// rows[] of groups that number_groups() has made; rows[] was zero. A whole warp calls it.
__device__ __forceinline__ void mark_rows(const int (&group)[LANE_PAIRS], int lane, Groups& groups) {
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j) {
        if (group[j] >= 0) atomicOr(&groups.rows[group[j]], 1 << ((lane + j * WARP) / TOP_K));
    }
}

// The groups of a dense layer: every live row in all of them. A whole warp calls it.
__device__ __forceinline__ void dense_groups_of(int count, int rows, int lane, Groups& groups) {
    for (int group = lane; group < count; group += WARP) {
        groups.expert[group] = group;
        groups.rows[group] = (1 << rows) - 1;
    }
    if (lane == 0) groups.count = rows > 0 ? count : 0;
}
#endif
