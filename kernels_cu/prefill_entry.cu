// Prompt processing: how the draft takes a prompt's rows in. Only its keys and values are needed of them.
//
// prefill_entry  the operand of eh_proj, [rms(embed(next token), enorm) ; rms(hidden, hnorm)].
// prefill_norm   the layer's input norm over eh_proj's output.
//   PRECOND  both: grid (rows), block 256. Norms may be read before pdl_wait().
//   A row is read into registers once. Reads rows * HIDDEN * 6 (4) bytes, writes rows * HIDDEN * 4 (2).
#include "abi_prefill.cuh"
#include "common/pdl.cuh"
#include "common/prefill_report.cuh"
#include "common/reduce.cuh"
#include "common/fault.cuh"

constexpr int THREADS = 256;
constexpr int EACH = (HIDDEN + THREADS * 2 - 1) / (THREADS * 2);  // pairs of columns of a thread
static_assert(HIDDEN % 2 == 0, "pairs of columns");

// out = rms(x, norm) as halves. scratch: a float a warp that no other call uses.
__device__ __forceinline__ bool write_norm(const float2 (&x)[EACH], const float* norm, f16* out, float* scratch) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) square += x[i].x * x[i].x + x[i].y * x[i].y;
    const float inverse = rsqrtf(block_sum<THREADS>(square, scratch) * (1.0f / HIDDEN) + EPS);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int pair = i * THREADS + int(threadIdx.x);
        if (pair >= HIDDEN / 2) continue;
        const float2 w = reinterpret_cast<const float2*>(norm)[pair];
        reinterpret_cast<uint32_t*>(out)[pair] = pack_f16(x[i].x * inverse * w.x, x[i].y * inverse * w.y);
    }
    return is_finite(inverse) && inverse > 0.0f;  // the square may have overflowed
}

extern "C" __global__ void __launch_bounds__(THREADS) prefill_entry(const __grid_constant__ PrefillEntryArgs a) {
    __shared__ float scratch[2][THREADS / WARP];
    pdl_wait();
    pdl_trigger();
    const int row = int(blockIdx.x);
    if (row >= a.rows) return;
    const int token = a.tokens[row];
    if (token < 0 || token >= VOCAB_TOTAL) {
        if (threadIdx.x == 0) report_fault(a.fault, FAULT_TOKEN, KERNEL_PREFILL, a.layer);
        return;
    }
    const uint32_t* table = reinterpret_cast<const uint32_t*>(a.table + int64_t(token) * HIDDEN);
    const float2* hidden = reinterpret_cast<const float2*>(a.hidden + int64_t(row) * HIDDEN);
    float2 x[EACH], h[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int pair = i * THREADS + int(threadIdx.x);
        const bool inside = pair < HIDDEN / 2;
        const uint32_t both = inside ? table[pair] : 0;
        x[i] = make_float2(bf16_to_float(bf16(both)), bf16_to_float(bf16(both >> 16)));
        h[i] = inside ? hidden[pair] : make_float2(0.0f, 0.0f);
    }
    f16* out = a.out + int64_t(row) * 2 * HIDDEN;
    const bool embedded = write_norm(x, a.enorm, out, scratch[0]);
    const bool continued = write_norm(h, a.hnorm, out + HIDDEN, scratch[1]);
    report_block(embedded && continued, a.fault, a.layer);
}

extern "C" __global__ void __launch_bounds__(THREADS) prefill_norm(const __grid_constant__ PrefillNormArgs a) {
    __shared__ float scratch[THREADS / WARP];
    pdl_wait();
    pdl_trigger();
    const int row = int(blockIdx.x);
    if (row >= a.rows) return;
    const float2* in = reinterpret_cast<const float2*>(a.in + int64_t(row) * HIDDEN);
    float2 x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int pair = i * THREADS + int(threadIdx.x);
        x[i] = pair < HIDDEN / 2 ? in[pair] : make_float2(0.0f, 0.0f);
    }
    report_block(write_norm(x, a.norm, a.normed + int64_t(row) * HIDDEN, scratch), a.fault, a.layer);
}
