// Cache rows and what a step of several sequences does with them. Included once in the namespace of each instruction
// set, behind native_products.h. Forms of rows as in ops/kv_round.py, whose results these have bit for bit; widths and
// rotary tails are multiples of 8.

// ---- numbers

INLINE uint32_t bits_of(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}

// |v| <= 448, to the nearest E4M3 code, ties to even.
INLINE uint8_t e4m3(float v) {
    const uint32_t bits = bits_of(v), size = bits & 0x7fffffff;
    const float a = of_bits(size);
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3);
    return uint8_t((a < 0.015625f ? uint32_t(std::nearbyint(a * 512)) : normal & 127) | (bits >> 24 & 128));
}

// |v| <= 6, to the nearest E2M1 code, ties to the even code.
INLINE uint8_t e2m1(float v) {
    const float a = std::fabs(v);
    return uint8_t((a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5)
                   + (v < 0 ? 8 : 0));
}

// To the nearest float16, ties to even; NaN stays NaN, what is larger than any becomes the largest.
INLINE uint16_t to_half(float v) {
    const uint32_t sign = bits_of(v) >> 16 & 0x8000;
    const float a = v != v ? v : std::min(std::fabs(v), 65504.0f);
    const uint32_t size = bits_of(a) & 0x7fffffff;
    if (a != a) return uint16_t(sign | 0x7e00);
    if (size < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyint(a * 0x1p24f)));  // steps of 2^-24
    return uint16_t(sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}

INLINE float largest(const float* v, size_t count, float least) {
    for (size_t i = 0; i < count; i++) least = std::max(least, std::fabs(v[i]));
    return least;
}

// ---- forms

INLINE void unpack_fp8(const uint8_t* row, const Form& form, float* out) {
    const size_t codes = form.width - form.tail, scales = codes / 64;
    for (size_t block = 0; block < scales; block++) {
        const float scale = of_bits(uint32_t(row[codes + block]) << 23);
        for (size_t i = 64 * block; i < 64 * block + 64; i++) out[i] = E4M3[row[i]] * scale;
    }
    const uint8_t* tail = row + codes + (scales + 1) / 2 * 2;
    for (size_t i = 0; i < form.tail; i += 8) store(out + codes + i, halves(tail + 2 * i));
}

INLINE void pack_fp8(const float* v, const Form& form, uint8_t* row) {
    const size_t codes = form.width - form.tail, scales = codes / 64;
    for (size_t block = 0; block < scales; block++) {
        const uint32_t e = ((bits_of(largest(v + 64 * block, 64, 1e-4f)) + 0x1fffff) >> 23) - 8;
        const float inverse = of_bits((254 - e) << 23);
        for (size_t i = 64 * block; i < 64 * block + 64; i++) row[i] = e4m3(v[i] * inverse);
        row[codes + block] = uint8_t(e);
    }
    uint8_t* tail = row + codes + scales;
    if (scales % 2) *tail++ = 0;
    for (size_t i = 0; i < form.tail; i++) {
        const uint16_t half = to_half(v[codes + i]);
        memcpy(tail + 2 * i, &half, 2);
    }
}

// In an order of its own within 32 channels, the same for queries and rows.
INLINE void unpack_fp4(const uint8_t* row, const Form& form, float* out) {
    for (size_t block = 0; block < form.width / 32; block++) {
        const V half_of = all(0.5f * of_bits(uint32_t(row[form.width / 2 + block]) << 23));
        V w[4];
        fp4(row + 16 * block, w);
        for (size_t i = 0; i < 4; i++) store(out + 32 * block + 8 * i, mul(w[i], half_of));
    }
}

// Transforms v, which is scratch.
INLINE void pack_fp4(float* v, const Form& form, uint8_t* row) {
    for (size_t d = 1; d < form.width; d *= 2)
        for (size_t i = 0; i < form.width; i += 2 * d)
            for (size_t j = i; j < i + d; j++) {
                const float a = v[j], b = v[j + d];
                v[j] = a + b, v[j + d] = a - b;
            }
    const float root = 1 / std::sqrt(float(form.width));
    for (size_t i = 0; i < form.width; i++) v[i] *= root;
    for (size_t block = 0; block < form.width / 32; block++) {
        const float* p = v + 32 * block;
        const uint32_t e = ((bits_of(largest(p, 32, 6 * 1.17549435e-38f)) + 0x3fffff) >> 23) - 2;
        const float inverse = of_bits((254 - e) << 23);
        for (size_t i = 0; i < 16; i++)
            row[16 * block + i] = uint8_t(e2m1(p[2 * i] * inverse) | e2m1(p[2 * i + 1] * inverse) << 4);
        row[form.width / 2 + block] = uint8_t(e);
    }
}

// A row as floats: where it lies, or decoded to `room`.
INLINE const float* as_floats(const uint8_t* row, const Form& form, float* room) {
    if (form.packing == 0) return reinterpret_cast<const float*>(row);
    if (form.packing == 1) unpack_fp8(row, form, room);
    else unpack_fp4(row, form, room);
    return room;
}

// ---- vectors

INLINE float dot(const float* a, const float* b, size_t count) {
    V s[4] = {all(0), all(0), all(0), all(0)};
    size_t i = 0;
    for (; i + 32 <= count; i += 32)
        for (size_t j = 0; j < 4; j++) s[j] = fma(load(a + i + 8 * j), load(b + i + 8 * j), s[j]);
    for (; i < count; i += 8) s[0] = fma(load(a + i), load(b + i), s[0]);
    return sum(add(add(s[0], s[1]), add(s[2], s[3])));
}

// to += sum_i by[i] rows[i], `N` times 8 channels of it from j on.
template <size_t N>
INLINE void add_rows(float* to, const float* const* rows, const float* by, size_t count, size_t j) {
    V s[N];
    for (size_t n = 0; n < N; n++) s[n] = load(to + j + 8 * n);
    for (size_t i = 0; i < count; i++) {
        const V weight = all(by[i]);
        for (size_t n = 0; n < N; n++) s[n] = fma(load(rows[i] + j + 8 * n), weight, s[n]);
    }
    for (size_t n = 0; n < N; n++) store(to + j + 8 * n, s[n]);
}

INLINE void scaled(float* v, float by, size_t count) {
    for (size_t i = 0; i < count; i += 8) store(v + i, mul(load(v + i), all(by)));
}

// The last `tail` channels by the angles of a position; back for direction = -1.
INLINE void rotate(float* v, const Form& form, const float* cos, const float* sin, float direction) {
    float* p = v + form.width - form.tail;
    for (size_t i = 0; i < form.tail / 2; i++) {
        const float a = p[2 * i], b = p[2 * i + 1], c = cos[i], s = sin[i] * direction;
        p[2 * i] = a * c - b * s, p[2 * i + 1] = a * s + b * c;
    }
}

// v, which is scratch, to a row: over its rms times norm, unless norm is null; rotated; packed.
static void finish(float* v, const Form& form, const float* norm, float eps, const float* cos, const float* sin,
                   uint8_t* row) {
    if (norm) {
        const float scale = 1 / std::sqrt(dot(v, v, form.width) / float(form.width) + eps);
        for (size_t i = 0; i < form.width; i++) v[i] = v[i] * scale * norm[i];
    }
    rotate(v, form, cos, sin, 1);
    if (form.packing == 0) memcpy(row, v, form.width * sizeof(float));
    else if (form.packing == 1) pack_fp8(v, form, row);
    else pack_fp4(v, form, row);
}

// ---- a step's tasks

// Some heads of a sequence: 32 keys at a time, which are decoded once for all of them.
static void attend(const Attend& a, size_t b, size_t head0, size_t heads, float* o, float* room) {
    constexpr size_t BLOCK = 32;
    const size_t D = a.form.width, seen = size_t(a.positions[b]) + 1, near = std::min(seen, a.window);
    const size_t visible = a.ratio ? std::min(seen / a.ratio, a.most) : 0;
    const size_t keys = near + (a.chosen ? std::min(visible, a.picks) : visible);
    const float *cos = a.cos + b * (a.form.tail / 2), *sin = a.sin + b * (a.form.tail / 2);
    float *q = room, *decoded = q + heads * D, *z = decoded + BLOCK * D;
    float *most = z + heads * BLOCK, *total = most + heads;
    for (size_t h = 0; h < heads; h++) {
        float* head = q + h * D;
        memcpy(head, a.q + (b * a.heads + head0 + h) * D, D * sizeof(float));
        const float mean = dot(head, head, D) / float(D) + a.eps;
        scaled(head, 1 / std::sqrt(mean * float(D)), D);
        rotate(head, a.form, cos, sin, 1);
        memset(o + h * D, 0, D * sizeof(float));
        most[h] = a.sink[head0 + h], total[h] = 1;
    }
    for (size_t first = 0; first < keys; first += BLOCK) {
        const float* rows[BLOCK];
        size_t count = 0;
        for (size_t i = first; i < std::min(first + BLOCK, keys); i++) {
            const uint8_t* row = a.windows + (b * a.window + i) * a.form.bytes;
            if (i >= near) {
                const size_t r = a.chosen ? size_t(a.chosen[b * a.picks + i - near]) : i - near;
                if (r >= visible) continue;
                row = a.rows.of(b, r, a.form.bytes);
            }
            rows[count] = as_floats(row, a.form, decoded + count * D), count++;
        }
        for (size_t h = 0; h < heads; h++) {
            float *head = q + h * D, *score = z + h * BLOCK, top = most[h];
            for (size_t i = 0; i < count; i++) score[i] = dot(head, rows[i], D), top = std::max(top, score[i]);
            if (top > most[h]) {
                const float less = std::exp(most[h] - top);
                scaled(o + h * D, less, D), total[h] *= less, most[h] = top;
            }
            for (size_t i = 0; i < count; i++) score[i] = std::exp(score[i] - top), total[h] += score[i];
            size_t j = 0;
            for (; j + 32 <= D; j += 32) add_rows<4>(o + h * D, rows, score, count, j);
            for (; j < D; j += 8) add_rows<1>(o + h * D, rows, score, count, j);
        }
    }
    for (size_t h = 0; h < heads; h++) {
        scaled(o + h * D, 1 / total[h], D);
        rotate(o + h * D, a.form, cos, sin, -1);
    }
}

// Scores of rows first … end - 1 of a sequence.
static void score(const Scores& a, size_t b, size_t first, size_t end, float* scores, float* room) {
    const size_t W = a.form.width;
    float* decoded = room + a.heads * W;
    const float* heads[MOST_HEADS];
    for (size_t h = 0; h < a.heads; h++)
        heads[h] = as_floats(a.q + (b * a.heads + h) * a.form.bytes, a.form, room + h * W);
    for (size_t r = first; r < end; r++) {
        const float* row = as_floats(a.rows.of(b, r, a.form.bytes), a.form, decoded);
        float sum = 0;
        for (size_t h = 0; h < a.heads; h++) sum += a.weight[b * a.heads + h] * std::max(dot(heads[h], row, W), 0.0f);
        scores[r] = sum * a.scale;
    }
}

// A sequence's token into its ring, and the row of its group, if that is complete.
static void compress(const Compress& a, size_t b, float* ring, uint8_t* row, float* room) {
    const size_t w = a.form.width, columns = a.overlap * w, slots = a.overlap * a.ratio;
    const size_t position = size_t(a.positions[b]), here = position % slots;
    const float* bias = a.ape + position % a.ratio * columns;
    for (size_t j = 0; j < columns; j++) {
        ring[2 * here * columns + j] = a.k[b * columns + j];
        ring[(2 * here + 1) * columns + j] = a.s[b * columns + j] + bias[j];
    }
    if ((position + 1) % a.ratio) return;
    float *top = room, *total = room + w, *v = room + 2 * w;
    for (size_t j = 0; j < w; j++) top[j] = -INFINITY, total[j] = 0, v[j] = 0;
    const size_t skipped = position + 1 < slots ? a.ratio : 0;  // no group is before the first: no carry slots
    const auto slot = [&](size_t x) {  // its k; s is `columns` behind. Where groups overlap, their own halves come last
        const size_t i = (position + 1 + x) % slots;
        return ring + 2 * i * columns + (x + a.ratio >= slots ? columns - w : 0);
    };
    for (size_t x = skipped; x < slots; x++)
        for (size_t j = 0; j < w; j++) top[j] = std::max(top[j], slot(x)[columns + j]);
    for (size_t x = skipped; x < slots; x++) {
        const float* k = slot(x);
        for (size_t j = 0; j < w; j++) {
            const float weight = std::exp(k[columns + j] - top[j]);
            total[j] += weight, v[j] += weight * k[j];
        }
    }
    for (size_t j = 0; j < w; j++) v[j] /= total[j];
    const size_t half = a.form.tail / 2;
    finish(v, a.form, a.norm, a.eps, a.cos + b * half, a.sin + b * half, row);
}
