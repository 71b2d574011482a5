// The products in vectors against those in plain C++, on random blocks of every kind: for builds that Python cannot
// load, as for another processor or with sanitizers. Prints what differs; exits with the number of differences.
#include "../../src/ds4mlx/ops/native.cpp"

#include <cstdio>
#include <random>

namespace {

struct Kind {
    int32_t id;
    size_t weights, bytes;
    std::vector<size_t> high;  // bytes of a block that hold the exponent of a half
};

const Kind KINDS[] = {{0, 1, 4, {3}},      {1, 1, 2, {1}},     {8, 32, 34, {1}},  {10, 256, 84, {81, 83}},
                      {12, 256, 144, {1, 3}}, {16, 256, 66, {1}}, {30, 1, 2, {1}}, {39, 32, 17, {}}};

std::mt19937 rng(3);

std::vector<uint8_t> random_rows(const Kind& kind, size_t bytes) {
    std::vector<uint8_t> raw(bytes);
    for (auto& byte : raw) byte = uint8_t(rng());
    for (size_t block = 0; block < bytes; block += kind.bytes) {
        for (size_t high : kind.high) raw[block + high] = uint8_t(0x38 + raw[block + high] % 8);
        if (kind.id == 39) raw[block] = uint8_t(raw[block] % 16 ? 120 + raw[block] % 8 : raw[block] / 16 % 3);
    }
    return raw;
}

// Sums of 768 products in another order.
bool near(const std::vector<float>& found, const std::vector<float>& expected) {
    float largest = 0, difference = 0;
    for (size_t i = 0; i < found.size(); i++) {
        if (!std::isfinite(found[i]) || !std::isfinite(expected[i])) return false;
        largest = std::max(largest, std::fabs(expected[i]));
        difference = std::max(difference, std::fabs(found[i] - expected[i]));
    }
    return largest > 0 && difference <= 3e-6f * largest;
}

bool same(const Kind& kind, size_t tokens) {
    constexpr size_t N = 71, K = 768, S = 2;
    const size_t row_bytes = K / kind.weights * kind.bytes;
    const std::vector<uint8_t> raw = random_rows(kind, N * row_bytes);
    std::vector<float> x(tokens * K), weight(tokens * S, 1);
    for (auto& value : x) value = std::normal_distribution<float>(0, 0.1f)(rng);
    const std::vector<int32_t> selected(tokens * S, 0);
    const Stack w{kind.id, raw.data(), 1, N, K, row_bytes};
    std::vector<float> results[2];
    for (int simd = 0; simd < 2; simd++) {
        const Runner with{simd, 1 + 2 * simd};
        std::vector<float> y(tokens * N), mid(tokens * S * N);
        ds4mlx_matmul(&with, &w, tokens, x.data(), K, 0, y.data(), N, 0);
        ds4mlx_gate_up(&with, &w, &w, x.data(), tokens, S, selected.data(), weight.data(), 1e30f, mid.data(), S);
        if (simd == 0 && ds4mlx_gate_up(&with, &w, &w, x.data(), 0, S, nullptr, nullptr, 1, nullptr, S)) return false;
        results[simd] = y;
        if (simd) {  // twice y, the other half by way of an expert
            ds4mlx_down(&with, &w, x.data(), 1, tokens, 1, selected.data(), y.data());
            for (float& value : y) value /= 2;
        }
        if (simd && !near(y, results[0])) return false;
        results[simd].insert(results[simd].end(), mid.begin(), mid.end());
    }
    return near(results[1], results[0]);
}

}  // namespace

int main() {
    int8_t grid[256 * 8], signs[128 * 8];
    for (auto& value : grid) value = int8_t(1 + rng() % 43);
    for (auto& value : signs) value = rng() % 2 ? 1 : -1;
    ds4mlx_codebook(grid, signs);
    int differences = 0;
    for (const Kind& kind : KINDS)
        for (size_t tokens : {1, 2, 3, 4, 5, 7, 9, 33})
            if (!same(kind, tokens)) differences++, printf("type %d, %zu tokens\n", kind.id, tokens);
    printf("%s against plain C++: %d differences\n", ds4mlx_instructions(1), differences);
    return differences;
}
