// What the kernels of a pass of decoding share with the host: of the target's layers and head, and the draft's entry.
#pragma once
#include "abi.cuh"

constexpr int ROUTED_COPIES = 4;    // of what the attention tail tells the experts, so that not all read one line

// The target's entry: x = table[token]; residual = x, or the normalised x for a layer without sandwich norms.
struct EmbedArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const int* tokens;       // [rows]
    const bf16* table;       // [VOCAB_TOTAL][HIDDEN]
    const float* norm;       // attention_norm of the first layer, [HIDDEN]
    float* residual;         // [rows][HIDDEN]
    f16* normed;             // [rows][HIDDEN], rms(x, norm)
    int normed_residual;
    int reserved;
};

// q, k, v of a layer: projection, per-head norm, RoPE, and the KV write.
struct QkvArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* normed;       // [rows][HIDDEN]
    const uint8_t* weights;  // heads q, k, v; 8 tiles a head (see weights.py): [heads][8][chunks][512 bytes]
    const float* scales;     // [heads][HIDDEN / 128]; null where weights are F16
    const float* q_norm;     // [HEAD_DIM]
    const float* k_norm;     // [HEAD_DIM]
    const int* positions;    // [rows]
    const double* inverse_frequencies;  // [ROTARY / 2]: theta ** (-2i / ROTARY)
    f16* q;                  // [rows][Q_HEADS][HEAD_DIM], after norm and RoPE, not scaled
    f16* k_cache;            // [KV_HEADS][slots / 64][64][HEAD_DIM], swizzled (see common/kv.cuh)
    f16* v_cache;
    int slots;               // position p lies in slot p % slots
    float entry_scale;
    // Where the kernel has pieces, it does the norm before the projection: x = base + entry_scale * (their sum).
    const float* base;       // [rows][HIDDEN], written two launches ago or more; null where x is the sum
    const float* pieces;     // [ENTRY_PIECES][ROWS][HIDDEN]
    const float* norm;       // [HIDDEN]
    float* residual;         // [rows][HIDDEN]: x * norm where inverse is given, else x
    float* inverse;          // [rows], 1 / rms(x): residual times that is rms(x, norm); or null
    int polled;              // pieces come from peers, NOT_READY before
    int reserved;
};

// One split of the sequence, for all rows and heads of a KV head.
struct AttentionArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* q;            // [rows][Q_HEADS][HEAD_DIM]
    const f16* k_cache;
    const f16* v_cache;
    const int* positions;    // [rows]
    float* partial_out;      // [KV_HEADS][splits][ROWS * GROUP][HEAD_DIM], sum of 2^(s - max) v
    float* partial_max;      // [KV_HEADS][ROWS * GROUP][splits], about the max of s = scale log2(e) q.k
    float* partial_sum;      // [KV_HEADS][ROWS * GROUP][splits], sum of 2^(s - max)
    int slots;
    int window;              // positions that a query sees, its own included; 0 for all
    int splits;
    float scale;
    int written;             // rows of `positions` whose keys and values the predecessor writes: `rows`, or ROWS at the
    int reserved;            // draft's depth 0, where older rows than the one that is computed are settled
};

// Attention of a short extent, all splits of it and the sink together.
struct ShortAttentionArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* q;            // [rows][Q_HEADS][HEAD_DIM]
    const f16* k_cache;
    const f16* v_cache;
    const int* positions;    // [rows]
    const float* sink_k;     // [KV_HEADS][HEAD_DIM]
    float* attended32;       // [rows][Q_HEADS * HEAD_DIM]
    f16* attended;           // the same, rounded
    int slots;
    int window;
    int written;             // as AttentionArgs
    float scale;
};

struct CombineArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* q;
    const float* sink_k;     // [KV_HEADS][HEAD_DIM]
    const int* positions;
    const float* partial_out;
    const float* partial_max;
    const float* partial_sum;
    float* attended32;       // [rows][Q_HEADS * HEAD_DIM]
    f16* attended;           // the same, rounded
    int window;
    int splits;
    float scale;
    int reserved;
};

// The rank's part of the O projection, and of the router logits (folded routing).
struct OProjArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* attended;     // [rows][Q_HEADS * HEAD_DIM]
    const float* attended32;
    const float* residual;   // [rows][HIDDEN]
    const uint8_t* weights;  // [HIDDEN / 16 tiles][chunks][512 bytes]
    const float* scales;     // [HIDDEN / 16][Q_HEADS]; null where weights are F16
    const float* fold;       // [EXPERTS][Q_HEADS * HEAD_DIM + SLICE]: router diag(ffn_norm) diag(attn_out_norm) W_o,
                             // then the columns slice_start .. + SLICE of router diag(ffn_norm); null in a dense layer
    float* out;              // [rows][HIDDEN]
    float* router_attended;  // [rows][EXPERTS], fold's first part times attended32
    float* router_residual;  // [rows][EXPERTS], fold's second part times residual's slice
    int slice_start;
    int reserved;
    const float* inverse;    // [rows], multiplies residual; written with it; or null
    const int64_t* peers;    // [RANKS], see common/exchange.cuh: out and the logits go to every rank's inbox; or null
};

// o summed over ranks -> attn_out_norm -> residual -> feed_forward_norm -> routing.
struct AttnTailArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* o;                // [ranks][max(rows, ROWS)][HIDDEN] partials; with RANKS > 1 this rank's inbox
    const float* router_attended;  // [ranks][ROWS][EXPERTS]; null in a dense layer
    const float* router_residual;  // [ranks][ROWS][EXPERTS]
    const float* residual;         // [rows][HIDDEN]
    const float* attn_out_norm;    // [HIDDEN]
    const float* ffn_norm;         // [HIDDEN]
    float* h;                      // [rows][HIDDEN]
    f16* normed;                   // [rows][HIDDEN], rms(h, ffn_norm)
    uint8_t* codes;                // [rows][HIDDEN] E4M3 of rms(h, ffn_norm) / code_scale, or null
    float* code_scale;             // [rows], the row's largest magnitude / 448
    int* expert_ids;               // [ROWS][TOP_K], largest weight first
    float* expert_weights;         // [ROWS][TOP_K]
    float* inner_max;              // [MAX_GROUPS][ROWS] to clear, or null
    const int* forced_ids;         // [ROWS][TOP_K] that replace the routing (laboratory), or null
    int ranks;
    float attn_scale;
    float* normed32;               // [rows][HIDDEN], rms(h, ffn_norm) for a router that is not folded, or null
    const float* inverse;          // [rows], multiplies residual; written with it; or null
    int* routed;                   // [ROUTED_COPIES][ROWS][TOP_K], expert ids plus 1 where zeros were, or null
    f16* inner;                    // [MAX_GROUPS][ROWS][INNER] to clear for gate_up, or null
    int polled;                    // o and the router's parts were NOT_READY before o_proj wrote them, or peers pushed them
};

// The router by itself, for routing that is not folded into o_proj and the attention tail (laboratory).
struct RouterArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* normed32;   // [rows][HIDDEN]
    const float* router;     // [EXPERTS][HIDDEN]
    float* logits;           // [ROUTER_SPLITS][ROWS][EXPERTS], to be summed
};

struct RouteArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* logits;     // [ROUTER_SPLITS][ROWS][EXPERTS]
    int* expert_ids;         // as AttnTailArgs, and so the others
    float* expert_weights;
    int* routed;
    const int* forced_ids;
};

// Gate and up of the chosen experts, SiLU, product. Groups are the distinct experts that live rows chose, by
// ascending id; an expert's weights are read once. dense_groups > 0: no routing, that many groups of all rows.
struct GateUpArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* normed;         // [rows][HIDDEN]
    const uint8_t* codes;      // [rows][HIDDEN] and
    const float* code_scale;   // [rows], where activations are FP8
    const uint8_t* weights;    // [experts][INNER / 8 units][unit bytes], see experts.cuh
    const int* expert_ids;     // [ROWS][TOP_K]
    f16* inner;                // [MAX_GROUPS][ROWS][INNER], INNER_SCALE * silu(gate) * up of the rows that chose it
    float* inner_max;          // [MAX_GROUPS][ROWS], the largest magnitude of inner, where activations are FP8
    int dense_groups;
    int reserved;
    const int* routed;         // as AttnTailArgs: read before the predecessor's end; or null
};

struct DownArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* inner;
    const float* inner_max;
    const uint8_t* weights;      // [experts][HIDDEN / 16 tiles][INNER / 32 chunks][512 bytes]
    const float* scales;         // [experts][HIDDEN / 16][INNER / DOWN_SCALE_K]; null where weights are F16
    const int* expert_ids;       // [ROWS][TOP_K]
    const float* expert_weights; // [ROWS][TOP_K]
    float* out;                  // [rows][HIDDEN]
    int dense_groups;
    int reserved;
    int* routed;                 // to zero, or null
    float* unready;              // the next layer's o and router's parts, to be made NOT_READY, or null
    int unready_pieces;          // of 16 bytes
    int polled;                  // inner was zero before gate_up wrote it
    const int64_t* peers;        // [RANKS]: out goes to every rank's inbox; or null
};

// y summed over ranks -> (ffn_out_norm) -> residual -> the next layer's attention_norm, or a final norm.
struct MlpTailArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    float* y;                  // [ranks][max(rows, ROWS)][HIDDEN]; with RANKS > 1 this rank's inbox, which is made
                               // NOT_READY again as it is read
    const float* h;            // [rows][HIDDEN]
    const float* ffn_out_norm; // [HIDDEN] or null
    const float* next_norm;    // [HIDDEN]
    float* residual;           // [rows][HIDDEN]: rms(out, next_norm) where normed_residual, else out
    f16* normed;               // [rows][HIDDEN], rms(out, next_norm)
    int ranks;
    float ffn_scale;
    int normed_residual;
    int reserved;
};

struct LmHeadArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const f16* normed;       // [rows][HIDDEN]
    const uint8_t* weights;  // [ceil(VOCAB / 16) tiles][chunks][512 bytes]: F16, or E4M3 where FP8_HEAD
    float* logits;           // [ROWS][VOCAB]
    float scale;             // logit_scale
    int reserved;
    const float* scales;     // of each row of an E4M3 matrix
};

// The draft's entry: eh_proj([rms(embed(token), enorm) ; rms(hidden, hnorm)]), the rank's output rows, in pieces of K.
struct EhProjArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const int* tokens;         // [rows], State.draft_tokens
    const int* hidden_rows;    // [rows], State.draft_hidden
    const bf16* table;         // [VOCAB_TOTAL][HIDDEN]
    const float* hidden;       // the target's, [ROWS][HIDDEN], after its final norm
    const float* draft_hidden; // the draft's, [ROWS][HIDDEN]
    const float* enorm;        // [HIDDEN]
    const float* hnorm;        // [HIDDEN]
    const uint8_t* weights;    // F16, [EH_ROWS / 16 tiles][2 * HIDDEN / 16 chunks][512 bytes]
    float* out;                // [EH_SPLITS][ROWS][HIDDEN]; the rank's rows from first_row on
    int first_row;
    int reserved;
    const int64_t* peers;      // [RANKS]: out goes to every rank's inbox; or null
};

// Makes an inbox NOT_READY where no later kernel of the graph does.
struct RearmArgs {
    Fault* fault;
    const int* live;           // not read
    int layer;
    int rows;
    uint4* target;
    int pieces;                // of 16 bytes
    int reserved;
};
