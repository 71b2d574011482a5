// A token's hyper-connections, as ops/hyper_mix.py has them. Included once in the namespace of each instruction set,
// behind native_rows.h; D is a multiple of 8.

// streams'[j] = post[j] y + sum_i m[i, j] streams[i], and the sum of their squares. y null: they stay as they are.
static float mix_streams(const Hyper& a, size_t t, const float* y, const float* post, const float* m, float* after) {
    const float* streams = a.streams + t * a.N * a.D;
    V squares = all(0);
    for (size_t j = 0; j < a.N; j++)
        for (size_t d = 0; d < a.D; d += 8) {
            V v = load(streams + j * a.D + d);
            if (y) {
                v = mul(all(post[t * a.N + j]), load(y + t * a.D + d));
                for (size_t i = 0; i < a.N; i++)
                    v = fma(all(m[(t * a.N + i) * a.N + j]), load(streams + i * a.D + d), v);
                store(after + (t * a.N + j) * a.D + d, v);
            }
            squares = fma(v, v, squares);
        }
    return sum(squares);
}

INLINE float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Columns, then iterations - 1 times rows and columns, each divided by its sum + eps.
INLINE void sinkhorn(float* m, size_t N, size_t iterations, float eps) {
    const auto divide = [=](size_t line, size_t step) {
        for (size_t a = 0; a < N; a++) {
            float total = 0;
            for (size_t b = 0; b < N; b++) total += m[a * line + b * step];
            for (size_t b = 0; b < N; b++) m[a * line + b * step] /= total + eps;
        }
    };
    divide(1, N);
    for (size_t round = 1; round < iterations; round++) divide(N, 1), divide(1, N);
}

// x = rms(sum_n pre[n] streams[n]) norm; post and m for the way back, unless `post` is null: the output's mix has only
// the first N columns.
static void enter(const Hyper& a, size_t t, const float* sums, size_t parts, const float* scale, const float* base,
                  const float* norm, size_t iterations, float* x, float* post, float* m) {
    const size_t N = a.N, columns = post ? (2 + N) * N : N;
    float mix[MOST_STREAMS * (2 + MOST_STREAMS) + 1] = {};
    for (size_t p = 0; p < parts; p++)
        for (size_t c = 0; c <= columns; c++) mix[c] += sums[(t * parts + p) * (columns + 1) + c];
    const float rms = 1 / std::sqrt(mix[columns] / float(N * a.D) + a.norm_eps);
    const auto at = [&](size_t c, size_t part) { return mix[c] * rms * scale[part] + base[c]; };
    float pre[MOST_STREAMS];
    for (size_t n = 0; n < N; n++) pre[n] = sigmoid(at(n, 0)) + a.hc_eps;
    float* out = x + t * a.D;
    for (size_t d = 0; d < a.D; d += 8) {
        V v = all(0);
        for (size_t n = 0; n < N; n++) v = fma(all(pre[n]), load(a.streams + (t * N + n) * a.D + d), v);
        store(out + d, v);
    }
    const float over = 1 / std::sqrt(dot(out, out, a.D) / float(a.D) + a.norm_eps);
    for (size_t d = 0; d < a.D; d++) out[d] = out[d] * over * norm[d];
    if (!post) return;
    for (size_t n = 0; n < N; n++) post[t * N + n] = 2 * sigmoid(at(N + n, 1));
    m += t * N * N;
    for (size_t i = 0; i < N; i++) {
        float top = -INFINITY, total = 0;
        for (size_t j = 0; j < N; j++) top = std::max(top, m[i * N + j] = at(2 * N + i * N + j, 2));
        for (size_t j = 0; j < N; j++) total += m[i * N + j] = std::exp(m[i * N + j] - top);
        for (size_t j = 0; j < N; j++) m[i * N + j] = m[i * N + j] / total + a.hc_eps;
    }
    sinkhorn(m, N, iterations, a.hc_eps);
}
