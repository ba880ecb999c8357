// Stands in for the ranks' producers of one tail: when its predecessor has ended, it waits for a while, so that the tail
// polls already, and then stores what all of them push to one rank.
#include "common/clock.cuh"
#include "common/flagged.cuh"

struct PushArgs {
    const uint4* from;
    uint4* to;
    uint4* unready;      // of an older use, to be made NOT_READY; or null
    int pieces;          // of 16 bytes, EACH of a thread at most
    int unready_pieces;
    int pause;           // nanoseconds
    int reserved;
};

constexpr int EACH = 4;  // pieces of a thread, at most

extern "C" __global__ void __launch_bounds__(256) push(const __grid_constant__ PushArgs a) {
    const int first = blockIdx.x * 256 + threadIdx.x, threads = gridDim.x * 256;
    pdl_wait();
    const uint64_t begun = clock_ns();
    pdl_trigger();
    for (int i = first; a.unready != nullptr && i < a.unready_pieces; i += threads)
        a.unready[i] = make_uint4(NOT_READY, NOT_READY, NOT_READY, NOT_READY);
    uint4 x[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (first + j * threads < a.pieces) x[j] = a.from[first + j * threads];
    while (clock_ns() - begun < a.pause) {}
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (first + j * threads < a.pieces)
            asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(a.to + first + j * threads),
                         "r"(x[j].x), "r"(x[j].y), "r"(x[j].z), "r"(x[j].w)
                         : "memory");
}
