// The MLP's first half: x = residual + pieces of o_proj, its norm, gate and up, and INNER_SCALE * silu(gate) * up.
//
// PRECOND  grid WholeTiles::TAKERS, block 32 WARPS. weights 16-byte aligned units, a tile 8 rows of gate and the same 8 of
//          up, padded(INNER) / 8 tiles; residual, pieces, norm and residual_out 16-byte aligned. residual, and pieces, are
//          the predecessor's or older; weights and norm are never written. The prologue reads these two alone.
// READS    2 padded(INNER) rows of padded(HIDDEN) / 2 bytes of codes and a 32nd of that of scales, once; in each block
//          4 HIDDEN bytes of the residual and of each piece, from L2.
// WRITES   2 padded(INNER) bytes of inner, zeros beyond INNER; 4 HIDDEN of x.
//
// Why so: more than half of a layer's bytes, so what counts is that memory never idles: the rings are full when the token
// comes in, each warp refills its own, and blocks have whole tiles, so that silu needs no other launch.
#include "common/int4_stream.cuh"
#include "common/qwen2_entry.cuh"

constexpr int TILE_COLUMNS = TILE_ROWS / 2;
constexpr int TILES = padded(INNER) / TILE_COLUMNS;
using Tiles = WholeTiles<TILES, padded(HIDDEN) / GROUP_SIZE>;
using GateUpStream = Stream<HIDDEN, Tiles::BLOCK_TILES * (padded(HIDDEN) / GROUP_SIZE)>;

extern "C" __global__ void __launch_bounds__(THREADS, 2) qwen2_gate_up(const __grid_constant__ Qwen2GateUpArgs a) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ GateUpStream::Shared shared;
    __shared__ float scratch[WARPS];
    if (TRIGGER == AT_ONCE) pdl_trigger();
    const Run tiles = Tiles::tiles();
    const GateUpStream stream(shared, memory, a.weights, Tiles::units(tiles));
    const Entry<Q_HEADS * HEAD_SIZE, O_PIECES> entry(a.norm);
    pdl_wait();  // residual and pieces
    if (TRIGGER == AFTER_WAIT) pdl_trigger();
    entry.enter(a.residual, a.pieces, a.residual_out, memory + TOKEN_AT, scratch);
    stream.multiply(shared, memory + TOKEN_AT, a.fault, KERNEL_GATE_UP, a.layer);
    __syncthreads();  // every warp's sums are there
    for (int i = threadIdx.x; i < tiles.units * TILE_COLUMNS; i += THREADS) {
        const int tile = tiles.first + i / TILE_COLUMNS, column = i % TILE_COLUMNS;
        const float gate = GateUpStream::sum(shared, tile, column);
        const float up = GateUpStream::sum(shared, tile, column + TILE_COLUMNS);
        const f16 value = float_to_f16(silu(gate) * up * INNER_SCALE);
        if ((value & 0x7c00) == 0x7c00) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_GATE_UP, a.layer);
        a.inner[tile * TILE_COLUMNS + column] = value;
    }
}
