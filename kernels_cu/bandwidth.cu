// What a GPU's memory delivers: the ceiling that other kernels' times are judged by.
//
// PRECOND: block 512; grid a few blocks a multiprocessor; data 16-byte aligned, count a multiple of 8 * 512 * grid.
// Reads count * 16 bytes once, with eight independent 16-byte loads in flight a thread; writes 4 bytes a block.
// fill_random writes them: constants would let the memory system do better than real weights.
#include "common/pdl.cuh"
#include "abi_measure.cuh"

constexpr int IN_FLIGHT = 8;

extern "C" __global__ void __launch_bounds__(512) fill_random(const __grid_constant__ BandwidthArgs a) {
    pdl_wait();
    pdl_trigger();
    const uint64_t stride = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.count; i += stride) {
        uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull;  // splitmix64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
        x ^= x >> 31;
        const uint32_t lo = uint32_t(x), hi = uint32_t(x >> 32);
        a.data[i] = make_uint4(lo, hi, lo * 0x9E3779B9u + 1u, hi * 0x85EBCA6Bu + 1u);
    }
}

extern "C" __global__ void __launch_bounds__(512) read_once(const __grid_constant__ BandwidthArgs a) {
    pdl_wait();
    pdl_trigger();
    const uint64_t stride = uint64_t(gridDim.x) * blockDim.x;
    uint32_t sum = 0;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.count; i += IN_FLIGHT * stride) {
        uint4 x[IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; ++j) {
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[j].x), "=r"(x[j].y), "=r"(x[j].z), "=r"(x[j].w)
                         : "l"(a.data + i + j * stride));
        }
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; ++j) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
    }
    // A sum that never happens to be 1 in every thread: the loads must not be removed.
    if (__syncthreads_and(sum == 1)) a.out[blockIdx.x] = sum;
}
