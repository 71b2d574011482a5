// Eight rows of a matrix times up to 8 vectors a tile of C, 256 columns at a time. Lane l = 4 g + q reads 16-byte pieces of
// row g; its results are those of vector g and rows 2q, 2q + 1.
#ifndef DS4_MATVEC
#define DS4_MATVEC
#include "planes.cuh"

#define SLICE 256  // columns

// Eight rows, 256 columns, on their way: Q8_0 takes four pieces of codes and two of scales, F16 eight. In registers ...
struct Slice {
    Quad v[8];
    DEVICE void put(int i, const u8* p) { v[i] = stream16(p); }
    DEVICE Quad get(int i) const { return v[i]; }
};

// ... or in shared memory, `at` being the lane's first piece.
struct Ring {
    Quad* at;
    DEVICE void put(int i, const u8* p) { copy16(at + LANES * i, p); }
    DEVICE Quad get(int i) const { return at[LANES * i]; }
};

// rows: the first of eight, arranged (blocks.cuh), `width` columns; k a multiple of 256.
template <class To>
DEVICE void fetch_q8(To& s, const u8* rows, int width, int k) {
    int g = lane_id() / 4, q = lane_id() % 4;
    size_t pitch = width / 32 * 34;
    const u8* codes = rows + g * pitch + k + 16 * q;
    const u8* scales = rows + 2 * q * pitch + width + k / 16;
#pragma unroll
    for (int c = 0; c < 4; ++c) s.put(c, codes + 64 * c);
    s.put(4, scales);
    s.put(5, scales + pitch);
}

template <class To>
DEVICE void fetch_f16(To& s, const u8* rows, int width, int k) {
    const u8* at = rows + (size_t)(lane_id() / 4) * width * 2 + 2 * k + 16 * (lane_id() % 4);
#pragma unroll
    for (int c = 0; c < 8; ++c) s.put(c, at + 64 * c);
}

// acc[tile][0, 1] += of the slice. high, low: the planes at column k of vector 0, rows `pitch` bytes apart; scale: of its
// block, `scale_pitch` floats apart; vectors past `count` are zero.
template <int TILES, class From>
DEVICE void consume_q8(float (&acc)[TILES][4], const From& s, const u8* high, const u8* low, int pitch,
                       const float* scale, int scale_pitch, int count) {
    int g = lane_id() / 4, q = lane_id() % 4;
    float sum[TILES][2] = {};
    Quad scale0 = s.get(4), scale1 = s.get(5);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        Quad v = s.get(c);
        Quad h[TILES], l[TILES];
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            h[m] = l[m] = Quad{{0, 0, 0, 0}};
            if (8 * m + g < count) {
                h[m] = *(const Quad*)(high + (8 * m + g) * pitch + 64 * c + 16 * q);
                l[m] = *(const Quad*)(low + (8 * m + g) * pitch + 64 * c + 16 * q);
            }
        }
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            float d0 = half_bits(scale0.w[c] >> 16 * b), d1 = half_bits(scale1.w[c] >> 16 * b);
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                int dot[4] = {};
                u32 a[4] = {h[m].w[2 * b], l[m].w[2 * b], h[m].w[2 * b + 1], l[m].w[2 * b + 1]};
                mma_bytes(dot, a, v.w[2 * b], v.w[2 * b + 1]);
                sum[m][0] += d0 * (float)(dot[0] * 256 + dot[2]);
                sum[m][1] += d1 * (float)(dot[1] * 256 + dot[3]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        float x = 8 * m + g < count ? scale[(8 * m + g) * scale_pitch] : 0.f;
        acc[m][0] += x * sum[m][0];
        acc[m][1] += x * sum[m][1];
    }
}

// The same for F16, where acc[tile][2, 3] holds what the low halves give.
template <int TILES, class From>
DEVICE void consume_f16(float (&acc)[TILES][4], const From& s, const __half* high, const __half* low, int pitch,
                        int count) {
    int g = lane_id() / 4, q = lane_id() % 4;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        Quad v = s.get(c);
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            Quad h = {{0, 0, 0, 0}}, l = h;
            if (8 * m + g < count) {
                h = *(const Quad*)(high + (8 * m + g) * pitch + 32 * c + 8 * q);
                l = *(const Quad*)(low + (8 * m + g) * pitch + 32 * c + 8 * q);
            }
            u32 first[4] = {h.w[0], l.w[0], h.w[1], l.w[1]}, second[4] = {h.w[2], l.w[2], h.w[3], l.w[3]};
            mma(acc[m], first, v.w[0], v.w[1]);
            mma(acc[m], second, v.w[2], v.w[3]);
        }
    }
}

// Partial results to partial[vector][8 rows], vectors `pitch` floats apart.
template <int TILES>
DEVICE void keep_partial(const float (&acc)[TILES][4], float* partial, int pitch, int count) {
    int g = lane_id() / 4, q = lane_id() % 4;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
        if (8 * m + g < count)
            *(float2*)(partial + (8 * m + g) * pitch + 2 * q) =
                make_float2(acc[m][0] + acc[m][2], acc[m][1] + acc[m][3]);
}

#endif
