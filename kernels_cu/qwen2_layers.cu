// All decoder layers of a token in one launch, whose weights stream without a stop:
//     for each layer  x += o_proj(attention(rms(x, input_norm)));  x += down(silu(gate(n)) up(n)), n = rms(x, post_norm).
//
// PRECOND  grid GEMV_BLOCKS, block THREADS + 4 warps, all blocks resident together, as on a GPU that has as many
//          multiprocessors; SMEM bytes of dynamic shared memory. Weights: 16-byte aligned units (abi_qwen2.cuh), never
//          written. Every block has units of q, k and v, tiles of gate and up, and units of down. qkv_pieces, partials,
//          o_pieces, inner and down_pieces hold NOT_READY in every word. residual, positions, page_table may be the
//          predecessor's; K and V of older positions were written by older graphs.
// READS    the matrices and K and V, once; from L2 in each block what the blocks tell one another: each phase's token.
// WRITES   residual_out; K and V of the position; and what blocks tell one another, of which the launch clears all but the last
//          layer's inner and down_pieces.
//
// Why so: memory has to deliver all the time, and a token's layer is a chain of five sums over all blocks. Here the order in
// which a block's units come is known for all layers, so that its ring fills while the block waits for the others' results,
// and launches end nowhere. Results are their own ready flags (common/flagged.cuh): a word is there once it is not NOT_READY.
// A block's units come as one copy for all warps: what a block asks of memory at a time lies together. Only AHEAD stages are
// on their way at once, although more may lie full: what blocks poll for, and attention's pages, would wait behind them in
// the same queues.
// Attention: a part of the blocks has some KV heads, and o_proj's columns of their queries. Of those, as many attend as there
// are pages for, each to a span of them; every block of the part then puts the spans' results together for itself.
// What was measured: tools/decisions/021-all-layers-in-one-launch.md.
//
// Clearing. A warp of its own clears what its block stored, and blocks go on to store only behind that: what a block does
// next, seen by another, says that its words are NOT_READY again. Every block has a part of each phase, so that who has all of
//   o_proj's results knows that all have read the last layer's inner and down (all stored q, k, v since): those are cleared
//   then, and inner lies elsewhere in the next layer, as blocks could come to it first;
//   gate and up's knows that all have read q, k, v, attention's and o_proj's.
#include "common/flagged.cuh"
#include "common/int4_ring.cuh"
#include "common/pdl.cuh"
#include "common/phases.cuh"
#include "common/pieces.cuh"
#include "common/qwen2_attend.cuh"
#include "common/reduce.cuh"

constexpr int Q_WIDTH = Q_HEADS * HEAD_SIZE, QKV_ROWS = (Q_HEADS + 2 * KV_HEADS) * HEAD_SIZE;
constexpr int TILE_COLUMNS = TILE_ROWS / 2;  // of inner, that a tile of gate and up makes
constexpr int GATE_UP_TILES = padded(INNER) / TILE_COLUMNS;
constexpr int O_TILES = HIDDEN / TILE_ROWS, O_COLUMNS = Q_WIDTH / PARTS;  // of a part
constexpr int PART_HEADS = KV_HEADS / PARTS;
constexpr int POLLS = 1 << 21;  // of a thread in a launch: seconds, where results take microseconds
constexpr int TRIES = 1 << 26;  // for a place in the ring: more seconds than all polls take
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

// ---- What a block has of each matrix ----

// The blocks of a part have the same columns of o_proj and down, and make what down reads of these: where a block stands.
struct Part {
    int number, index;
};
__device__ __forceinline__ Part own_part() { return {int(blockIdx.x) / PART_BLOCKS, int(blockIdx.x) % PART_BLOCKS}; }

template <int K>
constexpr int GROUPS_OF = padded(K) / GROUP_SIZE;

__device__ __forceinline__ Run gate_up_tiles() { return part_of(Run{0, GATE_UP_TILES}, blockIdx.x, GEMV_BLOCKS); }
__device__ __forceinline__ Run o_tiles() { return part_of(Run{0, O_TILES}, own_part().index, PART_BLOCKS); }
static_assert(GATE_UP_TILES % PARTS == 0, "a part's blocks make its columns");

// A phase's groups in a tile of the block.
template <int PHASE>
constexpr int GROUPS_IN = (PHASE == O_PROJ ? O_COLUMNS : PHASE == DOWN ? DOWN_COLUMNS : HIDDEN) / GROUP_SIZE;
template <int PHASE>  // and in a tile of the matrix
constexpr int ALL_GROUPS = PARTS * GROUPS_IN<PHASE>;

// The block's units: of the matrix, or of o_proj and down those of the part's columns.
template <int PHASE>
__device__ __forceinline__ Run block_run() {
    if constexpr (PHASE == QKV) return part_of(Run{0, QkvSplit::UNITS}, blockIdx.x, QkvSplit::TAKERS);
    if constexpr (PHASE == DOWN) return part_of(Run{0, DownSplit::UNITS}, own_part().index, DownSplit::TAKERS);
    const Run tiles = PHASE == O_PROJ ? o_tiles() : gate_up_tiles();
    return Run{tiles.first * GROUPS_IN<PHASE>, tiles.units * GROUPS_IN<PHASE>};
}

// The most tiles that a block has units of.
__device__ __host__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __host__ constexpr int larger(int a, int b) { return a > b ? a : b; }
template <typename Split>
constexpr int TOUCHED = (ceil_div(Split::UNITS, Split::TAKERS) + Split::GROUPS - 2) / Split::GROUPS + 1;
template <int PHASE>
constexpr int SUMS_OF = PHASE == O_PROJ ? ceil_div(O_TILES, PART_BLOCKS)
                        : PHASE == DOWN ? TOUCHED<DownSplit>
                        : PHASE == QKV  ? TOUCHED<QkvSplit>
                                        : ceil_div(GATE_UP_TILES, GEMV_BLOCKS);
constexpr int SUMS = larger(larger(SUMS_OF<O_PROJ>, SUMS_OF<GATE_UP>), larger(SUMS_OF<DOWN>, SUMS_OF<QKV>));
constexpr int TURN = STAGE_UNITS;    // units of a stage
constexpr int BATCH = 4;             // of them that a warp multiplies together
constexpr int TEAM = TURN / BATCH;   // warps that have a stage
constexpr int TURN_BYTES = TURN * UNIT_BYTES;
static_assert(TURN % BATCH == 0 && WARPS % TEAM == 0, "warps take turns");

// ---- Attention's spans ----

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
    Run gate_up, o;       // tiles
    Run quads;            // of four columns of the residual
    Part part;
    Place place;

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
        uint8_t token[token_bytes(larger(HIDDEN, O_COLUMNS))];
        QueryStep q[STEPS];  // then a span's halves
    };
    float4 sums[WARPS][SUMS][TILE_ROWS / 4];  // each warp's, of the block's tiles
    float4 own[SLOTS][STATISTICS];            // each attending warp's
    float2 rope[HEAD_SIZE / 2];               // cosine and sine of the position
    float squares[WARPS];                     // sums of each warp's columns
    float4 x[OWN_QUADS];                      // the residual's columns that the block adds up
    uint64_t full[STAGES], empty[STAGES];
    uint64_t k_full[SLOTS], v_full[SLOTS];
    int quiet;  // no copies are to be sent for a phase that has not begun
    uint64_t entered, cleared;                // a token is there whose words say what may be cleared; that has been
    Block block;
    Span span;
};
static_assert(sizeof(Shared) <= SMEM, "the host reserves less than this needs");
static_assert(TURN_BYTES % ROW_BYTES == 0, "where pages begin");

// While blocks hear from one another about the residual's row, memory is to be quiet: what they look for would wait behind
// copies that are not needed yet. Thread 0 says so.
__device__ __forceinline__ void hush(Shared& shared, bool quiet) {
    if (threadIdx.x == 0) atomicExch(&shared.quiet, int(quiet));
}

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// ---- The warp that sends copies: one lane ----

struct Cursor {  // a stage of the launch: which comes next
    int i, phase, next;
};

struct Feed {
    const Qwen2LayersArgs& a;
    Shared& shared;
    uint64_t policy;
    int sent;
    Cursor at;

    __device__ __forceinline__ const uint8_t* matrix(const Cursor& c) const {
        return c.phase == QKV       ? a.qkv_weights[c.i]
               : c.phase == O_PROJ  ? a.o_weights[c.i]
               : c.phase == GATE_UP ? a.gate_up_weights[c.i]
                                    : a.down_weights[c.i];
    }

    __device__ __forceinline__ int units(const Cursor& c) const { return min_int(shared.block.units[c.phase].units - c.next, TURN); }

    // use(bytes from the stage's beginning, address, bytes) for what lies together.
    template <typename Use>
    __device__ __forceinline__ void pieces(const Cursor& c, Use use) const {
        const uint8_t* const from = matrix(c);
        const int first = shared.block.units[c.phase].first + c.next, count = units(c);
        if (PARTS == 1 || c.phase == QKV || c.phase == GATE_UP) {
            use(0, from + int64_t(first) * UNIT_BYTES, count * UNIT_BYTES);
            return;
        }
        const int groups = c.phase == O_PROJ ? GROUPS_IN<O_PROJ> : GROUPS_IN<DOWN>;
        for (int done = 0; done < count;) {  // a tile's columns of the part lie together
            const int tile = (first + done) / groups, group = (first + done) % groups, some = min_int(groups - group, count - done);
            const int64_t unit = (tile * PARTS + shared.block.part.number) * groups + group;
            use(done * UNIT_BYTES, from + unit * UNIT_BYTES, some * UNIT_BYTES);
            done += some;
        }
    }

    __device__ __forceinline__ void advance(Cursor& c) const {
        c.next += TURN;
        while (c.i < a.layers && c.next >= shared.block.units[c.phase].units) {
            c.next = 0;
            if (c.phase == QKV) {
                c.phase = O_PROJ;
            } else if (++c.phase > DOWN) {
                c.phase = QKV, ++c.i;
            }
        }
    }

    // Whether a stage's `round`th copy has come, or been multiplied.
    static __device__ __forceinline__ bool done(int slot, uint64_t* barriers, int round) {
        return barrier_passed(&barriers[slot], round & 1);
    }

    __device__ __forceinline__ void send_all() {
        int phase_first = 0, tries = 0;  // the first stage of the phase that is sent
        bool begun = false;              // it has been multiplied
        while (at.i < a.layers) {
            const int slot = sent % STAGES;
            if (at.next == 0) phase_first = sent, begun = false;
            if (!begun && sent > phase_first) begun = done(phase_first % STAGES, shared.empty, phase_first / STAGES);
            const int older = sent - (begun ? AHEAD : EARLY);
            if ((begun || atomicOr(&shared.quiet, 0) == 0) && (sent < STAGES || done(slot, shared.empty, sent / STAGES - 1)) &&
                (older < 0 || done(older % STAGES, shared.full, older / STAGES))) {
                uint64_t* const full = &shared.full[slot];
                uint8_t* const to = shared.ring[slot];
                barrier_expect(full, units(at) * UNIT_BYTES);
                pieces(at, [&](int offset, const uint8_t* from, int bytes) { bulk_load(to + offset, from, bytes, full, policy); });
                advance(at), ++sent, tries = 0;
            } else if (++tries > TRIES) {
                report_fault(a.fault, FAULT_COPY, KERNEL_GATE_UP, a.layer + at.i);
                asm volatile("trap;");
            }
        }
    }
};

// ---- The warp that clears ----

// The rows of a split matrix that the block, `number` of those that share it, has stored, each in its piece: use(row among
// them, index of the word).
template <typename Split, typename Use>
__device__ __forceinline__ void stored_pieces(const Run& block, int number, int first, int step, int rows, Use use) {
    if (block.units == 0) return;
    const int tile = block.first / Split::GROUPS, last = (block.first + block.units - 1) / Split::GROUPS;
    for (int i = first; i < (last - tile + 1) * TILE_ROWS; i += step) {
        const int row = tile * TILE_ROWS + i;
        const int piece = number - Split::block_of(row / TILE_ROWS * Split::GROUPS);
        use(i, piece * rows + row);
    }
}

// Layers take turns: one clears what the next but one fills.
__device__ __forceinline__ f16* inner_of(const Qwen2LayersArgs& a, int i) { return a.inner + i % 2 * padded(INNER); }
__device__ __forceinline__ float* down_of(const Qwen2LayersArgs& a, int i) {
    return a.down_pieces + i % 2 * PARTS * DOWN_PIECES * HIDDEN;
}
// The residual before the MLP, and behind it.
__device__ __forceinline__ float* middle_of(const Qwen2LayersArgs& a, int i) { return a.rows_handed + i % 2 * 2 * HIDDEN; }
__device__ __forceinline__ float* end_of(const Qwen2LayersArgs& a, int i) { return middle_of(a, i) + HIDDEN; }

struct Clear {
    const Qwen2LayersArgs& a;
    Shared& shared;

    template <typename Word>
    static __device__ __forceinline__ void clear(Word* words, const Run& run, int of = 1) {
        const uint32_t word = NOT_READY;
        uint32_t* const first = reinterpret_cast<uint32_t*>(words) + run.first * of;
        for (int i = threadIdx.x % WARP; i < run.units * of; i += WARP) first[i] = word;
    }

    // All blocks together, each a part of the lines.
    static __device__ __forceinline__ void ask_l2(const f16* from, int count) {
        const int line = int(blockIdx.x) * WARP + int(threadIdx.x % WARP);
        if (line * 64 < count) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + line * 64) : "memory");
    }

    __device__ __forceinline__ void run() {
        const int lane = threadIdx.x % WARP;
        const uint32_t word = NOT_READY;
        const Block& block = shared.block;
        for (int i = 0; i < a.layers; ++i) {
            barrier_wait(&shared.entered, i & 1, a.fault, KERNEL_CONTROL, a.layer + i);
            stored_pieces<QkvSplit>(block.units[QKV], blockIdx.x, lane, WARP, QKV_ROWS,
                                    [&](int, int at) { reinterpret_cast<uint32_t*>(a.qkv_pieces)[at] = word; });
            if (block.place.span < shared.span.spans)
                clear(a.partials, Run{block.place.kv_head * SPANS + block.place.span, 1}, 4 * RECORD_PIECES);
            clear(a.o_pieces + block.part.number * HIDDEN, block.o, TILE_ROWS);
            if (i > 0) {
                clear(middle_of(a, i - 1), block.quads, 4);
                clear(end_of(a, i - 1), block.quads, 4);
                clear(inner_of(a, i - 1), block.gate_up, TILE_COLUMNS / 2);
                uint32_t* const down = reinterpret_cast<uint32_t*>(down_of(a, i - 1)) + block.part.number * (DOWN_PIECES * HIDDEN);
                stored_pieces<DownSplit>(block.units[DOWN], block.part.index, lane, WARP, HIDDEN,
                                         [&](int, int at) { down[at] = word; });
            }
            if (i + 1 < a.layers) {  // what the next layer's blocks would wait for memory for
                ask_l2(a.input_norm[i + 1], HIDDEN), ask_l2(a.post_norm[i + 1], HIDDEN), ask_l2(a.bias[i + 1], QKV_ROWS);
            }
            __threadfence();  // this lane's words are cleared for all, before
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.cleared);
        }
    }
};

// ---- The warps that multiply ----

struct Polling {
    Fault* fault;
    int count;

    // Another poll, where a lane of the warp misses a word; all lanes leave in the same turn (see Polls in
    // common/flagged.cuh). The bound is of all polls together: behind one that ended in a report, no other is waited for.
    __device__ __forceinline__ bool again(bool ready, int kernel, int layer) {
        if (__all_sync(0xffffffffu, ready)) return false;
        if (++count < POLLS) return true;
        if (!ready) report_fault(fault, FAULT_RESULT, kernel, layer);
        return false;
    }
};

__device__ __forceinline__ uint4 unready_if(bool awaited) {
    const uint32_t word = awaited ? NOT_READY : 0u;
    return make_uint4(word, word, word, word);
}

__device__ __forceinline__ bool floats_there(uint4 x) {
    return x.x != NOT_READY && x.y != NOT_READY && x.z != NOT_READY && x.w != NOT_READY;
}

// Halves that are all ones are nobody's result: a NaN of ours is 0x7fff.
__device__ __forceinline__ bool halves_there(uint4 x) {
    const auto both = [](uint32_t w) { return (w & 0xffffu) != 0xffffu && (w >> 16) != 0xffffu; };
    return both(x.x) && both(x.y) && both(x.z) && both(x.w);
}

__device__ __forceinline__ uint2 load_flagged_8(const void* address) {
    uint2 x;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(address) : "memory");
    return x;
}

// The stages in the order in which they come. Half of the warps multiply one, the other half the next: a warp has BATCH units,
// whose token columns are in different columns of the MMA, so that lane t of a quad gets the sums of unit t, and what is to
// be done with a unit's sums is done for all of them at once. Integer instructions are what limits this loop.
struct Stream {
    Shared& shared;
    Fault* fault;
    uint32_t stage;  // the phase's first one

    // The warps' parts of a phase times the token, into their sums.
    template <int PHASE>
    __device__ __forceinline__ void multiply(const uint8_t* token, int layer) {
        constexpr int GROUPS = GROUPS_IN<PHASE>;
        static_assert(GROUPS >= BATCH, "a batch is of two tiles at most");
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        const Run block = shared.block.units[PHASE];
        float4* const all = shared.sums[warp][0];
#pragma unroll
        for (int i = 0; i < SUMS_OF<PHASE> * 4; i += WARP)
            if (i + lane < SUMS_OF<PHASE> * 4) all[i + lane] = make_float4(0, 0, 0, 0);
        __syncwarp();  // zeros where the warp has nothing
        float* const sums = reinterpret_cast<float*>(all) + g;
        constexpr int TEAMS = WARPS / TEAM, STEP = TEAMS * TURN;
        const int stages = div_up(block.units, TURN), place = warp % TEAM * BATCH;
        int k = warp / TEAM, tile = (block.first % GROUPS + k * TURN + place) / GROUPS;
        int group = (block.first % GROUPS + k * TURN + place) % GROUPS;  // of the first unit
        uint4 x[BATCH][2];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) x[u][0] = x[u][1] = make_uint4(0u, 0u, 0u, 0u);
        for (; k < stages; k += TEAMS) {
            const uint32_t slot = (stage + k) % STAGES;
            barrier_wait(&shared.full[slot], (stage + k) / STAGES & 1, fault, KERNEL_DOWN, layer);
            const int unit = k * TURN + place;
            int ones[2][4] = {}, sixteens[2][4] = {};  // of each chunk: one chain of products would wait for each
            float low_scale, high_scale;
            uint2 of;
            const bool next = group + t >= GROUPS;  // the lane's unit is of the next tile
            if (unit < block.units) {  // missing units are there as nothing that counts
                const uint8_t* const units = shared.ring[slot] + place * UNIT_BYTES;
                const int loaded = group + lane / 8 - (group + lane / 8 >= GROUPS ? GROUPS : 0);
                const uint8_t* const columns = token + loaded * TOKEN::GROUP_BYTES + lane % 8 * 16;
                of = *reinterpret_cast<const uint2*>(token + (group + t - (next ? GROUPS : 0)) * TOKEN::GROUP_BYTES +
                                                     2 * GROUP_SIZE);
                const f16* const scales = reinterpret_cast<const f16*>(units + t * UNIT_BYTES + CODE_BYTES) + g;
                low_scale = f16_to_float(scales[0]), high_scale = f16_to_float(scales[8]);
#pragma unroll
                for (int u = 0; u < BATCH; ++u) {
#pragma unroll
                    for (int chunk = 0; chunk < 2; ++chunk)
                        load_for(x[u][chunk], reinterpret_cast<const uint4*>(columns) + 8 * chunk, lane / 8 == u);
                }
#pragma unroll
                for (int u = 0; u < BATCH; ++u) {
                    const uint4* const codes = reinterpret_cast<const uint4*>(units + u * UNIT_BYTES) + lane;
#pragma unroll
                    for (int chunk = 0; chunk < 2; ++chunk)
                        multiply_codes(ones[chunk], sixteens[chunk], codes[chunk * WARP], x[u][chunk]);
                }
            }
            reads_before_copies();
            __syncwarp();  // every lane has its part before the place is given back
            if (lane == 0) barrier_arrive(&shared.empty[slot]);
            if (unit >= block.units) break;
            const float scale = __uint_as_float(of.x);
            const int eights = int(of.y);
            const bool counts = unit + t < block.units;
            int sum[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] = 16 * (ones[0][e] + ones[1][e]) + (sixteens[0][e] + sixteens[1][e]);
            float low = scale * float(256 * sum[0] + sum[1] + eights) * low_scale;
            float high = scale * float(256 * sum[2] + sum[3] + eights) * high_scale;
            low = counts ? low : 0.0f, high = counts ? high : 0.0f;
            add_quad(sums + tile * TILE_ROWS, next ? 0.0f : low, next ? 0.0f : high, t);
            if (group + min_int(BATCH, block.units - unit) > GROUPS)
                add_quad(sums + (tile + 1) * TILE_ROWS, next ? low : 0.0f, next ? high : 0.0f, t);
            group += STEP % GROUPS, tile += STEP / GROUPS;
            if (group >= GROUPS) group -= GROUPS, ++tile;
        }
        stage += stages;
    }

    // += the sums over a quad's lanes.
    static __device__ __forceinline__ void add_quad(float* sums, float low, float high, int t) {
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
            low += __shfl_xor_sync(0xffffffffu, low, offset);
            high += __shfl_xor_sync(0xffffffffu, high, offset);
        }
        if (t == 0) sums[0] += low, sums[8] += high;
    }
};

// A row's sum over the block's part of a tile, which is its `tile`th, after a barrier behind multiply().
__device__ __forceinline__ float row_sum(const Shared& shared, int tile, int row) {
    const float* const sums = reinterpret_cast<const float*>(shared.sums) + tile * TILE_ROWS + row;
    float chains[4] = {};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) chains[w % 4] += sums[w * SUMS * TILE_ROWS];
    return (chains[0] + chains[1]) + (chains[2] + chains[3]);
}

// What the block stores of a phase's result: finite, and not NOT_READY.
__device__ __forceinline__ float result(float value, Fault* fault, int kernel, int layer) {
    if (!is_finite(value)) report_fault(fault, FAULT_NOT_FINITE, kernel, layer);
    return ready_float(value);
}

template <typename Split>
__device__ __forceinline__ void store_pieces(const Shared& shared, const Run& run, int number, int rows, float scale, float* out,
                                             Fault* fault, int kernel, int layer) {
    stored_pieces<Split>(run, number, threadIdx.x, THREADS, rows, [&](int i, int at) {
        out[at] = result(scale * row_sum(shared, i / TILE_ROWS, i % TILE_ROWS), fault, kernel, layer);
    });
}

__device__ __forceinline__ void store_o(const Shared& shared, const Qwen2LayersArgs& a, int layer) {
    const Run tiles = shared.block.o;
    float* const out = a.o_pieces + shared.block.part.number * HIDDEN + tiles.first * TILE_ROWS;
    for (int i = threadIdx.x; i < tiles.units * TILE_ROWS; i += THREADS)
        out[i] = result(row_sum(shared, i / TILE_ROWS, i % TILE_ROWS), a.fault, KERNEL_O_PROJ, layer);
}

// Of the row that entered last, after a barrier behind that.
__device__ __forceinline__ float inverse_rms(const float* squares) {
    float sums[4] = {};  // chains that do not wait for one another
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sums[w % 4] += squares[w];
    const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return rsqrtf(sum * (1.0f / HIDDEN) + EPS);
}

__device__ __forceinline__ void store_inner(const Shared& shared, const Qwen2LayersArgs& a, float inverse, int i) {
    f16* const out = inner_of(a, i) + shared.block.gate_up.first * TILE_COLUMNS;
    for (int at = threadIdx.x; at < shared.block.gate_up.units * TILE_COLUMNS; at += THREADS) {
        const int column = at % TILE_COLUMNS;
        const float gate = inverse * row_sum(shared, at / TILE_COLUMNS, column);
        const float up = inverse * row_sum(shared, at / TILE_COLUMNS, column + TILE_COLUMNS);
        const f16 value = float_to_f16(silu(gate) * up * INNER_SCALE);
        const bool finite = (value & 0x7c00) != 0x7c00;
        if (!finite) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_GATE_UP, a.layer + i);
        out[at] = finite ? value : f16(0x7fff);
    }
}

// The sums that a block makes of the residual: its columns of it plus all pieces, to all blocks. One warp, behind a barrier
// that is behind the block's last use of what the words stored here say that it has read.
//
// Why so: each block would else read all pieces of all columns, several times as much.
struct OPieces {
    static constexpr int MOST = PARTS;
    static __device__ __forceinline__ constexpr int of_row(int) { return PARTS; }
    static __device__ __forceinline__ constexpr bool there(int, int) { return true; }
};
struct DownPieces {  // piece p of part n is number n + p * PARTS
    static constexpr int MOST = PARTS * DOWN_PIECES;
    static __device__ __forceinline__ bool there(int row, int number) { return number / PARTS < DownSplit::of_row(row); }
};

template <typename Split>
__device__ __forceinline__ void add_up(Shared& shared, const float* pieces, float* out, bool flagged, Polling& polling, int kernel,
                                       int layer) {
    constexpr int STRANDS = 4, EACH = ceil_div(Split::MOST, STRANDS), ACROSS = WARP / STRANDS;
    const int lane = threadIdx.x % WARP, strand = lane / ACROSS;
    const Run quads = shared.block.quads;
    for (int first = 0; first < quads.units; first += ACROSS) {
        const int q = first + lane % ACROSS, column = (quads.first + q) * 4;
        uint4 part[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int number = strand + e * STRANDS;
            part[e] = unready_if(q < quads.units && number < Split::MOST && Split::there(column, number));
        }
        bool ready;
        do {
            ready = true;
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const int number = strand + e * STRANDS, place = number % PARTS * (Split::MOST / PARTS) + number / PARTS;
                if (!floats_there(part[e])) part[e] = load_flagged_16(pieces + place * HIDDEN + column);
            }
#pragma unroll
            for (int e = 0; e < EACH; ++e) ready = ready && floats_there(part[e]);
        } while (polling.again(ready, kernel, layer));
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            sum.x += __uint_as_float(part[e].x), sum.y += __uint_as_float(part[e].y);
            sum.z += __uint_as_float(part[e].z), sum.w += __uint_as_float(part[e].w);
        }
#pragma unroll
        for (int offset = ACROSS; offset < WARP; offset *= 2) {
            sum.x += __shfl_xor_sync(0xffffffffu, sum.x, offset), sum.y += __shfl_xor_sync(0xffffffffu, sum.y, offset);
            sum.z += __shfl_xor_sync(0xffffffffu, sum.z, offset), sum.w += __shfl_xor_sync(0xffffffffu, sum.w, offset);
        }
        if (strand == 0 && q < quads.units) {
            const float4 x = plus(shared.x[q], sum);
            shared.x[q] = x;
            *reinterpret_cast<float4*>(out + column) =
                flagged ? make_float4(ready_float(x.x), ready_float(x.y), ready_float(x.z), ready_float(x.w)) : x;
        }
        __syncwarp();  // the sums are there for the next time
    }
}

// A row of the residual as the token.
struct Row {
    static constexpr int EIGHTS = (HIDDEN / 8 + THREADS - 1) / THREADS;

    static __device__ __forceinline__ int column(int i) { return (i * THREADS + int(threadIdx.x)) * 8; }

    // x * norm as the token, as soon as x is there, and the squares' sums: what makes it rms(x, norm) is the same factor for
    // all columns, and multiplies results (inverse_rms). Ends with a barrier: both are there for all.
    static __device__ __forceinline__ void enter(Shared& shared, const float* from, const f16* weights, Polling& polling, int kernel,
                                                 int layer) {
        const int odd = threadIdx.x % 2;
        uint4 norm[EIGHTS], x[EIGHTS][2];
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i)
            norm[i] = column(i) < HIDDEN ? load_weights(weights + column(i)) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) x[i][0] = x[i][1] = unready_if(column(i) < HIDDEN);
        bool ready;
        do {
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half)  // what two lanes load together lies together
                    if (!floats_there(x[i][half])) x[i][half] = load_flagged_16(from + column(i) + 8 * half - 4 * odd);
            }
            ready = true;
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) ready = ready && floats_there(x[i][0]) && floats_there(x[i][1]);
        } while (polling.again(ready, kernel, layer));
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            uint4 other = odd ? x[i][0] : x[i][1];
            other.x = __shfl_xor_sync(0xffffffffu, other.x, 1), other.y = __shfl_xor_sync(0xffffffffu, other.y, 1);
            other.z = __shfl_xor_sync(0xffffffffu, other.z, 1), other.w = __shfl_xor_sync(0xffffffffu, other.w, 1);
            x[i][0] = odd ? other : x[i][0], x[i][1] = odd ? x[i][1] : other;
        }
        hush(shared, false);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const float2 n[4] = {unpack_f16(norm[i].x), unpack_f16(norm[i].y), unpack_f16(norm[i].z), unpack_f16(norm[i].w)};
            const uint32_t words[8] = {x[i][0].x, x[i][0].y, x[i][0].z, x[i][0].w, x[i][1].x, x[i][1].y, x[i][1].z, x[i][1].w};
            float weighed[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float y = __uint_as_float(words[j]);
                weighed[j] = y * (j % 2 == 0 ? n[j / 2].x : n[j / 2].y);
                sum += y * y;
            }
            TOKEN::store(shared.token, column(i), weighed, column(i) < HIDDEN);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % WARP == 0) shared.squares[threadIdx.x / WARP] = sum;
        meet();  // all of the token is there
    }
};

// The part's columns of inner as the token, as soon as they are there. Ends with a barrier.
__device__ __forceinline__ void take_inner(Shared& shared, const f16* inner, Polling& polling, int layer) {
    constexpr int EIGHTS = (DOWN_COLUMNS / 8 + THREADS - 1) / THREADS;
    uint4 x[EIGHTS];
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) x[i] = unready_if((i * THREADS + int(threadIdx.x)) * 8 < DOWN_COLUMNS);
    bool ready;
    do {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i)
            if (!halves_there(x[i])) x[i] = load_flagged_16(inner + (i * THREADS + int(threadIdx.x)) * 8);
        ready = true;
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) ready = ready && halves_there(x[i]);
    } while (polling.again(ready, KERNEL_DOWN, layer));
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        const int column = (i * THREADS + int(threadIdx.x)) * 8;
        store_halves(shared.inner, column, x[i], column < DOWN_COLUMNS);
    }
    meet();  // all of the token is there
}

// ---- Attention ----

// A warp's pages: of the span those numbered warp, warp + SLOTS, ..., if it is below SLOTS, in a place of its own.
struct Copies {
    int known, known_from;  // lane's entry of the page table, of the warp's 32 pages from known_from on

    static __device__ __forceinline__ int entry(const int* table, const Span& span, int turn) {
        const int i = int(threadIdx.x) / WARP + turn * SLOTS;
        return i < span.count ? __ldcg(table + span.first - i) : 0;
    }

    __device__ __forceinline__ void begin(const int* table, const Span& span) {
        known_from = 0;
        known = entry(table, span, threadIdx.x % WARP);
    }

    // The keys or the values of the warp's page number `turn`.
    __device__ __forceinline__ void send(const Qwen2LayersArgs& a, Shared& shared, int i, int turn, bool values) {
        const int warp = threadIdx.x / WARP;
        if (turn < known_from || turn >= known_from + WARP) {
            known_from = turn / WARP * WARP;
            known = entry(a.page_table, shared.span, known_from + int(threadIdx.x % WARP));
        }
        // A page that embedding found none for: its report ends the request; nothing outside the pages may be touched.
        const int page = max_int(0, __shfl_sync(0xffffffffu, known, turn - known_from));
        if (threadIdx.x % WARP > 0) return;
        const int bytes = (warp == 0 && turn == 0 ? shared.span.own : PAGE) * ROW_BYTES;
        const int64_t from = (int64_t(page) * KV_HEADS + shared.block.place.kv_head) * (PAGE * HEAD_SIZE);
        uint64_t* const full = values ? &shared.v_full[warp] : &shared.k_full[warp];
        barrier_expect(full, bytes);
        if (bytes > 0)
            bulk_load(shared.pages[warp] + (values ? PAGE_BYTES : 0), (values ? a.v_pages[i] : a.k_pages[i]) + from, bytes, full);
    }

    // The layer's first pages. Whatever lay there has been read, and a barrier is behind that.
    __device__ __forceinline__ void send_first(const Qwen2LayersArgs& a, Shared& shared, int i) {
        if (int(threadIdx.x) / WARP >= min_int(SLOTS, shared.span.count)) return;
        send(a, shared, i, 0, false);
        send(a, shared, i, 0, true);
    }
};

// A thread's part of q, k or v: four dimensions from dim on, and those half a head on.
struct Input {
    int head;  // of the KV head's queries, then k, then v; GROUP + 2 for none
    int row, dim;

    __device__ __forceinline__ explicit Input(const Shared& shared) {
        const int found = threadIdx.x / HEAD_THREADS, kv_head = shared.block.place.kv_head;
        dim = threadIdx.x % HEAD_THREADS * 4;
        head = found < GROUP + (shared.span.tail() ? 2 : 0) ? found : GROUP + 2;
        row = (head < GROUP ? kv_head * GROUP + head : Q_HEADS + (head == GROUP ? 0 : KV_HEADS) + kv_head) * HEAD_SIZE + dim;
    }

    // All pieces together, as soon as they are there, and the bias.
    __device__ __forceinline__ void take(const float* pieces, const f16* biases, float4 (&x)[2], Polling& polling,
                                         int layer) const {
        uint4 piece[2][QKV_PIECES];
        uint2 bias[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = row + half * (HEAD_SIZE / 2), awaited = head < GROUP + 2 ? QkvSplit::of_row(at) : 0;
            bias[half] = head < GROUP + 2 ? __ldg(reinterpret_cast<const uint2*>(biases + at)) : make_uint2(0u, 0u);
#pragma unroll
            for (int p = 0; p < QKV_PIECES; ++p) piece[half][p] = unready_if(p < awaited);
        }
        bool ready;
        do {
            ready = true;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int p = 0; p < QKV_PIECES; ++p) {
                    if (!floats_there(piece[half][p]))
                        piece[half][p] = load_flagged_16(pieces + p * QKV_ROWS + row + half * (HEAD_SIZE / 2));
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int p = 0; p < QKV_PIECES; ++p) ready = ready && floats_there(piece[half][p]);
            }
        } while (polling.again(ready, KERNEL_ATTENTION, layer));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            x[half] = unpacked(bias[half]);
#pragma unroll
            for (int p = 0; p < QKV_PIECES; ++p) {
                const uint4 y = piece[half][p];
                x[half] = plus(x[half], make_float4(__uint_as_float(y.x), __uint_as_float(y.y), __uint_as_float(y.z),
                                                    __uint_as_float(y.w)));
            }
        }
    }
};

// Queries as operands, this token's key and value behind the tail page's rows. Ends with a barrier.
__device__ __forceinline__ void take_qkv(const Qwen2LayersArgs& a, Shared& shared, int i, Polling& polling) {
    const Span& span = shared.span;
    for (int at = threadIdx.x; at < STEPS * WARP; at += THREADS) {  // columns of no query
        if (at % WARP / 4 >= GROUP) shared.q[at / WARP][at % WARP] = make_uint4(0u, 0u, 0u, 0u);
    }
    if (span.tail()) {  // values of no token: their probability is 0, and times that they must be 0
        for (int at = (span.own + 1) * ROW_BYTES + int(threadIdx.x) * 16; at < PAGE_BYTES; at += THREADS * 16)
            *reinterpret_cast<uint4*>(shared.pages[0] + PAGE_BYTES + at) = make_uint4(0u, 0u, 0u, 0u);
    }
    if (threadIdx.x < ceil_div((GROUP + 2) * HEAD_THREADS, WARP) * WARP) {
        const Input in(shared);
        float4 x[2];
        in.take(a.qkv_pieces, a.bias[i], x, polling, a.layer + i);
        if (in.head <= GROUP) {
            const float4* const angles = reinterpret_cast<const float4*>(shared.rope + in.dim);
            const float4 p = angles[0], q = angles[1];
            turn(x, make_float4(p.x, p.z, q.x, q.z), make_float4(p.y, p.w, q.y, q.w));
        }
        if (in.head < GROUP) {
            store_query(shared.q, in.head, in.dim, x[0]);
            store_query(shared.q, in.head, in.dim + HEAD_SIZE / 2, x[1]);
        } else if (in.head < GROUP + 2) {
            const bool value = in.head > GROUP;
            f16* const cached = (value ? a.v_pages[i] : a.k_pages[i]) +
                                (int64_t(span.page) * KV_HEADS + shared.block.place.kv_head) * (PAGE * HEAD_SIZE);
            uint8_t* const page = shared.pages[0] + (value ? PAGE_BYTES : 0);
            store_row(page, span.page < 0 ? nullptr : cached, span.own, in.dim, x[0]);
            store_row(page, span.page < 0 ? nullptr : cached, span.own, in.dim + HEAD_SIZE / 2, x[1]);
        }
    }
    meet();  // queries, and this token's key and value, are there
}

// The block's span: its partial result, for all blocks of the part. Ends with a barrier.
__device__ __forceinline__ void attend(const Qwen2LayersArgs& a, Shared& shared, Copies& copies, int i, uint32_t& parity) {
    const Span& span = shared.span;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, layer = a.layer + i;
    const int active = min_int(SLOTS, span.count);
    if (warp < active) {
        Softmax softmax;
        softmax.begin();
        const uint32_t line = Softmax::line(shared_address(shared.pages[warp]));
        for (int page = warp, turn = 0; page < span.count; page += SLOTS, ++turn) {
            barrier_wait(&shared.k_full[warp], parity, a.fault, KERNEL_ATTENTION, layer);
            softmax.keys(line, shared.q, page == 0 ? span.own : PAGE);
            const bool more = page + SLOTS < span.count;
            if (more) {
                reads_before_copies();
                __syncwarp();  // every lane has read the keys
                copies.send(a, shared, i, turn + 1, false);
            }
            barrier_wait(&shared.v_full[warp], parity, a.fault, KERNEL_ATTENTION, layer);
            softmax.values(line);
            parity ^= 1;
            if (more) {
                reads_before_copies();
                __syncwarp();  // and the values
                copies.send(a, shared, i, turn + 1, true);
            }
        }
        softmax.end();
        __syncwarp();  // every lane has read the last page, where the warp's sums are put
        float4* const sums = reinterpret_cast<float4*>(shared.pages[warp]);
#pragma unroll
        for (int j = 0; j < STEPS; ++j) sums[j * WARP + lane] = softmax.out[j];
        if (lane < STATISTICS)
            shared.own[warp][lane] = make_float4(softmax.top[0], softmax.sum[0], softmax.top[1], softmax.sum[1]);
    }
    meet();  // all warps' sums are there
    f16* const halves = reinterpret_cast<f16*>(shared.q);
    uint4* const record = a.partials + int64_t(shared.block.place.kv_head * SPANS + shared.block.place.span) * RECORD_PIECES;
    if (threadIdx.x < ITEMS) {
        // All warps' loads together, also those of warps without a page, whose sums do not count.
        float4 all = make_float4(none(), 0.0f, none(), 0.0f), o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < SLOTS; ++w) {
            const float4 one = shared.own[w][threadIdx.x % STATISTICS];
            if (w < active) all.x = fmaxf(all.x, one.x), all.z = fmaxf(all.z, one.z);
        }
#pragma unroll
        for (int w = 0; w < SLOTS; ++w) {
            const float4 one = shared.own[w][threadIdx.x % STATISTICS];
            const float4 part = reinterpret_cast<const float4*>(shared.pages[w])[threadIdx.x];
            const float2 weight = make_float2(exp2_fast(one.x - all.x), exp2_fast(one.z - all.z));
            if (w >= active) continue;
            all.y = fmaf(weight.x, one.y, all.y), all.w = fmaf(weight.y, one.w, all.w);
            o = weighted(o, part, weight);
        }
        const float2 inverse = make_float2(__frcp_rn(all.y), __frcp_rn(all.w));
        const int query = threadIdx.x % 4 * 2, dim = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
        f16* const to = halves + query * HEAD_SIZE + dim;
        if (query < GROUP) to[0] = float_to_f16(o.x * inverse.x), to[8] = float_to_f16(o.z * inverse.x);
        if (query + 1 < GROUP)
            to[HEAD_SIZE] = float_to_f16(o.y * inverse.y), to[HEAD_SIZE + 8] = float_to_f16(o.w * inverse.y);
        if (threadIdx.x < STATISTICS) {
            reinterpret_cast<float4*>(record + HEAD_PIECES)[threadIdx.x] =
                make_float4(ready_float(all.x), ready_float(all.y), ready_float(all.z), ready_float(all.w));
        }
    }
    meet();  // the span's halves are there, and no one needs its pages
    if (threadIdx.x < HEAD_PIECES) record[threadIdx.x] = reinterpret_cast<const uint4*>(halves)[threadIdx.x];
}

// The spans' results of the part's heads, as soon as they are there, as o_proj's token. Ends with a barrier.
__device__ __forceinline__ void merge(const Qwen2LayersArgs& a, Shared& shared, Polling& polling, int layer) {
    const int spans = shared.span.spans;
    const int piece = threadIdx.x % MERGED, set = threadIdx.x / MERGED, query = piece % HEAD_PIECES / HEAD_THREADS;
    const uint4* const records =
        a.partials + int64_t(shared.block.part.number * PART_HEADS + piece / HEAD_PIECES) * (SPANS * RECORD_PIECES);
    float acc[8] = {}, top = none(), sum = 0.0f;
    for (int from = 0; from < spans; from += SETS * AT_ONCE) {
        uint4 x[AT_ONCE];
        uint2 statistics[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            x[n] = unready_if(set < SETS && from + n * SETS + set < spans);
            statistics[n] = make_uint2(x[n].x, x[n].x);
        }
        bool ready;
        do {
            ready = true;
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const uint4* const record = records + (from + n * SETS + set) * RECORD_PIECES;
                if (!halves_there(x[n])) x[n] = load_flagged_16(record + piece % HEAD_PIECES);
                if (statistics[n].x == NOT_READY || statistics[n].y == NOT_READY)
                    statistics[n] = load_flagged_8(reinterpret_cast<const uint2*>(record + HEAD_PIECES) + query);
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n)
                ready = ready && halves_there(x[n]) && statistics[n].x != NOT_READY && statistics[n].y != NOT_READY;
        } while (polling.again(ready, KERNEL_O_PROJ, layer));
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            if (set >= SETS || from + n * SETS + set >= spans) continue;
            const float other = __uint_as_float(statistics[n].x), larger = fmaxf(top, other);
            const float factor = exp2_fast(top - larger), weight = exp2_fast(other - larger) * __uint_as_float(statistics[n].y);
            const uint32_t words[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 o = unpack_f16(words[j]);
                acc[2 * j] = fmaf(weight, o.x, acc[2 * j] * factor);
                acc[2 * j + 1] = fmaf(weight, o.y, acc[2 * j + 1] * factor);
            }
            top = larger;
            sum = fmaf(sum, factor, weight);
        }
    }
    shared.merge.sums[0][threadIdx.x] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    shared.merge.sums[1][threadIdx.x] = make_float4(acc[4], acc[5], acc[6], acc[7]);
    shared.merge.statistics[threadIdx.x] = make_float2(top, sum);
    meet();  // all sets' sums are there
    if (threadIdx.x < ceil_div(MERGED, WARP) * WARP) {
        float2 of[SETS];
        float largest = none(), total = 0.0f;
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
            of[s] = shared.merge.statistics[s * MERGED + piece];
            largest = fmaxf(largest, of[s].x);
        }
        float y[8] = {};
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
            const float weight = exp2_fast(of[s].x - largest);
            const float4 lo = shared.merge.sums[0][s * MERGED + piece], hi = shared.merge.sums[1][s * MERGED + piece];
            total = fmaf(weight, of[s].y, total);
            y[0] = fmaf(weight, lo.x, y[0]), y[1] = fmaf(weight, lo.y, y[1]);
            y[2] = fmaf(weight, lo.z, y[2]), y[3] = fmaf(weight, lo.w, y[3]);
            y[4] = fmaf(weight, hi.x, y[4]), y[5] = fmaf(weight, hi.y, y[5]);
            y[6] = fmaf(weight, hi.z, y[6]), y[7] = fmaf(weight, hi.w, y[7]);
        }
        const float inverse = 1.0f / total;
        bool finite = true;
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] *= inverse, finite = finite && is_finite(y[j]);
        if (!finite) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTENTION, layer);
        TOKEN::store(shared.token, piece * 8, y, threadIdx.x < MERGED);
    }
    meet();  // all of the token is there
}

// ---- The launch ----

__device__ __forceinline__ void compute(const Qwen2LayersArgs& a, Shared& shared) {
    Stream stream{shared, a.fault, 0};
    Polling polling{a.fault, 0};
    pdl_wait();  // the residual, the position and its page
    pdl_trigger();
    const int position = __ldcg(a.positions);
    if (threadIdx.x == 0) shared.span.find(a.page_table, position, shared.block.place);
    if (threadIdx.x < HEAD_SIZE / 2) {
        float sine, cosine;
        sincospif(2.0f * turns_of(position, __ldg(a.inverse_frequencies + threadIdx.x)), &sine, &cosine);
        shared.rope[threadIdx.x] = make_float2(cosine, sine);
    }
    for (int q = threadIdx.x; q < shared.block.quads.units; q += THREADS)
        shared.x[q] = __ldcg(reinterpret_cast<const float4*>(a.residual) + shared.block.quads.first + q);
    meet();  // the span is there
    Copies copies;
    copies.begin(a.page_table, shared.span);
    copies.send_first(a, shared, 0);
    uint32_t page_parity = 0, cleared = 0;
    const auto entered = [&]() {
        if (threadIdx.x == 0) barrier_arrive(&shared.entered);
    };
    const auto await_clearing = [&](int layer) {
        barrier_wait(&shared.cleared, cleared, a.fault, KERNEL_CONTROL, layer);
        cleared ^= 1;
    };

    for (int i = 0; i < a.layers; ++i) {
        const int layer = a.layer + i;
        Row::enter(shared, i == 0 ? a.residual : end_of(a, i - 1), a.input_norm[i], polling, KERNEL_QKV, layer);
        phase_resumed(i, QKV);
        float inverse = inverse_rms(shared.squares);
        stream.multiply<QKV>(shared.token, layer);
        meet();  // every warp's sums are there, and none needs the token
        store_pieces<QkvSplit>(shared, shared.block.units[QKV], blockIdx.x, QKV_ROWS, inverse, a.qkv_pieces,
                               a.fault, KERNEL_QKV, layer);
        phase_ended(i, QKV);

        if (shared.span.count > 0) {
            take_qkv(a, shared, i, polling);
            phase_resumed(i, ATTENTION);
            attend(a, shared, copies, i, page_parity);
        }
        phase_ended(i, ATTENTION);

        merge(a, shared, polling, layer);
        phase_resumed(i, O_PROJ);
        stream.multiply<O_PROJ>(shared.token, layer);
        meet();  // as above
        store_o(shared, a, layer);
        phase_ended(i, O_PROJ);

        hush(shared, true);
        if (threadIdx.x < WARP) add_up<OPieces>(shared, a.o_pieces, middle_of(a, i), true, polling, KERNEL_GATE_UP, layer);
        meet();  // before, polls would only be in the way of that
        Row::enter(shared, middle_of(a, i), a.post_norm[i], polling, KERNEL_GATE_UP, layer);
        phase_resumed(i, GATE_UP);
        entered();
        inverse = inverse_rms(shared.squares);
        stream.multiply<GATE_UP>(shared.token, layer);
        meet();  // as above
        await_clearing(layer);
        store_inner(shared, a, inverse, i);
        phase_ended(i, GATE_UP);

        take_inner(shared, inner_of(a, i) + shared.block.part.number * DOWN_COLUMNS, polling, layer);
        phase_resumed(i, DOWN);
        stream.multiply<DOWN>(shared.inner, layer);
        reads_before_copies();  // of what lay where pages come now
        meet();                 // as above
        if (i + 1 < a.layers) copies.send_first(a, shared, i + 1);
        store_pieces<DownSplit>(shared, shared.block.units[DOWN], shared.block.part.index, HIDDEN, 1.0f / INNER_SCALE,
                                down_of(a, i) + shared.block.part.number * (DOWN_PIECES * HIDDEN), a.fault, KERNEL_DOWN, layer);
        phase_ended(i, DOWN);
        hush(shared, i + 1 < a.layers);
        if (threadIdx.x < WARP) {
            const bool last = i + 1 == a.layers;
            add_up<DownPieces>(shared, down_of(a, i), last ? a.residual_out : end_of(a, i), !last, polling, KERNEL_QKV, layer);
        }
        meet();  // before, polls would only be in the way of that
    }
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) qwen2_layers(const __grid_constant__ Qwen2LayersArgs a) {
    extern __shared__ __align__(256) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x == THREADS) {  // what sends copies: the first ones wait for no one
        shared.block.find();
        shared.quiet = 0;
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(&shared.full[s], 1);
            barrier_init(&shared.empty[s], TEAM);
        }
        for (int s = 0; s < SLOTS; ++s) {
            barrier_init(&shared.k_full[s], 1);
            barrier_init(&shared.v_full[s], 1);
        }
        barrier_init(&shared.entered, 1);
        barrier_init(&shared.cleared, 1);
        barrier_init_fence();
    }
    __syncthreads();  // the barriers are there, and what the block has
    // A block gets 96 registers a thread: of 20 warps, five share those of a quarter of the multiprocessor.
    static_assert(WARPS * 112 + 4 * 32 <= (WARPS + 4) * 96, "what one warp takes another one must have given");
    if (warp < WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        compute(a, shared);
        return;
    }
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == THREADS) Feed{a, shared, evict_first(), 0, {0, QKV, 0}}.send_all();
    if (warp == WARPS + 1) Clear{a, shared}.run();
}
