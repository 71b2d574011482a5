// o[t, h] = sum_k exp(z_k - m) key_k / (exp(sink[h] - m) + sum_k exp(z_k - m)), z_k = q[t, h] . key_k / sqrt(D), where
// a row is key and value at once: all heads of a token share its rows, so a token is a product of matrices by itself.
//
// Macros: H heads of D channels, the last R rotary; rows of ROW bytes, PACKED or floats; WIDTH positions of the window,
// held in a ring of RING; RATIO tokens a compressed row (0: none), PAGE_ROWS of a page; CHOSEN: a token that sees more
// than `picks` rows has a list of those it attends to. KEYS of a tile, GROUPS of 32 lanes; of a chunk, HEADS of a
// block; of a step, SLICES of a token's keys, BLOCKS of a multiprocessor, STREAMS of HIDDEN channels.
// STEP: 1 for a step, 0 for a chunk.
#include "attend_tile.cuh"

#if STEP
#include "attend_step.cuh"
#else
#include "attend_chunk.cuh"
#endif

// All in float32, a head of a token a block: for --quality. Grid (H, T), or (H + 1, T) as in a step.
#define CHUNKS ((D / 8 + LANES - 1) / LANES)
KERNEL void attend_exact(const float* q, const float* cosine, const float* sine, const u8* ring, long long stride,
                         const int* slots, int slot_step, const u8* fresh, int chunk, const u8* rows, const int* pages,
                         int page_step, const int* positions, const int* chosen, int picks, const float* sink,
                         float eps, float* o, const float* hc_sums, const float* hc_scale, const float* hc_base,
                         int iterations, float hc_eps, float norm_eps, float* post, float* m) {
    TAKE_TURN();
    if (blockIdx.x == H) {
        WayBack back = {hc_sums, hc_scale, hc_base, iterations, hc_eps, norm_eps, post, m};
        if (threadIdx.x == 0) way_back<STREAMS, HIDDEN>(back, blockIdx.y);
        return;
    }
    __shared__ __align__(16) float whole[D];
    __shared__ float sums[8][D], limits[8][2];
    int h = blockIdx.x, t = blockIdx.y, lane = lane_id(), group = group_id(), position = positions[t];
    cosine += (size_t)t * (R / 2), sine += (size_t)t * (R / 2);
    Keys all(ring + (size_t)slots[t * slot_step] * stride, fresh, rows, pages + (size_t)t * page_step,
             chosen + (size_t)t * picks, picks, chunk ? positions[0] : position + 1, position);
    if (group == 0) {
        float4 v[QUADS];
        load_query(q + ((size_t)t * H + h) * D, v);
        query(v, cosine, sine, eps, rsqrtf((float)D));
        for (int i = 0; i < QUADS; ++i)
            if (4 * (LANES * i + lane) < D) *(float4*)(whole + 4 * (LANES * i + lane)) = v[i];
    }
    __syncthreads();
    float mine[CHUNKS][8], sum[CHUNKS][8] = {}, most = -INFINITE, total = 0;
    for (int i = 0; i < CHUNKS; ++i)
        for (int j = 0; j < 8; ++j) mine[i][j] = LANES * i + lane < D / 8 ? whole[8 * (LANES * i + lane) + j] : 0.f;
    for (int key = group; key < all.count; key += 8) {
        const u8* row = all.at(key);
        float v[CHUNKS][8], z = 0;
        for (int i = 0; i < CHUNKS; ++i) {
            if (LANES * i + lane < D / 8) load_chunk<D, R, PACKED>(row, LANES * i + lane, v[i]);
            else for (int j = 0; j < 8; ++j) v[i][j] = 0;
            for (int j = 0; j < 8; ++j) z += mine[i][j] * v[i][j];
        }
        z = lane_sum(z);
        float next = fmaxf(most, z), by = expf(most - next), weight = expf(z - next);
        total = total * by + weight, most = next;
        for (int i = 0; i < CHUNKS; ++i)
            for (int j = 0; j < 8; ++j) sum[i][j] = sum[i][j] * by + weight * v[i][j];
    }
    for (int i = 0; i < CHUNKS; ++i)
        for (int j = 0; j < 8; ++j)
            if (LANES * i + lane < D / 8) sums[group][8 * (LANES * i + lane) + j] = sum[i][j];
    if (lane == 0) limits[group][0] = most, limits[group][1] = total;
    __syncthreads();
    float last = sink[h], whole_total;
    for (int g = 0; g < 8; ++g) last = fmaxf(last, limits[g][0]);
    whole_total = expf(sink[h] - last);
    for (int g = 0; g < 8; ++g) whole_total += limits[g][1] * expf(limits[g][0] - last);
    for (int c = 2 * threadIdx.x; c < D; c += 2 * blockDim.x) {
        float2 v = make_float2(0, 0);
        for (int g = 0; g < 8; ++g) {
            float by = expf(limits[g][0] - last) / whole_total;
            v.x += sums[g][c] * by, v.y += sums[g][c + 1] * by;
        }
        *(float2*)(o + ((size_t)t * H + h) * D + c) = turned_back(v, c, cosine, sine);
    }
}
