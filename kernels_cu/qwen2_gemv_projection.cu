// A projection of halves onto the residual's columns, as pieces: o_proj (INPUTS = Q_HEADS HEAD_SIZE) or down (INPUTS = INNER).
//
// PRECOND  grid Pieces::TAKERS, block 32 WARPS. weights 16-byte aligned units (abi_qwen2.cuh), never written: the prologue
//          reads them alone. in [padded(INPUTS)] 16-byte aligned, the predecessor's, finite where weights are padding.
// READS    HIDDEN * padded(INPUTS) / 2 bytes of codes and a 32nd of that of scales, once; 2 padded(INPUTS) of `in` in each block, from
//          L2.
// WRITES   4 bytes a row and piece.
//
// Why so: blocks take equal runs of units whatever a tile's length, since the reader of pieces adds them for nothing: its
// loads wait for memory anyway. `in` comes by bulk copies, a part from each warp: one trip, no registers.
#include "common/int4_stream.cuh"

using Tiles = SharedTiles<HIDDEN, INPUTS>;
using ProjectionStream = Stream<INPUTS, Tiles::BLOCK_UNITS>;

extern "C" __global__ void __launch_bounds__(THREADS, 2) ENTRY(const __grid_constant__ Qwen2ProjectionArgs a) {
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
    take_token<INPUTS>(memory + TOKEN_AT, a.in, &shared.token, a.fault, KERNEL, a.layer);
    stream.multiply(shared, memory + TOKEN_AT, a.fault, KERNEL, a.layer);
    __syncthreads();  // every warp's sums are there
    Tiles::store<ProjectionStream>(shared, block, a.scale, a.out, a.fault, KERNEL, a.layer);
}
