// Attention's splits of one row and head, and its sink, as one softmax:
//     o = sum_s 2^(m_s - M) out_s / (sum_s 2^(m_s - M) sum_s + 2^(z - M)),   M = max(z, m_s),   z = scale log2(e) q.sink_k.
//
// PRECOND: grid (Q_HEADS, ROWS), block WARPS * 32, dynamic shared memory OWN * WARPS * 512 bytes; splits <= SPLITS; partials of active splits come from the predecessor
// (attention, statistics in base 2), q from the launch before it, `positions` and *live from at least two launches ago.
// Reads 520 bytes a split; writes a head's 128 outputs in FP32 and F16. Rows beyond the live ones are not written.
//
// Latency is all: every load of a thread (its warp's splits, statistics, q) is issued before the first is used. Splits go
// through shared memory by cp.async, since the assembler moves ordinary loads down to their use, which makes one trip to
// L2 after the other of them. A warp has splits w, w + WARPS, ..., a lane four dimensions of them; each warp finds M and the denominator for itself, which
// costs a few shuffles and saves a barrier. z takes part in M, so that M is a number even where a split saw no key.
#include "abi.cuh"
#include "common/copy.cuh"
#include "common/fault.cuh"
#include "common/kv.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int OWN = (SPLITS + WARPS - 1) / WARPS;  // splits whose sums a warp adds
constexpr int SEEN = (SPLITS + WARP - 1) / WARP;   // splits whose statistics a lane holds
constexpr float LOG2E = 1.4426950408889634f;

static_assert(WARP % WARPS == 0, "the register that holds a split's weight must not depend on the warp");
static_assert(WARPS >= 4, "four warps write a head");
static_assert(HEAD_DIM == 4 * WARP, "a lane has four dimensions");

__device__ __forceinline__ float none() { return __uint_as_float(0xff800000u); }  // the maximum over no key

// 16 bytes, or zeros without reading anything.
__device__ __forceinline__ void copy_async_or_zeros(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(there ? 16 : 0)
                 : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) combine(const __grid_constant__ CombineArgs a) {
    __shared__ float4 parts[WARPS][WARP];
    extern __shared__ float4 out[];  // [OWN][threads]: each thread reads what it copied itself
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int head = blockIdx.x, kv_head = head / GROUP, row = blockIdx.y;
    const Pass pass = read_pass(a.live, a.positions, a.rows);
    const float4 sink = *reinterpret_cast<const float4*>(a.sink_k + kv_head * HEAD_DIM + lane * 4);
    const int active = pass.rows > 0 ? kv_extent(pass.low, pass.high, a.window, a.splits).active : 0;
    pdl_wait();
    pdl_trigger();
    if (row >= pass.rows) return;

    const int64_t first = int64_t(kv_head) * a.splits * (ROWS * GROUP) + row * GROUP + head % GROUP;
    const float* own = a.partial_out + (first + warp * (ROWS * GROUP)) * HEAD_DIM + lane * 4;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int split = i * WARPS + warp;
        copy_async_or_zeros(&out[i * THREADS + threadIdx.x], own + i * (WARPS * ROWS * GROUP * HEAD_DIM), split < active);
    }
    copy_async_commit();
    __syncwarp();  // the assembler moves nothing across it: without, it would copy only after the sums below
    const uint2 q = *reinterpret_cast<const uint2*>(a.q + (row * Q_HEADS + head) * HEAD_DIM + lane * 4);
    float top[SEEN], sum[SEEN];
    const int64_t seen = first + lane * (ROWS * GROUP);
#pragma unroll
    for (int j = 0; j < SEEN; ++j) {
        const bool there = j * WARP + lane < active;
        top[j] = there ? a.partial_max[seen + j * (WARP * ROWS * GROUP)] : none();
        sum[j] = there ? a.partial_sum[seen + j * (WARP * ROWS * GROUP)] : 0.0f;
    }
    const float2 q01 = unpack_f16(q.x), q23 = unpack_f16(q.y);
    const float z =
        a.scale * LOG2E * warp_sum((q01.x * sink.x + q01.y * sink.y) + (q23.x * sink.z + q23.y * sink.w));
    float peak = top[0];
#pragma unroll
    for (int j = 1; j < SEEN; ++j) peak = fmaxf(peak, top[j]);
    peak = fmaxf(warp_max(peak), z);

    // A split without visible keys has -inf, 0 and zeros: weight 0. What is not finite goes on into the output.
    float weight[SEEN], total = 0.0f;
#pragma unroll
    for (int j = 0; j < SEEN; ++j) {
        weight[j] = exp2f(top[j] - peak);
        total = fmaf(weight[j], sum[j], total);
    }
    total = warp_sum(total) + exp2f(z - peak);

    __syncwarp();          // without, it would wait before it loads statistics
    copy_async_wait<0>();  // this thread's own copies, which no other thread reads
    float4 mine = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const float w = __shfl_sync(0xffffffffu, weight[i * WARPS / WARP], i * WARPS % WARP + warp);
        const float4 x = out[i * THREADS + threadIdx.x];
        mine.x = fmaf(w, x.x, mine.x);
        mine.y = fmaf(w, x.y, mine.y);
        mine.z = fmaf(w, x.z, mine.z);
        mine.w = fmaf(w, x.w, mine.w);
    }
    parts[warp][lane] = mine;
    __syncthreads();  // every warp's splits are there
    if (warp >= HEAD_DIM / WARP) return;

    const float* column = &parts[0][0].x + threadIdx.x;
    float chain[4] = {};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) chain[w % 4] += column[w * HEAD_DIM];
    const float o = ((chain[0] + chain[1]) + (chain[2] + chain[3])) / total;
    const int at = (row * Q_HEADS + head) * HEAD_DIM + threadIdx.x;
    a.attended32[at] = o;
    a.attended[at] = float_to_f16(o);
    // Not one of combine's own products can overflow: what is wrong here came from attention.
    if (!is_finite(o)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTENTION, a.layer);
}
