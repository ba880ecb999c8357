// The KV cache: how it lies in memory, and which part of it a pass reads.
#pragma once
#include "common/types.cuh"

// Halves from the start of a KV head's cache to (slot, dim). A slot's row is 16 pieces of 16 bytes; piece c of row r
// lies at c ^ (r % 8), so that a tile copied as it is into shared memory is read by ldmatrix without bank conflicts.
__device__ __forceinline__ int64_t kv_offset(int slot, int dim) {
    return int64_t(slot) * HEAD_DIM + (((dim >> 3) ^ (slot & 7)) << 3) + (dim & 7);
}

// The tiles of 64 positions that the live rows see, and how they are shared among splits. It depends on positions
// only, never on the cache's capacity. A tile is one of positions; in a ring it lies in slot tile `tile % (slots / 64)`.
struct Extent {
    int first;      // first tile of positions
    int tiles;      // tiles from there on
    int per_split;  // tiles of a split: split s has [first + s * per_split, ...)
    int active;     // splits that have any
};

// low, high: the lowest and the highest position of the live rows. TILE: positions of what is counted as a tile.
template <int TILE = KV_TILE>
__device__ __forceinline__ Extent kv_extent(int low, int high, int window, int splits) {
    Extent extent;
    const int oldest = window > 0 ? max_int(0, low - window + 1) : 0;
    extent.first = oldest / TILE;
    extent.tiles = high / TILE + 1 - extent.first;
    extent.per_split = div_up(extent.tiles, splits);
    extent.active = div_up(extent.tiles, extent.per_split);
    return extent;
}

// The positions that the live rows see, in units of 16, and a split's even share of them: a share is at most one unit
// larger than another. As above, it depends on positions only.
constexpr int SPLIT_UNIT = 16;
struct Split {
    int first;   // its first unit of positions
    int units;   // from there on; none in splits from `active` on
    int active;  // splits that have any
};

__device__ __forceinline__ Split kv_split(int low, int high, int window, int splits, int split) {
    const int oldest = (window > 0 ? max_int(0, low - window + 1) : 0) / SPLIT_UNIT;
    const int units = high / SPLIT_UNIT + 1 - oldest, each = units / splits, more = units % splits;
    return {oldest + split * each + min_int(split, more), each + (split < more), min_int(units, splits)};
}

// What a warp knows of a pass: lane i holds row i's position (a copy of the last one's beyond `rows`).
struct Pass {
    int rows;      // live rows; 0 ends the launch, and then the rest means nothing
    int position;
    int low;
    int high;
    int written;   // rows whose keys and values the predecessor writes: those and, in the draft's depth 0, older ones
    int fresh;     // lane i: the position of written row i
    int fresh_low;
    int fresh_high;
};

// Called by whole warps. One trip to memory: the positions of dead rows are loaded too, and left out afterwards.
__device__ __forceinline__ Pass read_pass(const int* live, const int* positions, int rows, int written) {
    const int lane = threadIdx.x % WARP;
    Pass pass;
    const int mine = positions[min_int(lane, written - 1)];
    const int count = live != nullptr ? *live : written;
    pass.rows = min_int(rows, count);
    pass.written = min_int(written, count);
    pass.position = __shfl_sync(0xffffffffu, mine, min_int(lane, max_int(pass.rows - 1, 0)));
    pass.low = __reduce_min_sync(0xffffffffu, pass.position);
    pass.high = __reduce_max_sync(0xffffffffu, pass.position);
    pass.fresh = __shfl_sync(0xffffffffu, mine, min_int(lane, max_int(pass.written - 1, 0)));
    pass.fresh_low = __reduce_min_sync(0xffffffffu, pass.fresh);
    pass.fresh_high = __reduce_max_sync(0xffffffffu, pass.fresh);
    return pass;
}
