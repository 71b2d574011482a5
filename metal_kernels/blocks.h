// Blocks of quantised weights as a GGUF holds them: their sizes, and 8 weights of a row at a time as a scale, codes
// and a minimum.
//
// A row is consecutive blocks. Eight consecutive weights are an octet; octets of a row are numbered from 0 whatever
// the block covers. A portion is what 8 bytes of codes hold (of floats: one octet). In most formats a byte's fields
// are far apart in the row, so a portion is `octets` octets, each `stride` weights after the one before. Who wants
// each byte read once takes a portion after the other; who wants neighbouring weights, octets.
//
// Matrices begin at multiples of 32 bytes, rows where the one before ends: a field is read by two bytes at most where
// a block is not a multiple of four, and byte by byte in MXFP4.

enum Kind { KIND_F32 = 0, KIND_F16 = 1, KIND_Q8_0 = 8, KIND_Q2_K = 10, KIND_Q4_K = 12, KIND_IQ2_XXS = 16,
            KIND_BF16 = 30, KIND_MXFP4 = 39 };  // numbered as in the file

// For loops over small arrays, which are registers only where no index is left to the run.
#define UNROLL _Pragma("clang loop unroll(full)")

template <int KIND> struct Format;  // minimum: whether weights have an offset beside their scale
template <> struct Format<KIND_F32> { enum { weights = 32, bytes = 128, octets = 1, stride = 8, minimum = 0 }; };
template <> struct Format<KIND_F16> { enum { weights = 32, bytes = 64, octets = 1, stride = 8, minimum = 0 }; };
template <> struct Format<KIND_BF16> { enum { weights = 32, bytes = 64, octets = 1, stride = 8, minimum = 0 }; };
template <> struct Format<KIND_Q8_0> { enum { weights = 32, bytes = 34, octets = 1, stride = 8, minimum = 0 }; };
template <> struct Format<KIND_MXFP4> { enum { weights = 32, bytes = 17, octets = 2, stride = 16, minimum = 0 }; };
template <> struct Format<KIND_Q2_K> { enum { weights = 256, bytes = 84, octets = 4, stride = 32, minimum = 1 }; };
template <> struct Format<KIND_Q4_K> { enum { weights = 256, bytes = 144, octets = 2, stride = 32, minimum = 1 }; };
template <> struct Format<KIND_IQ2_XXS> { enum { weights = 256, bytes = 66, octets = 4, stride = 8, minimum = 0 }; };

// Bytes of a row of K weights.
template <int KIND> inline ulong row_bytes(uint K) {
    return ulong(K / uint(Format<KIND>::weights)) * uint(Format<KIND>::bytes);
}

// Portions of a row of K weights.
template <int KIND> inline uint row_portions(uint K) {
    return K / (8 * uint(Format<KIND>::octets));
}

// Where octet g of a portion begins in the row.
template <int KIND> inline uint octet_start(uint portion, uint g) {
    const uint stride = Format<KIND>::stride, side = stride / 8;
    return portion / side * (stride * uint(Format<KIND>::octets)) + g * stride + portion % side * 8;
}

// IQ2_XXS: 8 magnitudes an entry, two bits each from the lowest: 0 -> 8, 1 -> 25, 2 -> 43.
constant ushort iq2_codes[256] = {
    0x0000, 0x0002, 0x0005, 0x0008, 0x000a, 0x0011, 0x0014, 0x0020, 0x0022, 0x0028, 0x002a, 0x0041, 0x0044, 0x0050,
    0x0058, 0x0061, 0x0064, 0x0080, 0x0082, 0x008a, 0x00a2, 0x0101, 0x0104, 0x0110, 0x0115, 0x0140, 0x0184, 0x0198,
    0x0200, 0x0202, 0x0222, 0x0282, 0x0401, 0x0404, 0x0410, 0x0421, 0x0424, 0x0440, 0x0442, 0x0448, 0x0460, 0x0481,
    0x0484, 0x0490, 0x04a4, 0x0500, 0x0502, 0x0508, 0x0520, 0x0546, 0x0569, 0x0580, 0x0591, 0x0609, 0x0610, 0x0640,
    0x0684, 0x06a4, 0x0800, 0x0805, 0x0808, 0x0814, 0x0828, 0x0841, 0x0844, 0x0850, 0x0852, 0x0888, 0x0904, 0x0940,
    0x0a02, 0x0a14, 0x1001, 0x1004, 0x1010, 0x1021, 0x1040, 0x1060, 0x1084, 0x1090, 0x1095, 0x1100, 0x1108, 0x1120,
    0x1150, 0x115a, 0x1180, 0x1224, 0x1245, 0x1400, 0x1408, 0x1420, 0x1425, 0x1449, 0x1480, 0x1518, 0x1562, 0x1600,
    0x1616, 0x1801, 0x1804, 0x1810, 0x1840, 0x1881, 0x1900, 0x1905, 0x19a0, 0x1a51, 0x2000, 0x2002, 0x200a, 0x2044,
    0x2061, 0x2080, 0x2082, 0x2129, 0x2148, 0x2200, 0x2202, 0x2401, 0x2404, 0x2410, 0x2440, 0x2456, 0x2500, 0x2541,
    0x2564, 0x2690, 0x2808, 0x2820, 0x2894, 0x2a44, 0x4001, 0x4004, 0x4010, 0x4018, 0x4021, 0x4024, 0x4040, 0x4048,
    0x4056, 0x4060, 0x4081, 0x4084, 0x4090, 0x4100, 0x4120, 0x4161, 0x4180, 0x4185, 0x4201, 0x4210, 0x4248, 0x4256,
    0x4268, 0x4400, 0x4408, 0x4420, 0x4480, 0x4499, 0x4512, 0x4524, 0x4600, 0x4801, 0x4804, 0x4810, 0x4840, 0x4845,
    0x4900, 0x4958, 0x4961, 0x4982, 0x4a45, 0x4a90, 0x5000, 0x5008, 0x5011, 0x5019, 0x5020, 0x5080, 0x5088, 0x5104,
    0x5142, 0x51a4, 0x5291, 0x5490, 0x5492, 0x550a, 0x5601, 0x5654, 0x5800, 0x5811, 0x5819, 0x5864, 0x5940, 0x5a08,
    0x6004, 0x6010, 0x6040, 0x6068, 0x6100, 0x6155, 0x6218, 0x6260, 0x6400, 0x6405, 0x6510, 0x6512, 0x6584, 0x6842,
    0x8000, 0x8002, 0x800a, 0x8041, 0x8082, 0x8104, 0x8118, 0x8140, 0x8211, 0x8401, 0x8404, 0x8410, 0x8415, 0x8440,
    0x8460, 0x8500, 0x8546, 0x8594, 0x8609, 0x8640, 0x8660, 0x8802, 0x8904, 0x8a11, 0x9004, 0x9010, 0x9024, 0x9040,
    0x90a1, 0x9116, 0x9180, 0x9245, 0x9400, 0x9422, 0x9444, 0x9551, 0x9881, 0x9920, 0xa002, 0xa050, 0xa085, 0xa109,
    0xa200, 0xa418, 0xa850, 0xa904};

// A byte for each magnitude, the first lowest: what a kernel keeps in threadgroup memory (256 entries, 2 KiB).
inline ulong iq2_entry(uint index) {
    uint codes = iq2_codes[index];
    ulong entry = 0;
    for (uint j = 0; j < 8; ++j) {
        uint code = codes >> (2 * j) & 3;
        entry |= ulong(code == 0 ? 8 : code == 1 ? 25 : 43) << (8 * j);
    }
    return entry;
}

// Filled by all threads of a threadgroup together; a barrier must follow. Only IQ2_XXS needs it.
template <int KIND> inline void load_codebook(threadgroup ulong* codebook, uint index, uint threads) {
    if (KIND == KIND_IQ2_XXS) {
        for (uint i = index; i < 256; i += threads) {
            codebook[i] = iq2_entry(i);
        }
    }
}

inline float half_at(const device uint8_t* p) {
    return float(*(const device half*)p);
}

// Two bytes each: blocks of 66 bytes put words on even addresses only.
inline uint word_at(const device uint8_t* p) {
    return uint(*(const device ushort*)p) | uint(*(const device ushort*)(p + 2)) << 16;
}

// Weight i of an octet is scale * q[i] - minimum.
struct Affine {
    float scale, minimum;
};

// q[0..7] = the codes of octet g of a portion.
template <int KIND> inline Affine octet(const device uint8_t* row, uint portion, uint g,
                                        const threadgroup ulong* codebook, thread float* q);

template <> inline Affine octet<KIND_F32>(const device uint8_t* row, uint portion, uint g,
                                          const threadgroup ulong* codebook, thread float* q) {
    const device float4* p = (const device float4*)row + portion * 2;
    float4 low = p[0], high = p[1];
    for (uint i = 0; i < 4; ++i) {
        q[i] = low[i];
        q[4 + i] = high[i];
    }
    return Affine{1, 0};
}

template <> inline Affine octet<KIND_F16>(const device uint8_t* row, uint portion, uint g,
                                          const threadgroup ulong* codebook, thread float* q) {
    const device half4* p = (const device half4*)row + portion * 2;
    float4 low = float4(p[0]), high = float4(p[1]);
    for (uint i = 0; i < 4; ++i) {
        q[i] = low[i];
        q[4 + i] = high[i];
    }
    return Affine{1, 0};
}

template <> inline Affine octet<KIND_BF16>(const device uint8_t* row, uint portion, uint g,
                                           const threadgroup ulong* codebook, thread float* q) {
    const device ushort* p = (const device ushort*)row + portion * 8;
    for (uint i = 0; i < 8; ++i) {
        q[i] = as_type<float>(uint(p[i]) << 16);
    }
    return Affine{1, 0};
}

template <> inline Affine octet<KIND_Q8_0>(const device uint8_t* row, uint portion, uint g,
                                           const threadgroup ulong* codebook, thread float* q) {
    const device uint8_t* block = row + portion / 4 * 34;
    const device char2* codes = (const device char2*)(block + 2) + portion % 4 * 4;
    for (uint i = 0; i < 4; ++i) {
        char2 pair = codes[i];
        q[2 * i] = float(pair.x);
        q[2 * i + 1] = float(pair.y);
    }
    return Affine{half_at(block), 0};
}

// q[i] = the bits of byte i of 8 that are left after a shift and a mask.
inline void byte_fields(const device uint* bytes, uint shift, uint mask, thread float* q) {
    uint low = bytes[0] >> shift, high = bytes[1] >> shift;
    for (uint i = 0; i < 4; ++i) {
        q[i] = float(low >> (8 * i) & mask);
        q[4 + i] = float(high >> (8 * i) & mask);
    }
}

// Block: 16 scales and minima of 4 bits, 64 bytes of 2-bit codes, d, dmin. Field g of 32 neighbouring bytes is 32
// neighbouring weights, with a scale for each half.
template <> inline Affine octet<KIND_Q2_K>(const device uint8_t* row, uint portion, uint g,
                                           const threadgroup ulong* codebook, thread float* q) {
    const device uint8_t* block = row + portion / 8 * 84;
    uint part = portion % 8;
    byte_fields((const device uint*)(block + 16) + part * 2, 2 * g, 3, q);
    uint scale = block[part / 4 * 8 + g * 2 + part % 4 / 2];
    return Affine{half_at(block + 80) * float(scale & 15), half_at(block + 82) * float(scale >> 4)};
}

// Scale and minimum of weights 32 j ... of a Q4_K block, six bits each in twelve bytes.
inline uint2 q4_k_scale(const device uint8_t* s, uint j) {
    if (j < 4) {
        return uint2(s[j] & 63, s[j + 4] & 63);
    }
    return uint2((s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4);
}

// Block: d, dmin, 12 bytes of scales, 128 bytes of 4-bit codes. Nibble g of 32 neighbouring bytes is 32 neighbouring
// weights.
template <> inline Affine octet<KIND_Q4_K>(const device uint8_t* row, uint portion, uint g,
                                           const threadgroup ulong* codebook, thread float* q) {
    const device uint8_t* block = row + portion / 16 * 144;
    uint part = portion % 16;
    byte_fields((const device uint*)(block + 16) + part * 2, 4 * g, 15, q);
    uint2 scale = q4_k_scale(block + 4, part / 4 * 2 + g);
    return Affine{half_at(block) * float(scale.x), half_at(block + 2) * float(scale.y)};
}

// Block: d, then for each 32 weights four codebook indices, four 7-bit sign codes and a 4-bit scale in two words. Bit
// 7 of a sign byte is the parity of the other seven.
template <> inline Affine octet<KIND_IQ2_XXS>(const device uint8_t* row, uint portion, uint g,
                                              const threadgroup ulong* codebook, thread float* q) {
    const device uint8_t* block = row + portion / 8 * 66;
    const device uint8_t* words = block + 2 + portion % 8 * 8;
    uint indices = word_at(words), signs = word_at(words + 4);
    ulong entry = codebook[indices >> (8 * g) & 255];
    uint code = signs >> (7 * g) & 127;
    uint sign = code | (popcount(code) & 1) << 7;
    for (uint i = 0; i < 8; ++i) {
        float magnitude = float(uint(entry >> (8 * i)) & 255);
        q[i] = sign >> i & 1 ? -magnitude : magnitude;
    }
    return Affine{half_at(block) * 0.25f * (0.5f + float(signs >> 28)), 0};
}

// E2M1 doubled: 0, 1, 2, 3, 4, 6, 8, 12.
inline float e2m1_doubled(uint code) {
    uint size = code & 7;
    float value = size < 4 ? float(size) : float((size & 1 ? 6 : 4) << (size >> 1 & 1));
    return code & 8 ? -value : value;
}

// 2^(e - 128): its bits, subnormal below 2. The codes are doubled in turn, for 2^128 is past float.
inline float e8m0_half(uint e) {
    return as_type<float>(e > 1 ? (e - 1) << 23 : e == 1 ? 0x00400000u : 0x00200000u);
}

// Block: exponent, 16 bytes of 4-bit codes; the low nibbles are the first 16 weights.
template <> inline Affine octet<KIND_MXFP4>(const device uint8_t* row, uint portion, uint g,
                                            const threadgroup ulong* codebook, thread float* q) {
    const device uint8_t* block = row + portion / 2 * 17;
    for (uint i = 0; i < 8; ++i) {
        q[i] = e2m1_doubled(block[1 + portion % 2 * 8 + i] >> (4 * g) & 15);
    }
    return Affine{e8m0_half(block[0]), 0};
}

// w[0..7] = weights 8 index ... 8 index + 7 of the row.
template <int KIND> inline void decode8(const device uint8_t* row, uint index, const threadgroup ulong* codebook,
                                        thread float* w) {
    const uint side = uint(Format<KIND>::stride) / 8, octets = Format<KIND>::octets;
    uint portion = index / (side * octets) * side + index % side;
    Affine a = octet<KIND>(row, portion, index / side % octets, codebook, w);
    for (uint i = 0; i < 8; ++i) {
        w[i] = Format<KIND>::minimum ? a.scale * w[i] - a.minimum : a.scale * w[i];
    }
}

// w[0..31] = weights 32 run ... 32 run + 31 of the row.
template <int KIND> inline void decode32(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                         thread float* w) {
    for (uint i = 0; i < 4; ++i) {
        decode8<KIND>(row, run * 4 + i, codebook, w + 8 * i);
    }
}
