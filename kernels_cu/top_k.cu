// The MAX_TOP_K largest logits of each row, sorted, ties by lower id: all that sampling needs of a rank's logits.
//
// PRECOND  grid: (PIECES * BLOCKS, ROWS), cluster: BLOCKS along x, block: THREADS. logits are the predecessor's; *live was
//          written at least two launches ago. The clusters of rows that are not live end at once. A list a row for each
//          of PIECES parts of the vocabulary, 1 where that is not defined. Of several ranks, each pushes its lists into every rank's inbox, and where `mirror` and `status` are
//          given (`fault` then is as well), what its host and its kernels have to say: grid (BLOCKS, ROWS + 1).
// READS    rows * VOCAB * 4 bytes, from L2.  WRITES  rows * MAX_TOP_K * 8 bytes; of several ranks, to each of them.
//
// Why so: a row's cluster spreads the reading over eight multiprocessors and meets in shared memory, which is shorter
// than another launch or another round trip through L2. A vocabulary of more than registers hold is cut into pieces. In a block, the 32nd largest of the threads' maxima is a bound
// that at least 32 logits reach, and only the 32 threads whose maximum reaches it can hold such logits: that leaves 32
// to 32 * PER_THREAD candidates, usually about 40, which are ranked by counting. Values and ids form one integer
// (see make_key), so that all keys differ and every order is the only one.
//
// A NaN or +inf is reported, as the reference refuses it; a NaN is then treated as -inf, so that nothing depends on
// how it compares.
//
// To several ranks, a list goes as a warp's two stores of 128 bytes, a warp for each rank: what crosses to a peer then is
// two packets a row. The status has a cluster of its own, since host memory is two microseconds away, and is asked while
// lm_head runs: what the layers before it have reported ends this very round. One lane asks, so that all ranks are told
// the same, and a lane tells each of them.
#include "abi_loop.cuh"
#include "common/exchange.cuh"
#include "common/fault.cuh"
#include "common/pdl.cuh"
#include "common/sampling.cuh"

#ifndef PIECES
constexpr int PIECES = 1;
#endif
constexpr int BLOCKS = 8;  // of a cluster: the portable limit
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int PART = (VOCAB + PIECES * BLOCKS - 1) / (PIECES * BLOCKS);  // a block's logits
constexpr int PER_THREAD = (PART + THREADS - 1) / THREADS;

static_assert(VOCAB >= (PIECES - 1) * BLOCKS * PART + MAX_TOP_K, "a list has no empty places");
static_assert(RANKS == 1 || PIECES == 1, "a list a rank");
static_assert(BLOCKS * MAX_TOP_K == THREADS, "the first block ranks one candidate a thread");
static_assert(MAX_TOP_K == WARP, "a list is a warp's");
static_assert(RANKS <= WARPS, "a warp pushes to a rank");

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Stores into the first block's shared memory, at the place that `local` has in this block's.
__device__ __forceinline__ void store_first_block(Key* local, Key key) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;"
                 : "=r"(remote)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(local))));
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote), "l"(key) : "memory");
}

// One warp: what this rank says of cancellation, faults, and how far its reader has come.
__device__ __forceinline__ void tell_status(const TopKArgs& a, int lane) {
    const int64_t distance = lane < RANKS ? __ldg(reinterpret_cast<const long long*>(a.peers) + lane) : 0;
    const int rows = live_before(a.live, a.rows);
    int cancel = 0, taken = 0, read = 0, fault = FAULT_NONE;
    if (lane == 0) {
        const volatile Mirror& host = *a.mirror;
        cancel = host.cancel;
        taken = host.taken;
        read = int(host.read);
        fault = *reinterpret_cast<const volatile int*>(&a.fault->what);
    }
    pdl_wait();
    pdl_trigger();
    if (rows <= 0) return;  // accept will not ask either
    const int ended = __shfl_sync(ALL_LANES, (cancel != 0 ? 1 : 0) | (fault != FAULT_NONE ? 2 : 0), 0);
    taken = __shfl_sync(ALL_LANES, taken, 0);
    read = __shfl_sync(ALL_LANES, read, 0) & 0x7fffffff;
    if (lane >= RANKS) return;
    push_to(distance, a.status + STATUS_ENDED, ended);
    push_to(distance, a.status + STATUS_TAKEN, taken);
    push_to(distance, a.status + STATUS_READ, read);
}

extern "C" __global__ void __launch_bounds__(THREADS) top_k(const __grid_constant__ TopKArgs a) {
    __shared__ Key maxima[WARPS][WARP];              // each warp's sorted
    __shared__ Key candidates[WARP * PER_THREAD];
    __shared__ Key lists[BLOCKS][MAX_TOP_K];         // in the first block: what each block found, sorted
    __shared__ Key bound;
    __shared__ int found;
    const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP;
    const int row = blockIdx.y, rank = int(cluster_rank());
    int64_t distance = 0;  // to the inbox that this warp pushes to
    if constexpr (RANKS > 1) {
        if (row == ROWS) {
            if (a.mirror != nullptr && a.status != nullptr && rank == 0 && warp == 0) tell_status(a, lane);
            return;
        }
        if (warp < RANKS) distance = __ldg(reinterpret_cast<const long long*>(a.peers) + warp);
    }

    if (tid == 0) {
        bound = NO_KEY;
        found = 0;
    }
    const int rows = live_before(a.live, a.rows);
    cluster_arrive();  // all blocks of the cluster run, so that the first one's shared memory can be written
    cluster_wait();
    pdl_wait();  // logits
    pdl_trigger();
    if (row >= rows) return;  // the whole cluster

    const int start = int(blockIdx.x) * PART, end = min_int(start + PART, VOCAB);
    const float* logits = a.logits + int64_t(row) * VOCAB;
    float value[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int v = start + i * THREADS + tid;
        value[i] = v < end ? logits[v] : __uint_as_float(0xff800000u);
    }
    Key keys[PER_THREAD], best = NO_KEY;
    bool broken = false;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int v = start + i * THREADS + tid;
        const bool number = value[i] == value[i];
        broken |= !number || value[i] == __uint_as_float(0x7f800000u);
        keys[i] = v < end ? make_key(number ? value[i] : __uint_as_float(0xff800000u), a.first_id + v) : NO_KEY;
        best = max_key(best, keys[i]);
    }
    if (broken) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_TOP_K, a.layer);

    const Key sorted = warp_sort(best, lane);
    maxima[warp][lane] = sorted;
    __syncthreads();  // all maxima
    const int ahead = lane + count_larger<WARPS>(maxima, warp, sorted);
    // Where fewer than 32 threads have a logit, whoever gets here has none: the bound is then NO_KEY, as it was.
    if (ahead == MAX_TOP_K - 1) bound = sorted;
    __syncthreads();  // bound
    if (best >= bound && best != NO_KEY) {
        int mine = 0;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) mine += keys[i] >= bound && keys[i] != NO_KEY ? 1 : 0;
        // Places are taken in any order; ranking by distinct keys makes the result the same.
        int place = atomicAdd(&found, mine);
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            if (keys[i] >= bound && keys[i] != NO_KEY) candidates[place++] = keys[i];
        }
    }
    __syncthreads();  // candidates, found
    const int count = found;
    if (tid >= count && tid < MAX_TOP_K) store_first_block(&lists[rank][tid], NO_KEY);
    for (int base = 0; base < count; base += THREADS / 4) {  // four lanes count for a candidate
        const int index = base + tid / 4;
        const Key key = index < count ? candidates[index] : NO_KEY;
        int larger = 0;
#pragma unroll 4
        for (int j = tid % 4; j < count; j += 4) larger += candidates[j] > key ? 1 : 0;
        larger += __shfl_xor_sync(ALL_LANES, larger, 1);
        larger += __shfl_xor_sync(ALL_LANES, larger, 2);
        if (tid % 4 == 0 && index < count && larger < MAX_TOP_K) store_first_block(&lists[rank][larger], key);
    }
    cluster_arrive();  // release: the first block sees this block's list
    cluster_wait();
    if (rank != 0) return;
    const Key key = lists[warp][lane];
    const int place = lane + count_larger<BLOCKS>(lists, warp, key);
    if constexpr (RANKS > 1) {
        if (place < MAX_TOP_K) candidates[place] = key;  // the block's own were read before the cluster's barrier
        __syncthreads();                                 // the list is there
        if (warp >= RANKS) return;
        const Key mine = candidates[lane];
        push_to(distance, a.values + row * RANKS * MAX_TOP_K + lane, key_value(mine));
        push_to(distance, a.ids + row * RANKS * MAX_TOP_K + lane, key_id(mine));
    } else if (place < MAX_TOP_K) {
        const int list = row * PIECES + int(blockIdx.x) / BLOCKS;
        a.values[list * MAX_TOP_K + place] = key_value(key);
        a.ids[list * MAX_TOP_K + place] = key_id(key);
    }
}
