// qr = rms(q) q_norm; row = pack(rotate(rms(kv) kv_norm)). One block a token and task, one thread a channel of the row.
// `step` also takes a token of each of B sessions into their compressors: all between two products is one launch.
#include "pool.cuh"

DEVICE void normalise(const float* x, const float* norm, float* out, int width, float eps, float* shared) {
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[i] * x[i];
    float scale = rsqrtf(block_sum(sum, shared) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = x[i] * scale * norm[i];
}

DEVICE void new_row(const float* kv, const float* norm, const float* cosine, const float* sine, u8* out, float eps,
                    float* shared) {
    int c = threadIdx.x;
    float v = c < D ? kv[c] : 0.f;
    float scale = rsqrtf(block_sum(v * v, shared) / D + eps);
    v = rotated<D, R>(c < D ? v * scale * norm[c] : 0.f, c, cosine, sine);
    store_row<D, R, PACKED>(out, v, c, shared);
}

// A chunk: rows [T, ROW].
KERNEL void latent(const float* q, const float* kv, const float* q_norm, const float* kv_norm, const float* cosine,
                   const float* sine, float* qr, u8* rows, float eps) {
    TAKE_TURN();
    __shared__ float shared[LANES];
    size_t t = blockIdx.x;
    if (blockIdx.y == 0) normalise(q + t * Q, q_norm, qr + t * Q, Q, eps, shared);
    else new_row(kv + t * D, kv_norm, cosine + t * (R / 2), sine + t * (R / 2), rows + t * ROW, eps, shared);
}

// Rows of a chunk's last tokens into the window's ring; a block each.
KERNEL void keep(const u8* rows, u8* ring, int start, int tokens) {
    TAKE_TURN();
    int t = tokens - gridDim.x + blockIdx.x;
    const u16* from = (const u16*)(rows + (size_t)t * ROW);
    u16* to = (u16*)(ring + (size_t)((start + t) % RING) * ROW);
    for (int i = threadIdx.x; i < ROW / 2; i += blockDim.x) to[i] = from[i];
}

#if RATIO
struct Compressor {
    const float *k, *s, *ape, *norm;
    u8 *state, *rows;
};

template <int Width, int Overlap, int RowBytes, bool Index>
DEVICE void compress(const Compressor& of, int b, int position, size_t state_at, const float* cosine,
                     const float* sine, const int* pages, float eps, float* shared) {
    typedef Pool<RATIO, Overlap, Width> Group;
    int c = threadIdx.x;
    float* ring = (float*)(of.state + state_at);
    Group pool = {ring, 0, 0, of.ape, position + 1};
    for (int i = 0; i < Overlap && c < Width; ++i) {  // a thread reads back none but its own columns
        size_t at = (size_t)b * Group::COLUMNS + i * Width + c;
        pool.put(ring, position, i * Width + c, of.k[at], of.s[at]);
    }
    if ((position + 1) % RATIO) return;
    int group = position / RATIO;
    float v = c < Width ? pool.pooled(group, c) : 0.f;
    float scale = rsqrtf(block_sum(v * v, shared) / Width + eps);
    v = rotated<Width, R>(c < Width ? v * scale * of.norm[c] : 0.f, c, cosine, sine);
    u8* out = of.rows + ((size_t)pages[group / PAGE_ROWS] * PAGE_ROWS + group % PAGE_ROWS) * RowBytes;
    __syncthreads();
    if (Index) store_index_row<Width, PACKED>(out, v, c, shared);
    else store_row<Width, R, PACKED>(out, v, c, shared);
}
#endif

// Tables: cosine, sine of the tokens; group_cosine, group_sine of the first positions of their groups. State sections
// lie at `window` and the compressors' `state` plus slots[b] * stride.
KERNEL void step(const float* q, const float* kv, const float* q_norm, const float* kv_norm, const float* cosine,
                 const float* sine, float* qr, u8* window, long long stride, const int* slots, const int* positions,
                 float eps
#if RATIO
                 , const float* group_cosine, const float* group_sine, const int* pages, int page_count,
                 const float* k, const float* s, const float* ape, const float* norm, u8* state, u8* rows
#if RATIO == 4
                 , const float* index_k, const float* index_s, const float* index_ape, const float* index_norm,
                 u8* index_state, u8* index_rows
#endif
#endif
                 ) {
    PASS_TURN();  // positions, slots and pages were there before anything that is still under way
    __shared__ float shared[1024];
    int b = blockIdx.x, position = positions[b];
    size_t at = (size_t)slots[b] * stride, turn = (size_t)b * (R / 2);
    AWAIT_TURN();
    if (blockIdx.y == 0) normalise(q + (size_t)b * Q, q_norm, qr + (size_t)b * Q, Q, eps, shared);
    if (blockIdx.y == 1)
        new_row(kv + (size_t)b * D, kv_norm, cosine + turn, sine + turn, window + at + (size_t)(position % RING) * ROW,
                eps, shared);
#if RATIO
    const int* table = pages + (size_t)b * page_count;
    Compressor own = {k, s, ape, norm, state, rows};
    if (blockIdx.y == 2)
        compress<D, RATIO == 4 ? 2 : 1, ROW, false>(own, b, position, at, group_cosine + turn, group_sine + turn, table,
                                                    eps, shared);
#if RATIO == 4
    Compressor index = {index_k, index_s, index_ape, index_norm, index_state, index_rows};
    if (blockIdx.y == 3)
        compress<INDEX_WIDTH, 2, INDEX_ROW, true>(index, b, position, at, group_cosine + turn, group_sine + turn, table,
                                                  eps, shared);
#endif
#endif
}
