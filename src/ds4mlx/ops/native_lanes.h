// Eight float32 lanes, V, and the few things that the products do with them: once for each instruction set.
//
// Every namespace has the same names, so that native_products.h reads the same in all of them:
//   V, Codes                            8 floats; 8 small integers, a lane each
//   load store all add mul fma         fma(a, b, c) = a b + c
//   flip(a, p)                          a with the sign bits at p changed: u32 [8], 0 or 1 << 31
//   sum sum4                            of the lanes of one V; of four, to four neighbouring floats
//   signed8 codes8 bits<shift, mask>    8 bytes to lanes; a bit field of each code, as floats
//   half halves bhalves                 an f16; 8 f16; 8 bf16
//   MOST_DOTS                           tokens, 1 or 4, that are multiplied with while a weight is in a register
//   fp4                                 16 bytes to 32 E2M1 numbers, doubled: low nibbles first, then high ones
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#define DS4MLX_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define DS4MLX_NEON 1
#include <arm_neon.h>
#endif

#define INLINED inline __attribute__((always_inline))
#define INLINE static INLINED

INLINE float of_bits(uint32_t word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

// 2 x E2M1 by code. Doubled, they are integers.
alignas(16) static const int8_t FP4_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// What is between is compiled for AVX2 whatever the rest is for. A processor with AVX2 has F16C.
#if defined(__clang__)
#define AVX2_BEGIN _Pragma("clang attribute push(__attribute__((target(\"avx2,fma,f16c\"))), apply_to = function)")
#define AVX2_END _Pragma("clang attribute pop")
#else
#define AVX2_BEGIN _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma,f16c\")")
#define AVX2_END _Pragma("GCC pop_options")
#endif

namespace plain {

constexpr int MOST_DOTS = 1;
struct V { float lane[8]; };
struct Codes { uint8_t lane[8]; };

template <class F> INLINE V each(F f) {
    V v;
    for (int i = 0; i < 8; i++) v.lane[i] = f(i);
    return v;
}

INLINE V load(const float* p) { return each([=](int i) { return p[i]; }); }
INLINE void store(float* p, V v) { memcpy(p, v.lane, sizeof v.lane); }
INLINE V all(float a) { return each([=](int) { return a; }); }
INLINE V add(V a, V b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
INLINE V mul(V a, V b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
INLINE V fma(V a, V b, V c) { return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; }); }

INLINE V flip(V a, const uint32_t* p) {
    uint32_t words[8];
    memcpy(words, a.lane, sizeof words);
    for (int i = 0; i < 8; i++) words[i] ^= p[i];
    memcpy(a.lane, words, sizeof words);
    return a;
}


INLINE float sum(V a) {
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) a.lane[i] += a.lane[i + half];
    return a.lane[0];
}

INLINE void sum4(float* out, V a, V b, V c, V d) {
    out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}

INLINE V signed8(const uint8_t* p) { return each([=](int i) { return float(int8_t(p[i])); }); }

INLINE Codes codes8(const uint8_t* p) {
    Codes c;
    memcpy(c.lane, p, sizeof c.lane);
    return c;
}

template <int shift, int mask> INLINE V bits(Codes c) {
    return each([&](int i) { return float(c.lane[i] >> shift & mask); });
}

INLINE float half(const uint8_t* p) {
    const uint32_t h = p[0] | uint32_t(p[1]) << 8, word = (h & 0x7fff) << 13, sign = (h & 0x8000) << 16;
    const float finite = of_bits(word | sign) * 0x1p112f;  // exponents differ by 112: right for subnormal numbers too
    return (h & 0x7c00) == 0x7c00 ? of_bits(word | sign | 0x7f800000) : finite;
}

INLINE V halves(const uint8_t* p) { return each([=](int i) { return half(p + 2 * i); }); }

INLINE V bhalves(const uint8_t* p) {
    return each([=](int i) { return of_bits(uint32_t(p[2 * i] | p[2 * i + 1] << 8) << 16); });
}

INLINE void fp4(const uint8_t* p, V out[4]) {
    for (int i = 0; i < 4; i++)
        out[i] = each([=](int j) { return float(FP4_DOUBLED[p[8 * (i % 2) + j] >> 4 * (i / 2) & 15]); });
}

}  // namespace plain

#ifdef DS4MLX_AVX2
AVX2_BEGIN
namespace avx2 {

constexpr int MOST_DOTS = 4;
using V = __m256;
using Codes = __m256i;

INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, V v) { _mm256_storeu_ps(p, v); }
INLINE V all(float a) { return _mm256_set1_ps(a); }
INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V flip(V a, const uint32_t* p) { return _mm256_xor_ps(a, _mm256_loadu_ps(reinterpret_cast<const float*>(p))); }

INLINE float sum(V a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE void sum4(float* out, V a, V b, V c, V d) {
    const V s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

INLINE __m128i bytes8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
INLINE __m128i bytes16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
INLINE V widened(__m128i signed_bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(signed_bytes)); }
INLINE V signed8(const uint8_t* p) { return widened(bytes8(p)); }
INLINE Codes codes8(const uint8_t* p) { return _mm256_cvtepu8_epi32(bytes8(p)); }

template <int shift, int mask> INLINE V bits(Codes c) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(c, shift), _mm256_set1_epi32(mask)));
}

INLINE float half(const uint8_t* p) { return _cvtsh_ss(uint16_t(p[0] | p[1] << 8)); }
INLINE V halves(const uint8_t* p) { return _mm256_cvtph_ps(bytes16(p)); }

INLINE V bhalves(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bytes16(p)), 16));
}

INLINE void fp4(const uint8_t* p, V out[4]) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(FP4_DOUBLED)), low = _mm_set1_epi8(15);
    const __m128i packed = bytes16(p);
    const __m128i first = _mm_shuffle_epi8(table, _mm_and_si128(packed, low));
    const __m128i last = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(packed, 4), low));
    out[0] = widened(first), out[1] = widened(_mm_srli_si128(first, 8));
    out[2] = widened(last), out[3] = widened(_mm_srli_si128(last, 8));
}

}  // namespace avx2
AVX2_END
#endif

#ifdef DS4MLX_NEON
namespace neon {

constexpr int MOST_DOTS = 4;
struct V { float32x4_t low, high; };
struct Codes { uint32x4_t low, high; };

INLINE V load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
INLINE void store(float* p, V v) { vst1q_f32(p, v.low), vst1q_f32(p + 4, v.high); }
INLINE V all(float a) { return {vdupq_n_f32(a), vdupq_n_f32(a)}; }
INLINE V add(V a, V b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
INLINE V mul(V a, V b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
INLINE V fma(V a, V b, V c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }

INLINE float32x4_t flip4(float32x4_t a, const uint32_t* p) {
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a), vld1q_u32(p)));
}

INLINE V flip(V a, const uint32_t* p) { return {flip4(a.low, p), flip4(a.high, p + 4)}; }
INLINE float sum(V a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }

INLINE void sum4(float* out, V a, V b, V c, V d) {
    const float32x4_t ab = vpaddq_f32(vaddq_f32(a.low, a.high), vaddq_f32(b.low, b.high));
    const float32x4_t cd = vpaddq_f32(vaddq_f32(c.low, c.high), vaddq_f32(d.low, d.high));
    vst1q_f32(out, vpaddq_f32(ab, cd));
}

INLINE V widened(int8x8_t bytes) {
    const int16x8_t words = vmovl_s8(bytes);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(words)))};
}

INLINE V signed8(const uint8_t* p) { return widened(vreinterpret_s8_u8(vld1_u8(p))); }

INLINE Codes codes8(const uint8_t* p) {
    const uint16x8_t words = vmovl_u8(vld1_u8(p));
    return {vmovl_u16(vget_low_u16(words)), vmovl_u16(vget_high_u16(words))};
}

template <int shift, int mask> INLINE float32x4_t bits4(uint32x4_t c) {
    if constexpr (shift > 0) c = vshrq_n_u32(c, shift);
    return vcvtq_f32_u32(vandq_u32(c, vdupq_n_u32(mask)));
}

template <int shift, int mask> INLINE V bits(Codes c) {
    return {bits4<shift, mask>(c.low), bits4<shift, mask>(c.high)};
}

INLINE uint16x4_t words4(const uint8_t* p) { return vreinterpret_u16_u8(vld1_u8(p)); }
INLINE float32x4_t halves4(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(words4(p))); }
INLINE V halves(const uint8_t* p) { return {halves4(p), halves4(p + 8)}; }

INLINE float half(const uint8_t* p) {
    const uint16x4_t word = vdup_n_u16(uint16_t(p[0] | p[1] << 8));
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(word)), 0);
}

INLINE V bhalves(const uint8_t* p) {
    return {vreinterpretq_f32_u32(vshll_n_u16(words4(p), 16)), vreinterpretq_f32_u32(vshll_n_u16(words4(p + 8), 16))};
}

INLINE void fp4(const uint8_t* p, V out[4]) {
    const int8x16_t table = vld1q_s8(FP4_DOUBLED);
    const uint8x16_t packed = vld1q_u8(p);
    const int8x16_t first = vqtbl1q_s8(table, vandq_u8(packed, vdupq_n_u8(15)));
    const int8x16_t last = vqtbl1q_s8(table, vshrq_n_u8(packed, 4));
    out[0] = widened(vget_low_s8(first)), out[1] = widened(vget_high_s8(first));
    out[2] = widened(vget_low_s8(last)), out[3] = widened(vget_high_s8(last));
}

}  // namespace neon
#endif
