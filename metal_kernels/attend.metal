// o[t, h] = sum_k exp(z_k - m) key_k / (exp(sink[h] - m) + sum_k exp(z_k - m)), z_k = q[t, h] . key_k / sqrt(D).
//
// All heads of a token share its keys, so they are the rows of a matrix: both products are of 8x8 matrices, in decode
// too. A threadgroup takes a token, 8 or 16 heads and a slice of the token's keys, 32 keys at a time. Of its D / 64
// SIMD-groups each owns 64 channels of everything: of q and o, which stay in registers as matrices, and of the keys. It
// alone reads and decodes its channels of a key (one block of codes with its exponent, or the rotary tail), and the
// matrices that it makes of them serve twice, as keys and as values. A score needs all channels: each SIMD-group stores
// what its own add to it. After a barrier a SIMD-group takes a head and a lane a key, for the running maximum and the
// weights; after another all go on with their channels of o.
//
// STEP is a token of each of several sequences: t is the sequence, its window a ring, its compressed rows in pages of
// PAGE_ROWS of a pool. Sequences differ in keys, and slices of short ones may be empty.
//
// The maximum begins as the sink, so it is a number before any key, and a slice of small scores ends with a small sum.
// One slice is finished here; the sums of more go to scratch for `combine`.
//
// Traffic. A packed key of 584 bytes is read by each threadgroup of its token: for 64 heads 8 in decode, 4 in prefill.
// They run side by side, so memory gives it once and the cache the rest: 16 heads do 16384 multiply-adds on it, 28 a
// byte, and a chip of 7 T/s would ask its cache for 250 GB/s at its peak. To share keys between neighbouring tokens
// would save most of that for the window, a fifth of the keys of a token that chose 512, and cost the registers of
// another token's q and o, more than half of all. Decoding is some 5 instructions a channel, for 32 multiply-adds.
// Decode splits the 128 keys of a window over 4 slices: q is read 4 times, and 4 sums are written and read, 131 KB each
// time; with keys and o 2.3 MB a layer, 1% of the weights that a token reads.
#include "rows.h"

#define UNROLL _Pragma("clang loop unroll(full)")  // matrices stay in registers only if their indices are constants

// Pitches spread the 8 rows of a matrix over all banks. A region holds 8 staged rows of floats, or scores of 16 heads.
enum { BLOCK = 32, KEY_PITCH = 72, SCORE_PITCH = 36, REGION = 8 * KEY_PITCH };

inline void put4(threadgroup float* to, float4 v) {
    *(threadgroup float4*)to = v;
}

inline void put4(threadgroup half* to, float4 v) {
    *(threadgroup half4*)to = half4(v);
}

// Keys are numbered through: rows of all windows, then compressed ones; -1 is none, a key of zeros.
template <int D, int R, typename ROW> inline float4 key4(const device ROW* window, const device ROW* rows,
                                                         int window_rows, int key, uint j) {
    if (key < 0) {
        return float4(0.0f);
    }
    return key < window_rows ? load4<D, R>(window, ulong(key), j) : load4<D, R>(rows, ulong(key - window_rows), j);
}

// Channels j ... j + 3 of a head, by the angles of its token if they are rotary; back for direction = -1.
template <int D, int R> inline float4 turned(float4 v, uint j, const device float* cos_row, const device float* sin_row,
                                             float direction) {
    if (j < uint(D - R)) {
        return v;
    }
    uint pair = (j - uint(D - R)) / 2;
    return rotated(v, *(const device float2*)(cos_row + pair), *(const device float2*)(sin_row + pair) * direction);
}

// Eight 8x8 matrices from 8 staged rows of 64 channels.
template <typename TILE> inline void take(thread simdgroup_matrix<TILE, 8, 8>* tiles, const threadgroup TILE* stage,
                                          bool transposed) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (ushort c = 0; c < 8; ++c) {
        simdgroup_load(tiles[c], stage + 8 * c, KEY_PITCH, ulong2(0, 0), transposed);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// What 64 channels add to the scores of 8 heads and 8 keys, stored a head a row.
template <typename TILE> inline void score(thread simdgroup_matrix<TILE, 8, 8>* query,
                                           thread simdgroup_matrix<TILE, 8, 8>* keys, threadgroup float* to) {
    simdgroup_matrix<float, 8, 8> z = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    UNROLL for (ushort c = 0; c < 8; ++c) {
        simdgroup_multiply_accumulate(z, keys[c], query[c], z);
    }
    simdgroup_store(z, to, SCORE_PITCH, ulong2(0, 0), true);
}

// Rows of sums times the diagonal matrix `by`.
inline void shrink(thread simdgroup_matrix<float, 8, 8>* sums, const threadgroup float* by) {
    simdgroup_matrix<float, 8, 8> diagonal, product;
    simdgroup_load(diagonal, by, 8);
    UNROLL for (ushort c = 0; c < 8; ++c) {
        simdgroup_multiply(product, diagonal, sums[c]);
        sums[c] = product;
    }
}

// sums [8 heads, 64 channels] += weights [8 heads, 8 keys] keys.
template <typename TILE> inline void gather(thread simdgroup_matrix<float, 8, 8>* sums, const threadgroup TILE* weights,
                                            thread simdgroup_matrix<TILE, 8, 8>* keys) {
    simdgroup_matrix<TILE, 8, 8> w;
    simdgroup_load(w, weights, SCORE_PITCH);
    UNROLL for (ushort c = 0; c < 8; ++c) {
        simdgroup_multiply_accumulate(sums[c], w, keys[c], sums[c]);
    }
}
// ---- kernel attend
enum { PARTS = D / 64, HEADS = 8 * HEAD_TILES, OWN = (HEADS + PARTS - 1) / PARTS };
threadgroup float4 space[PARTS * REGION / 4];
threadgroup TILE weights[HEADS * SCORE_PITCH];
threadgroup float shrinks[64 * HEAD_TILES];
threadgroup float scales[HEADS];
// space: a region for each SIMD-group, of rows on their way to matrices, or of what it adds to scores. weights: [head]
// [key of the block]. shrinks: exp(maximum before - maximum) of 8 heads as a diagonal matrix. OWN: heads that a
// SIMD-group has in the softmax.
threadgroup float* regions = (threadgroup float*)space;
uint lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
uint t = threadgroup_position_in_grid.y, slice = threadgroup_position_in_grid.z;
uint head0 = threadgroup_position_in_grid.x * uint(HEADS);
uint r = lane / 16, j = 64 * part + lane % 16 * 4;   // 16 lanes hold the 64 channels of a row, 2 rows at a time
threadgroup float* own = regions + part * uint(REGION);
threadgroup TILE* stage = (threadgroup TILE*)own;
threadgroup TILE* staged = stage + r * KEY_PITCH + lane % 16 * 4;
const device float* cos_row = cos_table + t * uint(R / 2);
const device float* sin_row = sin_table + t * uint(R / 2);

// q over its rms, scaled and turned. The square needs all SIMD-groups' channels.
float4 channels[4 * HEAD_TILES];
UNROLL for (ushort i = 0; i < 4 * HEAD_TILES; ++i) {
    uint h = head0 + 2 * i + r;
    channels[i] = h < uint(H) ? *(const device float4*)(q + (ulong(t) * uint(H) + h) * uint(D) + j) : float4(0.0f);
    float square = dot(channels[i], channels[i]);
    for (ushort d = 1; d < 16; d *= 2) {
        square += simd_shuffle_xor(square, d);
    }
    if (lane % 16 == 0) {
        own[2 * i + r] = square;
    }
}
for (uint i = thread_index_in_threadgroup; i < uint(64 * HEAD_TILES); i += uint(32 * PARTS)) {
    shrinks[i] = 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (ushort i = 0; i < 4 * HEAD_TILES; ++i) {
    float square = 0.0f;
    for (ushort s = 0; s < PARTS; ++s) {
        square += regions[s * REGION + 2 * i + r];
    }
    float scale = 1.0f / precise::sqrt((square / float(D) + eps) * float(D));
    channels[i] = turned<D, R>(channels[i] * scale, j, cos_row, sin_row, 1.0f);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_matrix<TILE, 8, 8> query[HEAD_TILES][8];
simdgroup_matrix<float, 8, 8> sums[HEAD_TILES][8];
UNROLL for (ushort tile = 0; tile < HEAD_TILES; ++tile) {
    UNROLL for (ushort i = 0; i < 4; ++i) {
        put4(staged + 2 * i * KEY_PITCH, channels[4 * tile + i]);
    }
    take(query[tile], stage, true);
    UNROLL for (ushort c = 0; c < 8; ++c) {
        sums[tile][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
}
float most[OWN], total[OWN];
UNROLL for (ushort k = 0; k < OWN; ++k) {
    uint h = head0 + part + k * PARTS;
    most[k] = h < uint(H) ? sink[h] : 0.0f;
    total[k] = slice == 0 ? 1.0f : 0.0f;
}

// The token's keys: `near` rows of its window from `first` on, then the `visible` or the chosen compressed rows, dealt
// to slices by whole blocks.
#if STEP
int seen = positions[t] + 1, first = int(t) * WIDTH, near = min(seen, WIDTH);   // a ring: in any order
#else
int seen = start + int(t) + 1, last = window_rows - int(threadgroups_per_grid.y) + int(t);
int first = max(last - WIDTH + 1, 0), near = last - first + 1;
#endif
int visible = min(seen / ratio, count);
#if CHOSEN
int keys = near + min(visible, picks);
#else
int keys = near + visible;
#endif
int slices = int(threadgroups_per_grid.z), share = ((keys + BLOCK - 1) / BLOCK + slices - 1) / slices * BLOCK;
int end = min(keys, (int(slice) + 1) * share);
for (int block = int(slice) * share; block < end; block += BLOCK) {
    int i = block + int(lane), key = i < end ? first + i : -1;   // this lane's in the softmax
    if (i >= near && i < end) {
        int row = i - near;
#if CHOSEN
        row = chosen[long(t) * picks + row];
#endif
        key = row < visible ? row : -1;
#if STEP
        key = key < 0 ? -1 : pages[long(t) * held + key / PAGE_ROWS] * PAGE_ROWS + key % PAGE_ROWS;
#endif
        key = key < 0 ? -1 : window_rows + key;
    }
    simdgroup_matrix<TILE, 8, 8> tiles[BLOCK / 8][8];
    UNROLL for (ushort b = 0; b < BLOCK / 8; ++b) {
        UNROLL for (ushort i = 0; i < 4; ++i) {
            int from = simd_shuffle(key, ushort(8 * b + 2 * i + r));
            put4(staged + 2 * i * KEY_PITCH, key4<D, R>(window, rows, window_rows, from, j));
        }
        take(tiles[b], stage, false);
    }
    UNROLL for (ushort tile = 0; tile < HEAD_TILES; ++tile) {
        UNROLL for (ushort b = 0; b < BLOCK / 8; ++b) {
            score(query[tile], tiles[b], own + 8 * tile * SCORE_PITCH + 8 * b);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (ushort k = 0; k < OWN; ++k) {
        uint h = part + k * PARTS;
        if (h < uint(HEADS)) {
            float z = 0.0f;
            for (ushort s = 0; s < PARTS; ++s) {
                z += regions[s * REGION + h * SCORE_PITCH + lane];
            }
            z = key < 0 ? -INFINITY : z;
            float before = most[k];
            most[k] = max(before, simd_max(z));
            float w = precise::exp(z - most[k]), less = precise::exp(before - most[k]);
            total[k] = total[k] * less + simd_sum(w);
            weights[h * SCORE_PITCH + lane] = TILE(w);
            if (lane == 0) {
                shrinks[h / 8 * 64 + h % 8 * 9] = less;
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Maxima grow early and then seldom: the products with the diagonals are skipped where nothing did.
    float less = lane < uint(HEADS) ? shrinks[lane / 8 * 64 + lane % 8 * 9] : 1.0f;
    bool grown = simd_any(less < 1.0f);
    UNROLL for (ushort tile = 0; tile < HEAD_TILES; ++tile) {
        if (grown) {
            shrink(sums[tile], shrinks + 64 * tile);
        }
        UNROLL for (ushort b = 0; b < BLOCK / 8; ++b) {
            gather(sums[tile], weights + 8 * tile * SCORE_PITCH + 8 * b, tiles[b]);
        }
    }
}

UNROLL for (ushort k = 0; k < OWN; ++k) {
    uint h = part + k * PARTS;
    if (lane == 0 && h < uint(HEADS)) {
        scales[h] = 1.0f / total[k];
        if (slices > 1 && head0 + h < uint(H)) {
            ulong at = (ulong(t) * uint(H) + head0 + h) * uint(slices) + slice;
            limits[2 * at] = most[k];
            limits[2 * at + 1] = total[k];
        }
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (ushort tile = 0; tile < HEAD_TILES; ++tile) {
    UNROLL for (ushort c = 0; c < 8; ++c) {
        simdgroup_store(sums[tile][c], own + 8 * c, KEY_PITCH);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (ushort i = 0; i < 4; ++i) {
        uint h = 8 * tile + 2 * i + r;
        float4 v = *(threadgroup float4*)(own + (2 * i + r) * KEY_PITCH + lane % 16 * 4);
        if (slices == 1) {
            v = turned<D, R>(v * scales[h], j, cos_row, sin_row, -1.0f);
        }
        if (head0 + h < uint(H)) {
            ulong at = (ulong(t) * uint(H) + head0 + h) * uint(slices) + slice;
            *(device float4*)(o + at * uint(D) + j) = v;
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}
// ---- kernel combine
// A threadgroup takes a head of a token, a thread four channels: o = sum_s e_s sums_s / sum_s e_s total_s, turned back,
// with e_s = exp(most_s - most).
uint h = threadgroup_position_in_grid.x, t = threadgroup_position_in_grid.y;
uint j = 4 * thread_index_in_threadgroup;
ulong at = (ulong(t) * uint(H) + h) * uint(slices);
float most = -INFINITY;
for (int s = 0; s < slices; ++s) {
    most = max(most, limits[2 * (at + s)]);
}
float total = 0.0f;
float4 v = float4(0.0f);
for (int s = 0; s < slices; ++s) {
    float e = precise::exp(limits[2 * (at + s)] - most);
    total += e * limits[2 * (at + s) + 1];
    v += e * *(const device float4*)(sums + (at + s) * uint(D) + j);
}
v = turned<D, R>(v * (1.0f / total), j, cos_table + t * uint(R / 2), sin_table + t * uint(R / 2), -1.0f);
*(device float4*)(o + (ulong(t) * uint(H) + h) * uint(D) + j) = v;
