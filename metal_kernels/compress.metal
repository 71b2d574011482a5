// row = pack(rotate(rms(pooled) * norm)) of every group that a chunk completes, and the tokens that are still needed.
// pooled[j] = sum_x softmax_x(s[x][j]) k[x][j] over the SLOTS = M RATIO slots of a group.
//
// Tokens are numbered from the first that the frontier holds. A threadgroup has W / 4 * PARTS threads. One makes a row:
// a thread pools four neighbouring channels of every PARTS-th slot, running maximum and sums in registers; the parts
// meet in threadgroup memory, and the first part's threads, whole SIMD-groups, finish the row, for its norm needs all W
// channels. Further threadgroups write the next frontier, four columns of a token a thread.
#include "rows.h"

// What a chunk does; the same as `compress_step` has it.
struct Span {
    uint held;    // tokens of the frontier
    uint before;  // of these, of the group before the open one
    uint groups;  // that the chunk completes
    uint keep;    // first token of the next frontier
    uint left;    // tokens of the next frontier
};

template <int RATIO, int M> inline Span span_of(uint start, uint tokens) {
    Span span;
    uint open = start % RATIO;
    span.before = M == 2 && start >= uint(RATIO) ? RATIO : 0;
    span.held = span.before + open;
    span.groups = (open + tokens) / RATIO;
    uint done = span.before + span.groups * RATIO;
    span.keep = M == 2 && done > 0 ? done - RATIO : done;
    span.left = span.held + tokens - span.keep;
    return span;
}

// Softmax-weighted mean of values so far, four channels: sums of exp(score - most), and of that times the value.
struct Pool {
    float4 most, weight, sum;
};

inline Pool merged(Pool a, Pool b) {
    float4 most = max(a.most, b.most);
    float4 scale_a = precise::exp(a.most - most), scale_b = precise::exp(b.most - most);
    return Pool{most, a.weight * scale_a + b.weight * scale_b, a.sum * scale_a + b.sum * scale_b};
}

// Columns j ... j + 3 of token i as a pool of one: the score is s with the bias of its place, the value k. Token 0 is
// the first of its group.
template <int RATIO, int COLUMNS> inline Pool token4(const device float* k, const device float* s,
                                                     const device float* frontier, const device float* ape,
                                                     uint held, uint i, uint j) {
    if (i < held) {
        const device float* p = frontier + ulong(i) * 2 * COLUMNS + j;
        return Pool{*(const device float4*)(p + COLUMNS), float4(1.0f), *(const device float4*)p};
    }
    ulong at = ulong(i - held) * COLUMNS + j;
    float4 score = *(const device float4*)(s + at) + *(const device float4*)(ape + i % RATIO * COLUMNS + j);
    return Pool{score, float4(1.0f), *(const device float4*)(k + at)};
}
// ---- kernel step
threadgroup float partial[32];
threadgroup float4 others[PARTS > 1 ? (PARTS - 1) * 3 * (W / 4) : 1];
const uint columns = M * W, threads = W / 4 * PARTS;
uint group = threadgroup_position_in_grid.x, index = thread_index_in_threadgroup;
Span span = span_of<RATIO, M>(uint(start), uint(tokens));
if (group >= span.groups) {
    uint at = (group - span.groups) * threads + index;
    uint i = at / (columns / 4), j = at % (columns / 4) * 4;
    if (i < span.left) {
        Pool token = token4<RATIO, M * W>(k, s, frontier, ape, span.held, span.keep + i, j);
        device float* p = next + ulong(i) * 2 * columns + j;
        *(device float4*)p = token.sum;
        *(device float4*)(p + columns) = token.most;
    }
    return;
}
uint part = index / (W / 4), quad = index % (W / 4), j = 4 * quad;
uint own = span.before + group * RATIO;                       // first token of the group
uint skipped = M == 2 && own == 0 ? RATIO : 0;                // no group is before the first: no carry slots
Pool pool = Pool{float4(-INFINITY), float4(0.0f), float4(0.0f)};
for (uint x = skipped + part; x < M * RATIO; x += PARTS) {
    uint column = M == 2 && x >= RATIO ? W + j : j;           // the carry half of a token before, its own half after
    pool = merged(pool, token4<RATIO, M * W>(k, s, frontier, ape, span.held, own + x - (M - 1) * RATIO, column));
}
if (PARTS > 1) {
    if (part > 0) {
        threadgroup float4* mine = others + ((part - 1) * (W / 4) + quad) * 3;
        mine[0] = pool.most;
        mine[1] = pool.weight;
        mine[2] = pool.sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint p = 0; part == 0 && p < PARTS - 1; ++p) {
        const threadgroup float4* its = others + (p * (W / 4) + quad) * 3;
        pool = merged(pool, Pool{its[0], its[1], its[2]});
    }
}
float4 v = part == 0 ? pool.sum / pool.weight : float4(0.0f);
float scale = precise::rsqrt(threadgroup_sum(dot(v, v), partial, index, threads) / float(W) + eps);
if (part > 0) {
    return;
}
v = v * scale * ((const device float4*)norm)[quad];
if (j >= W - R) {
    uint p = group * (R / 2) + (j - (W - R)) / 2;
    v = rotated(v, float2(cos[p], cos[p + 1]), float2(sin[p], sin[p + 1]));
}
if (FP4) {
    store4_fp4<W>(rows, group, j, hadamard<W>(v, quad));
} else {
    store4<W, R>(rows, group, j, v);
}
