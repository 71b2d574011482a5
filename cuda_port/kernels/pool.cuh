// A compressor's group of `Ratio` tokens to one channel of a row of `Width`. k and s are as wide, or twice as wide
// where groups overlap (Overlap 2); a frontier ring holds those of the last Overlap Ratio tokens, a token of position p
// at p % (Overlap Ratio): k, then s with its position bias.
#ifndef DS4_POOL
#define DS4_POOL
#include "rows.cuh"

template <int Ratio, int Overlap, int Width>
struct Pool {
    static const int COLUMNS = Overlap * Width, HELD = Overlap * Ratio;
    const float *ring, *k, *s, *ape;  // k, s [.., COLUMNS] of the tokens from position `start` on
    int start;

    DEVICE void put(float* frontier, int position, int column, float key, float score) const {
        float* at = frontier + (size_t)(position % HELD) * 2 * COLUMNS + column;
        at[0] = key;
        at[COLUMNS] = score + ape[position % Ratio * COLUMNS + column];
    }

    // sum_p softmax_p(s[p]) k[p] of channel j over the slots of group `group`: if groups overlap, the carry halves of
    // the one before, where there is one, and the own halves of this one.
    DEVICE float pooled(int group, int j) const {
        float most = -INFINITE, total = 0, sum = 0;
        int first = (group + 1) * Ratio - HELD;
#pragma unroll 8
        for (int i = 0; i < HELD; ++i) {
            int p = first + i, column = Overlap == 2 && i >= Ratio ? Width + j : j;
            if (p < 0) continue;
            float key, score;
            if (p < start) {
                const float* at = ring + (size_t)(p % HELD) * 2 * COLUMNS + column;
                key = at[0], score = at[COLUMNS];
            } else {
                size_t at = (size_t)(p - start) * COLUMNS + column;
                key = k[at], score = s[at] + ape[p % Ratio * COLUMNS + column];
            }
            float next = fmaxf(most, score), shrink = expf(most - next), weight = expf(score - next);
            total = total * shrink + weight, sum = sum * shrink + weight * key, most = next;
        }
        return sum / total;
    }
};

// Channel c of `row`, rotated: pairs of the last R channels by cosine and sine [R / 2], thread c holding channel c.
template <int Width, int Rotary>
DEVICE float rotated(float v, int c, const float* cosine, const float* sine) {
    float other = lane_xor(v, 1);
    int pair = (c - (Width - Rotary)) / 2;
    if (c < Width - Rotary || c >= Width) return v;
    return c % 2 ? other * sine[pair] + v * cosine[pair] : v * cosine[pair] - other * sine[pair];
}

#endif
