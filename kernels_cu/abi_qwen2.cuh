// What only the kernels of Qwen2 models share with the host. One token a step: `rows` is 1 in decoding, and `live` is
// null.
//
// INT4 matrices [R][K] lie as units of 1,056 bytes, a tile of 16 rows after the other, the groups of 128 of K in order
// within a tile: 1,024 bytes of codes, then the 16 rows' scales as halves. With g = lane / 4 and t = lane % 4, lane's 16
// bytes of the chunk of 512 bytes that has k = 64 c .. 64 c + 63 are words of NANOQWEN.md (eight codes each):
//   word 0: row g,     k = 64 c + 8 t .. + 7        word 1: row g + 8, the same k
//   word 2: row g,     k = 64 c + 32 + 8 t .. + 7   word 3: row g + 8, the same k
// Rows beyond R and columns beyond K are codes 0 with scales 0. q, k and v are one matrix; gate and up are one in whose
// tiles 8 rows of gate precede the same 8 of up. PADDED(n) is the next multiple of 128.
//
// Sums over K that several blocks share are left as pieces [PIECES][R] of floats: a tile's units are a run of all units,
// which blocks take in equal parts (Split in common/int4.cuh), and a tile's first block writes piece 0 of its rows, the
// next piece 1. Whoever reads adds as many as that tile has, in order.
#pragma once
#include "abi.cuh"

constexpr int PAGE = 16;  // positions of a page of the KV cache
constexpr int QWEN2_LAYERS = 48;  // the most of a launch, whose arguments are to fit 4 KB

// Where a page's row has its piece of 16 bytes number `piece`: pages come into shared memory by bulk copies as they are,
// and ldmatrix is to find eight rows' pieces in different banks.
__device__ __forceinline__ int page_piece(int row, int piece) { return piece ^ (row & 7); }

// Free pages of the KV cache, in device memory.
struct Pages {
    int free;                // free_pages[0 .. free - 1] are free; the last one is taken next
    int reserved[3];
};

// residual = table[token]; gives the position a page where it has none.
struct Qwen2EmbedArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const int* tokens;       // [1], State.tokens
    const int* positions;    // [1], State.positions
    const f16* table;        // [VOCAB][HIDDEN]
    float* residual;         // [HIDDEN]
    Pages* pages;
    int* page_table;         // [max_pages]: the page of positions 16 i .. 16 i + 15, or -1
    const int* free_pages;
    int max_pages;
    int unready_pieces;      // of 16 bytes
    uint4* unready;          // what blocks of later launches tell one another, to be made NOT_READY, or null
};

// x = residual + pieces of a projection before; rms(x, norm); then q, k, v: pieces [QKV_PIECES][(Q_HEADS + 2 KV_HEADS) HEAD_SIZE].
struct Qwen2QkvArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* residual;   // [HIDDEN]
    const float* pieces;     // [DOWN_PIECES][HIDDEN], or null in layer 0
    const f16* norm;         // [HIDDEN]
    const uint8_t* weights;
    float* residual_out;     // [HIDDEN]: x. Not where residual lies
    float* out;
};

// Adds pieces and biases, applies RoPE, appends K and V to their page, attends to all positions up to this one.
struct Qwen2AttentionArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* pieces;     // [QKV_PIECES][(Q_HEADS + 2 KV_HEADS) HEAD_SIZE]
    const f16* bias;         // [(Q_HEADS + 2 KV_HEADS) HEAD_SIZE]
    const int* positions;    // [1]
    const double* inverse_frequencies;  // [HEAD_SIZE / 2]: theta ** (-2i / HEAD_SIZE)
    const int* page_table;
    f16* k_pages;            // [pages][KV_HEADS][PAGE][HEAD_SIZE] of the layer, a row's pieces at page_piece
    f16* v_pages;
    f16* attended;           // [PADDED(Q_HEADS HEAD_SIZE)], zeros beyond; written by the short form
    float* partial_out;      // [KV_HEADS][splits][GROUP][HEAD_SIZE]: the long form's, sum of 2^(s - max) v
    float* partial_max;      // [KV_HEADS][GROUP][splits], about the max of s = log2(e) q.k / sqrt(HEAD_SIZE)
    float* partial_sum;      // [KV_HEADS][GROUP][splits], sum of 2^(s - max); 0 where a split has no positions
    int splits;
    int reserved;
};

struct Qwen2CombineArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* partial_out;
    const float* partial_max;
    const float* partial_sum;
    f16* attended;
    int splits;
    int reserved;
};

// A projection of halves, as pieces: o_proj of attended, down of inner.
struct Qwen2ProjectionArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* in;           // [PADDED(K)]
    const uint8_t* weights;
    float* out;              // [PIECES][HIDDEN]
    float scale;             // of the result: 1, or 1 / INNER_SCALE for down
    int reserved;
};

// x = residual + pieces of o_proj; rms(x, norm); then INNER_SCALE * silu(gate) * up.
struct Qwen2GateUpArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* residual;   // [HIDDEN]
    const float* pieces;     // [O_PIECES][HIDDEN]
    const f16* norm;         // [HIDDEN]
    const uint8_t* weights;
    float* residual_out;     // [HIDDEN]: x. Not where residual lies
    f16* inner;              // [PADDED(INNER)], zeros beyond
};

// o_proj, the MLP and the next layer's q, k and v in one launch. Words of o_pieces, inner and down_pieces are NOT_READY until
// they are stored.
struct Qwen2ChainArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* attended;            // [PADDED(Q_HEADS HEAD_SIZE)]
    const uint8_t* o_weights;
    const uint8_t* gate_up_weights;
    const uint8_t* down_weights;
    const uint8_t* qkv_weights;     // of the next layer, or null in the last one
    const f16* post_norm;           // [HIDDEN]
    const f16* next_norm;           // [HIDDEN], the next layer's input_norm, or null
    const float* residual;          // [HIDDEN]
    float* residual_out;            // [HIDDEN]: x with the MLP's output, or without it in the last layer. Not residual
    float* o_pieces;                // [O_PIECES][HIDDEN]
    f16* inner;                     // [PADDED(INNER)], INNER_SCALE * silu(gate) * up
    float* down_pieces;             // [DOWN_PIECES][HIDDEN]
    float* qkv_pieces;              // [QKV_PIECES][(Q_HEADS + 2 KV_HEADS) HEAD_SIZE], or null
    uint4* unready;                 // what the next layer's launch stores, to be made NOT_READY, or null
    int unready_pieces;             // of 16 bytes
    int reserved;
};

// All layers, or a run of them, in one launch: from the residual to the residual. Words of the last six arrays are NOT_READY
// before the launch; of those, what the last layer stores in rows_handed, inner and down_pieces stays.
struct Qwen2LayersArgs {
    Fault* fault;
    const int* live;
    int layer;                      // the first one's number
    int rows;
    const uint8_t* qkv_weights[QWEN2_LAYERS];
    const uint8_t* o_weights[QWEN2_LAYERS];
    const uint8_t* gate_up_weights[QWEN2_LAYERS];
    const uint8_t* down_weights[QWEN2_LAYERS];
    const f16* input_norm[QWEN2_LAYERS];  // [HIDDEN]
    const f16* post_norm[QWEN2_LAYERS];   // [HIDDEN]
    const f16* bias[QWEN2_LAYERS];        // [(Q_HEADS + 2 KV_HEADS) HEAD_SIZE]
    f16* k_pages[QWEN2_LAYERS];           // [pages][KV_HEADS][PAGE][HEAD_SIZE], a row's pieces at page_piece
    f16* v_pages[QWEN2_LAYERS];
    const int* positions;           // [1]
    const double* inverse_frequencies;  // [HEAD_SIZE / 2]: theta ** (-2i / HEAD_SIZE)
    const int* page_table;
    const float* residual;          // [HIDDEN]
    float* residual_out;            // [HIDDEN], behind the last layer; may be where residual lies
    float* qkv_pieces;              // [QKV_PIECES][(Q_HEADS + 2 KV_HEADS) HEAD_SIZE]
    uint4* partials;                // [KV_HEADS][SPANS] records of GROUP HEAD_SIZE halves, then 8 pairs of floats
    float* o_pieces;                // [PARTS][HIDDEN]
    float* rows_handed;             // [2][2][HIDDEN]: the residual before the MLP and behind it, of layers in turns
    f16* inner;                     // [2][PADDED(INNER)], INNER_SCALE * silu(gate) * up, of layers in turns
    float* down_pieces;             // [2][PARTS][DOWN_PIECES][HIDDEN], of layers in turns
    int layers;                     // 1 .. QWEN2_LAYERS
    int reserved;
};

// x = residual + pieces of the last down, if given; rms(x, norm), as lm_head reads it.
struct Qwen2NormArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* residual;   // [HIDDEN]
    const float* pieces;     // [DOWN_PIECES][HIDDEN], or null
    const f16* norm;         // [HIDDEN]
    f16* normed;             // [PADDED(HIDDEN)], zeros beyond: row 0 of [ROWS][PADDED(HIDDEN)]
};

// Logits of an INT4 matrix.
struct Qwen2HeadArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* normed;       // [PADDED(HIDDEN)]
    const uint8_t* weights;
    float* logits;           // [VOCAB]
};

// ---- Prompt processing: `rows` tokens at positions start, start + 1, ... ----
//
// "In tiles": activations [rows][PADDED(K)] of halves, rows rounded up to a multiple of 8, in the order that the tensor
// cores read (common/activations.cuh).

struct Qwen2PrefillEmbedArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const int* tokens;       // [rows]
    const f16* table;        // [VOCAB][HIDDEN]
    float* residual;         // [rows][HIDDEN]
    Pages* pages;
    int* page_table;
    const int* free_pages;
    int max_pages;
    int start;
};

struct Qwen2PrefillNormArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* residual;   // [rows][HIDDEN]
    const f16* norm;         // [HIDDEN]
    f16* normed;             // [rows][PADDED(HIDDEN)], zeros beyond HIDDEN; in tiles, or as it stands for lm_head
};

struct Qwen2PrefillQkvArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* normed;       // [rows][PADDED(HIDDEN)] in tiles
    const uint8_t* weights;
    const f16* bias;         // [(Q_HEADS + 2 KV_HEADS) HEAD_SIZE]
    const float* rope;       // [rows][HEAD_SIZE / 2][2], cos and sin (prefill_rope)
    const int* page_table;
    f16* q;                  // [rows][Q_HEADS][HEAD_SIZE], after RoPE, not scaled
    f16* k_pages;
    f16* v_pages;
    int start;
    int reserved;
};

struct Qwen2PrefillAttentionArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* q;
    const int* page_table;
    const f16* k_pages;
    const f16* v_pages;
    f16* attended;           // [rows][PADDED(Q_HEADS HEAD_SIZE)] in tiles, zeros beyond
    int start;
    int reserved;
};

// residual += scale * in W: o_proj and down.
struct Qwen2PrefillProjectionArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* in;           // [rows][PADDED(K)] in tiles
    const uint8_t* weights;
    float* residual;         // [rows][HIDDEN]
    float scale;
    int reserved;
};

struct Qwen2PrefillGateUpArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* normed;       // [rows][PADDED(HIDDEN)] in tiles
    const uint8_t* weights;
    f16* inner;              // [rows][PADDED(INNER)] in tiles, INNER_SCALE * silu(gate) * up, zeros beyond INNER
};
