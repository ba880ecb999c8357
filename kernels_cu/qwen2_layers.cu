// All decoder layers of a token in one launch, whose weights stream without a stop:
//     for each layer  x += o_proj(attention(rms(x, input_norm)));  x += down(silu(gate(n)) up(n)), n = rms(x, post_norm).
//
// PRECOND  grid GEMV_BLOCKS, block THREADS + 4 warps, all blocks resident together, as on a GPU that has as many
//          multiprocessors; SMEM bytes of dynamic shared memory. Weights: 16-byte aligned units (abi_qwen2.cuh), never
//          written. qkv_pieces, partials, o_pieces, rows_handed, inner and down_pieces hold NOT_READY in every word.
//          residual, positions, page_table may be the predecessor's; K and V of older positions were written by older graphs.
// READS    the matrices and K and V, once; from L2 in each block what the blocks tell one another: each phase's token.
// WRITES   residual_out; K and V of the position; and what blocks tell one another, of which the launch clears all but the last
//          layer's rows_handed, inner and down_pieces.
//
// Why so: memory has to deliver all the time, and a layer is a chain of products whose blocks need one another's results: q, k
// and v; attention's spans; o_proj and the row; the MLP's inner; down and the row. Here the order in which a block's units come
// is known for all layers, so that its ring fills while the block waits, and no launch's end empties it. Results are their own
// ready flags (common/flagged.cuh): a word is there once it is not NOT_READY. A block's units come as one copy for all warps:
// what a block asks of memory at a time lies together.
// What blocks look for waits behind copies in the same queues. So few are on their way at once (pace), and
// none while the residual's row is awaited. And it waits behind other blocks' looking. So a part of the blocks shares
// o_proj's and down's columns, and with them what those are multiplied by; and the residual's columns are added up once, by
// a warp of one block each, not by every block from all pieces.
// Attention: of a part's blocks as many attend as there are pages for, each to a span of them; then every block of the part
// merges the spans for itself.
// What was measured: tools/decisions/021-all-layers-in-one-launch.md.
//
// Clearing. A warp of its own clears what its block stored, once a layer, behind the row before the MLP: who has all columns of
// that knows that every block has gone past o_proj's products, and so has read q, k and v, the spans, and all of the layer
// before; and o_proj's pieces, as it added them up. The block stores its inner only behind that: what it does next, seen by
// others through any chain of results, says that its words are NOT_READY again. rows_handed, inner and down_pieces take turns
// between layers, as a block may come to the next one's before another has cleared the last one's.
#include "common/layers_attention.cuh"
#include "common/pdl.cuh"
#include "common/phases.cuh"

__device__ __forceinline__ void compute(const Qwen2LayersArgs& a, Shared& shared) {
    Stream stream(shared, a.fault);
    Polling polling{a.fault, 0};
    if (threadIdx.x % WARP == 0) {
        const int warp = threadIdx.x / WARP;
        shared.block.find_start<QKV>(warp), shared.block.find_start<O_PROJ>(warp);
        shared.block.find_start<GATE_UP>(warp), shared.block.find_start<DOWN>(warp);
    }
    pdl_wait();  // the residual, the position and its page
    pdl_trigger();
    const int position = __ldcg(a.positions);
    if (threadIdx.x == 0) shared.span.find(a.page_table, position, shared.block.place);
    if (threadIdx.x < HEAD_SIZE / 2) {
        float sine, cosine;
        sincospif(2.0f * turns_of(position, __ldg(a.inverse_frequencies + threadIdx.x)), &sine, &cosine);
        shared.rope[threadIdx.x] = make_float2(cosine, sine);
    }
    for (int q = threadIdx.x; q < shared.block.quads.units; q += THREADS)
        shared.x[q] = __ldcg(reinterpret_cast<const float4*>(a.residual) + shared.block.quads.first + q);
    meet();  // the span is there
    Copies copies;
    copies.begin(a.page_table, shared.span);
    uint32_t page_parity = 0, cleared = 0;
    const auto entered = [&]() {
        if (threadIdx.x == 0) barrier_arrive(&shared.entered);
    };
    const auto await_clearing = [&](int layer) {
        barrier_wait(&shared.cleared, cleared, a.fault, KERNEL_CONTROL, layer);
        cleared ^= 1;
    };

    for (int i = 0; i < a.layers; ++i) {
        const int layer = a.layer + i;
        Row::enter(shared, i == 0 ? a.residual : end_of(a, i - 1), a.input_norm[i], polling, KERNEL_QKV, layer);
        phase_resumed(i, QKV);
        copies.send_first(a, shared, i);  // not before: the row would wait behind them
        float inverse = inverse_rms(shared.squares);
        stream.multiply<QKV>(shared.token, layer);
        meet();  // every warp's sums are there, and none needs the token
        store_pieces<QkvSplit>(shared, shared.block.units[QKV], blockIdx.x, QKV_ROWS, inverse, a.qkv_pieces,
                               a.fault, KERNEL_QKV, layer);
        pace(shared, EARLY);
        phase_ended(i, QKV);

        if (shared.span.count > 0) {
            take_qkv(a, shared, i, polling);
            phase_resumed(i, ATTENTION);
            attend(a, shared, copies, i, page_parity);
        }
        phase_ended(i, ATTENTION);

        stream.hold<O_PROJ>();
        merge(a, shared, polling, layer);
        pace(shared, MIDST);
        phase_resumed(i, O_PROJ);
        stream.multiply<O_PROJ>(shared.token, layer);
        meet();  // as above
        store_o(shared, a, layer);
        phase_ended(i, O_PROJ);

        stream.hold<GATE_UP>();
        pace(shared, 0);
        if (threadIdx.x < WARP) add_up<OPieces>(shared, a.o_pieces, middle_of(a, i), true, polling, KERNEL_GATE_UP, layer);
        meet();  // before, polls would only be in the way of that
        Row::enter(shared, middle_of(a, i), a.post_norm[i], polling, KERNEL_GATE_UP, layer);
        phase_resumed(i, GATE_UP);
        entered();
        inverse = inverse_rms(shared.squares);
        stream.multiply<GATE_UP>(shared.token, layer);
        meet();  // as above
        await_clearing(layer);
        store_inner(shared, a, inverse, i);
        pace(shared, EARLY);
        phase_ended(i, GATE_UP);

        stream.hold<DOWN>();
        take_inner(shared, inner_of(a, i) + shared.block.part.number * DOWN_COLUMNS, polling, layer);
        phase_resumed(i, DOWN);
        stream.multiply<DOWN>(shared.inner, layer);
        reads_before_copies();  // of what lies where pages will come
        meet();                 // as above
        store_pieces<DownSplit>(shared, shared.block.units[DOWN], shared.block.part.index, HIDDEN, 1.0f / INNER_SCALE,
                                down_of(a, i) + shared.block.part.number * (DOWN_PIECES * HIDDEN), a.fault, KERNEL_DOWN, layer);
        phase_ended(i, DOWN);
        pace(shared, i + 1 < a.layers ? 0 : AHEAD);
        if (threadIdx.x < WARP) {
            const bool last = i + 1 == a.layers;
            add_up<DownPieces>(shared, down_of(a, i), last ? a.residual_out : end_of(a, i), !last, polling, KERNEL_QKV, layer);
        }
        meet();  // before, polls would only be in the way of that
    }
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) qwen2_layers(const __grid_constant__ Qwen2LayersArgs a) {
    extern __shared__ __align__(256) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x == THREADS) {  // what sends copies: the first ones wait for no one
        shared.block.find();
        shared.pace = EARLY;
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(&shared.full[s], 1);
            barrier_init(&shared.empty[s], TEAM);
        }
        for (int s = 0; s < SLOTS; ++s) {
            barrier_init(&shared.k_full[s], 1);
            barrier_init(&shared.v_full[s], 1);
        }
        barrier_init(&shared.entered, 1);
        barrier_init(&shared.cleared, 1);
        barrier_init_fence();
    }
    __syncthreads();  // the barriers are there, and what the block has
    // A block gets 96 registers a thread: of 20 warps, five share those of a quarter of the multiprocessor.
    static_assert(WARPS * 112 + 4 * 32 <= (WARPS + 4) * 96, "what one warp takes another one must have given");
    if (warp < WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        compute(a, shared);
        return;
    }
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == THREADS) Feed{a, shared, 0, 0, QKV, 0}.send_all();
    if (warp == WARPS + 1) Clear{a, shared}.run();
}
