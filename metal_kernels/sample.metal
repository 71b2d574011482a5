// One token of each row of logits [B, V]; ops/sample.py has the steps. A threadgroup a row, no sort.
//
// Tokens have one order, best first and of equal logits the lower id: that of 64-bit keys, the logit's order above, the
// id below. What top-k, min-p and top-p keep is a prefix of it, so they and the choice itself come down to one
// question: at which token does the running sum (of weights; of ones for top-k) pass a limit? `find` answers it: a span
// of keys is cut into eight parts, whose sums tell which of them holds the token, until so few tokens are left that
// each thread takes one and adds up those before it. The first cut is the same for all questions: a few multiples of
// the temperature below the best logit, where nearly all of the weight lies.
//
// Weights are whole multiples of 2^-40 of the best token's, so sums are exact and no order of adding moves the token.
#include "order.h"

enum { PARTS = 8, FEW = 512, SIMDGROUPS = FEW / 32, BATCH = 8 };
constant float first_cuts[PARTS - 1] = {0.5f, 1.0f, 2.0f, 3.0f, 5.0f, 8.0f, 14.0f};  // in temperatures

// Where a thread stands in its threadgroup.
struct Place {
    uint index, threads, simdgroup, lane;
};

// What weighs a logit.
struct Scale {
    float best, temperature, min_p;
};

// Keys in [low, high), how many tokens have them, and the sums over all tokens with keys above.
struct Span {
    ulong low, high, weight_before;
    uint count_before, count;
};

// Where a running sum of weights passes its limit: with that token included, and which it is.
struct Found {
    ulong sum;
    uint id;
};

// Running sums at the ends of PARTS parts, and last the sum of what min-p keeps.
struct Sums {
    threadgroup ulong* weight;
    threadgroup uint* count;
};

// What a question needs of threadgroup memory: sums of simdgroups and of all, then the few tokens left.
struct Room {
    Sums partial, total;
    threadgroup ulong* keys;
    threadgroup ulong* weights;
    threadgroup atomic_uint* used;
    threadgroup ulong* found;
};

inline float probability(float logit, Scale scale) {
    return logit == scale.best ? 1.0f : precise::exp((logit - scale.best) / scale.temperature);
}

inline ulong weight_of(float p) {
    return p > 0.0f ? ulong(p * 1099511627776.0f) : 0ul;
}

template <int BITS> inline ulong key_of(float logit, uint id) {
    return ulong(order_of(logit)) << BITS | ((1ul << BITS) - 1 - id);
}

// Logits base + index, base + index + threads, ...: loads that wait for nothing, for there is one core to wait on.
// A GPU compares subnormal numbers as zeros, and keys are made of bits: + 0 makes of both the same.
template <int V, typename Logits> inline void load(Logits logits, uint base, Place at, thread float* x) {
    for (uint i = 0; i < BATCH; ++i) {
        uint id = base + i * at.threads + at.index;
        float logit = logits[min(id, uint(V) - 1)];
        x[i] = id < V ? logit + 0.0f : -INFINITY;
    }
}

// Exact below 2^52: V weights of 2^40 at most, a thread's share of them.
inline ulong simd_total(ulong x) {
    return (ulong(simd_sum(uint(x >> 26))) << 26) + simd_sum(uint(x) & 0x3FFFFFFu);
}

// What all threads have, left in room.total.
inline void add_up(const thread ulong* weight, const thread uint* count, Sums total, Room room, Place at) {
    for (uint j = 0; j <= PARTS; ++j) {
        ulong w = simd_total(weight[j]);
        uint n = simd_sum(count[j]);
        if (at.lane == 0) {
            room.partial.weight[at.simdgroup * (PARTS + 1) + j] = w;
            room.partial.count[at.simdgroup * (PARTS + 1) + j] = n;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.index <= PARTS) {
        ulong w = 0;
        uint n = 0;
        for (uint s = 0; s < at.threads / 32; ++s) {
            w += room.partial.weight[s * (PARTS + 1) + at.index];
            n += room.partial.count[s * (PARTS + 1) + at.index];
        }
        total.weight[at.index] = w;
        total.count[at.index] = n;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Sums over the tokens of [cuts[j], high) for each j, cuts descending.
template <int V, int BITS, typename Logits>
inline void sum_parts(Logits logits, const thread ulong* cuts, ulong high, Scale scale, Sums total, Room room,
                      Place at) {
    ulong weight[PARTS + 1] = {};
    uint count[PARTS + 1] = {};
    for (uint base = 0; base < V; base += BATCH * at.threads) {
        float x[BATCH];
        load<V>(logits, base, at, x);
        for (uint i = 0; i < BATCH; ++i) {
            uint id = base + i * at.threads + at.index;
            ulong key = key_of<BITS>(x[i], id);
            if (id < V && key < high && key >= cuts[PARTS - 1]) {
                float p = probability(x[i], scale);
                ulong w = weight_of(p);
                for (uint j = 0; j < PARTS; ++j) {
                    weight[j] += key >= cuts[j] ? w : 0ul;
                    count[j] += key >= cuts[j];
                }
                weight[PARTS] += p >= scale.min_p ? w : 0ul;
            }
        }
    }
    add_up(weight, count, total, room, at);
}

// The part of `span` in which the running sum passes the limit.
inline Span part_of(Span span, const thread ulong* cuts, Sums sums, ulong limit, bool by_count) {
    Span part = {cuts[0], span.high, span.weight_before, span.count_before, sums.count[0]};
    for (uint j = 1; j < PARTS; ++j) {
        ulong weight = span.weight_before + sums.weight[j - 1];
        uint count = span.count_before + sums.count[j - 1];
        if ((by_count ? ulong(count) : weight) <= limit) {
            part = {cuts[j], cuts[j - 1], weight, count, sums.count[j] - sums.count[j - 1]};
        }
    }
    return part;
}

// The token of a span of FEW at most: each thread takes one and adds up those before it.
template <int V, int BITS, typename Logits>
inline Found find_in(Logits logits, Span span, Scale scale, ulong limit, bool by_count, Room room, Place at) {
    if (at.index == 0) {
        atomic_store_explicit(room.used, 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint base = 0; base < V; base += BATCH * at.threads) {
        float x[BATCH];
        load<V>(logits, base, at, x);
        for (uint i = 0; i < BATCH; ++i) {
            uint id = base + i * at.threads + at.index;
            ulong key = key_of<BITS>(x[i], id);
            if (id < V && key < span.high && key >= span.low) {
                uint slot = atomic_fetch_add_explicit(room.used, 1u, memory_order_relaxed);
                room.keys[slot] = key;
                room.weights[slot] = weight_of(probability(x[i], scale));
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.index < span.count) {
        ulong key = room.keys[at.index], own = room.weights[at.index], weight = span.weight_before;
        uint count = span.count_before;
        for (uint j = 0; j < span.count; ++j) {
            weight += room.keys[j] > key ? room.weights[j] : 0ul;
            count += room.keys[j] > key;
        }
        ulong before = by_count ? ulong(count) : weight;
        if (before <= limit && limit < before + (by_count ? 1ul : own)) {
            room.found[0] = weight + own;
            room.found[1] = (1ul << BITS) - 1 - (key & ((1ul << BITS) - 1));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return {room.found[0], uint(room.found[1])};
}

// The first cut, under the best logit.
template <int BITS> inline void cut_first(Scale scale, thread ulong* cuts) {
    for (uint j = 0; j < PARTS - 1; ++j) {
        cuts[j] = ulong(order_of(scale.best - scale.temperature * first_cuts[j])) << BITS;
    }
    cuts[PARTS - 1] = 0;
}

// At which token the running sum first is above `limit`, which the sum over all tokens is.
template <int V, int BITS, typename Logits>
inline Found find(Logits logits, Scale scale, ulong limit, bool by_count, Sums first, Room room, Place at) {
    ulong cuts[PARTS];
    cut_first<BITS>(scale, cuts);
    Span span = {0, key_of<BITS>(scale.best, 0) + 1, 0, 0, V};
    span = part_of(span, cuts, first, limit, by_count);
    while (span.count > FEW) {
        for (uint j = 0; j < PARTS; ++j) {
            cuts[j] = j + 1 < PARTS ? span.high - (span.high - span.low) / PARTS * (j + 1) : span.low;
        }
        sum_parts<V, BITS>(logits, cuts, span.high, scale, room.total, room, at);
        span = part_of(span, cuts, room.total, limit, by_count);
    }
    return find_in<V, BITS>(logits, span, scale, limit, by_count, room, at);
}

// The largest logit; `largest` has room for one of each simdgroup.
template <int V, typename Logits> inline float best_of(Logits logits, threadgroup float* largest, Place at) {
    float best = -INFINITY;
    for (uint base = 0; base < V; base += BATCH * at.threads) {
        float x[BATCH];
        load<V>(logits, base, at, x);
        for (uint i = 0; i < BATCH; ++i) {
            best = x[i] > best ? x[i] : best;
        }
    }
    best = simd_max(best);
    if (at.lane == 0) {
        largest[at.simdgroup] = best;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = 0; s < at.threads / 32; ++s) {
        best = max(best, largest[s]);
    }
    return best;
}
// ---- kernel choose
threadgroup ulong partial_weight[SIMDGROUPS * (PARTS + 1)];
threadgroup uint partial_count[SIMDGROUPS * (PARTS + 1)];
threadgroup ulong total_weight[PARTS + 1];
threadgroup uint total_count[PARTS + 1];
threadgroup ulong first_weight[PARTS + 1];
threadgroup uint first_count[PARTS + 1];
threadgroup ulong keys[FEW];
threadgroup ulong weights[FEW];
threadgroup ulong found[2];
threadgroup float largest[SIMDGROUPS];
threadgroup atomic_uint used;
Place at = {thread_index_in_threadgroup, threads_per_threadgroup.x, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup};
Room room = {{partial_weight, partial_count}, {total_weight, total_count}, keys, weights, &used, found};
Sums first = {first_weight, first_count};

uint row = threadgroup_position_in_grid.x;
auto mine = logits + ulong(row) * V;
bool greedy = !(temperature[row] > 0.0f && top_p[row] > 0.0f);
float heat = greedy ? 1.0f : clamp(temperature[row], 1e-30f, 1e30f);
Scale scale = {best_of<V>(mine, largest, at), heat, min_p[row]};
ulong cuts[PARTS];
cut_first<BITS>(scale, cuts);
sum_parts<V, BITS>(mine, cuts, key_of<BITS>(scale.best, 0) + 1, scale, first, room, at);
ulong total = first.weight[PARTS - 1], likely = first.weight[PARTS];
uint id = 0;
if (total > 0) {   // without a finite logit there is none
    ulong target = 0;
    if (!greedy) {
        if (top_k[row] > 0 && top_k[row] < V) {
            total = find<V, BITS>(mine, scale, ulong(top_k[row]) - 1, true, first, room, at).sum;
        }
        ulong kept = max(min(total, likely), 1ul);
        if (top_p[row] < 1.0f) {
            ulong enough = max(ulong(float(total) * top_p[row]), 1ul);
            kept = min(kept, find<V, BITS>(mine, scale, enough - 1, false, first, room, at).sum);
        }
        target = min(ulong(float(kept) * uniform[row]), kept - 1);
    }
    id = find<V, BITS>(mine, scale, target, false, first, room, at).id;
}
if (at.index == 0) {
    tokens[row] = int(id);
}
