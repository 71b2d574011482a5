// Products with experts. Pair p = t SLOTS + s is token t's slot s. `mid` has WIDTH rows a token: one for each slot,
// then one for the shared expert if there is one.
//
//   gate_up, down: decode, at most 8 tokens. The weights of an expert that several tokens select are read once, for all
//     of them; what a token does not select costs it nothing.
//   group, gate_up_tiles, down_tiles, add_slots: prefill. Pairs are sorted by expert; a tile (tiles.h) is up to BM
//     pairs of one expert. Tiles of the shared expert, all tokens in turn, come last. Neighbouring threadgroups have
//     the same tile and other rows: most experts have one tile, so vectors are what the cache can give again.

#include "blocks.h"
#include "matvec.h"
#include "tiles.h"

// ---- decode

// Which slots of the tokens go along with `pair` when its expert is read: nibble t is token t's slot, 15 for none. All
// are 15 if an earlier token leads. An expert that a token names twice is read twice: r-th mentions go with r-th
// mentions. Ids is a pointer type, for few ids are `constant`.
template <int SLOTS, int M, typename Ids> inline uint takers(Ids selected, uint tokens, uint pair) {
    int expert = selected[pair];
    uint mention = 0, taken = 0xFFFFFFFF;
    for (uint s = pair / SLOTS * SLOTS; s < pair; ++s) {
        mention += selected[s] == expert ? 1 : 0;
    }
    for (uint t = 0; t < tokens; ++t) {
        uint before = 0;
        for (uint s = 0; s < SLOTS; ++s) {
            if (selected[t * SLOTS + s] == expert && before++ == mention) {
                taken ^= (15 ^ s) << (4 * t);
            }
        }
        if (t < pair / SLOTS && (taken >> (4 * t) & 15) != 15) {
            return 0xFFFFFFFF;
        }
    }
    return taken;
}

// Every token takes slot SLOTS, the shared expert's.
template <int SLOTS> inline uint all_take(uint tokens) {
    uint taken = 0xFFFFFFFF;
    for (uint t = 0; t < tokens; ++t) {
        taken ^= uint(15 ^ SLOTS) << (4 * t);
    }
    return taken;
}

inline uint slot_of(uint taken, uint t) {
    return taken >> (4 * t) & 15;
}

// Bit t: token t goes along.
template <int M> inline uint wanted(uint taken) {
    uint bits = 0;
    UNROLL for (uint t = 0; t < M; ++t) {
        bits |= uint(slot_of(taken, t) != 15) << t;
    }
    return bits;
}

// rows[r] = row `first` + r of a matrix; past its end the last row, whose products are not to be used.
template <int KIND, int ROWS>
inline void rows_at(const device uint8_t* matrix, uint first, uint count, uint K, const device uint8_t* thread* rows) {
    UNROLL for (uint r = 0; r < ROWS; ++r) {
        rows[r] = matrix + min(first + r, count - 1) * row_bytes<KIND>(K);
    }
}

// sums[0 ... ROWS M) of gate, then as many of up.
template <int KIND, int ROWS, int M>
inline void gate_up_products(const device uint8_t* gate, const device uint8_t* up, uint first, uint F, uint D,
                             const device float* const thread* vectors, uint taken, uint lane,
                             const threadgroup ulong* codebook, thread float* sums) {
    const device uint8_t* rows[2 * ROWS];
    rows_at<KIND, ROWS>(gate, first, F, D, rows);
    rows_at<KIND, ROWS>(up, first, F, D, rows + ROWS);
    add_products<KIND, 2 * ROWS, M>(rows, vectors, wanted<M>(taken), D, lane, 32, codebook, sums);
}

template <int KIND, int ROWS, int M, int WIDTH>
inline void down_products(const device uint8_t* down, uint first, uint D, uint F, const device float* mid, uint taken,
                          uint lane, const threadgroup ulong* codebook, thread float* sums) {
    const device uint8_t* rows[ROWS];
    const device float* vectors[M];
    rows_at<KIND, ROWS>(down, first, D, F, rows);
    UNROLL for (uint t = 0; t < M; ++t) {
        uint slot = slot_of(taken, t);
        vectors[t] = mid + (slot == 15 ? 0 : t * WIDTH + slot) * F;
    }
    add_products<KIND, ROWS, M>(rows, vectors, wanted<M>(taken), F, lane, 32, codebook, sums);
}

// silu(min(gate, limit)) * clamp(up, -limit, limit). Compared, for min and clamp would make a number of NaN and hide
// that weights are damaged.
inline float swiglu(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1 + precise::exp(-gate)) * up;
}

// ---- prefill

// Row of `mid` for vector i of a tile, -1 past its last. The first `tiles` tiles are the table's. Table is a pointer
// type, for a small table is `constant`.
template <int SLOTS, int WIDTH, int BM, typename Table>
inline int row_of(const device int* order, Table table, uint tile, uint tiles, uint tokens, uint i) {
    if (tile >= tiles) {
        uint t = (tile - tiles) * BM + i;
        return t < tokens ? int(t * WIDTH + SLOTS) : -1;
    }
    if (i >= uint(table[3 * tile + 2])) {
        return -1;
    }
    uint pair = order[table[3 * tile + 1] + i];
    return int(pair / SLOTS * WIDTH + pair % SLOTS);
}

// How many vectors a tile has.
template <int BM, typename Table> inline uint count_of(Table table, uint tile, uint tiles, uint tokens) {
    return tile < tiles ? uint(table[3 * tile + 2]) : min(uint(BM), tokens - (tile - tiles) * BM);
}

// ---- kernel gate_up
// mid[t, s] = weight[t, s] * swiglu(gate[e] x[t], up[e] x[t]), e = selected[t, s]; mid[t, SLOTS] the same of the shared
// expert.
// A simdgroup computes ROWS values of a pair's row, for all tokens that take its expert; the shared expert, whose rows
// are the longest, comes first.
const int CODED = KIND == KIND_IQ2_XXS ? KIND : SHARED_KIND, WIDTH = SLOTS + SHARED;
uint lane = thread_index_in_simdgroup, y = threadgroup_position_in_grid.y;
threadgroup ulong codebook[CODED == KIND_IQ2_XXS ? 256 : 1];
bool common = SHARED && y == 0;
uint taken = common ? all_take<SLOTS>(tokens) : takers<SLOTS, M>(selected, tokens, y - SHARED);
if (taken == 0xFFFFFFFF) {
    return;
}
load_codebook<CODED>(codebook, thread_index_in_threadgroup, threads_per_threadgroup.x);
threadgroup_barrier(mem_flags::mem_threadgroup);
uint first = (threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup) * ROWS;
const device float* vectors[M];
UNROLL for (uint t = 0; t < M; ++t) {
    vectors[t] = x + t * D;
}
float sums[2 * ROWS * M] = {};
if (common) {
    gate_up_products<SHARED_KIND, ROWS, M>(shared_gate, shared_up, first, F, D, vectors, taken, lane, codebook, sums);
} else {
    ulong matrix = ulong(selected[y - SHARED]) * F * row_bytes<KIND>(D);
    gate_up_products<KIND, ROWS, M>(gate + matrix, up + matrix, first, F, D, vectors, taken, lane, codebook, sums);
}
UNROLL for (uint r = 0; r < ROWS; ++r) {
    UNROLL for (uint t = 0; t < M; ++t) {
        uint slot = slot_of(taken, t);
        if (slot != 15) {
            float g = simd_sum(sums[r * M + t]), u = simd_sum(sums[(ROWS + r) * M + t]);
            if (lane == 0 && first + r < F) {
                mid[(t * WIDTH + slot) * F + first + r] = (common ? 1 : weight[t * SLOTS + slot]) * swiglu(g, u, limit);
            }
        }
    }
}
// ---- kernel down
// y[t] = sum_s down[selected[t, s]] mid[t, s] + shared mid[t, SLOTS].
// A simdgroup computes ROWS values for every token, one expert after the other, so that nothing is left to add up.
const int CODED = KIND == KIND_IQ2_XXS ? KIND : SHARED_KIND, WIDTH = SLOTS + SHARED;
uint lane = thread_index_in_simdgroup;
threadgroup ulong codebook[CODED == KIND_IQ2_XXS ? 256 : 1];
threadgroup uint taken[M * SLOTS];
load_codebook<CODED>(codebook, thread_index_in_threadgroup, threads_per_threadgroup.x);
for (uint p = thread_index_in_threadgroup; p < uint(tokens) * SLOTS; p += threads_per_threadgroup.x) {
    taken[p] = takers<SLOTS, M>(selected, tokens, p);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
uint first = (threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup) * ROWS;
float sums[ROWS * M] = {};
if (SHARED) {
    down_products<SHARED_KIND, ROWS, M, WIDTH>(shared, first, D, F, mid, all_take<SLOTS>(tokens), lane, codebook, sums);
}
for (uint p = 0; p < uint(tokens) * SLOTS; ++p) {
    if (taken[p] != 0xFFFFFFFF) {
        const device uint8_t* matrix = down + ulong(selected[p]) * D * row_bytes<KIND>(F);
        down_products<KIND, ROWS, M, WIDTH>(matrix, first, D, F, mid, taken[p], lane, codebook, sums);
    }
}
UNROLL for (uint r = 0; r < ROWS; ++r) {
    UNROLL for (uint t = 0; t < M; ++t) {
        float sum = simd_sum(sums[r * M + t]);
        if (lane == 0 && t < uint(tokens) && first + r < D) {
            y[t * D + first + r] = sum;
        }
    }
}
// ---- kernel gate_up_tiles
// As gate_up. Threadgroup (x, y) does tile y with the 32 values from 32 x on: gate's rows and up's are a tile's two
// halves, so that simdgroups 2 h and 2 h + 1 hold what belongs together.
const int CODED = KIND == KIND_IQ2_XXS ? KIND : SHARED_KIND, WIDTH = SLOTS + SHARED, HALF = TILE_ROWS / 2;
uint index = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
threadgroup ulong codebook[CODED == KIND_IQ2_XXS ? 256 : 1];
threadgroup int list[BM];
threadgroup int token[BM];
threadgroup float share[BM];
threadgroup vec<S, 4> a[BM * Line<S>::quads];
threadgroup vec<S, 4> b[TILE_ROWS * Line<S>::quads];
threadgroup float strips[4 * 256];
uint tile = threadgroup_position_in_grid.y, n = threadgroup_position_in_grid.x * HALF;
uint count = count_of<BM>(table, tile, tiles, tokens);
if (count == 0) {
    return;
}
load_codebook<CODED>(codebook, index, TILE_THREADS);
if (index < BM) {
    int row = row_of<SLOTS, WIDTH, BM>(order, table, tile, tiles, tokens, index);
    list[index] = row;
    token[index] = row < 0 ? -1 : row / WIDTH;
    share[index] = row < 0 || tile >= uint(tiles) ? 1 : weight[row / WIDTH * SLOTS + row % WIDTH];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_matrix<float, 8, 8> sums[BM / 4];
if (tile >= uint(tiles)) {
    HalfRows low = {shared_gate, n, F}, high = {shared_up, n, F};
    multiply_tile<S, SHARED_KIND, BM>(x, D, D, token, count, low, high, codebook, a, b, index, sums);
} else {
    ulong matrix = ulong(table[3 * tile]) * F * row_bytes<KIND>(D);
    HalfRows low = {gate + matrix, n, F}, high = {up + matrix, n, F};
    multiply_tile<S, KIND, BM>(x, D, D, token, count, low, high, codebook, a, b, index, sums);
}
UNROLL for (uint band = 0; band < BM / 16; ++band) {
    spread(sums + band * 4, strips + simd * 256);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const threadgroup float* gates = strips + simd / 2 * 512;
    for (uint j = simd % 2 * 4; j < simd % 2 * 4 + 4; ++j) {
        uint vector = simd / 2 * (BM / 2) + band * 8 + j;
        if (vector < count && n + lane < F) {
            float value = swiglu(gates[j * 32 + lane], gates[256 + j * 32 + lane], limit);
            mid[ulong(list[vector]) * F + n + lane] = share[vector] * value;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
// ---- kernel down_tiles
// parts[t, s] = down[selected[t, s]] mid[t, s], and the same of the shared expert. Threadgroup (x, y) does tile y with
// the 64 rows from 64 x on.
const int CODED = KIND == KIND_IQ2_XXS ? KIND : SHARED_KIND, WIDTH = SLOTS + SHARED;
uint index = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
threadgroup ulong codebook[CODED == KIND_IQ2_XXS ? 256 : 1];
threadgroup int list[BM];
threadgroup vec<S, 4> a[BM * Line<S>::quads];
threadgroup vec<S, 4> b[TILE_ROWS * Line<S>::quads];
threadgroup float strips[4 * 256];
uint tile = threadgroup_position_in_grid.y, n = threadgroup_position_in_grid.x * TILE_ROWS;
uint count = count_of<BM>(table, tile, tiles, tokens);
if (count == 0) {
    return;
}
load_codebook<CODED>(codebook, index, TILE_THREADS);
if (index < BM) {
    list[index] = row_of<SLOTS, WIDTH, BM>(order, table, tile, tiles, tokens, index);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_matrix<float, 8, 8> sums[BM / 4];
if (tile >= uint(tiles)) {
    HalfRows low = {shared, n, D}, high = {shared, n + TILE_ROWS / 2, D};
    multiply_tile<S, SHARED_KIND, BM>(mid, F, F, list, count, low, high, codebook, a, b, index, sums);
} else {
    const device uint8_t* matrix = down + ulong(table[3 * tile]) * D * row_bytes<KIND>(F);
    HalfRows low = {matrix, n, D}, high = {matrix, n + TILE_ROWS / 2, D};
    multiply_tile<S, KIND, BM>(mid, F, F, list, count, low, high, codebook, a, b, index, sums);
}
store<BM>(sums, parts, D, list, n, D, strips + simd * 256, simd, lane);
// ---- kernel add_slots
// y[t] = sum_s parts[t, s]. One thread adds up one value; T D is less than 2^32.
uint i = thread_position_in_grid.x;
if (i < uint(tokens) * D) {
    const device float* part = parts + ulong(i / D) * WIDTH * D + i % D;
    float sum = 0;
    for (uint s = 0; s < WIDTH; ++s) {
        sum += part[s * D];
    }
    y[i] = sum;
}
// ---- kernel group
// order = the pairs sorted by expert, ascending within an expert; table[i] = expert, first place in order and count of
// pairs of tile i: an expert's tiles of at most TILE pairs follow one another, tiles past the last have no pairs.
// One threadgroup; a thread owns an expert and walks all pairs, so that no order depends on timing. Pairs are few
// (12288 at 2048 tokens) and all threads read the same one.
uint index = thread_index_in_threadgroup, threads = threads_per_threadgroup.x;
threadgroup atomic_uint counts[E];
for (uint e = index; e < uint(E); e += threads) {
    atomic_store_explicit(&counts[e], 0, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint p = index; p < uint(pairs); p += threads) {
    atomic_fetch_add_explicit(&counts[selected[p]], 1, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint e = index; e < uint(E); e += threads) {
    uint first = 0, tile = 0;
    for (uint i = 0; i < e; ++i) {
        uint count = atomic_load_explicit(&counts[i], memory_order_relaxed);
        first += count;
        tile += (count + TILE - 1) / TILE;
    }
    uint place = first;
    for (uint p = 0; p < uint(pairs); ++p) {
        if (uint(selected[p]) == e) {
            order[place++] = int(p);
        }
    }
    for (; first < place; first += TILE, ++tile) {
        table[3 * tile] = int(e);
        table[3 * tile + 1] = int(first);
        table[3 * tile + 2] = int(min(uint(TILE), place - first));
    }
    for (; e == uint(E) - 1 && tile < uint(tiles); ++tile) {
        table[3 * tile] = 0;
        table[3 * tile + 1] = 0;
        table[3 * tile + 2] = 0;
    }
}
