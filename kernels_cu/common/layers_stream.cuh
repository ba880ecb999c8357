// qwen2_layers.cu: the warps that multiply. A phase's units times its token, what is stored of that, and what becomes the
// next token.
#pragma once
#include "common/layers_feed.cuh"
#include "common/reduce.cuh"

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

// The stages in the order in which they come. Half of the warps multiply one, the other half the next: a warp has BATCH units,
// whose token columns are in different columns of the MMA, so that lane t of a quad gets the sums of unit t, and what is to
// be done with a unit's sums is done for all of them at once. Integer instructions are what limits this loop.
// A phase's first batches are in registers before its token is there, where they have come by then: the ring has room for
// two stages more, and the products begin sooner.
struct Stream {
    Shared& shared;
    Fault* fault;
    uint32_t stage;  // the phase's first one
    bool held;       // the warp has its first batch of it
    uint4 codes[BATCH][2];
    uint32_t scales;  // of rows g and g + 8 of lane t's unit

    __device__ __forceinline__ Stream(Shared& block, Fault* reports) : shared(block), fault(reports), stage(0) {
        forget();
    }

    // The warp's batch of the stage that lies there, of which `left` units count: missing ones' codes are anything, and their
    // scales 0. The place is given back.
    __device__ __forceinline__ void take(uint32_t slot, int left) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        const uint8_t* const units = shared.ring[slot] + threadIdx.x / WARP % TEAM * (BATCH * UNIT_BYTES);
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk)
                codes[u][chunk] = reinterpret_cast<const uint4*>(units + u * UNIT_BYTES)[chunk * WARP + lane];
        }
        const f16* const of = reinterpret_cast<const f16*>(units + t * UNIT_BYTES + CODE_BYTES) + g;
        scales = t < left ? uint32_t(of[0]) | uint32_t(of[8]) << 16 : 0u;
        reads_before_copies();
        __syncwarp();  // every lane has its part before the place is given back
        if (lane == 0) barrier_arrive(&shared.empty[slot]);
    }

    // The phase's first batch, where it has come. After a barrier behind the phase before: what lay in its place has come then.
    template <int PHASE>
    __device__ __forceinline__ void hold() {
        const int warp = threadIdx.x / WARP, k = warp / TEAM;
        const int left = shared.block.units[PHASE].units - (k * TURN + warp % TEAM * BATCH);
        const uint32_t slot = (stage + k) % STAGES;
        held = left > 0 && __all_sync(0xffffffffu, barrier_passed(&shared.full[slot], (stage + k) / STAGES & 1));
        if (held) take(slot, left);
    }

    // No batch is held: else registers would keep what a phase left through the next one's beginning.
    __device__ __forceinline__ void forget() {
        held = false;
#pragma unroll
        for (int u = 0; u < BATCH; ++u) codes[u][0] = codes[u][1] = make_uint4(0u, 0u, 0u, 0u);
        scales = 0u;
    }

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
        int k = warp / TEAM, tile = shared.block.starts[PHASE][warp].x, group = shared.block.starts[PHASE][warp].y;
        uint4 x[BATCH][2];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) x[u][0] = x[u][1] = make_uint4(0u, 0u, 0u, 0u);
        for (; k < stages; k += TEAMS) {
            const int unit = k * TURN + place;
            if (!held) {
                const uint32_t slot = (stage + k) % STAGES;
                barrier_wait(&shared.full[slot], (stage + k) / STAGES & 1, fault, kernel_of(PHASE), layer);
                if (unit >= block.units) {  // the last stage's
                    if (lane == 0) barrier_arrive(&shared.empty[slot]);
                    break;
                }
                take(slot, block.units - unit);
            }
            held = false;
            const bool next = group + t >= GROUPS;  // the lane's unit is of the next tile
            int ones[4] = {}, sixteens[4] = {};
            const int loaded = group + lane / 8 - (group + lane / 8 >= GROUPS ? GROUPS : 0);
            const uint8_t* const columns = token + loaded * TOKEN::GROUP_BYTES + lane % 8 * 16;
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
#pragma unroll
                for (int chunk = 0; chunk < 2; ++chunk)
                    load_for(x[u][chunk], reinterpret_cast<const uint4*>(columns) + 8 * chunk, lane / 8 == u);
            }
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
#pragma unroll
                for (int chunk = 0; chunk < 2; ++chunk) multiply_codes(ones, sixteens, codes[u][chunk], x[u][chunk]);
            }
            const float2 of_rows = unpack_f16(scales);
            const uint2 of = *reinterpret_cast<const uint2*>(
                token + (group + t - (next ? GROUPS : 0)) * TOKEN::GROUP_BYTES + 2 * GROUP_SIZE);
            const float scale = __uint_as_float(of.x);
            const int eights = int(of.y);
            const float low =
                scale * float(256 * (16 * ones[0] + sixteens[0]) + (16 * ones[1] + sixteens[1]) + eights) * of_rows.x;
            const float high =
                scale * float(256 * (16 * ones[2] + sixteens[2]) + (16 * ones[3] + sixteens[3]) + eights) * of_rows.y;
            add_quad(sums + tile * TILE_ROWS, next ? 0.0f : low, next ? 0.0f : high, t);
            if (group + min_int(BATCH, block.units - unit) > GROUPS)
                add_quad(sums + (tile + 1) * TILE_ROWS, next ? low : 0.0f, next ? high : 0.0f, t);
            group += STEP % GROUPS, tile += STEP / GROUPS;
            if (group >= GROUPS) group -= GROUPS, ++tile;
        }
        stage += stages;
        forget();
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
__device__ __forceinline__ void store_pieces(const Shared& shared, const Run& run, int number, int rows, float scale,
                                             float* out, Fault* fault, int kernel, int layer) {
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
        out[at] = ready_half(float_to_f16(silu(gate) * up * INNER_SCALE), a.fault, KERNEL_GATE_UP, a.layer + i);
    }
}

// The sums that a block makes of the residual: its columns of it plus all pieces, to all blocks. One warp, behind a barrier
// that is behind the block's last use of what the words stored here say that it has read.
//
// Why so: each block would else read all pieces of all columns, several times as much.
struct OPieces {
    static constexpr int MOST = PARTS;
    static __device__ __forceinline__ constexpr bool there(int, int) { return true; }
};
struct DownPieces {  // piece p of part n is number n + p * PARTS
    static constexpr int MOST = PARTS * DOWN_PIECES;
    static __device__ __forceinline__ bool there(int row, int number) { return number / PARTS < DownSplit::of_row(row); }
};

template <typename Split>
__device__ __forceinline__ void add_up(Shared& shared, const float* pieces, float* out, bool flagged, Polling& polling,
                                       int kernel, int layer) {
    constexpr int STRANDS = 4, EACH = div_up(Split::MOST, STRANDS), ACROSS = WARP / STRANDS;
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
    static __device__ __forceinline__ void enter(Shared& shared, const float* from, const f16* weights, Polling& polling,
                                                 int kernel, int layer) {
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
        pace(shared, kernel == KERNEL_QKV ? MIDST : AHEAD);
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
    pace(shared, AHEAD);
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        const int column = (i * THREADS + int(threadIdx.x)) * 8;
        store_halves(shared.inner, column, x[i], column < DOWN_COLUMNS);
    }
    meet();  // all of the token is there
}
