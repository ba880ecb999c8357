// eh_proj  the draft's entry: [rms(table[token], enorm) ; rms(hidden, hnorm)] times the rank's EH_ROWS weight rows,
//          in EH_SPLITS pieces of K, which qkv adds.
//   PRECOND  grid (EH_ROWS / 16 * EH_SPLITS), cluster EH_SPLITS / 2, block 256; block b has tile b / EH_SPLITS and
//            piece b % EH_SPLITS, of which the first half belong to the embedding. Arrays 16-byte aligned. Tokens,
//            hidden_rows and hidden states are read after pdl_wait(); weights, norms and the table stay as they are.
//   Reads EH_ROWS * HIDDEN * 4 bytes of weights once, and in each block its piece of the operand rows; writes
//   EH_SPLITS * rows * EH_ROWS * 4; of several ranks, each pushes that to every rank's `out` (common/exchange.cuh).
//
// Each lane holds its weights in registers before pdl_wait(): all of the kernel's bytes are in flight while the
// sampler, one block, runs. After it, a lane reads just the operand values that its own MMAs take: a block has one
// tile, so nothing would be read twice, and no shared memory lies between the row and the tensor cores. A row's sum
// of squares needs all of its half: the half's pieces are a cluster, and send each other their parts of it
// (common/cluster.cuh). Reading the whole half in each block took 2 to 5 us more.
#include "abi_decode.cuh"
#include "common/cluster.cuh"
#include "common/exchange.cuh"
#include "common/fault.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int HALF_CHUNKS = HIDDEN / 16;  // of the embedding's half, and of the hidden state's
constexpr int PIECES = EH_SPLITS / 2;     // of a half
constexpr int EACH = HALF_CHUNKS / PIECES / WARPS;  // chunks of a warp
static_assert(EH_SPLITS % 2 == 0 && EACH * WARPS * PIECES == HALF_CHUNKS, "pieces lie in a half, evenly for warps");
static_assert(EH_ROWS % 16 == 0 && PIECES <= 8, "whole tiles, a cluster of a portable size");

// Four consecutive columns of a row of bfloat16 or float.
__device__ __forceinline__ float4 load_columns(const void* row, int column, bool embedded) {
    if (embedded) {
        const uint2 x = __ldg(reinterpret_cast<const uint2*>(static_cast<const bf16*>(row) + column));
        return make_float4(bf16_to_float(bf16(x.x)), bf16_to_float(bf16(x.x >> 16)), bf16_to_float(bf16(x.y)),
                           bf16_to_float(bf16(x.y >> 16)));
    }
    // From L2: L1 may hold the line as it was before the predecessor wrote it.
    return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(row) + column));
}

extern "C" __global__ void __launch_bounds__(THREADS) eh_proj(const __grid_constant__ EhProjArgs a) {
    __shared__ alignas(16) float squares[WARPS][ROWS];
    __shared__ alignas(16) float parts[PIECES][ROWS];  // of the half's pieces
    __shared__ uint64_t arrived;
    __shared__ float products[WARPS][16][ROWS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int g = lane / 4, t = lane % 4;
    const int tile = int(blockIdx.x) / EH_SPLITS, piece = int(blockIdx.x) % EH_SPLITS;
    const bool embedded = piece < PIECES;
    const int chunk = piece % PIECES * (EACH * WARPS) + warp * EACH;  // the warp's first, within its half

    if (PIECES > 1 && threadIdx.x == 0) {
        barrier_init(&arrived, 1);
        barrier_init_fence();  // remote completions must find it initialised
        barrier_expect(&arrived, sizeof(parts));
    }
    uint4 w[EACH];
    float4 norm[EACH];
    const uint8_t* weights = a.weights + (int64_t(tile) * 2 * HALF_CHUNKS + (embedded ? 0 : HALF_CHUNKS) + chunk) * 512;
    const float* norms = embedded ? a.enorm : a.hnorm;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        w[i] = load_weights(weights + i * 512 + lane * 16);
        norm[i] = __ldg(reinterpret_cast<const float4*>(norms + (chunk + i) * 16 + t * 4));
    }
#if RANKS > 1
    const Peers peers(a.peers);
#endif
    if (PIECES > 1) cluster_sync();
    pdl_wait();
    pdl_trigger();
    const int rows = live_before(a.live, a.rows);
    int source = lane < a.rows ? __ldcg((embedded ? a.tokens : a.hidden_rows) + lane) : 0;  // of row `lane`
    if (rows <= 0) return;
    const void* table = embedded ? static_cast<const void*>(a.table) : a.hidden;
    if (embedded && (source < 0 || source >= VOCAB_TOTAL)) {
        if (blockIdx.x == 0 && warp == 0 && lane < rows) report_fault(a.fault, FAULT_TOKEN, KERNEL_EH_PROJ, a.layer);
        source = 0;
    }
    source = __shfl_sync(0xffffffffu, source, g);
    if (source < 0) {
        table = a.draft_hidden;
        source = 0;
    }
    const void* row_start = static_cast<const uint8_t*>(table) + int64_t(source) * HIDDEN * (embedded ? 2 : 4);
    float4 x[EACH];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        x[i] = g < rows ? load_columns(row_start, (chunk + i) * 16 + t * 4, embedded)
                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < EACH; ++i) total += x[i].x * x[i].x + x[i].y * x[i].y + (x[i].z * x[i].z + x[i].w * x[i].w);
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (t == 0) squares[warp][g] = total;
    __syncthreads();  // every warp's part of each row's sum is there
    if (PIECES > 1) {
        if (threadIdx.x < 2 * PIECES) {  // four rows to one peer
            const int peer = threadIdx.x / 2, four = threadIdx.x % 2 * 4;
            float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                const float4 part = *reinterpret_cast<const float4*>(&squares[i][four]);
                sums = make_float4(sums.x + part.x, sums.y + part.y, sums.z + part.z, sums.w + part.w);
            }
            // A block leaves only after all that is sent to it has come, so no message finds its receiver gone.
            cluster_send(reinterpret_cast<const float4*>(&parts[piece % PIECES][four]), &arrived, peer, sums);
        }
        cluster_receive(&arrived, a.fault, KERNEL_EH_PROJ, a.layer);
    }
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < (PIECES > 1 ? PIECES : WARPS); ++i)
        total += PIECES > 1 ? parts[i % PIECES][g] : squares[i % WARPS][g];
    const float inverse = rsqrtf(total * (1.0f / HIDDEN) + EPS);

    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const uint2 b = make_uint2(pack_f16(x[i].x * inverse * norm[i].x, x[i].y * inverse * norm[i].y),
                                   pack_f16(x[i].z * inverse * norm[i].z, x[i].w * inverse * norm[i].w));
        mma_chunk_f16(c, w[i], b);
    }
    *reinterpret_cast<float2*>(&products[warp][g][t * 2]) = make_float2(c[0], c[1]);
    *reinterpret_cast<float2*>(&products[warp][g + 8][t * 2]) = make_float2(c[2], c[3]);
    __syncthreads();  // every warp's chunks are in

    const int row = threadIdx.x / 16, out_row = threadIdx.x % 16;  // 16 threads write 64 contiguous bytes
    if (row >= rows) return;
    float out = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) out += products[i][out_row][row];
    float* const to = &a.out[(int64_t(piece) * ROWS + row) * HIDDEN + a.first_row + tile * 16 + out_row];
#if RANKS > 1
    peers.push(to, out);
#else
    *to = out;
#endif
    if (!is_finite(out)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_EH_PROJ, a.layer);
}
