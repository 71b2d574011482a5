// Gate and up of IQ2_XXS, SwiGLU: a block has 16 rows of both and goes through all pairs, one or two of an expert at a
// time, a unit. Teams of TEAM groups of lanes take units in turn and share the columns; what a group of lanes has to do
// for a unit as a whole is then done for many tiles. Results leave as `down` wants them, in planes with a scale for 16.

#define PLANE (WIDTH + 64)              // bytes, so that two planes fall into different banks
#define BOOK_BYTES (256 * LANES * 4)
#define SIGNS_BYTES (256 * LANES * 4)   // by bytes, whose last bit is of the scale
#define TEAMS (WARPS / TEAM)
#define STEPS (SUPERS / TEAM)           // for a unit: a tile of gate and one of up each
#define AT_ONCE (MOST > 1 ? 2 : 1)      // pairs of a unit, at most
#define ROUNDS (4 / AT_ONCE)            // of units between barriers, of a team alone

// Pairs of one expert; of each its number, and its token, in 16 bits.
struct __align__(16) Unit { int expert, count, pairs, tokens; };

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

// Its upper half: on the units that multiply, where those that shift are busy.
DEVICE u32 upper(u32 word) {
#if DS4_ARCH
    u32 v;
    asm("dp2a.lo.u32.u32 %0, %1, 256, 0;" : "=r"(v) : "r"(word));
    return v;
#else
    return word >> 16;
#endif
}

// y[token][0, 1] += rows g, g + 8 times half of a tile's columns, 64 times too large: this lane's 32 of them, decoded
// once for all tokens. b: octets, as columns of B.
template <int TOKENS>
DEVICE void multiply(float (&y)[TOKENS][2], const Quad& c, const Quad (&b)[AT_ONCE][2], const Tables& tables) {
    int acc[TOKENS][4] = {};
#pragma unroll
    for (int o = 0; o < 4; ++o) {
        u32 n0 = tables.nibbles(c.w[0], c.w[1], o), n1 = tables.nibbles(c.w[2], c.w[3], o);
        u32 a[4] = {bytes_of(IQ2_CODES, IQ2_MINUS, n0), bytes_of(IQ2_CODES, IQ2_MINUS, n1),
                    bytes_of(IQ2_CODES, IQ2_MINUS, upper(n0)), bytes_of(IQ2_CODES, IQ2_MINUS, upper(n1))};
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) mma_bytes(acc[t], a, b[t][o / 2].w[o % 2 * 2], b[t][o / 2].w[o % 2 * 2 + 1]);
    }
    float by0 = (float)tile_scale_64(c.w[1]), by1 = (float)tile_scale_64(c.w[3]);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        y[t][0] += (float)(acc[t][0] * 256 + acc[t][1]) * by0;
        y[t][1] += (float)(acc[t][2] * 256 + acc[t][3]) * by1;
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

// The pairs of `order` as units, those of two first, so that teams have equally many of them: returns how many there
// are. All threads; `scratch`: an int for each group of lanes; units' writes are seen after the next barrier.
DEVICE int list_units(const int* order, int pairs, Unit* units, int* scratch) {
    int k = threadIdx.x, own = k < pairs ? order[k] : 0, e = expert_of_entry(own), run = 0;
    if (AT_ONCE == 1) {
        if (k < pairs) units[k] = Unit{e, 1, pair_of_entry(own), 0};
        return pairs;
    }
    while (k < pairs && run < k && expert_of_entry(order[k - run - 1]) == e) ++run;
    bool first = k < pairs && run % 2 == 0;
    bool two = first && k + 1 < pairs && expert_of_entry(order[k + 1]) == e;
    u32 twos = lanes_where(two), ones = lanes_where(first && !two), before = (1u << lane_id()) - 1;
    if (lane_id() == 0) scratch[group_id()] = __popc(twos) | __popc(ones) << 16;
    __syncthreads();
    int sum = 0, here = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) here += w < group_id() ? scratch[w] : 0, sum += scratch[w];
    int place = two ? (here & 65535) + __popc(twos & before) : (sum & 65535) + (here >> 16) + __popc(ones & before);
    int pair = pair_of_entry(own), other = two ? pair_of_entry(order[k + 1]) : pair;
    if (first) units[place] = Unit{e, 1 + two, pair | other << 16, pair / SLOTS | other / SLOTS << 16};
    return (sum & 65535) + (sum >> 16);
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
    float* partial = (float*)(book + BOOK_BYTES + SIGNS_BYTES);     // [2][ROUNDS][TEAMS][AT_ONCE][TEAM][LANES]
    float* scales = partial + 2 * ROUNDS * WARPS * AT_ONCE * LANES; // [MOST][SUPERS]
    Unit* units = (Unit*)(scales + MOST * SUPERS);                  // [MOST * SLOTS]
    int* order = (int*)(units + MOST * SLOTS);                      // [MOST * SLOTS]
    u8* planes = (u8*)(order + (MOST * SLOTS + 3) / 4 * 4);         // [MOST][2][PLANE]
    int warp = group_id(), lane = lane_id(), g = lane / 4, q = lane % 4, team = warp / TEAM, column = warp % TEAM;
    PASS_TURN();
    fill_codebook(book, LANES * 4);
    fill_signs(book + BOOK_BYTES, 256);
    Tables tables(book);
    AWAIT_TURN();
    int pairs = tokens * SLOTS;
    sort_pairs(selected, pairs, (int*)partial, order);
    int count = list_units(order, pairs, units, (int*)partial);
    __syncthreads();
    Codes ahead[DEPTH][2];
    int fed = team, step = 0;       // what is fetched next: of a unit, tiles TEAM apart
    size_t at = 0;
    auto aim = [&]() {
        if (fed < count)
            at = (((size_t)units[fed].expert * (ROWS / TILE_ROWS) + blockIdx.x) * SUPERS + column) * TILE_BYTES_IQ2_XXS;
    };
    auto feed = [&](Codes (&to)[2]) {
        if (fed >= count) return;
        fetch(to[0], gate + at);
        fetch(to[1], up + at);
        at += TEAM * TILE_BYTES_IQ2_XXS;
        if (++step == STEPS) step = 0, fed += TEAMS, aim();
    };
    aim();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) feed(ahead[d]);
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
    // Octets of a token's columns 32 q ..., as columns of B: the other lanes' stay zero (expert_step.cuh).
    Quad b[AT_ONCE][2] = {};
    const u8* octets = planes + g % 2 * PLANE + column * 256 + 32 * q;
    auto work = [&](auto& y, const Unit& unit) {
        const int n = sizeof(y) / sizeof(y[0]);
        for (int s = 0; s < STEPS; s += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                float sums[2][n][2] = {};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int t = 0; t < n; ++t) {
                        const u8* from = octets + (unit.tokens >> 16 * t & 65535) * (2 * PLANE);
                        from += (s + d) * (TEAM * 256) + 128 * half;
                        if (g / 2 == q) b[t][0] = *(const Quad*)from, b[t][1] = *(const Quad*)(from + 16);
                    }
#pragma unroll
                    for (int m = 0; m < 2; ++m) multiply<n>(sums[m], ahead[d][m].half[half], b, tables);
                }
#pragma unroll
                for (int t = 0; t < n; ++t) {
                    const float* of = scales + (unit.tokens >> 16 * t & 65535) * SUPERS + column + (s + d) * TEAM;
                    float by = 0.125f / 64 * *of;
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        y[t][i] += by * half_bits(ahead[d][i / 2].d >> 16 * (i % 2)) * sums[i / 2][t][i % 2];
                }
                feed(ahead[d]);
            }
        }
    };
    // Where a team's parts of a round are. Those of ROUNDS rounds are added up while the next ones are found.
    auto parts = [&](int round, int t) {
        return partial + ((round % (2 * ROUNDS) * TEAMS + team) * AT_ONCE + t) * (TEAM * LANES);
    };
    // Units of this team in rounds from `first` on, a pair of them each group of lanes.
    auto finish = [&](int first, int rounds) {
        for (int i = column; i < rounds * AT_ONCE; i += TEAM) {
            int round = first + i / AT_ONCE, u = round * TEAMS + team, t = i % AT_ONCE, r = lane % TILE_ROWS;
            if (u >= count || t >= units[u].count) continue;
            const float* part = parts(round, t) + lane_of_row(r) + lane / TILE_ROWS * 2;
            int pair = units[u].pairs >> 16 * t & 65535;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < TEAM; ++w) sum += part[w * LANES];
            float v = swiglu(lane_get(sum, r), lane_get(sum, r + TILE_ROWS), limit);
            keep_encoded(weight[pair] * v, lane < TILE_ROWS, pair, r, mid, fields);
        }
    };
    int rounds = (count + TEAMS - 1) / TEAMS;
    for (int round = 0; round < rounds; ++round) {
        int u = round * TEAMS + team;
        float* part = parts(round, 0) + column * LANES + lane;
        if (u < count) {
            Unit unit = units[u];
            if (MOST > 1 && unit.count == 2) {
                float y[2][4] = {};
                work(y, unit);
                part[0] = quad_sums(y[0]), part[TEAM * LANES] = quad_sums(y[1]);
            } else {
                float y[1][4] = {};
                work(y, unit);
                part[0] = quad_sums(y[0]);
            }
        }
        if (round % ROUNDS == ROUNDS - 1 || round == rounds - 1) {
            team_meets<TEAM>(team);
            finish(round / ROUNDS * ROUNDS, round % ROUNDS + 1);
        }
    }
}
