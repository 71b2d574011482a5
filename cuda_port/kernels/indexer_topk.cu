// Which compressed rows a query may attend to: its index queries, the scores of the rows it sees, and the best of them.
// Macros: H index heads of W channels, the last R rotary; PACKED rows (FP4) of ROW bytes, or floats; PAGE_ROWS a page.
#include "cluster.cuh"
#include "mma.cuh"
#include "rows.cuh"

#define ROWS 128         // of a block
#define PAD (W + 8)      // halves between vectors in shared memory: lanes that load a tile hit different banks
#define EACH (W / LANES)
#define HEADS ((H + 15) / 16 * 16)  // a tile has 16: those that are not there weigh nothing

DEVICE const u8* row_at(const u8* rows, const int* pages, int c) {
    return rows + ((size_t)pages[c / PAGE_ROWS] * PAGE_ROWS + c % PAGE_ROWS) * ROW;
}

// 32 lanes, lane l has channels EACH l, ... of a vector: rotated; if packed, transformed and rounded to FP4.
DEVICE void turn(float (&v)[EACH], const float* cosine, const float* sine) {
    int lane = lane_id();
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        int pair = (EACH * lane + i - (W - R)) / 2;
        if (EACH * lane + i < W - R) continue;
        float c = cosine[pair], s = sine[pair], a = v[i], b = v[i + 1];
        v[i] = a * c - b * s, v[i + 1] = a * s + b * c;
    }
#if PACKED
#pragma unroll
    for (int bit = 1; bit < EACH; bit *= 2)
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (!(i & bit)) {
                float a = v[i], b = v[i | bit];
                v[i] = a + b, v[i | bit] = a - b;
            }
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            float other = lane_xor(v[i], bit);
            v[i] = lane & bit ? other - v[i] : v[i] + other;
        }
    float most = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) v[i] *= rsqrtf((float)W), most = fmaxf(most, fabsf(v[i]));
    for (int bit = 1; bit < 32 / EACH; bit *= 2) most = fmaxf(most, lane_xor(most, bit));
    float scale = power(exponent_of(most, 6 * 1.17549435e-38f, 6.f));
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        u32 code = to_e2m1(fminf(fmaxf(__fdiv_rn(v[i], scale), -6.f), 6.f)), size = code & 7;
        float value = size < 4 ? size * 0.5f : size < 6 ? size - 2.f : 2 * size - 8.f;
        v[i] = (code & 8 ? -value : value) * scale;
    }
#endif
}

// 32 lanes a head of a token. q [T, H W], tables [T, R / 2]; turned [T, H, W]: halves, which hold FP4 without loss, or
// floats if not packed.
KERNEL void queries(const float* q, const float* cosine, const float* sine, void* turned, int T) {
    TAKE_TURN();
    int vector = blockIdx.x * (blockDim.x / LANES) + group_id(), lane = lane_id(), t = vector / H;
    if (t >= T) return;
    float v[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) v[i] = q[(size_t)vector * W + EACH * lane + i];
    turn(v, cosine + (size_t)t * (R / 2), sine + (size_t)t * (R / 2));
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        size_t at = (size_t)vector * W + EACH * lane + i;
#if PACKED
        ((__half*)turned)[at] = __float2half_rn(v[i]);
#else
        ((float*)turned)[at] = v[i];
#endif
    }
}

// score[t, c] = scale sum_h weight[t, h] relu(q[t, h] . rows[c]). positions [T]; pages [P], or a table a token if
// page_stride is not 0. scores [T, width]; what a token does not see is left as it is. A block takes ROWS rows to
// `queries` tokens. Nothing is done for tokens that see no more than `k` rows.
#if PACKED
// Channels 8 chunk ... of a row, as halves; the row's codes and exponents as read.
DEVICE uint4 unpacked(u32 codes, u32 exponent) {
    union { uint4 all; u32 words[4]; __half2 pairs[4]; } out;
    __half2 lift = __float2half2_rn(16384.f), by = __float2half2_rn(power(exponent));
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // code bits lie in a half as they are, 2^14 too small
        u32 pair = codes >> 8 * j;
        out.words[j] = (pair & 7) << 9 | (pair & 8) << 12 | (pair & 0x70) << 21 | (pair & 0x80) << 24;
        out.pairs[j] = __hmul2(__hmul2(out.pairs[j], lift), by);
    }
    return out.all;
}

// sum_h factor[h] relu(heads[h] . row) of 16 rows, of which lane l gets l / 4 and l / 4 + 8. a: the rows as tiles of A.
DEVICE float2 scored(const u32 (&a)[W / 16][4], const __half (*heads)[PAD], const float* factor) {
    float low = 0, high = 0;
#pragma unroll
    for (int n = 0; n < HEADS; n += 16) {
        float sums[2][4] = {};
#pragma unroll
        for (int i = 0; i < W / 16; ++i) {
            u32 b[4];
            load_b(b, &heads[n][16 * i], PAD);
            mma(sums[0], a[i], b[0], b[1]);
            mma(sums[1], a[i], b[2], b[3]);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float w0 = factor[n + 8 * j + lane_id() % 4 * 2], w1 = factor[n + 8 * j + lane_id() % 4 * 2 + 1];
            low += w0 * fmaxf(sums[j][0], 0.f) + w1 * fmaxf(sums[j][1], 0.f);
            high += w0 * fmaxf(sums[j][2], 0.f) + w1 * fmaxf(sums[j][3], 0.f);
        }
    }
    low += lane_xor(low, 1), low += lane_xor(low, 2), high += lane_xor(high, 1), high += lane_xor(high, 2);
    return make_float2(low, high);
}

KERNEL __launch_bounds__(256) void scores(const __half* q, const float* weight, const u8* rows, const int* pages,
                                          int page_stride, const int* positions, float* scores, int width, int T,
                                          int queries, int k, float scale) {
    PASS_TURN();  // positions and pages were there before anything that is still under way
    __shared__ __align__(16) __half keys[ROWS][PAD];
    static_assert(HEADS <= ROWS, "queries take the rows' place once those are in registers");
    __half (*heads)[PAD] = keys;
    __shared__ float factor[HEADS];
    int first = blockIdx.x * ROWS, tid = threadIdx.x, lane = lane_id(), group = group_id();
    int begin = blockIdx.y * queries, end = min(begin + queries, T);
    int seen = (positions[end - 1] + 1) / 4;  // positions ascend within a chunk, and a step has a block for each token
    const int* table = pages + (size_t)begin * page_stride;
    const int PIECES = ROWS * (W / 8) / 256, SHARERS = W / 8 / PIECES;  // of 8 channels; threads of a row
    static_assert(PIECES * SHARERS == W / 8, "rows of whole shares");
    int own = tid / SHARERS, chunk0 = tid % SHARERS * PIECES;
    const u8* row = first + own < seen ? row_at(rows, table, first + own) : 0;
    AWAIT_TURN();
    if (first >= seen || seen <= k) return;
    u32 codes[PIECES], exponents[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        codes[i] = row ? *(const u32*)(row + 4 * (chunk0 + i)) : 0;
        exponents[i] = row ? row[W / 2 + (chunk0 + i) / 4] : 0;
    }
#pragma unroll
    for (int i = 0; i < PIECES; ++i) *(uint4*)&keys[own][8 * (chunk0 + i)] = unpacked(codes[i], exponents[i]);
    __syncthreads();
    u32 a[W / 16][4];
#pragma unroll
    for (int i = 0; i < W / 16; ++i) load_a(a[i], &keys[16 * group][16 * i], PAD);
    for (int t = begin; t < end; ++t) {
        __syncthreads();
        for (int i = tid; i < HEADS * (W / 8); i += 256)
            *(uint4*)&heads[i / (W / 8)][i % (W / 8) * 8] =
                i < H * (W / 8) ? *(const uint4*)(q + ((size_t)t * H * W + 8 * i)) : make_uint4(0, 0, 0, 0);
        for (int h = tid; h < HEADS; h += 256) factor[h] = h < H ? weight[(size_t)t * H + h] : 0.f;
        __syncthreads();
        float2 score = scored(a, heads, factor);
        int sees = (positions[t] + 1) / 4, c = first + 16 * group + lane / 4;
        if (lane % 4 == 0 && c < sees) scores[(size_t)t * width + c] = score.x * scale;
        if (lane % 4 == 0 && c + 8 < sees) scores[(size_t)t * width + c + 8] = score.y * scale;
    }
}
#else
KERNEL void scores(const float* q, const float* weight, const u8* rows, const int* pages, int page_stride,
                   const int* positions, float* scores, int width, int T, int queries, int k, float scale) {
    TAKE_TURN();
    int begin = blockIdx.y * queries, end = min(begin + queries, T);
    for (int t = begin; t < end; ++t) {
        int seen = (positions[t] + 1) / 4, last = min(seen, (int)(blockIdx.x + 1) * ROWS);
        for (int c = blockIdx.x * ROWS + group_id(); seen > k && c < last; c += blockDim.x / LANES) {
            const float* row = (const float*)row_at(rows, pages + (size_t)t * page_stride, c);
            float sum = 0;
            for (int h = 0; h < H; ++h) {
                float dot = 0;
                for (int i = lane_id(); i < W; i += LANES) dot += q[((size_t)t * H + h) * W + i] * row[i];
                sum += weight[(size_t)t * H + h] * fmaxf(lane_sum(dot), 0.f);
            }
            if (lane_id() == 0) scores[(size_t)t * width + c] = sum * scale;
        }
    }
}
#endif

DEVICE u32 ordered(float v) {  // as the floats are ordered, -0 equal to 0
    u32 bits = __float_as_uint(v + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// chosen = the k best of `seen` rows, ascending, the lower row of equal scores: the k-th key byte by byte, then one
// ordered walk. A block.
DEVICE void best(const float* scores, int seen, int k, int* chosen) {
    __shared__ u32 counts[256], prefix, wanted, over[LANES], equal[LANES];
    int tid = threadIdx.x;
    if (tid == 0) prefix = 0, wanted = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = tid; i < 256; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        u32 held = prefix;
        for (int c = tid; c < seen; c += blockDim.x) {
            u32 key = ordered(scores[c]);
            if (shift == 24 || key >> (shift + 8) == held >> (shift + 8)) atomicAdd(&counts[key >> shift & 255], 1u);
        }
        __syncthreads();
        if (tid < LANES) {  // lane l has digits 255 - 8 l ... downwards
            u32 mine = 0, want = wanted;
            for (int i = 0; i < 8; ++i) mine += counts[255 - 8 * tid - i];
            u32 before = mine;
            for (int by = 1; by < LANES; by *= 2) {
                u32 other = lane_up(before, by);
                if (tid >= by) before += other;
            }
            before -= mine;
            if (before < want && want <= before + mine) {
                int digit = 255 - 8 * tid;
                while (before + counts[digit] < want) before += counts[digit--];
                prefix = held | (u32)digit << shift;
                wanted = want - before;
            }
        }
        __syncthreads();
    }
    // Each thread a run of rows, so that choices come out in order; `wanted` of those equal to the last key are taken.
    u32 last = prefix, ties = wanted;
    int run = (seen + blockDim.x - 1) / blockDim.x, begin = min(tid * run, seen), end = min(begin + run, seen);
    u32 more = 0, same = 0;
    for (int c = begin; c < end; ++c) {
        u32 key = ordered(scores[c]);
        more += key > last, same += key == last;
    }
    u32 more_before = more, same_before = same;
    for (int by = 1; by < LANES; by *= 2) {
        u32 m = lane_up(more_before, by), s = lane_up(same_before, by);
        if (lane_id() >= by) more_before += m, same_before += s;
    }
    if (lane_id() == LANES - 1) over[group_id()] = more_before, equal[group_id()] = same_before;
    __syncthreads();
    more_before -= more, same_before -= same;
    for (int g = 0; g < group_id(); ++g) more_before += over[g], same_before += equal[g];
    for (int c = begin; c < end; ++c) {
        u32 key = ordered(scores[c]);
        bool takes = key > last || (key == last && same_before < ties);
        if (takes) chosen[more_before + min(same_before, ties)] = c;
        more_before += key > last, same_before += key == last;
    }
}

// chosen[t] = the k best of the rows that t sees; all of them, and then their successors, where it sees no more than k.
// A block a token.
KERNEL void choose(const float* scores, const int* positions, int* chosen, int width, int k) {
    TAKE_TURN();
    int t = blockIdx.x, seen = (positions[t] + 1) / 4;
    chosen += (size_t)t * k;
    if (seen > k) best(scores + (size_t)t * width, seen, k, chosen);
    else
        for (int i = threadIdx.x; i < k; i += blockDim.x) chosen[i] = i;
}

#if defined(CLUSTER)
// All of it for a step's tokens, a cluster each: its blocks turn some heads each and send them to all, score some rows
// each, and the first chooses. Rows of earlier steps are there before this step's turn. q [T, H W]; pages
// [T, page_stride]. share: rows of a block, a multiple of 16; shared memory: 2 PAD (share + HEADS) + 4 HEADS +
// 4 share (CLUSTER + 1) bytes.
#define THREADS 512
#define OWN (HEADS / CLUSTER)   // heads

KERNEL CLUSTER_OF(CLUSTER, 1, 1) __launch_bounds__(THREADS) void pick(
    const float* q, const float* cosine, const float* sine, const float* weight, const u8* rows, const int* pages,
    int page_stride, const int* positions, int* chosen, int k, int share, float scale) {
    PASS_TURN();  // positions and pages were there before anything that is still under way
    extern __shared__ __align__(16) u8 memory[];
    __half (*heads)[PAD] = (__half(*)[PAD])memory, (*keys)[PAD] = heads + HEADS;
    float *factor = (float*)(keys + share), *mine = factor + HEADS, *all = mine + share;
    __shared__ Arrivals queries, scores;
    int tid = threadIdx.x, lane = lane_id(), group = group_id(), rank = blockIdx.x, t = blockIdx.y;
    int position = positions[t], seen = (position + 1) / 4, first = rank * share, count = min(seen - first, share);
    if (tid == 0) queries.open(2 * (HEADS - OWN) * PAD);
    if (tid == 0 && rank == 0) scores.open(4 * CLUSTER * share);
    cluster_arrive();
    pages += (size_t)t * page_stride;
    auto load = [&](int begin, int end) {
        for (int i = begin * (W / 8) + tid; i < end * (W / 8); i += THREADS) {
            int chunk = i % (W / 8);
            const u8* row = row_at(rows, pages, first + i / (W / 8));
            *(uint4*)&keys[i / (W / 8)][8 * chunk] = unpacked(*(const u32*)(row + 4 * chunk), row[W / 2 + chunk / 4]);
        }
    };
    int old = max(min(position / 4 - first, count), 0);
    load(0, old);
    cluster_wait();
    AWAIT_TURN();
    if (seen <= k) {
        for (int i = tid; rank == 0 && i < k; i += THREADS) chosen[(size_t)t * k + i] = i;
        return;
    }
    load(old, count);
    if (group < OWN) {
        int h = rank * OWN + group;
        float v[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[i] = h < H ? q[((size_t)t * H + h) * W + EACH * lane + i] : 0.f;
        turn(v, cosine + (size_t)t * (R / 2), sine + (size_t)t * (R / 2));
#pragma unroll
        for (int i = 0; i < EACH; i += 2)
            *(__half2*)&heads[h][EACH * lane + i] = __floats2half2_rn(v[i], v[i + 1]);
    } else if (group == OWN) {
        for (int h = lane; h < HEADS; h += LANES) factor[h] = h < H ? weight[(size_t)t * H + h] : 0.f;
    }
    Arrivals::send_ready();
    __syncthreads();
    if (tid < CLUSTER && tid != rank) {
        float* own = (float*)heads[rank * OWN];
        queries.send(tid, own, own, 2 * OWN * PAD);
    }
    queries.wait();
    for (int tile = group; tile < share / 16; tile += THREADS / LANES) {
        if (16 * tile >= count) continue;
        u32 a[W / 16][4];
#pragma unroll
        for (int i = 0; i < W / 16; ++i) load_a(a[i], &keys[16 * tile][16 * i], PAD);
        float2 score = scored(a, heads, factor);
        if (lane % 4 == 0) {
            mine[16 * tile + lane / 4] = score.x * scale;
            mine[16 * tile + lane / 4 + 8] = score.y * scale;
        }
    }
    Arrivals::send_ready();
    __syncthreads();
    if (tid == 0) scores.send(0, all + rank * share, mine, 4 * share);
    if (rank == 0) {
        scores.wait();
        best(all, seen, k, chosen + (size_t)t * k);
    }
    cluster_arrive();
    cluster_wait();  // a block must not end while what it sends is read
}
#endif
