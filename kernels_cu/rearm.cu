// rearm  makes a piece of an inbox NOT_READY, in a graph that ends before a later kernel would do it (common/exchange.cuh).
//   PRECOND  grid: any, block: THREADS, target 16-byte aligned. The consumer of what lies there is the predecessor.
//   Writes pieces * 16 bytes.
#include "abi_decode.cuh"
#include "common/flagged.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) rearm(const __grid_constant__ RearmArgs a) {
    pdl_wait();
    pdl_trigger();
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < a.pieces; i += gridDim.x * THREADS)
        a.target[i] = make_uint4(NOT_READY, NOT_READY, NOT_READY, NOT_READY);
}
