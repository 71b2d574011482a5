// selected = table[id], or the K best of p + bias; weight = scale p[selected] / sum of p[selected], p = sqrt(softplus).
// 32 lanes a token. Macros: E experts, K chosen of them; N streams of HIDDEN channels. Chosen ones
// ascend; of equal scores the lower expert wins.
#include "sinkhorn.cuh"

#define EACH ((E + LANES - 1) / LANES)

DEVICE float probability(float z) { return sqrtf(fmaxf(z, 0.f) + log1pf(expf(-fabsf(z)))); }

// Grid (T, 2) in a step, whose second blocks do what is left of the hyper-connection before; (T) in a chunk.
KERNEL void scored(const float* logits, const float* bias, int* selected, float* weight, float scale,
                   const float* sums, const float* hc_scale, const float* base, int iterations, float hc_eps, float eps,
                   float* post, float* m) {
    TAKE_TURN();
    int t = blockIdx.x, lane = lane_id();
    if (blockIdx.y) {
        WayBack back = {sums, hc_scale, base, iterations, hc_eps, eps, post, m};
        if (lane == 0) way_back<N, HIDDEN>(back, t);
        return;
    }
    float p[EACH];
    u32 key[EACH];  // as scores are ordered, above 0; 0 once chosen
    bool mine[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int e = i * LANES + lane;
        p[i] = e < E ? probability(logits[(size_t)t * E + e]) : 0.f;
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
        int place = t * K + before + __popc(chosen & ((1u << lane) - 1));
        if (mine[i]) selected[place] = i * LANES + lane, weight[place] = p[i] / sum * scale;
        before += __popc(chosen);
    }
}

KERNEL void hashed(const float* logits, const int* table, const int* ids, int* selected, float* weight, float scale,
                   const float* sums, const float* hc_scale, const float* base, int iterations, float hc_eps, float eps,
                   float* post, float* m) {
    TAKE_TURN();
    int t = blockIdx.x, lane = lane_id();
    if (blockIdx.y) {
        WayBack back = {sums, hc_scale, base, iterations, hc_eps, eps, post, m};
        if (lane == 0) way_back<N, HIDDEN>(back, t);
        return;
    }
    int expert = lane < K ? table[(size_t)ids[t] * K + lane] : 0;
    float p = lane < K ? probability(logits[(size_t)t * E + expert]) : 0.f;
    float sum = lane_sum(p);
    if (lane < K) selected[t * K + lane] = expert, weight[t * K + lane] = p / sum * scale;
}
