// Rows of the cache. Packed, an attention row of D channels with a rotary tail of R is D - R codes of E4M3, an exponent
// for each 64 of them, a byte to make those even, R halves; an indexer row is E2M1 codes, the even channel in the low
// nibble, and an exponent for each 32 channels. An exponent e is 2^(e - 127).
#ifndef DS4_ROWS
#define DS4_ROWS
#include "lanes.cuh"

template <int Dim, int Rotary>
struct Fp8Row {
    static const int PLAIN = Dim - Rotary, EXPONENTS = PLAIN / 64, TAIL = PLAIN + EXPONENTS + EXPONENTS % 2;
    static const int BYTES = TAIL + 2 * Rotary;
};

// The exponent of the least power of two that is at least max(most, least) / top.
DEVICE u32 exponent_of(float most, float least, float top) {
    return (__float_as_uint(__fdiv_rn(fmaxf(most, least), top)) + 0x7fffffu) >> 23;
}

DEVICE float power(u32 exponent) { return __uint_as_float(exponent << 23); }

// To the nearest E4M3, ties to even; |x| <= 448.
DEVICE u8 to_e4m3(float x) {
    u32 sign = (__float_as_uint(x) >> 24) & 0x80u;
    float size = fabsf(x);
    if (size < 0.015625f) return sign | (u32)rintf(size * 512);  // steps of 2^-9; 8 of them are the code of 2^-6
    u32 bits = __float_as_uint(size);
    bits += 0x7ffffu + ((bits >> 20) & 1);
    return sign | ((bits >> 20) - (120u << 3));
}

// Exponent and mantissa of E4M3 lie in a half as they are, 2^8 too small.
DEVICE float from_e4m3(u32 code) {
    u16 bits = (u16)((code & 0x80u) << 8 | (code & 0x7fu) << 7);
    return __half2float(__ushort_as_half(bits)) * 256;
}

DEVICE u32 to_e2m1(float x) {
    float size = fabsf(x);  // steps of 1/2 below 2, of 1 below 4, of 2 above; rintf takes ties to the even code
    float code = size < 2 ? rintf(size * 2) : size < 4 ? 2 + rintf(size) : 4 + rintf(size / 2);
    return (u32)code | (x < 0 ? 8u : 0u);
}

// Thread c holds channel c of a rotated row, of a block of at least D threads, all of which call this; `shared` a float
// for each group of lanes. Writes what the cache holds: packed, or the channels as they are.
template <int Dim, int Rotary, bool Packed>
DEVICE void store_row(u8* out, float v, int c, float* shared) {
    if (!Packed) {
        if (c < Dim) ((float*)out)[c] = v;
        return;
    }
    typedef Fp8Row<Dim, Rotary> Row;
    float most = lane_max(c < Dim ? fabsf(v) : 0.f);
    __syncthreads();
    if (lane_id() == 0) shared[group_id()] = most;
    __syncthreads();
    most = fmaxf(shared[group_id() & ~1], shared[group_id() | 1]);
    if (c >= Dim) return;
    if (c >= Row::PLAIN) {
        u16 bits = __half_as_ushort(__float2half_rn(fminf(fmaxf(v, -65504.f), 65504.f)));
        ((u16*)(out + Row::TAIL))[c - Row::PLAIN] = bits;
        return;
    }
    u32 exponent = exponent_of(most, 1e-4f, 448.f);
    out[c] = to_e4m3(fminf(fmaxf(__fdiv_rn(v, power(exponent)), -448.f), 448.f));
    if (c % 64 == 0) out[Row::PLAIN + c / 64] = exponent;
    if (c == 0 && Row::EXPONENTS % 2) out[Row::PLAIN + Row::EXPONENTS] = 0;
}

// The Walsh-Hadamard transform of W values times W^-1/2, thread c holding one, W >= 32; `shared` W floats.
template <int Width>
DEVICE float hadamard(float v, int c, float* shared) {
    for (int bit = 1; bit < LANES && bit < Width; bit *= 2) {
        float other = lane_xor(v, bit);
        v = c & bit ? other - v : v + other;
    }
    for (int bit = LANES; bit < Width; bit *= 2) {
        __syncthreads();
        if (c < Width) shared[c] = v;
        __syncthreads();
        float other = c < Width ? shared[c ^ bit] : 0.f;
        v = c & bit ? other - v : v + other;
    }
    return v * rsqrtf((float)Width);
}

// As store_row, of an indexer row of W channels; `shared` holds W floats.
template <int Width, bool Packed>
DEVICE void store_index_row(u8* out, float v, int c, float* shared) {
    if (!Packed) {
        if (c < Width) ((float*)out)[c] = v;
        return;
    }
    v = hadamard<Width>(v, c, shared);
    u32 exponent = exponent_of(lane_max(fabsf(v)), 6 * 1.17549435e-38f, 6.f);
    u32 code = to_e2m1(fminf(fmaxf(__fdiv_rn(v, power(exponent)), -6.f), 6.f));
    u32 next = lane_xor(code, 1);
    if (c >= Width) return;
    if (c % 2 == 0) out[c / 2] = code | next << 4;
    if (c % 32 == 0) out[Width / 2 + c / 32] = exponent;
}

// Channels 8 chunk ... 8 chunk + 7 of a row, as floats.
template <int Dim, int Rotary, bool Packed>
DEVICE void load_chunk(const u8* row, int chunk, float (&v)[8]) {
    typedef Fp8Row<Dim, Rotary> Row;
    if (!Packed) {
        for (int i = 0; i < 8; ++i) v[i] = ((const float*)row)[8 * chunk + i];
    } else if (8 * chunk < Row::PLAIN) {
        float scale = power(row[Row::PLAIN + chunk / 8]);
        for (int i = 0; i < 8; ++i) v[i] = from_e4m3(row[8 * chunk + i]) * scale;
    } else {
        const u16* tail = (const u16*)(row + Row::TAIL) + 8 * chunk - Row::PLAIN;
        for (int i = 0; i < 8; ++i) v[i] = __half2float(__ushort_as_half(tail[i]));
    }
}

// 8 bytes, aligned to ALIGN.
template <int ALIGN>
DEVICE uint2 load_bytes(const u8* p) {
    if (ALIGN % 8 == 0) return *(const uint2*)p;
    if (ALIGN % 4 == 0) return make_uint2(((const u32*)p)[0], ((const u32*)p)[1]);
    const u16* q = (const u16*)p;
    return make_uint2(q[0] | (u32)q[1] << 16, q[2] | (u32)q[3] << 16);
}

// The same on its way to halves: as it lies in memory, so that many loads can be under way, and then in its place.
// Codes are moved in pairs and scaled, both without loss.
struct RawChunk {
    uint4 bits;
    u32 exponent;
};

template <int Dim, int Rotary, bool Packed>
DEVICE RawChunk load_raw(const u8* row, int chunk) {
    typedef Fp8Row<Dim, Rotary> Row;
    RawChunk raw = {make_uint4(0, 0, 0, 0), 0};
    if (!Packed) {
        const float4* v = (const float4*)((const float*)row + 8 * chunk);
        union { uint4 all; __half2 pairs[4]; } out;
        out.pairs[0] = __floats2half2_rn(v[0].x, v[0].y), out.pairs[1] = __floats2half2_rn(v[0].z, v[0].w);
        out.pairs[2] = __floats2half2_rn(v[1].x, v[1].y), out.pairs[3] = __floats2half2_rn(v[1].z, v[1].w);
        raw.bits = out.all;
    } else if (8 * chunk < Row::PLAIN) {
        uint2 codes = load_bytes<Row::BYTES>(row + 8 * chunk);
        raw.bits.x = codes.x, raw.bits.y = codes.y, raw.exponent = row[Row::PLAIN + chunk / 8];
    } else {
        const u8* tail = row + Row::TAIL + 2 * (8 * chunk - Row::PLAIN);
        uint2 a = load_bytes<Row::BYTES>(tail), b = load_bytes<Row::BYTES>(tail + 8);
        raw.bits = make_uint4(a.x, a.y, b.x, b.y);
    }
    return raw;
}

template <int Dim, int Rotary, bool Packed>
DEVICE uint4 chunk_halves(const RawChunk& raw, int chunk) {
    if (!Packed || 8 * chunk >= Fp8Row<Dim, Rotary>::PLAIN) return raw.bits;
    union { uint4 all; u32 words[4]; __half2 pairs[4]; } out;
    __half2 scale = __float2half2_rn(power(raw.exponent) * 256);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 pair = (i < 2 ? raw.bits.x : raw.bits.y) >> 16 * (i & 1);
        out.words[i] = (pair & 0x80u) << 8 | (pair & 0x7fu) << 7 | (pair & 0x8000u) << 16 | (pair & 0x7f00u) << 15;
        out.pairs[i] = __hmul2(out.pairs[i], scale);
    }
    return out.all;
}

#endif
