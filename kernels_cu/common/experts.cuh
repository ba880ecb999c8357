// What gate/up and down share: the groups of rows that chose the same expert, and the layout of an expert.
//
// A unit of gate/up is 8 inner columns: a tile whose rows 0..7 are the gate's rows 8u .. 8u + 7 and whose rows 8..15
// are the up's, so that a lane's accumulators hold gate and up of the same column. Its chunks are followed by its
// scales, HIDDEN / 128 pairs (gate, up) of floats, padded to 128 bytes.
#pragma once
#include "abi.cuh"

constexpr int MAX_GROUPS = ROWS * TOP_K > 64 ? ROWS * TOP_K : 64;
// inner = silu(gate) * up is stored as a half times 2^-4: it is the one activation that no norm bounds, and this
// keeps up to a million of it finite while the smallest step, 2^-20, stays far below what a sum of products shows.
constexpr float INNER_SCALE = 0.0625f;

struct Groups {
    int count;
    int expert[MAX_GROUPS];  // ascending
    int rows[MAX_GROUPS];    // bit r: row r chose it
};
