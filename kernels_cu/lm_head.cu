// logits[row][v] = scale * (W x)[v]: the largest matrix of a pass, read once.
//
// PRECOND  grid: up to one block a multiprocessor, blocks beyond TILES idle; block: 8 consuming warps and one that
//          copies. weights 16-byte aligned, CHUNKS * 512 bytes a tile of 16 vocabulary rows; normed 8-byte aligned.
//          normed is the predecessor's. *live was written at least two launches ago: the prologue peeks at it, so that
//          a skipped draft depth copies nothing; what counts is read after pdl_wait.
// READS    ceil(VOCAB / 16) * 16 * HIDDEN * 2 bytes of weights, half of that and a scale a row where FP8_HEAD, and
//          rows * HIDDEN * 2 of activations in each block (from L2).
// WRITES   rows * VOCAB * 4 bytes.
//
// Why so: only bandwidth matters. A block streams whole tiles (96 KB of HIDDEN 3072) through a ring of bulk copies
// that takes nearly all of its shared memory, so that what is in flight covers both the latency and the last tiles,
// which not every block has: the blocks that do have them then draw on the whole memory's bandwidth. The ring fills
// while the predecessor still runs. A warp always has the same columns of K, so its activations stay in registers;
// the eight partial sums of a tile meet once a tile in shared memory. L2 is to give these weights up first, so that what
// other launches left there survives; but KEPT sixteenths last, which the draft's next depth then finds.
#include "abi_decode.cuh"
#include "common/copy.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"

constexpr int CONSUMERS = 8;
constexpr int CONSUMER_THREADS = CONSUMERS * WARP;
constexpr bool FP8 = FP8_HEAD != 0;
constexpr int CHUNK_K = FP8 ? 32 : 16;
constexpr int CHUNKS = HIDDEN / CHUNK_K;
constexpr int TILES = (VOCAB + 15) / 16;
constexpr int STAGE_BYTES = STAGE_CHUNKS * 512;
constexpr int TILE_STAGES = CHUNKS / STAGE_CHUNKS;
constexpr int WARP_CHUNKS = STAGE_CHUNKS / CONSUMERS;

static_assert(HIDDEN % CHUNK_K == 0 && CHUNKS % STAGE_CHUNKS == 0, "a tile is a whole number of stages");
static_assert(STAGE_CHUNKS % CONSUMERS == 0, "each warp has the same number of a stage's chunks");
static_assert(TILE_STAGES * WARP_CHUNKS <= 40, "activations stay in registers, two or four a chunk");

struct Fragment {
    uint2 k[FP8 ? 2 : 1];
};

__device__ __forceinline__ void multiply(float (&sum)[4], uint4 w, const Fragment& x) {
    if constexpr (FP8) {
        mma_chunk_fp8_f16(sum, w, x.k[0], x.k[1]);
    } else {
        mma_chunk_f16(sum, w, x.k[0]);
    }
}

// Past L1, where the peek below may have left an older value.
__device__ __forceinline__ int load_live(const LmHeadArgs& a) {
    return a.live != nullptr ? min_int(a.rows, *static_cast<const volatile int*>(a.live)) : a.rows;
}

// Copies the block's tiles stage by stage, in the order in which they are used. One thread.
__device__ void copy_tiles(const LmHeadArgs& a, uint8_t* ring, uint64_t* full, uint64_t* empty) {
    const int tiles = max_int(0, div_up(TILES - int(blockIdx.x), int(gridDim.x)));
    const int stages = tiles * TILE_STAGES;
    const uint64_t first = evict_first(), last = evict_last();
    const auto copy = [&](int stage) {
        const int tile = blockIdx.x + stage / TILE_STAGES * gridDim.x;
        const int64_t from = (int64_t(tile) * TILE_STAGES + stage % TILE_STAGES) * STAGE_BYTES;
        const int slot = stage % STAGES;
        barrier_expect(&full[slot], STAGE_BYTES);
        bulk_load(ring + slot * STAGE_BYTES, a.weights + from, STAGE_BYTES, &full[slot],
                  stage * 7 % 16 < KEPT ? last : first);
    };
    const int early = load_live(a) <= 0 ? 0 : min_int(stages, STAGES);  // a peek; see PRECOND
    for (int stage = 0; stage < early; ++stage) copy(stage);
    pdl_wait();  // `live` for certain
    pdl_trigger();
    if (load_live(a) <= 0) {
        // Shared memory must not be given back while copies into it are under way.
        for (int stage = 0; stage < early; ++stage) barrier_wait(&full[stage], 0, a.fault, KERNEL_LM_HEAD, a.layer);
        return;
    }
    for (int stage = early; stage < stages; ++stage) {
        const int round = stage / STAGES;
        // The slot's previous contents have been read by all warps.
        if (round > 0) barrier_wait(&empty[stage % STAGES], (round - 1) & 1, a.fault, KERNEL_LM_HEAD, a.layer);
        copy(stage);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + WARP, 1)
    lm_head(const __grid_constant__ LmHeadArgs a) {
    extern __shared__ __align__(128) uint8_t ring[];  // [STAGES][STAGE_BYTES]
    __shared__ __align__(16) float4 partial[2][CONSUMERS][WARP];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; ++slot) {
            barrier_init(&full[slot], 1);
            barrier_init(&empty[slot], CONSUMERS);
        }
        barrier_init_fence();
    }
    __syncthreads();  // the barriers exist for all

    if (warp == CONSUMERS) {
        if (lane == 0) copy_tiles(a, ring, full, empty);
        return;
    }

    pdl_wait();  // normed, live
    pdl_trigger();
    const int rows = load_live(a);
    if (rows <= 0) return;

    const int g = lane / 4, t = lane % 4;
    Fragment x[TILE_STAGES][WARP_CHUNKS];
#pragma unroll
    for (int stage = 0; stage < TILE_STAGES; ++stage) {
#pragma unroll
        for (int c = 0; c < WARP_CHUNKS; ++c) {
            const int chunk = stage * STAGE_CHUNKS + warp * WARP_CHUNKS + c;
            const f16* from = a.normed + int64_t(g) * HIDDEN + chunk * CHUNK_K + t * 4;
#pragma unroll
            for (int i = 0; i < CHUNK_K / 16; ++i)
                x[stage][c].k[i] = g < rows ? *reinterpret_cast<const uint2*>(from + 16 * i) : make_uint2(0u, 0u);
        }
    }

    int slot = 0, buffer = 0;
    uint32_t parity = 0;
    for (int tile = blockIdx.x; tile < TILES; tile += gridDim.x) {
        const float step = FP8 ? a.scales[tile * 16 + threadIdx.x % 16] : 1.0f;  // arrives before the weights
        float even[4] = {}, odd[4] = {};  // two chains of products, as one would wait for each MMA
#pragma unroll
        for (int stage = 0; stage < TILE_STAGES; ++stage) {
            barrier_wait(&full[slot], parity, a.fault, KERNEL_LM_HEAD, a.layer);
            const uint8_t* chunk = ring + slot * STAGE_BYTES + warp * WARP_CHUNKS * 512 + lane * 16;
            uint4 w[WARP_CHUNKS];
#pragma unroll
            for (int c = 0; c < WARP_CHUNKS; ++c) w[c] = *reinterpret_cast<const uint4*>(chunk + c * 512);
#pragma unroll
            for (int c = 0; c < WARP_CHUNKS; ++c) multiply(c % 2 == 0 ? even : odd, w[c], x[stage][c]);
            reads_before_copies();
            __syncwarp();  // every lane has read its part before the slot is given back
            if (lane == 0) barrier_arrive(&empty[slot]);
            if (++slot == STAGES) {
                slot = 0;
                parity ^= 1;
            }
        }
        partial[buffer][warp][lane] =
            make_float4(even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]);
        // All partial sums of the tile are there. Whoever writes this buffer again, two tiles on, has passed the next
        // tile's barrier, which no reader reaches before it has read.
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMER_THREADS) : "memory");
        const int row = threadIdx.x / 16, v = threadIdx.x % 16;
        if (row < rows && tile * 16 + v < VOCAB) {
            // Lane (v % 8, row / 2) has it, in component 2 * (v / 8) + row % 2.
            const int index = ((v % 8) * 4 + row / 2) * 4 + (v / 8) * 2 + row % 2;
            const float* sums = reinterpret_cast<const float*>(&partial[buffer][0][0]) + index;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < CONSUMERS; ++w) sum += sums[w * WARP * 4];
            const float logit = a.scale * (FP8 ? step * sum : sum);
            if (!is_finite(logit)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_LM_HEAD, a.layer);
            a.logits[int64_t(row) * VOCAB + tile * 16 + v] = logit;
        }
        buffer ^= 1;
    }
}
