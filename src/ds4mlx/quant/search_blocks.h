// The two searches over vectors of LANES floats. search.cpp includes this once for each size, inside a namespace.

typedef float V __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));

INLINE V load(const float* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float* p, V v) { memcpy(p, &v, sizeof v); }
INLINE V all(float a) { return a - V{}; }
INLINE V either(I mask, V a, V b) { return mask ? a : b; }
INLINE V least_of(V a, V b) { return either(a < b, a, b); }
INLINE V most_of(V a, V b) { return either(a > b, a, b); }
// To the nearest whole number, even at a tie: of floats far below 2^22.
INLINE V rounded(V a) {
    const V shift = all(12582912.0f);
    return (a + shift) - shift;
}
INLINE V clipped(V a, float most) { return rounded(least_of(most_of(a, all(0)), all(most))); }
INLINE V over(V a, V b, V where_zero) {
    const I usable = b > all(0);
    return either(usable, a / either(usable, b, all(1)), where_zero);
}

// ---- codebook: 32 eights of a block, and what each row of the codebook makes of them

struct Eights {
    alignas(32) float a[32][ROWS];  // twice A
    alignas(32) float b[32][ROWS];
    float size[32][8];              // importance |x|
    uint8_t negative[32];           // bits
    bool odd[32];
};

INLINE void weigh(Eights& e, int i, const float* x, const float* w) {
    V size[8], weight[8];
    int negative = 0;
    for (int k = 0; k < 8; k++) {
        e.size[i][k] = w[k] * std::fabs(x[k]);
        negative |= (x[k] < 0) << k;
        size[k] = all(2 * e.size[i][k]);
        weight[k] = all(w[k]);
    }
    e.negative[i] = negative;
    e.odd[i] = __builtin_parity(negative);
    for (int row = 0; row < ROWS; row += LANES) {
        V a = all(0), b = all(0), wrong = all(INFINITY);
        for (int k = 0; k < 8; k++) {
            const V part = size[k] * load(&GRID[k][row]);
            a += part;
            wrong = least_of(part, wrong);
            b += weight[k] * load(&GRID_SQUARED[k][row]);
        }
        store(&e.a[i][row], e.odd[i] ? a - 2 * wrong : a);
        store(&e.b[i][row], b);
    }
}

// The row that makes s B - 2 A smallest; of equal ones the first.
INLINE int best_row(const float* a, const float* b, float s) {
    V best = all(INFINITY), scale = all(s);
    I at = {}, place;
    for (int lane = 0; lane < LANES; lane++) place[lane] = lane;
    for (int row = 0; row < ROWS; row += LANES) {
        const V found = scale * load(b + row) - load(a + row);
        const I better = found < best;
        best = better ? found : best;
        at = better ? place : at;
        place += LANES;
    }
    int winner = 0;
    for (int lane = 1; lane < LANES; lane++)
        if (best[lane] < best[winner] || (best[lane] == best[winner] && at[lane] < at[winner])) winner = lane;
    return at[winner];
}

// A and B of 32 weights at scale s, each of its eights with its best row.
INLINE void at_scale(const Eights& e, int group, float s, float& a, float& b, uint8_t* row) {
    a = b = 0;
    for (int i = 4 * group; i < 4 * group + 4; i++) {
        const int best = best_row(e.a[i], e.b[i], s);
        a += 0.5f * e.a[i][best];
        b += e.b[i][best];
        row[i] = best;
    }
}

// The best scale of a group by itself, and B there.
INLINE void group_scale(const Eights& e, int group, const float* x, const float* w, float& scale, float& weight) {
    float energy = 0, total = 0, gain = 0;
    for (int i = 0; i < 32; i++) energy += w[i] * x[i] * x[i], total += w[i];
    const float spread = std::sqrt(energy / total);
    scale = weight = 0;
    for (int i = 0; spread > 0 && i < TUNING.factor_count; i++) {
        float a, b;
        uint8_t row[32];
        at_scale(e, group, spread * TUNING.factors[i], a, b, row);
        const float found = a > 0 ? a * a / b : 0;
        if (found > gain) gain = found, scale = a / b, weight = b;
    }
}

INLINE uint8_t sign_code(const Eights& e, int i, int row) {
    if (!e.odd[i]) return e.negative[i] & 127;
    int cheapest = 0;
    for (int k = 1; k < 8; k++)
        if (e.size[i][k] * GRID[k][row] < e.size[i][cheapest] * GRID[cheapest][row]) cheapest = k;
    return (e.negative[i] ^ 1 << cheapest) & 127;
}

static void codebook(const Source& source, float* d, uint8_t* level, uint8_t* row, uint8_t* sign) {
    static thread_local Eights e;
    for (size_t n = 0; n < source.blocks; n++, level += 8, row += 32, sign += 32) {
        const float* x = source.x + n * WEIGHTS;
        const float* w = source.importance + n % source.period * WEIGHTS;
        float scale[8], weight[8];
        for (int i = 0; i < 32; i++) weigh(e, i, x + 8 * i, w + 8 * i);
        for (int group = 0; group < 8; group++)
            group_scale(e, group, x + 32 * group, w + 32 * group, scale[group], weight[group]);
        d[n] = best_unit(scale, weight, 8, 0.5f, 15, 4, TUNING.codebook_shares, TUNING.codebook_share_count);
        for (int group = 0; group < 8; group++)
            level[group] = nearest(d[n] > 0 ? scale[group] * (4 / d[n]) - 0.5f : 0, 15);
        for (int round = 0; round < TUNING.rounds; round++) {
            float above = 0, below = 0;
            for (int group = 0; group < 8; group++) {
                const float m = (2 * level[group] + 1) / 8.0f;
                float a, b;
                at_scale(e, group, d[n] * m, a, b, row);
                above += m * a, below += m * m * b;
            }
            d[n] = half(std::max(above, 0.0f) / below);
        }
        for (int i = 0; i < 32; i++) sign[i] = sign_code(e, i, row[i]);
    }
}

// ---- line: x = a q - m over runs of weights, a run in each lane

template <int N> struct Run {  // LANES runs of N weights
    V x[N], w[N];
    V sum_w, sum_wx;
};

struct Sums {
    V q, qq, xq;
};

INLINE V inverse_of(V a) {
    const I usable = a > all(1e-30f);
    return either(usable, 1 / either(usable, a, all(1)), all(0));
}

template <int N, int MOST> INLINE Sums sums_of(const Run<N>& run, V a, V m) {
    const V inverse = inverse_of(a);
    Sums sums = {all(0), all(0), all(0)};
    for (int i = 0; i < N; i++) {
        const V q = clipped((run.x[i] + m) * inverse, MOST), wq = run.w[i] * q;
        sums.q += wq, sums.qq += wq * q, sums.xq += wq * run.x[i];
    }
    return sums;
}

template <int N> INLINE V error_of(const Run<N>& run, V a, V m, const Sums& s) {
    return a * a * s.qq - 2 * a * m * s.q + m * m * run.sum_w - 2 * a * s.xq + 2 * m * run.sum_wx;
}

template <int N> INLINE void fit(const Run<N>& run, const Sums& s, V& a, V& m) {
    const V zero = all(0), determinant = run.sum_w * s.qq - s.q * s.q;
    const I solvable = determinant > 1e-6f * run.sum_w * s.qq;
    const V safe = either(solvable, determinant, all(1));
    a = (run.sum_w * s.xq - s.q * run.sum_wx) / safe;
    m = (s.q * s.xq - s.qq * run.sum_wx) / safe;
    const V through_zero = over(most_of(s.xq, zero), s.qq, zero);
    const I on_line = solvable & (a > zero) & (m >= zero);
    const V constant = either(through_zero > zero, zero, most_of(-run.sum_wx / run.sum_w, zero));
    a = either(on_line, a, through_zero);
    m = either(on_line, m, constant);
}

// The best a and m of each run by itself, and sum w q^2 there.
template <int N, int MOST> INLINE void alone(const Run<N>& run, V& a, V& m, V& weight) {
    V low = all(0), high = run.x[0], error = all(0);
    for (int i = 0; i < N; i++) low = least_of(low, run.x[i]), high = most_of(high, run.x[i]);
    const V width = most_of(high - low, all(1e-30f));
    a = m = weight = all(0);
    for (int i = 0; i < TUNING.offset_count; i++) {
        V trial_a = width / all(MOST + TUNING.offsets[i]), trial_m = -low;
        for (int again = 0; again < 2; again++) {  // the second time on the line that the first one found
            const Sums s = sums_of<N, MOST>(run, trial_a, trial_m);
            fit(run, s, trial_a, trial_m);
            const V found = error_of(run, trial_a, trial_m, s);
            const I better = found < error * MARGIN;
            error = either(better, found, error), weight = either(better, s.qq, weight);
            a = either(better, trial_a, a), m = either(better, trial_m, m);
        }
    }
}

template <int N> INLINE void gather(Run<N>& run, const float* x, const float* w) {
    run.sum_w = run.sum_wx = all(0);
    for (int i = 0; i < N; i++) {
        for (int lane = 0; lane < LANES; lane++) run.x[i][lane] = x[lane * N + i], run.w[i][lane] = w[lane * N + i];
        run.sum_w += run.w[i], run.sum_wx += run.w[i] * run.x[i];
    }
}

// For each run the best of S - 1, S and S + 1, each with the M that goes with it.
template <int N, int MOST, int TOP> INLINE void beside(const Run<N>& run, float d, float dmin, V& scale, V& least) {
    V error = all(INFINITY), best_scale = scale, best_least = least;
    for (int step = -1; step <= 1; step++) {
        const V tried = clipped(scale + all(step), TOP), a = d * tried;
        const Sums before = sums_of<N, MOST>(run, a, dmin * least);
        const V wanted = (a * before.q - run.sum_wx) / run.sum_w;
        const V mins = clipped(wanted * all(dmin > 0 ? 1 / dmin : 0), TOP), m = dmin * mins;
        const V found = error_of(run, a, m, sums_of<N, MOST>(run, a, m));
        const I better = found < error;
        error = either(better, found, error);
        best_scale = either(better, tried, best_scale), best_least = either(better, mins, best_least);
    }
    scale = best_scale, least = best_least;
}

// Least squares for d and dmin of a whole block, gathered over its runs.
struct Refit {
    V dd, dm, mm, xd, xm;
};

INLINE float total(V v) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += v[lane];
    return sum;
}

INLINE void solve(const Refit& r, float& d, float& dmin) {
    const float dd = total(r.dd), dm = total(r.dm), mm = total(r.mm), xd = total(r.xd), xm = total(r.xm);
    const float determinant = dd * mm - dm * dm;
    float new_d = d, new_dmin = dmin;
    if (determinant > 1e-6f * dd * mm)
        new_d = (xd * mm + xm * dm) / determinant, new_dmin = (xd * dm + xm * dd) / determinant;
    else if (!(mm > 0))
        new_d = xd / (dd > 0 ? dd : 1);
    else if (!(dd > 0))
        new_dmin = xm / mm;
    if (new_d >= 0 && new_dmin >= 0) d = half(new_d), dmin = half(new_dmin);
}

template <int RUNS, int MOST, int TOP>
static void line(const Source& source, float* d, float* dmin, uint8_t* scales, uint8_t* leasts, uint8_t* codes) {
    constexpr int N = WEIGHTS / RUNS, GROUPS = RUNS / LANES;
    for (size_t n = 0; n < source.blocks; n++, scales += RUNS, leasts += RUNS, codes += WEIGHTS) {
        Run<N> run[GROUPS];
        alignas(32) float a[RUNS], m[RUNS], weight[RUNS], sum_w[RUNS];
        for (int g = 0; g < GROUPS; g++) {
            const size_t at = g * LANES * N;
            gather(run[g], source.x + n * WEIGHTS + at, source.importance + n % source.period * WEIGHTS + at);
            V best_a, best_m, best_weight;
            alone<N, MOST>(run[g], best_a, best_m, best_weight);
            store(a + g * LANES, best_a), store(m + g * LANES, best_m), store(weight + g * LANES, best_weight);
            store(sum_w + g * LANES, run[g].sum_w);
        }
        float unit = best_unit(a, weight, RUNS, 0, TOP, 1, TUNING.line_shares, TUNING.line_share_count);
        float unit_m = best_unit(m, sum_w, RUNS, 0, TOP, 1, TUNING.line_shares, TUNING.line_share_count);
        V scale[GROUPS], least[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            scale[g] = clipped(load(a + g * LANES) * all(unit > 0 ? 1 / unit : 0), TOP);
            least[g] = clipped(load(m + g * LANES) * all(unit_m > 0 ? 1 / unit_m : 0), TOP);
        }
        for (int round = 0; round < TUNING.rounds; round++) {
            Refit r = {};
            for (int g = 0; g < GROUPS; g++) {
                beside<N, MOST, TOP>(run[g], unit, unit_m, scale[g], least[g]);
                const Sums s = sums_of<N, MOST>(run[g], unit * scale[g], unit_m * least[g]);
                r.dd += scale[g] * scale[g] * s.qq, r.dm += scale[g] * least[g] * s.q;
                r.mm += least[g] * least[g] * run[g].sum_w;
                r.xd += scale[g] * s.xq, r.xm -= least[g] * run[g].sum_wx;
            }
            solve(r, unit, unit_m);
        }
        d[n] = unit, dmin[n] = unit_m;
        for (int g = 0; g < GROUPS; g++) {
            const V inverse = inverse_of(unit * scale[g]), lift = unit_m * least[g];
            for (int lane = 0; lane < LANES; lane++) {
                scales[g * LANES + lane] = scale[g][lane];
                leasts[g * LANES + lane] = least[g][lane];
            }
            for (int i = 0; i < N; i++) {
                const V q = clipped((run[g].x[i] + lift) * inverse, MOST);
                for (int lane = 0; lane < LANES; lane++) codes[(g * LANES + lane) * N + i] = q[lane];
            }
        }
    }
}
