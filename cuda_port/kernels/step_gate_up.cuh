// Gate and up of IQ2_XXS, SwiGLU: a block has 16 rows of both and goes through all pairs, its groups of lanes share the
// columns. Results leave as `down` wants them, in planes with a scale for 16.

#define PLANE (WIDTH + 64)              // bytes, so that two planes fall into different banks
#define BOOK_BYTES (256 * LANES * 4)
#define SIGNS_BYTES (128 * LANES * 4)
#define TOGETHER 8                      // pairs between barriers
#define MATRICES (SUPERS >= WARPS ? 2 : 1)              // of a group of lanes
#define PARTS (2 * SUPERS / WARPS / MATRICES)           // tiles of each
#define SPLIT (WARPS * MATRICES / 2)                    // groups of lanes that share a row

struct Codes { Quad half[2]; u32 d; };

DEVICE void fetch(Codes& c, const u8* tile) {
    int lane = lane_id();
    c.half[0] = stream16(tile + 16 * lane);
    c.half[1] = stream16(tile + 512 + 16 * lane);
    c.d = stream4(tile + 1024 + lane / 4 * 4);
}

// This lane's entries of the codebook and, `offset` bytes on, of the signs, by byte o of a word: the product of bytes
// is an address.
struct Tables {
#if DS4_ARCH
    u32 mine;
    DEVICE explicit Tables(const u8* at) : mine((u32)__cvta_generic_to_shared(at) + 4 * lane_id()) {}
    template <int OFFSET>
    DEVICE u32 entry(u32 word, int o) const {
        u32 v;
        u32 address = __dp4a(word, 0x80u << 8 * o, mine);
        asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(v) : "r"(address), "n"(OFFSET));
        return v;
    }
#else
    const u8* mine;
    DEVICE explicit Tables(const u8* at) : mine(at + 4 * lane_id()) {}
    template <int OFFSET>
    DEVICE u32 entry(u32 word, int o) const { return *(const u32*)(mine + OFFSET + (word >> 8 * o & 255) * 128); }
#endif
    DEVICE u32 nibbles(u32 rows, u32 signs, int o) const { return entry<0>(rows, o) | entry<BOOK_BYTES>(signs, o); }
};

// y[token][0, 1] += rows g, g + 8 times half of a tile's columns: this lane's 32 of them, decoded once for all tokens.
// b: octets, as columns of B.
template <int TOKENS>
DEVICE void multiply(float (&y)[TOKENS][2], const Quad& c, const u32 (&b)[TOKENS][8], const Tables& tables) {
    int acc[TOKENS][4] = {};
    u32 s0 = c.w[1] & 0x7f7f7f7f, s1 = c.w[3] & 0x7f7f7f7f;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
        u32 n0 = tables.nibbles(c.w[0], s0, o), n1 = tables.nibbles(c.w[2], s1, o);
        u32 a[4] = {bytes_of(IQ2_CODES, IQ2_MINUS, n0), bytes_of(IQ2_CODES, IQ2_MINUS, n1),
                    bytes_of(IQ2_CODES, IQ2_MINUS, n0 >> 16), bytes_of(IQ2_CODES, IQ2_MINUS, n1 >> 16)};
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) mma_bytes(acc[t], a, b[t][2 * o], b[t][2 * o + 1]);
    }
    int by0 = tile_scale(c.w[1]), by1 = tile_scale(c.w[3]);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        y[t][0] += (float)((acc[t][0] * 256 + acc[t][1]) * by0);
        y[t][1] += (float)((acc[t][2] * 256 + acc[t][3]) * by1);
    }
}

// This lane's octets of a token's columns k ... k + 127, as columns of B: planes from a token's first one on.
DEVICE void load_octets(u32 (&b)[8], const u8* planes, int k) {
    int g = lane_id() / 4, q = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        Quad v = {{0, 0, 0, 0}};
        if (g / 2 == q) v = *(const Quad*)(planes + g % 2 * PLANE + k + 32 * q + 16 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) b[4 * i + j] = v.w[j];
    }
}

// What `down` finds of a pair's results for 16 rows: where their scale is among those of the 256 they belong to.
DEVICE int field_of_tile(int tile) {
    int in = tile % 16;
    return tile / 16 * 16 + (in / 8 * 2 + in % 2) * 4 + in % 8 / 2;
}

// One row's result of a pair, as two bytes with a scale for the 16 that lanes beside it hold. All lanes, but only those
// that are `there` write.
DEVICE void keep_encoded(float v, bool there, int pair, int r, u8* mid, float2* fields) {
    float most = fabsf(v);
#pragma unroll
    for (int mask = TILE_ROWS / 2; mask; mask /= 2) most = fmaxf(most, lane_xor(most, mask));
    int code = __float2int_rn(v * (most > 0 ? MOST_CODE / most : 0)), high = (code + 128) >> 8, sum = code;
#pragma unroll
    for (int mask = TILE_ROWS / 2; mask; mask /= 2) sum += lane_xor(sum, mask);
    if (!there) return;
    u8* to = mid + (size_t)pair * 2 * ROWS + blockIdx.x * TILE_ROWS + r;
    to[0] = (u8)high;
    to[ROWS] = (u8)(code - (high << 8));
    float scale = most * (1 / MOST_CODE);
    if (r == 0) fields[pair * (ROWS / TILE_ROWS) + field_of_tile(blockIdx.x)] = make_float2(scale, scale * sum);
}

// x f32 [T, WIDTH], or its planes u8 [T, 2, WIDTH] and their scales [T, WIDTH / 256].
// mid u8 [T SLOTS, 2, ROWS] and fields [T SLOTS, ROWS / 16], a scale and the sum of what it scales: weight swiglu(W1 x,
// W3 x) of pairs; shared_mid f16 [T, 2, ROWS]: swiglu of the shared expert's gate and up, in two parts to be added up.
KERNEL __launch_bounds__(THREADS, 1) void gate_up(const float* x, const u8* encoded, const float* encoded_scales,
                                                 const int* selected, const float* weight,
                                                 const u8* gate, const u8* up, const float* shared_gate,
                                                 const float* shared_up, float limit, int tokens, u8* mid,
                                                 float2* fields, __half* shared_mid) {
    u8* book = memory;
    float* partial = (float*)(book + BOOK_BYTES + SIGNS_BYTES);     // [2][TOGETHER][SPLIT][LANES]
    float* scales = partial + 2 * TOGETHER * SPLIT * LANES;         // [MOST][SUPERS]
    int* order = (int*)(scales + MOST * SUPERS);                    // [MOST * SLOTS]
    u8* planes = (u8*)(order + (MOST * SLOTS + 3) / 4 * 4);         // [MOST][2][PLANE]
    int warp = group_id(), lane = lane_id(), q = lane % 4;
    int first = MATRICES == 2 ? 0 : warp / SPLIT, super = warp % SPLIT;
    PASS_TURN();
    fill_codebook(book, LANES * 4);
    fill_signs(book + BOOK_BYTES);
    Tables tables(book);
    AWAIT_TURN();
    int pairs = tokens * SLOTS;
    sort_pairs(selected, pairs, (int*)partial, order);
    Codes ahead[DEPTH][PARTS][MATRICES];
    auto begin = [&](int k, Codes (&to)[PARTS][MATRICES]) {
        if (k >= pairs) return;
        size_t at = ((size_t)expert_of_entry(order[k]) * (ROWS / TILE_ROWS) + blockIdx.x) * SUPERS + super;
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
                fetch(to[p][m], (first + m ? up : gate) + (at + p * SPLIT) * TILE_BYTES_IQ2_XXS);
    };
    // How many pairs from k on are taken together: two of one expert, none across a barrier.
    auto together = [&](int k) {
        bool two = MOST > 1 && k + 1 < pairs && (k + 1) % TOGETHER;
        return two && expert_of_entry(order[k]) == expert_of_entry(order[k + 1]) ? 2 : 1;
    };
    int next = 0;   // to be fetched
    auto advance = [&](Codes (&codes)[PARTS][MATRICES]) {
        if (next >= pairs) return;
        begin(next, codes);
        next += together(next);
    };
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) advance(ahead[d]);
    if (encoded) {
        for (int i = threadIdx.x; i < tokens * 2 * (WIDTH / 16); i += THREADS)
            copy16(planes + i / (WIDTH / 16) * PLANE + i % (WIDTH / 16) * 16, encoded + 16 * (size_t)i);
        copies_end();
        for (int i = threadIdx.x; i < tokens * SUPERS; i += THREADS) scales[i] = encoded_scales[i];
        await_copies<0>();
    } else {
        for_blocks<2>(tokens * SUPERS, [&](int i) { return x + (size_t)i * 256; },
                      [&](int i, const float(&v)[8]) {
                          Octets o = encode(v);
                          u8* to = planes + i / SUPERS * 2 * PLANE + i % SUPERS * 256 + 8 * lane;
                          *(Duo*)to = o.high;
                          *(Duo*)(to + PLANE) = o.low;
                          if (lane == 0) scales[i] = o.scale;
                      });
    }
    for (int i = threadIdx.x; i < tokens * TILE_ROWS; i += THREADS) {
        int t = i / TILE_ROWS, r = blockIdx.x * TILE_ROWS + i % TILE_ROWS;
        float v = swiglu(shared_gate[t * ROWS + r], shared_up[t * ROWS + r], limit);
        __half high = __float2half_rn(v);
        shared_mid[2 * t * ROWS + r] = high;
        shared_mid[(2 * t + 1) * ROWS + r] = __float2half_rn(v - __half2float(high));
    }
    __syncthreads();
    // TOGETHER pairs whose parts are there, each by a group of lanes; two sets of groups take turns.
    auto finish = [&](int turn) {
        int i = warp - turn % 2 * TOGETHER, k = turn * TOGETHER + i;
        if (i < 0 || i >= TOGETHER || k >= pairs) return;
        int r = lane % TILE_ROWS, pair = pair_of_entry(order[k]);
        const float* part = partial + (turn % 2 * TOGETHER + i) * (SPLIT * LANES);
        part += lane_of_row(r) + lane / TILE_ROWS * 2;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < SPLIT; ++w) sum += part[w * LANES];
        float v = swiglu(lane_get(sum, r), lane_get(sum, r + TILE_ROWS), limit);
        keep_encoded(weight[pair] * v, lane < TILE_ROWS, pair, r, mid, fields);
    };
    // Pairs k ... of one expert.
    auto work = [&](auto& y, int k, const Codes (&codes)[PARTS][MATRICES]) {
        const int count = sizeof(y) / sizeof(y[0]);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            int at = super + p * SPLIT;
            float sums[MATRICES][count][2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 b[count][8];
#pragma unroll
                for (int t = 0; t < count; ++t)
                    load_octets(b[t], planes + pair_of_entry(order[k + t]) / SLOTS * 2 * PLANE, 256 * at + 128 * half);
#pragma unroll
                for (int m = 0; m < MATRICES; ++m) multiply<count>(sums[m], codes[p][m].half[half], b, tables);
            }
#pragma unroll
            for (int t = 0; t < count; ++t) {
                float by = 0.125f * scales[pair_of_entry(order[k + t]) / SLOTS * SUPERS + at];
#pragma unroll
                for (int m = 0; m < MATRICES; ++m)
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        y[t][2 * m + r] += by * half_bits(codes[p][m].d >> 16 * r) * sums[m][t][r];
            }
        }
    };
    auto keep = [&](float (&v)[4], int k) {
        if (MATRICES == 1) v[2] = v[0], v[3] = v[1];
        float sum = quad_sums(v);
        if (MATRICES == 2 || q / 2 == first)
            partial[((k / TOGETHER % 2 * TOGETHER + k % TOGETHER) * SPLIT + warp % SPLIT) * LANES + lane] = sum;
    };
    for (int k = 0; k < pairs;) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (k >= pairs) break;
            int count = together(k);
            if (MOST > 1 && count == 2) {
                float y[2][4] = {};
                work(y, k, ahead[d]);
                advance(ahead[d]);
                keep(y[0], k), keep(y[1], k + 1);
            } else {
                float y[1][4] = {};
                work(y, k, ahead[d]);
                advance(ahead[d]);
                keep(y[0], k);
            }
            k += count;
            if (k % TOGETHER == 0 || k == pairs) {
                __syncthreads();
                finish((k - 1) / TOGETHER);
            }
        }
    }
}
