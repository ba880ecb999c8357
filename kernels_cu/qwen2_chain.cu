// Everything between two attentions: o_proj, the MLP (gate and up, then down) and the next layer's q, k and v, in one launch
// whose weights stream without a stop.
//
// PRECOND  grid GEMV_BLOCKS, block 32 WARPS, all blocks resident together, as on a GPU that has as many multiprocessors.
//          weights 16-byte aligned units (abi_qwen2.cuh), never written. attended is the predecessor's; residual is older. o_pieces, inner and down_pieces hold NOT_READY in every word that the
//          launch stores before anyone polls for it: `unready`, which the launch before this one has cleared, or the token's
//          first launch for the first layer. LAST: without q, k and v.
// READS    the four matrices, once; from L2 in each block the token of each phase: 2 padded(Q_HEADS HEAD_SIZE) bytes, the
//          pieces of o_proj and of down (4 HIDDEN each), 2 padded(INNER) of inner.
// WRITES   those, and 4 bytes a row and piece of q, k and v; 4 HIDDEN of the residual; NOT_READY into `unready`.
//
// Why so: at one token a layer's five launches would each cost about two microseconds in which memory idles: the end of the
// one before has to be known, a token has to come from L2, be normalised and go round the block. What a launch could fetch
// meanwhile is what its rings hold, and rings that its predecessor's copies have to share are full too early or too late.
// Here the order in which a warp's units come is known for all four matrices, so its ring runs on through a phase's end: while
// a block waits for the others' results, memory delivers what comes next. Results are their own ready flags
// (common/flagged.cuh): a word is there once it is not NOT_READY, so that nothing but the words themselves crosses between
// blocks. A token is multiplied by its norm's weights alone; its inverse root mean square is a factor of results. What a
// block's loads of the next token would wait behind is sent after them (tools/decisions/020-one-launch-between-attentions.md).
#include "common/flagged.cuh"
#include "common/int4_ring.cuh"
#include "common/pdl.cuh"
#include "common/phases.cuh"
#include "common/pieces.cuh"
#include "common/reduce.cuh"

constexpr int Q_WIDTH = Q_HEADS * HEAD_SIZE, QKV_ROWS = (Q_HEADS + 2 * KV_HEADS) * HEAD_SIZE;
constexpr int TILE_COLUMNS = TILE_ROWS / 2;  // of inner, that a tile of gate and up makes
constexpr int GATE_UP_TILES = padded(INNER) / TILE_COLUMNS;
static_assert(FIRST <= STAGES && DEFERRED <= STAGES, "copies of a ring");
constexpr int POLLS = 1 << 21;               // seconds, where a result takes microseconds

using OSplit = Pieces<HIDDEN, Q_WIDTH, GEMV_BLOCKS>;
using DownSplit = Pieces<HIDDEN, INNER, GEMV_BLOCKS>;
using QkvSplit = Pieces<QKV_ROWS, HIDDEN, GEMV_BLOCKS>;

enum Phase { O_PROJ, GATE_UP, DOWN, QKV, PHASES = QKV + !LAST };

// Of a matrix in pieces; nothing for blocks beyond the takers.
template <typename Split>
__device__ __forceinline__ Run shared_run() {
    return int(blockIdx.x) < Split::TAKERS ? part_of(Run{0, Split::UNITS}, blockIdx.x, Split::TAKERS) : Run{0, 0};
}

template <int K>
constexpr int GROUPS_OF = padded(K) / GROUP_SIZE;

__device__ __forceinline__ Run whole_tiles() { return part_of(Run{0, GATE_UP_TILES}, blockIdx.x, GEMV_BLOCKS); }

// The units that the block has in a phase.
template <int PHASE>
__device__ __forceinline__ Run block_run() {
    if constexpr (PHASE == O_PROJ) return shared_run<OSplit>();
    if constexpr (PHASE == DOWN) return shared_run<DownSplit>();
    if constexpr (PHASE == QKV) return shared_run<QkvSplit>();
    const Run tiles = whole_tiles();
    return Run{tiles.first * GROUPS_OF<HIDDEN>, tiles.units * GROUPS_OF<HIDDEN>};
}

// The most tiles that a block has units of.
template <int PHASE>
constexpr int SUMS_OF = PHASE == O_PROJ ? OSplit::TOUCHED
                        : PHASE == DOWN ? DownSplit::TOUCHED
                        : PHASE == QKV  ? QkvSplit::TOUCHED
                                        : div_up(GATE_UP_TILES, GEMV_BLOCKS);
constexpr int SUMS = max_int(max_int(SUMS_OF<O_PROJ>, SUMS_OF<GATE_UP>), max_int(SUMS_OF<DOWN>, SUMS_OF<QKV>));
constexpr int TURN = WARPS * STAGE_UNITS;  // units that the warps take together

struct Shared {
    float4 sums[WARPS][SUMS][TILE_ROWS / 4];  // each warp's, of the block's tiles
    float squares[WARPS];         // sums of each warp's columns
    const uint8_t* from[PHASES];  // the block's units of each phase
    int units[PHASES];
    uint64_t full[WARPS][STAGES];
};

// What sends a warp's copies, in the order in which they are used. One lane.
struct Feed {
    int next, phase, slot;  // next: of the block's units of the phase, the first that the warp has not asked for

    __device__ __forceinline__ void send(Shared& shared, uint8_t* ring, int warp) {
        while (next >= shared.units[phase]) {
            if (phase + 1 == PHASES) return;
            ++phase;
            next = warp * STAGE_UNITS;
        }
        const int bytes = min_int(shared.units[phase] - next, STAGE_UNITS) * UNIT_BYTES;
        const uint8_t* const from = shared.from[phase] + int64_t(next) * UNIT_BYTES;
        barrier_expect(&shared.full[warp][slot], bytes);
        // A weight is read once: what L2 has of the token and the caches is to stay.
        bulk_load(ring + slot * STAGE_BYTES, from, bytes, &shared.full[warp][slot], evict_first());
        next += TURN;
        if (++slot == STAGES) slot = 0;
    }

    __device__ __forceinline__ void send_some(Shared& shared, uint8_t* ring, int warp, int count) {
        for (int i = 0; i < count; ++i) send(shared, ring, warp);
    }
};

// The warps' parts of a phase times the token, into their sums. They take the block's units in turns, so that what a block
// asks of memory at a time lies together: runs of their own, some tens of kilobytes apart, cost a sixth of the bandwidth.
struct Stream {
    Shared& shared;
    uint8_t* ring;
    Feed feed;
    int slot;
    uint32_t parity;
    int owed;  // copies that wait until the block has its next token, whose loads they would delay

    // One lane a warp, once the token is there.
    __device__ __forceinline__ void pay() {
        if (threadIdx.x % WARP == 0) feed.send_some(shared, ring, threadIdx.x / WARP, owed);
        owed = 0;
    }

    template <int PHASE, int GROUPS>
    __device__ __forceinline__ void multiply(const uint8_t* token, Fault* fault, int layer) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        const Run block = block_run<PHASE>();
        float4* const all = shared.sums[warp][0];
#pragma unroll
        for (int i = 0; i < SUMS_OF<PHASE> * 4; i += WARP)
            if (i + lane < SUMS_OF<PHASE> * 4) all[i + lane] = make_float4(0, 0, 0, 0);
        __syncwarp();  // zeros where the warp has nothing
        float* sums = reinterpret_cast<float*>(all) + g;
        float low = 0.0f, high = 0.0f;
        int unit = warp * STAGE_UNITS, group = block.first % GROUPS + unit;
        const auto next_tile = [&]() {
            if (t == 0) sums[0] = low, sums[8] = high;
            low = high = 0.0f;
            sums += TILE_ROWS;
            group -= GROUPS;
        };
        TOKEN::Columns x[STAGE_UNITS];
        for (; unit < block.units; unit += TURN) {
            while (group >= GROUPS) next_tile();
            barrier_wait(&shared.full[warp][slot], parity, fault, KERNEL_DOWN, layer);
            const uint8_t* const units = ring + slot * STAGE_BYTES;
            uint4 w[STAGE_UNITS][2];
            f16 scale[STAGE_UNITS][2];
#pragma unroll
            for (int u = 0; u < STAGE_UNITS; ++u) {  // the last turn's missing units are there as nothing that counts
                const uint8_t* const at = units + u * UNIT_BYTES;
                w[u][0] = reinterpret_cast<const uint4*>(at)[lane];
                w[u][1] = reinterpret_cast<const uint4*>(at)[WARP + lane];
                scale[u][0] = reinterpret_cast<const f16*>(at + CODE_BYTES)[g];
                scale[u][1] = reinterpret_cast<const f16*>(at + CODE_BYTES)[g + 8];
                x[u].load(token + (group + u) % GROUPS * TOKEN::GROUP_BYTES, lane);
            }
            float2 c[STAGE_UNITS];
#pragma unroll
            for (int u = 0; u < STAGE_UNITS; ++u) c[u] = x[u].times(w[u]);
            // Behind the products, so that these are under way meanwhile.
            reads_before_copies();
            __syncwarp();  // every lane has its part before the place is given back
            if (PHASE <= GATE_UP && unit + DEFERRED * TURN >= block.units) {
                ++owed;
            } else if (lane == 0) {
                feed.send(shared, ring, warp);
            }
            if (++slot == STAGES) slot = 0, parity ^= 1;
#pragma unroll
            for (int u = 0; u < STAGE_UNITS; ++u) {
                if (unit + u >= block.units) break;
                if (u > 0 && group + u == GROUPS) {
                    next_tile();
                }
                low += f16_to_float(scale[u][0]) * c[u].x;
                high += f16_to_float(scale[u][1]) * c[u].y;
            }
            group += TURN;
        }
        if (t == 0 && unit > warp * STAGE_UNITS) sums[0] = low, sums[8] = high;
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

// The block's sums of the tiles that it has a part of, as pieces [PIECES][rows of the matrix].
template <typename Split, bool FLAGGED>
__device__ __forceinline__ void store_pieces(const Shared& shared, int rows, float scale, float* out, Fault* fault, int kernel,
                                             int layer) {
    const Run block = shared_run<Split>();
    if (block.units == 0) return;
    const int first = block.first / Split::GROUPS, last = (block.first + block.units - 1) / Split::GROUPS;
    for (int i = threadIdx.x; i < (last - first + 1) * TILE_ROWS; i += THREADS) {
        const int tile = first + i / TILE_ROWS, row = i % TILE_ROWS;
        const int piece = int(blockIdx.x) - Split::block_of(tile * Split::GROUPS);
        const float value = scale * row_sum(shared, tile - first, row);
        if (!is_finite(value)) report_fault(fault, FAULT_NOT_FINITE, kernel, layer);
        out[piece * rows + tile * TILE_ROWS + row] = FLAGGED ? ready_float(value) : value;
    }
}

// Another poll, where a lane of the warp misses a word; all lanes leave in the same turn (see Polls in common/flagged.cuh).
__device__ __forceinline__ bool poll_again(bool ready, int& count, Fault* fault, int kernel, int layer) {
    if (__all_sync(0xffffffffu, ready)) return false;
    if (++count < POLLS) return true;
    if (!ready) report_fault(fault, FAULT_RESULT, kernel, layer);
    return false;
}

// The residual's columns that a thread has, and what becomes of them.
struct Row {
    static constexpr int EIGHTS = (padded(HIDDEN) / 8 + THREADS - 1) / THREADS;
    static_assert(HIDDEN % TILE_ROWS == 0, "eight columns are of one tile");

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

    // x += pieces, as soon as they are there.
    template <typename Split, int COUNT>
    __device__ __forceinline__ void add(const float* pieces, Fault* fault, int kernel, int layer) {
        uint4 part[EIGHTS][COUNT][2];
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const int there = column(i) < HIDDEN ? Split::of_row(column(i)) : 0;
#pragma unroll
            for (int p = 0; p < COUNT; ++p) {
                const uint32_t word = p < there ? NOT_READY : 0;
                part[i][p][0] = part[i][p][1] = make_uint4(word, word, word, word);
            }
        }
        bool ready;
        int count = 0;
        do {  // only what has not come is read again: all blocks poll, and L2 has others to serve
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
                for (int p = 0; p < COUNT; ++p) {
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (!floats_there(part[i][p][half]))
                            part[i][p][half] = load_flagged_16(pieces + p * HIDDEN + column(i) + 4 * half);
                }
            }
            ready = true;
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
                for (int p = 0; p < COUNT; ++p) ready = ready && floats_there(part[i][p][0]) && floats_there(part[i][p][1]);
            }
        } while (poll_again(ready, count, fault, kernel, layer));
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
            for (int p = 0; p < COUNT; ++p) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    x[i][4 * half] += __uint_as_float(part[i][p][half].x);
                    x[i][4 * half + 1] += __uint_as_float(part[i][p][half].y);
                    x[i][4 * half + 2] += __uint_as_float(part[i][p][half].z);
                    x[i][4 * half + 3] += __uint_as_float(part[i][p][half].w);
                }
            }
        }
    }

    // Blocks store it in turns.
    __device__ __forceinline__ void store(float* out) const {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const int c = column(i);
            if (c < HIDDEN && c / 8 % int(gridDim.x) == int(blockIdx.x)) {
                float4* const to = reinterpret_cast<float4*>(out + c);
                to[0] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
                to[1] = make_float4(x[i][4], x[i][5], x[i][6], x[i][7]);
            }
        }
    }

    // x * norm as the token, and the squares' sums: what makes it rms(x, norm) is the same factor for all columns, and
    // multiplies results (inverse_rms). Ends with a barrier of the block: both are there for all.
    __device__ __forceinline__ void enter(uint8_t* token, float* squares) const {
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
            TOKEN::store(token, column(i), weighed, column(i) < padded(HIDDEN));
        }
        sum = warp_sum(sum);
        if (threadIdx.x % WARP == 0) squares[threadIdx.x / WARP] = sum;
        __syncthreads();  // all of the token is there
    }
};

// Of the row that entered last, after a barrier behind that.
__device__ __forceinline__ float inverse_rms(const float* squares) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += squares[w];
    return rsqrtf(sum * (1.0f / HIDDEN) + EPS);
}

// Halves [padded(K)] as the token, as soon as they are there. Ends with a barrier of the block.
template <int K, bool POLLED>
__device__ __forceinline__ void take_halves(uint8_t* token, const f16* from, Fault* fault, int kernel, int layer) {
    constexpr int EIGHTS = (padded(K) / 8 + THREADS - 1) / THREADS;
    uint4 x[EIGHTS];
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        const uint32_t word = (i * THREADS + int(threadIdx.x)) * 8 < padded(K) ? NOT_READY : 0;
        x[i] = make_uint4(word, word, word, word);
    }
    bool ready;
    int count = 0;
    do {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i)
            if (!halves_there(x[i])) x[i] = load_flagged_16(from + (i * THREADS + int(threadIdx.x)) * 8);
        ready = true;
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) ready = ready && (!POLLED || halves_there(x[i]));
    } while (poll_again(ready, count, fault, kernel, layer));
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        const int column = (i * THREADS + int(threadIdx.x)) * 8;
        store_halves(token, column, x[i], column < padded(K));
    }
    __syncthreads();  // all of the token is there
}

__device__ __forceinline__ void store_inner(const Shared& shared, const Qwen2ChainArgs& a) {
    const Run tiles = whole_tiles();
    const float inverse = inverse_rms(shared.squares);
    for (int i = threadIdx.x; i < tiles.units * TILE_COLUMNS; i += THREADS) {
        const int column = i % TILE_COLUMNS;
        const float gate = inverse * row_sum(shared, i / TILE_COLUMNS, column);
        const float up = inverse * row_sum(shared, i / TILE_COLUMNS, column + TILE_COLUMNS);
        a.inner[tiles.first * TILE_COLUMNS + i] =
            ready_half(float_to_f16(silu(gate) * up * INNER_SCALE), a.fault, KERNEL_GATE_UP, a.layer);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) qwen2_chain(const __grid_constant__ Qwen2ChainArgs a) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Shared shared;
    const int warp = threadIdx.x / WARP;
    uint8_t* const token = memory + TOKEN_AT;
    Stream stream{shared, memory + warp * RING_BYTES, Feed{warp * STAGE_UNITS, 0, 0}, 0, 0, STAGES - FIRST};
    if (threadIdx.x == 0) {
        const uint8_t* const matrices[4] = {a.o_weights, a.gate_up_weights, a.down_weights, a.qkv_weights};
        const Run blocks[4] = {block_run<O_PROJ>(), block_run<GATE_UP>(), block_run<DOWN>(), block_run<QKV>()};
#pragma unroll
        for (int phase = 0; phase < PHASES; ++phase) {
            shared.units[phase] = blocks[phase].units;
            shared.from[phase] = matrices[phase] + int64_t(blocks[phase].first) * UNIT_BYTES;
        }
    }
    if (threadIdx.x % WARP == 0) {
#pragma unroll
        for (int slot = 0; slot < STAGES; ++slot) barrier_init(&shared.full[warp][slot], 1);
        barrier_init_fence();
    }
    __syncthreads();  // the block's runs are there, and each warp's barriers for its lanes
    if (threadIdx.x % WARP == 0) stream.feed.send_some(shared, stream.ring, warp, FIRST);
    Row row;
    row.load_norm(a.post_norm);
    row.load(a.residual);

    pdl_wait();  // attended; and what the launch before it has polled may be cleared
    pdl_trigger();
    for (int i = int(blockIdx.x) * THREADS + int(threadIdx.x); i < a.unready_pieces; i += int(gridDim.x) * THREADS)
        a.unready[i] = make_uint4(NOT_READY, NOT_READY, NOT_READY, NOT_READY);

    take_halves<Q_WIDTH, false>(token, a.attended, a.fault, KERNEL_O_PROJ, a.layer);
    phase_resumed(O_PROJ);
    stream.pay();
    stream.multiply<O_PROJ, GROUPS_OF<Q_WIDTH>>(token, a.fault, a.layer);
    __syncthreads();  // every warp's sums are there, and none needs the token
    store_pieces<OSplit, true>(shared, HIDDEN, 1.0f, a.o_pieces, a.fault, KERNEL_O_PROJ, a.layer);
    phase_ended(O_PROJ);

    row.add<OSplit, O_PIECES>(a.o_pieces, a.fault, KERNEL_GATE_UP, a.layer);
    if (LAST) row.store(a.residual_out);
    row.enter(token, shared.squares);
    phase_resumed(GATE_UP);
    stream.pay();
    stream.multiply<GATE_UP, GROUPS_OF<HIDDEN>>(token, a.fault, a.layer);
    __syncthreads();  // as above
    store_inner(shared, a);
    phase_ended(GATE_UP);

    if (!LAST) row.load_norm(a.next_norm);
    take_halves<INNER, true>(token, a.inner, a.fault, KERNEL_DOWN, a.layer);
    phase_resumed(DOWN);
    stream.pay();
    stream.multiply<DOWN, GROUPS_OF<INNER>>(token, a.fault, a.layer);
    __syncthreads();  // as above
    store_pieces<DownSplit, true>(shared, HIDDEN, 1.0f / INNER_SCALE, a.down_pieces, a.fault, KERNEL_DOWN, a.layer);
    phase_ended(DOWN);
    if constexpr (!LAST) {
        row.add<DownSplit, DOWN_PIECES>(a.down_pieces, a.fault, KERNEL_QKV, a.layer);
        row.store(a.residual_out);
        row.enter(token, shared.squares);
        phase_resumed(QKV);
        stream.multiply<QKV, GROUPS_OF<HIDDEN>>(token, a.fault, a.layer);
        __syncthreads();  // as above
        store_pieces<QkvSplit, false>(shared, QKV_ROWS, inverse_rms(shared.squares), a.qkv_pieces, a.fault, KERNEL_QKV, a.layer);
        phase_ended(QKV);
    }
}
