// A tile of keys for the 16 heads of each of TILES tiles, of which a group of lanes has GROUP_CHANNELS of the outputs:
// what keys weigh by their scores, and outputs that are added up as if the largest score had been known before.
#ifndef DS4_ATTEND_TILE
#define DS4_ATTEND_TILE
#include "attend_keys.cuh"

#define TILE_EACH ((KEYS + LANES - 1) / LANES)

// Of heads in shared memory: the largest score so far and the sum of weights, and what the last tile shrank both by.
struct Running {
    float *most, *total, *shrink;

    DEVICE Running(float* heads, int count) : most(heads), total(heads + count), shrink(heads + 2 * count) {}

    DEVICE void open(int head) { most[head] = -INFINITE, total[head] = 0; }

    // Head `head`, by 32 lanes, of which lane l has the scores of keys l, l + 32, ..., as powers of two; -inf for keys
    // that are not there. weights: of the tile, [KEYS].
    DEVICE void weigh(int head, const float (&score)[TILE_EACH], __half* weights) {
        float before = most[head], next = before, sum = 0;
#pragma unroll
        for (int i = 0; i < TILE_EACH; ++i) next = fmaxf(next, score[i]);
        next = lane_max(next);
#pragma unroll
        for (int i = 0; i < TILE_EACH; ++i) {
            __half weight = __float2half_rn(exp2f(score[i] - next));
            if (LANES * i + lane_id() < KEYS) weights[LANES * i + lane_id()] = weight;
            sum += __half2float(weight);
        }
        sum = lane_sum(sum);
        if (lane_id() == 0) {
            float by = exp2f(before - next);
            shrink[head] = by, most[head] = next, total[head] = total[head] * by + sum;
        }
    }
};

// sums = shrink sums + weights keys, of this group's channels: a C tile holds heads lane / 4 and lane / 4 + 8.
template <int TILES>
DEVICE void add_values(float (&sums)[TILES][GROUP_CHANNELS / 8][4], const float* shrink, const __half* weights,
                       const __half* keys, int count) {
    int lane = lane_id();
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        float low = shrink[16 * i + lane / 4], high = shrink[16 * i + lane / 4 + 8];
#pragma unroll
        for (int n = 0; n < GROUP_CHANNELS / 8; ++n)
            sums[i][n][0] *= low, sums[i][n][1] *= low, sums[i][n][2] *= high, sums[i][n][3] *= high;
    }
#pragma unroll
    for (int k = 0; k < KEYS; k += 16) {
        if (k >= count) break;
        u32 a[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; ++i) load_a(a[i], weights + 16 * i * WEIGHT_PAD + k, WEIGHT_PAD);
#pragma unroll
        for (int n = 0; n < GROUP_CHANNELS; n += 16) {
            u32 b[4];
            load_b_rows(b, keys + k * PAD + group_id() * GROUP_CHANNELS + n, PAD);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                mma(sums[i][n / 8], a[i], b[0], b[1]);
                mma(sums[i][n / 8 + 1], a[i], b[2], b[3]);
            }
        }
    }
}

#endif
