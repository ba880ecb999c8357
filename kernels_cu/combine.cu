// Attention's splits of one row and head, and its sink, as one softmax:
//     o = sum_s 2^(m_s - M) out_s / (sum_s 2^(m_s - M) sum_s + 2^(z - M)),   M = max(z, m_s),   z = scale log2(e) q.sink_k.
//
// PRECOND: grid (Q_HEADS, ROWS, 4), block 256; splits <= SPLITS; partials of active splits come from the predecessor
// (attention, statistics in base 2), q from the launch before it, `positions` and *live from at least two launches ago.
// Reads 520 bytes a split, statistics four times; writes a head's 128 outputs in FP32 and F16. Rows beyond the live ones
// are not written.
//
// Latency is all: blocks enough for every multiprocessor (one for 32 dimensions of a row and head), and every load of a
// thread (its splits, statistics, q) is issued before the first is used. Splits go through shared memory by cp.async,
// since the assembler moves ordinary loads down to their use, which makes one trip to L2 after the other of them. Eight
// lanes have four dimensions each of a split, a warp four splits at a time, the block 32. Each warp finds M and the
// denominator for itself, which costs a few shuffles and saves a barrier. z takes part in M, so that M is a number even
// where a split saw no key.
#include "abi_decode.cuh"
#include "common/attend.cuh"
#include "common/fault.cuh"
#include "common/kv.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int PART_LANES = 8;                  // of a split
constexpr int PART = PART_LANES * 4;           // dimensions of a block
constexpr int ROUND = THREADS / PART_LANES;    // splits at a time
constexpr int OWN = (SPLITS + WARP - 1) / WARP;  // splits of a thread, and splits whose statistics it holds

static_assert(ROUND == WARP, "the register that holds a split's weight must not depend on the warp");
static_assert(HEAD_DIM % PART == 0 && PART == WARP, "a warp writes a block's outputs");

extern "C" __global__ void __launch_bounds__(THREADS, 2) combine(const __grid_constant__ CombineArgs a) {
    __shared__ float4 out[OWN][THREADS];  // each thread reads what it copied itself
    __shared__ float4 parts[WARPS][PART_LANES];
    pdl_trigger();  // at once: o_proj's prologue reads weights, and what qkv wrote
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int mine = threadIdx.x / PART_LANES, part_lane = threadIdx.x % PART_LANES;
    const int head = blockIdx.x, kv_head = head / GROUP, row = blockIdx.y, first_dim = blockIdx.z * PART;
    const Pass pass = read_pass(a.live, a.positions, a.rows, a.rows);
    const float4 sink = *reinterpret_cast<const float4*>(a.sink_k + kv_head * HEAD_DIM + lane * 4);
    const int active = pass.rows > 0 ? kv_split(pass.low, pass.high, a.window, a.splits, 0).active : 0;
    pdl_wait();
    if (row >= pass.rows) return;

    const int m = row * GROUP + head % GROUP;
    const float* own = a.partial_out + first_dim + part_lane * 4 +
                       ((int64_t(kv_head) * a.splits + mine) * (ROWS * GROUP) + m) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        copy_async_or_zeros(&out[i][threadIdx.x], own + i * (ROUND * ROWS * GROUP * HEAD_DIM), i * ROUND + mine < active);
    }
    copy_async_commit();
    __syncwarp();  // the assembler moves nothing across it: without, it would copy only after the sums below
    const uint2 q = *reinterpret_cast<const uint2*>(a.q + (row * Q_HEADS + head) * HEAD_DIM + lane * 4);
    const int64_t statistics = (int64_t(kv_head) * (ROWS * GROUP) + m) * a.splits + lane;
    float top[OWN], sum[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        const bool there = j * WARP + lane < active;
        top[j] = there ? a.partial_max[statistics + j * WARP] : none();
        sum[j] = there ? a.partial_sum[statistics + j * WARP] : 0.0f;
    }
    const float2 q01 = unpack_f16(q.x), q23 = unpack_f16(q.y);
    const float z =
        a.scale * LOG2E * warp_sum((q01.x * sink.x + q01.y * sink.y) + (q23.x * sink.z + q23.y * sink.w));
    float peak = top[0];
#pragma unroll
    for (int j = 1; j < OWN; ++j) peak = fmaxf(peak, top[j]);
    peak = fmaxf(warp_max(peak), z);

    // A split without visible keys has -inf, 0 and zeros: weight 0. What is not finite goes on into the output.
    float weight[OWN], total = 0.0f;
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        weight[j] = exp2f(top[j] - peak);
        total = fmaf(weight[j], sum[j], total);
    }
    total = warp_sum(total) + exp2f(z - peak);

    __syncwarp();          // without, it would wait before it loads statistics
    copy_async_wait<0>();  // this thread's own copies, which no other thread reads
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const float w = __shfl_sync(0xffffffffu, weight[i], mine);
        const float4 x = out[i][threadIdx.x];
        o.x = fmaf(w, x.x, o.x);
        o.y = fmaf(w, x.y, o.y);
        o.z = fmaf(w, x.z, o.z);
        o.w = fmaf(w, x.w, o.w);
    }
#pragma unroll
    for (int offset = PART_LANES; offset < WARP; offset *= 2) {
        o.x += __shfl_xor_sync(0xffffffffu, o.x, offset);
        o.y += __shfl_xor_sync(0xffffffffu, o.y, offset);
        o.z += __shfl_xor_sync(0xffffffffu, o.z, offset);
        o.w += __shfl_xor_sync(0xffffffffu, o.w, offset);
    }
    if (lane < PART_LANES) parts[warp][lane] = o;
    __syncthreads();  // every warp's splits are there
    if (warp > 0) return;

    const float* column = &parts[0][0].x + lane;
    float chain[4] = {};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) chain[w % 4] += column[w * PART];
    const float y = ((chain[0] + chain[1]) + (chain[2] + chain[3])) / total;
    // attention leaves dimensions 16 w + g + 8 i + 64 j as number 32 w + 4 g + i + 2 j.
    const int at = (row * Q_HEADS + head) * HEAD_DIM + first_dim / 2 + lane / 4 + lane % 2 * 8 + lane / 2 % 2 * 64;
    a.attended32[at] = y;
    a.attended[at] = float_to_f16(y);
    // Not one of combine's own products can overflow: what is wrong here came from attention.
    if (!is_finite(y)) report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_ATTENTION, a.layer);
}
