// Few tokens. Eight groups of lanes, a team, take some rows of all matrices; a block is two teams. One of them begins
// with the shared expert, whose bytes are many and easy, the other with the routed ones, whose decoding is work: so the
// two overlap. Macros: KIND of the routed experts, WIDTH (columns), ROWS, SLOTS, MOST (tokens at a time),
// WIDE_CODEBOOK.

#define THREADS 512
#define TEAM 8                                                       // groups of lanes
#define PIECES (WIDTH / Size<KIND>::weights)                         // of a row
#define SEGMENTS (PIECES / LANES)                                    // groups of lanes that share a row
#define ROW_BYTES ((size_t)(WIDTH / Size<KIND>::block * Size<KIND>::bytes))
#define SHARED_PITCH ((size_t)(WIDTH / 32 * 34))
#define BLOCKS (WIDTH / BLOCK)
#define PLANE (WIDTH + PAD)
#define SLICES (WIDTH / Q8_COLUMNS)
#define HAS_CODEBOOK (KIND == KIND_IQ2_XXS)
#define TOKEN_TILES ((MOST + 3) / 4)
#define FIELD_SUMS (Size<KIND>::sums ? PIECES * Fields<KIND>::count : 0)  // of a vector

extern __shared__ __align__(16) u8 memory[];

// What comes after `front` in shared memory: the codebook, where its address ends in 16 zeros if it is a wide one.
DEVICE u8* codebook_place(u8* front) {
#if WIDE_CODEBOOK
    return memory + (CODEBOOK_BYTES - (u32)__cvta_generic_to_shared(memory));
#else
    return front;
#endif
}

// partial[vector][16 rows], vectors 16 floats apart, for this group's share of the columns of sixteen shared rows.
DEVICE void shared_rows(Rows rows, const u8* planes, const float* scales, int scale_pitch, float* partial, int count,
                        Slice& next, bool fetched) {
    int warp = group_id() % TEAM;
    float acc[TOKEN_TILES][4] = {};
    if (!fetched && warp < SLICES) fetch_q8(next, rows, WIDTH, warp * Q8_COLUMNS);
#pragma unroll
    for (int s = warp; s < SLICES; s += TEAM) {
        Slice now = next;
        if (s + TEAM < SLICES) fetch_q8(next, rows, WIDTH, (s + TEAM) * Q8_COLUMNS);
        int k = s * Q8_COLUMNS;
        consume_q8(acc, now, SharedVectors{planes + k, PLANE, count, scales + k / BLOCK, scale_pitch});
    }
    keep_partial(acc, partial, 16, count);
}

#if GATE_UP
#define UNIT 8                                  // rows of each matrix, for a team
#define EACH (UNIT * SEGMENTS / TEAM)           // rows of each matrix, for a group of lanes
#define SUMS (MOST * SLOTS * UNIT * 2 * SEGMENTS)
#define SHARED_SUMS (TEAM * MOST * UNIT * 2)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gate_up(const float* x, const int* selected, const float* weight, const u8* gate, const u8* up,
            const u8* shared_gate, const u8* shared_up, float limit, int tokens, float* mid) {
    int warp = group_id() % TEAM, team = group_id() / TEAM, lane = lane_id();
    int segment = warp % SEGMENTS, mine = warp / SEGMENTS * EACH;
    float* sums = (float*)memory + team * (SUMS + SHARED_SUMS);
    float* shared_sums = sums + SUMS;
    float* scales = (float*)memory + 2 * (SUMS + SHARED_SUMS);
    int* experts = (int*)(scales + MOST * BLOCKS);
    int* fields = experts + (MOST * SLOTS + 3) / 4 * 4;
    u8* planes = (u8*)(fields + MOST * FIELD_SUMS);
    u8* book = codebook_place(planes + 2 * MOST * PLANE);
    u8* routed = book + HAS_CODEBOOK * CODEBOOK_BYTES;
    int stride = gridDim.x * 2;
    Slice next;
    PASS_TURN();
    auto shared_of = [&](int u) {
        size_t at = ((size_t)u * UNIT + lane / 4) * SHARED_PITCH;
        return Rows{shared_gate + at, shared_up + at};
    };
    int unit = (int)blockIdx.x * 2 + team;
    bool fetched = team == 0 && unit * UNIT < ROWS && warp < SLICES;
    if (fetched) fetch_q8(next, shared_of(unit), WIDTH, warp * Q8_COLUMNS);
    if (HAS_CODEBOOK) fill_codebook(book, CODEBOOK_PITCH);
    Codebook codebook(book);
    AWAIT_TURN();
    for (int start = 0; start < tokens; start += MOST) {
        int count = min(MOST, tokens - start), pairs = count * SLOTS;
        for_blocks<2>(count * BLOCKS, [&](int i) { return x + (size_t)start * WIDTH + i * BLOCK; },
                      [&](int i, const float(&v)[8]) {
                          Octets o = encode(v);
                          int t = i / BLOCKS, b = i % BLOCKS;
                          u8* to = planes + 2 * t * PLANE + b * BLOCK + plane_offset(lane);
                          *(Duo*)to = o.high;
                          *(Duo*)(to + PLANE) = o.low;
                          u8* high = routed + 2 * t * WIDTH;
                          store_octet<KIND>(o, b * (BLOCK / 8) + lane, high, high + WIDTH, fields + t * FIELD_SUMS);
                          if (lane == 0) scales[i] = o.scale;
                      });
        for (int i = threadIdx.x; i < pairs; i += THREADS) experts[i] = selected[start * SLOTS + i];
        __syncthreads();
        auto common = [&](int u) {
            float* to = shared_sums + warp * (MOST * UNIT * 2);
            shared_rows(shared_of(u), planes, scales, BLOCKS, to, count, next, fetched);
            fetched = false;
        };
        auto chosen = [&](int u) {
            Inputs<KIND> in;
            Piece<KIND> ahead[EACH][2];
            auto fetch = [&](int pair) {
                size_t row = ((size_t)experts[pair] * ROWS + u * UNIT + mine) * ROW_BYTES;
#pragma unroll
                for (int r = 0; r < EACH; ++r) {
                    fetch_piece<KIND, WIDTH>(ahead[r][0], gate + row + r * ROW_BYTES, segment * LANES + lane);
                    fetch_piece<KIND, WIDTH>(ahead[r][1], up + row + r * ROW_BYTES, segment * LANES + lane);
                }
            };
            fetch(0);
            for (int pair = 0, t = 0, slot = 0; pair < pairs; ++pair) {
                if (slot == 0)
                    load_inputs<KIND>(in, routed + 2 * t * WIDTH, routed + (2 * t + 1) * WIDTH, fields + t * FIELD_SUMS,
                                      scales + t * BLOCKS, segment * LANES + lane);
                if (++slot == SLOTS) slot = 0, ++t;
                Piece<KIND> now[EACH][2];
#pragma unroll
                for (int r = 0; r < EACH; ++r) now[r][0] = ahead[r][0], now[r][1] = ahead[r][1];
                if (pair + 1 < pairs) fetch(pair + 1);
                float v[2 * EACH];
#pragma unroll
                for (int r = 0; r < 2 * EACH; ++r) v[r] = in.scale * product<KIND>(now[r / 2][r % 2], in, codebook);
                float sum = lane_sums_of<2 * EACH>(v);
                int of = lane / (LANES / (2 * EACH));
                if (lane % (LANES / (2 * EACH)) == 0)
                    sums[((pair * UNIT + mine) * 2 + of) * SEGMENTS + segment] = sum;
            }
        };
        for (int base = blockIdx.x * 2; base * UNIT < ROWS; base += stride) {
            int u = base + team;
            bool busy = u * UNIT < ROWS;
            if (busy && team == 0) common(u);
            if (busy) chosen(u);
            if (busy && team) common(u);
            __syncthreads();
            for (int i = threadIdx.x % (TEAM * LANES); busy && i < (pairs + count) * UNIT; i += TEAM * LANES) {
                int r = i % UNIT, pair = i / UNIT, t = pair / SLOTS, slot = pair % SLOTS;
                float a = 0, b = 0, by = 1;
                if (pair < pairs) {
                    for (int s = 0; s < SEGMENTS; ++s) {
                        a += sums[(pair * UNIT + r) * 2 * SEGMENTS + s];
                        b += sums[((pair * UNIT + r) * 2 + 1) * SEGMENTS + s];
                    }
                    by = weight[start * SLOTS + pair];
                } else {
                    t = pair - pairs, slot = SLOTS;
                    for (int w = 0; w < TEAM && w < SLICES; ++w) {
                        a += shared_sums[(w * MOST + t) * UNIT * 2 + r];
                        b += shared_sums[(w * MOST + t) * UNIT * 2 + UNIT + r];
                    }
                }
                mid[((size_t)(start + t) * (SLOTS + 1) + slot) * ROWS + u * UNIT + r] = by * swiglu(a, b, limit);
            }
            __syncthreads();
        }
    }
}
#else
#define UNIT 16                                 // rows, for a team
#define TURNS (SEGMENTS == 1 ? 2 : 1)           // groups of lanes that share a row's slots
#define EACH (UNIT * SEGMENTS * TURNS / TEAM)   // rows, for a group of lanes
#define VECTORS (SLOTS + 1)                     // of a token
#define PARTS (SEGMENTS * TURNS)
#define SUMS (MOST * UNIT * PARTS)
#define SHARED_SUMS (TEAM * MOST * UNIT)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    down(const float* mid, const int* selected, const u8* matrix, const u8* shared, int tokens, float* y) {
    int warp = group_id() % TEAM, team = group_id() / TEAM, lane = lane_id();
    int segment = warp % SEGMENTS, turn = warp / SEGMENTS % TURNS, mine = warp / PARTS * EACH;
    float* sums = (float*)memory + team * (SUMS + SHARED_SUMS);
    float* shared_sums = sums + SUMS;
    float* scales = (float*)memory + 2 * (SUMS + SHARED_SUMS);
    int* experts = (int*)(scales + MOST * VECTORS * BLOCKS);
    int* fields = experts + (MOST * SLOTS + 3) / 4 * 4;
    u8* planes = (u8*)(fields + MOST * SLOTS * FIELD_SUMS);
    u8* book = codebook_place(planes + 2 * MOST * PLANE);
    u8* routed = book + HAS_CODEBOOK * CODEBOOK_BYTES;
    int stride = gridDim.x * 2;
    Slice next;
    auto shared_of = [&](int u) { return rows_of(shared + (size_t)u * UNIT * SHARED_PITCH, SHARED_PITCH); };
    int unit = (int)blockIdx.x * 2 + team;
    bool fetched = team == 0 && unit * UNIT < ROWS && warp < SLICES;
    if (fetched) fetch_q8(next, shared_of(unit), WIDTH, warp * Q8_COLUMNS);
    if (HAS_CODEBOOK) fill_codebook(book, CODEBOOK_PITCH);
    Codebook codebook(book);
    HOLD_TURN();
    for (int start = 0; start < tokens; start += MOST) {
        int count = min(MOST, tokens - start);
        for_blocks<2>(count * VECTORS * BLOCKS,
                      [&](int i) { return mid + (size_t)start * VECTORS * WIDTH + i * BLOCK; },
                      [&](int i, const float(&v)[8]) {
                          Octets o = encode(v);
                          int t = i / BLOCKS / VECTORS, slot = i / BLOCKS % VECTORS, b = i % BLOCKS;
                          int pair = t * SLOTS + slot;
                          u8* high = routed + 2 * pair * WIDTH;
                          u8* to = planes + 2 * t * PLANE + b * BLOCK + plane_offset(lane);
                          if (slot == SLOTS) *(Duo*)to = o.high, *(Duo*)(to + PLANE) = o.low;
                          else store_octet<KIND>(o, b * (BLOCK / 8) + lane, high, high + WIDTH,
                                                 fields + pair * FIELD_SUMS);
                          if (lane == 0) scales[i] = o.scale;
                      });
        for (int i = threadIdx.x; i < count * SLOTS; i += THREADS) experts[i] = selected[start * SLOTS + i];
        __syncthreads();
        auto common = [&](int u) {
            float* to = shared_sums + warp * (MOST * UNIT);
            shared_rows(shared_of(u), planes, scales + SLOTS * BLOCKS, VECTORS * BLOCKS, to, count, next, fetched);
            fetched = false;
        };
        auto chosen = [&](int u) {
            Piece<KIND> ahead[EACH];
            auto fetch = [&](int pair) {
                size_t row = ((size_t)experts[pair] * ROWS + u * UNIT + mine) * ROW_BYTES;
#pragma unroll
                for (int r = 0; r < EACH; ++r)
                    fetch_piece<KIND, WIDTH>(ahead[r], matrix + row + r * ROW_BYTES, segment * LANES + lane);
            };
            fetch(turn);
            float v[EACH] = {};
            for (int t = 0, slot = turn; t < count;) {
                int pair = t * SLOTS + slot, vector = t * VECTORS + slot, of = t;
                Inputs<KIND> in;
                load_inputs<KIND>(in, routed + 2 * pair * WIDTH, routed + (2 * pair + 1) * WIDTH,
                                  fields + pair * FIELD_SUMS, scales + vector * BLOCKS, segment * LANES + lane);
                Piece<KIND> now[EACH];
#pragma unroll
                for (int r = 0; r < EACH; ++r) now[r] = ahead[r];
                slot += TURNS;
                if (slot >= SLOTS) slot = turn, ++t;
                if (t < count) fetch(t * SLOTS + slot);
#pragma unroll
                for (int r = 0; r < EACH; ++r) v[r] += in.scale * product<KIND>(now[r], in, codebook);
                if (t == of) continue;
                float sum = lane_sums_of<EACH>(v);
                if (lane % (LANES / EACH) == 0)
                    sums[(of * UNIT + mine + lane / (LANES / EACH)) * PARTS + warp % PARTS] = sum;
#pragma unroll
                for (int r = 0; r < EACH; ++r) v[r] = 0;
            }
        };
        for (int base = blockIdx.x * 2; base * UNIT < ROWS; base += stride) {
            int u = base + team;
            bool busy = u * UNIT < ROWS;
            if (busy && team == 0) common(u);
            if (busy) chosen(u);
            if (busy && team) common(u);
            __syncthreads();
            for (int i = threadIdx.x % (TEAM * LANES); busy && i < count * UNIT; i += TEAM * LANES) {
                float sum = 0;
                for (int s = 0; s < PARTS; ++s) sum += sums[i * PARTS + s];
                for (int w = 0; w < TEAM && w < SLICES; ++w) sum += shared_sums[w * MOST * UNIT + i];
                y[(size_t)(start + i / UNIT) * ROWS + u * UNIT + i % UNIT] = sum;
            }
            __syncthreads();
        }
    }
}
#endif
