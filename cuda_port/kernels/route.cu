// selected = table[id], or the K best of p + bias; weight = scale p[selected] / sum of p[selected], p = sqrt(softplus).
// 32 lanes a token. Macros: E experts, K chosen of them; STREAMS of HIDDEN channels. Chosen ones
// ascend; of equal scores the lower expert wins.
#include "cluster.cuh"
#include "planes.cuh"
#include "sinkhorn.cuh"

#define EACH ((E + LANES - 1) / LANES)

DEVICE float probability(float z) { return sqrtf(fmaxf(z, 0.f) + log1pf(expf(-fabsf(z)))); }

// The K best of a token, whose logit of expert e is logit(e).
template <class Logit>
DEVICE void choose(Logit logit, const float* bias, int* selected, float* weight, float scale) {
    int lane = lane_id();
    float p[EACH];
    u32 key[EACH];  // as scores are ordered, above 0; 0 once chosen
    bool mine[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int e = i * LANES + lane;
        p[i] = e < E ? probability(logit(e)) : 0.f;
        u32 bits = __float_as_uint(e < E ? p[i] + bias[e] + 0.f : -INFINITE);
        key[i] = e < E ? bits & 0x80000000u ? ~bits : bits | 0x80000000u : 0u;
        mine[i] = false;
    }
    for (int k = 0; k < K; ++k) {
        u32 best = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) best = max(best, key[i]);
        best = lanes_max(best);
        u32 at = E;
#pragma unroll
        for (int i = EACH - 1; i >= 0; --i)
            if (key[i] == best) at = i * LANES + lane;
        at = lanes_min(at);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (i * LANES + lane == at) mine[i] = true, key[i] = 0;
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += mine[i] ? p[i] : 0.f;
    sum = lane_sum(sum);
    int before = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        u32 chosen = lanes_where(mine[i]);
        int place = before + __popc(chosen & ((1u << lane) - 1));
        if (mine[i]) selected[place] = i * LANES + lane, weight[place] = p[i] / sum * scale;
        before += __popc(chosen);
    }
}

// Those that the table has for a token.
template <class Logit>
DEVICE void look_up(Logit logit, const int* table, int* selected, float* weight, float scale) {
    int lane = lane_id(), expert = lane < K ? table[lane] : 0;
    float p = lane < K ? probability(logit(expert)) : 0.f;
    float sum = lane_sum(p);
    if (lane < K) selected[lane] = expert, weight[lane] = p / sum * scale;
}

// Of logits [T, E]; bias or a table with ids. Grid (T, 2) in a step, whose second blocks do what is left of the
// hyper-connection before; (T) in a chunk.
KERNEL void scored(const float* logits, const float* bias, const int* table, const int* ids, int* selected,
                   float* weight, float scale, const float* sums, const float* hc_scale, const float* base,
                   int iterations, float hc_eps, float eps, float* post, float* m) {
    TAKE_TURN();
    int t = blockIdx.x;
    if (blockIdx.y) {
        WayBack back = {sums, hc_scale, base, iterations, hc_eps, eps, post, m};
        if (threadIdx.x == 0) way_back<STREAMS, HIDDEN>(back, t);
        return;
    }
    auto logit = [&](int e) { return logits[(size_t)t * E + e]; };
    if (table) look_up(logit, table + (size_t)ids[t] * K, selected + t * K, weight + t * K, scale);
    else choose(logit, bias, selected + t * K, weight + t * K, scale);
}

#if defined(CLUSTER)
// A step with the logits' product, of halves: a token is a cluster of CLUSTER blocks, a block HIDDEN / CLUSTER channels
// of all experts, a group of lanes 16 of those; a last group does what is left of the hyper-connection before. The
// weights are there before the token is, in registers and, 16 WORKERS (PIECES - HELD) bytes, in shared memory. They are
// tiles of A, a token two columns of B, halves and what those leave; channels are taken in another order, the same for
// both, so that a lane reads 16 bytes at a time.
#define WORKERS (E * 2)                         // threads: a group of lanes for 16 experts
#define THREADS (WORKERS + LANES)
#define PART (HIDDEN / CLUSTER)                 // channels of a block
#define PIECES (PART / 16)                      // of 16 bytes, for a lane, of its two experts' rows
#define HELD ((PIECES * 3 + 15) / 16 * 2)       // in registers
#define PART_PAD (PART + 8)

KERNEL CLUSTER_OF(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) void routed(
    const float* x, const u8* gate, const float* bias, const int* table, const int* ids, int* selected, float* weight,
    float scale, const float* sums, const float* hc_scale, const float* base, int iterations, float hc_eps, float eps,
    float* post, float* m) {
    PASS_TURN();
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Mailbox<CLUSTER, E> mail;
    __shared__ __align__(16) __half token[2][PART_PAD];
    Quad held[HELD], *more = (Quad*)memory;
    int tid = threadIdx.x, lane = lane_id(), rank = blockIdx.x, t = blockIdx.y;
    bool works = tid < WORKERS;
    if (rank == 0 && tid == 0) mail.open();
    cluster_arrive();
    int expert = 16 * group_id() + lane / 4;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const u8* from = gate + 2 * ((size_t)(expert + i % 2 * 8) * HIDDEN + rank * PART + i / 2 * 32 + lane % 4 * 8);
        if (!works) continue;
        if (i < HELD) held[i] = stream16(from);
        else copy16(more + (i - HELD) * WORKERS + tid, from);
    }
    copies_end();
    cluster_wait();
    AWAIT_TURN();
    if (!works) {
        WayBack back = {sums, hc_scale, base, iterations, hc_eps, eps, post, m};
        if (rank == CLUSTER - 1 && lane == 0) way_back<STREAMS, HIDDEN>(back, t);
        return;
    }
    for (int c = tid; c < PART; c += WORKERS) {
        float v = x[(size_t)t * HIDDEN + rank * PART + c];
        __half high = __float2half_rn(v);
        token[0][c] = high, token[1][c] = __float2half_rn(v - __half2float(high));
    }
    await_copies<0>();
    meet<WORKERS>();
    float sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < PIECES; i += 2) {
        Quad a = i < HELD ? held[i] : more[(i - HELD) * WORKERS + tid];
        Quad b = i < HELD ? held[i + 1] : more[(i + 1 - HELD) * WORKERS + tid];
        Quad v = {{0, 0, 0, 0}};
        if (lane / 4 < 2) v = *(const Quad*)&token[lane / 4][i / 2 * 32 + lane % 4 * 8];
        u32 first[4] = {a.w[0], b.w[0], a.w[1], b.w[1]}, second[4] = {a.w[2], b.w[2], a.w[3], b.w[3]};
        mma(sum[0], first, v.w[0], v.w[1]);
        mma(sum[1], second, v.w[2], v.w[3]);
    }
    if (lane % 4 == 0) {  // columns 0 and 1 are the token's
        mail.post(0, rank, expert, sum[0][0] + sum[0][1] + sum[1][0] + sum[1][1]);
        mail.post(0, rank, expert + 8, sum[0][2] + sum[0][3] + sum[1][2] + sum[1][3]);
    }
    if (rank || group_id()) return;
    mail.wait();
    auto logit = [&](int e) {
        float z = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) z += mail.values[r][e];
        return z;
    };
    if (table) look_up(logit, table + (size_t)ids[t] * K, selected + t * K, weight + t * K, scale);
    else choose(logit, bias, selected + t * K, weight + t * K, scale);
}
#endif
