// Attention of a chunk: many heads to a block, whose keys all groups of lanes share.
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
KERNEL __launch_bounds__(THREADS) void attend(
    const float* q, const float* cosine, const float* sine, const u8* ring, long long stride, const int* slots,
    const u8* fresh, const u8* rows, const int* pages, const int* positions, const int* chosen, int picks,
    const float* sink, float eps, float* o) {
    TAKE_TURN();
    extern __shared__ __align__(16) u8 memory[];
    __half* keys = (__half*)memory;
    __half* queries = keys + KEYS * PAD;
    u8* raw = (u8*)(queries + HEADS * PAD);  // the next tile's rows, as they lie in memory
    float* scores = (float*)(raw + KEYS * ROW);
    Running running(scores + HEADS * SCORE_PAD, HEADS);
    __half* weights = (__half*)(running.shrink + HEADS);
    int tid = threadIdx.x, lane = lane_id(), group = group_id(), t = blockIdx.y;
    int head = blockIdx.x * HEADS, position = positions[t];
    cosine += (size_t)t * (R / 2), sine += (size_t)t * (R / 2);
    Keys all(ring + (size_t)slots[0] * stride, fresh, rows, pages, chosen + (size_t)t * picks, picks, positions[0],
             position);
    const int FETCHERS = THREADS / KEYS;  // threads of a row
    auto fetch = [&](int first) {
        int key = first + tid / FETCHERS;
        if (key < all.count) fetch_row(raw + tid / FETCHERS * ROW, all.at(key), tid % FETCHERS, FETCHERS);
        fetched();
    };
    fetch(0);
    for (int h = group; h < HEADS; h += GROUPS) {
        float4 v[QUADS];
        load_query(q + ((size_t)t * H + min(head + h, H - 1)) * D, v);
        put_query(v, head + h < H, cosine, sine, eps, queries + h * PAD);
        if (lane == 0) running.open(h);
    }
    float sums[HEAD_TILES][GROUP_CHANNELS / 8][4] = {};
    for (int first = 0; first < all.count; first += KEYS) {
        int left = all.count - first;
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
        fetch(first + KEYS);
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
            float score[TILE_EACH];
#pragma unroll
            for (int i = 0; i < TILE_EACH; ++i) {
                int key = LANES * i + lane;
                score[i] = key < left ? scores[h * SCORE_PAD + key] : -INFINITE;
            }
            running.weigh(h, score, weights + h * WEIGHT_PAD);
        }
        __syncthreads();
        add_values(sums, running.shrink, weights, keys, left);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HEAD_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int h = 16 * i + 8 * half + lane / 4;
            if (head + h >= H) continue;
            float last = fmaxf(running.most[h], sink[head + h] * LOG2E), part = exp2f(running.most[h] - last);
            float by = part / (running.total[h] * part + exp2f(sink[head + h] * LOG2E - last));
#pragma unroll
            for (int n = 0; n < GROUP_CHANNELS / 8; ++n) {
                int c = group * GROUP_CHANNELS + 8 * n + lane % 4 * 2;
                float2 v = make_float2(sums[i][n][2 * half] * by, sums[i][n][2 * half + 1] * by);
                *(float2*)(o + ((size_t)t * H + head + h) * D + c) = turned_back(v, c, cosine, sine);
            }
        }
}
