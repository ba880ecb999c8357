// How many pieces the sums of an INT4 matrix's tile are in (abi_qwen2.cuh): cuq1/plan/qwen2_dims.pieces has the same split.
#pragma once
#include "common/types.cuh"

// A matrix of R rows and K columns, whose units BLOCKS blocks take in equal runs.
template <int R, int K, int BLOCKS>
struct Pieces {
    static constexpr int GROUPS = (K + 127) / 128;
    static constexpr int UNITS = (R + 15) / 16 * GROUPS;
    static constexpr int TAKERS = BLOCKS < UNITS ? BLOCKS : UNITS;
    static_assert(int64_t(UNITS) * TAKERS < (int64_t(1) << 31), "products below are of ints");
    static constexpr int TOUCHED = (div_up(UNITS, TAKERS) + GROUPS - 2) / GROUPS + 1;  // tiles that a block has units of
    static __device__ __forceinline__ constexpr int block_of(int unit) { return ((unit + 1) * TAKERS - 1) / UNITS; }
    // Of the tile that has this row.
    static __device__ __forceinline__ constexpr int of_row(int row) {
        const int first = row / 16 * GROUPS;
        return block_of(first + GROUPS - 1) - block_of(first) + 1;
    }
};
