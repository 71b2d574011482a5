// Rows of GGUF blocks: put in the order that blocks.cuh describes, or written out as floats or halves. One thread for
// eight weights, or for a part of a block. Macros: KIND, WIDTH, OUT (float or __half), ARRANGED.
#include "blocks.cuh"

#define ROW_BYTES (WIDTH / BLOCK_WEIGHTS * BLOCK_BYTES)
#if KIND == KIND_Q8_0
#define BLOCK_WEIGHTS 32
#define BLOCK_BYTES 34
#elif KIND == KIND_MXFP4
#define BLOCK_WEIGHTS 32
#define BLOCK_BYTES 17
#elif KIND == KIND_IQ2_XXS
#define BLOCK_WEIGHTS 256
#define BLOCK_BYTES 66
#elif KIND == KIND_Q2_K
#define BLOCK_WEIGHTS 256
#define BLOCK_BYTES 84
#elif KIND == KIND_Q4_K
#define BLOCK_WEIGHTS 256
#define BLOCK_BYTES 144
#else
#define BLOCK_WEIGHTS 1
#define BLOCK_BYTES (KIND == KIND_F32 ? 4 : 2)
#endif
#define ROW_BLOCKS (WIDTH / BLOCK_WEIGHTS)

// Where byte `at` of block b belongs in an arranged row.
DEVICE int target(int b, int at) {
    if (KIND == KIND_Q8_0) {
        int k = 32 * b + at - 2;
        return at < 2 ? WIDTH + 2 * b + at : k / 64 * 64 + plane_offset(k % 64 / 8) + k % 8;
    }
    if (KIND == KIND_IQ2_XXS) return at < 2 ? WIDTH / 4 + 2 * b + at : 64 * b + at - 2;
    if (KIND == KIND_Q2_K) {
        int a = at / 8, f = at % 8 / 2;  // of a scale: half block, field of two bits, and which 16 of its 32 weights
        if (at < 16) return ROW_BLOCKS * 64 + 16 * b + 4 * (2 * a + at % 2) + f;
        return at < 80 ? 64 * b + at - 16 : ROW_BLOCKS * 80 + 4 * b + at - 80;
    }
    if (KIND == KIND_Q4_K) return at < 16 ? ROW_BLOCKS * 128 + 16 * b + at : 128 * b + at - 16;
    return at;
}

// to[row] = from[row], arranged. A thread a byte; MXFP4, whose nibbles move apart, has its own way.
KERNEL void arrange(const u8* from, u8* to, size_t bytes) {
    AWAIT_TURN();
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < bytes; i += (size_t)gridDim.x * blockDim.x) {
        size_t row = i / ROW_BYTES;
        int in = i % ROW_BYTES, b = in / BLOCK_BYTES, at = in % BLOCK_BYTES;
#if KIND == KIND_MXFP4
        const u8* codes = from + row * ROW_BYTES + b * BLOCK_BYTES + 1;
        if (at == 0) to[row * ROW_BYTES + WIDTH / 2 + b] = from[i];
        else {
            int n = 2 * (at - 1), shift = n / 16 * 4;
            to[row * ROW_BYTES + 16 * b + at - 1] =
                (codes[n % 16] >> shift & 15) | (codes[n % 16 + 1] >> shift & 15) << 4;
        }
#else
        u8 value = from[i];
        if (KIND == KIND_IQ2_XXS && at >= 2 && (at - 2) % 8 >= 4) {
            const u8* word = from + i - (at - 2) % 4;
            value = iq2_arranged(word[0] | word[1] << 8 | word[2] << 16 | (u32)word[3] << 24) >> (at - 2) % 4 * 8;
        }
        to[row * ROW_BYTES + target(b, at)] = value;
#endif
    }
}

#if KIND == KIND_IQ2_XXS || KIND == KIND_Q2_K
// The same for rows of experts that are multiplied in tiles (blocks.cuh): where a byte of block b of a row belongs.
DEVICE size_t tile_target(size_t row, int b, int at) {
    int half = row % 16 / 8, g = row % 8, to;
#if KIND == KIND_IQ2_XXS
    int group = (at - 2) / 8;
    to = at < 2 ? 1024 + 4 * g + 2 * half + at : group / 4 * 512 + 16 * (4 * g + group % 4) + 8 * half + (at - 2) % 8;
#else
    int scale = 8 * (4 * g + at / 8 * 2 + at % 2) + 4 * half + at % 8 / 2;
    to = at < 16 ? 1024 + scale : at >= 80 ? 1280 + 8 * g + 4 * half + at - 80
                                           : 512 * half + 16 * (4 * g + (at - 16) / 16) + at % 16;
#endif
    return ((row / 16 * ROW_BLOCKS) + b) * (16 * BLOCK_BYTES) + to;
}

KERNEL void tile(const u8* from, u8* to, size_t bytes) {
    AWAIT_TURN();
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < bytes; i += (size_t)gridDim.x * blockDim.x) {
        size_t row = i / ROW_BYTES;
        int in = i % ROW_BYTES, b = in / BLOCK_BYTES, at = in % BLOCK_BYTES;
        u8 value = from[i];
#if KIND == KIND_IQ2_XXS
        if (at >= 2 && (at - 2) % 8 >= 4) {
            int o = (at - 2) % 4;
            const u8* word = from + i - o;
            u32 signs = word[0] | word[1] << 8 | word[2] << 16 | (u32)word[3] << 24;
            value = (signs >> 7 * o & 127) | (signs >> (28 + o) & 1) << 7;
        }
#endif
        to[tile_target(row, b, at)] = value;
    }
}
#endif

DEVICE float written(float v, float*) { return v; }
DEVICE __half written(float v, __half*) { return __float2half_rn(fminf(fmaxf(v, -65504.f), 65504.f)); }

// out [rows, WIDTH] = the weights; a thread writes eight, or the rest of a row.
KERNEL void dequantize(const u8* raw, OUT* out, size_t octets) {
    const int of_row = (WIDTH + 7) / 8;
    AWAIT_TURN();
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < octets; i += (size_t)gridDim.x * blockDim.x) {
        size_t r = i / of_row;
        int k = i % of_row * 8;
        const u8* row = raw + r * ROW_BYTES;
        OUT* y = out + r * WIDTH + k;
#if ARRANGED && KIND == KIND_Q8_0
        Duo codes = *(const Duo*)(row + k / 64 * 64 + plane_offset(k % 64 / 8));
        float d = half_at(row + WIDTH + k / 32 * 2);
        __align__(16) OUT v[8];
        for (int j = 0; j < 8; ++j) v[j] = written(d * (signed char)(codes.w[j / 4] >> j % 4 * 8), y);
        for (int j = 0; j < (int)sizeof(OUT) / 2; ++j) ((Quad*)y)[j] = ((Quad*)v)[j];
#else
        for (int j = 0; j < 8 && k + j < WIDTH; ++j) y[j] = written(weight_at<KIND>(row, k + j), y);
#endif
    }
}

// halves of x, for products of halves; `rest`, if not null: halves of what those leave.
KERNEL void to_half(const float* x, __half* y, __half* rest, size_t count) {
    AWAIT_TURN();
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        __half half = written(x[i], y);
        y[i] = half;
        if (rest) rest[i] = written(x[i] - __half2float(half), rest);
    }
}
