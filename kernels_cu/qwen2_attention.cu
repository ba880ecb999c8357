// Decode attention of a Qwen2 layer over its paged KV cache: one token, all query heads of a KV head at once, so that
// every key and value is read once.
//     q, k, v = sums of the projection's pieces + bias, q and k turned by RoPE; k and v go to the page of the position as
//     halves; o = sum_j 2^(s_j - M) v_j / sum_j 2^(s_j - M) over positions j up to this one,
//     s = log2(e) q.k / sqrt(HEAD_SIZE).
//
// PRECOND  short form: grid (CLUSTER, KV_HEADS), cluster CLUSTER; long form: grid (splits, KV_HEADS), then combine. Block
//          THREADS, SMEM bytes of dynamic shared memory. pieces, bias, pages 16-byte aligned. pieces and this position's
//          entry of page_table may be the predecessors'; positions, entries of older positions and their K and V were
//          written by older graphs.
// READS    KV_HEADS * HEAD_SIZE * 4 bytes a position; pieces and biases in each block (from L2).
// WRITES   K and V of the position; short form: attended; long form: partials, as abi_qwen2.cuh has them.
//
// Why so: pages are shared out evenly among a head's blocks, from the newest down, and come by bulk copies, one of keys and
// one of values, whose rows are swizzled for ldmatrix (page_piece; a copy for each row took the copying warp 58 cycles).
// The first STAGES pages of a block (EARLY_PAGES in the long form, where the pieces would wait behind more) are on their
// way before the predecessor ends. Only rows of older positions are copied of the tail page, which the last block has first
// of all; the token's own key and value are put behind them, and zeros behind those, so nothing is read that no one has
// written. A stage's pages are all of one warp: pages arrive in any order and a warp may be several ahead of another, which
// would else take an mbarrier's last phase for its next one.
// How a warp attends to a page: common/qwen2_attend.cuh. Warps meet once, at the end.
// Then blocks of a cluster send each other their sums, each those of the dimensions that the receiver finishes, by st.async:
// one trip instead of partials in memory and another launch. Three launches are to share a multiprocessor, which is what
// bounds registers and stages. What was measured: tools/decisions/018-qwen2-attention.md.
#include "common/cluster.cuh"
#include "common/pdl.cuh"
#include "common/pieces.cuh"
#include "common/qwen2_attend.cuh"
#include "common/reduce.cuh"

constexpr int CONSUMERS = WARPS * WARP;  // threads; a warp more copies
constexpr int THREADS = CONSUMERS + WARP;
constexpr int PART_ITEMS = ITEMS / CLUSTER; // that a block of a cluster finishes
constexpr int PART_DIMS = HEAD_SIZE / CLUSTER;
constexpr int INPUTS = (GROUP + 2) * HEAD_THREADS;
constexpr int INPUT_ROUNDS = (INPUTS + THREADS - 1) / THREADS;
constexpr int Q_WIDTH = Q_HEADS * HEAD_SIZE;
constexpr int QKV_ROWS = Q_WIDTH + 2 * KV_HEADS * HEAD_SIZE;
constexpr int PADDED_Q = (Q_WIDTH + 127) / 128 * 128;
using QkvPieces = Pieces<QKV_ROWS, HIDDEN, GEMV_BLOCKS>;

static_assert(STAGES % WARPS == 0, "a stage is of one warp, whose sums lie in its last page's in the end");
static_assert(PAGE_BYTES >= ITEMS * 16, "which has room for them");
static_assert(ITEMS % CLUSTER == 0 && PART_ITEMS % 8 == 0, "a block finishes whole dimensions");
static_assert(CLUSTER * STATISTICS <= THREADS, "a thread sends one");

struct Stage {
    uint8_t k[PAGE_BYTES];
    uint8_t v[PAGE_BYTES];
};
struct Barriers {
    uint64_t k_full, v_full, empty, reserved;
};
struct Shared {
    Stage stages[STAGES];  // at a multiple of ROW_BYTES
    Barriers barriers[STAGES];
    QueryStep q[STEPS];
    float4 parts[CLUSTER][PART_ITEMS];       // each block's sums of this block's dimensions
    float4 statistics[CLUSTER][STATISTICS];  // each block's
    float4 own[WARPS][STATISTICS];           // each warp's
    uint64_t received;
};
static_assert(sizeof(Shared) <= SMEM, "the host reserves less than this needs");

// The block's pages: `first` and those before it, count in all; page i of them is that of positions 16 (first - i) onwards.
struct Share {
    int first;
    int count;
    int own;   // the row of this token in page 0 of the last block, else PAGE
};

__device__ __forceinline__ Share share_of(int position, int split, int splits) {
    const int pages = position / PAGE + 1;
    const int begin = split * pages / splits, end = (split + 1) * pages / splits;  // no overflow below 200 M positions
    return {end - 1, end - begin, split == splits - 1 ? position % PAGE : PAGE};
}

// A warp that copies pages of the share.
struct Producer {
    const Qwen2AttentionArgs& a;
    Shared& shared;
    const Share share;
    int known;  // lane's entry of page_table, of the 32 pages from known_from on
    int known_from;

    __device__ __forceinline__ void load(int i) {
        if (i >= known_from + WARP) {
            known_from += WARP;
            known = entry(known_from + int(threadIdx.x % WARP));
        }
        // A page that embedding found none for: its report ends the request; nothing outside the pages may be touched.
        const int page = max_int(0, __shfl_sync(0xffffffffu, known, i - known_from));
        if (threadIdx.x % WARP > 0) return;
        const int bytes = (i == 0 ? share.own : PAGE) * ROW_BYTES;
        const int64_t from = (int64_t(page) * KV_HEADS + blockIdx.y) * (PAGE * HEAD_SIZE);
        Stage& stage = shared.stages[i % STAGES];
        Barriers& barriers = shared.barriers[i % STAGES];
        barrier_expect(&barriers.k_full, bytes);
        barrier_expect(&barriers.v_full, bytes);
        if (bytes > 0) {
            bulk_load(stage.k, a.k_pages + from, bytes, &barriers.k_full);
            bulk_load(stage.v, a.v_pages + from, bytes, &barriers.v_full);
        }
    }
    __device__ __forceinline__ int entry(int i) const {
        // The newest page may be one that this graph's embedding takes; no row of it is copied then.
        return i < share.count ? __ldcg(a.page_table + share.first - i) : 0;
    }
};

// A thread's part of q, k or v.
struct Input {
    int head;  // of the KV head's queries, then k, then v; GROUP + 2 for none
    const float* from;  // its first piece
    int pieces[2];      // of the four dimensions there, and of those half a head on
    uint2 bias[2];
    float4 x[2];
};

// Before the predecessor ends: which part, and its bias.
__device__ __forceinline__ Input input_of(const Qwen2AttentionArgs& a, int round, bool tail) {
    Input in;
    const int item = round * THREADS + int(threadIdx.x), head = item / HEAD_THREADS, kv_head = blockIdx.y;
    in.head = head < GROUP + (tail ? 2 : 0) ? head : GROUP + 2;
    const int row =
        (head < GROUP ? kv_head * GROUP + head : Q_HEADS + (head == GROUP ? 0 : KV_HEADS) + kv_head) * HEAD_SIZE +
        item % HEAD_THREADS * 4;
    in.from = a.pieces + row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool some = in.head < GROUP + 2;
        in.pieces[half] = some ? QkvPieces::of_row(row + half * (HEAD_SIZE / 2)) : 0;
        in.bias[half] =
            some ? __ldg(reinterpret_cast<const uint2*>(a.bias + row + half * (HEAD_SIZE / 2))) : make_uint2(0u, 0u);
    }
    return in;
}

// All rounds' pieces together, in one trip.
__device__ __forceinline__ void load_inputs(Input (&in)[INPUT_ROUNDS]) {
    float4 piece[INPUT_ROUNDS][2][QKV_PIECES];
#pragma unroll
    for (int r = 0; r < INPUT_ROUNDS; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4* const from = reinterpret_cast<const float4*>(in[r].from + half * (HEAD_SIZE / 2));
#pragma unroll
            for (int p = 0; p < QKV_PIECES; ++p)
                piece[r][half][p] = p < in[r].pieces[half] ? __ldcg(from + p * (QKV_ROWS / 4)) : make_float4(0, 0, 0, 0);
        }
    }
#pragma unroll
    for (int r = 0; r < INPUT_ROUNDS; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            in[r].x[half] = piece[r][half][0];
#pragma unroll
            for (int p = 1; p < QKV_PIECES; ++p) in[r].x[half] = plus(in[r].x[half], piece[r][half][p]);
            in[r].x[half] = plus(in[r].x[half], unpacked(in[r].bias[half]));
        }
    }
}

__device__ __forceinline__ void attend(const Qwen2AttentionArgs& a, Shared& shared, const Share& share, Softmax& softmax) {
    const int warp = threadIdx.x / WARP;
    const uint32_t line = Softmax::line(shared_address(shared.stages));
    softmax.begin();
    int slot = warp;
    uint32_t parity = 0;
    for (int i = warp; i < share.count; i += WARPS) {
        const uint32_t page = line + slot * sizeof(Stage);
        Barriers& barriers = shared.barriers[slot];
        barrier_wait(&barriers.k_full, parity, a.fault, KERNEL_ATTENTION, a.layer);
        const Softmax::Page seen = softmax.keys(page, shared.q, i == 0 && share.own < PAGE, share.own);
        barrier_wait(&barriers.v_full, parity, a.fault, KERNEL_ATTENTION, a.layer);
        softmax.values(page, seen);
        if (i + STAGES < share.count) {  // every lane: the page may be overwritten
            reads_before_copies();
            barrier_arrive(&barriers.empty);
        }
        slot += WARPS;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
    softmax.end();
}

// Where a warp leaves its sums: the stage of its last page, which no copy follows into, or one that had no page.
__device__ __forceinline__ int sums_stage(const Share& share, int warp) {
    return (share.count > warp ? warp + (share.count - 1 - warp) / WARPS * WARPS : warp) % STAGES;
}

// The consumers' sums as one, by all threads: `use(item, sums)` gets each item's; returned are the block's statistics of
// queries 2 (i % 4) and one on to thread i.
template <typename Use>
__device__ __forceinline__ float4 join_warps(Shared& shared, const Share& share, const Softmax& softmax, Use use) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, t = lane % 4;
    if (threadIdx.x < CONSUMERS) {
        __syncwarp();  // all lanes have read the page that lay there
        float4* const mine = reinterpret_cast<float4*>(shared.stages[sums_stage(share, warp)].k);
#pragma unroll
        for (int j = 0; j < STEPS; ++j) mine[j * WARP + lane] = softmax.out[j];
        if (lane < STATISTICS) {
            shared.own[warp][t] = make_float4(softmax.top[0], softmax.sum[0], softmax.top[1], softmax.sum[1]);
        }
    }
    __syncthreads();  // all warps' sums are there
    float4 statistics[WARPS];
    float2 weight[WARPS];
    const float4* sums[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        statistics[w] = shared.own[w][t];
        sums[w] = reinterpret_cast<const float4*>(shared.stages[sums_stage(share, w)].k) + threadIdx.x;
    }
    const float4 all = joined(statistics, weight);
#pragma unroll
    for (int first = 0; first < ITEMS; first += THREADS) {
        if (first + int(threadIdx.x) >= ITEMS) break;
        float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) o = weighted(o, sums[w][first], weight[w]);
        use(first + int(threadIdx.x), o);
    }
    return all;
}

// Everything up to the warps' sums. SHORT: in a cluster. EARLY: pages that are copied before the predecessor ends.
template <bool SHORT, int EARLY>
__device__ __forceinline__ void compute(const Qwen2AttentionArgs& a, Shared& shared, Share& share, Softmax& softmax) {
    const int lane = threadIdx.x % WARP;
    const bool copies = threadIdx.x >= CONSUMERS;
    if (threadIdx.x == CONSUMERS) {
        for (Barriers& barriers : shared.barriers) {
            barrier_init(&barriers.k_full, 1);
            barrier_init(&barriers.v_full, 1);
            barrier_init(&barriers.empty, WARP);
        }
        if constexpr (SHORT) {
            barrier_init(&shared.received, 1);
            barrier_expect(&shared.received, sizeof(shared.parts) + sizeof(shared.statistics));
        }
        barrier_init_fence();
    }
    __syncwarp();
    // The other blocks may send once `received` is there; each block waits for that at the end of its prologue. Relaxed,
    // since the fence above releases what counts: a release would wait for every load under way.
    if constexpr (SHORT) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

    const int position = __ldcg(a.positions);
    share = share_of(position, blockIdx.x, gridDim.x);
    const bool tail = share.own < PAGE;
    Producer producer{a, shared, share, 0, 0};
    if (copies) {
        producer.known = producer.entry(lane);
        for (int i = 0; i < min_int(EARLY, share.count); ++i) producer.load(i);
    }
    Input in[INPUT_ROUNDS];
#pragma unroll
    for (int r = 0; r < INPUT_ROUNDS; ++r) in[r] = input_of(a, r, tail);
    float cosines[4], sines[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const double frequency = __ldg(a.inverse_frequencies + threadIdx.x % HEAD_THREADS * 4 + i);
        sincospif(2.0f * turns_of(position, frequency), &sines[i], &cosines[i]);
    }
    for (int i = threadIdx.x; i < STEPS * WARP; i += THREADS) {  // columns of no query
        if (i % WARP / 4 >= GROUP) shared.q[i / WARP][i % WARP] = make_uint4(0u, 0u, 0u, 0u);
    }
    if (tail) {  // values of no token: their probability is 0, and times that they must be 0
        for (int at = (share.own + 1) * ROW_BYTES + int(threadIdx.x) * 16; at < PAGE_BYTES; at += THREADS * 16)
            *reinterpret_cast<uint4*>(shared.stages[0].v + at) = make_uint4(0u, 0u, 0u, 0u);
    }
    if constexpr (SHORT) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks can receive
    pdl_wait();
    pdl_trigger();

    const int page = tail ? __ldcg(a.page_table + share.first) : 0;  // -1: embedding has reported that none was free
    load_inputs(in);
    const int dim = threadIdx.x % HEAD_THREADS * 4;
    const float4 cosine = make_float4(cosines[0], cosines[1], cosines[2], cosines[3]);
    const float4 sine = make_float4(sines[0], sines[1], sines[2], sines[3]);
#pragma unroll
    for (int r = 0; r < INPUT_ROUNDS; ++r) {
        if (in[r].head <= GROUP) turn(in[r].x, cosine, sine);
        if (in[r].head < GROUP) {
            store_query(shared.q, in[r].head, dim, in[r].x[0]);
            store_query(shared.q, in[r].head, dim + HEAD_SIZE / 2, in[r].x[1]);
        } else if (in[r].head < GROUP + 2) {
            const bool value = in[r].head > GROUP;
            f16* const cached =
                (value ? a.v_pages : a.k_pages) + (int64_t(page) * KV_HEADS + blockIdx.y) * (PAGE * HEAD_SIZE);
            uint8_t* const stage = value ? shared.stages[0].v : shared.stages[0].k;
            store_row(stage, page < 0 ? nullptr : cached, share.own, dim, in[r].x[0]);
            store_row(stage, page < 0 ? nullptr : cached, share.own, dim + HEAD_SIZE / 2, in[r].x[1]);
        }
    }
    __syncthreads();  // queries, and this token's key and value, are there; mbarriers, too
    if (copies) {
        for (int i = min_int(EARLY, share.count); i < share.count; ++i) {
            // Not before the stage's page has been read.
            if (i >= STAGES)
                barrier_wait(&shared.barriers[i % STAGES].empty, (i / STAGES - 1) & 1, a.fault, KERNEL_ATTENTION, a.layer);
            producer.load(i);
        }
    } else {
        attend(a, shared, share, softmax);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    qwen2_attention_short(const __grid_constant__ Qwen2AttentionArgs a) {
    extern __shared__ __align__(256) uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    Share share;
    Softmax softmax;
    const int rank = blockIdx.x;
    compute<true, STAGES>(a, shared, share, softmax);
    const float4 all = join_warps(shared, share, softmax, [&](int item, float4 o) {
        cluster_send(&shared.parts[rank][item % PART_ITEMS], &shared.received, item / PART_ITEMS, o);
    });
    if (threadIdx.x < CLUSTER * STATISTICS) {
        cluster_send(&shared.statistics[rank][threadIdx.x % STATISTICS], &shared.received, threadIdx.x / STATISTICS, all);
    }
    // Every block sends to every block, also one without pages: what a receiver waits for depends on nothing.
    cluster_receive(&shared.received, a.fault, KERNEL_ATTENTION, a.layer);
    bool finite = true;
#pragma unroll
    for (int first = 0; first < GROUP * PART_DIMS; first += THREADS) {
        constexpr int LINES = PART_ITEMS / 4;  // lanes' rows g in the block's items, of two dimensions each
        const int i = first + int(threadIdx.x), query = i / PART_DIMS, line = i % LINES, half = i % PART_DIMS / LINES;
        if (i >= GROUP * PART_DIMS) break;
        const float2* const statistics = reinterpret_cast<const float2*>(shared.statistics[0]) + query;
        const float* const parts = &shared.parts[0][line * 4 + query / 2].x + half * 2 + query % 2;
        float2 found[CLUSTER];
        float part[CLUSTER], top = none();
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            found[block] = statistics[block * QUERIES];
            part[block] = parts[block * PART_ITEMS * 4];
            top = fmaxf(top, found[block].x);
        }
        float o = 0.0f, sum = 0.0f;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            const float weight = exp2_fast(found[block].x - top);
            sum = fmaf(weight, found[block].y, sum);
            o = fmaf(weight, part[block], o);
        }
        o /= sum;
        finite = finite && is_finite(o);
        const int lines = rank * LINES + line, dim = lines / 8 * 16 + lines % 8 + half * 8;
        a.attended[(blockIdx.y * GROUP + query) * HEAD_SIZE + dim] = float_to_f16(o);
    }
    if (PADDED_Q > Q_WIDTH && blockIdx.x == 0 && blockIdx.y == 0) {
        for (int i = Q_WIDTH + int(threadIdx.x); i < PADDED_Q; i += THREADS) a.attended[i] = 0;
    }
    if (!finite) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTENTION, a.layer);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    qwen2_attention(const __grid_constant__ Qwen2AttentionArgs a) {
    extern __shared__ __align__(256) uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    Share share;
    Softmax softmax;
    compute<false, EARLY_PAGES>(a, shared, share, softmax);
    const int64_t place = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
    const float4 all = join_warps(shared, share, softmax, [&](int item, float4 o) {
        const int query = item % 4 * 2, dim = item / WARP * 16 + item % WARP / 4;
        float* const to = a.partial_out + (place * GROUP + query) * HEAD_SIZE + dim;
        if (query < GROUP) to[0] = o.x, to[8] = o.z;
        if (query + 1 < GROUP) to[HEAD_SIZE] = o.y, to[HEAD_SIZE + 8] = o.w;
    });
    if (threadIdx.x < STATISTICS) {
        const int query = threadIdx.x * 2;
        const int64_t to = (int64_t(blockIdx.y) * GROUP + query) * gridDim.x + blockIdx.x;
        if (query < GROUP) a.partial_max[to] = all.x, a.partial_sum[to] = all.y;
        if (query + 1 < GROUP) a.partial_max[to + gridDim.x] = all.z, a.partial_sum[to + gridDim.x] = all.w;
    }
}

// attended of the long form's partials, and zeros beyond.
//
// PRECOND  grid (Q_HEADS, HEAD_SIZE / 32), block 256; a.splits <= SPLITS; partials are the predecessor's.
// Reads HEAD_SIZE * 4 + 8 bytes a split and query head, statistics once more a block of 32 dimensions; writes attended.
// Latency is all: eight lanes have four dimensions each of a split, a warp four splits at a time; all loads of a thread are
// under way together, and every warp finds the weights for itself.
constexpr int COMBINE_THREADS = 256;
constexpr int COMBINE_OWN = (SPLITS + WARP - 1) / WARP;  // splits of a thread, and splits whose statistics it holds

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 2) qwen2_combine(const __grid_constant__ Qwen2CombineArgs a) {
    __shared__ float4 parts[COMBINE_THREADS / WARP][8];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int head = blockIdx.x, first_dim = blockIdx.y * WARP, split = threadIdx.x / 8;
    const float* const out = a.partial_out +
                             ((int64_t(head / GROUP) * a.splits + split) * GROUP + head % GROUP) * HEAD_SIZE + first_dim +
                             threadIdx.x % 8 * 4;
    const int64_t statistics = int64_t(head) * a.splits + lane;
    pdl_wait();
    pdl_trigger();
    float4 x[COMBINE_OWN];
    float top[COMBINE_OWN], sum[COMBINE_OWN];
#pragma unroll
    for (int i = 0; i < COMBINE_OWN; ++i) {
        x[i] = split + i * WARP < a.splits
                   ? __ldcg(reinterpret_cast<const float4*>(out + int64_t(i) * WARP * GROUP * HEAD_SIZE))
                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < COMBINE_OWN; ++i) {
        const bool there = lane + i * WARP < a.splits;
        top[i] = there ? __ldcg(a.partial_max + statistics + i * WARP) : none();
        sum[i] = there ? __ldcg(a.partial_sum + statistics + i * WARP) : 0.0f;
    }
    float peak = top[0];
#pragma unroll
    for (int i = 1; i < COMBINE_OWN; ++i) peak = fmaxf(peak, top[i]);
    peak = warp_max(peak);  // a number: the newest page has a visible key
    float weight[COMBINE_OWN], total = 0.0f;
#pragma unroll
    for (int i = 0; i < COMBINE_OWN; ++i) {
        weight[i] = exp2_fast(top[i] - peak);
        total = fmaf(weight[i], sum[i], total);
    }
    total = warp_sum(total);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < COMBINE_OWN; ++i) {
        const float w = __shfl_sync(0xffffffffu, weight[i], split);
        o = weighted(o, x[i], make_float2(w, w));
    }
#pragma unroll
    for (int offset = 8; offset < WARP; offset *= 2) {
        o.x += __shfl_xor_sync(0xffffffffu, o.x, offset);
        o.y += __shfl_xor_sync(0xffffffffu, o.y, offset);
        o.z += __shfl_xor_sync(0xffffffffu, o.z, offset);
        o.w += __shfl_xor_sync(0xffffffffu, o.w, offset);
    }
    if (lane < 8) parts[warp][lane] = o;
    __syncthreads();  // every warp's splits are there
    if (PADDED_Q > Q_WIDTH && warp == 1 && blockIdx.x == 0 && blockIdx.y == 0) {
        for (int i = Q_WIDTH + lane; i < PADDED_Q; i += WARP) a.attended[i] = 0;
    }
    if (warp > 0) return;
    const float* const column = &parts[0][0].x + lane;
    float chain[4] = {};
#pragma unroll
    for (int w = 0; w < COMBINE_THREADS / WARP; ++w) chain[w % 4] += column[w * WARP];
    const float y = ((chain[0] + chain[1]) + (chain[2] + chain[3])) / total;
    a.attended[head * HEAD_SIZE + first_dim + lane] = float_to_f16(y);
    // None of combine's own products can overflow: what is wrong here came from attention.
    if (!is_finite(y)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTENTION, a.layer);
}
