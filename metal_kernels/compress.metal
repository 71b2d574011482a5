// row = pack(rotate(rms(pooled) * norm)) of every group that is completed, and the tokens that are still needed.
// pooled[j] = sum_x softmax_x(s[x][j]) k[x][j] over the SLOTS = M RATIO slots of a group.
//
// A threadgroup has W / 4 * PARTS threads. One makes a row: a thread pools four neighbouring channels of every PARTS-th
// slot, running maximum and sums in registers; the parts meet in threadgroup memory, and the first part's threads,
// whole SIMD-groups, finish the row, for its norm needs all W channels. Further threadgroups write the next frontier,
// four columns of a token a thread.
//
// step: a chunk of one sequence. Tokens are numbered from the first that the frontier holds.
//
// token: a token of each of several sequences, y the sequence. The frontier is a ring, of SLOTS places. Those of tokens
// that are no longer needed are not written, and may hold anything.
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

// A token that comes, columns j ... j + 3: its score still lacks the bias of its place.
inline Pool fresh4(const device float* k, const device float* s, const device float* ape, ulong at, uint ape_at) {
    return Pool{*(const device float4*)(s + at) + *(const device float4*)(ape + ape_at), float4(1.0f),
                *(const device float4*)(k + at)};
}

// A token that the frontier holds, columns j ... j + 3.
template <int COLUMNS> inline Pool held4(const device float* frontier, ulong i, uint j) {
    const device float* p = frontier + i * 2 * COLUMNS + j;
    return Pool{*(const device float4*)(p + COLUMNS), float4(1.0f), *(const device float4*)p};
}

template <int COLUMNS> inline void keep4(device float* frontier, ulong i, uint j, Pool token) {
    device float* p = frontier + i * 2 * COLUMNS + j;
    *(device float4*)p = token.sum;
    *(device float4*)(p + COLUMNS) = token.most;
}

// Columns j ... j + 3 of token i as a pool of one: the score is s with the bias of its place, the value k. Token 0 is
// the first of its group.
template <int RATIO, int COLUMNS> inline Pool token4(const device float* k, const device float* s,
                                                     const device float* frontier, const device float* ape,
                                                     uint held, uint i, uint j) {
    return i < held ? held4<COLUMNS>(frontier, i, j)
                    : fresh4(k, s, ape, ulong(i - held) * COLUMNS + j, i % RATIO * COLUMNS + j);
}

// From what each thread has pooled to row `row` of rows. The tables are those of the group's first position.
template <int W, int R, int PARTS, bool FP4, typename ROW>
inline void finish(Pool pool, threadgroup float4* others, threadgroup float* partial, uint index, float eps,
                   const device float* norm, const device float* cos, const device float* sin, device ROW* rows,
                   ulong row) {
    uint part = index / (W / 4), quad = index % (W / 4), j = 4 * quad;
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
    float scale = precise::rsqrt(threadgroup_sum(dot(v, v), partial, index, W / 4 * PARTS) / float(W) + eps);
    if (part > 0) {
        return;
    }
    v = v * scale * ((const device float4*)norm)[quad];
    if (j >= W - R) {
        uint p = (j - (W - R)) / 2;
        v = rotated(v, float2(cos[p], cos[p + 1]), float2(sin[p], sin[p + 1]));
    }
    if (FP4) {
        store4_fp4<W>(rows, row, j, hadamard<W>(v, quad));
    } else {
        store4<W, R>(rows, row, j, v);
    }
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
        keep4<M * W>(next, i, j, token4<RATIO, M * W>(k, s, frontier, ape, span.held, span.keep + i, j));
    }
    return;
}
uint part = index / (W / 4), j = index % (W / 4) * 4;
uint own = span.before + group * RATIO;                       // first token of the group
uint skipped = M == 2 && own == 0 ? RATIO : 0;                // no group is before the first: no carry slots
Pool pool = Pool{float4(-INFINITY), float4(0.0f), float4(0.0f)};
for (uint x = skipped + part; x < M * RATIO; x += PARTS) {
    uint column = M == 2 && x >= RATIO ? W + j : j;           // the carry half of a token before, its own half after
    pool = merged(pool, token4<RATIO, M * W>(k, s, frontier, ape, span.held, own + x - (M - 1) * RATIO, column));
}
finish<W, R, PARTS, FP4>(pool, others, partial, index, eps, norm, cos + group * (R / 2), sin + group * (R / 2), rows,
                         group);
// ---- kernel token
threadgroup float partial[32];
threadgroup float4 others[PARTS > 1 ? (PARTS - 1) * 3 * (W / 4) : 1];
const uint columns = M * W, slots = M * RATIO, threads = W / 4 * PARTS;
uint index = thread_index_in_threadgroup, b = threadgroup_position_in_grid.y, position = uint(positions[b]);
uint here = position % slots, bias = position % RATIO * columns;
ulong token = ulong(b) * columns, ring = ulong(b) * slots;
if (threadgroup_position_in_grid.x > 0) {
    uint at = (threadgroup_position_in_grid.x - 1) * threads + index;
    uint i = at / (columns / 4), j = at % (columns / 4) * 4;
    uint age = (here + slots - i) % slots;      // tokens from place i to the one that comes
    if (i < slots && age < (position + 1) % RATIO + (M - 1) * RATIO) {
        keep4<M * W>(next, ring + i, j, i == here ? fresh4(k, s, ape, token + j, bias + j)
                                                  : held4<M * W>(frontiers, ring + i, j));
    }
    return;
}
if ((position + 1) % RATIO > 0) {
    for (uint i = index; i < ROW; i += threads) {
        rows[ulong(b) * ROW + i] = 0;
    }
    return;
}
uint part = index / (W / 4), j = index % (W / 4) * 4;
uint first = position + 1 - slots;                            // token of slot 0; before the first of all it wraps
uint skipped = position < slots - 1 ? RATIO : 0;              // no group is before the first: no carry slots
Pool pool = Pool{float4(-INFINITY), float4(0.0f), float4(0.0f)};
for (uint x = skipped + part; x < slots; x += PARTS) {
    uint i = (first + x) % slots, column = M == 2 && x >= RATIO ? W + j : j;
    pool = merged(pool, i == here ? fresh4(k, s, ape, token + column, bias + column)
                                  : held4<M * W>(frontiers, ring + i, column));
}
finish<W, R, PARTS, FP4>(pool, others, partial, index, eps, norm, cos + b * (R / 2), sin + b * (R / 2), rows, b);
