// Attention of a step: few heads to a block, so that a token has more of them.
#define HEADS 16
#define SHARES 4                            // of a head's channels, each to KEY_SHARES groups of lanes
#define SHARE (D / SHARES)
#define KEY_SHARES (GROUPS / SHARES)
#define KEY_TILES ((KEYS / 16 + KEY_SHARES - 1) / KEY_SHARES)   // of 16 keys, of one of those
#define QUERY_BYTES (2 * HEADS * PAD)
#define PARTIAL_BYTES (4 * SHARES * HEADS * SCORE_PAD)
#define MIDDLE_BYTES (QUERY_BYTES > PARTIAL_BYTES ? QUERY_BYTES : PARTIAL_BYTES)

#define OWN_HEADS (HEADS / SLICES)          // that a block finishes
#define OF_TOKEN ((H + HEADS - 1) / HEADS)  // blocks with heads of their own

// What the blocks of a cluster have found, to the outputs of some heads each: sums [OWN_HEADS][SLICES][D], their limits
// with the sums of weights. head: the first of them.
DEVICE void finish(const float* sums, const float (*limits)[SLICES][2], int head, const float* sink,
                   const float* cosine, const float* sine, float* o) {
    for (int i = threadIdx.x; i < OWN_HEADS * (D / 4); i += THREADS) {
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

// A step: the keys of a token are split over SLICES blocks, which are a cluster where there are clusters and put their
// sums together; else `combine` does that. Grid (OF_TOKEN T, 1, SLICES) or (OF_TOKEN, T, SLICES), 8 or 16 groups of
// lanes. With hc_sums the grid's first has one more, which does what is left of the hyper-connection before, a thread a
// token. A token has its slot, position and tables; pages [T, page_step], chosen [T, picks]; sums [T, H, SLICES, D] and
// limits [T, H, SLICES, 2] are used without clusters only. Shared memory: 2 KEYS PAD + MIDDLE_BYTES + 12 HEADS + 8 KEYS
// + 2 HEADS WEIGHT_PAD + OUT_BYTES.
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
    float* partial = (float*)queries;
    Running running((float*)((u8*)queries + MIDDLE_BYTES), HEADS);
    __half* weights = (__half*)(running.shrink + HEADS);
    const u8** at = (const u8**)(weights + HEADS * WEIGHT_PAD);
    int tid = threadIdx.x, lane = lane_id(), group = group_id(), slice = blockIdx.z;
    int t = blockIdx.y + blockIdx.x / OF_TOKEN;
    if (hc_sums && blockIdx.x == gridDim.x - 1) {
        AWAIT_TURN();
        WayBack back = {hc_sums, hc_scale, hc_base, iterations, hc_eps, norm_eps, post, m};
        if (slice == 0 && tid < t) way_back<STREAMS, HIDDEN>(back, tid);
        return;
    }
    int head = blockIdx.x % OF_TOKEN * HEADS, position = positions[t], share = group % SHARES;
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
    if (tid < HEADS) running.open(tid);

    u32 a[SHARE / 16][4];
    float sums[1][GROUP_CHANNELS / 8][4] = {};
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
                int key = 16 * (KEY_SHARES * i + group / SHARES);
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
                int key = 16 * (KEY_SHARES * i + group / SHARES) + 8 * n;
                if (key >= KEYS) continue;
                float* to = partial + (share * HEADS + lane / 4) * SCORE_PAD + key + lane % 4 * 2;
                to[0] = z[i][n][0], to[1] = z[i][n][1];
                to[8 * SCORE_PAD] = z[i][n][2], to[8 * SCORE_PAD + 1] = z[i][n][3];
            }
        __syncthreads();
        for (int h = group; h < HEADS; h += GROUPS) {
            float score[TILE_EACH];
#pragma unroll
            for (int i = 0; i < TILE_EACH; ++i) {
                int key = LANES * i + lane;
                score[i] = key < left ? 0.f : -INFINITE;
                for (int s = 0; s < SHARES && key < left; ++s) score[i] += partial[(s * HEADS + h) * SCORE_PAD + key];
            }
            running.weigh(h, score, weights + h * WEIGHT_PAD);
        }
        __syncthreads();
        add_values(sums, running.shrink, weights, keys, left);
    }
#if CLUSTERED
    __syncthreads();
#if OUT_APART
    const int OUT_PAD = D + 4;
    float* out = (float*)memory;
#pragma unroll
    for (int n = 0; n < GROUP_CHANNELS / 8; ++n) {
        float* to = out + lane / 4 * OUT_PAD + group * GROUP_CHANNELS + 8 * n + lane % 4 * 2;
        *(float2*)to = make_float2(sums[0][n][0], sums[0][n][1]);
        *(float2*)(to + 8 * OUT_PAD) = make_float2(sums[0][n][2], sums[0][n][3]);
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
            arrivals.post(h / OWN_HEADS, there + 8 * n, make_float2(sums[0][n][2 * half], sums[0][n][2 * half + 1]));
    }
#endif
    if (tid < HEADS)
        arrivals.post(tid / OWN_HEADS, own_limits[tid % OWN_HEADS][slice],
                      make_float2(running.most[tid], running.total[tid]));
    arrivals.wait();
    cluster_arrive();
    finish(own, own_limits, head + slice * OWN_HEADS, sink, cosine, sine, o + (size_t)t * H * D);
    cluster_wait();  // a block must not end while what it sends is read
#else
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int h = lane / 4 + 8 * half;
        if (head + h >= H) continue;
        size_t to = ((size_t)t * H + head + h) * SLICES + slice;
        if (group == 0 && lane % 4 == 0) limits[2 * to] = running.most[h], limits[2 * to + 1] = running.total[h];
#pragma unroll
        for (int n = 0; n < GROUP_CHANNELS / 8; ++n)
            *(float2*)(all_sums + to * D + group * GROUP_CHANNELS + 8 * n + lane % 4 * 2) =
                make_float2(sums[0][n][2 * half], sums[0][n][2 * half + 1]);
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
