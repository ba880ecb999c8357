// qwen2_layers.cu: attention. Some blocks attend to a span of a KV head's pages each; all blocks of its part merge the spans.
//
// Includers define AT_ONCE: spans whose results a thread polls for together.
#pragma once
#include "common/layers_stream.cuh"

// A warp's pages: of the span those numbered warp, warp + SLOTS, ..., if it is below SLOTS, in a place of its own.
struct Copies {
    int known, known_from;  // lane's entry of the page table, of the warp's 32 pages from known_from on

    static __device__ __forceinline__ int entry(const int* table, const Span& span, int turn) {
        const int i = int(threadIdx.x) / WARP + turn * SLOTS;
        return i < span.count ? __ldcg(table + span.first - i) : 0;
    }

    __device__ __forceinline__ void begin(const int* table, const Span& span) {
        known_from = 0;
        known = entry(table, span, threadIdx.x % WARP);
    }

    // The keys or the values of the warp's page number `turn`.
    __device__ __forceinline__ void send(const Qwen2LayersArgs& a, Shared& shared, int i, int turn, bool values) {
        const int warp = threadIdx.x / WARP;
        if (turn < known_from || turn >= known_from + WARP) {
            known_from = turn / WARP * WARP;
            known = entry(a.page_table, shared.span, known_from + int(threadIdx.x % WARP));
        }
        // A page that embedding found none for: its report ends the request; nothing outside the pages may be touched.
        const int page = max_int(0, __shfl_sync(0xffffffffu, known, turn - known_from));
        if (threadIdx.x % WARP > 0) return;
        const int bytes = (warp == 0 && turn == 0 ? shared.span.own : PAGE) * ROW_BYTES;
        const int64_t from = (int64_t(page) * KV_HEADS + shared.block.place.kv_head) * (PAGE * HEAD_SIZE);
        uint64_t* const full = values ? &shared.v_full[warp] : &shared.k_full[warp];
        barrier_expect(full, bytes);
        if (bytes > 0)
            bulk_load(shared.pages[warp] + (values ? PAGE_BYTES : 0), (values ? a.v_pages[i] : a.k_pages[i]) + from, bytes,
                      full);
    }

    // The layer's first pages. Whatever lay there has been read, and a barrier is behind that.
    __device__ __forceinline__ void send_first(const Qwen2LayersArgs& a, Shared& shared, int i) {
        if (int(threadIdx.x) / WARP >= min_int(SLOTS, shared.span.count)) return;
        send(a, shared, i, 0, false);
        send(a, shared, i, 0, true);
    }
};

// A thread's part of q, k or v: four dimensions from dim on, and those half a head on.
struct Input {
    int head;  // of the KV head's queries, then k, then v; GROUP + 2 for none
    int row, dim;

    __device__ __forceinline__ explicit Input(const Shared& shared) {
        const int found = threadIdx.x / HEAD_THREADS, kv_head = shared.block.place.kv_head;
        dim = threadIdx.x % HEAD_THREADS * 4;
        head = found < GROUP + (shared.span.tail() ? 2 : 0) ? found : GROUP + 2;
        row = (head < GROUP ? kv_head * GROUP + head : Q_HEADS + (head == GROUP ? 0 : KV_HEADS) + kv_head) * HEAD_SIZE + dim;
    }

    // All pieces together, as soon as they are there, and the bias.
    __device__ __forceinline__ void take(const float* pieces, const f16* biases, float4 (&x)[2], Polling& polling,
                                         int layer) const {
        uint4 piece[2][QKV_PIECES];
        uint2 bias[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = row + half * (HEAD_SIZE / 2), awaited = head < GROUP + 2 ? QkvSplit::of_row(at) : 0;
            bias[half] = head < GROUP + 2 ? __ldg(reinterpret_cast<const uint2*>(biases + at)) : make_uint2(0u, 0u);
#pragma unroll
            for (int p = 0; p < QKV_PIECES; ++p) piece[half][p] = unready_if(p < awaited);
        }
        bool ready;
        do {
            ready = true;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int p = 0; p < QKV_PIECES; ++p) {
                    if (!floats_there(piece[half][p]))
                        piece[half][p] = load_flagged_16(pieces + p * QKV_ROWS + row + half * (HEAD_SIZE / 2));
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int p = 0; p < QKV_PIECES; ++p) ready = ready && floats_there(piece[half][p]);
            }
        } while (polling.again(ready, KERNEL_ATTENTION, layer));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            x[half] = unpacked(bias[half]);
#pragma unroll
            for (int p = 0; p < QKV_PIECES; ++p) {
                const uint4 y = piece[half][p];
                x[half] = plus(x[half], make_float4(__uint_as_float(y.x), __uint_as_float(y.y), __uint_as_float(y.z),
                                                    __uint_as_float(y.w)));
            }
        }
    }
};

// Queries as operands, this token's key and value behind the tail page's rows. Ends with a barrier.
__device__ __forceinline__ void take_qkv(const Qwen2LayersArgs& a, Shared& shared, int i, Polling& polling) {
    const Span& span = shared.span;
    for (int at = threadIdx.x; at < STEPS * WARP; at += THREADS) {  // columns of no query
        if (at % WARP / 4 >= GROUP) shared.q[at / WARP][at % WARP] = make_uint4(0u, 0u, 0u, 0u);
    }
    if (span.tail()) {  // values of no token: their probability is 0, and times that they must be 0
        for (int at = (span.own + 1) * ROW_BYTES + int(threadIdx.x) * 16; at < PAGE_BYTES; at += THREADS * 16)
            *reinterpret_cast<uint4*>(shared.pages[0] + PAGE_BYTES + at) = make_uint4(0u, 0u, 0u, 0u);
    }
    if (threadIdx.x < div_up((GROUP + 2) * HEAD_THREADS, WARP) * WARP) {
        const Input in(shared);
        float4 x[2];
        in.take(a.qkv_pieces, a.bias[i], x, polling, a.layer + i);
        if (in.head <= GROUP) {
            const float4* const angles = reinterpret_cast<const float4*>(shared.rope + in.dim);
            const float4 p = angles[0], q = angles[1];
            turn(x, make_float4(p.x, p.z, q.x, q.z), make_float4(p.y, p.w, q.y, q.w));
        }
        if (in.head < GROUP) {
            store_query(shared.q, in.head, in.dim, x[0]);
            store_query(shared.q, in.head, in.dim + HEAD_SIZE / 2, x[1]);
        } else if (in.head < GROUP + 2) {
            const bool value = in.head > GROUP;
            f16* const cached = (value ? a.v_pages[i] : a.k_pages[i]) +
                                (int64_t(span.page) * KV_HEADS + shared.block.place.kv_head) * (PAGE * HEAD_SIZE);
            uint8_t* const page = shared.pages[0] + (value ? PAGE_BYTES : 0);
            store_row(page, span.page < 0 ? nullptr : cached, span.own, in.dim, x[0]);
            store_row(page, span.page < 0 ? nullptr : cached, span.own, in.dim + HEAD_SIZE / 2, x[1]);
        }
    }
    meet();  // queries, and this token's key and value, are there
}

// The block's span: its partial result, for all blocks of the part. Ends with a barrier.
__device__ __forceinline__ void attend(const Qwen2LayersArgs& a, Shared& shared, Copies& copies, int i, uint32_t& parity) {
    const Span& span = shared.span;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, layer = a.layer + i;
    const int active = min_int(SLOTS, span.count);
    if (warp < active) {
        Softmax softmax;
        softmax.begin();
        const uint32_t line = Softmax::line(shared_address(shared.pages[warp]));
        for (int page = warp, turn = 0; page < span.count; page += SLOTS, ++turn) {
            barrier_wait(&shared.k_full[warp], parity, a.fault, KERNEL_ATTENTION, layer);
            const Softmax::Page seen = softmax.keys(line, shared.q, page == 0 && span.tail(), span.own);
            const bool more = page + SLOTS < span.count;
            if (more) {
                reads_before_copies();
                __syncwarp();  // every lane has read the keys
                copies.send(a, shared, i, turn + 1, false);
            }
            barrier_wait(&shared.v_full[warp], parity, a.fault, KERNEL_ATTENTION, layer);
            softmax.values(line, seen);
            parity ^= 1;
            if (more) {
                reads_before_copies();
                __syncwarp();  // and the values
                copies.send(a, shared, i, turn + 1, true);
            }
        }
        softmax.end();
        __syncwarp();  // every lane has read the last page, where the warp's sums are put
        float4* const sums = reinterpret_cast<float4*>(shared.pages[warp]);
#pragma unroll
        for (int j = 0; j < STEPS; ++j) sums[j * WARP + lane] = softmax.out[j];
        if (lane < STATISTICS)
            shared.own[warp][lane] = make_float4(softmax.top[0], softmax.sum[0], softmax.top[1], softmax.sum[1]);
    }
    meet();  // all warps' sums are there
    f16* const halves = reinterpret_cast<f16*>(shared.q);
    uint4* const record = a.partials + int64_t(shared.block.place.kv_head * SPANS + shared.block.place.span) * RECORD_PIECES;
    if (threadIdx.x < ITEMS) {
        // All warps' loads together, also those of warps without a page, whose sums do not count.
        float4 all = make_float4(none(), 0.0f, none(), 0.0f), o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < SLOTS; ++w) {
            const float4 one = shared.own[w][threadIdx.x % STATISTICS];
            if (w < active) all.x = fmaxf(all.x, one.x), all.z = fmaxf(all.z, one.z);
        }
#pragma unroll
        for (int w = 0; w < SLOTS; ++w) {
            const float4 one = shared.own[w][threadIdx.x % STATISTICS];
            const float4 part = reinterpret_cast<const float4*>(shared.pages[w])[threadIdx.x];
            const float2 weight = make_float2(exp2_fast(one.x - all.x), exp2_fast(one.z - all.z));
            if (w >= active) continue;
            all.y = fmaf(weight.x, one.y, all.y), all.w = fmaf(weight.y, one.w, all.w);
            o = weighted(o, part, weight);
        }
        const float2 inverse = make_float2(__frcp_rn(all.y), __frcp_rn(all.w));
        const int query = threadIdx.x % 4 * 2, dim = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
        f16* const to = halves + query * HEAD_SIZE + dim;
        if (query < GROUP) to[0] = float_to_f16(o.x * inverse.x), to[8] = float_to_f16(o.z * inverse.x);
        if (query + 1 < GROUP)
            to[HEAD_SIZE] = float_to_f16(o.y * inverse.y), to[HEAD_SIZE + 8] = float_to_f16(o.w * inverse.y);
        if (threadIdx.x < STATISTICS) {
            reinterpret_cast<float4*>(record + HEAD_PIECES)[threadIdx.x] =
                make_float4(ready_float(all.x), ready_float(all.y), ready_float(all.z), ready_float(all.w));
        }
    }
    meet();  // the span's halves are there, and no one needs its pages
    if (threadIdx.x < HEAD_PIECES) record[threadIdx.x] = reinterpret_cast<const uint4*>(halves)[threadIdx.x];
}

// The spans' results of the part's heads, as soon as they are there, as o_proj's token. Ends with a barrier.
__device__ __forceinline__ void merge(const Qwen2LayersArgs& a, Shared& shared, Polling& polling, int layer) {
    const int spans = shared.span.spans;
    const int piece = threadIdx.x % MERGED, set = threadIdx.x / MERGED, query = piece % HEAD_PIECES / HEAD_THREADS;
    const uint4* const records =
        a.partials + int64_t(shared.block.part.number * PART_HEADS + piece / HEAD_PIECES) * (SPANS * RECORD_PIECES);
    float acc[8] = {}, top = none(), sum = 0.0f;
    for (int from = 0; from < spans; from += SETS * AT_ONCE) {
        uint4 x[AT_ONCE];
        uint2 statistics[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            x[n] = unready_if(set < SETS && from + n * SETS + set < spans);
            statistics[n] = make_uint2(x[n].x, x[n].x);
        }
        bool ready;
        do {
            ready = true;
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const uint4* const record = records + (from + n * SETS + set) * RECORD_PIECES;
                if (!halves_there(x[n])) x[n] = load_flagged_16(record + piece % HEAD_PIECES);
                if (statistics[n].x == NOT_READY || statistics[n].y == NOT_READY)
                    statistics[n] = load_flagged_8(reinterpret_cast<const uint2*>(record + HEAD_PIECES) + query);
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n)
                ready = ready && halves_there(x[n]) && statistics[n].x != NOT_READY && statistics[n].y != NOT_READY;
        } while (polling.again(ready, KERNEL_O_PROJ, layer));
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            if (set >= SETS || from + n * SETS + set >= spans) continue;
            const float other = __uint_as_float(statistics[n].x), larger = fmaxf(top, other);
            const float factor = exp2_fast(top - larger), weight = exp2_fast(other - larger) * __uint_as_float(statistics[n].y);
            const uint32_t words[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 o = unpack_f16(words[j]);
                acc[2 * j] = fmaf(weight, o.x, acc[2 * j] * factor);
                acc[2 * j + 1] = fmaf(weight, o.y, acc[2 * j + 1] * factor);
            }
            top = larger;
            sum = fmaf(sum, factor, weight);
        }
    }
    shared.merge.sums[0][threadIdx.x] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    shared.merge.sums[1][threadIdx.x] = make_float4(acc[4], acc[5], acc[6], acc[7]);
    shared.merge.statistics[threadIdx.x] = make_float2(top, sum);
    meet();  // all sets' sums are there
    if (threadIdx.x < div_up(MERGED, WARP) * WARP) {
        float2 of[SETS];
        float largest = none(), total = 0.0f;
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
            of[s] = shared.merge.statistics[s * MERGED + piece];
            largest = fmaxf(largest, of[s].x);
        }
        float y[8] = {};
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
            const float weight = exp2_fast(of[s].x - largest);
            const float4 lo = shared.merge.sums[0][s * MERGED + piece], hi = shared.merge.sums[1][s * MERGED + piece];
            total = fmaf(weight, of[s].y, total);
            y[0] = fmaf(weight, lo.x, y[0]), y[1] = fmaf(weight, lo.y, y[1]);
            y[2] = fmaf(weight, lo.z, y[2]), y[3] = fmaf(weight, lo.w, y[3]);
            y[4] = fmaf(weight, hi.x, y[4]), y[5] = fmaf(weight, hi.y, y[5]);
            y[6] = fmaf(weight, hi.z, y[6]), y[7] = fmaf(weight, hi.w, y[7]);
        }
        const float inverse = 1.0f / total;
        bool finite = true;
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] *= inverse, finite = finite && is_finite(y[j]);
        if (!finite) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTENTION, layer);
        TOKEN::store(shared.token, piece * 8, y, threadIdx.x < MERGED);
    }
    meet();  // all of the token is there
}
