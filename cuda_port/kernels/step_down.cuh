// Down of Q2_K, and the shared expert's in Q8_0: a block has 32 rows, two tiles above one another. Teams of groups of
// lanes, as many as tiles side by side need, take pairs in turn. Results of a pair arrive in bytes (step_gate_up.cuh).

#define TEAMS (WARPS / SUPERS)          // pairs at a time
#define TILES 2                         // of a block
#define BLOCK_ROWS (TILES * TILE_ROWS)
#define VECTOR_BYTES (2 * 256 + 16 * 8) // of a pair, for a tile's columns: planes, then fields
#define STAGE_BYTES (TILES * TILE_BYTES_Q2_K + VECTOR_BYTES)
#define SHARED_PITCH ((size_t)(WIDTH / 32 * 34))
#define SHARED_COLUMNS (WIDTH / (WARPS / TILES))  // of a group of lanes

// Eight signed bytes as four pairs of halves.
DEVICE void byte_halves(u32 (&to)[4], u32 first, u32 second) {
    const __half2 offset = as_pair(0x64806480);  // 1024 + 128
    u32 w[2] = {first ^ 0x80808080, second ^ 0x80808080};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        to[i] = pair_of(__hsub2(as_pair(bytes_of(w[i / 2], 0x64646464, i % 2 ? 0x4342 : 0x4140)), offset));
}

// Sixteen rows of the shared expert, SHARED_COLUMNS wide: read before anything else.
struct SharedRows {
    Quad codes[2][SHARED_COLUMNS / 64];
    Duo scales[2][SHARED_COLUMNS / 128];

    DEVICE void fetch(const u8* first, int k) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u8* row = first + (lane_id() / 4 + 8 * r) * SHARED_PITCH;
#pragma unroll
            for (int c = 0; c < SHARED_COLUMNS / 64; ++c)
                codes[r][c] = stream16(row + k + 64 * c + 16 * (lane_id() % 4));
#pragma unroll
            for (int c = 0; c < SHARED_COLUMNS / 128; ++c)
                scales[r][c] = Duo{{stream4(row + WIDTH + k / 16 + 8 * c), stream4(row + WIDTH + k / 16 + 8 * c + 4)}};
        }
    }

    // sums[vector][16 rows], vectors `pitch` floats apart: of mid f16 [tokens, 2, WIDTH] from column k on.
    DEVICE void multiply(const __half* mid, int k, int tokens, float* sums, int pitch) const {
        int g = lane_id() / 4, q = lane_id() % 4;
        for (int n = 0; 4 * n < tokens; ++n) {
            float acc[2] = {0, 0};
#pragma unroll
            for (int c = 0; c < SHARED_COLUMNS / 32; ++c) {
                u32 w0[4], w1[4];
                byte_halves(w0, codes[0][c / 2].w[c % 2 * 2], codes[0][c / 2].w[c % 2 * 2 + 1]);
                byte_halves(w1, codes[1][c / 2].w[c % 2 * 2], codes[1][c / 2].w[c % 2 * 2 + 1]);
                u32 a[4] = {w0[0], w1[0], w0[1], w1[1]}, e[4] = {w0[2], w1[2], w0[3], w1[3]};
                Quad v = {{0, 0, 0, 0}};
                if (8 * n + g < 2 * tokens) v = *(const Quad*)(mid + (8 * n + g) * WIDTH + k + 32 * c + 8 * q);
                float sum[4] = {};
                mma(sum, a, v.w[0], v.w[1]);
                mma(sum, e, v.w[2], v.w[3]);
                acc[0] += half_bits(scales[0][c / 4].w[c / 2 % 2] >> c % 2 * 16) * (sum[0] + sum[1]);
                acc[1] += half_bits(scales[1][c / 4].w[c / 2 % 2] >> c % 2 * 16) * (sum[2] + sum[3]);
            }
            if (4 * n + q < tokens) {
                float* to = sums + (4 * n + q) * pitch;
                to[g] = acc[0], to[8 + g] = acc[1];
            }
        }
    }
};

// Rows g and g + 8 of a tile times a pair's columns: this lane's 64 of them.
DEVICE void multiply(float* y, const u8* tile, const u32 (&b)[4][4], const float2 (&fields)[4]) {
    int lane = lane_id();
    Quad c0 = *(const Quad*)(tile + 16 * lane), c1 = *(const Quad*)(tile + 512 + 16 * lane);
    Duo s = *(const Duo*)(tile + 1024 + 8 * lane), d = *(const Duo*)(tile + 1280 + lane / 4 * 8);
    float sum[2] = {0, 0}, least[2] = {0, 0};
#pragma unroll
    for (int f = 0; f < 4; ++f) {   // codes stay where they are in their bytes, 4^f too large
        const u32 mask = 0x03030303u << 2 * f;
        u32 first[4] = {c0.w[0] & mask, c1.w[0] & mask, c0.w[1] & mask, c1.w[1] & mask};
        u32 second[4] = {c0.w[2] & mask, c1.w[2] & mask, c0.w[3] & mask, c1.w[3] & mask};
        int acc[4] = {};
        mma_bytes_unsigned(acc, first, b[f][0], b[f][1]);
        mma_bytes_unsigned(acc, second, b[f][2], b[f][3]);
        float scale = fields[f].x * (1.f / (1 << 2 * f));
        sum[0] += (float)(acc[0] * 256 + acc[1]) * (scale * (float)(s.w[0] >> 8 * f & 15));
        sum[1] += (float)(acc[2] * 256 + acc[3]) * (scale * (float)(s.w[1] >> 8 * f & 15));
        least[0] += fields[f].y * (float)(s.w[0] >> (8 * f + 4) & 15);
        least[1] += fields[f].y * (float)(s.w[1] >> (8 * f + 4) & 15);
    }
    y[0] = half_bits(d.w[0]) * sum[0] - half_bits(d.w[0] >> 16) * least[0];
    y[1] = half_bits(d.w[1]) * sum[1] - half_bits(d.w[1] >> 16) * least[1];
}

// y f32 [T, ROWS] = the sum of a token's pairs and of its shared expert.
KERNEL __launch_bounds__(THREADS, 1) void down(const u8* mid, const float2* fields, const __half* shared_mid,
                                              const int* selected, const u8* matrix, const u8* shared, int tokens,
                                              float* y) {
    int warp = group_id(), lane = lane_id(), g = lane / 4, q = lane % 4;
    int team = warp / SUPERS, super = warp % SUPERS;
    u8* ring = memory + warp * DEPTH * STAGE_BYTES;
    float* sums = (float*)(memory + WARPS * DEPTH * STAGE_BYTES);   // [MOST][WARPS][LANES]
    float* shared_sums = sums + MOST * WARPS * LANES;               // [MOST][WARPS][TILE_ROWS]
    int* order = (int*)(shared_sums + MOST * WARPS * TILE_ROWS);    // [MOST * SLOTS]
    const int half = WARPS / TILES;     // groups of lanes of a tile of the shared expert
    SharedRows rows;
    rows.fetch(shared + (blockIdx.x * BLOCK_ROWS + warp / half * TILE_ROWS) * SHARED_PITCH,
               warp % half * SHARED_COLUMNS);
    for (int t = 0; t < tokens; ++t) sums[(t * WARPS + warp) * LANES + lane] = 0;
    HOLD_TURN();
    int pairs = tokens * SLOTS;
    sort_pairs(selected, pairs, (int*)memory, order);
    auto begin = [&](int k, int stage) {
        if (k < pairs) {
            int pair = pair_of_entry(order[k]);
            size_t tile = (size_t)expert_of_entry(order[k]) * (ROWS / TILE_ROWS) + blockIdx.x * TILES;
            u8* to = ring + stage * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < TILES; ++i, to += TILE_BYTES_Q2_K) {
                const u8* from = matrix + ((tile + i) * SUPERS + super) * TILE_BYTES_Q2_K;
                copy16(to + 16 * lane, from + 16 * lane);
                copy16(to + 512 + 16 * lane, from + 512 + 16 * lane);
                if (lane < 20) copy16(to + 1024 + 16 * lane, from + 1024 + 16 * lane);
            }
            const u8* scales = (const u8*)(fields + pair * (WIDTH / 16) + super * 16);
            copy16(to + 16 * lane, mid + ((size_t)pair * 2 + lane / 16) * WIDTH + super * 256 + lane % 16 * 16);
            if (lane < 8) copy16(to + 512 + 16 * lane, scales + 16 * lane);
        }
        copies_end();
    };
    for (int s = 0; s < DEPTH; ++s) begin(team + s * TEAMS, s);
    rows.multiply(shared_mid, warp % half * SHARED_COLUMNS, tokens, shared_sums + warp * TILE_ROWS, WARPS * TILE_ROWS);
    for (int k = team, stage = 0; k < pairs; k += TEAMS) {
        await_copies<DEPTH - 1>();
        lanes_meet();
        const u8* tiles = ring + stage * STAGE_BYTES;
        const u8* vector = tiles + TILES * TILE_BYTES_Q2_K;
        u32 b[4][4];
        float2 by[4];
#pragma unroll
        for (int f = 0; f < 4; ++f) {
            Quad v = {{0, 0, 0, 0}};
            if (g / 2 == q) v = *(const Quad*)(vector + g % 2 * 256 + q / 2 * 128 + 32 * f + q % 2 * 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) b[f][j] = v.w[j];
            by[f] = ((const float2*)(vector + 512))[4 * q + f];
        }
        float v[4];
        multiply(v, tiles, b, by);
        multiply(v + 2, tiles + TILE_BYTES_Q2_K, b, by);
        lanes_meet();
        begin(k + DEPTH * TEAMS, stage);
        stage = stage + 1 == DEPTH ? 0 : stage + 1;
        sums[(pair_of_entry(order[k]) / SLOTS * WARPS + warp) * LANES + lane] += quad_sums(v);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * BLOCK_ROWS; i += THREADS) {
        int t = i / BLOCK_ROWS, r = i % BLOCK_ROWS;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += sums[(t * WARPS + w) * LANES + lane_of_row(r)];
#pragma unroll
        for (int w = 0; w < half; ++w)
            sum += shared_sums[(t * WARPS + r / TILE_ROWS * half + w) * TILE_ROWS + r % TILE_ROWS];
        y[(size_t)t * ROWS + blockIdx.x * BLOCK_ROWS + r] = sum;
    }
}
