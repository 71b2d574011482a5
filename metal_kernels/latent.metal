// qr = rms(q) * q_norm; row = pack(rotate(rms(kv) * kv_norm)); rows = window, then the new rows.
//
// D / 4 threads a threadgroup: for each token one for its latent query and one for its row, where a thread holds four
// neighbouring channels; then those that copy the window, COPIED words of it a thread. A row of 584 bytes is copied as
// words of four bytes, one of 194 as words of two.
//
// RING: a token of each of several sequences, whose window is a ring of WIDTH rows, ROW words each; the new row takes
// the place of one.
#include "rows.h"
// ---- kernel latent
threadgroup float partial[32];
const uint threads = D / 4;
uint group = threadgroup_position_in_grid.x, index = thread_index_in_threadgroup;
if (group >= 2 * uint(tokens)) {
    const device WORD* from = (const device WORD*)window;
    device WORD* to = (device WORD*)rows;
    uint first = (group - 2 * uint(tokens)) * COPIED * threads + index;
    for (uint i = first; i < min(first + COPIED * threads, uint(words)); i += threads) {
#if RING
        uint row = i / ROW;
        if (row % WIDTH == uint(positions[row / WIDTH]) % WIDTH) {
            continue;   // another threadgroup writes it
        }
#endif
        to[i] = from[i];
    }
    return;
}
uint t = group / 2;
if (group % 2 == 0) {
    const device float4* x = (const device float4*)q + t * (Q / 4);
    device float4* y = (device float4*)qr + t * (Q / 4);
    float squares = 0.0f;
    for (uint i = index; i < Q / 4; i += threads) {
        squares += dot(x[i], x[i]);
    }
    float scale = precise::rsqrt(threadgroup_sum(squares, partial, index, threads) / float(Q) + eps);
    for (uint i = index; i < Q / 4; i += threads) {
        y[i] = x[i] * scale * ((const device float4*)q_norm)[i];
    }
    return;
}
uint j = 4 * index;
float4 v = ((const device float4*)kv)[t * threads + index];
float scale = precise::rsqrt(threadgroup_sum(dot(v, v), partial, index, threads) / float(D) + eps);
v = v * scale * ((const device float4*)kv_norm)[index];
if (j >= D - R) {
    uint p = t * (R / 2) + (j - (D - R)) / 2;
    v = rotated(v, float2(cos[p], cos[p + 1]), float2(sin[p], sin[p + 1]));
}
#if RING
ulong row = ulong(t) * WIDTH + uint(positions[t]) % WIDTH;
#else
ulong row = ulong(before) + t;
#endif
store4<D, R>(rows, row, j, v);
