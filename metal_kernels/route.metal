// p = sqrt(log(1 + e^logit)); weight[s] = scale p[selected[s]] / sum of p[selected].  One simdgroup a token.
//
// scored: selected = the K best of p + bias, in ascending order. Lane l holds experts l, l + 32, ... in registers, as
// integers of the scores' order. K times the largest is found over the simdgroup, the lower expert of equal ones first,
// and taken out. Experts ascend by register and then by lane, so each lane knows how many were chosen before its own.
// hashed: selected = table[ids], in the table's order. Lane s takes the s-th.
#include "order.h"

// log(1 + x) for 0 <= x <= 1. What 1 + x rounds away is what its logarithm is scaled back by.
inline float log_1p(float x) {
    float sum = 1.0f + x;
    return sum == 1.0f ? x : precise::log(sum) * (x / (sum - 1.0f));
}

// Below -16 log(1 + e^z) is e^z to float's precision, and the root taken inside lasts twice as far down.
inline float probability(float logit) {
    float softplus = max(logit, 0.0f) + log_1p(precise::exp(-abs(logit)));
    return logit < -16.0f ? precise::exp(0.5f * logit) : precise::sqrt(softplus);
}
// ---- kernel scored
enum { EACH = (E + 31) / 32 };
uint lane = thread_index_in_simdgroup, t = threadgroup_position_in_grid.x;
float p[EACH];
uint order[EACH];
for (uint i = 0; i < EACH; ++i) {
    uint expert = 32 * i + lane;
    p[i] = expert < E ? probability(logits[ulong(t) * E + expert]) : 0.0f;
    order[i] = expert < E ? order_of(p[i] + bias[expert]) : 0u;
}
bool chosen[EACH] = {};
float sum = 0.0f;
for (uint round = 0; round < K; ++round) {
    uint best = order[0], at = 0;
    for (uint i = 1; i < EACH; ++i) {
        at = order[i] > best ? i : at;
        best = max(best, order[i]);
    }
    uint expert = simd_min(best == simd_max(best) ? 32 * at + lane : uint(32 * EACH));
    for (uint i = 0; i < EACH; ++i) {
        if (expert == 32 * i + lane) {
            chosen[i] = true;
            order[i] = 0;
            sum += p[i];
        }
    }
}
sum = simd_sum(sum);
uint before = 0;
for (uint i = 0; i < EACH; ++i) {
    uint place = before + simd_prefix_exclusive_sum(uint(chosen[i]));
    if (chosen[i]) {
        selected[ulong(t) * K + place] = int(32 * i + lane);
        weight[ulong(t) * K + place] = p[i] / sum * scale;
    }
    before += simd_sum(uint(chosen[i]));
}
// ---- kernel hashed
uint lane = thread_index_in_simdgroup, t = threadgroup_position_in_grid.x;
int expert = lane < K ? table[ulong(ids[t]) * K + lane] : 0;
float p = lane < K ? probability(logits[ulong(t) * E + expert]) : 0.0f;
float sum = simd_sum(p);
if (lane < K) {
    selected[ulong(t) * K + lane] = expert;
    weight[ulong(t) * K + lane] = p / sum * scale;
}
