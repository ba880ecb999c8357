// A sublayer's result added to the residual, with or without a norm, and the sums that the next norm needs.
//
// One reduction instead of two. With p = w o and k = scale / rms(o), h = x + k p, and so
//     sum(h^2) = sum(x^2) + 2 k sum(x p) + k^2 sum(p^2),
// whose sums need no k: they are taken together with sum(o^2). Where x and k p nearly cancel this loses digits,
// so that a row whose sum comes out below 1/64 of the squares' own is summed again from h itself. 1/64 bounds the
// relative error at about 128 roundings of a tree sum, 1e-5, a hundredth of a half's step.
#pragma once
#include "common/row.cuh"

constexpr float CANCELLED = 1.0f / 64.0f;

struct Sublayer {
    float4 out;    // x + factor * p
    float factor;  // scale / rms(y), or scale
    float in_squares, out_squares;
};

// From the sums over the row of y^2, x^2, x p and p^2. True: too little is left of out's; sum it again.
__device__ __forceinline__ bool from_sums(float4 t, float scale, Sublayer& s) {
    s.factor = scale * inverse_rms(t.x);
    s.in_squares = t.x;
    const float added = s.factor * s.factor * t.w;
    s.out_squares = t.y + added + 2.0f * s.factor * t.z;
    return s.out_squares < CANCELLED * (t.y + added);
}

// The thread's columns of out = x + scale * y, or x + scale * rms(y, w), with the row's sums of squares. Uses
// exchange[0], and [1] for a row that cancels. All column threads of the row's blocks call it. meanwhile(): what a thread
// does while the first sums are on their way.
template <int COUNT, class MEANWHILE>
__device__ __forceinline__ Sublayer add_sublayer(float4 x, float4 y, float4 w, float scale, bool norm,
                                                 RowExchange (&exchange)[COUNT], Fault* fault, int kernel, int layer,
                                                 MEANWHILE meanwhile) {
    static_assert(COUNT >= 2, "two sums");
    Sublayer s;
    if (!norm) {
        s.factor = scale;
        s.out = plus_scaled(x, scale, y);
        const float4 squares = make_float4(dot(y, y), dot(s.out, s.out), 0.0f, 0.0f);
        row_send<false>(squares, exchange[0]);
        meanwhile();
        const float4 t = row_result<false>(exchange[0], fault, kernel, layer);
        s.in_squares = t.x;
        s.out_squares = t.y;
        return s;
    }
    const float4 p = product(w, y);
    const float4 products = make_float4(dot(y, y), dot(x, x), dot(x, p), dot(p, p));
    row_send<false>(products, exchange[0]);
    meanwhile();
    const bool again = from_sums(row_result<false>(exchange[0], fault, kernel, layer), scale, s);
    s.out = plus_scaled(x, s.factor, p);
    // The same bits in every thread of every part: all of them take the branch, or none.
    if (again)
        s.out_squares =
            row_reduce<false>(make_float4(dot(s.out, s.out), 0.0f, 0.0f, 0.0f), exchange[1], fault, kernel, layer).x;
    return s;
}
