// y = x W^T over the blocks of a few rows of W. Included once in the namespace of each instruction set.
//
// A Kind hands out the weights of a block 32 at a time: unpack(b, k, use) calls use(k, scale, w0, w1, w2, w3) for
// weights k .. k + 31 of the row, each of them scale * w; or use(k, w0, w1, w2, w3) where no scale can be taken out.
// There are two users: Dot multiplies with a few tokens while the weights are in registers, Slab writes them down for
// a product with many tokens. Formulas as in gguf/dequant.py, from which a decoded weight does not differ in any bit.

INLINE uint32_t word(const uint8_t* p) {
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

struct Float32 {
    static constexpr size_t weights = 32, bytes = 128;
    template <class Use> INLINE void unpack(const uint8_t* b, size_t k, Use& use) {
        float w[32];
        memcpy(w, b, sizeof w);
        use(k, load(w), load(w + 8), load(w + 16), load(w + 24));
    }
};

struct Float16 {
    static constexpr size_t weights = 32, bytes = 64;
    template <class Use> INLINE void unpack(const uint8_t* b, size_t k, Use& use) {
        use(k, halves(b), halves(b + 16), halves(b + 32), halves(b + 48));
    }
};

struct BFloat16 {
    static constexpr size_t weights = 32, bytes = 64;
    template <class Use> INLINE void unpack(const uint8_t* b, size_t k, Use& use) {
        use(k, bhalves(b), bhalves(b + 16), bhalves(b + 32), bhalves(b + 48));
    }
};

struct Q8_0 {
    static constexpr size_t weights = 32, bytes = 34;
    template <class Use> INLINE void unpack(const uint8_t* b, size_t k, Use& use) {
        use(k, half(b), signed8(b + 2), signed8(b + 10), signed8(b + 18), signed8(b + 26));
    }
};

struct MXFP4 {
    static constexpr size_t weights = 32, bytes = 17;
    template <class Use> INLINE void unpack(const uint8_t* b, size_t k, Use& use) {
        // 2^(e - 128) from its bits, the codes being doubled; below e = 2 it is a subnormal number.
        const uint32_t e = b[0];
        V w[4];
        fp4(b + 1, w);
        use(k, of_bits(e > 1 ? (e - 1) << 23 : 1u << (21 + e)), w[0], w[1], w[2], w[3]);
    }
};

struct IQ2_XXS {
    static constexpr size_t weights = 256, bytes = 66;

    INLINE V eight(uint32_t row, uint32_t signs) { return flip(load(IQ2.grid[row & 255]), IQ2.signs[signs & 127]); }

    template <class Use> INLINE void unpack(const uint8_t* b, size_t k, Use& use) {
        const float quarter = half(b) * 0.25f;
        for (size_t group = 0; group < 8; group++) {
            const uint32_t rows = word(b + 2 + 8 * group), signs = word(b + 6 + 8 * group);
            use(k + 32 * group, quarter * (0.5f + float(signs >> 28)), eight(rows, signs), eight(rows >> 8, signs >> 7),
                eight(rows >> 16, signs >> 14), eight(rows >> 24, signs >> 21));
        }
    }
};

struct Q2_K {
    static constexpr size_t weights = 256, bytes = 84;

    template <int shift, class Use>
    INLINE void quarter(size_t k, const Codes* c, const float* scale, const float* least, Use& use) {
        const V s0 = all(scale[0]), s1 = all(scale[1]), m0 = all(least[0]), m1 = all(least[1]);
        use(k, fma(s0, bits<shift, 3>(c[0]), m0), fma(s0, bits<shift, 3>(c[1]), m0),
            fma(s1, bits<shift, 3>(c[2]), m1), fma(s1, bits<shift, 3>(c[3]), m1));
    }

    template <class Use> INLINE void unpack(const uint8_t* b, size_t k, Use& use) {
        const V d = all(half(b + 80)), minus = all(-half(b + 82));
        float scale[16], least[16];
        for (int i = 0; i < 16; i += 8) {
            const Codes pair = codes8(b + i);
            store(scale + i, mul(d, bits<0, 15>(pair)));
            store(least + i, mul(minus, bits<4, 15>(pair)));
        }
        for (int a = 0; a < 2; a++) {
            const uint8_t* q = b + 16 + 32 * a;
            const Codes c[4] = {codes8(q), codes8(q + 8), codes8(q + 16), codes8(q + 24)};
            const size_t at = k + 128 * a;
            const float *s = scale + 8 * a, *m = least + 8 * a;
            quarter<0>(at, c, s, m, use), quarter<2>(at + 32, c, s + 2, m + 2, use);
            quarter<4>(at + 64, c, s + 4, m + 4, use), quarter<6>(at + 96, c, s + 6, m + 6, use);
        }
    }
};

struct Q4_K {
    static constexpr size_t weights = 256, bytes = 144;

    template <int shift, class Use>
    INLINE void nibbles(size_t k, const Codes* c, float scale, float least, Use& use) {
        const V s = all(scale), m = all(least);
        use(k, fma(s, bits<shift, 15>(c[0]), m), fma(s, bits<shift, 15>(c[1]), m), fma(s, bits<shift, 15>(c[2]), m),
            fma(s, bits<shift, 15>(c[3]), m));
    }

    template <class Use> INLINE void unpack(const uint8_t* b, size_t k, Use& use) {
        // Six-bit numbers, four in a word: 0..3 whole in low and mid, of 4..7 four bits in high, two atop low and mid.
        const uint32_t low = word(b + 4), mid = word(b + 8), high = word(b + 12);
        const uint32_t six[4] = {low & 0x3f3f3f3f, (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030),
                                 mid & 0x3f3f3f3f, (high >> 4 & 0x0f0f0f0f) | (mid >> 2 & 0x30303030)};
        uint8_t packed[16];
        memcpy(packed, six, sizeof packed);
        float scale[8], least[8];
        store(scale, mul(all(half(b)), bits<0, 63>(codes8(packed))));
        store(least, mul(all(-half(b + 2)), bits<0, 63>(codes8(packed + 8))));
        for (int a = 0; a < 4; a++) {
            const uint8_t* q = b + 16 + 32 * a;
            const Codes c[4] = {codes8(q), codes8(q + 8), codes8(q + 16), codes8(q + 24)};
            nibbles<0>(k + 64 * a, c, scale[2 * a], least[2 * a], use);
            nibbles<4>(k + 64 * a + 32, c, scale[2 * a + 1], least[2 * a + 1], use);
        }
    }
};

// Sums of one row with T tokens. Few tokens have several sums each, or additions would wait for one another.
template <int T> struct Dot {
    static constexpr int SUMS = T == 1 ? 4 : T <= 3 ? 2 : 1;
    const float* x[T];
    V sums[T][SUMS];

    INLINED explicit Dot(const float* const* tokens) {
        for (int t = 0; t < T; t++) {
            x[t] = tokens[t];
            for (int i = 0; i < SUMS; i++) sums[t][i] = all(0);
        }
    }

    INLINED void operator()(size_t k, V w0, V w1, V w2, V w3) {
        for (int t = 0; t < T; t++) {
            const float* p = x[t] + k;
            sums[t][0] = fma(w0, load(p), sums[t][0]);
            sums[t][1 % SUMS] = fma(w1, load(p + 8), sums[t][1 % SUMS]);
            sums[t][2 % SUMS] = fma(w2, load(p + 16), sums[t][2 % SUMS]);
            sums[t][3 % SUMS] = fma(w3, load(p + 24), sums[t][3 % SUMS]);
        }
    }

    INLINED void operator()(size_t k, float scale, V w0, V w1, V w2, V w3) {
        const V s = all(scale);
        if constexpr (T == 1) {  // one product with the scale for 32 weights, not four
            const float* p = x[0] + k;
            const V low = fma(w1, load(p + 8), mul(w0, load(p))), high = fma(w3, load(p + 24), mul(w2, load(p + 16)));
            sums[0][0] = fma(s, low, sums[0][0]), sums[0][1] = fma(s, high, sums[0][1]);
        } else {
            (*this)(k, mul(s, w0), mul(s, w1), mul(s, w2), mul(s, w3));
        }
    }

    INLINED float total(int t) const {
        V v = sums[t][0];
        for (int i = 1; i < SUMS; i++) v = add(v, sums[t][i]);
        return sum(v);
    }
};

struct Slab {
    float* out;

    INLINED void operator()(size_t k, V w0, V w1, V w2, V w3) {
        store(out + k, w0), store(out + k + 8, w1), store(out + k + 16, w2), store(out + k + 24, w3);
    }

    INLINED void operator()(size_t k, float scale, V w0, V w1, V w2, V w3) {
        const V s = all(scale);
        (*this)(k, mul(s, w0), mul(s, w1), mul(s, w2), mul(s, w3));
    }
};

template <class Kind, int T> void dots(const Rows& w, const float* const* x, float* y, size_t stride) {
    constexpr size_t PART = T == 1 ? SIZE_MAX : T == 2 ? 2048 : 1024;  // 16 KiB of x, half the first cache of a core
    const size_t row_bytes = w.width / Kind::weights * Kind::bytes;
    for (size_t k0 = 0; k0 < w.width; k0 += PART) {
        const size_t end = w.width - k0 < PART ? w.width : k0 + PART;
        for (size_t r = 0; r < w.count; r++) {
            const uint8_t* b = w.blocks + r * row_bytes + k0 / Kind::weights * Kind::bytes;
            Dot<T> dot(x);
            for (size_t k = k0; k < end; k += Kind::weights, b += Kind::bytes) Kind::unpack(b, k, dot);
            for (int t = 0; t < T; t++) y[t * stride + r] = (k0 ? y[t * stride + r] : 0) + dot.total(t);
        }
        if (PART == SIZE_MAX) break;
    }
}

// Products of 4 rows of a slab with T tokens, over `width` weights from k0 on.
template <int T> INLINE void tile(const float* slab, size_t k0, size_t width, const float* const* x, float sums[T][4]) {
    V s[T][4];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < 4; r++) s[t][r] = all(0);
    for (size_t k = 0; k < width; k += 8) {
        V a[T];
        for (int t = 0; t < T; t++) a[t] = load(x[t] + k0 + k);
        for (int r = 0; r < 4; r++) {
            const V b = load(slab + r * SLAB_WIDTH + k);
            for (int t = 0; t < T; t++) s[t][r] = fma(a[t], b, s[t][r]);
        }
    }
    for (int t = 0; t < T; t++) sum4(sums[t], s[t][0], s[t][1], s[t][2], s[t][3]);
}

// All rows of a slab with all tokens. y is set by a row's first slab and added to by the others.
static void multiply(const float* slab, size_t rows, size_t k0, size_t width, const float* const* x, size_t tokens,
                     float* y, size_t stride) {
    for (size_t first = 0; first < tokens; first += TOKEN_BLOCK) {
        const size_t end = first + TOKEN_BLOCK < tokens ? first + TOKEN_BLOCK : tokens;
        for (size_t r = 0; r < rows; r += 4) {
            const float* w = slab + r * SLAB_WIDTH;
            for (size_t t = first, many; t < end; t += many) {
                many = end - t == 4 ? 2 : end - t < 3 ? end - t : 3;  // one token alone would leave sums waiting
                float sums[3][4];
                if (many == 3) tile<3>(w, k0, width, x + t, sums);
                else if (many == 2) tile<2>(w, k0, width, x + t, sums);
                else tile<1>(w, k0, width, x + t, sums);
                for (size_t i = 0; i < many; i++)
                    for (size_t j = 0; j < 4 && r + j < rows; j++) {
                        float& sum = y[(t + i) * stride + r + j];
                        sum = k0 ? sum + sums[i][j] : sums[i][j];
                    }
            }
        }
    }
}

template <class Kind>
void slabs(const Rows& w, const float* const* x, size_t tokens, float* y, size_t stride, float* slab) {
    const size_t row_bytes = w.width / Kind::weights * Kind::bytes;
    for (size_t r = w.count; r % 4; r++) memset(slab + r * SLAB_WIDTH, 0, SLAB_WIDTH * sizeof(float));
    for (size_t k0 = 0; k0 < w.width; k0 += SLAB_WIDTH) {
        const size_t width = w.width - k0 < SLAB_WIDTH ? w.width - k0 : SLAB_WIDTH;
        for (size_t r = 0; r < w.count; r++) {
            const uint8_t* b = w.blocks + r * row_bytes + k0 / Kind::weights * Kind::bytes;
            Slab out{slab + r * SLAB_WIDTH};
            for (size_t k = 0; k < width; k += Kind::weights, b += Kind::bytes) Kind::unpack(b, k, out);
        }
        multiply(slab, w.count, k0, width, x, tokens, y, stride);
    }
}

template <class Kind>
void of_kind(const Rows& w, const float* const* x, size_t tokens, float* y, size_t stride, float* slab) {
    if (tokens == 1) return dots<Kind, 1>(w, x, y, stride);
    if constexpr (MOST_DOTS >= 4) {  // every one of them is compiled for every kind
        if (tokens == 2) return dots<Kind, 2>(w, x, y, stride);
        if (tokens == 3) return dots<Kind, 3>(w, x, y, stride);
        if (tokens == 4) return dots<Kind, 4>(w, x, y, stride);
    }
    slabs<Kind>(w, x, tokens, y, stride, slab);
}

// y[t * stride + r] = sum_k x[t][k] W[r, k]. At most SLAB_ROWS rows; `slab` is scratch of SLAB_ROWS x SLAB_WIDTH.
static void product(const Rows& w, const float* const* x, size_t tokens, float* y, size_t stride, float* slab) {
    switch (w.kind) {
        case 0: return of_kind<Float32>(w, x, tokens, y, stride, slab);
        case 1: return of_kind<Float16>(w, x, tokens, y, stride, slab);
        case 8: return of_kind<Q8_0>(w, x, tokens, y, stride, slab);
        case 10: return of_kind<Q2_K>(w, x, tokens, y, stride, slab);
        case 12: return of_kind<Q4_K>(w, x, tokens, y, stride, slab);
        case 16: return of_kind<IQ2_XXS>(w, x, tokens, y, stride, slab);
        case 30: return of_kind<BFloat16>(w, x, tokens, y, stride, slab);
        case 39: return of_kind<MXFP4>(w, x, tokens, y, stride, slab);
    }
}
