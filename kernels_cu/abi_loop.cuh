// What the kernels that sample, judge drafts and decide of rounds share with the host: a request's state, and its log.
#pragma once
#include "abi.cuh"

constexpr int MAX_DRAFTS = 7;
constexpr int MIN_AUTO_DRAFTS = 3;
constexpr int MAX_TOP_K = 32;       // candidates that are kept on the device; a larger top_k is sampled on the host
constexpr int FEATURE_TOP_K = 20;   // what the stop rule sees of a greedy request's draft
constexpr int FEATURES = 6;

constexpr int MAX_STOPS = 32;       // stop tokens that the device looks for; where there are more, the host does
constexpr int LOG_RECORDS = 256;    // records of the result log; a power of two
constexpr int GRAPHS = 32;          // handles of a request's graphs: see Loop
constexpr int STATUS_WORDS = 4;     // of a rank, see StatusWord

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

// What each rank tells the others with a round's candidates, so that all of them end a chain at the same round: the
// wishes of all hosts count, and what any rank's kernels have reported.
enum StatusWord {
    STATUS_ENDED = 0,  // bit 0: cancelled; bit 1: a fault was reported
    STATUS_TAKEN = 1,  // Mirror.taken
    STATUS_READ = 2    // Mirror.read without its highest bit: no word is NOT_READY
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
