// What one lane multiplies of a row of an expert: 16 bytes of arranged codes (64 weights of two bits, or 32 of four)
// with activations in planes, in integers. The same activations serve many rows, so a lane keeps them in registers.
#ifndef DS4_PIECES
#define DS4_PIECES
#include "blocks.cuh"

template <int FORMAT>
struct Size {
    static const int weights = FORMAT == KIND_IQ2_XXS || FORMAT == KIND_Q2_K ? 64 : 32;  // of a piece
    static const int block = FORMAT == KIND_MXFP4 ? 32 : 256;
    static const int bytes = FORMAT == KIND_IQ2_XXS ? 66 : FORMAT == KIND_Q2_K ? 84 : FORMAT == KIND_Q4_K ? 144 : 17;
    static const bool sums = FORMAT == KIND_Q2_K || FORMAT == KIND_Q4_K;  // formats with minima
};

// `scales`: f16 d, twice d, or a whole header, as the format has them.
template <int FORMAT>
struct Piece { Quad codes; u32 scales[4]; };

template <int FORMAT, int WIDE>
DEVICE void fetch_piece(Piece<FORMAT>& w, const u8* row, int p) {
    w.codes = stream16(row + 16 * p);
    const int blocks = WIDE / Size<FORMAT>::block;
    if (FORMAT == KIND_IQ2_XXS) w.scales[0] = stream2(row + WIDE / 4 + 2 * (p / 4));
    if (FORMAT == KIND_MXFP4) w.scales[0] = row[WIDE / 2 + p];
    if (FORMAT == KIND_Q2_K) {
        w.scales[0] = stream4(row + 64 * blocks + 4 * p);
        w.scales[1] = stream4(row + 80 * blocks + 4 * (p / 4));
    }
    if (FORMAT == KIND_Q4_K) {
        Quad header = stream16(row + 128 * blocks + 16 * (p / 8));
#pragma unroll
        for (int i = 0; i < 4; ++i) w.scales[i] = header.w[i];
    }
}

// The activations of piece p, each plane's words in the order in which the codes come.
template <int FORMAT>
struct __align__(16) Inputs {
    u32 high[Size<FORMAT>::weights / 4], low[Size<FORMAT>::weights / 4];
    int sums[4];   // of 16 codes each, where there are minima
    float scale;
};

// The codebook as pieces read it. Where there is room its entries are 256 bytes apart, at an address in shared memory
// that ends in 16 zeros: then one byte of a word and the lane make an address in one instruction. Macro WIDE_CODEBOOK.
#if WIDE_CODEBOOK
#define CODEBOOK_PITCH 256
struct Codebook {
    u32 mine;  // this lane's part of the first entry
    DEVICE explicit Codebook(const u8* at) : mine((u32)__cvta_generic_to_shared(at) + 4 * lane_id()) {}
    DEVICE u32 nibbles(u32 rows, int o) const {
        u32 v;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(bytes_of(rows, mine, 0x7604 + (o << 4))));
        return v;
    }
};
#else
#define CODEBOOK_PITCH (LANES * 4)
struct Codebook {
    const u8* at;
    DEVICE explicit Codebook(const u8* at) : at(at) {}
    DEVICE u32 nibbles(u32 rows, int o) const { return codebook_entry(at, rows >> 8 * o & 255); }
};
#endif
#define CODEBOOK_BYTES (256 * CODEBOOK_PITCH)

// Where a plane that pieces read has the octet of activations 8 o ...: 16 bytes of each lane side by side.
template <int FORMAT>
DEVICE int piece_offset(int o) {
    const int quads = Size<FORMAT>::weights / 16;
    int p = o / 8, j = o % 8 / 2, half = o % 2;                                   // IQ2_XXS: eight octets in turn
    if (FORMAT == KIND_MXFP4) p = o / 4, j = o % 4 / 2;
    if (FORMAT == KIND_Q2_K) p = o / 32 * 4 + o % 32 / 16 * 2 + o % 4 / 2, j = o % 16 / 4;  // a field of two bits each
    if (FORMAT == KIND_Q4_K) p = o / 8 * 2 + o % 4 / 2, j = o % 8 / 4;
    return (p / LANES * quads + j) * (LANES * 16) + p % LANES * 16 + half * 8;
}

// Sums of a vector's codes for pieces: fields of a piece side by side.
template <int FORMAT>
struct Fields { static const int count = FORMAT == KIND_Q2_K ? 4 : 2; };

// Keeps the lane's octet o of a vector at `high`, `low` and, for formats with minima, `sums`. All lanes.
template <int FORMAT>
DEVICE void store_octet(const Octets& v, int o, u8* high, u8* low, int* sums) {
    int at = piece_offset<FORMAT>(o);
    *(Duo*)(high + at) = v.high;
    *(Duo*)(low + at) = v.low;
    if (!Size<FORMAT>::sums) return;
    int both = v.sum + lane_xor(v.sum, 1);  // of the 16 activations of a field
    int p = FORMAT == KIND_Q2_K ? o / 32 * 4 + o % 32 / 16 * 2 + o % 4 / 2 : o / 8 * 2 + o % 4 / 2;
    if (o % 2 == 0) sums[p * Fields<FORMAT>::count + (FORMAT == KIND_Q2_K ? o % 16 / 4 : o % 8 / 4)] = both;
}

template <int FORMAT>
DEVICE void load_inputs(Inputs<FORMAT>& x, const u8* high, const u8* low, const int* sums, const float* scales, int p) {
    const int words = Size<FORMAT>::weights / 4, quads = words / 4;
    x.scale = scales[p * Size<FORMAT>::weights / 256];
#pragma unroll
    for (int j = 0; j < quads; ++j) {
        int at = (p / LANES * quads + j) * (LANES * 16) + p % LANES * 16;
        *(Quad*)(x.high + 4 * j) = *(const Quad*)(high + at);
        *(Quad*)(x.low + 4 * j) = *(const Quad*)(low + at);
    }
    if (Size<FORMAT>::sums)
#pragma unroll
        for (int f = 0; f < Fields<FORMAT>::count; ++f) x.sums[f] = sums[p * Fields<FORMAT>::count + f];
}

// Sixteen values -12 .. 12, twice those of E2M1, by the four nibbles that `codes` begins with.
DEVICE u32 e2m1_bytes(u32 codes) {
    u32 which = codes & 0x7777, minus = bytes_of(0xff00, 0, codes >> 3 & 0x1111);
    return (bytes_of(0x03020100, 0x0c080604, which) & ~minus) | (bytes_of(0xfdfeff00, 0xf4f8fafc, which) & minus);
}

// q4_scale() of three words in registers.
DEVICE void q4_words(const u32* s, int j, int* scale, int* least) {
    int at = j % 4 * 8;
    u32 low = s[0] >> at, mid = s[1] >> at, high = s[2] >> at;
    *scale = j < 4 ? low & 63 : (high & 15) | (low >> 6 & 3) << 4;
    *least = j < 4 ? mid & 63 : (high >> 4 & 15) | (mid >> 6 & 3) << 4;
}

// The dot product, without x.scale.
template <int FORMAT>
DEVICE float product(const Piece<FORMAT>& w, const Inputs<FORMAT>& x, const Codebook& codebook) {
    float y = 0;
    if (FORMAT == KIND_IQ2_XXS) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            u32 rows = w.codes.w[2 * b], signs = w.codes.w[2 * b + 1], all = iq2_all_signs(signs);
            int h = 0, l = 0;
#pragma unroll
            for (int o = 0; o < 4; ++o) {
                u32 nibbles = codebook.nibbles(rows, o) | iq2_octet_signs(all, o);
                u32 first = bytes_of(IQ2_CODES, IQ2_MINUS, nibbles);
                u32 second = bytes_of(IQ2_CODES, IQ2_MINUS, nibbles >> 16);
                int i = 2 * (4 * b + o);
                h = dot4(second, x.high[i + 1], dot4(first, x.high[i], h));
                l = dot4(second, x.low[i + 1], dot4(first, x.low[i], l));
            }
            y += (float)((h * 256 + l) * (int)(2 * (signs >> 28) + 1));
        }
        return y * (0.125f * half_bits(w.scales[0]));
    }
    if (FORMAT == KIND_MXFP4) {
        int h = 0, l = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32 values = e2m1_bytes(w.codes.w[i / 2] >> i % 2 * 16);
            h = dot4(values, x.high[i], h), l = dot4(values, x.low[i], l);
        }
        return 0.5f * e8m0(w.scales[0] & 255) * (h * 256 + l);
    }
    // Codes stay where they are in their bytes: those of field f are 2^(bits f) too large.
    const int fields = Fields<FORMAT>::count, bits = 8 / fields;
    const u32 mask = FORMAT == KIND_Q2_K ? 0x03030303 : 0x0f0f0f0f;
    int least = 0;
#pragma unroll
    for (int f = 0; f < fields; ++f) {
        int h = 0, l = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 values = w.codes.w[i] & mask << bits * f;
            h = dot4_unsigned(values, x.high[4 * f + i], h), l = dot4_unsigned(values, x.low[4 * f + i], l);
        }
        int scale, minimum;
        if (FORMAT == KIND_Q2_K) scale = w.scales[0] >> 8 * f & 15, minimum = w.scales[0] >> (8 * f + 4) & 15;
        else q4_words(w.scales + 1, lane_id() % 8 / 2 * 2 + f, &scale, &minimum);
        y += (float)(h * 256 + l) * (float)scale * (1.f / (1 << bits * f));
        least += minimum * x.sums[f];
    }
    u32 both = FORMAT == KIND_Q2_K ? w.scales[1] : w.scales[0];
    return half_bits(both) * y - half_bits(both >> 16) * (float)least;
}

#endif
