// Few tokens. Eight groups of lanes, a team, take some rows of all matrices; a block is two teams. One of them begins with
// the shared expert, whose bytes are many and easy, the other with the routed ones, whose decoding is work: so the two
// overlap. Macros: KIND of the routed experts, WIDTH (columns), ROWS, SLOTS, MOST (tokens at a time).

#define THREADS 512
#define TEAM 8                                                       // groups of lanes
#define PIECES (WIDTH / Size<KIND>::weights)                         // of a row
#define SEGMENTS (PIECES / LANES)                                    // groups of lanes that share a row
#define ROW_BYTES (WIDTH / Size<KIND>::block * Size<KIND>::bytes)
#define SHARED_BYTES (WIDTH / 32 * 34)
#define BLOCKS (WIDTH / BLOCK)
#define PLANE (WIDTH + PAD)
#define SLICES (WIDTH / SLICE)
#define HAS_TABLES (KIND == KIND_IQ2_XXS)

extern __shared__ __align__(16) u8 memory[];

// partial[vector][8 rows], vectors `pitch` floats apart, for this group's share of the columns of eight shared rows.
DEVICE void shared_rows(Slice& next, const u8* rows, const u8* then, const u8* high, const u8* low, int plane,
                        const float* scales, int scale_pitch, float* partial, int pitch, int count) {
    int warp = group_id() % TEAM;
    float acc[1][4] = {};
#pragma unroll
    for (int s = warp; s < SLICES; s += TEAM) {
        Slice now = next;
        if (s + TEAM < SLICES) fetch_q8(next, rows, WIDTH, (s + TEAM) * SLICE);
        else if (then && warp < SLICES) fetch_q8(next, then, WIDTH, warp * SLICE);
        consume_q8(acc, now, high + s * SLICE, low + s * SLICE, plane, scales + s, scale_pitch, count);
    }
    keep_partial(acc, partial, pitch, count);
}

#if GATE_UP
#define UNIT 8                                  // rows of each matrix, for a team
#define EACH (UNIT * SEGMENTS / TEAM)           // rows of each matrix, for a group of lanes
#define SUMS (MOST * SLOTS * UNIT * 2 * SEGMENTS)
#define SHARED_SUMS (TEAM * MOST * UNIT * 2)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gate_up(const float* x, const int* selected, const float* weight, const u8* gate, const u8* up,
            const u8* shared_gate, const u8* shared_up, float limit, int tokens, float* mid) {
    Iq2Tables* tables = (Iq2Tables*)memory;
    u8* high = memory + HAS_TABLES * sizeof(Iq2Tables);
    u8* low = high + MOST * PLANE;
    u8* routed_high = low + MOST * PLANE;
    u8* routed_low = routed_high + MOST * WIDTH;
    float* scales = (float*)(routed_low + MOST * WIDTH);
    int* experts = (int*)(scales + MOST * BLOCKS);
    int warp = group_id() % TEAM, team = group_id() / TEAM, lane = lane_id();
    int segment = warp % SEGMENTS, mine = warp / SEGMENTS * EACH;
    float* sums = (float*)(experts + MOST * SLOTS + MOST * SLOTS % 2) + team * (SUMS + SHARED_SUMS);
    float* shared_sums = sums + SUMS;
    int unit = (int)blockIdx.x * 2 + team, stride = gridDim.x * 2;
    Slice next;
    LET_NEXT_BEGIN();
    auto first_slice = [&](int u) {
        if (u * UNIT < ROWS && warp < SLICES)
            fetch_q8(next, shared_gate + (size_t)u * UNIT * SHARED_BYTES, WIDTH, warp * SLICE);
    };
    if (team == 0) first_slice(unit);
    if (HAS_TABLES) fill(tables);
    AWAIT_INPUTS();
    for (int start = 0; start < tokens; start += MOST) {
        int count = min(MOST, tokens - start), pairs = count * SLOTS;
        __syncthreads();
        for_blocks<2>(count * BLOCKS, [&](int i) { return x + (size_t)start * WIDTH + i * BLOCK; },
                   [&](int i, const float(&v)[8]) {
                       Octets o = encode(v);
                       int t = i / BLOCKS, b = i % BLOCKS;
                       int at = t * PLANE + b * BLOCK + plane_offset(lane);
                       int to = t * WIDTH + piece_offset<KIND>(b * (BLOCK / 8) + lane);
                       *(Duo*)(high + at) = *(Duo*)(routed_high + to) = o.high;
                       *(Duo*)(low + at) = *(Duo*)(routed_low + to) = o.low;
                       if (lane == 0) scales[i] = o.scale;
                   });
        if (threadIdx.x < pairs) experts[threadIdx.x] = selected[start * SLOTS + threadIdx.x];
        __syncthreads();
        auto common = [&](int u) {
            const u8* a = shared_gate + (size_t)u * UNIT * SHARED_BYTES;
            const u8* b = shared_up + (size_t)u * UNIT * SHARED_BYTES;
            float* to = shared_sums + warp * (MOST * UNIT * 2);
            shared_rows(next, a, b, high, low, PLANE, scales, BLOCKS, to, UNIT * 2, count);
            shared_rows(next, b, 0, high, low, PLANE, scales, BLOCKS, to + UNIT, UNIT * 2, count);
        };
        auto routed = [&](int u) {
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
            for (int pair = 0; pair < pairs; ++pair) {
                int t = pair / SLOTS;
                if (pair % SLOTS == 0)
                    load_inputs<KIND>(in, routed_high + t * WIDTH, routed_low + t * WIDTH, scales + t * BLOCKS,
                                      segment * LANES + lane);
                Piece<KIND> now[EACH][2];
#pragma unroll
                for (int r = 0; r < EACH; ++r) now[r][0] = ahead[r][0], now[r][1] = ahead[r][1];
                if (pair + 1 < pairs) fetch(pair + 1);
                float v[2 * EACH];
#pragma unroll
                for (int r = 0; r < 2 * EACH; ++r) v[r] = in.scale * product<KIND>(now[r / 2][r % 2], in, tables);
                float sum = lane_sums_of<2 * EACH>(v);
                int of = lane / (LANES / (2 * EACH));
                if (lane % (LANES / (2 * EACH)) == 0) sums[((pair * UNIT + mine) * 2 + of) * SEGMENTS + segment] = sum;
            }
        };
        for (int base = blockIdx.x * 2; base * UNIT < ROWS; base += stride) {
            int u = base + team;
            bool busy = u * UNIT < ROWS;
            if (busy && team == 0) {
                if (start || base != (int)blockIdx.x * 2) first_slice(u);
                common(u);
            }
            if (busy) routed(u);
            if (busy && team) {
                first_slice(u);
                common(u);
            }
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
#define UNIT 16
#define EACH (UNIT * SEGMENTS / TEAM)
#define VECTORS (SLOTS + 1)                     // of a token
#define SUMS (MOST * UNIT * SEGMENTS)
#define SHARED_SUMS (TEAM * MOST * UNIT)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    down(const float* mid, const int* selected, const u8* matrix, const u8* shared, int tokens, float* y) {
    Iq2Tables* tables = (Iq2Tables*)memory;
    u8* high = memory + HAS_TABLES * sizeof(Iq2Tables);
    u8* low = high + MOST * PLANE;
    u8* routed_high = low + MOST * PLANE;
    u8* routed_low = routed_high + MOST * SLOTS * WIDTH;
    float* scales = (float*)(routed_low + MOST * SLOTS * WIDTH);
    int* experts = (int*)(scales + MOST * VECTORS * BLOCKS);
    int warp = group_id() % TEAM, team = group_id() / TEAM, lane = lane_id();
    int segment = warp % SEGMENTS, mine = warp / SEGMENTS * EACH;
    float* sums = (float*)(experts + MOST * SLOTS + MOST * SLOTS % 2) + team * (SUMS + SHARED_SUMS);
    float* shared_sums = sums + SUMS;
    int unit = (int)blockIdx.x * 2 + team, stride = gridDim.x * 2;
    Slice next;
    LET_NEXT_BEGIN();
    auto first_slice = [&](int u) {
        if (u * UNIT < ROWS && warp < SLICES)
            fetch_q8(next, shared + (size_t)u * UNIT * SHARED_BYTES, WIDTH, warp * SLICE);
    };
    if (team == 0) first_slice(unit);
    if (HAS_TABLES) fill(tables);
    AWAIT_INPUTS();
    for (int start = 0; start < tokens; start += MOST) {
        int count = min(MOST, tokens - start), pairs = count * SLOTS;
        __syncthreads();
        for_blocks<2>(count * VECTORS * BLOCKS, [&](int i) { return mid + (size_t)start * VECTORS * WIDTH + i * BLOCK; },
                   [&](int i, const float(&v)[8]) {
                       Octets o = encode(v);
                       int t = i / BLOCKS / VECTORS, slot = i / BLOCKS % VECTORS, b = i % BLOCKS;
                       int at = t * PLANE + b * BLOCK + plane_offset(lane);
                       int to = (t * SLOTS + slot) * WIDTH + piece_offset<KIND>(b * (BLOCK / 8) + lane);
                       *(Duo*)(slot < SLOTS ? routed_high + to : high + at) = o.high;
                       *(Duo*)(slot < SLOTS ? routed_low + to : low + at) = o.low;
                       if (lane == 0) scales[i] = o.scale;
                   });
        if (threadIdx.x < pairs) experts[threadIdx.x] = selected[start * SLOTS + threadIdx.x];
        __syncthreads();
        auto common = [&](int u) {
            const u8* a = shared + (size_t)u * UNIT * SHARED_BYTES;
            float* to = shared_sums + warp * (MOST * UNIT);
            const float* by = scales + SLOTS * BLOCKS;
            shared_rows(next, a, a + 8 * SHARED_BYTES, high, low, PLANE, by, VECTORS * BLOCKS, to, UNIT, count);
            shared_rows(next, a + 8 * SHARED_BYTES, 0, high, low, PLANE, by, VECTORS * BLOCKS, to + 8, UNIT, count);
        };
        auto routed = [&](int u) {
            Piece<KIND> ahead[EACH];
            auto fetch = [&](int pair) {
                size_t row = ((size_t)experts[pair] * ROWS + u * UNIT + mine) * ROW_BYTES;
#pragma unroll
                for (int r = 0; r < EACH; ++r)
                    fetch_piece<KIND, WIDTH>(ahead[r], matrix + row + r * ROW_BYTES, segment * LANES + lane);
            };
            fetch(0);
            float v[EACH] = {};
            for (int pair = 0; pair < pairs; ++pair) {
                int t = pair / SLOTS, vector = t * VECTORS + pair % SLOTS;
                Inputs<KIND> in;
                load_inputs<KIND>(in, routed_high + pair * WIDTH, routed_low + pair * WIDTH, scales + vector * BLOCKS,
                                  segment * LANES + lane);
                Piece<KIND> now[EACH];
#pragma unroll
                for (int r = 0; r < EACH; ++r) now[r] = ahead[r];
                if (pair + 1 < pairs) fetch(pair + 1);
#pragma unroll
                for (int r = 0; r < EACH; ++r) v[r] += in.scale * product<KIND>(now[r], in, tables);
                if (pair % SLOTS < SLOTS - 1) continue;
                float sum = lane_sums_of<EACH>(v);
                if (lane % (LANES / EACH) == 0)
                    sums[(t * UNIT + mine + lane / (LANES / EACH)) * SEGMENTS + segment] = sum;
#pragma unroll
                for (int r = 0; r < EACH; ++r) v[r] = 0;
            }
        };
        for (int base = blockIdx.x * 2; base * UNIT < ROWS; base += stride) {
            int u = base + team;
            bool busy = u * UNIT < ROWS;
            if (busy && team == 0) {
                if (start || base != (int)blockIdx.x * 2) first_slice(u);
                common(u);
            }
            if (busy) routed(u);
            if (busy && team) {
                first_slice(u);
                common(u);
            }
            __syncthreads();
            for (int i = threadIdx.x % (TEAM * LANES); busy && i < count * UNIT; i += TEAM * LANES) {
                float sum = 0;
                for (int s = 0; s < SEGMENTS; ++s) sum += sums[i * SEGMENTS + s];
                for (int w = 0; w < TEAM && w < SLICES; ++w) sum += shared_sums[w * MOST * UNIT + i];
                y[(size_t)(start + i / UNIT) * ROWS + u * UNIT + i % UNIT] = sum;
            }
            __syncthreads();
        }
    }
}
#endif
