// x = residual + pieces of the projection before, and rms(x, norm) as a token in shared memory: each block for itself.
//
// All of a thread's loads are under way together, those of the norm before pdl_wait(). The blocks write x in turns.
// To be included after common/int4_stream.cuh.
#pragma once
#include "common/reduce.cuh"

// PIECES of a matrix [HIDDEN][K].
template <int K, int PIECES>
struct Entry {
    using Split = Pieces<HIDDEN, K, GEMV_BLOCKS>;
    static constexpr int EIGHTS = (padded(HIDDEN) / 8 + THREADS - 1) / THREADS;  // of columns, that a thread has
    static_assert(HIDDEN % TILE_ROWS == 0, "eight columns are of one tile");

    uint4 norm[EIGHTS];

    static __device__ __forceinline__ int column(int i) { return (i * THREADS + int(threadIdx.x)) * 8; }
    static __device__ __forceinline__ float4 load(const float* from, bool there) {
        return there ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0, 0, 0, 0);
    }
    static __device__ __forceinline__ void add(float (&x)[8], const float4 (&y)[2]) {
        x[0] += y[0].x, x[1] += y[0].y, x[2] += y[0].z, x[3] += y[0].w;
        x[4] += y[1].x, x[5] += y[1].y, x[6] += y[1].z, x[7] += y[1].w;
    }

    // Before pdl_wait().
    __device__ __forceinline__ explicit Entry(const f16* from) {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            // by an instruction that the compiler does not move behind the wait
            norm[i] = column(i) < HIDDEN ? load_weights(from + column(i)) : make_uint4(0, 0, 0, 0);
        }
    }

    // After it. Ends with a barrier of the block: the token is there for all.
    __device__ __forceinline__ void enter(const float* residual, const float* pieces, float* residual_out, uint8_t* token,
                                          float* scratch) const {
        float4 part[EIGHTS][1 + PIECES][2];
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const int c = column(i), count = pieces != nullptr && c < HIDDEN ? Split::of_row(c) : 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                part[i][0][half] = load(residual + c + 4 * half, c < HIDDEN);
#pragma unroll
                for (int p = 0; p < PIECES; ++p) part[i][1 + p][half] = load(pieces + p * HIDDEN + c + 4 * half, p < count);
            }
        }
        float x[EIGHTS][8] = {};
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
            for (int p = 0; p <= PIECES; ++p) add(x[i], part[i][p]);
        }
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) squares += x[i][j] * x[i][j];
        }
        squares = block_sum<THREADS>(squares, scratch);
        const float inverse = rsqrtf(squares * (1.0f / HIDDEN) + EPS);
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const int c = column(i);
            if (c < HIDDEN && c / 8 % gridDim.x == blockIdx.x) {
                float4* const to = reinterpret_cast<float4*>(residual_out + c);
                to[0] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
                to[1] = make_float4(x[i][4], x[i][5], x[i][6], x[i][7]);
            }
            const float2 n[4] = {unpack_f16(norm[i].x), unpack_f16(norm[i].y), unpack_f16(norm[i].z), unpack_f16(norm[i].w)};
            float normed[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) normed[j] = x[i][j] * inverse * (j % 2 == 0 ? n[j / 2].x : n[j / 2].y);
            TOKEN::store(token, c, normed, c < padded(HIDDEN));
        }
        __syncthreads();  // all of the token is there
    }
};
