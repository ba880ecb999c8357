// The rows' way in, the target's embedding: residual = x or rms(x, norm), normed = rms(x, norm) of x = table[token]. A
// token that is not in the vocabulary is reported and taken as 0.
//   PRECOND  grid (rows * PARTS), cluster PARTS, block COLUMN_THREADS. Arrays 16-byte aligned. Tokens are read after
//            pdl_wait(), norm and table are weights. `rows` may exceed ROWS.
//   Reads rows * HIDDEN * 2 bytes and the norm, writes rows * HIDDEN * 6.
// How a row is shared among blocks: common/row.cuh.
#include "abi_decode.cuh"
#include "common/row.cuh"

extern "C" __global__ void __launch_bounds__(COLUMN_THREADS) embed(const __grid_constant__ EmbedArgs a) {
    __shared__ RowExchange exchange[1];
    const int row = int(blockIdx.x) / PARTS, part = int(blockIdx.x) % PARTS;
    const int column = part * COLUMNS + int(threadIdx.x) * 4;
    const float4 w = __ldg(reinterpret_cast<const float4*>(a.norm + column));
    row_begin(exchange);
    pdl_wait();
    pdl_trigger();
    if (row >= a.rows) return;
    const int live = a.live != nullptr ? __ldcg(a.live) : a.rows;
    int token = __ldcg(a.tokens + row);
    if (row >= live) return;
    if (token < 0 || token >= VOCAB_TOTAL) {
        if (part == 0 && threadIdx.x == 0) report_fault(a.fault, FAULT_TOKEN, KERNEL_EMBED, a.layer);
        token = 0;
    }
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(a.table + int64_t(token) * HIDDEN + column));
    const float4 x = make_float4(bf16_to_float(bf16(raw.x)), bf16_to_float(bf16(raw.x >> 16)),
                                 bf16_to_float(bf16(raw.y)), bf16_to_float(bf16(raw.y >> 16)));
    const float squares =
        row_reduce<false>(make_float4(dot(x, x), 0.0f, 0.0f, 0.0f), exchange[0], a.fault, KERNEL_EMBED, a.layer).x;
    const float4 n = product(scaled(x, inverse_rms(squares)), w);
    const int64_t at = int64_t(row) * HIDDEN + column;
    store4(a.residual + at, a.normed_residual ? n : x);
    store4(a.normed + at, n);
    if (part == 0 && threadIdx.x == 0 && !is_finite(squares))
        report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_EMBED, a.layer);
}
