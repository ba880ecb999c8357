// What the kernels of prompt processing share with the host. `rows` counts tokens here, up to PREFILL_CHUNK; row i is
// at position start + i. `live` is not read.
#pragma once
#include "abi.cuh"

// cos and sin of position * inverse frequency.
struct PrefillRopeArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const double* inverse_frequencies;  // [ROTARY / 2]
    float* table;                       // [rows][ROTARY / 2][2]
    int start;
    int reserved;
};

struct PrefillQkvArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* normed;       // [rows][HIDDEN]
    const uint8_t* weights;  // as QkvArgs
    const float* scales;
    const float* q_norm;
    const float* k_norm;
    const float* rope;       // [rows][ROTARY / 2][2]
    f16* q;                  // [rows][Q_HEADS][HEAD_DIM]
    f16* k_cache;            // [KV_HEADS][slots / 64][64][HEAD_DIM], swizzled
    f16* v_cache;
    int slots;               // position p lies in slot (p - first_position) % slots
    int start;
    int first_position;      // multiple of 64
    int first_head;          // 0, or Q_HEADS for keys and values alone
};

// Copies positions start .. start + rows - 1 between a ring and the staging buffer, which holds first_position onwards.
struct PrefillRingArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    f16* k_ring;             // [KV_HEADS][ring_slots / 64][64][HEAD_DIM], swizzled
    f16* v_ring;
    f16* k_staged;           // [KV_HEADS][staged_slots / 64][64][HEAD_DIM], swizzled
    f16* v_staged;
    int ring_slots;
    int staged_slots;
    int start;
    int first_position;      // multiple of 64
    int to_ring;             // else from the ring
    int reserved;
};

struct PrefillAttentionArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* q;            // [rows][Q_HEADS][HEAD_DIM]
    const f16* k;            // [KV_HEADS][slots / 64][64][HEAD_DIM], swizzled; slot 0 is first_position
    const f16* v;
    const float* sink_k;     // [KV_HEADS][HEAD_DIM]
    f16* attended;           // [rows][Q_HEADS * HEAD_DIM]; untouched where splits > 1, and then
    float* partial_out;      // [splits][rows][Q_HEADS][HEAD_DIM], sum of 2^(s - max) v
    float* partial_stats;    // [splits][rows][Q_HEADS][2], max of s and sum of 2^(s - max), the sink in split 0
    int slots;
    int start;
    int first_position;      // multiple of 64
    int window;              // 0 for all
    float scale;
    int splits;              // of the keys, the grid's z
};

struct PrefillMergeArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* partial_out;
    const float* partial_stats;
    f16* attended;           // [rows][Q_HEADS * HEAD_DIM]
    int splits;
    int reserved;
};

// out = scale * in . weights, for OUT_ROWS weight rows.
struct PrefillLinearArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* in;           // [rows][IN]
    const uint8_t* weights;  // [ceil(OUT_ROWS / 16) tiles][chunks][512 bytes]
    const float* scales;     // [OUT_ROWS / 16][IN / 128]; null where weights are F16
    float* out;              // [rows][out_stride], at column first_column
    int64_t out_stride;
    int first_column;
    float scale;
};

struct PrefillRouterArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* normed32;   // [rows][HIDDEN]
    const float* router;     // [EXPERTS][HIDDEN]
    float* logits;           // [ROUTER_SPLITS][rows][EXPERTS], to be summed
};

struct PrefillRouteArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* logits;     // [ROUTER_SPLITS][rows][EXPERTS]
    int* expert_ids;         // [rows][TOP_K], largest weight first
    float* expert_weights;   // [rows][TOP_K]
};

// Up to 64 tokens of one expert.
struct PrefillTile {
    int expert;
    int first;               // of `pairs`, and row of `inner`
    int count;
    int reserved;
};

struct PrefillGroupArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const int* expert_ids;   // [rows][TOP_K]; null: row r's choice c is expert c, as in a dense layer
    int* pairs;              // [rows * TOP_K]: row * TOP_K + choice, by expert, then by row
    PrefillTile* tiles;      // by expert
    int* tile_count;
};

struct PrefillGateUpArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* normed;       // [rows][HIDDEN]
    const uint8_t* weights;  // as GateUpArgs
    const int* pairs;
    const PrefillTile* tiles;
    const int* tile_count;
    f16* inner;              // [rows * TOP_K][INNER] in the order of `pairs`, INNER_SCALE * silu(gate) * up
};

struct PrefillDownArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* inner;
    const uint8_t* weights;  // as DownArgs
    const float* scales;
    const int* pairs;
    const PrefillTile* tiles;
    const int* tile_count;
    float* out;              // [rows][TOP_K][HIDDEN]
};

// y = the sum over a row's choices, in their order, of weight * out.
struct PrefillCombineArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* out;             // [rows][TOP_K][HIDDEN]
    const float* expert_weights;  // [rows][TOP_K]; null: 1
    float* y;                     // [rows][HIDDEN]
};

// The draft's operand: [rms(embed(token), enorm) ; rms(hidden, hnorm)].
struct PrefillEntryArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const int* tokens;       // [rows], of the next position
    const bf16* table;       // [VOCAB_TOTAL][HIDDEN]
    const float* hidden;     // [rows][HIDDEN]
    const float* enorm;
    const float* hnorm;
    f16* out;                // [rows][2 * HIDDEN]
};

struct PrefillNormArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* in;         // [rows][HIDDEN]
    const float* norm;       // [HIDDEN]
    f16* normed;             // [rows][HIDDEN]
};
