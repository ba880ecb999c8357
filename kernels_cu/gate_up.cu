// Gate and up of the chosen experts, SiLU, and their product: half of all bytes that a pass reads.
//
// PRECOND: grid: as many blocks as fit at once, one a multiprocessor; block 288; weights and normed 16-byte aligned;
// a row's expert ids are distinct. Takes from the attention tail normed or codes, routing, and inner (or inner_max)
// cleared. Where it has `routed`, that was zero when the attention tail began. *live is older than what the attention
// tail waits for, and read before the wait.
// Reads a unit (8 inner columns of an expert, UNIT_BYTES, contiguous) once for each group; writes 16 bytes of inner a
// unit and row that chose it, no half of them +0. Rows that did not are left as they were: `down` takes none of them.
//
// Only routing says which weights to read: what counts is how soon the first copy leaves after it is known, and that
// memory never idles from then on. So one warp polls for the experts' ids (common/flagged.cuh), which come half a
// microsecond before the attention tail's end is known, numbers them without a barrier, and sends bulk copies STAGES
// deep before it does anything else; eight warps split K, so that each holds its part of the activations in registers,
// loaded once, and a unit needs just one exchange; its sums are added and stored by a different warp each time while the
// others go on with the next unit.
#include "abi_decode.cuh"
#include "common/copy.cuh"
#include "common/experts.cuh"
#include "common/experts_mma.cuh"
#include "common/flagged.cuh"
#include "common/pdl.cuh"

constexpr int KERNEL = KERNEL_GATE_UP;
constexpr int POLLS = 4096;  // milliseconds, where routing takes microseconds

constexpr int CONSUMERS = 8;
constexpr int THREADS = (CONSUMERS + 1) * WARP;
constexpr int CHUNK_BYTES = 512;
constexpr int CHUNKS = HIDDEN / CHUNK_K;
// Chunks of a warp in a part. Not more than a scale's 128 columns: then a part has one scale a warp.
constexpr int WARP_CHUNKS = CHUNKS % (4 * CONSUMERS) == 0 ? 4 : CHUNKS % (2 * CONSUMERS) == 0 ? 2 : 1;
constexpr int PART_CHUNKS = WARP_CHUNKS * CONSUMERS;
constexpr int PARTS = CHUNKS / PART_CHUNKS;  // copies of a unit
constexpr int SCALE_BYTES = FP8 ? (HIDDEN / 128 * 8 + 127) / 128 * 128 : 0;
constexpr int PART_BYTES = PART_CHUNKS * CHUNK_BYTES;
constexpr int UNIT_BYTES = CHUNKS * CHUNK_BYTES + SCALE_BYTES;
constexpr int STAGE_BYTES = PART_BYTES + SCALE_BYTES;  // the last part brings the scales
constexpr int UNITS = INNER / 8;                       // of an expert
constexpr int SUMS = FP8 ? PARTS : 1;                  // accumulators that await different scales
constexpr int64_t EXPERT_BYTES = int64_t(UNITS) * UNIT_BYTES;

static_assert(HIDDEN % 128 == 0 && INNER % 8 == 0, "whole scales and units");
static_assert(CHUNKS % CONSUMERS == 0, "K is split among the warps");
static_assert(SMEM == STAGES * STAGE_BYTES, "the host and the kernel agree on shared memory");

__device__ __forceinline__ void load_fragment(Fragment& b, const GateUpArgs& a, int chunk, int lane) {
    const int row = lane / 4, k = chunk * CHUNK_K + lane % 4 * 4;
    if (row >= a.rows) {
        b = Fragment{};
    } else if (E4M3) {
        const uint8_t* codes = a.codes + int64_t(row) * HIDDEN + k;
        b.k[0] = make_uint2(*reinterpret_cast<const uint32_t*>(codes), *reinterpret_cast<const uint32_t*>(codes + 16));
    } else {
        const f16* normed = a.normed + int64_t(row) * HIDDEN + k;
#pragma unroll
        for (int i = 0; i < int(sizeof(b.k) / sizeof(b.k[0])); ++i) {
            b.k[i] = *reinterpret_cast<const uint2*>(normed + 16 * i);
        }
    }
}

// Adds the warps' sums of a unit and stores the product. One warp.
__device__ __forceinline__ void finish(const GateUpArgs& a, const Groups& groups, const float4 (*partial)[WARP], int unit,
                                       float2 code_scale, int lane) {
    const int group = unit / UNITS, column = unit % UNITS * 8 + lane / 4, token = lane % 4 * 2;
    float4 sum = partial[0][lane];
#pragma unroll
    for (int w = 1; w < CONSUMERS; ++w) {
        const float4 x = partial[w][lane];
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    const float scale[2] = {E4M3 ? code_scale.x : 1.0f, E4M3 ? code_scale.y : 1.0f};
    const float gate[2] = {sum.x * scale[0], sum.y * scale[1]};
    const float up[2] = {sum.z * scale[0], sum.w * scale[1]};
    const int chose = groups.rows[group] >> token;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        f16 value = float_to_f16(silu(gate[i]) * up[i] * INNER_SCALE);
        if (value == 0) value = 0x8000;  // zero is what has not been written
        const bool mine = (chose >> i & 1) != 0;
        if (mine) {
            a.inner[(int64_t(group) * ROWS + token + i) * INNER + column] = value;
            if ((value & 0x7c00) == 0x7c00) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL, a.layer);
        }
        if constexpr (E4M3) {
            float top = f16_to_float(value & 0x7fff);
#pragma unroll
            for (int offset = 4; offset < WARP; offset *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
            // Floats that are not negative compare as their bits do, and a maximum does not depend on its order.
            int* const target = reinterpret_cast<int*>(a.inner_max) + group * ROWS + token + i;
            if (mine && lane < 4) atomicMax(target, __float_as_int(top));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gate_up(const __grid_constant__ GateUpArgs a) {
    extern __shared__ __align__(128) uint8_t stages[];
    __shared__ __align__(16) float4 partial[2][CONSUMERS][WARP];
    __shared__ __align__(8) uint64_t full[STAGES], empty[STAGES];
    __shared__ Groups groups;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(&full[s], 1);
            barrier_init(&empty[s], CONSUMERS * WARP);
        }
        barrier_init_fence();
    }
    for (int i = threadIdx.x; i < MAX_GROUPS; i += THREADS) groups.rows[i] = 0;
    __syncthreads();  // barriers and zeros are there for all warps

    if (warp == CONSUMERS) {
        const int rows = live_rows(a.live, a.rows);
        if (a.routed == nullptr) pdl_wait();
        int group[LANE_PAIRS];
        if (a.dense_groups > 0) {
            dense_groups_of(a.dense_groups, rows, lane, groups);
        } else {
            int id[LANE_PAIRS];
            for (int tries = 0;; ++tries) {
                const int copy = blockIdx.x % ROUTED_COPIES * PAIRS;
                load_choices(a.routed == nullptr ? a.expert_ids : a.routed + copy, lane, id);
                bool here = true;
#pragma unroll
                for (int j = 0; j < LANE_PAIRS; ++j) {
                    if (a.routed == nullptr) continue;
                    here = here && (lane + j * WARP >= rows * TOP_K || uint32_t(--id[j]) < EXPERTS);
                }
                if (__all_sync(0xffffffffu, here)) break;
                __nanosleep(100);  // fewer requests for the line that is to be written
                if (tries == POLLS) pdl_wait();  // then they are there, or never will be
                if (tries > POLLS) {
                    if (!here) report_fault(a.fault, FAULT_ROUTING, KERNEL, a.layer);
                    break;
                }
            }
            number_groups(id, rows, lane, groups, group);
        }
        __syncwarp();  // lane 0 reads the experts that all lanes wrote
        const int units = groups.count * UNITS;
        int unit = blockIdx.x, part = 0, stage = 0;
        uint32_t parity = 1;  // of a stage that nobody has used: the wait for its being empty returns at once
        const auto send = [&]() {
            const int64_t start = groups.expert[unit / UNITS] * EXPERT_BYTES + int64_t(unit % UNITS) * UNIT_BYTES;
            const uint32_t bytes = part == PARTS - 1 ? PART_BYTES + SCALE_BYTES : PART_BYTES;
            barrier_expect(&full[stage], bytes);
            bulk_load(stages + stage * STAGE_BYTES, a.weights + start + part * PART_BYTES, bytes, &full[stage]);
            if (++part == PARTS) part = 0, unit += gridDim.x;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        };
        if (lane == 0) {
            for (int i = 0; i < STAGES && unit < units; ++i) send();
        }
        __syncwarp();  // the first copies leave before the masks, which nobody needs until a unit's end
        if (a.dense_groups == 0) mark_rows(group, lane, groups);
        asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");  // the groups are there for the consumers
        if (lane == 0) {
            while (unit < units) {
                barrier_wait(&empty[stage], parity, a.fault, KERNEL, a.layer);
                send();
            }
        }
        pdl_settle();
        return;
    }

    pdl_wait();
    pdl_trigger();
    Fragment b[PARTS][WARP_CHUNKS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
#pragma unroll
        for (int j = 0; j < WARP_CHUNKS; ++j) {
            load_fragment(b[p][j], a, p * PART_CHUNKS + warp * WARP_CHUNKS + j, lane);
        }
    }
    float2 code_scale = make_float2(0.0f, 0.0f);
    if constexpr (E4M3) {
        const int token = lane % 4 * 2;
        if (token < a.rows) code_scale.x = a.code_scale[token];
        if (token + 1 < a.rows) code_scale.y = a.code_scale[token + 1];
    }
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");  // the producer has found the groups

    const int units = groups.count * UNITS;
    int stage = 0, turn = 0;
    uint32_t parity = 0;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x, ++turn) {
        float sum[SUMS][4] = {};
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            barrier_wait(&full[stage], parity, a.fault, KERNEL, a.layer);
            const uint8_t* const part = stages + stage * STAGE_BYTES;
            uint4 w[WARP_CHUNKS];
#pragma unroll
            for (int j = 0; j < WARP_CHUNKS; ++j) {
                w[j] = reinterpret_cast<const uint4*>(part + (warp * WARP_CHUNKS + j) * CHUNK_BYTES)[lane];
            }
            float2 scale[SUMS];
            if (FP8 && p == PARTS - 1) {
#pragma unroll
                for (int q = 0; q < SUMS; ++q) {
                    const int block = (q * PART_CHUNKS + warp * WARP_CHUNKS) * CHUNK_K / 128;
                    scale[q] = reinterpret_cast<const float2*>(part + PART_BYTES)[block];
                }
            }
#pragma unroll
            for (int j = 0; j < WARP_CHUNKS; ++j) multiply(sum[FP8 ? p : 0], w[j], b[p][j]);
            reads_before_copies();
            barrier_arrive(&empty[stage]);  // every lane for its own reads
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (p == PARTS - 1) {
#pragma unroll
                for (int q = 0; q < SUMS; ++q) {
                    const float2 s = FP8 ? scale[q] : make_float2(1.0f, 1.0f);
                    total.x += s.x * sum[q][0], total.y += s.x * sum[q][1];
                    total.z += s.y * sum[q][2], total.w += s.y * sum[q][3];
                }
            }
        }
        partial[turn % 2][warp][lane] = total;
        // All warps' sums are there. The buffer is written again two units later, which nobody reaches before this
        // unit's finisher has come to the next unit's barrier.
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * WARP) : "memory");
        if (turn % CONSUMERS == warp) finish(a, groups, partial[turn % 2], unit, code_scale, lane);
    }
}
