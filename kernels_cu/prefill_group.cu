// Prompt processing: lists the (row, choice) pairs by expert, then by row, and cuts each expert's list into tiles.
//
// PRECOND  grid (EXPERTS), block 256. The choices are a predecessor's; a row chooses an expert at most once.
//          In a dense layer (no choices) EXPERTS = TOP_K = its groups.
// Each block counts all choices itself (64 KB from L2 for a whole chunk), so that no block waits for another. Counts are
// integers, so the order of atomics does not show, and the lists have one order.
// Reads EXPERTS * rows * TOP_K * 8 bytes from L2; writes rows * TOP_K * 4 and 16 a tile.
#include "abi_prefill.cuh"
#include "common/fault.cuh"
#include "common/pdl.cuh"

constexpr int GROUP_THREADS = 256;
constexpr int TILE_TOKENS = 64;  // prefill_moe.cu's

extern "C" __global__ void __launch_bounds__(GROUP_THREADS) prefill_group(const __grid_constant__ PrefillGroupArgs a) {
    __shared__ int counts[EXPERTS];
    __shared__ int totals[3];  // pairs and tiles before this block's expert; all tiles
    __shared__ int warp_counts[GROUP_THREADS / WARP];
    const int expert = int(blockIdx.x), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int i = int(threadIdx.x); i < EXPERTS; i += GROUP_THREADS) counts[i] = 0;
    if (threadIdx.x < 3) totals[threadIdx.x] = 0;
    __syncthreads();  // the counters are clear
    pdl_wait();
    pdl_trigger();
    if (a.expert_ids == nullptr) {
        for (int i = int(threadIdx.x); i < EXPERTS; i += GROUP_THREADS) counts[i] = a.rows;
    } else {
        for (int i = int(threadIdx.x); i < a.rows * TOP_K; i += GROUP_THREADS) atomicAdd(&counts[a.expert_ids[i]], 1);
    }
    __syncthreads();  // every choice is counted
    for (int i = int(threadIdx.x); i < EXPERTS; i += GROUP_THREADS) {
        const int tiles = div_up(counts[i], TILE_TOKENS);
        if (i < expert) atomicAdd(&totals[0], counts[i]), atomicAdd(&totals[1], tiles);
        atomicAdd(&totals[2], tiles);
    }
    __syncthreads();  // and so are the tiles
    const int first = totals[0], count = counts[expert];
    for (int i = int(threadIdx.x); i < div_up(count, TILE_TOKENS); i += GROUP_THREADS) {
        PrefillTile tile;
        tile.expert = expert;
        tile.first = first + i * TILE_TOKENS;
        tile.count = min_int(TILE_TOKENS, count - i * TILE_TOKENS);
        tile.reserved = 0;
        a.tiles[totals[1] + i] = tile;
    }
    if (expert == 0 && threadIdx.x == 0) *a.tile_count = totals[2];

    // The expert's pairs in order of rows: a row chooses an expert at most once.
    int placed = first;
    for (int base = 0; base < a.rows; base += GROUP_THREADS) {
        const int row = base + int(threadIdx.x);
        int choice = -1;
        if (row < a.rows) {
            if (a.expert_ids == nullptr) {
                choice = expert;
            } else {
#pragma unroll
                for (int k = 0; k < TOP_K; ++k)
                    if (a.expert_ids[row * TOP_K + k] == expert) choice = k;
            }
        }
        const unsigned chosen = __ballot_sync(0xffffffffu, choice >= 0);
        if (lane == 0) warp_counts[warp] = __popc(chosen);
        __syncthreads();  // every warp's number is there
        int before = 0, all = 0;
#pragma unroll
        for (int w = 0; w < GROUP_THREADS / WARP; ++w) {
            before += w < warp ? warp_counts[w] : 0;
            all += warp_counts[w];
        }
        if (choice >= 0) a.pairs[placed + before + __popc(chosen & ((1u << lane) - 1))] = row * TOP_K + choice;
        placed += all;
        __syncthreads();  // and read, before the next 256 rows' numbers take their place
    }
}
