// q, k and v of a Qwen2 layer, before bias and RoPE: x = residual + pieces of down, its norm, and the product, as pieces.
//
// PRECOND  grid Pieces::TAKERS, block 32 WARPS. weights 16-byte aligned units (abi_qwen2.cuh); residual, pieces, norm and
//          residual_out 16-byte aligned. residual, and pieces, are the predecessor's or older; weights and norm are never
//          written. The prologue reads these two alone, so it may run however early.
// READS    QKV rows * padded(HIDDEN) / 2 bytes of codes and a 32nd of that of scales, once; in each block 4 HIDDEN bytes
//          of the residual and of each piece, from L2.
// WRITES   4 bytes a row and piece; 4 HIDDEN of x.
//
// Why so: the block's whole share fits into its rings (common/int4_stream.cuh) and is on its way while down still
// streams; what is left after the wait is latency: one trip to L2, a sum over the block, the products.
#include "common/int4_stream.cuh"
#include "common/qwen2_entry.cuh"

constexpr int ROWS_OUT = (Q_HEADS + 2 * KV_HEADS) * HEAD_SIZE;
using Tiles = SharedTiles<ROWS_OUT, HIDDEN>;
using QkvStream = Stream<HIDDEN, Tiles::BLOCK_UNITS>;

extern "C" __global__ void __launch_bounds__(THREADS, 2) qwen2_qkv(const __grid_constant__ Qwen2QkvArgs a) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ QkvStream::Shared shared;
    __shared__ float scratch[WARPS];
    if (TRIGGER == AT_ONCE) pdl_trigger();
    const Run block = Tiles::run();
    const QkvStream stream(shared, memory, a.weights, block);
    const Entry<INNER, DOWN_PIECES> entry(a.norm);
    pdl_wait();  // residual and pieces
    if (TRIGGER == AFTER_WAIT) pdl_trigger();
    entry.enter(a.residual, a.pieces, a.residual_out, memory + TOKEN_AT, scratch);
    stream.multiply(shared, memory + TOKEN_AT, a.fault, KERNEL_QKV, a.layer);
    __syncthreads();  // every warp's sums are there
    Tiles::store<QkvStream>(shared, block, 1.0f, a.out, a.fault, KERNEL_QKV, a.layer);
}
