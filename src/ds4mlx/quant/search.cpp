// The searches of codebook.py and affine.py, compiled: what the blocks of IQ2_XXS, Q2_K and Q4_K should hold.
//
// Single-threaded: encode.py calls them from several threads. Sums are in another order than NumPy's, so that where two
// choices are equally good, it may be the other one. compiled.py is the other side.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define INLINED inline __attribute__((always_inline))
#define INLINE static INLINED

namespace {

constexpr int WEIGHTS = 256;  // of a block
constexpr int ROWS = 256;     // of the codebook
constexpr float MARGIN = 1 + 1e-5f;  // of an error by which a later one must be better, as in affine.py

alignas(32) float GRID[8][ROWS];          // column by column: eight rows of the codebook are one vector
alignas(32) float GRID_SQUARED[8][ROWS];

// What both searches are told in numbers: set by compiled.py, from the constants of the Python files.
struct Tuning {
    float factors[16], line_shares[16], codebook_shares[16], offsets[16];
    int32_t factor_count, line_share_count, codebook_share_count, offset_count, rounds;
} TUNING;

// Weights, and the importance of their columns, which repeats after `period` blocks.
struct Source {
    const float *x, *importance;
    size_t blocks, period;
};

// To half precision, nearest even. Above 0, at most 65504.
INLINE float half(float value) {
    if (value < 6.103515625e-05f) return (value + 0.5f) - 0.5f;  // below the normal ones, their step is that of 0.5
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu;
    memcpy(&value, &bits, sizeof bits);
    return std::min(value, 65504.0f);
}

INLINE float nearest(float value, float most) { return std::nearbyint(std::min(std::max(value, 0.0f), most)); }

// The unit whose multiples round(value / unit - shift) + shift come nearest to the values; `top` of them are used.
INLINE float best_unit(const float* value, const float* weight, int count, float shift, float most, float per_unit,
                       const float* shares, int share_count) {
    const float top = *std::max_element(value, value + count);
    float error = INFINITY, best = 0;
    for (int i = 0; i < share_count; i++) {
        const float unit = half(top * shares[i] * per_unit / (most + shift));
        const float step = unit / per_unit, inverse = unit > 0 ? per_unit / unit : 0;
        float found = 0;
        for (int j = 0; j < count; j++) {
            const float off = value[j] - step * (nearest(value[j] * inverse - shift, most) + shift);
            found += weight[j] * off * off;
        }
        if (found < error) error = found, best = unit;
    }
    return best;
}

namespace narrow {
constexpr int LANES = 4;
#include "search_blocks.h"
}  // namespace narrow

// A processor with AVX2 has FMA. What is between is compiled for it whatever the rest is for.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace wide {
constexpr int LANES = 8;
#include "search_blocks.h"
}  // namespace wide
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

bool has_wide() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
namespace wide = narrow;
bool has_wide() { return false; }
#endif

}  // namespace

extern "C" {

int32_t ds4mlx_search_version() { return 1; }

// grid: the codebook, i8 [256, 8].
void ds4mlx_search_prepare(const int8_t* grid, const Tuning* tuning) {
    for (int row = 0; row < ROWS; row++)
        for (int k = 0; k < 8; k++) {
            GRID[k][row] = grid[8 * row + k];
            GRID_SQUARED[k][row] = GRID[k][row] * GRID[k][row];
        }
    TUNING = *tuning;
}

// d [n]; level [n, 8], row and sign [n, 32] u8.
void ds4mlx_search_codebook(const Source* source, int32_t simd, float* d, uint8_t* level, uint8_t* row, uint8_t* sign) {
    (simd && has_wide() ? wide::codebook : narrow::codebook)(*source, d, level, row, sign);
}

// runs: 16 for Q2_K, 8 for Q4_K. d, dmin [n]; scale, least [n, runs], code [n, 256] u8.
void ds4mlx_search_line(const Source* source, int32_t simd, int32_t runs, float* d, float* dmin, uint8_t* scale,
                        uint8_t* least, uint8_t* code) {
    const bool fast = simd && has_wide();
    if (runs == 16)
        (fast ? wide::line<16, 3, 15> : narrow::line<16, 3, 15>)(*source, d, dmin, scale, least, code);
    else
        (fast ? wide::line<8, 15, 63> : narrow::line<8, 15, 63>)(*source, d, dmin, scale, least, code);
}

}
