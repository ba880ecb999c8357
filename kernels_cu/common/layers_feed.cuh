// qwen2_layers.cu: the lane that sends copies of weights into a block's ring, and the warp that clears what blocks have told
// one another.
#pragma once
#include "common/clock.cuh"
#include "common/layers_block.cuh"

struct Feed {
    const Qwen2LayersArgs& a;
    Shared& shared;
    int sent;                // stages
    int i, phase, next;      // the stage that comes next: its layer, phase, and first unit of the block's

    __device__ __forceinline__ const uint8_t* matrix() const {
        return phase == QKV       ? a.qkv_weights[i]
               : phase == O_PROJ  ? a.o_weights[i]
               : phase == GATE_UP ? a.gate_up_weights[i]
                                  : a.down_weights[i];
    }

    __device__ __forceinline__ int units() const { return min_int(shared.block.units[phase].units - next, TURN); }

    // use(bytes from the stage's beginning, address, bytes) for what lies together.
    template <typename Use>
    __device__ __forceinline__ void pieces(Use use) const {
        const uint8_t* const from = matrix();
        const int first = shared.block.units[phase].first + next, count = units();
        if (PARTS == 1 || phase == QKV || phase == GATE_UP) {
            use(0, from + int64_t(first) * UNIT_BYTES, count * UNIT_BYTES);
            return;
        }
        const int groups = phase == O_PROJ ? GROUPS_IN<O_PROJ> : GROUPS_IN<DOWN>;
        for (int done = 0; done < count;) {  // a tile's columns of the part lie together
            const int tile = (first + done) / groups, group = (first + done) % groups;
            const int some = min_int(groups - group, count - done);
            const int64_t unit = (tile * PARTS + shared.block.part.number) * groups + group;
            use(done * UNIT_BYTES, from + unit * UNIT_BYTES, some * UNIT_BYTES);
            done += some;
        }
    }

    __device__ __forceinline__ void advance() {
        next += TURN;
        while (i < a.layers && next >= shared.block.units[phase].units) {
            next = 0;
            if (phase == QKV) {
                phase = O_PROJ;
            } else if (++phase > DOWN) {
                phase = QKV, ++i;
            }
        }
    }

    // Whether a stage's `round`th copy has come, or been multiplied.
    static __device__ __forceinline__ bool done(int slot, uint64_t* barriers, int round) {
        return barrier_passed(&barriers[slot], round & 1);
    }

    __device__ __forceinline__ void send_all() {
        int come = 0;  // stages that have come, with all before them: copies may overtake one another
        // When the next stage may be sent in the MLP. Memory delivers one to every block in SPACING there: a block that asks
        // more often gets ahead at the cost of others, for whom all will wait. One that is late makes up for SLACK at most.
        volatile uint32_t& due = shared.due;
        due = clock_ns_low();
        while (i < a.layers) {
            const int slot = sent % STAGES;
            if (come < sent && done(come % STAGES, shared.full, come / STAGES)) ++come;
            const int pace = atomicOr(&shared.pace, 0);
            const uint32_t now = clock_ns_low();
            if (sent - come < pace && (pace < AHEAD || int(now - due) >= 0) &&
                (sent < STAGES || done(slot, shared.empty, sent / STAGES - 1))) {
                uint64_t* const full = &shared.full[slot];
                uint8_t* const to = shared.ring[slot];
                barrier_expect(full, units() * UNIT_BYTES);
                pieces([&](int offset, const uint8_t* from, int bytes) {
                    bulk_load(to + offset, from, bytes, full, evict_first());
                });
                if (int(now - due) > SLACK) due = now - SLACK;
                if (pace == AHEAD) due += SPACING;
                advance(), ++sent;
            } else if (int(now - due) > PATIENCE) {
                report_fault(a.fault, FAULT_COPY, kernel_of(phase), a.layer + i);
                asm volatile("trap;");
            }
        }
    }
};

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
                uint32_t* const down =
                    reinterpret_cast<uint32_t*>(down_of(a, i - 1)) + block.part.number * (DOWN_PIECES * HIDDEN);
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
