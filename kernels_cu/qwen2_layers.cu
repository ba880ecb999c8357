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
//   o_proj's results knows that all have read the last layer's down (all stored q, k, v since): that is cleared then;
//   gate and up's   that all have read q, k, v, attention's and o_proj's;
//   down's          that all have read inner.
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
constexpr int ALL_THREADS = THREADS + 4 * WARP;  // those that multiply; a warp that sends copies, one that clears, two idle

using QkvSplit = Pieces<QKV_ROWS, HIDDEN, GEMV_BLOCKS>;
using DownSplit = Pieces<HIDDEN, INNER, GEMV_BLOCKS>;

static_assert(HIDDEN % GROUP_SIZE == 0 && KV_HEADS % PARTS == 0 && O_COLUMNS % GROUP_SIZE == 0, "whole groups");
static_assert(QkvSplit::TAKERS == GEMV_BLOCKS && DownSplit::TAKERS == GEMV_BLOCKS && GATE_UP_TILES >= GEMV_BLOCKS,
              "a block that stores nothing in a phase would not be waited for");

enum Phase { QKV, ATTENTION, O_PROJ, GATE_UP, DOWN };

// ---- What a block has of each matrix ----

// The blocks that have a part of o_proj's columns, and where this block stands among them.
struct Part {
    int number, index, blocks;
};
__device__ __forceinline__ Part own_part() {
    const int number = ((int(blockIdx.x) + 1) * PARTS - 1) / GEMV_BLOCKS;
    const int first = GEMV_BLOCKS * number / PARTS, next = GEMV_BLOCKS * (number + 1) / PARTS;
    return {number, int(blockIdx.x) - first, next - first};
}

template <int K>
constexpr int GROUPS_OF = padded(K) / GROUP_SIZE;

template <typename Split>
__device__ __forceinline__ Run shared_run() {
    return part_of(Run{0, Split::UNITS}, blockIdx.x, Split::TAKERS);
}
__device__ __forceinline__ Run gate_up_tiles() { return part_of(Run{0, GATE_UP_TILES}, blockIdx.x, GEMV_BLOCKS); }
__device__ __forceinline__ Run o_tiles() {
    const Part part = own_part();
    return part_of(Run{0, O_TILES}, part.index, part.blocks);
}

// A phase's groups in a tile of the block.
template <int PHASE>
constexpr int GROUPS_IN = PHASE == O_PROJ ? O_COLUMNS / GROUP_SIZE : PHASE == DOWN ? GROUPS_OF<INNER> : GROUPS_OF<HIDDEN>;

// The block's units: of the matrix, or of o_proj those of the block's tiles and columns.
template <int PHASE>
__device__ __forceinline__ Run block_run() {
    if constexpr (PHASE == QKV) return shared_run<QkvSplit>();
    if constexpr (PHASE == DOWN) return shared_run<DownSplit>();
    const Run tiles = PHASE == O_PROJ ? o_tiles() : gate_up_tiles();
    return Run{tiles.first * GROUPS_IN<PHASE>, tiles.units * GROUPS_IN<PHASE>};
}

// The most tiles that a block has units of.
__device__ __host__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __host__ constexpr int larger(int a, int b) { return a > b ? a : b; }
template <typename Split>
constexpr int TOUCHED = (ceil_div(Split::UNITS, Split::TAKERS) + Split::GROUPS - 2) / Split::GROUPS + 1;
template <int PHASE>
constexpr int SUMS_OF = PHASE == O_PROJ ? ceil_div(O_TILES, GEMV_BLOCKS / PARTS)
                        : PHASE == DOWN ? TOUCHED<DownSplit>
                        : PHASE == QKV  ? TOUCHED<QkvSplit>
                                        : ceil_div(GATE_UP_TILES, GEMV_BLOCKS);
constexpr int SUMS = larger(larger(SUMS_OF<O_PROJ>, SUMS_OF<GATE_UP>), larger(SUMS_OF<DOWN>, SUMS_OF<QKV>));
constexpr int TURN = WARPS * STAGE_UNITS;  // units of a stage, which the warps take together
constexpr int TURN_BYTES = TURN * UNIT_BYTES;

// ---- Attention's spans ----

constexpr int HEAD_PIECES = GROUP * HEAD_SIZE / 8;                // of a record: 16 bytes each
constexpr int RECORD_PIECES = HEAD_PIECES + STATISTICS;
constexpr int MERGED = PART_HEADS * HEAD_PIECES;                  // of the part's columns
constexpr int SETS = THREADS / MERGED;                            // threads that share the spans of a piece
constexpr int AT_ONCE = 3;                                        // spans that a thread polls for together
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
    Part part;
    Place place;

    __device__ __forceinline__ void find() {
        units[QKV] = block_run<QKV>(), units[O_PROJ] = block_run<O_PROJ>();
        units[GATE_UP] = block_run<GATE_UP>(), units[DOWN] = block_run<DOWN>();
        gate_up = gate_up_tiles(), o = o_tiles();
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
        uint8_t inner[token_bytes(INNER)];
    };
    uint8_t token[token_bytes(larger(HIDDEN, O_COLUMNS))];
    float4 sums[WARPS][SUMS][TILE_ROWS / 4];  // each warp's, of the block's tiles
    QueryStep q[STEPS];                       // then a span's halves
    float4 own[SLOTS][STATISTICS];            // each attending warp's
    float2 rope[HEAD_SIZE / 2];               // cosine and sine of the position
    float squares[WARPS];                     // sums of each warp's columns
    uint64_t full[STAGES], empty[STAGES];
    uint64_t k_full[SLOTS], v_full[SLOTS];
    uint64_t entered, cleared;                // a token is there whose words say what may be cleared; that has been
    Block block;
    Span span;
};
static_assert(sizeof(Shared) <= SMEM, "the host reserves less than this needs");
static_assert(TURN_BYTES % ROW_BYTES == 0, "where pages begin");

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// ---- The warp that sends copies: one lane ----

struct Feed {
    const Qwen2LayersArgs& a;
    Shared& shared;
    uint64_t policy;
    int sent;

    // A stage may be sent once the one that lay there has been multiplied, and one more has come.
    __device__ __forceinline__ uint64_t* next_stage(int units, int layer) {
        const int slot = sent % STAGES;
        if (sent >= STAGES) barrier_wait(&shared.empty[slot], (sent / STAGES - 1) & 1, a.fault, KERNEL_GATE_UP, layer);
        if (AHEAD < STAGES && sent >= AHEAD) {
            const int older = sent - AHEAD;
            barrier_wait(&shared.full[older % STAGES], older / STAGES & 1, a.fault, KERNEL_GATE_UP, layer);
        }
        barrier_expect(&shared.full[slot], units * UNIT_BYTES);
        return &shared.full[slot];
    }

    template <int PHASE>
    __device__ __forceinline__ void send(const uint8_t* matrix, int layer) {
        const Run run = shared.block.units[PHASE];
        for (int next = 0; next < run.units; next += TURN) {
            const int units = min_int(run.units - next, TURN);
            uint8_t* const to = shared.ring[sent % STAGES];
            uint64_t* const full = next_stage(units, layer);
            if constexpr (PHASE == O_PROJ && PARTS > 1) {
                constexpr int GROUPS = GROUPS_IN<O_PROJ>;
                for (int done = 0; done < units;) {  // a tile's columns of the part lie together
                    const int unit = run.first + next + done, tile = unit / GROUPS, group = unit % GROUPS;
                    const int some = min_int(GROUPS - group, units - done);
                    const int64_t from = int64_t(tile * GROUPS_OF<Q_WIDTH> + shared.block.part.number * GROUPS + group) * UNIT_BYTES;
                    bulk_load(to + done * UNIT_BYTES, matrix + from, some * UNIT_BYTES, full, policy);
                    done += some;
                }
            } else {
                bulk_load(to, matrix + int64_t(run.first + next) * UNIT_BYTES, units * UNIT_BYTES, full, policy);
            }
            ++sent;
        }
    }

    __device__ __forceinline__ void send_all() {
        for (int i = 0; i < a.layers; ++i) {
            send<QKV>(a.qkv_weights[i], a.layer + i);
            send<O_PROJ>(a.o_weights[i], a.layer + i);
            send<GATE_UP>(a.gate_up_weights[i], a.layer + i);
            send<DOWN>(a.down_weights[i], a.layer + i);
        }
    }
};

// ---- The warp that clears ----

// The rows of a split matrix that the block has stored, each in its piece: use(index of the word).
template <typename Split, typename Use>
__device__ __forceinline__ void stored_pieces(const Run& block, int first, int step, int rows, Use use) {
    const int tile = block.first / Split::GROUPS, last = (block.first + block.units - 1) / Split::GROUPS;
    for (int i = first; i < (last - tile + 1) * TILE_ROWS; i += step) {
        const int row = tile * TILE_ROWS + i;
        const int piece = int(blockIdx.x) - Split::block_of(row / TILE_ROWS * Split::GROUPS);
        use(i, piece * rows + row);
    }
}

struct Clear {
    const Qwen2LayersArgs& a;
    Shared& shared;
    int phases;

    __device__ __forceinline__ void await_entry(int layer) {
        barrier_wait(&shared.entered, phases & 1, a.fault, KERNEL_CONTROL, layer);
        ++phases;
    }
    __device__ __forceinline__ void tell() {
        __threadfence();  // this lane's words are cleared for all, before
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(&shared.cleared);
    }

    __device__ __forceinline__ void run() {
        const int lane = threadIdx.x % WARP;
        const uint32_t word = NOT_READY;
        const Block& block = shared.block;
        for (int i = 0; i < a.layers; ++i) {
            const int layer = a.layer + i;
            await_entry(layer);
            if (i > 0) {
                uint4* const inner = reinterpret_cast<uint4*>(a.inner) + block.gate_up.first;  // a tile makes eight halves
                for (int t = lane; t < block.gate_up.units; t += WARP) inner[t] = make_uint4(word, word, word, word);
            }
            tell();
            await_entry(layer);
            if (i > 0) {
                stored_pieces<DownSplit>(block.units[DOWN], lane, WARP, HIDDEN,
                                         [&](int, int at) { reinterpret_cast<uint32_t*>(a.down_pieces)[at] = word; });
            }
            tell();
            await_entry(layer);
            stored_pieces<QkvSplit>(block.units[QKV], lane, WARP, QKV_ROWS,
                                    [&](int, int at) { reinterpret_cast<uint32_t*>(a.qkv_pieces)[at] = word; });
            if (block.place.span < shared.span.spans) {
                uint4* const record = a.partials + int64_t(block.place.kv_head * SPANS + block.place.span) * RECORD_PIECES;
                for (int p = lane; p < RECORD_PIECES; p += WARP) record[p] = make_uint4(word, word, word, word);
            }
            uint32_t* const o =
                reinterpret_cast<uint32_t*>(a.o_pieces) + block.part.number * HIDDEN + block.o.first * TILE_ROWS;
            for (int r = lane; r < block.o.units * TILE_ROWS; r += WARP) o[r] = word;
            tell();
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

// The stages in the order in which they come.
struct Stream {
    Shared& shared;
    Fault* fault;
    int slot;
    uint32_t parity;

    // The warps' parts of a phase times the token, into their sums.
    template <int PHASE>
    __device__ __forceinline__ void multiply(const uint8_t* token, int layer) {
        constexpr int GROUPS = GROUPS_IN<PHASE>;
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        const Run block = shared.block.units[PHASE];
        float4* const all = shared.sums[warp][0];
#pragma unroll
        for (int i = 0; i < SUMS_OF<PHASE> * 4; i += WARP)
            if (i + lane < SUMS_OF<PHASE> * 4) all[i + lane] = make_float4(0, 0, 0, 0);
        __syncwarp();  // zeros where the warp has nothing
        float* sums = reinterpret_cast<float*>(all) + g;
        float low = 0.0f, high = 0.0f;
        int group = block.first % GROUPS + warp * STAGE_UNITS;
        const auto next_tile = [&]() {
            if (t == 0) sums[0] = low, sums[8] = high;
            low = high = 0.0f;
            sums += TILE_ROWS;
            group -= GROUPS;
        };
        TOKEN::Columns x[STAGE_UNITS];
        for (int unit = warp * STAGE_UNITS, turn = 0; turn < block.units; unit += TURN, turn += TURN) {
            barrier_wait(&shared.full[slot], parity, fault, KERNEL_DOWN, layer);
            const bool some = unit < block.units;
            float2 c[STAGE_UNITS];
            f16 scale[STAGE_UNITS][2];
            if (some) {
                while (group >= GROUPS) next_tile();
                const uint8_t* const units = shared.ring[slot] + warp * STAGE_BYTES;
                uint4 w[STAGE_UNITS][2];
#pragma unroll
                for (int u = 0; u < STAGE_UNITS; ++u) {  // the last turn's missing units are there as nothing that counts
                    const uint8_t* const at = units + u * UNIT_BYTES;
                    w[u][0] = reinterpret_cast<const uint4*>(at)[lane];
                    w[u][1] = reinterpret_cast<const uint4*>(at)[WARP + lane];
                    scale[u][0] = reinterpret_cast<const f16*>(at + CODE_BYTES)[g];
                    scale[u][1] = reinterpret_cast<const f16*>(at + CODE_BYTES)[g + 8];
                    x[u].load(token + (group + u) % GROUPS * TOKEN::GROUP_BYTES, lane);
                }
#pragma unroll
                for (int u = 0; u < STAGE_UNITS; ++u) c[u] = x[u].times(w[u]);
            }
            // Behind the products, so that these are under way meanwhile.
            reads_before_copies();
            __syncwarp();  // every lane has its part before the place is given back
            if (lane == 0) barrier_arrive(&shared.empty[slot]);
            if (++slot == STAGES) slot = 0, parity ^= 1;
            if (some) {
#pragma unroll
                for (int u = 0; u < STAGE_UNITS; ++u) {
                    if (unit + u >= block.units) break;
                    if (u > 0 && group + u == GROUPS) next_tile();
                    low += f16_to_float(scale[u][0]) * c[u].x;
                    high += f16_to_float(scale[u][1]) * c[u].y;
                }
                group += TURN;
            }
        }
        if (t == 0 && warp * STAGE_UNITS < block.units) sums[0] = low, sums[8] = high;
    }
};

// A row's sum over the block's part of a tile, which is its `tile`th, after a barrier behind multiply().
__device__ __forceinline__ float row_sum(const Shared& shared, int tile, int row) {
    const float* const sums = reinterpret_cast<const float*>(shared.sums) + tile * TILE_ROWS + row;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += sums[w * SUMS * TILE_ROWS];
    return total;
}

// What the block stores of a phase's result: finite, and not NOT_READY.
__device__ __forceinline__ float result(float value, Fault* fault, int kernel, int layer) {
    if (!is_finite(value)) report_fault(fault, FAULT_NOT_FINITE, kernel, layer);
    return ready_float(value);
}

template <typename Split>
__device__ __forceinline__ void store_pieces(const Shared& shared, const Run& run, int rows, float scale, float* out,
                                             Fault* fault, int kernel, int layer) {
    stored_pieces<Split>(run, threadIdx.x, THREADS, rows, [&](int i, int at) {
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
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += squares[w];
    return rsqrtf(sum * (1.0f / HIDDEN) + EPS);
}

__device__ __forceinline__ void store_inner(const Shared& shared, const Qwen2LayersArgs& a, int layer) {
    const Run tiles = shared.block.gate_up;
    const float inverse = inverse_rms(shared.squares);
    for (int i = threadIdx.x; i < tiles.units * TILE_COLUMNS; i += THREADS) {
        const int column = i % TILE_COLUMNS;
        const float gate = inverse * row_sum(shared, i / TILE_COLUMNS, column);
        const float up = inverse * row_sum(shared, i / TILE_COLUMNS, column + TILE_COLUMNS);
        const f16 value = float_to_f16(silu(gate) * up * INNER_SCALE);
        const bool finite = (value & 0x7c00) != 0x7c00;
        if (!finite) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_GATE_UP, layer);
        a.inner[tiles.first * TILE_COLUMNS + i] = finite ? value : f16(0x7fff);
    }
}

struct OPieces {
    static __device__ __forceinline__ constexpr int of_row(int) { return PARTS; }
};

// The residual's columns that a thread has, all through the launch.
struct Row {
    static constexpr int EIGHTS = (HIDDEN / 8 + THREADS - 1) / THREADS;

    float x[EIGHTS][8];
    uint4 norm[EIGHTS];

    static __device__ __forceinline__ int column(int i) { return (i * THREADS + int(threadIdx.x)) * 8; }

    __device__ __forceinline__ void load_norm(const f16* from) {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i)
            norm[i] = column(i) < HIDDEN ? load_weights(from + column(i)) : make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void load(const float* residual) {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const bool there = column(i) < HIDDEN;
            const float4* const from = reinterpret_cast<const float4*>(residual + column(i));
            const float4 a = there ? __ldcg(from) : make_float4(0, 0, 0, 0), b = there ? __ldcg(from + 1) : a;
            x[i][0] = a.x, x[i][1] = a.y, x[i][2] = a.z, x[i][3] = a.w;
            x[i][4] = b.x, x[i][5] = b.y, x[i][6] = b.z, x[i][7] = b.w;
        }
    }

    // x += pieces, as soon as they are there. Only what has not come is read again: all blocks poll, and L2 has others to serve.
    template <typename Split, int COUNT>
    __device__ __forceinline__ void add(const float* pieces, Polling& polling, int kernel, int layer) {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            uint4 part[COUNT][2];
            const int awaited = column(i) < HIDDEN ? Split::of_row(column(i)) : 0;
#pragma unroll
            for (int p = 0; p < COUNT; ++p) part[p][0] = part[p][1] = unready_if(p < awaited);
            bool ready;
            do {
#pragma unroll
                for (int p = 0; p < COUNT; ++p) {
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (!floats_there(part[p][half]))
                            part[p][half] = load_flagged_16(pieces + p * HIDDEN + column(i) + 4 * half);
                }
                ready = true;
#pragma unroll
                for (int p = 0; p < COUNT; ++p) ready = ready && floats_there(part[p][0]) && floats_there(part[p][1]);
            } while (polling.again(ready, kernel, layer));
#pragma unroll
            for (int p = 0; p < COUNT; ++p) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    x[i][4 * half] += __uint_as_float(part[p][half].x);
                    x[i][4 * half + 1] += __uint_as_float(part[p][half].y);
                    x[i][4 * half + 2] += __uint_as_float(part[p][half].z);
                    x[i][4 * half + 3] += __uint_as_float(part[p][half].w);
                }
            }
        }
    }

    // Blocks store it in turns.
    __device__ __forceinline__ void store(float* out) const {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const int c = column(i);
            if (c < HIDDEN && c / 8 % GEMV_BLOCKS == int(blockIdx.x)) {
                float4* const to = reinterpret_cast<float4*>(out + c);
                to[0] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
                to[1] = make_float4(x[i][4], x[i][5], x[i][6], x[i][7]);
            }
        }
    }

    // x * norm as the token, and the squares' sums: what makes it rms(x, norm) is the same factor for all columns, and
    // multiplies results (inverse_rms). Ends with a barrier: both are there for all.
    __device__ __forceinline__ void enter(Shared& shared) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const float2 n[4] = {unpack_f16(norm[i].x), unpack_f16(norm[i].y), unpack_f16(norm[i].z), unpack_f16(norm[i].w)};
            float weighed[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                weighed[j] = x[i][j] * (j % 2 == 0 ? n[j / 2].x : n[j / 2].y);
                sum += x[i][j] * x[i][j];
            }
            TOKEN::store(shared.token, column(i), weighed, column(i) < HIDDEN);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % WARP == 0) shared.squares[threadIdx.x / WARP] = sum;
        meet();  // all of the token is there
    }
};

// inner as the token, as soon as it is there. Ends with a barrier.
__device__ __forceinline__ void take_inner(Shared& shared, const f16* inner, Polling& polling, int layer) {
    constexpr int EIGHTS = (padded(INNER) / 8 + THREADS - 1) / THREADS;
    uint4 x[EIGHTS];
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) x[i] = unready_if((i * THREADS + int(threadIdx.x)) * 8 < padded(INNER));
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
        store_halves(shared.inner, column, x[i], column < padded(INNER));
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

    // The warp's page number `turn`.
    __device__ __forceinline__ void send(const Qwen2LayersArgs& a, Shared& shared, int i, int turn) {
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
        barrier_expect(&shared.k_full[warp], bytes);
        barrier_expect(&shared.v_full[warp], bytes);
        if (bytes > 0) {
            bulk_load(shared.pages[warp], a.k_pages[i] + from, bytes, &shared.k_full[warp]);
            bulk_load(shared.pages[warp] + PAGE_BYTES, a.v_pages[i] + from, bytes, &shared.v_full[warp]);
        }
    }

    // The layer's first pages. Whatever lay there has been read, and a barrier is behind that.
    __device__ __forceinline__ void send_first(const Qwen2LayersArgs& a, Shared& shared, int i) {
        if (int(threadIdx.x) / WARP < min_int(SLOTS, shared.span.count)) send(a, shared, i, 0);
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
            barrier_wait(&shared.v_full[warp], parity, a.fault, KERNEL_ATTENTION, layer);
            softmax.values(line);
            parity ^= 1;
            if (page + SLOTS < span.count) {
                reads_before_copies();
                __syncwarp();  // every lane has read the page
                copies.send(a, shared, i, turn + 1);
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
        float4 all = make_float4(none(), 0.0f, none(), 0.0f), o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int w = 0; w < active; ++w) {
            const float4 one = shared.own[w][threadIdx.x % STATISTICS];
            all.x = fmaxf(all.x, one.x), all.z = fmaxf(all.z, one.z);
        }
        for (int w = 0; w < active; ++w) {
            const float4 one = shared.own[w][threadIdx.x % STATISTICS];
            const float2 weight = make_float2(exp2_fast(one.x - all.x), exp2_fast(one.z - all.z));
            all.y = fmaf(weight.x, one.y, all.y), all.w = fmaf(weight.y, one.w, all.w);
            o = weighted(o, reinterpret_cast<const float4*>(shared.pages[w])[threadIdx.x], weight);
        }
        const float2 inverse = make_float2(1.0f / all.y, 1.0f / all.w);
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
    Stream stream{shared, a.fault, 0, 0};
    Polling polling{a.fault, 0};
    Row row;
    row.load_norm(a.input_norm[0]);
    pdl_wait();  // the residual, the position and its page
    pdl_trigger();
    row.load(a.residual);
    const int position = __ldcg(a.positions);
    if (threadIdx.x == 0) shared.span.find(a.page_table, position, shared.block.place);
    if (threadIdx.x < HEAD_SIZE / 2) {
        float sine, cosine;
        sincospif(2.0f * turns_of(position, __ldg(a.inverse_frequencies + threadIdx.x)), &sine, &cosine);
        shared.rope[threadIdx.x] = make_float2(cosine, sine);
    }
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
        row.enter(shared);
        phase_resumed(i, QKV);
        entered();
        stream.multiply<QKV>(shared.token, layer);
        meet();  // every warp's sums are there, and none needs the token
        await_clearing(layer);
        store_pieces<QkvSplit>(shared, shared.block.units[QKV], QKV_ROWS, inverse_rms(shared.squares), a.qkv_pieces, a.fault,
                               KERNEL_QKV, layer);
        phase_ended(i, QKV);

        row.load_norm(a.post_norm[i]);
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

        row.add<OPieces, PARTS>(a.o_pieces, polling, KERNEL_GATE_UP, layer);
        row.enter(shared);
        phase_resumed(i, GATE_UP);
        entered();
        stream.multiply<GATE_UP>(shared.token, layer);
        meet();  // as above
        await_clearing(layer);
        store_inner(shared, a, layer);
        phase_ended(i, GATE_UP);

        if (i + 1 < a.layers) row.load_norm(a.input_norm[i + 1]);
        take_inner(shared, a.inner, polling, layer);
        phase_resumed(i, DOWN);
        entered();
        stream.multiply<DOWN>(shared.inner, layer);
        reads_before_copies();  // of what lay where pages come now
        meet();                 // as above
        if (i + 1 < a.layers) copies.send_first(a, shared, i + 1);
        await_clearing(layer);
        store_pieces<DownSplit>(shared, shared.block.units[DOWN], HIDDEN, 1.0f / INNER_SCALE, a.down_pieces, a.fault,
                                KERNEL_DOWN, layer);
        phase_ended(i, DOWN);
        row.add<DownSplit, DOWN_PIECES>(a.down_pieces, polling, KERNEL_QKV, layer);
    }
    row.store(a.residual_out);
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) qwen2_layers(const __grid_constant__ Qwen2LayersArgs a) {
    extern __shared__ __align__(256) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x == THREADS) {  // what sends copies: the first ones wait for no one
        shared.block.find();
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(&shared.full[s], 1);
            barrier_init(&shared.empty[s], WARPS);
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
    if (warp < WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        compute(a, shared);
        return;
    }
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    if (threadIdx.x == THREADS) Feed{a, shared, evict_first(), 0}.send_all();
    if (warp == WARPS + 1) Clear{a, shared, 0}.run();
}
