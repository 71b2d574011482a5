// Blocks of quantised weights as a GGUF holds them: their sizes, and 32 weights of a row decoded to float.
//
// A row is consecutive blocks; its runs of 32 weights are numbered from 0 whatever the block covers. Rows begin at any
// even address (MXFP4: at any), so fields are read by two bytes at most where a block is not a multiple of four.

enum Kind { KIND_F32 = 0, KIND_F16 = 1, KIND_Q8_0 = 8, KIND_Q2_K = 10, KIND_Q4_K = 12, KIND_IQ2_XXS = 16,
            KIND_BF16 = 30, KIND_MXFP4 = 39 };  // numbered as in the file

template <int KIND> struct Format;
template <> struct Format<KIND_F32> { enum { weights = 32, bytes = 128 }; };
template <> struct Format<KIND_F16> { enum { weights = 32, bytes = 64 }; };
template <> struct Format<KIND_BF16> { enum { weights = 32, bytes = 64 }; };
template <> struct Format<KIND_Q8_0> { enum { weights = 32, bytes = 34 }; };
template <> struct Format<KIND_MXFP4> { enum { weights = 32, bytes = 17 }; };
template <> struct Format<KIND_Q2_K> { enum { weights = 256, bytes = 84 }; };
template <> struct Format<KIND_Q4_K> { enum { weights = 256, bytes = 144 }; };
template <> struct Format<KIND_IQ2_XXS> { enum { weights = 256, bytes = 66 }; };

// Bytes of a row of K weights.
template <int KIND> inline ulong row_bytes(uint K) {
    return ulong(K / uint(Format<KIND>::weights)) * uint(Format<KIND>::bytes);
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

// w[0..31] = weights 32 run ... 32 run + 31 of the row.
template <int KIND> inline void decode32(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                         thread float* w);

template <> inline void decode32<KIND_F32>(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                           thread float* w) {
    const device float* p = (const device float*)row + run * 32;
    for (uint i = 0; i < 32; ++i) {
        w[i] = p[i];
    }
}

template <> inline void decode32<KIND_F16>(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                           thread float* w) {
    const device half* p = (const device half*)row + run * 32;
    for (uint i = 0; i < 32; ++i) {
        w[i] = float(p[i]);
    }
}

template <> inline void decode32<KIND_BF16>(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                            thread float* w) {
    const device ushort* p = (const device ushort*)row + run * 32;
    for (uint i = 0; i < 32; ++i) {
        w[i] = as_type<float>(uint(p[i]) << 16);
    }
}

template <> inline void decode32<KIND_Q8_0>(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                            thread float* w) {
    const device uint8_t* block = row + run * 34;
    const device char2* q = (const device char2*)(block + 2);
    float d = half_at(block);
    for (uint i = 0; i < 16; ++i) {
        char2 pair = q[i];
        w[2 * i] = d * float(pair.x);
        w[2 * i + 1] = d * float(pair.y);
    }
}

// Block: 16 scales and minima of 4 bits, 64 bytes of 2-bit codes, d, dmin. A run is one bit pair of 32 bytes.
template <> inline void decode32<KIND_Q2_K>(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                            thread float* w) {
    const device uint8_t* block = row + run / 8 * 84;
    uint part = run % 8;
    const device uint8_t* q = block + 16 + part / 4 * 32;
    uint shift = part % 4 * 2;
    float d = half_at(block + 80), least = half_at(block + 82);
    for (uint j = 0; j < 2; ++j) {
        uint scale = block[2 * part + j];
        float step = d * float(scale & 15), offset = least * float(scale >> 4);
        for (uint i = 0; i < 16; ++i) {
            w[16 * j + i] = step * float(q[16 * j + i] >> shift & 3) - offset;
        }
    }
}

// Scale and minimum of run j of a Q4_K block, six bits each in twelve bytes.
inline uint2 q4_k_scale(const device uint8_t* s, uint j) {
    if (j < 4) {
        return uint2(s[j] & 63, s[j + 4] & 63);
    }
    return uint2((s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4);
}

// Block: d, dmin, 12 bytes of scales, 128 bytes of 4-bit codes. A run is one nibble of 32 bytes.
template <> inline void decode32<KIND_Q4_K>(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                            thread float* w) {
    const device uint8_t* block = row + run / 8 * 144;
    uint part = run % 8;
    const device uint8_t* q = block + 16 + part / 2 * 32;
    uint shift = part % 2 * 4;
    uint2 scale = q4_k_scale(block + 4, part);
    float step = half_at(block) * float(scale.x), offset = half_at(block + 2) * float(scale.y);
    for (uint i = 0; i < 32; ++i) {
        w[i] = step * float(q[i] >> shift & 15) - offset;
    }
}

// Block: d, then a run's four codebook indices, four 7-bit sign codes and a 4-bit scale in two words. Bit 7 of a sign
// byte is the parity of the other seven.
template <> inline void decode32<KIND_IQ2_XXS>(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                               thread float* w) {
    const device uint8_t* block = row + run / 8 * 66;
    uint indices = word_at(block + 2 + run % 8 * 8), signs = word_at(block + 6 + run % 8 * 8);
    float scale = half_at(block) * 0.25f * (0.5f + float(signs >> 28));
    for (uint l = 0; l < 4; ++l) {
        ulong entry = codebook[indices >> (8 * l) & 255];
        uint code = signs >> (7 * l) & 127;
        uint sign = code | (popcount(code) & 1) << 7;
        for (uint j = 0; j < 8; ++j) {
            float magnitude = scale * float(uint(entry >> (8 * j)) & 255);
            w[8 * l + j] = sign >> j & 1 ? -magnitude : magnitude;
        }
    }
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

// Block: exponent, 16 bytes of 4-bit codes; the low nibbles come first.
template <> inline void decode32<KIND_MXFP4>(const device uint8_t* row, uint run, const threadgroup ulong* codebook,
                                             thread float* w) {
    const device uint8_t* block = row + run * 17;
    float scale = e8m0_half(block[0]);
    for (uint i = 0; i < 16; ++i) {
        uint pair = block[1 + i];
        w[i] = scale * e2m1_doubled(pair & 15);
        w[16 + i] = scale * e2m1_doubled(pair >> 4);
    }
}
