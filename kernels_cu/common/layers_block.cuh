// qwen2_layers.cu: what a block has of each matrix and of attention, and what lies in its shared memory.
//
// Includers define the model's sizes; GEMV_BLOCKS; PARTS, of o_proj's and down's columns, each a part of the blocks'; SPANS,
// of a KV head's positions at the most, and SPAN_PAGES, where there are blocks enough; SLOTS, pages in a block; those of
// common/int4_ring.cuh, where STAGE_UNITS are units of a whole stage; and SMEM.
#pragma once
#include "common/flagged.cuh"
#include "common/int4_ring.cuh"
#include "common/pieces.cuh"
#include "common/qwen2_attend.cuh"

constexpr int Q_WIDTH = Q_HEADS * HEAD_SIZE, QKV_ROWS = (Q_HEADS + 2 * KV_HEADS) * HEAD_SIZE;
constexpr int TILE_COLUMNS = TILE_ROWS / 2;  // of inner, that a tile of gate and up makes
constexpr int GATE_UP_TILES = padded(INNER) / TILE_COLUMNS;
constexpr int O_TILES = HIDDEN / TILE_ROWS, O_COLUMNS = Q_WIDTH / PARTS;  // of a part
constexpr int PART_HEADS = KV_HEADS / PARTS;
constexpr int POLLS = 1 << 20;  // of a thread in a launch: a second, where results take microseconds; mbarriers take longer
constexpr int PATIENCE = 2000000000;  // ns for a place in the ring: longer than all polls take
constexpr int ALL_THREADS = THREADS + 4 * WARP;  // those that multiply; a warp that sends copies, one that clears, two idle

constexpr int DOWN_COLUMNS = padded(INNER) / PARTS;
constexpr int PART_BLOCKS = GEMV_BLOCKS / PARTS;
constexpr int QUADS = HIDDEN / 4, OWN_QUADS = (QUADS + GEMV_BLOCKS - 1) / GEMV_BLOCKS;  // of the residual; a block's

using QkvSplit = Pieces<QKV_ROWS, HIDDEN, GEMV_BLOCKS>;
using DownSplit = Pieces<HIDDEN, DOWN_COLUMNS, PART_BLOCKS>;  // of a part

static_assert(HIDDEN % GROUP_SIZE == 0 && KV_HEADS % PARTS == 0 && GEMV_BLOCKS % PARTS == 0, "equal parts");
static_assert(O_COLUMNS % GROUP_SIZE == 0 && DOWN_COLUMNS % GROUP_SIZE == 0, "whole groups");
static_assert(QUADS >= GEMV_BLOCKS, "who has all of the residual's columns has heard of all blocks");

enum Phase { QKV, ATTENTION, O_PROJ, GATE_UP, DOWN };
// As what a phase's missing copies are reported.
__device__ __forceinline__ constexpr int kernel_of(int phase) {
    return phase == QKV ? KERNEL_QKV : phase == O_PROJ ? KERNEL_O_PROJ : phase == GATE_UP ? KERNEL_GATE_UP : KERNEL_DOWN;
}

// The blocks of a part have the same columns of o_proj and down, and make what down reads of these: where a block stands.
struct Part {
    int number, index;
};
__device__ __forceinline__ Part own_part() { return {int(blockIdx.x) / PART_BLOCKS, int(blockIdx.x) % PART_BLOCKS}; }

__device__ __forceinline__ Run gate_up_tiles() { return part_of(Run{0, GATE_UP_TILES}, blockIdx.x, GEMV_BLOCKS); }
__device__ __forceinline__ Run o_tiles() { return part_of(Run{0, O_TILES}, own_part().index, PART_BLOCKS); }
static_assert(GATE_UP_TILES % PARTS == 0, "a part's blocks make its columns");

// A phase's groups in a tile of the block.
template <int PHASE>
constexpr int GROUPS_IN = (PHASE == O_PROJ ? O_COLUMNS : PHASE == DOWN ? DOWN_COLUMNS : HIDDEN) / GROUP_SIZE;

// The block's units: of the matrix, or of o_proj and down those of the part's columns.
template <int PHASE>
__device__ __forceinline__ Run block_run() {
    if constexpr (PHASE == QKV) return part_of(Run{0, QkvSplit::UNITS}, blockIdx.x, QkvSplit::TAKERS);
    if constexpr (PHASE == DOWN) return part_of(Run{0, DownSplit::UNITS}, own_part().index, DownSplit::TAKERS);
    const Run tiles = PHASE == O_PROJ ? o_tiles() : gate_up_tiles();
    return Run{tiles.first * GROUPS_IN<PHASE>, tiles.units * GROUPS_IN<PHASE>};
}

// The most tiles that a block has units of.
template <int PHASE>
constexpr int SUMS_OF = PHASE == O_PROJ ? div_up(O_TILES, PART_BLOCKS)
                        : PHASE == DOWN ? DownSplit::TOUCHED
                        : PHASE == QKV  ? QkvSplit::TOUCHED
                                        : div_up(GATE_UP_TILES, GEMV_BLOCKS);
constexpr int SUMS = max_int(max_int(SUMS_OF<O_PROJ>, SUMS_OF<GATE_UP>), max_int(SUMS_OF<DOWN>, SUMS_OF<QKV>));
constexpr int TURN = STAGE_UNITS;    // units of a stage
constexpr int BATCH = 4;             // of them that a warp multiplies together
constexpr int TEAM = TURN / BATCH;   // warps that have a stage
constexpr int TURN_BYTES = TURN * UNIT_BYTES;
static_assert(TURN % BATCH == 0 && WARPS % TEAM == 0, "warps take turns");
// A warp waits for a stage AHEAD of which at the most may be on their way, and does not see what other teams take. Between
// two of its own, the stage that lay in the second one's place must have come: its mbarrier tells one phase from the next only.
static_assert(STAGES >= AHEAD + WARPS / TEAM && MIDST < AHEAD && EARLY < AHEAD, "a stage could be taken for an older one");

constexpr int HEAD_PIECES = GROUP * HEAD_SIZE / 8;                // of a record: 16 bytes each
constexpr int RECORD_PIECES = HEAD_PIECES + STATISTICS;
constexpr int MERGED = PART_HEADS * HEAD_PIECES;                  // of the part's columns
constexpr int SETS = THREADS / MERGED;                            // threads that share the spans of a piece
static_assert(SETS >= 1 && MERGED % 16 == 0, "sixteen threads have a group of columns");
static_assert((GROUP + 2) * HEAD_THREADS <= THREADS, "a thread has one part of q, k and v");
static_assert(ITEMS <= THREADS && HEAD_PIECES <= THREADS && SLOTS <= WARPS, "of a span's sums");
static_assert((STEPS * (WARP + 1)) * 16 >= GROUP * HEAD_SIZE * 2, "a span's halves lie where the queries were");

__device__ __host__ constexpr int token_bytes(int k) { return padded(k) / GROUP_SIZE * TOKEN::GROUP_BYTES; }

// Which span of which KV head the block attends to.
struct Place {
    int kv_head, span;
};

// What a block has of everything: in shared memory, as registers are scarce.
struct Block {
    Run units[DOWN + 1];  // of each phase
    int2 starts[DOWN + 1][WARPS];  // of each warp's first batch: the tile, of the block's, and the group in it
    Run gate_up, o;       // tiles
    Run quads;            // of four columns of the residual
    Part part;
    Place place;

    // One lane of each warp.
    template <int PHASE>
    __device__ __forceinline__ void find_start(int warp) {
        const int unit = units[PHASE].first % GROUPS_IN<PHASE> + warp / TEAM * TURN + warp % TEAM * BATCH;
        starts[PHASE][warp] = make_int2(unit / GROUPS_IN<PHASE>, unit % GROUPS_IN<PHASE>);
    }

    __device__ __forceinline__ void find() {
        units[QKV] = block_run<QKV>(), units[O_PROJ] = block_run<O_PROJ>();
        units[GATE_UP] = block_run<GATE_UP>(), units[DOWN] = block_run<DOWN>();
        gate_up = gate_up_tiles(), o = o_tiles(), quads = part_of(Run{0, QUADS}, blockIdx.x, GEMV_BLOCKS);
        part = own_part();
        place = {part.number * PART_HEADS + part.index % PART_HEADS, part.index / PART_HEADS};
    }
};

// A block's span of a KV head's pages: `first` and those before it, count in all; page i of them is that of positions
// 16 (first - i) onwards.
struct Span {
    int spans;  // of each KV head; those blocks attend whose place.span is below
    int first, count;
    int own;    // the row of this token in page 0 of the last span, else PAGE
    int page;   // the number of the page that has this row, or -1: embedding has reported that none was free

    __device__ __forceinline__ bool tail() const { return own < PAGE; }

    __device__ __forceinline__ void find(const int* table, int position, const Place& place) {
        const int pages = position / PAGE + 1;
        spans = min_int(SPANS, div_up(pages, SPAN_PAGES));
        const int begin = place.span * pages / spans, end = (place.span + 1) * pages / spans;
        const bool attends = place.span < spans;
        first = end - 1, count = attends ? end - begin : 0;
        own = attends && place.span == spans - 1 ? position % PAGE : PAGE;
        page = tail() ? __ldcg(table + first) : -1;
    }
};

struct Shared {
    uint8_t ring[STAGES][TURN_BYTES];
    union {  // by turns: the next layer's pages, what threads merge, inner as a token
        uint8_t pages[SLOTS][2 * PAGE_BYTES];  // keys, then values; at a multiple of ROW_BYTES
        struct {
            float4 sums[2][THREADS];
            float2 statistics[THREADS];
        } merge;
        uint8_t inner[token_bytes(DOWN_COLUMNS)];
    };
    union {  // by turns
        uint8_t token[token_bytes(max_int(HIDDEN, O_COLUMNS))];
        QueryStep q[STEPS];  // then a span's halves
    };
    float4 sums[WARPS][SUMS][TILE_ROWS / 4];  // each warp's, of the block's tiles
    float4 own[SLOTS][STATISTICS];            // each attending warp's
    float2 rope[HEAD_SIZE / 2];               // cosine and sine of the position
    float squares[WARPS];                     // sums of each warp's columns
    float4 x[OWN_QUADS];                      // the residual's columns that the block adds up
    uint64_t full[STAGES], empty[STAGES];
    uint64_t k_full[SLOTS], v_full[SLOTS];
    int pace;  // stages that may be on their way
    uint32_t due;  // the feed's own: registers are scarce there
    uint64_t entered, cleared;                // a token is there whose words say what may be cleared; that has been
    Block block;
    Span span;
};
static_assert(sizeof(Shared) <= SMEM, "the host reserves less than this needs");
static_assert(TURN_BYTES % ROW_BYTES == 0, "where pages begin");

// How many stages may be on their way: what blocks look for would wait behind copies that are not needed yet. Thread 0 says
// so.
__device__ __forceinline__ void pace(Shared& shared, int stages) {
    if (threadIdx.x == 0) atomicExch(&shared.pace, stages);
}

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
