// What the kernels of tools and laboratories share with the host: no engine launches them.
#pragma once
#include "abi.cuh"

// Stands for a kernel that makes partials, in tools/check_multicast.py: they go to this rank's memory of a multicast
// object, or into every rank's inbox.
struct MulticastSendArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* source;       // [rows][HIDDEN], this rank's partials
    float* out;                // [ROWS][HIDDEN], this rank's memory; with peers its own part of its inbox
    int* sent;                 // this rank's word of its own copy of [MAX_RANKS], counted up by each send from -1; or null
    const int64_t* peers;      // [RANKS], see common/exchange.cuh; or null
    int delay;                 // nanoseconds by which the last blocks are late
    int reserved;
};

// As MlpTailArgs, with y summed by the switch.
struct MulticastTailArgs {
    Fault* fault;
    const int* live;           // 1 at least, the same on all ranks
    int layer;
    int rows;
    const float* y;            // [ROWS][HIDDEN], a multicast address
    const int* sent;           // [MAX_RANKS], a multicast address: how far each rank is; or null
    float* unready;            // [ROWS][HIDDEN], this rank's memory of the exchange before, made NOT_READY; or null
    const float* h;            // [rows][HIDDEN]
    const float* ffn_out_norm; // [HIDDEN] or null
    const float* next_norm;    // [HIDDEN]
    float* residual;           // [rows][HIDDEN]: rms(out, next_norm) where normed_residual, else out
    f16* normed;               // [rows][HIDDEN], rms(out, next_norm)
    float ffn_scale;
    int normed_residual;
};

// What the exchange's probe keeps and finds, in device memory that is zero at first.
struct ExchangeFound {
    uint64_t compared;   // words of sums
    uint32_t done;       // exchanges in earlier graphs
    int wrong;           // words that have other bits than expected, and of the first of them:
    uint32_t exchange;
    int place, row, column;
    uint32_t got, expected;
};

// One exchange of a graph, on this process's places: numbers blockIdx.y on from `place`.
struct ExchangeProbeArgs {
    Fault* fault;
    const int* live;          // not read
    int layer;                // the exchange's number in its graph
    int rows;                 // of each exchange; 0: drawn from its number, 1 to ROWS
    float* inbox;             // [places here][INBOXES][RANKS][ROWS][HIDDEN]
    const int64_t* peers;     // [places here][RANKS], distances from a place's inbox to every place's
    const float* partials;    // [patterns][RANKS][ROWS][HIDDEN]
    const float* sums;        // [patterns][ROWS][HIDDEN], what has to come out
    ExchangeFound* found;
    uint64_t* times;          // [exchanges of the graph][blocks][2]: begun and summed, nanoseconds
    int patterns;             // an exchange's is drawn from its number
    int place;
    uint32_t seed;            // of what is drawn
    int pause;                // cycles that blocks pause at most, mostly; 0: never
    int behind;               // exchanges from one to the launch that re-arms it: 1. 2 is too late, 0 is never
    int skipped;              // the exchange in which a block of place `skipping` pushes nothing, or -1
    int skipping;
    int count;                // exchanges of the graph, where its last launch counts them
};

// Pushes a piece of partial results as a projection would, but the last word of each row after all else has come; and
// notes when these arrive. For measuring tails.
struct ExchangePushArgs {
    Fault* fault;
    const int* live;          // not read
    int layer;                // the exchange's number in its graph
    int rows;
    const float* partials;    // [rows][columns]
    float* own;               // this rank's part of its inbox
    const int64_t* peers;     // [RANKS]
    float* signs;             // [INBOXES][RANKS][ROWS] in the inbox: a copy of a row's last word, stored just before it;
                              // or null: all words at once
    uint64_t* times;          // [exchanges of the graph][warps][2], nanoseconds: the last poll of a warp that missed a
                              // sign, when it was issued, and the one that found all, when it was back
    int columns;
    int place;
    int pause;                // cycles before the last words
    int reserved;
};

// Reads `count` 16-byte words once, to measure what memory delivers.
struct BandwidthArgs {
    uint4* data;
    uint32_t* out;  // [blocks]
    uint64_t count;
};
