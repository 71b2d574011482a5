// Cache rows: their packed forms, the two roundings that make them, rotation, and access by four channels a thread.
//
// Attention row of D channels, the last R rotary: D - R E4M3 codes, an E8M0 exponent for each 64 of them, a zero byte
// if those are odd in number, R halves. Indexer row of W channels: E2M1 codes, the even channel in the low nibble, then
// an E8M0 exponent for each 32. A row is a multiple of two bytes, and of four for most shapes: never assume more.
// `load4` and `store4` take rows of floats too: the buffer's type says which form it holds.

template <int D, int R> struct Fp8Row {
    enum { codes = D - R, scales = codes / 64, tail = codes + (scales + 1) / 2 * 2, bytes = tail + 2 * R };
};

template <int W> struct Fp4Row {
    enum { codes = W / 2, scales = W / 32, bytes = codes + scales };
};

// ---- numbers. Exponents come from bits: exact on every device, and no division.

// 2^(e - 127), for the exponents that rows hold: 1 to 254.
inline float e8m0(uint e) {
    return as_type<float>(e << 23);
}

// v / 2^(e - 127), exactly.
inline float4 unscaled(float4 v, uint e) {
    return v * as_type<float>((254u - e) << 23);
}

// e of the smallest power of two s with |x| <= 448 s for all x of a block, `largest` in size: 448 = 1.75 * 2^8.
inline uint fp8_exponent(float largest) {
    return ((as_type<uint>(max(largest, 1e-4f)) + 0x1FFFFFu) >> 23) - 8u;
}

// The same for 6 = 1.5 * 2^2; at least 1.
inline uint fp4_exponent(float largest) {
    return ((as_type<uint>(max(largest, 6.0f * 1.17549435e-38f)) + 0x3FFFFFu) >> 23) - 2u;
}

// |v| <= 448, to the nearest code, ties to even: 3 bits of mantissa down to 2^-6, below that steps of 2^-9.
inline uint e4m3_encode(float v) {
    uint bits = as_type<uint>(v), size = bits & 0x7FFFFFFFu;
    float a = as_type<float>(size);
    uint normal = ((size + 0x7FFFFu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    uint code = a < 0.015625f ? uint(rint(a * 512.0f)) : normal;
    return code | (bits >> 24 & 0x80u);
}

inline float e4m3_decode(uint code) {
    uint size = code & 0x7Fu;
    float a = size < 8u ? float(size) * 0.001953125f : as_type<float>((size + (120u << 3)) << 20);
    return code & 0x80u ? -a : a;
}

// |v| <= 6, to the nearest of 0, 1/2, 1, 3/2, 2, 3, 4, 6; ties to the even code.
inline uint e2m1_encode(float v) {
    float a = fabs(v);
    uint code = uint(a > 0.25f) + uint(a >= 0.75f) + uint(a > 1.25f) + uint(a >= 1.75f) + uint(a > 2.5f)
        + uint(a >= 3.5f) + uint(a > 5.0f);
    return code | (v < 0.0f ? 8u : 0u);
}

// Twice the value: -12 to 12. Sums of products of these are exact in int, and in half up to 2048.
inline int e2m1_twice(uint code) {
    int a = int(0xC8643210u >> (4u * (code & 7u)) & 15u);
    return code & 8u ? -a : a;
}

// ---- vectors, four neighbouring channels a thread

// The sum over a threadgroup of whole SIMD-groups, the same in every thread. `partial` has a float for each SIMD-group
// and serves one sum.
inline float threadgroup_sum(float x, threadgroup float* partial, uint index, uint threads) {
    x = simd_sum(x);
    if (index % 32 == 0) {
        partial[index / 32] = x;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0.0f;
    for (uint i = 0; i < threads / 32; ++i) {
        sum += partial[i];
    }
    return sum;
}

// Pairs (a, b) = v.xy and v.zw become (a cos - b sin, a sin + b cos). To turn back, negate `sin`.
inline float4 rotated(float4 v, float2 cos, float2 sin) {
    return float4(v.x * cos.x - v.y * sin.x, v.x * sin.x + v.y * cos.x,
                  v.z * cos.y - v.w * sin.y, v.z * sin.y + v.w * cos.y);
}

// The largest |channel| among LANES neighbouring lanes (a power of two), the same in all of them.
template <int LANES> inline float largest_of(float4 v) {
    float4 size = fabs(v);
    float most = max(max(size.x, size.y), max(size.z, size.w));
    for (ushort d = 1; d < LANES; d *= 2) {
        most = max(most, simd_shuffle_xor(most, d));
    }
    return most;
}

// Walsh-Hadamard transform in natural order times W^-1/2: W / 4 lanes hold a vector, W <= 128. Whole SIMD-group.
template <int W> inline float4 hadamard(float4 v, uint lane) {
    v = float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
    v = float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
    for (ushort d = 1; d < W / 4; d *= 2) {
        float4 other = float4(simd_shuffle_xor(v.x, d), simd_shuffle_xor(v.y, d), simd_shuffle_xor(v.z, d),
                              simd_shuffle_xor(v.w, d));
        v = lane & d ? other - v : v + other;
    }
    return v * (1.0f / precise::sqrt(float(W)));
}

// ---- access

// Four bytes, the first lowest, of a row that is BYTES long: rows of 194 bytes begin at even addresses only.
template <int BYTES> inline uint word4(const device uint8_t* p) {
    if (BYTES % 4 == 0) {
        return *(const device uint*)p;
    }
    return uint(*(const device ushort*)p) | uint(*(const device ushort*)(p + 2)) << 16;
}

// Channels j ... j + 3 of an attention row, j a multiple of four. No thread needs another's help.
template <int D, int R> inline float4 load4(const device uint8_t* rows, ulong row, uint j) {
    typedef Fp8Row<D, R> Row;
    const device uint8_t* p = rows + row * uint(Row::bytes);
    if (j < uint(Row::codes)) {
        uint codes = word4<Row::bytes>(p + j);
        float4 v = float4(e4m3_decode(codes & 255u), e4m3_decode(codes >> 8 & 255u), e4m3_decode(codes >> 16 & 255u),
                          e4m3_decode(codes >> 24));
        return v * e8m0(p[Row::codes + j / 64]);
    }
    const device half* tail = (const device half*)(p + Row::tail) + (j - Row::codes);
    return float4(float(tail[0]), float(tail[1]), float(tail[2]), float(tail[3]));
}

template <int D, int R> inline float4 load4(const device float* rows, ulong row, uint j) {
    return *(const device float4*)(rows + row * uint(D) + j);
}

// The other way, rounding: thread j / 4 of a row's D / 4 holds channels j ... j + 3. Whole SIMD-groups, for the threads
// of a block agree on its exponent. Finite channels stay finite: the tail is clamped to what a half holds. Codes have
// no NaN, so the tail keeps it: no value but NaN fails to be larger or smaller than 0, or equal.
template <int D, int R> inline void store4(device uint8_t* rows, ulong row, uint j, float4 v) {
    typedef Fp8Row<D, R> Row;
    device uint8_t* p = rows + row * uint(Row::bytes);
    uint e = fp8_exponent(largest_of<16>(v));
    if (j >= uint(Row::codes)) {
        device half* tail = (device half*)(p + Row::tail) + (j - Row::codes);
        v = select(v, clamp(v, float4(-65504.0f), float4(65504.0f)), abs(v) >= float4(0.0f));
        tail[0] = half(v.x);
        tail[1] = half(v.y);
        tail[2] = half(v.z);
        tail[3] = half(v.w);
        return;
    }
    v = unscaled(v, e);
    device ushort* codes = (device ushort*)(p + j);
    codes[0] = ushort(e4m3_encode(v.x) | e4m3_encode(v.y) << 8);
    codes[1] = ushort(e4m3_encode(v.z) | e4m3_encode(v.w) << 8);
    if (j % 64 == 0) {
        p[Row::codes + j / 64] = uint8_t(e);
    }
    if (j == 0 && Row::scales % 2) {
        p[Row::tail - 1] = 0;
    }
}

template <int D, int R> inline void store4(device float* rows, ulong row, uint j, float4 v) {
    *(device float4*)(rows + row * uint(D) + j) = v;
}

// An indexer row, transformed already: lane j / 4 of W / 4 holds channels j ... j + 3. Whole SIMD-groups.
template <int W> inline void store4_fp4(device uint8_t* rows, ulong row, uint j, float4 v) {
    typedef Fp4Row<W> Row;
    device uint8_t* p = rows + row * uint(Row::bytes);
    uint e = fp4_exponent(largest_of<8>(v));
    v = unscaled(v, e);
    *(device ushort*)(p + j / 2) = ushort(e2m1_encode(v.x) | e2m1_encode(v.y) << 4 | e2m1_encode(v.z) << 8
                                          | e2m1_encode(v.w) << 12);
    if (j % 32 == 0) {
        p[Row::codes + j / 32] = uint8_t(e);
    }
}

template <int W> inline void store4_fp4(device float* rows, ulong row, uint j, float4 v) {
    *(device float4*)(rows + row * uint(W) + j) = v;
}

// Channels j ... j + 3 of an indexer row, twice what their codes say; the exponent of channel j is byte
// Fp4Row<W>::codes + j / 32 of the row.
template <int W> inline int4 load4_fp4(const device uint8_t* rows, ulong row, uint j) {
    uint codes = *(const device ushort*)(rows + row * uint(Fp4Row<W>::bytes) + j / 2);
    return int4(e2m1_twice(codes), e2m1_twice(codes >> 4), e2m1_twice(codes >> 8), e2m1_twice(codes >> 12));
}
