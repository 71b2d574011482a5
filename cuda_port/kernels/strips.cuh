// What one lane decodes of a row of an expert for tiles of halves: 128 columns, in octets that are a column of B
// (mma.cuh). Lane l = 4 g + q has row g and, of each 32 columns, octet q. Weights come out UP times too large, away
// from the smallest halves.
#ifndef DS4_STRIPS
#define DS4_STRIPS
#include "pieces.cuh"

#define UP 256.f

template <int FORMAT>
struct Strip { u32 codes[4], scales[4]; };

DEVICE u32 pair_of(__half2 v) {
    union { __half2 h; u32 word; } u;
    u.h = v;
    return u.word;
}
DEVICE __half2 as_pair(u32 word) {
    union { u32 word; __half2 h; } u;
    u.word = word;
    return u.h;
}

#if TILED
// `tile`: of 16 rows and the first columns; half: 0 for rows g, 1 for rows g + 8.
template <int FORMAT, int WIDE>
DEVICE void fetch_strip(Strip<FORMAT>& s, const u8* tile, int half, int step) {
    int lane = lane_id(), g = lane / 4, q = lane % 4;
    if (FORMAT == KIND_IQ2_XXS) {
        tile += (size_t)(step / 2) * TILE_BYTES_IQ2_XXS;
        *(Duo*)s.codes = *(const Duo*)(tile + step % 2 * 512 + 16 * lane + 8 * half);
        s.scales[0] = *(const u16*)(tile + 1024 + 4 * g + 2 * half);
    } else {
        int piece = 4 * g + step % 2 * 2 + q / 2;
        tile += (size_t)(step / 2) * TILE_BYTES_Q2_K;
        *(Duo*)s.codes = *(const Duo*)(tile + 512 * half + 16 * piece + q % 2 * 8);
        s.scales[0] = *(const u32*)(tile + 1024 + 8 * piece + 4 * half);
        s.scales[1] = *(const u32*)(tile + 1280 + 8 * g + 4 * half);
    }
}
#else
template <int FORMAT, int WIDE>
DEVICE void fetch_strip(Strip<FORMAT>& s, const u8* row, int step) {
    const int blocks = WIDE / Size<FORMAT>::block;
    int q = lane_id() % 4, block = step / 2, half = step % 2;
    if (FORMAT == KIND_IQ2_XXS) {
        *(Duo*)s.codes = *(const Duo*)(row + 8 * (4 * step + q));
        s.scales[0] = *(const u16*)(row + WIDE / 4 + 2 * block);
    }
    if (FORMAT == KIND_Q2_K) {
        *(Duo*)s.codes = *(const Duo*)(row + 64 * block + 32 * half + 8 * q);
        s.scales[0] = *(const u32*)(row + 64 * blocks + 16 * block + 4 * (2 * half + q / 2));
        s.scales[1] = *(const u32*)(row + 80 * blocks + 4 * block);
    }
    if (FORMAT == KIND_Q4_K) {
        *(Duo*)s.codes = *(const Duo*)(row + 128 * block + 64 * half + 8 * q);
        *(Duo*)(s.codes + 2) = *(const Duo*)(row + 128 * block + 64 * half + 32 + 8 * q);
        *(Quad*)s.scales = *(const Quad*)(row + 128 * blocks + 16 * block);
    }
    if (FORMAT == KIND_MXFP4) {
        for (int i = 0; i < 4; ++i) s.codes[i] = *(const u32*)(row + 16 * (4 * step + i) + 4 * q);
        s.scales[0] = *(const u32*)(row + WIDE / 2 + 4 * step);
    }
}
#endif

// What the lane that fetched a strip prepares for those that share it.
template <int FORMAT>
DEVICE void prepare_strip(Strip<FORMAT>& s) {
    if (FORMAT != KIND_IQ2_XXS) return;
#if TILED
    s.scales[0] = pair_of(__float2half2_rn(half_bits(s.scales[0]) * (float)tile_scale(s.codes[1]) * (UP / 8)));
#else
    s.scales[0] = pair_of(__float2half2_rn(half_bits(s.scales[0]) * (float)(2 * (s.codes[1] >> 28) + 1) * (UP / 8)));
    s.codes[1] = iq2_all_signs(s.codes[1]);
#endif
}

// w = scale * code - least over four small codes in bytes.
DEVICE void affine(u32* w, u32 codes, __half2 scale, __half2 least) {
    const __half2 offset = as_pair(0x64006400);  // 1024, whose last bits count ones
    w[0] = pair_of(__hfma2(__hsub2(as_pair(bytes_of(codes, 0x64646464, 0x4140)), offset), scale, least));
    w[1] = pair_of(__hfma2(__hsub2(as_pair(bytes_of(codes, 0x64646464, 0x4342)), offset), scale, least));
}

// The octet of columns 32 i ... of the strip, as four pairs of halves. All lanes.
template <int FORMAT>
DEVICE void octet(u32 (&w)[4], const Strip<FORMAT>& s, int step, int i, const u8* codebook) {
    int lane = lane_id(), q = lane % 4;
    if (FORMAT == KIND_IQ2_XXS) {
        int from = (lane & ~3) + i;
        u32 rows = lane_get(s.codes[0], from), signs = lane_get(s.codes[1], from);
#if TILED
        signs = codebook_entry(codebook + 256 * LANES * 4, signs >> 8 * q & 127);
#else
        signs = iq2_octet_signs(signs, q);
#endif
        u32 which = codebook_entry(codebook, rows >> 8 * q & 255) | signs;
        // The halves 8, 25, 43 and their negatives, by byte.
        u32 low0 = bytes_of(0x00604000, 0x00604000, which), low1 = bytes_of(0x00604000, 0x00604000, which >> 16);
        u32 high0 = bytes_of(0x00514e48, 0x00d1cec8, which), high1 = bytes_of(0x00514e48, 0x00d1cec8, which >> 16);
        __half2 scale = as_pair(lane_get(s.scales[0], from));
        w[0] = pair_of(__hmul2(as_pair(bytes_of(low0, high0, 0x5140)), scale));
        w[1] = pair_of(__hmul2(as_pair(bytes_of(low0, high0, 0x7362)), scale));
        w[2] = pair_of(__hmul2(as_pair(bytes_of(low1, high1, 0x5140)), scale));
        w[3] = pair_of(__hmul2(as_pair(bytes_of(low1, high1, 0x7362)), scale));
    } else if (FORMAT == KIND_MXFP4) {
        u32 codes = s.codes[i], which = codes & 0x77777777, minus = codes >> 3 & 0x11111111;
        u32 high0 = bytes_of(0x3e3c3800, 0x46444240, which) | bytes_of(0x8000, 0, minus);
        u32 high1 = bytes_of(0x3e3c3800, 0x46444240, which >> 16) | bytes_of(0x8000, 0, minus >> 16);
        __half2 scale = __float2half2_rn(e8m0(s.scales[0] >> 8 * i & 255) * UP);
        w[0] = pair_of(__hmul2(as_pair(bytes_of(0, high0, 0x5140)), scale));
        w[1] = pair_of(__hmul2(as_pair(bytes_of(0, high0, 0x7362)), scale));
        w[2] = pair_of(__hmul2(as_pair(bytes_of(0, high1, 0x5140)), scale));
        w[3] = pair_of(__hmul2(as_pair(bytes_of(0, high1, 0x7362)), scale));
    } else {
        int scale, least;
        u32 d, first, second;
        if (FORMAT == KIND_Q2_K) {
            scale = s.scales[0] >> 8 * i & 15, least = s.scales[0] >> (8 * i + 4) & 15, d = s.scales[1];
            first = s.codes[0] >> 2 * i & 0x03030303, second = s.codes[1] >> 2 * i & 0x03030303;
        } else {
            q4_words(s.scales + 1, step % 2 * 4 + i, &scale, &least);
            d = s.scales[0];
            first = s.codes[i / 2 * 2] >> i % 2 * 4 & 0x0f0f0f0f;
            second = s.codes[i / 2 * 2 + 1] >> i % 2 * 4 & 0x0f0f0f0f;
        }
        __half2 by = __float2half2_rn(half_bits(d) * UP * scale);
        __half2 minus = __float2half2_rn(half_bits(d >> 16) * -UP * least);
        affine(w, first, by, minus);
        affine(w + 2, second, by, minus);
    }
}

#endif
