// o[t, h] = sum_k exp(z_k - m) key_k / (exp(sink[h] - m) + sum_k exp(z_k - m)), z_k = q[t, h] . key_k / sqrt(D), where a
// row is key and value at once: all heads of a token share its rows, so a token is a product of matrices by itself.
//
// Macros: H heads of D channels, the last R rotary; rows of ROW bytes, PACKED or floats; WIDTH positions of the window,
// held in a ring of RING; RATIO tokens a compressed row (0: none), PAGE_ROWS of a page; CHOSEN: a token that sees more
// than `picks` rows has a list of those it attends to. HEADS of a block, KEYS of a tile, GROUPS of 32 lanes.
#include "mma.cuh"
#include "rows.cuh"

#define LOG2E 1.4426950408889634f

struct Keys {
    const u8 *ring, *fresh, *rows;     // the window of positions before `start`, rows from there on; compressed rows
    const int *pages, *chosen;
    int start, position, near, count;  // `near` positions of the window, then rows: `count` keys

    DEVICE Keys(const u8* ring, const u8* fresh, const u8* rows, const int* pages, const int* chosen, int picks,
                int start, int position)
        : ring(ring), fresh(fresh), rows(rows), pages(pages), chosen(chosen), start(start), position(position) {
        near = min(position + 1, WIDTH);
        count = near;
#if RATIO
        int seen = (position + 1) / RATIO;
        if (CHOSEN && seen > picks) count += picks;
        else count += seen, this->chosen = 0;
#endif
    }

    DEVICE const u8* at(int i) const {
        if (i < near) {
            int p = position - near + 1 + i;
            return p < start ? ring + (size_t)(p % RING) * ROW : fresh + (size_t)(p - start) * ROW;
        }
#if RATIO
        int c = CHOSEN && chosen ? chosen[i - near] : i - near;
        return rows + ((size_t)pages[c / PAGE_ROWS] * PAGE_ROWS + c % PAGE_ROWS) * ROW;
#else
        return ring;
#endif
    }
};

// A head's query in `out`, in place or not: divided by its rms, rotated, times `by`. 32 lanes; channels in fours.
#define QUADS ((D / 4 + LANES - 1) / LANES)
DEVICE void query(const float* q, const float* cosine, const float* sine, float eps, float by, float4 (&v)[QUADS]) {
    int lane = lane_id();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        int c = 4 * (LANES * i + lane);
        v[i] = c < D ? *(const float4*)(q + c) : make_float4(0, 0, 0, 0);
        sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    float r = rsqrtf(lane_sum(sum) / D + eps) * by;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        int c = 4 * (LANES * i + lane), pair = (c - (D - R)) / 2;
        v[i].x *= r, v[i].y *= r, v[i].z *= r, v[i].w *= r;
        if (c < D - R || c >= D) continue;
        float c0 = cosine[pair], s0 = sine[pair], c1 = cosine[pair + 1], s1 = sine[pair + 1];
        v[i] = make_float4(v[i].x * c0 - v[i].y * s0, v[i].x * s0 + v[i].y * c0, v[i].z * c1 - v[i].w * s1,
                           v[i].z * s1 + v[i].w * c1);
    }
}

// A pair of channels (c, c + 1) of an output, turned back where they are rotary.
DEVICE float2 turned_back(float2 v, int c, const float* cosine, const float* sine) {
    if (c < D - R) return v;
    int pair = (c - (D - R)) / 2;
    float co = cosine[pair], si = sine[pair];
    return make_float2(v.x * co + v.y * si, v.y * co - v.x * si);
}

#define PAD (D + 8)          // halves between vectors in shared memory
#define SCORE_PAD (KEYS + 4) // floats
#define WEIGHT_PAD (KEYS + 8)
#define HEAD_TILES (HEADS / 16)
#define KEY_GROUPS (GROUPS / HEAD_TILES)        // groups of lanes that share the keys of a tile of heads
#define GROUP_KEYS (KEYS / KEY_GROUPS)          // a multiple of 16
#define GROUP_CHANNELS (D / GROUPS)             // of the outputs, a multiple of 16
#define TILE_BYTES (2 * (KEYS + HEADS) * PAD + 4 * HEADS * SCORE_PAD + 2 * HEADS * WEIGHT_PAD + 12 * HEADS + 8 * KEYS)

// Grid (H / HEADS, T, slices). q [T, H D]; tables [T, R / 2]; state: ring at `ring` + slots[t] * stride, one slot for a
// chunk (slot_step 0); fresh rows [T, ROW] of a chunk that begins at position `start`, which is past all in a step;
// pages [P], a table a token if page_step is not 0; chosen [T, picks]. One slice: o [T, H D]. Else sums [T, H, slices, D]
// and limits [T, H, slices, 2] for `combine`: the largest score times log2 e, and the sum of weights.
KERNEL __launch_bounds__(GROUPS * LANES) void attend(
    const float* q, const float* cosine, const float* sine, const u8* ring, long long stride, const int* slots,
    int slot_step, const u8* fresh, int chunk, const u8* rows, const int* pages, int page_step, const int* positions,
    const int* chosen, int picks, const float* sink, float eps, float* o, float* limits) {
    TAKE_TURN();
    extern __shared__ __align__(16) u8 memory[];
    __half* keys = (__half*)memory;
    __half* queries = keys + KEYS * PAD;
    const u8** at = (const u8**)(queries + HEADS * PAD);
    float* scores = (float*)(at + KEYS);
    float *most = scores + HEADS * SCORE_PAD, *total = most + HEADS, *shrink = total + HEADS;
    __half* weights = (__half*)(shrink + HEADS);
    int tid = threadIdx.x, lane = lane_id(), group = group_id(), t = blockIdx.y, slices = gridDim.z;
    int head = blockIdx.x * HEADS, position = positions[t];
    cosine += (size_t)t * (R / 2), sine += (size_t)t * (R / 2);
    Keys all(ring + (size_t)slots[t * slot_step] * stride, fresh, rows, pages + (size_t)t * page_step,
             chosen + (size_t)t * picks, picks, chunk ? positions[0] : position + 1, position);

    for (int h = group; h < HEADS; h += GROUPS) {
        float4 v[QUADS];
        bool real = head + h < H;
        query(q + ((size_t)t * H + (real ? head + h : 0)) * D, cosine, sine, eps, rsqrtf((float)D) * LOG2E, v);
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            int c = 4 * (LANES * i + lane);
            if (c >= D) continue;
            __half2* to = (__half2*)(queries + h * PAD + c);
            to[0] = __floats2half2_rn(real ? v[i].x : 0, real ? v[i].y : 0);
            to[1] = __floats2half2_rn(real ? v[i].z : 0, real ? v[i].w : 0);
        }
        if (lane == 0) most[h] = -INFINITE, total[h] = 0;
    }

    float sums[HEAD_TILES][GROUP_CHANNELS / 8][4] = {};
    int tiles = (all.count + KEYS - 1) / KEYS;
    int begin = tiles * blockIdx.z / slices, end = tiles * (blockIdx.z + 1) / slices;
    for (int tile = begin; tile < end; ++tile) {
        int left = all.count - tile * KEYS;
        __syncthreads();
        if (tid < KEYS) at[tid] = tid < left ? all.at(tile * KEYS + tid) : 0;
        __syncthreads();
#pragma unroll 4
        for (int i = tid; i < KEYS * (D / 8); i += GROUPS * LANES) {
            int key = i / (D / 8), part = i % (D / 8);
            uint4 v = make_uint4(0, 0, 0, 0);
            if (key < left) v = load_chunk_halves<D, R, PACKED>(at[key], part);
            *(uint4*)(keys + key * PAD + 8 * part) = v;
        }
        __syncthreads();
        {   // scores of 16 heads and GROUP_KEYS keys
            int row = group / KEY_GROUPS * 16, column = group % KEY_GROUPS * GROUP_KEYS;
            float z[GROUP_KEYS / 8][4] = {};
#pragma unroll 4
            for (int k = 0; k < D; k += 16) {
                u32 a[4];
                load_a(a, queries + row * PAD + k, PAD);
#pragma unroll
                for (int n = 0; n < GROUP_KEYS; n += 16) {
                    u32 b[4];
                    load_b(b, keys + (column + n) * PAD + k, PAD);
                    mma(z[n / 8], a, b[0], b[1]);
                    mma(z[n / 8 + 1], a, b[2], b[3]);
                }
            }
#pragma unroll
            for (int n = 0; n < GROUP_KEYS / 8; ++n) {
                float* to = scores + (row + lane / 4) * SCORE_PAD + column + 8 * n + lane % 4 * 2;
                to[0] = z[n][0], to[1] = z[n][1], to[8 * SCORE_PAD] = z[n][2], to[8 * SCORE_PAD + 1] = z[n][3];
            }
        }
        __syncthreads();
        for (int h = group; h < HEADS; h += GROUPS) {
            float z[KEYS / LANES], before = most[h], next = before, sum = 0;
#pragma unroll
            for (int i = 0; i < KEYS / LANES; ++i) {
                int key = LANES * i + lane;
                z[i] = key < left ? scores[h * SCORE_PAD + key] : -INFINITE;
                next = fmaxf(next, z[i]);
            }
            next = lane_max(next);
#pragma unroll
            for (int i = 0; i < KEYS / LANES; ++i) {
                __half weight = __float2half_rn(exp2f(z[i] - next));
                weights[h * WEIGHT_PAD + LANES * i + lane] = weight;
                sum += __half2float(weight);
            }
            sum = lane_sum(sum);
            if (lane == 0) {
                float by = exp2f(before - next);
                shrink[h] = by, most[h] = next, total[h] = total[h] * by + sum;
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < HEAD_TILES; ++i) {
            float low = shrink[16 * i + lane / 4], high = shrink[16 * i + lane / 4 + 8];
#pragma unroll
            for (int n = 0; n < GROUP_CHANNELS / 8; ++n)
                sums[i][n][0] *= low, sums[i][n][1] *= low, sums[i][n][2] *= high, sums[i][n][3] *= high;
        }
#pragma unroll
        for (int k = 0; k < KEYS; k += 16) {
            u32 a[HEAD_TILES][4];
#pragma unroll
            for (int i = 0; i < HEAD_TILES; ++i) load_a(a[i], weights + 16 * i * WEIGHT_PAD + k, WEIGHT_PAD);
#pragma unroll
            for (int n = 0; n < GROUP_CHANNELS; n += 16) {
                u32 b[4];
                load_b_rows(b, keys + k * PAD + group * GROUP_CHANNELS + n, PAD);
#pragma unroll
                for (int i = 0; i < HEAD_TILES; ++i) {
                    mma(sums[i][n / 8], a[i], b[0], b[1]);
                    mma(sums[i][n / 8 + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HEAD_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int h = 16 * i + 8 * half + lane / 4;
            if (head + h >= H) continue;
            size_t out = ((size_t)t * H + head + h) * slices + blockIdx.z;
            float by = 1;
            if (slices == 1) {
                float last = fmaxf(most[h], sink[head + h] * LOG2E), part = exp2f(most[h] - last);
                by = part / (total[h] * part + exp2f(sink[head + h] * LOG2E - last));
            } else if (group == 0 && lane % 4 == 0) {
                limits[2 * out] = most[h], limits[2 * out + 1] = total[h];
            }
#pragma unroll
            for (int n = 0; n < GROUP_CHANNELS / 8; ++n) {
                int c = group * GROUP_CHANNELS + 8 * n + lane % 4 * 2;
                float2 v = make_float2(sums[i][n][2 * half] * by, sums[i][n][2 * half + 1] * by);
                if (slices == 1) v = turned_back(v, c, cosine, sine);
                *(float2*)(o + out * D + c) = v;
            }
        }
}

// The slices of a head of a token to its output. Grid (H, T), a thread two channels.
KERNEL void combine(const float* sums, const float* limits, const float* sink, const float* cosine, const float* sine,
                    float* o, int slices) {
    TAKE_TURN();
    int h = blockIdx.x, t = blockIdx.y, c = 2 * threadIdx.x;
    size_t head = (size_t)t * H + h;
    float most = sink[h] * LOG2E;
    for (int i = 0; i < slices; ++i) most = fmaxf(most, limits[2 * (head * slices + i)]);
    float total = exp2f(sink[h] * LOG2E - most);
    float2 v = make_float2(0, 0);
    for (int i = 0; i < slices; ++i) {
        size_t slice = head * slices + i;
        float by = exp2f(limits[2 * slice] - most);
        float2 part = *(const float2*)(sums + slice * D + c);
        total += limits[2 * slice + 1] * by, v.x += part.x * by, v.y += part.y * by;
    }
    v.x /= total, v.y /= total;
    *(float2*)(o + head * D + c) =
        turned_back(v, c, cosine + (size_t)t * (R / 2), sine + (size_t)t * (R / 2));
}

// All in float32, a head of a token a block: for --quality.
#define CHUNKS ((D / 8 + LANES - 1) / LANES)
KERNEL void attend_exact(const float* q, const float* cosine, const float* sine, const u8* ring, long long stride,
                         const int* slots, int slot_step, const u8* fresh, int chunk, const u8* rows, const int* pages,
                         int page_step, const int* positions, const int* chosen, int picks, const float* sink, float eps,
                         float* o) {
    TAKE_TURN();
    __shared__ __align__(16) float whole[D];
    __shared__ float sums[8][D], limits[8][2];
    int h = blockIdx.x, t = blockIdx.y, lane = lane_id(), group = group_id(), position = positions[t];
    cosine += (size_t)t * (R / 2), sine += (size_t)t * (R / 2);
    Keys all(ring + (size_t)slots[t * slot_step] * stride, fresh, rows, pages + (size_t)t * page_step,
             chosen + (size_t)t * picks, picks, chunk ? positions[0] : position + 1, position);
    if (group == 0) {
        float4 v[QUADS];
        query(q + ((size_t)t * H + h) * D, cosine, sine, eps, rsqrtf((float)D), v);
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
