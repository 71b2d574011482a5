// Down of Q2_K, and the shared expert's in Q8_0: a block has 32 rows, two tiles above one another. Teams of groups of
// lanes, as many as tiles side by side need, take pairs in turn. Results of a pair arrive in bytes (step_gate_up.cuh).

#define TEAMS (WARPS / SUPERS)          // pairs at a time
#define TILES 2                         // of a block
#define BLOCK_ROWS (TILES * TILE_ROWS)
#define VECTOR_BYTES (2 * 256 + 16 * 8) // of a pair, for a tile's columns: planes, then fields
#define STAGE_BYTES (TILES * TILE_BYTES_Q2_K + VECTOR_BYTES)
#define OCTETS_BYTES 128                // of which a lane has 16 in each 32
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

// What tiles side by side are multiplied by, of a pair: this lane's 64 columns, 16 with a scale each.
struct Vector {
    u32 b[4][4];            // octets, as columns of B; zeros for what other lanes have
    float scale[4], sum[4]; // of columns f, whose codes come 4^f too large
    float scale_off[4], sums_off;   // -128 times a scale, and all four sums

    DEVICE void load(const u8* octets, const float2* fields) {
        float total = 0;
#pragma unroll
        for (int f = 0; f < 4; ++f) {
            *(Quad*)b[f] = *(const Quad*)(octets + 32 * f);
            float2 of = fields[f];
            scale[f] = of.x * (1.f / (1 << 2 * f)), scale_off[f] = scale[f] * -128, sum[f] = of.y;
            total += of.y;
        }
        sums_off = total * -128;
    }
};

// 128 and byte i of the word, which is less: below the exponent's byte it counts ones. The compiler would fetch a known
// one anew for each of these (own in matvec.cuh).
DEVICE float above_128(u32 word, int i) {
    u32 exponent = 0x43 ^ threadIdx.y;
    return __int_as_float((int)bytes_of(word, exponent, 0x4055 | i << 8));
}

// Rows g and g + 8 of a tile times a pair's columns: this lane's 64 of them.
DEVICE void multiply(float* y, const u8* tile, const Vector& v) {
    int lane = lane_id();
    Quad c0 = *(const Quad*)(tile + 16 * lane), c1 = *(const Quad*)(tile + 512 + 16 * lane);
    Duo s = *(const Duo*)(tile + 1024 + 8 * lane), d = *(const Duo*)(tile + 1280 + lane / 4 * 8);
    u32 scales[2], leasts[2];
    float sum[2] = {0, 0}, least[2] = {v.sums_off, v.sums_off};
#pragma unroll
    for (int r = 0; r < 2; ++r) scales[r] = s.w[r] & 0x0f0f0f0f, leasts[r] = s.w[r] >> 4 & 0x0f0f0f0f;
#pragma unroll
    for (int f = 0; f < 4; ++f) {   // codes stay where they are in their bytes
        const u32 mask = 0x03030303u << 2 * f;
        u32 first[4] = {c0.w[0] & mask, c1.w[0] & mask, c0.w[1] & mask, c1.w[1] & mask};
        u32 second[4] = {c0.w[2] & mask, c1.w[2] & mask, c0.w[3] & mask, c1.w[3] & mask};
        int acc[4] = {};
        mma_bytes_unsigned(acc, first, v.b[f][0], v.b[f][1]);
        mma_bytes_unsigned(acc, second, v.b[f][2], v.b[f][3]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float by = fmaf(v.scale[f], above_128(scales[r], f), v.scale_off[f]);
            sum[r] += (float)(acc[2 * r] * 256 + acc[2 * r + 1]) * by;
            least[r] += v.sum[f] * above_128(leasts[r], f);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) y[r] = half_bits(d.w[r]) * sum[r] - half_bits(d.w[r] >> 16) * least[r];
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
    u8* zeros = (u8*)(shared_sums + MOST * WARPS * TILE_ROWS);      // [OCTETS_BYTES]
    int* order = (int*)(zeros + OCTETS_BYTES);                      // [MOST * SLOTS]
    bool there = g / 2 == q;    // whose octets are not zeros
    const u8* own = there ? ring + TILES * TILE_BYTES_Q2_K + g % 2 * 256 + q / 2 * 128 + q % 2 * 16 : zeros;
    int own_pitch = there ? STAGE_BYTES : 0;
    const int half = WARPS / TILES;     // groups of lanes of a tile of the shared expert
    SharedRows rows;
    rows.fetch(shared + (blockIdx.x * BLOCK_ROWS + warp / half * TILE_ROWS) * SHARED_PITCH,
               warp % half * SHARED_COLUMNS);
    for (int t = 0; t < tokens; ++t) sums[(t * WARPS + warp) * LANES + lane] = 0;
    if (threadIdx.x < OCTETS_BYTES / 4) ((u32*)zeros)[threadIdx.x] = 0;
    HOLD_TURN();
    int pairs = tokens * SLOTS;
    sort_pairs(selected, pairs, (int*)memory, order);
    const u32 of_expert = ROWS / TILE_ROWS * SUPERS * TILE_BYTES_Q2_K;
    const u8* tiles = matrix + ((size_t)blockIdx.x * TILES * SUPERS + super) * TILE_BYTES_Q2_K + 16 * lane;
    const u8* octets = mid + lane / 16 * WIDTH + super * 256 + lane % 16 * 16;
    const u8* scales = (const u8*)(fields + super * 16) + 16 * lane;
    auto begin = [&](int k, int stage) {
        if (k < pairs) {
            u32 pair = pair_of_entry(order[k]);
            const u8* from = tiles + (u64)(u32)expert_of_entry(order[k]) * of_expert;
            u8* to = ring + stage * STAGE_BYTES + 16 * lane;
#pragma unroll
            for (int i = 0; i < TILES; ++i, to += TILE_BYTES_Q2_K, from += SUPERS * TILE_BYTES_Q2_K) {
                copy16(to, from);
                copy16(to + 512, from + 512);
                if (lane < 20) copy16(to + 1024, from + 1024);
            }
            copy16(to, octets + (u64)pair * (2 * WIDTH));
            if (lane < 8) copy16(to + 512, scales + (u64)pair * (WIDTH / 16 * (u32)sizeof(float2)));
        }
        copies_end();
    };
    for (int s = 0; s < DEPTH; ++s) begin(team + s * TEAMS, s);
    rows.multiply(shared_mid, warp % half * SHARED_COLUMNS, tokens, shared_sums + warp * TILE_ROWS, WARPS * TILE_ROWS);
    for (int k = team, stage = 0; k < pairs; k += TEAMS) {
        await_copies<DEPTH - 1>();
        lanes_meet();
        const u8* at = ring + stage * STAGE_BYTES;
        Vector vector;
        vector.load(own + stage * own_pitch, (const float2*)(at + TILES * TILE_BYTES_Q2_K + 512) + 4 * q);
        float v[4];
        multiply(v, at, vector);
        multiply(v + 2, at + TILE_BYTES_Q2_K, vector);
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
