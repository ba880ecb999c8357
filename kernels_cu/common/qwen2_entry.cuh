// x = residual + pieces of the projection before, and rms(x, norm) as halves in shared memory: each block for itself.
//
// All of a thread's loads are under way together, those of the norm before pdl_wait(). The blocks write x in turns.
// To be included after common/int4_stream.cuh.
#pragma once
#include "common/reduce.cuh"

// PIECES of a matrix [HIDDEN][K].
template <int K, int PIECES>
struct Entry {
    using Split = Pieces<HIDDEN, K, GEMV_BLOCKS>;
    static constexpr int VECTORS = (padded(HIDDEN) / 4 + THREADS - 1) / THREADS;  // of four columns, that a thread has
    static_assert(HIDDEN % 16 == 0, "whole tiles and vectors");

    uint2 norm[VECTORS];

    static __device__ __forceinline__ int column(int i) { return (i * THREADS + int(threadIdx.x)) * 4; }

    // Before pdl_wait().
    __device__ __forceinline__ explicit Entry(const f16* from) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            norm[i] = column(i) < HIDDEN ? __ldg(reinterpret_cast<const uint2*>(from + column(i))) : make_uint2(0u, 0u);
        }
    }

    // After it. Ends with a barrier of the block: normed is there for all.
    __device__ __forceinline__ void enter(const float* residual, const float* pieces, float* residual_out, uint8_t* normed,
                                          float* scratch) const {
        float4 x[VECTORS];
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int c = column(i);
            x[i] = c < HIDDEN ? __ldcg(reinterpret_cast<const float4*>(residual + c)) : make_float4(0, 0, 0, 0);
        }
        if (pieces != nullptr) {
            float4 piece[VECTORS][PIECES];
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int c = column(i), count = c < HIDDEN ? Split::of_row(c) : 0;
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    piece[i][p] = p < count ? __ldcg(reinterpret_cast<const float4*>(pieces + p * HIDDEN + c))
                                            : make_float4(0, 0, 0, 0);
                }
            }
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    x[i].x += piece[i][p].x;
                    x[i].y += piece[i][p].y;
                    x[i].z += piece[i][p].z;
                    x[i].w += piece[i][p].w;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            squares += x[i].x * x[i].x + x[i].y * x[i].y + (x[i].z * x[i].z + x[i].w * x[i].w);
        }
        squares = block_sum<THREADS>(squares, scratch);
        const float inverse = rsqrtf(squares * (1.0f / HIDDEN) + EPS);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int c = column(i);
            const float2 n0 = unpack_f16(norm[i].x), n1 = unpack_f16(norm[i].y);
            if (c < padded(HIDDEN)) {
                *reinterpret_cast<uint2*>(normed + c * 2) =
                    make_uint2(pack_f16(x[i].x * inverse * n0.x, x[i].y * inverse * n0.y),
                               pack_f16(x[i].z * inverse * n1.x, x[i].w * inverse * n1.y));
            }
            if (c < HIDDEN && c / 4 % gridDim.x == blockIdx.x) *reinterpret_cast<float4*>(residual_out + c) = x[i];
        }
        __syncthreads();  // all of normed is there
    }
};
