// Which compressed rows a query attends to, ratio-4 layers. Vectors are floats or packed FP4, as rows.h has them.
//
// queries: q[t, h] rotated on its last 2 P channels; if PACKED, transformed and rounded. Four channels a thread.
//
// scores: score[t, c] = scale sum_h weight[t, h] relu(q[t, h] . row[c]). A threadgroup of four simdgroups takes
// 32 COLUMNS rows, a quarter a simdgroup, which stay in registers as 8x8 matrices, and goes through its queries: 32
// heads in threadgroup memory, 8 at a time against the rows, so that [heads, rows] never leaves the core. PAGED: each
// query has rows of its own, in pages of whole tiles.
// FP4 vectors are staged as code * 2^(e - largest e of the vector), the power taken out: two bits of mantissa, so a
// half is exact unless the blocks of a vector differ by more than 2^13 (2^23 where the GPU keeps subnormal halves);
// then the small ones round off. Products of two are exact, sums are float.
//
// select: rows[t] = the k best of scores[t, 0 .. seen), ascending, ties to the lower row. One threadgroup of 1024
// threads a query; a simdgroup walks one run of consecutive rows. Scores are compared as unsigned integers of the same
// order. The k-th best lies in [low, high]: at first between the smallest of the threads' largest (1024 >= k scores
// reach it) and the largest of all. Counting in 2048 bins narrows that, 2048 times a pass, until it is one value or a
// bin ends at exactly k. Then each simdgroup counts what it will write, and writes it behind those before it.
#include "order.h"
#include "rows.h"

enum { THREADS = 1024, SIMDGROUPS = 32, BINS = 2048, BATCH = 8, TILE = 32 };

// Orders of rows base + lane, base + lane + 32, ...: loads that wait for nothing, for one query has a core to itself.
template <typename Scores> inline void load_orders(Scores scores, uint base, uint end, uint lane, thread uint* order) {
    for (uint j = 0; j < BATCH; ++j) {
        uint c = base + 32 * j + lane;
        uint found = order_of(scores[min(c, end - 1)]);
        order[j] = c < end ? found : 0u;
    }
}

// Sum over the simdgroups before this one of what each left in `sums`.
inline uint sum_before(const threadgroup uint* sums, uint simdgroup, uint lane) {
    return simd_sum(lane < simdgroup ? sums[lane] : 0u);
}

// Channels j ... j + 3 of a vector divided by a power of two, the same for all its channels and left in `scale`.
template <int W> inline float4 load4_unit(const device uint8_t* vectors, ulong row, uint j, thread float& scale) {
    const device uint8_t* exponents = vectors + row * uint(Fp4Row<W>::bytes) + uint(Fp4Row<W>::codes);
    uint largest = exponents[0];
    for (uint i = 1; i < W / 32; ++i) {
        largest = max(largest, uint(exponents[i]));
    }
    scale = e8m0(largest);
    int half_of = 126 + int(exponents[j / 32]) - int(largest);  // codes come doubled
    return float4(load4_fp4<W>(vectors, row, j)) * e8m0(uint(max(half_of, 0)));
}

template <int W> inline float4 load4_unit(const device float* vectors, ulong row, uint j, thread float& scale) {
    scale = 1.0f;
    return *(const device float4*)(vectors + row * uint(W) + j);
}

// Vectors first ... first + TILE - 1, those from `end` on 0, to rows of STRIDE in threadgroup memory. By 128 threads.
template <int W, int STRIDE, typename Vectors, typename Number>
inline void stage(Vectors vectors, ulong first, ulong end, threadgroup Number* tile, threadgroup float* scales,
                  uint index) {
    for (uint i = index; i < TILE * (W / 4); i += 128) {
        uint r = i / (W / 4), j = i % (W / 4) * 4;
        float scale = 0.0f;
        float4 v = first + r < end ? load4_unit<W>(vectors, first + r, j, scale) : float4(0.0f);
        for (uint n = 0; n < 4; ++n) {
            tile[r * STRIDE + j + n] = Number(v[n]);
        }
        if (j == 0) {
            scales[r] = scale;
        }
    }
}
// ---- kernel queries
uint index = thread_position_in_grid.x, j = index % (W / 4) * 4;
uint vector = min(index / (W / 4), uint(vectors) - 1);  // past the end the last one again, into rows that are cut off
ulong from = ulong(vector) * W + j;
float4 v = float4(q[from], q[from + 1], q[from + 2], q[from + 3]);
if (j >= W - 2 * P) {
    uint pair = vector / H * P + (j - (W - 2 * P)) / 2;
    v = rotated(v, float2(cosine[pair], cosine[pair + 1]), float2(sine[pair], sine[pair + 1]));
}
if (PACKED) {
    v = hadamard<W>(v, thread_index_in_simdgroup);
}
store4_fp4<W>(turned, index / (W / 4), j, v);
// ---- kernel scores
enum { STRIDE = W + 16 / sizeof(Number), OWN = 8 * COLUMNS };
threadgroup Number tile[TILE * STRIDE];
threadgroup float scales[TILE];
threadgroup float products[4 * 8 * OWN];
// The tile holds rows, then heads. Without 16 bytes more a row, the 8 rows of a matrix would share their banks.
uint index = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
uint simdgroup = simdgroup_index_in_threadgroup;
uint column = lane % OWN / 8, place = simdgroup * 8 + lane % 8;  // of the row whose score this lane sums, with others
ulong first = ulong(threadgroup_position_in_grid.x) * (TILE * COLUMNS);
uint t_first = threadgroup_position_in_grid.y * uint(queries), t_end = min(uint(tokens), t_first + uint(queries));
simdgroup_matrix<Number, 8, 8> row[COLUMNS][W / 8];  // transposed: channels down, rows across
float row_scale = scale;
#pragma unroll
for (uint n = 0; n < COLUMNS; ++n) {
    ulong from = first + n * TILE, left = from < ulong(count) ? ulong(count) - from : 0;
#if PAGED
    uint entry = uint(from) / uint(page_rows), page = left > 0 ? uint(pages[ulong(t_first) * uint(held) + entry]) : 0;
    from = ulong(page) * uint(page_rows) + uint(from) % uint(page_rows);
#endif
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<W, STRIDE>(rows, from, from + left, tile, scales, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    #pragma unroll
    for (uint j = 0; j < W / 8; ++j) {
        simdgroup_load(row[n][j], tile + simdgroup * 8 * STRIDE + j * 8, STRIDE, ulong2(0), true);
    }
    row_scale *= n == column ? scales[place] : 1.0f;
}
ulong c = first + column * TILE + place;
threadgroup float* product = products + simdgroup * 8 * OWN;
for (uint t = t_first; t < t_end; ++t) {
    float sum = 0.0f;
    for (uint h = 0; h < H; h += TILE) {
        ulong query = ulong(t) * H + h;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<W, STRIDE>(q, query, ulong(t + 1) * H, tile, scales, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint head = 0; head < TILE && h + head < H; head += 8) {
            simdgroup_matrix<float, 8, 8> dots[COLUMNS];
            for (uint n = 0; n < COLUMNS; ++n) {
                dots[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            }
            #pragma unroll  // in full, as in loading them: what is indexed at run time cannot stay in registers
            for (uint j = 0; j < W / 8; ++j) {
                simdgroup_matrix<Number, 8, 8> heads;
                simdgroup_load(heads, tile + head * STRIDE + j * 8, STRIDE);
                for (uint n = 0; n < COLUMNS; ++n) {
                    simdgroup_multiply_accumulate(dots[n], heads, row[n][j], dots[n]);
                }
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);  // the products before have been read
            for (uint n = 0; n < COLUMNS; ++n) {
                simdgroup_store(dots[n], product + n * 8, OWN);
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = lane / OWN; i < 8 && h + head + i < H; i += 32 / OWN) {
                float dot = max(product[i * OWN + lane % OWN], 0.0f);
                sum += dot * (scales[head + i] * weight[query + head + i]);
            }
        }
    }
    for (ushort d = OWN; d < 32; d *= 2) {
        sum += simd_shuffle_xor(sum, d);
    }
    if (lane < OWN && c < ulong(count)) {
        scores[ulong(t) * uint(count) + c] = sum * row_scale;
    }
}
// ---- kernel select
threadgroup atomic_uint counts[BINS];
threadgroup uint sums[SIMDGROUPS];
threadgroup uint ties[SIMDGROUPS];
threadgroup uint found[3];  // bin of the k-th best, scores in higher bins, scores in it
uint index = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
uint simdgroup = simdgroup_index_in_threadgroup;
size_t t = threadgroup_position_in_grid.x;
uint k = uint(count), seen = min(uint(width), uint(positions[t] + 1) / uint(ratio));
if (seen <= k) {  // all that are seen, then the lowest others
    for (uint i = index; i < k; i += THREADS) {
        rows[t * k + i] = int(i);
    }
    return;
}
uint begin = uint(ulong(seen) * simdgroup / SIMDGROUPS), end = uint(ulong(seen) * (simdgroup + 1) / SIMDGROUPS);
uint order[BATCH], best = 0;
for (uint base = begin; base < end; base += 32 * BATCH) {
    load_orders(scores + t * width, base, end, lane, order);
    for (uint j = 0; j < BATCH; ++j) {
        best = max(best, order[j]);
    }
}
uint least = simd_min(best), most = simd_max(best);
if (lane == 0) {
    sums[simdgroup] = least;
    ties[simdgroup] = most;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
uint low = simd_min(sums[lane]), high = simd_max(ties[lane]), above = 0;
low = k <= THREADS ? max(low, 1u) : 1u;  // 0 where a thread has no rows
while (low < high) {
    uint shift = uint(max(0, 21 - int(clz(high - low))));  // (high - low) >> shift < BINS
    for (uint i = index; i < BINS; i += THREADS) {
        atomic_store_explicit(&counts[i], 0, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint base = begin; base < end; base += 32 * BATCH) {
        load_orders(scores + t * width, base, end, lane, order);
        for (uint j = 0; j < BATCH; ++j) {
            uint bin = order[j] >= low && order[j] <= high ? (order[j] - low) >> shift : 0;
            if (bin > 0) {  // bin 0 is what the others leave over: its crowd of equal scores would all wait for one sum
                atomic_fetch_add_explicit(&counts[bin], 1, memory_order_relaxed);
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint bin = BINS - 1 - 2 * index;  // two bins a thread, from the highest down
    uint upper = atomic_load_explicit(&counts[bin], memory_order_relaxed);
    uint lower = atomic_load_explicit(&counts[bin - 1], memory_order_relaxed);
    uint higher = simd_prefix_exclusive_sum(upper + lower);
    if (lane == 31) {
        sums[simdgroup] = higher + upper + lower;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    higher += sum_before(sums, simdgroup, lane);
    uint needed = k - above;
    bool in_upper = higher < needed && needed <= higher + upper;
    bool in_lower = higher + upper < needed && (needed <= higher + upper + lower || bin == 1);
    if (in_upper || in_lower) {  // one thread
        found[0] = in_upper ? bin : bin - 1;
        found[1] = in_upper ? higher : higher + upper;
        found[2] = in_upper ? upper : lower;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    low += found[0] << shift;
    above += found[1];
    high = above + found[2] == k ? low : min(high, low + ((1u << shift) - 1));
}
uint quota = k - above;  // of the scores equal to low
uint greater = 0, equal = 0;
for (uint base = begin; base < end; base += 32 * BATCH) {
    load_orders(scores + t * width, base, end, lane, order);
    for (uint j = 0; j < BATCH; ++j) {
        greater += uint(order[j] > low);
        equal += uint(order[j] == low);
    }
}
greater = simd_sum(greater);
equal = simd_sum(equal);
threadgroup_barrier(mem_flags::mem_threadgroup);  // sums and ties have been read
if (lane == 0) {
    sums[simdgroup] = greater;
    ties[simdgroup] = equal;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
uint tied = sum_before(ties, simdgroup, lane);
uint written = sum_before(sums, simdgroup, lane) + min(tied, quota);
uint below = (1u << lane) - 1;  // lanes before this one
for (uint base = begin; base < end; base += 32 * BATCH) {
    load_orders(scores + t * width, base, end, lane, order);
    for (uint j = 0; j < BATCH; ++j) {
        uint equals = uint(ulong(simd_ballot(order[j] == low)));
        bool taken = order[j] > low || (order[j] == low && tied + popcount(equals & below) < quota);
        uint takes = uint(ulong(simd_ballot(taken)));
        if (taken) {
            rows[t * k + written + popcount(takes & below)] = int(base + 32 * j + lane);
        }
        tied += popcount(equals);
        written += popcount(takes);
    }
}
