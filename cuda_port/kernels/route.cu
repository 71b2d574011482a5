// selected = table[id], or the K best of p + bias; weight = scale p[selected] / sum of p[selected], p = sqrt(softplus).
// 32 lanes a token. Macros: E experts, K chosen of them. Chosen ones ascend; of equal scores the lower expert wins.
#include "lanes.cuh"

#define EACH ((E + LANES - 1) / LANES)

DEVICE float probability(float z) { return sqrtf(fmaxf(z, 0.f) + log1pf(expf(-fabsf(z)))); }

DEVICE void give(int expert, float p, int* selected, float* weight, float scale) {
    int lane = lane_id();
    float sum = lane_sum(lane < K ? p : 0.f);
    if (lane < K) selected[lane] = expert, weight[lane] = p / sum * scale;
}

KERNEL void scored(const float* logits, const float* bias, int* selected, float* weight, float scale) {
    TAKE_TURN();
    int t = blockIdx.x, lane = lane_id();
    float score[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int e = i * LANES + lane;
        score[i] = e < E ? probability(logits[(size_t)t * E + e]) + bias[e] : -INFINITE;
    }
    int mine = E;  // lane k's choice
    for (int k = 0; k < K; ++k) {
        float best = -INFINITE;
        int at = E;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (score[i] > best) best = score[i], at = i * LANES + lane;
        for (int mask = LANES / 2; mask; mask /= 2) {
            float other = lane_xor(best, mask);
            int place = lane_xor(at, mask);
            if (other > best || (other == best && place < at)) best = other, at = place;
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (i * LANES + lane == at) score[i] = -INFINITE;
        if (lane == k) mine = at;
    }
    int rank = 0, ordered = E;
    for (int k = 0; k < K; ++k) rank += lane_get(mine, k) < mine;
    for (int k = 0; k < K; ++k) {
        int place = lane_get(rank, k), expert = lane_get(mine, k);
        if (place == lane) ordered = expert;
    }
    float p = lane < K ? probability(logits[(size_t)t * E + min(ordered, E - 1)]) : 0.f;
    give(ordered, p, selected + (size_t)t * K, weight + (size_t)t * K, scale);
}

KERNEL void hashed(const float* logits, const int* table, const int* ids, int* selected, float* weight, float scale) {
    TAKE_TURN();
    int t = blockIdx.x, lane = lane_id();
    int expert = lane < K ? table[(size_t)ids[t] * K + lane] : 0;
    float p = lane < K ? probability(logits[(size_t)t * E + expert]) : 0.f;
    give(expert, p, selected + (size_t)t * K, weight + (size_t)t * K, scale);
}
