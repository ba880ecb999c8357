// eh_proj  the draft's entry: [rms(table[token], enorm) ; rms(hidden, hnorm)] times the rank's EH_ROWS weight rows, in
//          EH_SPLITS pieces of K, which entry_norm adds.
//   PRECOND  grid (EH_ROWS / 16 * EH_SPLITS), block 256; block b has tile b / EH_SPLITS and piece b % EH_SPLITS. EH_SPLITS is
//            even: a piece lies in one half of K. Arrays 16-byte aligned. Tokens, hidden_rows and hidden states are the
//            predecessor's and read after pdl_wait(); weights, norms and table are not written at all.
//   Reads EH_ROWS * HIDDEN * 4 bytes of weights once, and in each block its half of the operand rows; writes
//   EH_SPLITS * rows * EH_ROWS * 4.
//
// Each lane holds its weights in registers before pdl_wait(): all of the kernel's bytes are in flight while the
// sampler, one block, runs. After it, a lane reads just the operand values that its own MMAs take: a block has one tile,
// so nothing would be read twice, and no shared memory lies between the row and the tensor cores. The row's sum
// of squares needs all of its half: eight warps share the rows that there are, so a single row is eight times as quick.
#include "common/fault.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int HALF_CHUNKS = HIDDEN / 16;  // of the embedding's half, and of the hidden state's
constexpr int PIECES = EH_SPLITS / 2;     // of a half
constexpr int EACH = HALF_CHUNKS / PIECES / WARPS;  // chunks of a warp
static_assert(EH_SPLITS % 2 == 0 && EACH * WARPS * PIECES == HALF_CHUNKS, "pieces lie in a half, warps share them evenly");
static_assert(EH_ROWS % 16 == 0 && HIDDEN % (4 * WARP) == 0, "whole tiles, whole warps of four columns");

// Four consecutive columns of a row that is null (zero), bfloat16 or float.
__device__ __forceinline__ float4 load_columns(const void* row, int column, bool embedded) {
    if (row == nullptr) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (embedded) {
        const uint2 x = __ldg(reinterpret_cast<const uint2*>(static_cast<const bf16*>(row) + column));
        return make_float4(bf16_to_float(bf16(x.x)), bf16_to_float(bf16(x.x >> 16)), bf16_to_float(bf16(x.y)),
                           bf16_to_float(bf16(x.y >> 16)));
    }
    // From L2: L1 may hold the line as it was before the predecessor wrote it.
    return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(row) + column));
}

// The sum of squares of every STEP-th warp-wide piece of four columns, from `first` on.
template <int STEP>
__device__ __forceinline__ float partial_squares(const void* row, int first, bool embedded) {
    constexpr int COUNT = HIDDEN / (4 * WARP);
    float total = 0.0f;
#pragma unroll 8
    for (int i = first; i < COUNT; i += STEP) {
        const float4 x = load_columns(row, (i * WARP + int(threadIdx.x % WARP)) * 4, embedded);
        total += x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w);
    }
    return warp_sum(total);
}

extern "C" __global__ void __launch_bounds__(THREADS) eh_proj(const __grid_constant__ EhProjArgs a) {
    __shared__ float squares[WARPS];
    __shared__ float products[WARPS][16][ROWS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int g = lane / 4, t = lane % 4;
    const int tile = int(blockIdx.x) / EH_SPLITS, piece = int(blockIdx.x) % EH_SPLITS;
    const bool embedded = piece < PIECES;
    const int chunk = piece % PIECES * (EACH * WARPS) + warp * EACH;  // the warp's first, within its half

    uint4 w[EACH];
    float4 norm[EACH];
    const uint8_t* weights = a.weights + (int64_t(tile) * 2 * HALF_CHUNKS + (embedded ? 0 : HALF_CHUNKS) + chunk) * 512;
    const float* norms = embedded ? a.enorm : a.hnorm;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        w[i] = load_weights(weights + i * 512 + lane * 16);
        norm[i] = __ldg(reinterpret_cast<const float4*>(norms + (chunk + i) * 16 + t * 4));
    }
    pdl_wait();
    pdl_trigger();
    const int rows = a.live != nullptr ? min_int(a.rows, __ldcg(a.live)) : a.rows;
    if (rows <= 0) return;

    const auto row_address = [&](int row) -> const void* {
        if (row >= rows) return nullptr;
        if (embedded) {
            int token = __ldcg(a.tokens + row);
            if (token < 0 || token >= VOCAB_TOTAL) {
                if (blockIdx.x == 0 && lane == 0) report_fault(a.fault, FAULT_TOKEN, KERNEL_EH_PROJ, a.layer);
                token = 0;
            }
            return a.table + int64_t(token) * HIDDEN;
        }
        const int from = __ldcg(a.hidden_rows + row);
        return from < 0 ? a.draft_hidden : a.hidden + int64_t(from) * HIDDEN;
    };

    // The lane's own operand values, row g, are under way while the sums are taken.
    const void* own = row_address(g);
    float4 x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] = load_columns(own, (chunk + i) * 16 + t * 4, embedded);

    // 1, 2, 4 or 8 rows at a time: 8, 4, 2 or 1 warps a row.
    const int step = rows > 4 ? 1 : rows > 2 ? 2 : rows > 1 ? 4 : 8;
    const void* mine = row_address(warp / step);
    const float part = step == 8   ? partial_squares<8>(mine, warp, embedded)
                       : step == 4 ? partial_squares<4>(mine, warp % 4, embedded)
                       : step == 2 ? partial_squares<2>(mine, warp % 2, embedded)
                                   : partial_squares<1>(mine, 0, embedded);
    if (lane == 0) squares[warp] = part;
    __syncthreads();  // every warp's part of a row's sum is there
    float total = 0.0f;
    if (g < rows)
        for (int i = 0; i < step; ++i) total += squares[g * step + i];
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
    a.out[(int64_t(piece) * ROWS + row) * HIDDEN + a.first_row + tile * 16 + out_row] = out;
    if (!is_finite(out)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_EH_PROJ, a.layer);
}
