// Logits of an INT4 matrix of a Qwen2 model.
//
// PRECOND  grid WholeTiles::TAKERS, block 32 WARPS. weights 16-byte aligned units (abi_qwen2.cuh), never written: the
//          prologue reads them alone. normed [padded(HIDDEN)] 16-byte aligned, the predecessor's.
// READS    VOCAB * padded(HIDDEN) / 2 bytes of codes and a 32nd of that of scales, once; 2 padded(HIDDEN) of normed in
//          each block, from L2.
// WRITES   4 VOCAB bytes.
//
// Why so: the token's longest stream. Blocks have whole tiles, so that a logit is written once.
#include "common/int4_stream.cuh"

constexpr int TILES = (VOCAB + TILE_ROWS - 1) / TILE_ROWS;
using Tiles = WholeTiles<TILES, padded(HIDDEN) / GROUP_SIZE>;
using HeadStream = Stream<HIDDEN, Tiles::BLOCK_TILES * (padded(HIDDEN) / GROUP_SIZE)>;

extern "C" __global__ void __launch_bounds__(THREADS, 1) qwen2_lm_head(const __grid_constant__ Qwen2HeadArgs a) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ HeadStream::Shared shared;
    if (TRIGGER == AT_ONCE) pdl_trigger();
    const Run tiles = Tiles::tiles();
    const HeadStream stream(shared, memory, a.weights, Tiles::units(tiles));
    if (threadIdx.x == 0) {
        barrier_init(&shared.token, WARPS);
        barrier_init_fence();
    }
    __syncthreads();  // the token's barrier exists for all
    pdl_wait();       // normed
    if (TRIGGER == AFTER_WAIT) pdl_trigger();
    take_token<HIDDEN>(memory + TOKEN_AT, a.normed, &shared.token, a.fault, KERNEL_LM_HEAD, a.layer);
    stream.multiply(shared, memory + TOKEN_AT, a.fault, KERNEL_LM_HEAD, a.layer);
    __syncthreads();  // every warp's sums are there
    for (int i = threadIdx.x; i < tiles.units * TILE_ROWS; i += THREADS) {
        const int tile = tiles.first + i / TILE_ROWS, row = i % TILE_ROWS;
        const float logit = HeadStream::sum(shared, tile, row);
        if (!is_finite(logit)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_LM_HEAD, a.layer);
        if (tile * TILE_ROWS + row < VOCAB) a.logits[tile * TILE_ROWS + row] = logit;
    }
}
