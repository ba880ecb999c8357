// Activations in tiles: the B operand of common/int4_gemm.cuh, so that a step of a product is one bulk copy.
//
// Halves [rows][K], K a multiple of 64, lie as [K / 64][rows rounded up to 8][64]: 128 bytes a row, in which piece c of 16
// bytes is at c ^ (row % 8), wgmma's 128-byte swizzle. Within 64 columns the order is the one in which an INT4 word gives
// up its codes: lane t of a quad holds columns 8 t .. 8 t + 7 of each 32 (abi_qwen2.cuh), and a product of 16 takes four of
// them, two as A's columns 2 t, 2 t + 1 and two as 2 t + 8, 2 t + 9. So of a column
//     32 b + 8 t + 4 s + 2 h + j    (b, s, h, j: 0 or 1; t: 0 to 3)
// the place is 32 b + 16 s + 8 h + 2 t + j. Pairs stay together; a piece has the pairs (b, s, h) of all four t.
#pragma once
#include "common/types.cuh"

constexpr int ACTIVATION_BLOCK = 64;  // columns that lie together

__device__ __forceinline__ int activation_rows(int rows) { return (rows + 7) / 8 * 8; }

// Piece of 16 bytes, of 8, in which a column of 64 lies, and the half within it.
__device__ __forceinline__ int activation_piece(int column) {
    return column / 32 * 4 + column % 8 / 2;  // (b, s, h)
}
__device__ __forceinline__ int activation_half(int column) { return column % 32 / 8 * 2 + column % 2; }

// In halves, from the beginning of all: a piece of columns 64 block .. 64 block + 63 of a row.
__device__ __forceinline__ int64_t activation_offset(int all_rows, int block, int row, int piece) {
    return (int64_t(block) * all_rows + row) * ACTIVATION_BLOCK + ((piece ^ (row & 7)) << 3);
}
