// What the kernels that pack weights, or draw random ones, share with the host.
#pragma once
#include "abi.cuh"

// Whole tiles of a weight matrix, from rows to the order of common/mma.cuh.
struct PackArgs {
    const uint8_t* source;   // [tiles][16][k] elements of `kind`, then [tiles][tail] bytes
    uint8_t* target;         // [tiles][chunks, then `tail` bytes]
    uint64_t* report;        // the least key of what is wrong: key + (row / 8 << 8) + 0 not finite, 1 beyond a half
    uint64_t key;
    int tiles;
    int k;
    int kind;                // 0 E4M3, 1 BF16, 2 FP32
    int tail;
    int fp8;                 // the target is E4M3, which only E4M3 becomes, else F16
    int reserved;
    float* scales;           // [tiles][16] of rows that are quantised
};

// Folded routing of a layer, see OProjArgs.fold.
struct FoldArgs {
    const float* router;         // [experts][hidden]
    const float* ffn_norm;       // [hidden]
    const float* attn_out_norm;  // [hidden]
    const uint8_t* o;            // OProjArgs.weights
    const float* o_scales;       // OProjArgs.scales
    float* fold;                 // [experts][q_heads * HEAD_DIM + slice]
    int experts;
    int hidden;
    int q_heads;
    int slice;
    int slice_start;
    int reserved;
};

// Random numbers for benchmarks: `runs` runs of `run` elements, `stride` bytes apart.
struct FillArgs {
    uint8_t* target;
    uint64_t runs;
    uint64_t run;
    uint64_t stride;
    uint64_t seed;
    int kind;                // 0 E4M3 codes, any but NaN; else normal: 1 BF16, 2 FP32, 3 F16
    float mean;
    float deviation;
    int reserved;
};
