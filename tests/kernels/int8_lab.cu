// The other way to multiply INT4 weights: activations as INT8 with a scale for each group of 128, products by dp4a.
// A laboratory: see tools/decisions/016-int8-activations.md. Streams as the product does (common/int4_stream.cuh).
//
// Codes of a group lie as lanes take them: for t = 0 .. 3 and each of a unit's four runs of 32 columns, lane t's columns
// 0, 4, 1, 5 and then 2, 6, 3, 7, which are the even and the odd nibbles of a word's bytes. Behind the 128 codes is their
// scale, over 16: nibbles are multiplied where they lie, in a byte's upper half.
#include "common/int4_stream.cuh"
#include "common/reduce.cuh"

struct Codes {
    static constexpr int GROUP_BYTES = GROUP_SIZE + 16;

    static __device__ __forceinline__ void add(int& sum, uint32_t word, int even, int odd) {
        sum = __dp4a(int((word << 4) & 0xf0f0f0f0u), even, sum);
        sum = __dp4a(int(word & 0xf0f0f0f0u), odd, sum);
    }

    struct Columns {
        int4 x[2];
        float scale;

        __device__ __forceinline__ void load(const uint8_t* group, int lane) {
            for (int chunk = 0; chunk < 2; ++chunk) x[chunk] = reinterpret_cast<const int4*>(group)[2 * (lane % 4) + chunk];
            scale = *reinterpret_cast<const float*>(group + GROUP_SIZE);
        }

        __device__ __forceinline__ float2 times(const uint4 (&w)[2]) const {
            int low = 0, high = 0;
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                add(low, w[chunk].x, x[chunk].x, x[chunk].y);
                add(high, w[chunk].y, x[chunk].x, x[chunk].y);
                add(low, w[chunk].z, x[chunk].z, x[chunk].w);
                add(high, w[chunk].w, x[chunk].z, x[chunk].w);
            }
            return make_float2(scale * float(low), scale * float(high));
        }
    };

    // A quad's lanes have different columns.
    static __device__ __forceinline__ float sum(float x) {
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        return x + __shfl_xor_sync(0xffffffffu, x, 2);
    }
};

struct QuantiseArgs {
    const f16* in;   // [padded(INPUTS)]
    uint8_t* codes;  // [groups][GROUP_BYTES]
};

// A warp has a group; grid ceil(groups / 8), block 256.
extern "C" __global__ void __launch_bounds__(256) quantise(const __grid_constant__ QuantiseArgs a) {
    const int group = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    pdl_wait();
    pdl_trigger();
    if (group >= padded(INPUTS) / GROUP_SIZE) return;
    // Lane (run of 32 columns, t, half of its eight codes) has columns 0, 4, 1, 5 or 2, 6, 3, 7 of them.
    const int run = lane / 8, t = lane / 2 % 4, odd = lane % 2;
    const f16* const from = a.in + group * GROUP_SIZE + run * 32 + t * 8 + odd * 2;
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = f16_to_float(__ldcg(from + i % 2 * 4 + i / 2));
    const float largest = warp_max(fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))));
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= (uint32_t(__float2int_rn(x[i] * inverse)) & 0xffu) << 8 * i;
    uint8_t* const to = a.codes + group * Codes::GROUP_BYTES;
    *reinterpret_cast<uint32_t*>(to + t * 32 + run * 8 + odd * 4) = codes;
    if (lane == 0) *reinterpret_cast<float*>(to + GROUP_SIZE) = largest / 127.0f / 16.0f;
}

using Tiles = SharedTiles<HIDDEN, INPUTS>;
using ProjectionStream = Stream<INPUTS, Tiles::BLOCK_UNITS>;

// As qwen2_gemv_projection.cu, `in` as codes.
extern "C" __global__ void __launch_bounds__(THREADS, 2) int8_projection(const __grid_constant__ Qwen2ProjectionArgs a) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ ProjectionStream::Shared shared;
    if (TRIGGER == AT_ONCE) pdl_trigger();
    const Run block = Tiles::run();
    const ProjectionStream stream(shared, memory, a.weights, block);
    if (threadIdx.x == 0) {
        barrier_init(&shared.token, WARPS);
        barrier_init_fence();
    }
    __syncthreads();  // the token's barrier exists for all
    pdl_wait();       // `in`
    if (TRIGGER == AFTER_WAIT) pdl_trigger();
    copy_token<INPUTS, Codes>(memory + TOKEN_AT, a.in, &shared.token);
    barrier_wait(&shared.token, 0, a.fault, KERNEL, a.layer);
    stream.multiply<Codes>(shared, memory + TOKEN_AT, a.fault, KERNEL, a.layer);
    __syncthreads();  // every warp's sums are there
    Tiles::store<ProjectionStream>(shared, block, a.scale, a.out, a.fault, KERNEL, a.layer);
}
