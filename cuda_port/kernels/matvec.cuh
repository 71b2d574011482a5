// Sixteen rows of a matrix times up to 4 vectors a tile of C, some columns at a time. Weights are A, both planes of the
// vectors the columns of B. Lane l = 4 g + q reads 16-byte pieces of rows g and g + 8; its results are those of vector
// q.
#ifndef DS4_MATVEC
#define DS4_MATVEC
#include "planes.cuh"

#define Q8_COLUMNS 128  // of a slice
#define F16_COLUMNS 64
#define SLICE_BYTES (LANES * (4 * 16 + 2 * 8))

// Where this lane's two rows begin.
struct Rows { const u8 *first, *second; };

DEVICE Rows rows_of(const u8* matrix, size_t pitch) {
    const u8* first = matrix + lane_id() / 4 * pitch;
    return Rows{first, first + 8 * pitch};
}

// Sixteen rows, 128 columns of Q8_0 or 64 of F16, on their way: four pieces, and scales. In registers ...
struct Slice {
    Quad v[4];
    Duo d[2];
    DEVICE void put(int i, const u8* p) { v[i] = stream16(p); }
    DEVICE void put_scales(int i, const u8* p) { d[i] = Duo{{stream4(p), stream4(p + 4)}}; }
    DEVICE Quad get(int i) const { return v[i]; }
    DEVICE Duo scales(int i) const { return d[i]; }
};

// ... or in shared memory, SLICE_BYTES for a group of lanes; each lane reads what it has copied itself.
struct Ring {
    u8* at;
    DEVICE void put(int i, const u8* p) { copy16(at + (LANES * i + lane_id()) * 16, p); }
    DEVICE void put_scales(int i, const u8* p) { copy8(at + LANES * 64 + (LANES * i + lane_id()) * 8, p); }
    DEVICE Quad get(int i) const { return *(const Quad*)(at + (LANES * i + lane_id()) * 16); }
    DEVICE Duo scales(int i) const { return *(const Duo*)(at + LANES * 64 + (LANES * i + lane_id()) * 8); }
};

// rows: arranged (blocks.cuh), `width` columns; k a multiple of 128.
template <class To>
DEVICE void fetch_q8(To& s, Rows rows, int width, int k) {
    int codes = k + 16 * (lane_id() % 4), scales = width + k / 16;
    s.put(0, rows.first + codes);
    s.put(1, rows.first + codes + 64);
    s.put(2, rows.second + codes);
    s.put(3, rows.second + codes + 64);
    s.put_scales(0, rows.first + scales);
    s.put_scales(1, rows.second + scales);
}

template <class To>
DEVICE void fetch_f16(To& s, Rows rows, int k) {
    int at = 2 * k + 16 * (lane_id() % 4);
    s.put(0, rows.first + at);
    s.put(1, rows.first + at + 64);
    s.put(2, rows.second + at);
    s.put(3, rows.second + at + 64);
}

// Vectors in shared memory as columns of B: rows of bytes `pitch` apart, high and low part of vector 0, of vector 1 and
// so on, from the first column of a slice on; vectors past `count` are zero. scale: of vector 0's block, for planes.
struct SharedVectors {
    const u8* rows;
    int pitch, count;
    const float* scales;
    int scale_pitch;

    // This lane's 16 bytes of 64 c ... of tile n.
    DEVICE Quad get(int n, int c) const {
        int g = lane_id() / 4, q = lane_id() % 4;
        Quad v = {{0, 0, 0, 0}};
        if (8 * n + g < 2 * count) v = *(const Quad*)(rows + g * pitch + 16 * q + 8 * n * pitch + 64 * c);
        return v;
    }
    // Of vector 4 n + q.
    DEVICE float scale(int n) const {
        int q = lane_id() % 4;
        return 4 * n + q < count ? scales[(4 * n + q) * scale_pitch] : 0.f;
    }
};

// Four words of A for several products. The compiler would copy them anew for each of those; it cannot know that this
// changes nothing, and keeps what comes out.
DEVICE void own(u32 (&w)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] ^= threadIdx.y;
}

// acc[tile][0, 2] += a slice of rows g, g + 8 times vectors.
template <int TILES, class From, class Vectors>
DEVICE void consume_q8(float (&acc)[TILES][4], const From& s, const Vectors& vectors) {
    float sum[TILES][2] = {};
    Duo d0 = s.scales(0), d1 = s.scales(1);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        Quad a = s.get(c), b = s.get(2 + c), x[TILES];
#pragma unroll
        for (int n = 0; n < TILES; ++n) x[n] = vectors.get(n, c);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float by0 = half_bits(d0.w[c] >> 16 * i), by1 = half_bits(d1.w[c] >> 16 * i);
            u32 w[4] = {a.w[2 * i], b.w[2 * i], a.w[2 * i + 1], b.w[2 * i + 1]};
            if (TILES > 1) own(w);
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                int dot[4] = {};
                mma_bytes(dot, w, x[n].w[2 * i], x[n].w[2 * i + 1]);
                sum[n][0] += by0 * (float)(dot[0] * 256 + dot[1]);
                sum[n][1] += by1 * (float)(dot[2] * 256 + dot[3]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        float by = vectors.scale(n);
        acc[n][0] += by * sum[n][0];
        acc[n][2] += by * sum[n][1];
    }
}

// The same for F16 and vectors in halves; acc[tile][1, 3] holds what their low halves give.
template <int TILES, class From, class Vectors>
DEVICE void consume_f16(float (&acc)[TILES][4], const From& s, const Vectors& vectors) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        Quad a = s.get(c), b = s.get(2 + c);
        u32 first[4] = {a.w[0], b.w[0], a.w[1], b.w[1]}, second[4] = {a.w[2], b.w[2], a.w[3], b.w[3]};
        if (TILES > 1) own(first), own(second);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            Quad x = vectors.get(n, c);
            mma(acc[n], first, x.w[0], x.w[1]);
            mma(acc[n], second, x.w[2], x.w[3]);
        }
    }
}

// Partial results to partial[vector][16 rows], vectors `pitch` floats apart.
template <int TILES>
DEVICE void keep_partial(const float (&acc)[TILES][4], float* partial, int pitch, int count) {
    int g = lane_id() / 4, q = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
        if (4 * n + q < count) {
            partial[(4 * n + q) * pitch + g] = acc[n][0] + acc[n][1];
            partial[(4 * n + q) * pitch + 8 + g] = acc[n][2] + acc[n][3];
        }
}

#endif
