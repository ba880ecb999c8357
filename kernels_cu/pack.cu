// Loading: rows of weights to the order in which the other kernels consume them, and what is folded from them.
//
// Not on the way of a token. Packing is a permutation within tiles of 16 rows (and a rounding, where halves are made of
// BF16 or FP32), so the host copies rows as they lie in the file, and the GPU's memory, a thousand times faster at
// 4-byte pieces than a CPU, permutes them. Everything that is read is checked here, where it costs nothing.
#include "abi_weights.cuh"

constexpr int CHUNK_WORDS = 128;
constexpr int BLOCK = 256;
constexpr int NOT_FINITE = 0, TOO_LARGE = 1;

__device__ __forceinline__ void report(const PackArgs& a, uint64_t row8, int what) {
    atomicMin(reinterpret_cast<unsigned long long*>(a.report), (unsigned long long)(a.key + (row8 << 8) + what));
}

// What is wrong with a value that goes into a half: bit 0 not finite, bit 1 too large (65520 rounds to infinity).
__device__ __forceinline__ uint32_t fault_of(float x) { return !is_finite(x) ? 1 : fabsf(x) >= 65520.0f ? 2 : 0; }

// PRECOND: grid >= 1, block 256; source and target 16-byte aligned, k a multiple of 16, of 32 for codes.
// Reads and writes each element once: a thread gathers the four words of a lane's 16 bytes, a warp one chunk, from
// 16 rows of 32 bytes (64 where they are FP32), whole sectors.
extern "C" __global__ void __launch_bounds__(BLOCK) pack(const __grid_constant__ PackArgs a) {
    const int chunks = a.k / (a.fp8 ? 32 : 16);
    const uint64_t rows_bytes = 16ull * a.k * (a.kind == 0 ? 1 : a.kind == 1 ? 2 : 4);
    const int packed = chunks * CHUNK_WORDS * 4;
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
        const uint8_t* rows = a.source + tile * rows_bytes;
        uint8_t* out = a.target + uint64_t(tile) * (packed + a.tail);
        uint32_t wrong[2] = {};  // in rows 0..7 and 8..15, as fault_of; one report a tile keeps atomics out of the loop
        for (int c = threadIdx.x / WARP; c < chunks; c += BLOCK / WARP) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint64_t row = g + 8 * (i & 1);
                if (a.fp8) {
                    const uint8_t* at = rows + row * a.k + 32 * c + 16 * (i / 2) + 4 * t;
                    words[i] = *reinterpret_cast<const uint32_t*>(at);
                    // NaN has all bits but the sign set: the only code in which adding 1 carries into bit 7.
                    wrong[i & 1] |= ((words[i] & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u ? 1 : 0;
                    continue;
                }
                const uint64_t element = row * a.k + 16 * c + 4 * t + 2 * (i / 2);
                float lo, hi;
                if (a.kind == 1) {
                    const uint32_t w = *reinterpret_cast<const uint32_t*>(rows + 2 * element);
                    lo = bf16_to_float(bf16(w));
                    hi = bf16_to_float(bf16(w >> 16));
                } else {
                    const float2 w = *reinterpret_cast<const float2*>(rows + 4 * element);
                    lo = w.x;
                    hi = w.y;
                }
                wrong[i & 1] |= fault_of(lo) | fault_of(hi);
                words[i] = pack_f16(lo, hi);
            }
            reinterpret_cast<uint4*>(out)[c * WARP + lane] = make_uint4(words[0], words[1], words[2], words[3]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (wrong[half]) report(a, 2ull * tile + half, wrong[half] & 1 ? NOT_FINITE : TOO_LARGE);
        const uint8_t* tail = a.source + a.tiles * rows_bytes + uint64_t(tile) * a.tail;
        for (int i = threadIdx.x; i < a.tail / 4; i += BLOCK)
            reinterpret_cast<uint32_t*>(out + packed)[i] = reinterpret_cast<const uint32_t*>(tail)[i];
    }
}

// Rows to E4M3 with a scale each: the row's largest magnitude becomes 448. For a matrix whose rounding changes speed and
// not results: the draft's lm_head, as drafts are verified whatever they were drawn from.
// PRECOND: grid >= 1, block 256; kind BF16 or FP32; source and target 16-byte aligned, k a multiple of 32. tail unused.
// Reads each element twice (the second time from L2), writes a byte for it, and scales [tiles][16].
extern "C" __global__ void __launch_bounds__(BLOCK) quantise(const __grid_constant__ PackArgs a) {
    __shared__ float scale[16];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
        const auto value = [&](int row, int column) {
            const uint64_t element = (uint64_t(tile) * 16 + row) * a.k + column;
            return a.kind == 1 ? bf16_to_float(reinterpret_cast<const bf16*>(a.source)[element])
                               : reinterpret_cast<const float*>(a.source)[element];
        };
        for (int row = warp; row < 16; row += BLOCK / WARP) {
            float top = 0.0f;
            bool wrong = false;
            for (int column = lane; column < a.k; column += WARP) {
                const float x = value(row, column);
                wrong |= !is_finite(x);
                top = fmaxf(top, fabsf(x));
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
            if (wrong) report(a, 2ull * tile + row / 8, NOT_FINITE);
            const float step = top / 448.0f;
            if (lane == 0) scale[row] = step > 0.0f ? step : 1.0f;
        }
        __syncthreads();  // all rows' scales are there
        if (threadIdx.x < 16) a.scales[tile * 16 + threadIdx.x] = scale[threadIdx.x];
        uint4* const out = reinterpret_cast<uint4*>(a.target) + uint64_t(tile) * a.k;
        for (int c = warp; c < a.k / 32; c += BLOCK / WARP) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = g + 8 * (i & 1), column = 32 * c + 16 * (i / 2) + 4 * t;
                const float by = scale[row];
                words[i] = uint32_t(float_to_e4m3x2(value(row, column) / by, value(row, column + 1) / by)) |
                           uint32_t(float_to_e4m3x2(value(row, column + 2) / by, value(row, column + 3) / by)) << 16;
            }
            out[c * WARP + lane] = make_uint4(words[0], words[1], words[2], words[3]);
        }
        __syncthreads();  // everyone has used the scales
    }
}

// Looks for values that are not finite in BF16 rows, [tiles][k] at `target`: tables go to their place as they are.
// PRECOND: grid >= 1, block 256; target 16-byte aligned, k a multiple of 2.
extern "C" __global__ void __launch_bounds__(BLOCK) check_table(const __grid_constant__ PackArgs a) {
    for (int row = blockIdx.x; row < a.tiles; row += gridDim.x) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(a.target) + uint64_t(row) * (a.k / 2);
        bool bad = false;
        for (int i = threadIdx.x; i < a.k / 2; i += BLOCK) {
            const uint32_t w = words[i];
            bad |= (w & 0x7f80u) == 0x7f80u || (w & 0x7f800000u) == 0x7f800000u;
        }
        if (bad) report(a, row / 8, NOT_FINITE);
    }
}

constexpr int FOLD_EXPERTS = 8;  // a block's: each decoded weight is used so many times
constexpr int FOLD_ROWS = 64;    // rows of W_o whose coefficients are in shared memory at a time

__device__ __forceinline__ float e4m3_to_float(uint8_t code) { return f16_to_float(f16(e4m3_to_f16x2(code))); }

// PRECOND: grid (q_heads + ceil(slice / 128), ceil(experts / 8)), block 128; hidden a multiple of 64. Block x below
// q_heads computes the 128 columns of a head, the others 128 columns of the slice. Sums are in double: what routing
// is decided by should be no worse than the product that it replaces. Once a layer, about 0.1 ms at most.
extern "C" __global__ void __launch_bounds__(128) fold_router(const __grid_constant__ FoldArgs a) {
    const int first = blockIdx.y * FOLD_EXPERTS, width = a.q_heads * HEAD_DIM + a.slice;
    const int head = blockIdx.x, column = threadIdx.x;
    if (head >= a.q_heads) {
        const int j = (head - a.q_heads) * 128 + column;
        if (j >= a.slice) return;
        const int h = a.slice_start + j;
        for (int e = first; e < min_int(first + FOLD_EXPERTS, a.experts); ++e) {
            const float routed = a.router[uint64_t(e) * a.hidden + h] * a.ffn_norm[h];
            a.fold[uint64_t(e) * width + a.q_heads * HEAD_DIM + j] = routed;
        }
        return;
    }
    __shared__ double coefficients[FOLD_EXPERTS][FOLD_ROWS];
    const bool fp8 = a.o_scales != nullptr;
    const int k = head * HEAD_DIM + column, cut = fp8 ? 32 : 16, in_chunk = k % cut;
    const uint64_t tile_bytes = uint64_t(a.q_heads) * HEAD_DIM * 16 * (fp8 ? 1 : 2);
    // Where column k of row 0 lies within a tile; row r adds r % 8 lanes' quads of 64 bytes, and a word for r / 8.
    const int place = fp8 ? k / cut * 512 + in_chunk % 16 / 4 * 16 + in_chunk / 16 * 8 + in_chunk % 4
                          : k / cut * 512 + in_chunk / 4 * 16 + in_chunk % 4 / 2 * 8 + in_chunk % 2 * 2;
    double sums[FOLD_EXPERTS] = {};
    for (int top = 0; top < a.hidden; top += FOLD_ROWS) {
        __syncthreads();  // everyone has used the rows before these
        for (int i = threadIdx.x; i < FOLD_EXPERTS * FOLD_ROWS; i += 128) {
            const int e = first + i / FOLD_ROWS, h = top + i % FOLD_ROWS;
            coefficients[i / FOLD_ROWS][i % FOLD_ROWS] =
                e < a.experts ? double(a.router[uint64_t(e) * a.hidden + h]) * a.ffn_norm[h] * a.attn_out_norm[h] : 0.0;
        }
        __syncthreads();  // the coefficients are there
        for (int r = 0; r < FOLD_ROWS; ++r) {
            const int tile = (top + r) / 16, row = r % 16;
            const uint8_t* at = a.o + tile * tile_bytes + place + row % 8 * 64 + row / 8 * 4;
            const double w = fp8 ? double(e4m3_to_float(*at)) * a.o_scales[tile * a.q_heads + head]
                                 : double(f16_to_float(*reinterpret_cast<const f16*>(at)));
#pragma unroll
            for (int e = 0; e < FOLD_EXPERTS; ++e) sums[e] += coefficients[e][r] * w;
        }
    }
#pragma unroll
    for (int e = 0; e < FOLD_EXPERTS; ++e)
        if (first + e < a.experts) a.fold[uint64_t(first + e) * width + k] = float(sums[e]);
}
