// The quantiser's searches on random weights, wide vectors against narrow ones: for builds that Python cannot load, as
// for another processor or with sanitizers. Prints what is lost of the weights' energy; exits with the number of
// failures.
#include "../../src/ds4mlx/quant/search.cpp"

#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr size_t BLOCKS = 64, PERIOD = 4;
std::mt19937 rng(3);
int8_t grid[8 * ROWS];
std::vector<float> x(BLOCKS * WEIGHTS), w(PERIOD * WEIGHTS);

void prepare() {
    Tuning tuning = {};
    const int8_t sizes[] = {8, 8, 8, 25, 43};
    for (auto& value : grid) value = sizes[rng() % 5];
    for (int i = 0; i < 7; i++) tuning.factors[i] = 0.35f * std::pow(3.7f, i / 6.0f) / 15;
    for (int i = 0; i < 7; i++) tuning.line_shares[i] = 0.85f + 0.25f * i / 6;
    for (int i = 0; i < 9; i++) tuning.codebook_shares[i] = 0.75f + 0.45f * i / 8;
    for (int i = 0; i < 8; i++) tuning.offsets[i] = 0.9f - 1.8f * i / 7;
    tuning.factor_count = tuning.line_share_count = 7, tuning.codebook_share_count = 9, tuning.offset_count = 8;
    tuning.rounds = 2;
    ds4mlx_search_prepare(grid, &tuning);
    std::normal_distribution<float> normal;
    for (auto& value : x) value = 0.02f * normal(rng);
    for (auto& value : w) value = std::exp(normal(rng));
    std::fill(x.begin(), x.begin() + WEIGHTS, 0.0f);                     // nothing
    std::fill(x.begin() + WEIGHTS, x.begin() + 2 * WEIGHTS, -0.02f);     // a constant
    x[2 * WEIGHTS] = 1e4f;                                               // an outlier
    for (int i = 0; i < WEIGHTS; i++) x[3 * WEIGHTS + i] *= 1e-30f;      // far below half precision
}

// Share of the energy that is lost, weighed; of blocks after the odd ones.
double lost(const std::vector<float>& y) {
    double error = 0, energy = 0;
    for (size_t i = 4 * WEIGHTS; i < x.size(); i++) {
        const double weight = w[i % w.size()], off = y[i] - x[i];
        if (!std::isfinite(y[i])) return INFINITY;
        error += weight * off * off, energy += weight * x[i] * x[i];
    }
    return error / energy;
}

double codebook_loss(int simd) {
    const Source source = {x.data(), w.data(), BLOCKS, PERIOD};
    std::vector<float> d(BLOCKS), y(x.size());
    std::vector<uint8_t> level(8 * BLOCKS), row(32 * BLOCKS), sign(32 * BLOCKS);
    ds4mlx_search_codebook(&source, simd, d.data(), level.data(), row.data(), sign.data());
    for (size_t i = 0; i < x.size(); i++) {
        const int code = sign[i / 8], bit = i % 8 < 7 ? code >> i % 8 & 1 : __builtin_parity(code);
        const float scale = d[i / WEIGHTS] * (2 * level[i / 32] + 1) / 8;
        if (level[i / 32] > 15 || code > 127) return INFINITY;
        y[i] = scale * grid[8 * row[i / 8] + i % 8] * (bit ? -1 : 1);
    }
    return lost(y);
}

double line_loss(int simd, int runs, int most_code, int most_scale) {
    const Source source = {x.data(), w.data(), BLOCKS, PERIOD};
    std::vector<float> d(BLOCKS), dmin(BLOCKS), y(x.size());
    std::vector<uint8_t> scale(runs * BLOCKS), least(runs * BLOCKS), code(x.size());
    ds4mlx_search_line(&source, simd, runs, d.data(), dmin.data(), scale.data(), least.data(), code.data());
    for (size_t i = 0; i < x.size(); i++) {
        const size_t run = i / (WEIGHTS / runs);
        if (scale[run] > most_scale || least[run] > most_scale || code[i] > most_code) return INFINITY;
        y[i] = d[i / WEIGHTS] * scale[run] * code[i] - dmin[i / WEIGHTS] * least[run];
    }
    return lost(y);
}

}  // namespace

int main() {
    prepare();
    int failures = 0;
    for (int simd = 0; simd < 2; simd++) {
        const double found[] = {codebook_loss(simd), line_loss(simd, 16, 3, 15), line_loss(simd, 8, 15, 63)};
        const double most[] = {0.13, 0.06, 0.0045};  // a codebook at random is worse than the real one
        for (int i = 0; i < 3; i++) failures += !(found[i] < most[i]);
        std::printf("%s: %.5f %.5f %.6f\n", simd && has_wide() ? "wide" : "narrow", found[0], found[1], found[2]);
    }
    std::printf("%d failures\n", failures);
    return failures;
}
