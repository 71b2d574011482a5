// What a step starts with: rows of the embedding; cosines and sines of positions times frequencies, in double, for at
// position 10^6 a float's angle is off by 0.03.
#include "lanes.cuh"

#if defined(KIND)
// Macros: KIND as in a file's directory (0 F32, 1 F16, 30 BF16, 8 Q8_0), D channels of a row, N streams.
DEVICE float weight(const u8* row, int i) {
#if KIND == 0
    return ((const float*)row)[i];
#elif KIND == 1
    return __half2float(((const __half*)row)[i]);
#elif KIND == 30
    return __uint_as_float((u32)((const u16*)row)[i] << 16);
#else
    const u8* block = row + i / 32 * 34;
    return __half2float(__ushort_as_half(*(const u16*)block)) * ((const signed char*)block)[2 + i % 32];
#endif
}

// The streams that a token starts with: streams[t, n] = row ids[t] of the embedding.
KERNEL void embed(const u8* table, long long row_bytes, const int* ids, float* streams) {
    TAKE_TURN();
    int t = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= D) return;
    float v = weight(table + ids[t] * row_bytes, i);
    for (int n = 0; n < N; ++n) streams[((size_t)t * N + n) * D + i] = v;
}
#endif

// frequencies f64 [2, P], plain and compressed. tables f32 [4, 2, T, P]: of the tokens' positions plain, then
// compressed; of the first positions of their groups of 4, then of 128; each cosine, then sine. A block a token.
KERNEL void tables(const int* positions, const double* frequencies, float* tables, int T, int P) {
    TAKE_TURN();
    int t = blockIdx.x, position = positions[t];
    for (int i = threadIdx.x; i < 4 * P; i += blockDim.x) {
        int kind = i / P, p = i % P;
        int at = kind < 2 ? position : position - position % (kind == 2 ? 4 : 128);
        double angle = at * frequencies[(kind > 0) * P + p];
        float* out = tables + ((size_t)kind * 2 * T + t) * P + p;
        out[0] = (float)cos(angle);
        out[(size_t)T * P] = (float)sin(angle);
    }
}

// The same of the first positions of groups start / ratio, start / ratio + 1, ..., compressed: [2, groups, P].
KERNEL void group_tables(int first, int ratio, const double* frequencies, float* tables, int groups, int P) {
    TAKE_TURN();
    int g = blockIdx.x;
    for (int p = threadIdx.x; p < P; p += blockDim.x) {
        double angle = (double)(first + g) * ratio * frequencies[P + p];
        tables[(size_t)g * P + p] = (float)cos(angle);
        tables[(size_t)(groups + g) * P + p] = (float)sin(angle);
    }
}
