// Every structure that a kernel shares with the host. cuq1/cuda/abi.py reads them for ctypes, so a field is a number of
// four or eight bytes, a pointer, or an array of such numbers; a test compiles the offsets of each against ctypes'.
//
// Fields that all kernels begin with:
//   fault  where to report what can't go on (host memory), or null
//   live   null, or where the number of rows to compute is read (after pdl_wait): `rows` at most, 0 ends the launch
//   layer  the layer's number, for reports; the draft's layer is -1
//   rows   rows to compute, 1 to ROWS; rows beyond them are neither read as tokens nor written
#pragma once
#include "common/types.cuh"

constexpr int MAX_DRAFTS = 7;
constexpr int MIN_AUTO_DRAFTS = 3;
constexpr int MAX_TOP_K = 32;       // candidates that are kept on the device; a larger top_k is sampled on the host
constexpr int FEATURE_TOP_K = 20;   // what the stop rule sees of a greedy request's draft
constexpr int FEATURES = 6;

constexpr int MAX_STOPS = 32;       // stop tokens that the device looks for; where there are more, the host does
constexpr int LOG_RECORDS = 256;    // records of the result log; a power of two
constexpr int GRAPHS = 32;          // handles of a request's graphs: see Loop

enum FaultKind {
    FAULT_NONE = 0,
    FAULT_NOT_FINITE = 1,
    FAULT_COPY = 2,
    FAULT_TOKEN = 3,
    FAULT_ROUTING = 4,
    FAULT_RESULT = 5,
    FAULT_PEER = 6,  // what another rank's kernel was to push never came; detail: that rank's place
    FAULT_PAGES = 7  // a position that no page of the KV cache is left for; detail: the position
};

constexpr int MAX_RANKS = 8;
constexpr int INBOXES = 3;          // buffers that an exchange's uses take in turn (common/exchange.cuh)
constexpr int STATUS_WORDS = 4;     // of a rank, see StatusWord

constexpr int ROUTED_COPIES = 4;    // of what the attention tail tells the experts, so that not all read one line

enum KernelId {
    KERNEL_EMBED = 1,
    KERNEL_QKV = 2,
    KERNEL_ATTENTION = 3,
    KERNEL_COMBINE = 4,
    KERNEL_O_PROJ = 5,
    KERNEL_ATTN_TAIL = 6,
    KERNEL_GATE_UP = 7,
    KERNEL_DOWN = 8,
    KERNEL_MLP_TAIL = 9,
    KERNEL_LM_HEAD = 10,
    KERNEL_TOP_K = 11,
    KERNEL_ACCEPT = 12,
    KERNEL_DRAFT_SAMPLE = 13,
    KERNEL_EH_PROJ = 14,
    KERNEL_PREFILL = 16,
    KERNEL_CONTROL = 17,
    KERNEL_EXCHANGE = 18,
    KERNEL_ROUTER = 19,
    KERNEL_NORM = 20
};

// Why a chain of graphs ended. PAUSED: the log is full, or the reader too far behind; the host launches again.
enum EndReason {
    END_NONE = 0,
    END_STOP = 1,
    END_LENGTH = 2,
    END_CANCELLED = 3,
    END_FAULT = 4,
    END_PAUSED = 5,
    END_LAUNCH = 6
};

// In host memory that the device writes. what: FaultKind, or -1 while it is being written.
struct Fault {
    int what;
    int kernel;
    int layer;
    int detail;
};

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

// What each rank tells the others with a round's candidates, so that all of them end a chain at the same round: the
// wishes of all hosts count, and what any rank's kernels have reported.
enum StatusWord {
    STATUS_ENDED = 0,  // bit 0: cancelled; bit 1: a fault was reported
    STATUS_TAKEN = 1,  // Mirror.taken
    STATUS_READ = 2    // Mirror.read without its highest bit: no word is NOT_READY
};

struct Mirror;

// The MAX_TOP_K largest logits of each row's pieces, each piece's sorted: largest first, ties by lower id.
struct TopKArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;
    const float* logits;     // [ROWS][VOCAB]
    float* values;           // [ROWS][PIECES][MAX_TOP_K]
    int* ids;                // [ROWS][PIECES][MAX_TOP_K], of the whole vocabulary
    int first_id;            // the rank's first vocabulary row
    int reserved;
    const int64_t* peers;    // [RANKS]: values and ids go to every rank's inbox, the rank's own list of a row at
                             // [row][RANKS][MAX_TOP_K] from where they point; or null
    const Mirror* mirror;    // of this rank, whose status goes along; or null
    int* status;             // the rank's own STATUS_WORDS in its inbox; or null
};

// One request's state on the device.
struct State {
    // what is asked
    double temperature;      // 0: greedy
    double top_p;
    uint32_t seed_lo, seed_hi;
    int top_k;               // 1 .. MAX_TOP_K
    int draft_limit;         // the most drafts of the next round
    int auto_depth;          // 1: the stop rule decides from MIN_AUTO_DRAFTS on
    int reserved;
    double rule_weights[MAX_DRAFTS - MIN_AUTO_DRAFTS][FEATURES];
    double rule_threshold;
    // the next verification: row i is the token at positions[i] = done + i, the pending token first
    int done;                // positions that the target's caches hold; the pending token's position
    int drafts;              // drafts made so far for the next verification
    int tokens[ROWS];
    int positions[ROWS];
    // the draft's next depth. Row 0 is the newest position; depth 0 has one row for each newly committed position.
    int depth_rows[ROWS];    // [depth]: rows to compute, 0 to skip the depth; [MAX_DRAFTS] stays 0
    int draft_tokens[ROWS];  // the token at draft_positions + 1
    int draft_positions[ROWS];
    int draft_hidden[ROWS];  // which row of the target's hidden states goes with it; -1: the draft's own, row 0
    // the drafts' distributions, most likely first
    int q_count[ROWS];
    int q_ids[MAX_DRAFTS][MAX_TOP_K];
    double q_probs[MAX_DRAFTS][MAX_TOP_K];
    double served[ROWS];     // of the drafts, at temperature 1 where the request is greedy
    double entropy[ROWS];
    // the last round
    int log_tokens[ROWS];
    int log_count;
    int log_drafted;
    int log_accepted;
    int log_rounds;          // counts rounds, so that a reader knows a record from the one before it
    uint64_t log_verified;   // %globaltimer when the round's drafts had been judged, nanoseconds
};

// A round, as it is logged: 32 words.
struct Record {
    int index;               // of the request's rounds, from 0, which is the first token's
    int rows;                // that were verified; 0 for the first token
    int drafted;
    int accepted;
    int count;               // committed tokens: up to the budget's end, or the first stop token
    int reason;              // EndReason
    int next_rows;           // of the next round: the drafts that were made, and the pending token
    int depths;              // bit d: draft depth d was computed
    int done;                // positions that the target's caches hold; the pending token's position
    int status;              // of a launch that the driver refused
    int tokens[ROWS];
    int reserved[6];
    uint64_t launched;       // %globaltimer, nanoseconds: when the previous control ended, 0 where there is none;
    uint64_t verified;       // when the drafts had been judged;
    uint64_t drafted_first;  // when the depths of the verification's own graph were done;
    uint64_t ended;          // when the last control had decided
};

// What the control kernels keep between rounds, in device memory. The host writes all of it before a request.
struct Loop {
    uint64_t graphs[GRAPHS]; // cudaGraphExec_t: [rows] a round in a long context, [ROWS + 1 + rows] in a short one,
                             // [2 ROWS + 2 + d] draft depth d
    int stops[MAX_STOPS];    // -1 beyond the last
    int short_context;       // positions below which all rows of a round must lie in a short one
    int budget;              // tokens that may still be committed
    int room;                // positions that a round may reach beyond what the reader has taken
    uint32_t written;        // records so far
    int index;               // rounds of this request so far
    int reserved;
    uint64_t launched;
    uint64_t drafted_first;
    int ran[ROWS];           // [n]: executions of the control kernel after n drafts
    int agreed[STATUS_WORDS];  // of several ranks, by accept: what any has in STATUS_ENDED, the least taken, the least read
};

// What host and control kernels tell each other, in host memory. A word of the log stands beside its record's number
// (from 1), in one store of eight bytes: a reader that finds the number in all words has the record, and nobody has
// to wait for a fence.
struct Mirror {
    int cancel;              // by the host: end after this round
    int taken;               // by the host: length of the sequence that a reader has taken
    uint32_t read;           // by the host: records
    int reserved[13];
    uint64_t log[LOG_RECORDS][GRAPHS];
};

// Decides after a draft depth, or ends the round.
struct ControlArgs {
    Fault* fault;
    const int* live;         // null
    int layer;
    int rows;                // that the round verified; 0 for the first token's
    State* state;
    Loop* loop;
    Record* log;             // [LOG_RECORDS]
    Mirror* mirror;
    int made;                // drafts that may have been made when this kernel runs
    int first;               // 1: it ends a verification's graph, 0: a depth's
};

// Judges the drafts against the target's candidates, and prepares the draft's depth 0.
struct AcceptArgs {
    Fault* fault;
    const int* live;
    int layer;
    int rows;                // verified rows: drafts + 1
    State* state;
    float* values;           // [ROWS][ranks * PIECES][MAX_TOP_K]; of several ranks, NOT_READY again afterwards
    int* ids;
    int pieces;              // ranks * PIECES
    int first;               // 1: row 0 follows the prompt; draw the request's first token, which is then pending
    int* statuses;           // [RANKS][STATUS_WORDS], this rank's inbox, NOT_READY again afterwards; not read where
    Loop* loop;              // there is no loop, in which what the ranks agree on goes; or null
};

// Draws draft `depth` and prepares the next depth, or ends drafting.
struct DraftSampleArgs {
    Fault* fault;
    const int* live;         // &state->depth_rows[depth]
    int layer;
    int rows;
    State* state;
    float* values;           // [ROWS][ranks * PIECES][MAX_TOP_K], row 0; of several ranks, NOT_READY again afterwards
    int* ids;
    int pieces;
    int depth;
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

// Prompt processing. `rows` counts tokens here, up to PREFILL_CHUNK; row i is at position start + i. `live` is not read.

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
