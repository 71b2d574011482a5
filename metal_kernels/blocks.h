// Blocks of quantised weights as a GGUF holds them: their sizes, and 8 weights of a row at a time as a scale, codes
// and a minimum.
//
// A row is consecutive blocks. Eight consecutive weights are an octet; octets of a row are numbered from 0 whatever
// the block covers. A portion is what 8 bytes of codes hold (of floats: one octet). In most formats a byte's fields
// are far apart in the row, so a portion is `octets` octets, each `stride` weights after the one before. A product
// reads portions, each byte once, and takes their octets from registers; a tile wants neighbours: an octet at a time.
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

inline float2 halves_at(const device uint* p) {
    return float2(*(const device half2*)p);
}

// Two bytes each: blocks of 66 bytes put words on even addresses only.
inline uint word_at(const device uint8_t* p) {
    return uint(*(const device ushort*)p) | uint(*(const device ushort*)(p + 2)) << 16;
}

// A portion as it is in registers; of most types one octet, decoded.
template <int KIND> struct Portion { float4 low, high; float scale; };
template <> struct Portion<KIND_Q2_K> { uint low, high; uint scales[2]; float2 d; };  // scales: from bit 0 octet 0's
template <> struct Portion<KIND_Q4_K> { uint low, high; float4 scales; };             // scale, minimum of each octet
template <> struct Portion<KIND_IQ2_XXS> { uint indices, signs; float scale; };
template <> struct Portion<KIND_MXFP4> { uint low, high; float scale; };

template <int KIND> inline Portion<KIND> read_portion(const device uint8_t* row, uint index);

template <> inline Portion<KIND_F32> read_portion<KIND_F32>(const device uint8_t* row, uint index) {
    const device float4* p = (const device float4*)row + index * 2;
    return Portion<KIND_F32>{p[0], p[1], 1};
}

template <> inline Portion<KIND_F16> read_portion<KIND_F16>(const device uint8_t* row, uint index) {
    const device half4* p = (const device half4*)row + index * 2;
    return Portion<KIND_F16>{float4(p[0]), float4(p[1]), 1};
}

template <> inline Portion<KIND_BF16> read_portion<KIND_BF16>(const device uint8_t* row, uint index) {
    const device ushort4* p = (const device ushort4*)row + index * 2;
    return Portion<KIND_BF16>{as_type<float4>(uint4(p[0]) << 16), as_type<float4>(uint4(p[1]) << 16), 1};
}

template <> inline Portion<KIND_Q8_0> read_portion<KIND_Q8_0>(const device uint8_t* row, uint index) {
    const device uint8_t* block = row + index / 4 * 34;
    const device char2* q = (const device char2*)(block + 2) + index % 4 * 4;
    return Portion<KIND_Q8_0>{float4(float2(q[0]), float2(q[1])), float4(float2(q[2]), float2(q[3])), half_at(block)};
}

// Block: 16 scales and minima of 4 bits, 64 bytes of 2-bit codes, d, dmin. Field g of 32 neighbouring bytes is 32
// neighbouring weights, with a scale for each half.
template <> inline Portion<KIND_Q2_K> read_portion<KIND_Q2_K>(const device uint8_t* row, uint index) {
    const device uint* block = (const device uint*)(row + index / 8 * 84);
    const device uint* codes = block + 4 + index % 8 * 2;
    const device uint* scales = block + index % 8 / 4 * 2;
    uint half_shift = index % 4 / 2 * 8;
    return Portion<KIND_Q2_K>{codes[0], codes[1], {scales[0] >> half_shift, scales[1] >> half_shift},
                              halves_at(block + 20)};
}

// Scale and minimum of weights 32 j ... of a Q4_K block, six bits each in three words: of j < 4 a byte of the first
// and second; of j >= 4 a nibble each of the third, and on top of it the two bits that such a byte leaves.
inline float2 q4_k_scale(const device uint* s, uint j) {
    uint shift = j % 4 * 8;
    uint low = s[0] >> shift, mid = s[1] >> shift, high = s[2] >> shift;
    uint2 first = uint2(low & 63, mid & 63);
    uint2 second = uint2((high & 15) | (low >> 6 & 3) << 4, (high >> 4 & 15) | (mid >> 6 & 3) << 4);
    return float2(j < 4 ? first : second);
}

// Block: d, dmin, 12 bytes of scales, 128 bytes of 4-bit codes. Nibble g of 32 neighbouring bytes is 32 neighbouring
// weights.
template <> inline Portion<KIND_Q4_K> read_portion<KIND_Q4_K>(const device uint8_t* row, uint index) {
    const device uint* block = (const device uint*)(row + index / 16 * 144);
    const device uint* codes = block + 4 + index % 16 * 2;
    uint j = index % 16 / 4 * 2;
    float2 d = halves_at(block);
    float2 first = d * q4_k_scale(block + 1, j), second = d * q4_k_scale(block + 1, j + 1);
    return Portion<KIND_Q4_K>{codes[0], codes[1], float4(first, second)};
}

// Block: d, then for each 32 weights four codebook indices, four 7-bit sign codes and a 4-bit scale in two words.
template <> inline Portion<KIND_IQ2_XXS> read_portion<KIND_IQ2_XXS>(const device uint8_t* row, uint index) {
    const device uint8_t* block = row + index / 8 * 66;
    const device uint8_t* words = block + 2 + index % 8 * 8;
    uint signs = word_at(words + 4);
    return Portion<KIND_IQ2_XXS>{word_at(words), signs, half_at(block) * 0.25f * (0.5f + float(signs >> 28))};
}

// 2^(e - 128): its bits, subnormal below 2. The codes are doubled in turn, for 2^128 is past float.
inline float e8m0_half(uint e) {
    return as_type<float>(e > 1 ? (e - 1) << 23 : e == 1 ? 0x00400000u : 0x00200000u);
}

inline uint bytes_at(const device uint8_t* p) {
    return uint(p[0]) | uint(p[1]) << 8 | uint(p[2]) << 16 | uint(p[3]) << 24;
}

// Block: exponent, 16 bytes of 4-bit codes; the low nibbles are the first 16 weights.
template <> inline Portion<KIND_MXFP4> read_portion<KIND_MXFP4>(const device uint8_t* row, uint index) {
    const device uint8_t* block = row + index / 2 * 17;
    const device uint8_t* codes = block + 1 + index % 2 * 8;
    return Portion<KIND_MXFP4>{bytes_at(codes), bytes_at(codes + 4), e8m0_half(block[0])};
}

// Weight i of an octet is scale * (low, high)[i] - minimum.
struct Octet {
    float4 low, high;
    float scale, minimum;
};

template <typename P> inline Octet octet(P portion, uint g, const threadgroup ulong* codebook) {
    return Octet{portion.low, portion.high, portion.scale, 0};
}

// What a shift and a mask leave of each byte.
inline float4 byte_fields(uint bytes, uint shift, uint mask) {
    return float4(uint4(bytes, bytes >> 8, bytes >> 16, bytes >> 24) >> shift & mask);
}

inline Octet octet(Portion<KIND_Q2_K> p, uint g, const threadgroup ulong* codebook) {
    uint scale = (g < 2 ? p.scales[0] : p.scales[1]) >> (g % 2 * 16);
    return Octet{byte_fields(p.low, 2 * g, 3), byte_fields(p.high, 2 * g, 3), p.d.x * float(scale & 15),
                 p.d.y * float(scale >> 4 & 15)};
}

inline Octet octet(Portion<KIND_Q4_K> p, uint g, const threadgroup ulong* codebook) {
    float2 scale = g == 0 ? p.scales.xy : p.scales.zw;
    return Octet{byte_fields(p.low, 4 * g, 15), byte_fields(p.high, 4 * g, 15), scale.x, scale.y};
}

// Bit i of `sign` set: the negative.
inline float4 signed_bytes(uint bytes, uint sign) {
    float4 size = byte_fields(bytes, 0, 255);
    return select(size, -size, (uint4(sign) >> uint4(0, 1, 2, 3) & 1) != uint4(0));
}

// Bit 7 of a sign byte is the parity of the other seven.
inline Octet octet(Portion<KIND_IQ2_XXS> p, uint g, const threadgroup ulong* codebook) {
    ulong entry = codebook[p.indices >> (8 * g) & 255];
    uint code = p.signs >> (7 * g) & 127;
    uint sign = code | (popcount(code) & 1) << 7;
    return Octet{signed_bytes(uint(entry), sign), signed_bytes(uint(entry >> 32), sign >> 4), p.scale, 0};
}

// E2M1 doubled: 0, 1, 2, 3, 4, 6, 8, 12.
inline float e2m1_doubled(uint code) {
    uint size = code & 7;
    float value = size < 4 ? float(size) : float((size & 1 ? 6 : 4) << (size >> 1 & 1));
    return code & 8 ? -value : value;
}

inline float4 e2m1_fields(uint bytes, uint shift) {
    uint codes = bytes >> shift;
    return float4(e2m1_doubled(codes & 15), e2m1_doubled(codes >> 8 & 15), e2m1_doubled(codes >> 16 & 15),
                  e2m1_doubled(codes >> 24 & 15));
}

inline Octet octet(Portion<KIND_MXFP4> p, uint g, const threadgroup ulong* codebook) {
    return Octet{e2m1_fields(p.low, 4 * g), e2m1_fields(p.high, 4 * g), p.scale, 0};
}

// w = weights 8 index ... 8 index + 7 of the row.
template <int KIND> inline void decode8(const device uint8_t* row, uint index, const threadgroup ulong* codebook,
                                        thread float4* w) {
    const uint side = uint(Format<KIND>::stride) / 8, octets = Format<KIND>::octets;
    uint portion = index / (side * octets) * side + index % side;
    Octet q = octet(read_portion<KIND>(row, portion), index / side % octets, codebook);
    w[0] = q.scale * q.low - q.minimum;
    w[1] = q.scale * q.high - q.minimum;
}
