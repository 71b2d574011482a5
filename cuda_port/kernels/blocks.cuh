// Weights of GGUF blocks. In their file's order any one of them can be asked for (`weight_at`); the kernels that count
// read rows that dequantize.cu has arranged: of a row, first all codes, then all scales, so that 16 bytes are one
// aligned load. A row keeps its bytes:
//   Q8_0     codes, in runs of 64 as activations are (planes.cuh); f16 scales
//   IQ2_XXS  groups of 32 weights: 4 rows of the codebook; signs of weights 8 o + i in bits 4 i + o, i < 7, and the
//            scale in the last four; f16 scales
//   Q2_K     codes; nibbles of scale and minimum, in fours for the same 8 bytes of codes; (f16 d, f16 dmin)
//   Q4_K     codes; (f16 d, f16 dmin, 12 bytes of scales and minima)
//   MXFP4    codes, weights 8 i ... 8 i + 7 in word i; exponents
// Experts of IQ2_XXS and Q2_K whose rows are multiplied together lie in tiles of 16 rows and 256 columns, which keep
// their bytes too: what lane 4 g + q of 32 needs of rows g and g + 8 side by side, g = 0 .. 7, q = 0 .. 3.
//   IQ2_XXS  for columns 0 .. 127, then the rest: of lanes, of row g, of row g + 8: 4 rows of the codebook for the
//            32 columns of group q, and a byte for each: signs of 7 of its 8 weights, and a bit of the scale; then f16
//            scales: of g, of row g, of row g + 8
//   Q2_K     of row g, of row g + 8: of lanes, 16 bytes of codes; of lanes, of row g, of row g + 8: nibbles of scale
//            and minimum for those; then, of g, of row g, of row g + 8, (f16 d, f16 dmin)
#ifndef DS4_BLOCKS
#define DS4_BLOCKS
#include "planes.cuh"

#define KIND_F32 0
#define KIND_F16 1
#define KIND_Q8_0 8
#define KIND_Q2_K 10
#define KIND_Q4_K 12
#define KIND_IQ2_XXS 16
#define KIND_BF16 30
#define KIND_MXFP4 39
#define TILE_BYTES_IQ2_XXS 1056
#define TILE_BYTES_Q2_K 1344

// Eight codes 0, 1, 2 of two bits, for 8, 25, 43: the codebook of IQ2_XXS.
__device__ const u16 IQ2_ROWS[256] = {
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
    0xa200, 0xa418, 0xa850, 0xa904,
};
#define IQ2_CODES 0x002b1908u        // 8, 25, 43 by code, as bytes
#define IQ2_MINUS 0x00d5e7f8u        // their negatives

// The same eight codes, one to a nibble.
DEVICE u32 iq2_nibbles(u32 row) {
    row = (row | row << 8) & 0x00ff00ff;
    row = (row | row << 4) & 0x0f0f0f0f;
    return (row | row << 2) & 0x33333333;
}

// Bit 2 of nibble i is set where weight i is negative. code: bits 0 .. 6; the eighth makes their number even.
DEVICE u32 iq2_signs(u32 code) {
    code |= (u32)(__popc(code) & 1) << 7;
    code = (code | code << 12) & 0x000f000f;
    code = (code | code << 6) & 0x03030303;
    return ((code | code << 3) & 0x11111111) << 2;
}

// Six-bit scale and minimum of weights 32 j ... of a Q4_K block.
DEVICE void q4_scale(const u8* s, int j, int* scale, int* least) {
    if (j < 4) *scale = s[j] & 63, *least = s[j + 4] & 63;
    else *scale = (s[j + 4] & 15) | s[j - 4] >> 6 << 4, *least = s[j + 4] >> 4 | s[j] >> 6 << 4;
}

DEVICE float half_at(const u8* p) { return half_bits(p[0] | p[1] << 8); }

DEVICE float e8m0(int e) { return e ? __int_as_float(e << 23) : __int_as_float(0x00400000); }  // 2^(e - 127)

DEVICE float e2m1(int code) {
    int m = code & 7;
    float v = m < 2 ? 0.5f * m : (float)(2 + m % 2) * 0.25f * (1 << m / 2);
    return code & 8 ? -v : v;
}

// Weight k of a row in its file's order.
template <int FORMAT>
DEVICE float weight_at(const u8* row, int k) {
    if (FORMAT == KIND_F32) return ((const float*)row)[k];
    if (FORMAT == KIND_F16) return half_at(row + 2 * k);
    if (FORMAT == KIND_BF16) return __int_as_float((u32)((const u16*)row)[k] << 16);
    if (FORMAT == KIND_Q8_0) {
        const u8* b = row + k / 32 * 34;
        return half_at(b) * (signed char)b[2 + k % 32];
    }
    if (FORMAT == KIND_MXFP4) {
        const u8* b = row + k / 32 * 17;
        return e8m0(b[0]) * e2m1(b[1 + k % 16] >> k % 32 / 16 * 4 & 15);
    }
    int n = k % 256;
    if (FORMAT == KIND_Q2_K) {
        const u8* b = row + k / 256 * 84;
        int s = b[n / 16];
        float least = half_at(b + 82) * (s >> 4);
        return half_at(b + 80) * (s & 15) * (b[16 + n / 128 * 32 + n % 32] >> n % 128 / 32 * 2 & 3) - least;
    }
    if (FORMAT == KIND_Q4_K) {
        const u8* b = row + k / 256 * 144;
        int scale, least;
        q4_scale(b + 4, n / 32, &scale, &least);
        return half_at(b) * scale * (b[16 + n / 64 * 32 + n % 32] >> n % 64 / 32 * 4 & 15) - half_at(b + 2) * least;
    }
    const u8* b = row + k / 256 * 66;  // IQ2_XXS
    const u8* group = b + 2 + n / 32 * 8;
    u32 word = group[4] | group[5] << 8 | group[6] << 16 | (u32)group[7] << 24;
    u32 nibbles = iq2_nibbles(IQ2_ROWS[group[n % 32 / 8]]) | iq2_signs(word >> n % 32 / 8 * 7 & 127);
    u32 code = nibbles >> n % 8 * 4;
    int value = (int)(IQ2_CODES >> (code & 3) * 8 & 255);
    return half_at(b) * 0.25f * (0.5f + (word >> 28)) * (code & 4 ? -value : value);
}

// The word of signs of a group, as a file has it, with its bits where arranged rows have them.
DEVICE u32 iq2_arranged(u32 signs) {
    u32 word = signs & 0xf0000000;
    for (int i = 0; i < 28; ++i) word |= (signs >> i & 1) << (i % 7 * 4 + i / 7);
    return word;
}

// An arranged word of signs with bits 28 + o those of weights 8 o + 7, which make the number of minus signs even.
DEVICE u32 iq2_all_signs(u32 word) {
    u32 seven = word & 0x0fffffff, some = seven ^ seven >> 4 ^ seven >> 8;
    return seven | (some ^ some >> 12 ^ seven >> 24) << 28;
}

// Bits 2 of nibbles: the signs of octet o out of iq2_all_signs().
DEVICE u32 iq2_octet_signs(u32 all, int o) { return __funnelshift_l(all, all, (2 - o) & 31) & 0x44444444; }

// The codebook in shared memory, once for each lane: no two lanes ever want the same bank. Entries are `pitch` bytes
// apart.
DEVICE void fill_codebook(u8* codebook, int pitch) {
    for (int i = threadIdx.x; i < 256 * 8; i += blockDim.x) {
        u32 v = iq2_nibbles(IQ2_ROWS[i / 8]);
        *(Quad*)(codebook + i / 8 * pitch + i % 8 * 16) = Quad{{v, v, v, v}};
    }
}

// The same for the signs of eight weights, by the code of seven of them: bits 2 of nibbles. `count`: 128, or 256 where
// a code's byte has another bit.
DEVICE void fill_signs(u8* signs, int count) {
    for (int i = threadIdx.x; i < count * 8; i += blockDim.x) {
        u32 v = iq2_signs(i / 8 & 127);
        *(Quad*)(signs + i * 16) = Quad{{v, v, v, v}};
    }
}

// Of a group in a tile: 2 scale + 1.
DEVICE int tile_scale(u32 signs) { return (int)((signs & 0x80808080u) * 0x00204081u >> 28) * 2 + 1; }

// The same, 64 times too large: bytes with their first bit are -128.
DEVICE int tile_scale_64(u32 signs) { return dot4(signs & 0x80808080u, 0xf8fcfeffu, 64); }

DEVICE u32 codebook_entry(const u8* codebook, int row) {
    return *(const u32*)(codebook + (row * (LANES * 4) + 4 * lane_id()));
}

#endif
