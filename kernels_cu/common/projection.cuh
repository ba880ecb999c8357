// What the attention's two projections share: a lane's part of weight chunks and activations, and how they multiply.
//
// Weights arrive in a prologue and are turned into halves there, where nobody waits: after pdl_wait() only the
// activations' trip from L2 and the MMAs are left. Activations are read past L1: a line there may be older than the
// predecessor's writes, where an earlier kernel of this multiprocessor read the same buffer.
#pragma once
#include "common/copy.cuh"
#include "common/mma.cuh"

constexpr bool FP8 = FP8_ATTENTION != 0;
constexpr int CHUNK_BYTES = 512;
constexpr int CHUNK_K = FP8 ? 32 : 16;
constexpr int SCALE_K = 128;                        // columns of a scale block
constexpr int SCALE_CHUNKS = SCALE_K / CHUNK_K;
constexpr int CHUNK_HALVES = FP8 ? 8 : 4;           // registers of a lane's part of a chunk, two halves each
constexpr int CHUNK_LOADS = FP8 ? 2 : 1;            // of a lane's activations for a chunk

__device__ __forceinline__ uint2 load_l2_8(const void* address) {
    uint2 x;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(address) : "memory");
    return x;
}

__device__ __forceinline__ uint4 load_l2_16(const void* address) {
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}

__device__ __forceinline__ float load_l2_float(const float* address) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(address) : "memory");
    return x;
}

__device__ __forceinline__ int load_l2_int(const int* address) {
    int x;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

// A lane's part of a weight chunk as halves: A of one m16n8k16, or of two.
struct Halves {
    uint32_t a[CHUNK_HALVES];
};

__device__ __forceinline__ Halves to_halves(uint4 w) {
    if constexpr (FP8) {
        return {{e4m3_to_f16x2(uint16_t(w.x)), e4m3_to_f16x2(uint16_t(w.y)), e4m3_to_f16x2(uint16_t(w.x >> 16)),
                 e4m3_to_f16x2(uint16_t(w.y >> 16)), e4m3_to_f16x2(uint16_t(w.z)), e4m3_to_f16x2(uint16_t(w.w)),
                 e4m3_to_f16x2(uint16_t(w.z >> 16)), e4m3_to_f16x2(uint16_t(w.w >> 16))}};
    } else {
        return {{w.x, w.y, w.z, w.w}};
    }
}

// Keeps work in the prologue that ptxas would move behind pdl_wait(), to where its results are used: values that a
// branch might change have to be there before it. The branch is never taken.
__device__ __forceinline__ void spoil(Halves& h) {
#pragma unroll
    for (int i = 0; i < CHUNK_HALVES; ++i) asm volatile("xor.b32 %0, %0, 1;" : "+r"(h.a[i]));
}

// A lane's activations for a chunk: token lane / 4.
struct Activations {
    uint2 b[CHUNK_LOADS];
};

// Bytes between two tokens of COLUMNS halves in shared memory: 4 tokens' 32-byte pieces of a chunk hit 32 banks.
template <int COLUMNS>
constexpr int TOKEN_PITCH = COLUMNS * 2 + (COLUMNS % 32 == 0 ? 32 : 0);

// How a warp brings COLUMNS columns of ROWS tokens into its own shared memory. B's fragments straight from L2 would be
// 32 bytes of each of 8 tokens a load, a cache line for each: this takes a third of the requests. Addresses are made
// in the prologue.
template <int COLUMNS>
struct Fetch {
    static constexpr int ROW_PIECES = COLUMNS / 8, PIECES = ROWS * ROW_PIECES, COUNT = (PIECES + WARP - 1) / WARP;
    static_assert(COLUMNS % 16 == 0, "whole pieces of 32 bytes a token");
    uint64_t from[COUNT];
    uint32_t to[COUNT];

    // x: the first token at the first column, in global memory. Tokens from `rows` on are the last one's: B must be
    // memory that exists.
    __device__ __forceinline__ Fetch(const uint8_t* shared, const f16* x, int stride, int rows) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int piece = i * WARP + threadIdx.x % WARP, token = piece / ROW_PIECES, column = piece % ROW_PIECES;
            from[i] = uint64_t(x + min_int(token, rows - 1) * stride + column * 8);
            to[i] = shared_address(shared) + token * TOKEN_PITCH<COLUMNS> + column * 16;
        }
    }

    __device__ __forceinline__ void run() const {
        uint4 x[COUNT] = {};
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (PIECES % WARP != 0 && i * WARP + threadIdx.x % WARP >= PIECES) continue;
            x[i] = load_l2_16(reinterpret_cast<const void*>(from[i]));
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (PIECES % WARP != 0 && i * WARP + threadIdx.x % WARP >= PIECES) continue;
            asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to[i]), "r"(x[i].x), "r"(x[i].y), "r"(x[i].z),
                         "r"(x[i].w)
                         : "memory");
        }
        __syncwarp();  // what all lanes fetched is there
    }

    __device__ __forceinline__ void spoil() {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            asm volatile("xor.b64 %0, %0, 1;" : "+l"(from[i]));
            asm volatile("xor.b32 %0, %0, 1;" : "+r"(to[i]));
        }
    }
};

// chunk: of the warp's.
template <int COLUMNS>
__device__ __forceinline__ Activations read_tokens(const uint8_t* shared, int chunk) {
    const int lane = threadIdx.x % WARP;
    const uint8_t* const token = shared + lane / 4 * TOKEN_PITCH<COLUMNS> + chunk * CHUNK_K * 2 + lane % 4 * 8;
    Activations y;
#pragma unroll
    for (int i = 0; i < CHUNK_LOADS; ++i) y.b[i] = *reinterpret_cast<const uint2*>(token + 32 * i);
    return y;
}

__device__ __forceinline__ void multiply(float (&c)[4], const Halves& w, const Activations& x) {
#pragma unroll
    for (int i = 0; i < CHUNK_LOADS; ++i) {
        mma_f16(c, w.a[4 * i], w.a[4 * i + 1], w.a[4 * i + 2], w.a[4 * i + 3], x.b[i].x, x.b[i].y);
    }
}

// acc += scale * (w x). With scales, each chunk has a sum of its own: its scale may differ from the next one's, and
// short chains of MMAs end sooner than one long one.
__device__ __forceinline__ void accumulate(float (&acc)[4], const Halves& w, const Activations& x, float scale) {
    if constexpr (FP8) {
        float part[4] = {};
        multiply(part, w, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] += scale * part[i];
    } else {
        multiply(acc, w, x);
    }
}
