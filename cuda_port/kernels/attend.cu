// o[t, h] = sum_k exp(z_k - m) key_k / (exp(sink[h] - m) + sum_k exp(z_k - m)), z_k = q[t, h] . key_k / sqrt(D), where
// a row is key and value at once: all heads of a token share its rows, so a token is a product of matrices by itself.
//
// Macros: H heads of D channels, the last R rotary; rows of ROW bytes, PACKED or floats; WIDTH positions of the window,
// held in a ring of RING; RATIO tokens a compressed row (0: none), PAGE_ROWS of a page; CHOSEN: a token that sees more
// than `picks` rows has a list of those it attends to. KEYS of a tile, GROUPS of 32 lanes; of a chunk, HEADS of a
// block; of a step, SLICES of a token's keys, BLOCKS that are to share a multiprocessor, and STREAMS of HIDDEN channels.
// STEP: 0 for a chunk, 1 for a step, 2 for a step of so many tokens that blocks may have more heads each.
#include "cluster.cuh"
#include "mma.cuh"
#include "rows.cuh"
#include "sinkhorn.cuh"

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

    // Whether key i of a step was there before it. What earlier steps have written is there before this one begins, for
    // copies lie between them.
    DEVICE bool old(int i) const {
#if RATIO
        return i < near - 1 || i >= near && !chosen && i - near < position / RATIO;
#else
        return i < near - 1;
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

// A head's query: divided by its rms, rotated, times `by`. 32 lanes; channels in fours.
#define QUADS ((D / 4 + LANES - 1) / LANES)
DEVICE void load_query(const float* q, float4 (&v)[QUADS]) {
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        int c = 4 * (LANES * i + lane_id());
        v[i] = c < D ? *(const float4*)(q + c) : make_float4(0, 0, 0, 0);
    }
}

DEVICE void query(float4 (&v)[QUADS], const float* cosine, const float* sine, float eps, float by) {
    int lane = lane_id();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
        sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
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

#define THREADS (GROUPS * LANES)
#if STEP && BLOCKS == 1
#define IN_FLIGHT 10            // chunks of 8 channels that a thread has on their way
#else
#define IN_FLIGHT 5
#endif
#define PAD (D + 8)             // halves between vectors in shared memory
#define SCORE_PAD (KEYS + 4)    // floats
#define WEIGHT_PAD (KEYS + 8)
#define GROUP_CHANNELS (D / GROUPS)  // of the outputs, a multiple of 16

// Rows at[first ... end - 1] as halves [KEYS][PAD], but for those that are null.
DEVICE void load_keys(const u8** at, __half* keys, int first, int end) {
    int stop = end * (D / 8);
#pragma unroll 1  // code that is run once takes longer to fetch than to run
    for (int batch = first * (D / 8); batch < stop; batch += IN_FLIGHT * THREADS) {
        RawChunk raw[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            int chunk = batch + i * THREADS + threadIdx.x;
            const u8* row = chunk < stop ? at[chunk / (D / 8)] : 0;
            if (row) raw[i] = load_raw<D, R, PACKED>(row, chunk % (D / 8));
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            int chunk = batch + i * THREADS + threadIdx.x, key = chunk / (D / 8), part = chunk % (D / 8);
            if (chunk < stop && at[key])
                *(uint4*)(keys + key * PAD + 8 * part) = chunk_halves<D, R, PACKED>(raw[i], part);
        }
    }
}

// Zeros for keys `first` up to the next whole tile of 16.
DEVICE void no_keys(__half* keys, int first) {
    int end = min((first + 15) / 16 * 16, KEYS);
    for (int i = first * (D / 8) + threadIdx.x; i < end * (D / 8); i += THREADS)
        *(uint4*)(keys + i / (D / 8) * PAD + 8 * (i % (D / 8))) = make_uint4(0, 0, 0, 0);
}

// A head of a token, as loaded, in halves at `to`, its scores to be powers of two; zeros where there is no such head.
DEVICE void put_query(float4 (&v)[QUADS], bool real, const float* cosine, const float* sine, float eps, __half* to) {
    query(v, cosine, sine, eps, real ? rsqrtf((float)D) * LOG2E : 0.f);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        int c = 4 * (LANES * i + lane_id());
        if (c >= D) continue;
        ((__half2*)(to + c))[0] = __floats2half2_rn(v[i].x, v[i].y);
        ((__half2*)(to + c))[1] = __floats2half2_rn(v[i].z, v[i].w);
    }
}

#if STEP
// What the blocks of a cluster have found, to the outputs of some heads each: sums [OWN][SLICES][D], their limits with
// the sums of weights. head: the first of them.
template <int Own>
DEVICE void finish(const float* sums, const float (*limits)[SLICES][2], int head, const float* sink,
                   const float* cosine, const float* sine, float* o) {
    for (int i = threadIdx.x; i < Own * (D / 4); i += THREADS) {
        int own = i / (D / 4), h = head + own, c = i % (D / 4) * 4;
        if (h >= H) continue;
        float start = sink[h] * LOG2E, last = start, weight = 0;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int r = 0; r < SLICES; ++r) last = fmaxf(last, limits[own][r][0]);
#pragma unroll
        for (int r = 0; r < SLICES; ++r) {
            float by = exp2f(limits[own][r][0] - last);
            float4 part = *(const float4*)(sums + (own * SLICES + r) * D + c);
            weight += limits[own][r][1] * by;
            sum.x += part.x * by, sum.y += part.y * by, sum.z += part.z * by, sum.w += part.w * by;
        }
        weight = 1 / (weight + exp2f(start - last));
        float2 v0 = turned_back(make_float2(sum.x * weight, sum.y * weight), c, cosine, sine);
        float2 v1 = turned_back(make_float2(sum.z * weight, sum.w * weight), c + 2, cosine, sine);
        *(float4*)(o + h * D + c) = make_float4(v0.x, v0.y, v1.x, v1.y);
    }
}
#endif

#if STEP != 1
#define HEAD_TILES (HEADS / 16)
#define KEY_GROUPS (GROUPS / HEAD_TILES)    // groups of lanes that share the keys of a tile of heads
#define GROUP_KEYS (KEYS / KEY_GROUPS)      // a multiple of 16

// A row to shared memory while other work is done, by `all` threads; words of 8 bytes if rows are whole ones.
DEVICE void fetch_row(u8* to, const u8* from, int thread, int all) {
#if DS4_MMA_PTX && ROW % 4 == 0
    const int WORD = ROW % 8 == 0 ? 8 : 4;
    for (int i = thread * WORD; i < ROW; i += all * WORD)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                     ::"r"((u32)__cvta_generic_to_shared(to + i)), "l"(from + i), "n"(WORD));
#else
    for (int i = 2 * thread; i < ROW; i += 2 * all) *(u16*)(to + i) = *(const u16*)(from + i);
#endif
}

DEVICE void fetched() {
#if DS4_MMA_PTX
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

DEVICE void await_fetched() {
#if DS4_MMA_PTX
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

// A chunk. Grid (H / HEADS, T). q [T, H D]; tables [T, R / 2]; the window's ring at `ring` + slots[0] * stride for
// positions before the chunk's first, fresh rows [T, ROW] from there on; pages [P]; chosen [T, picks]; o [T, H D].
// Shared memory: 2 (KEYS + HEADS) PAD + KEYS ROW + 4 HEADS SCORE_PAD + 2 HEADS WEIGHT_PAD + 12 HEADS bytes.
//
// A step has what the other form of it has (below), needs clusters, and 4 HEADS D bytes more.
#if STEP
#define OWN_HEADS (HEADS / SLICES)
KERNEL CLUSTER_OF(1, 1, SLICES) __launch_bounds__(THREADS) void attend(
    const float* q, const float* cosine, const float* sine, const u8* ring, long long stride, const int* slots,
    const u8* rows, const int* pages, int page_step, const int* positions, const int* chosen, int picks,
    const float* sink, float eps, float* o, float*, float*, const float* hc_sums, const float* hc_scale,
    const float* hc_base, int iterations, float hc_eps, float norm_eps, float* post, float* m) {
    PASS_TURN();
    const u8* fresh = 0;
#else
KERNEL __launch_bounds__(THREADS) void attend(
    const float* q, const float* cosine, const float* sine, const u8* ring, long long stride, const int* slots,
    const u8* fresh, const u8* rows, const int* pages, const int* positions, const int* chosen, int picks,
    const float* sink, float eps, float* o) {
    TAKE_TURN();
#endif
    extern __shared__ __align__(16) u8 memory[];
    __half* keys = (__half*)memory;
    __half* queries = keys + KEYS * PAD;
    u8* raw = (u8*)(queries + HEADS * PAD);  // the next tile's rows, as they lie in memory
    float* scores = (float*)(raw + KEYS * ROW);
    float *most = scores + HEADS * SCORE_PAD, *total = most + HEADS, *shrink = total + HEADS;
    __half* weights = (__half*)(shrink + HEADS);
    int tid = threadIdx.x, lane = lane_id(), group = group_id(), t = blockIdx.y;
#if STEP
    if (blockIdx.x * HEADS >= H) {
        AWAIT_TURN();
        WayBack back = {hc_sums, hc_scale, hc_base, iterations, hc_eps, norm_eps, post, m};
        if (blockIdx.z == 0 && tid == 0) way_back<STREAMS, HIDDEN>(back, t);
        return;
    }
    __shared__ Arrivals arrivals;
    __shared__ __align__(8) float own_limits[OWN_HEADS][SLICES][2];
    float* own = (float*)(weights + HEADS * WEIGHT_PAD);
    if (tid == 0) arrivals.open(4 * HEADS * (D + 2));
    cluster_arrive();
    pages += (size_t)t * page_step;
    int slot = slots[t], start = positions[t] + 1;
#else
    int slot = slots[0], start = positions[0];
#endif
    int head = blockIdx.x * HEADS, position = positions[t];
    cosine += (size_t)t * (R / 2), sine += (size_t)t * (R / 2);
    Keys all(ring + (size_t)slot * stride, fresh, rows, pages, chosen + (size_t)t * picks, picks, start, position);
#if STEP
    int slice = blockIdx.z, begin = all.count * slice / SLICES, end = all.count * (slice + 1) / SLICES;
#else
    int begin = 0, end = all.count;
#endif
    const int FETCHERS = THREADS / KEYS;  // threads of a row
    auto fetch = [&](int first, int which) {  // which: 1 of what is old, 0 of what is not, 2 of all
        int key = first + tid / FETCHERS;
        if (key < end && (which == 2 || all.old(key) == which))
            fetch_row(raw + tid / FETCHERS * ROW, all.at(key), tid % FETCHERS, FETCHERS);
        fetched();
    };
#if STEP
    fetch(begin, 1);
    cluster_wait();
    AWAIT_TURN();
    fetch(begin, 0);
#else
    fetch(begin, 2);
#endif
    for (int h = group; h < HEADS; h += GROUPS) {
        float4 v[QUADS];
        load_query(q + ((size_t)t * H + min(head + h, H - 1)) * D, v);
        put_query(v, head + h < H, cosine, sine, eps, queries + h * PAD);
        if (lane == 0) most[h] = -INFINITE, total[h] = 0;
    }
    float sums[HEAD_TILES][GROUP_CHANNELS / 8][4] = {};
    for (int first = begin; first < end; first += KEYS) {
        int left = end - first;
        await_fetched();
        __syncthreads();
#pragma unroll 4
        for (int i = tid; i < KEYS * (D / 8); i += THREADS) {
            int key = i / (D / 8), part = i % (D / 8);
            RawChunk chunk = {make_uint4(0, 0, 0, 0), 0};
            if (key < left) chunk = load_raw<D, R, PACKED>(raw + key * ROW, part);
            *(uint4*)(keys + key * PAD + 8 * part) = chunk_halves<D, R, PACKED>(chunk, part);
        }
        __syncthreads();
        fetch(first + KEYS, 2);
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
#if STEP
    const int OUT_PAD = D + 4;
    float* out = (float*)memory;  // over keys and queries
    static_assert(4 * HEADS * OUT_PAD <= 2 * (KEYS + HEADS) * PAD, "room for the sums");
#pragma unroll
    for (int i = 0; i < HEAD_TILES; ++i)
#pragma unroll
        for (int n = 0; n < GROUP_CHANNELS / 8; ++n) {
            float* to = out + (16 * i + lane / 4) * OUT_PAD + group * GROUP_CHANNELS + 8 * n + lane % 4 * 2;
            *(float2*)to = make_float2(sums[i][n][0], sums[i][n][1]);
            *(float2*)(to + 8 * OUT_PAD) = make_float2(sums[i][n][2], sums[i][n][3]);
        }
    Arrivals::send_ready();
    __syncthreads();
    if (tid < HEADS) {
        int to = tid / OWN_HEADS, which = tid % OWN_HEADS;
        arrivals.send(to, own + (which * SLICES + slice) * D, out + tid * OUT_PAD, 4 * D);
        arrivals.post(to, own_limits[which][slice], make_float2(most[tid], total[tid]));
    }
    arrivals.wait();
    cluster_arrive();
    finish<OWN_HEADS>(own, own_limits, head + slice * OWN_HEADS, sink, cosine, sine, o + (size_t)t * H * D);
    cluster_wait();  // a block must not end while what it sends is read
#else
#pragma unroll
    for (int i = 0; i < HEAD_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int h = 16 * i + 8 * half + lane / 4;
            if (head + h >= H) continue;
            float last = fmaxf(most[h], sink[head + h] * LOG2E), part = exp2f(most[h] - last);
            float by = part / (total[h] * part + exp2f(sink[head + h] * LOG2E - last));
#pragma unroll
            for (int n = 0; n < GROUP_CHANNELS / 8; ++n) {
                int c = group * GROUP_CHANNELS + 8 * n + lane % 4 * 2;
                float2 v = make_float2(sums[i][n][2 * half] * by, sums[i][n][2 * half + 1] * by);
                *(float2*)(o + ((size_t)t * H + head + h) * D + c) = turned_back(v, c, cosine, sine);
            }
        }
#endif
}
#else
#define HEADS 16
#define SHARES 4                            // of a head's channels, each to two groups of lanes
#define SHARE (D / SHARES)
#define KEY_TILES ((KEYS / 16 + 1) / 2)     // of 16 keys, of one of those two
#define QUERY_BYTES (2 * HEADS * PAD)
#define PARTIAL_BYTES (4 * SHARES * HEADS * SCORE_PAD)
#define MIDDLE_BYTES (QUERY_BYTES > PARTIAL_BYTES ? QUERY_BYTES : PARTIAL_BYTES)

// A step: the keys of a token are split over SLICES blocks, which are a cluster where there are clusters and put their
// sums together; else `combine` does that. Grid (H / HEADS, T, SLICES), 8 groups of lanes. A token has its slot, its
// position and its tables; pages [T, page_step], chosen [T, picks]; sums [T, H, SLICES, D] and limits [T, H, SLICES, 2]
// are used without clusters only. Where the grid has a column more, its blocks do what is left of the hyper-connection
// before. Shared memory: 2 KEYS PAD + MIDDLE_BYTES + 2 HEADS WEIGHT_PAD + 12 HEADS + 8 KEYS +
// OUT_BYTES.
#define OWN_HEADS (HEADS / SLICES)  // that a block finishes
#define OUT_APART (CLUSTERED && BLOCKS == 1)
#define OUT_BYTES (OUT_APART ? 4 * HEADS * D : 0)
KERNEL CLUSTER_OF(1, 1, SLICES) __launch_bounds__(THREADS, BLOCKS) void attend(
    const float* q, const float* cosine, const float* sine, const u8* ring, long long stride, const int* slots,
    const u8* rows, const int* pages, int page_step, const int* positions, const int* chosen, int picks,
    const float* sink, float eps, float* o, float* all_sums, float* limits, const float* hc_sums, const float* hc_scale,
    const float* hc_base, int iterations, float hc_eps, float norm_eps, float* post, float* m) {
    PASS_TURN();  // positions, slots and pages were there before anything that is still under way
    extern __shared__ __align__(16) u8 memory[];
    __half *keys = (__half*)memory, *queries = keys + KEYS * PAD;
    float *partial = (float*)queries, *most = (float*)((u8*)queries + MIDDLE_BYTES), *total = most + HEADS;
    float* shrink = total + HEADS;
    __half* weights = (__half*)(shrink + HEADS);
    const u8** at = (const u8**)(weights + HEADS * WEIGHT_PAD);
    int tid = threadIdx.x, lane = lane_id(), group = group_id(), t = blockIdx.y, slice = blockIdx.z;
    if (blockIdx.x * HEADS >= H) {
        AWAIT_TURN();
        WayBack back = {hc_sums, hc_scale, hc_base, iterations, hc_eps, norm_eps, post, m};
        if (slice == 0 && tid == 0) way_back<STREAMS, HIDDEN>(back, t);
        return;
    }
    int head = blockIdx.x * HEADS, position = positions[t], share = group % SHARES;
#if CLUSTERED
    __shared__ Arrivals arrivals;
    __shared__ __align__(8) float own_limits[OWN_HEADS][SLICES][2];
    float* own = (float*)(OUT_APART ? (u8*)(at + KEYS) : memory);  // [OWN_HEADS][SLICES][D]
    if (tid == 0) arrivals.open(4 * HEADS * (D + 2));
    cluster_arrive();
#endif
    cosine += (size_t)t * (R / 2), sine += (size_t)t * (R / 2);
    Keys all(ring + (size_t)slots[t] * stride, 0, rows, pages + (size_t)t * page_step, chosen + (size_t)t * picks,
             picks, position + 1, position);
    int begin = all.count * slice / SLICES, end = all.count * (slice + 1) / SLICES;
    if (tid < HEADS) most[tid] = -INFINITE, total[tid] = 0;

    u32 a[SHARE / 16][4];
    float sums[GROUP_CHANNELS / 8][4] = {};
    // Turn 0: before this step's turn, what is old of the first tile. Turn 1: the rest of it, and the queries.
    int turn = gridDim.x == 0;  // 0, but not for the compiler, which would write the loop three times
#pragma unroll 1
    for (int first = begin; turn == 0 || first < end;) {
        int left = min(end - first, KEYS);
        __syncthreads();  // the tile before is done with
        if (tid < left) at[tid] = turn > 1 || all.old(first + tid) == (turn == 0) ? all.at(first + tid) : 0;
        no_keys(keys, left);
        __syncthreads();
        float4 v[HEADS / GROUPS][QUADS];
        auto load_queries = [&] {
            if (turn != 1) return;
#pragma unroll
            for (int i = 0; i < HEADS / GROUPS; ++i)
                load_query(q + ((size_t)t * H + min(head + group + GROUPS * i, H - 1)) * D, v[i]);
        };
        if (BLOCKS == 1) load_queries();  // on their way beside keys, where there are registers for both
        load_keys(at, keys, turn == 1 ? min(max(all.near - 1 - begin, 0), left) : 0, left);
        if (BLOCKS > 1) load_queries();
        if (turn == 0) {
#if CLUSTERED
            cluster_wait();
#endif
            AWAIT_TURN();
            turn = 1;
            continue;
        }
        if (turn == 1)
#pragma unroll
            for (int i = 0; i < HEADS / GROUPS; ++i) {
                int h = group + GROUPS * i;
                put_query(v[i], head + h < H, cosine, sine, eps, queries + h * PAD);
            }
        __syncthreads();
        if (turn == 1) {
#pragma unroll
            for (int k = 0; k < SHARE / 16; ++k) load_a(a[k], queries + share * SHARE + 16 * k, PAD);
            __syncthreads();  // `partial` takes their place
        }
        turn = 2, first += KEYS;
        float z[KEY_TILES][2][4] = {};
#pragma unroll
        for (int k = 0; k < SHARE / 16; ++k)
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i) {
                int key = 16 * (2 * i + group / SHARES);
                if (key >= left) continue;
                u32 b[4];
                load_b(b, keys + key * PAD + share * SHARE + 16 * k, PAD);
                mma(z[i][0], a[k], b[0], b[1]);
                mma(z[i][1], a[k], b[2], b[3]);
            }
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                int key = 16 * (2 * i + group / SHARES) + 8 * n;
                if (key >= KEYS) continue;
                float* to = partial + (share * HEADS + lane / 4) * SCORE_PAD + key + lane % 4 * 2;
                to[0] = z[i][n][0], to[1] = z[i][n][1];
                to[8 * SCORE_PAD] = z[i][n][2], to[8 * SCORE_PAD + 1] = z[i][n][3];
            }
        __syncthreads();
        for (int h = group; h < HEADS; h += GROUPS) {
            const int EACH = (KEYS + LANES - 1) / LANES;
            float score[EACH], before = most[h], next = before, sum = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                int key = LANES * i + lane;
                score[i] = -INFINITE;
                if (key >= left) continue;
                score[i] = 0;
                for (int s = 0; s < SHARES; ++s) score[i] += partial[(s * HEADS + h) * SCORE_PAD + key];
                next = fmaxf(next, score[i]);
            }
            next = lane_max(next);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                __half weight = __float2half_rn(exp2f(score[i] - next));
                if (LANES * i + lane < KEYS) weights[h * WEIGHT_PAD + LANES * i + lane] = weight;
                sum += __half2float(weight);
            }
            sum = lane_sum(sum);
            if (lane == 0) {
                float by = exp2f(before - next);
                shrink[h] = by, most[h] = next, total[h] = total[h] * by + sum;
            }
        }
        __syncthreads();
        float low = shrink[lane / 4], high = shrink[lane / 4 + 8];
#pragma unroll
        for (int n = 0; n < GROUP_CHANNELS / 8; ++n)
            sums[n][0] *= low, sums[n][1] *= low, sums[n][2] *= high, sums[n][3] *= high;
#pragma unroll
        for (int k = 0; k < KEYS; k += 16) {
            if (k >= left) break;
            u32 weight[4], b[4];
            load_a(weight, weights + k, WEIGHT_PAD);
#pragma unroll
            for (int n = 0; n < GROUP_CHANNELS; n += 16) {
                load_b_rows(b, keys + k * PAD + group * GROUP_CHANNELS + n, PAD);
                mma(sums[n / 8], weight, b[0], b[1]);
                mma(sums[n / 8 + 1], weight, b[2], b[3]);
            }
        }
    }
#if CLUSTERED
    __syncthreads();
#if OUT_APART
    const int OUT_PAD = D + 4;
    float* out = (float*)memory;
#pragma unroll
    for (int n = 0; n < GROUP_CHANNELS / 8; ++n) {
        float* to = out + lane / 4 * OUT_PAD + group * GROUP_CHANNELS + 8 * n + lane % 4 * 2;
        *(float2*)to = make_float2(sums[n][0], sums[n][1]);
        *(float2*)(to + 8 * OUT_PAD) = make_float2(sums[n][2], sums[n][3]);
    }
    Arrivals::send_ready();
    __syncthreads();
    if (tid < HEADS)
        arrivals.send(tid / OWN_HEADS, own + (tid % OWN_HEADS * SLICES + slice) * D, out + tid * OUT_PAD, 4 * D);
#else
    cluster_arrive();  // nobody reads keys any more
    cluster_wait();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int h = lane / 4 + 8 * half;
        float* there = own + (h % OWN_HEADS * SLICES + slice) * D + group * GROUP_CHANNELS + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < GROUP_CHANNELS / 8; ++n)
            arrivals.post(h / OWN_HEADS, there + 8 * n, make_float2(sums[n][2 * half], sums[n][2 * half + 1]));
    }
#endif
    if (tid < HEADS)
        arrivals.post(tid / OWN_HEADS, own_limits[tid % OWN_HEADS][slice], make_float2(most[tid], total[tid]));
    arrivals.wait();
    cluster_arrive();
    finish<OWN_HEADS>(own, own_limits, head + slice * OWN_HEADS, sink, cosine, sine, o + (size_t)t * H * D);
    cluster_wait();  // a block must not end while what it sends is read
#else
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int h = lane / 4 + 8 * half;
        if (head + h >= H) continue;
        size_t to = ((size_t)t * H + head + h) * SLICES + slice;
        if (group == 0 && lane % 4 == 0) limits[2 * to] = most[h], limits[2 * to + 1] = total[h];
#pragma unroll
        for (int n = 0; n < GROUP_CHANNELS / 8; ++n)
            *(float2*)(all_sums + to * D + group * GROUP_CHANNELS + 8 * n + lane % 4 * 2) =
                make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
    }
#endif
}

// The slices of a head of a token to its output. Grid (H, T), a thread two channels.
KERNEL void combine(const float* sums, const float* limits, const float* sink, const float* cosine, const float* sine,
                    float* o) {
    TAKE_TURN();
    int h = blockIdx.x, t = blockIdx.y, c = 2 * threadIdx.x;
    size_t head = (size_t)t * H + h;
    float most = sink[h] * LOG2E;
    for (int i = 0; i < SLICES; ++i) most = fmaxf(most, limits[2 * (head * SLICES + i)]);
    float total = exp2f(sink[h] * LOG2E - most);
    float2 v = make_float2(0, 0);
    for (int i = 0; i < SLICES; ++i) {
        size_t slice = head * SLICES + i;
        float by = exp2f(limits[2 * slice] - most);
        float2 part = *(const float2*)(sums + slice * D + c);
        total += limits[2 * slice + 1] * by, v.x += part.x * by, v.y += part.y * by;
    }
    v.x /= total, v.y /= total;
    *(float2*)(o + head * D + c) =
        turned_back(v, c, cosine + (size_t)t * (R / 2), sine + (size_t)t * (R / 2));
}
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
