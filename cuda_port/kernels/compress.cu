// row = pack(rotate(rms(pooled) norm)) of every group that a chunk of T tokens completes, and the frontier after it.
// One block a group, one thread a channel. INDEX: rows are the indexer's, transformed and rounded to FP4.
#include "pool.cuh"

typedef Pool<RATIO, M, W> Group;

// rows: a pool of pages of PAGE_ROWS rows of ROW bytes; row r of the session lies on page pages[r / PAGE_ROWS].
KERNEL void rows(const float* k, const float* s, const u8* state, const float* ape, const float* norm,
                 const float* cosine, const float* sine, u8* rows, const int* pages, int start, float eps) {
    TAKE_TURN();
    __shared__ float shared[W < LANES ? LANES : W];
    int group = start / RATIO + blockIdx.x, c = threadIdx.x;
    Group pool = {(const float*)state, k, s, ape, start};
    float v = c < W ? pool.pooled(group, c) : 0.f;
    float scale = rsqrtf(block_sum(v * v, shared) / W + eps);
    v = c < W ? v * scale * norm[c] : 0.f;
    v = rotated<W, R>(v, c, cosine + (size_t)blockIdx.x * (R / 2), sine + (size_t)blockIdx.x * (R / 2));
    u8* out = rows + ((size_t)pages[group / PAGE_ROWS] * PAGE_ROWS + group % PAGE_ROWS) * ROW;
    __syncthreads();
    if (INDEX) store_index_row<W, PACKED>(out, v, c, shared);
    else store_row<W, R, PACKED>(out, v, c, shared);
}

// The last tokens of the chunk into the ring; a block each. Runs after `rows`, which reads what this overwrites.
KERNEL void keep(const float* k, const float* s, u8* state, const float* ape, int start, int tokens) {
    TAKE_TURN();
    Group pool = {0, k, s, ape, start};
    int t = tokens - gridDim.x + blockIdx.x;
    for (int column = threadIdx.x; column < Group::COLUMNS; column += blockDim.x) {
        size_t at = (size_t)t * Group::COLUMNS + column;
        pool.put((float*)state, start + t, column, k[at], s[at]);
    }
}
