// Stands in for the predecessor of launches that poll, but slow: its successor is resident long before routing comes, row
// by row, the last one first, and the words that it copies come after that, one block's after the other's.
#include "common/clock.cuh"
#include "common/pdl.cuh"
#include "abi_decode.cuh"

struct TellArgs {
    const int* ids;        // [rows][top_k]
    int* routed;           // [ROUTED_COPIES][ROWS][top_k]
    const uint32_t* from;  // [words]
    uint32_t* to;
    int words;
    int rows;
    int top_k;
    int pause;             // nanoseconds before each row, and before each block's words
};

__device__ __forceinline__ void wait_for(int pause) {
    const uint64_t start = clock_ns();
    while (clock_ns() - start < pause) {}
}

extern "C" __global__ void __launch_bounds__(128) tell(const __grid_constant__ TellArgs a) {
    pdl_wait();
    pdl_trigger();
    if (blockIdx.x == 0) {
        for (int row = a.rows - 1; row >= 0; --row) {
            wait_for(a.pause);
            for (int i = threadIdx.x; i < ROUTED_COPIES * a.top_k; i += blockDim.x) {
                const int copy = i / a.top_k, choice = i % a.top_k;
                int* const target = a.routed + (copy * ROWS + row) * a.top_k + choice;
                const int told = a.ids[row * a.top_k + choice] + 1;
                asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(target), "r"(told) : "memory");
            }
        }
    }
    wait_for(a.pause * (1 + int(blockIdx.x)));
    const int each = (a.words + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each;
    for (int i = first + threadIdx.x; i < first + each && i < a.words; i += blockDim.x) a.to[i] = a.from[i];
}
