// y_i[t, n] = sum_k x[t, k] W_i[n, k] for the matrices i of one input. With GROUPS, x is [t, group, k] and each group
// has its own rows.
//
// MATRICES is how many; matrix i is of type KINDi with Ni rows (of one group). Threadgroups are dealt to the matrices
// in order; each belongs to one of them.
//
// Decode (TOKENS <= 8): threadgroup (x, y) does tile x of group y with 4 simdgroups. SPLIT of them share a set of 4
// rows, each taking every SPLIT-th 32 portions: a matrix of few long rows still fills the device. Weights are read
// once; x, 4 K bytes a token, is read by each threadgroup and stays in the cache.
//
// Prefill: threadgroup (x, y, z) does BM x 64 results (tiles.h): token tile x, row tile y of group z. Weights of 8.5
// bits are read as 1.06 bytes once for each 64 tokens. To decode a matrix to half first would read 1.06 bytes and
// write 2, and the product then read 2 for each 64 tokens: at 2048 tokens 67 bytes a weight against 34. Neighbouring
// threadgroups have the same rows and other tokens, so that weights come from memory once and from the cache after
// that.
#include "blocks.h"
#include "matvec.h"
#include "tiles.h"

enum { SIMDGROUPS = 4, SET_ROWS = 4 };  // of a threadgroup; of those that share a set of rows in decode

#define EACH1(DO) DO(0)
#define EACH2(DO) EACH1(DO) DO(1)
#define EACH3(DO) EACH2(DO) DO(2)
#define EACH4(DO) EACH3(DO) DO(3)
#define EACH5(DO) EACH4(DO) DO(4)
#define EACH6(DO) EACH5(DO) DO(5)
#define EACH7(DO) EACH6(DO) DO(6)
#define EACH8(DO) EACH7(DO) DO(7)
#define JOIN(a, b) a##b
#define EACH(count, DO) JOIN(EACH, count)(DO)

// Where a thread is: its simdgroup, its lane.
struct Seat {
    uint simd, lane;
};

inline uint tiles(uint rows, uint size) {
    return (rows + size - 1) / size;
}

// A set of rows of the matrix w, [N, K], with `tokens` vectors `stride` apart; results of a token are y_stride apart.
template <int KIND, int TOKENS, int SPLIT, int K> inline void decode_rows(
        const device float* x, ulong stride, uint tokens, const device uint8_t* w, uint N, device float* y,
        ulong y_stride, uint tile, const threadgroup ulong* codebook, threadgroup float* partial, Seat seat) {
    const uint sets = SIMDGROUPS / SPLIT, count = SET_ROWS * TOKENS;
    uint n = (tile * sets + seat.simd / SPLIT) * SET_ROWS;
    const device uint8_t* rows[SET_ROWS];
    float sums[count];
    UNROLL for (uint r = 0; r < SET_ROWS; ++r) {
        rows[r] = w + min(n + r, N - 1) * row_bytes<KIND>(K);
    }
    const device float* vectors[TOKENS];
    UNROLL for (uint t = 0; t < TOKENS; ++t) {
        vectors[t] = x + t * stride;
    }
    UNROLL for (uint i = 0; i < count; ++i) {
        sums[i] = 0;
    }
    uint wanted = (1u << tokens) - 1, first = seat.simd % SPLIT * 32 + seat.lane;
    add_products<KIND, SET_ROWS, TOKENS>(rows, vectors, wanted, K, first, SPLIT * 32, codebook, sums);
    add_lanes<count>(sums, partial + seat.simd * count, seat.lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = seat.simd * 32 + seat.lane; i < sets * count; i += SIMDGROUPS * 32) {
        uint row = (tile * sets + i / count) * SET_ROWS + i % count / TOKENS, t = i % TOKENS;
        float sum = 0;
        for (uint s = 0; s < SPLIT; ++s) {
            sum += partial[(i / count * SPLIT + s) * count + i % count];
        }
        if (row < N && t < tokens) {
            y[t * y_stride + row] = sum;
        }
    }
}

// A tile of results from row n on; `list` holds the tile's tokens, the first `count` of them real.
template <typename S, int KIND, int BM, int K> inline void prefill_rows(
        const device float* x, ulong stride, const threadgroup int* list, uint count, const device uint8_t* w, uint n,
        uint N, device float* y, ulong y_stride, const threadgroup ulong* codebook, threadgroup vec<S, 4>* a,
        threadgroup vec<S, 4>* b, threadgroup float* strips, Seat seat) {
    simdgroup_matrix<float, 8, 8> sums[BM / 4];
    HalfRows low = {w, n, N}, high = {w, n + TILE_ROWS / 2, N};
    multiply_tile<S, KIND, BM>(x, stride, K, list, count, low, high, codebook, a, b, seat.simd * 32 + seat.lane, sums);
    store<BM>(sums, y, y_stride, list, n, N, strips + seat.simd * 256, seat.simd, seat.lane);
}

#define DECODE(i) \
    if (tile < tiles(N##i, SIMDGROUPS / SPLIT * SET_ROWS)) { \
        decode_rows<KIND##i, TOKENS, SPLIT, K>(x + group * K, GROUPS * K, tokens, \
            w##i + group * N##i * row_bytes<KIND##i>(K), N##i, y##i + group * N##i, GROUPS * N##i, tile, codebook, \
            partial, seat); \
        return; \
    } \
    tile -= tiles(N##i, SIMDGROUPS / SPLIT * SET_ROWS);

#define PREFILL(i) \
    if (tile < tiles(N##i, TILE_ROWS)) { \
        prefill_rows<S, KIND##i, BM, K>(x + group * K, GROUPS * K, list, count, \
            w##i + group * N##i * row_bytes<KIND##i>(K), tile * TILE_ROWS, N##i, y##i + group * N##i, GROUPS * N##i, \
            codebook, a, b, strips, seat); \
        return; \
    } \
    tile -= tiles(N##i, TILE_ROWS);
// ---- kernel decode
threadgroup ulong codebook[CODEBOOK ? 256 : 1];
threadgroup float partial[SIMDGROUPS * SET_ROWS * TOKENS];
if (CODEBOOK) {
    load_codebook<KIND_IQ2_XXS>(codebook, thread_index_in_threadgroup, SIMDGROUPS * 32);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
Seat seat = {simdgroup_index_in_threadgroup, thread_index_in_simdgroup};
ulong group = threadgroup_position_in_grid.y;
uint tile = threadgroup_position_in_grid.x;
EACH(MATRICES, DECODE)
// ---- kernel prefill
threadgroup ulong codebook[CODEBOOK ? 256 : 1];
threadgroup int list[BM];
threadgroup vec<S, 4> a[BM * Line<S>::quads];
threadgroup vec<S, 4> b[TILE_ROWS * Line<S>::quads];
threadgroup float strips[4 * 256];
if (CODEBOOK) {
    load_codebook<KIND_IQ2_XXS>(codebook, thread_index_in_threadgroup, TILE_THREADS);
}
uint start = threadgroup_position_in_grid.x * BM, count = min(uint(BM), uint(tokens) - start);
if (thread_index_in_threadgroup < BM) {
    uint i = thread_index_in_threadgroup;
    list[i] = i < count ? int(start + i) : -1;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
Seat seat = {simdgroup_index_in_threadgroup, thread_index_in_simdgroup};
ulong group = threadgroup_position_in_grid.z;
uint tile = threadgroup_position_in_grid.y;
EACH(MATRICES, PREFILL)
