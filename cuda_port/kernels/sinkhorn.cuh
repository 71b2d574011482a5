// How a half layer's output will be mixed back into N streams of `Width` channels: from the sums over the streams of
// its 2 N + N N products, and of the streams' products with one another [N, N], to post [N] and m [N, N]. It is little
// work that takes long, and nothing needs it before the half layer is done: so it is left to whatever runs beside that.
#ifndef DS4_SINKHORN
#define DS4_SINKHORN
#include "lanes.cuh"

struct WayBack {
    const float *sums, *scale, *base;   // sums [T, 2 N + 2 N N]
    int iterations;
    float hc_eps, eps;
    float *post, *m;
};

// A thread's work: columns, then alternately rows and columns are made to sum to 1. z: N N logits.
template <int Streams>
DEVICE void doubly_stochastic(const float (&z)[Streams * Streams], float* m, int iterations, float eps) {
    float a[Streams][Streams], row[Streams], column[Streams];
#pragma unroll
    for (int i = 0; i < Streams; ++i) {
        float most = z[Streams * i], sum = 0;
#pragma unroll
        for (int j = 1; j < Streams; ++j) most = fmaxf(most, z[Streams * i + j]);
#pragma unroll
        for (int j = 0; j < Streams; ++j) a[i][j] = expf(z[Streams * i + j] - most), sum += a[i][j];
#pragma unroll
        for (int j = 0; j < Streams; ++j) a[i][j] = a[i][j] / sum + eps;
        row[i] = column[i] = 1;
    }
    for (int turn = 0; turn < iterations; ++turn) {  // the matrix is row[i] a[i][j] column[j]
#pragma unroll
        for (int i = 0; i < Streams; ++i) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < Streams; ++j) sum += a[i][j] * column[j];
            if (turn) row[i] = __fdividef(row[i], row[i] * sum + eps);
        }
#pragma unroll
        for (int j = 0; j < Streams; ++j) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < Streams; ++i) sum += a[i][j] * row[i];
            column[j] = __fdividef(column[j], column[j] * sum + eps);
        }
    }
#pragma unroll
    for (int i = 0; i < Streams * Streams; ++i)
        m[i] = row[i / Streams] * a[i / Streams][i % Streams] * column[i % Streams];
}

// Of token t, by one thread.
template <int Streams, int Width>
DEVICE void way_back(const WayBack& of, int t) {
    const int PRODUCTS = Streams * (2 + Streams);
    const float *products = of.sums + t * (PRODUCTS + Streams * Streams), *gram = products + PRODUCTS;
    float squares = 0, z[Streams * Streams];
#pragma unroll
    for (int n = 0; n < Streams; ++n) squares += gram[n * Streams + n];
    float r = rsqrtf(squares / (Streams * Width) + of.eps);
#pragma unroll
    for (int n = 0; n < Streams; ++n)
        of.post[t * Streams + n] = 2 * sigmoid(products[Streams + n] * r * of.scale[1] + of.base[Streams + n]);
#pragma unroll
    for (int i = 0; i < Streams * Streams; ++i)
        z[i] = products[2 * Streams + i] * r * of.scale[2] + of.base[2 * Streams + i];
    doubly_stochastic<Streams>(z, of.m + t * Streams * Streams, of.iterations, of.hc_eps);
}

#endif
