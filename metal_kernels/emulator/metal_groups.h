// What the threads of a group do together: barriers, SIMD-group operations, 8x8 matrices, atomics; then the qualifiers.
#pragma once
#ifdef MSL_WATCH
#include "hooks.h"
#define MSL_ATOMIC(p, reads, writes) msl_count_atomic(p, sizeof(*p), reads, writes)
#else
#define MSL_ATOMIC(p, reads, writes) (void)0
#endif

#define MSL_LINE int line = __builtin_LINE()  // of the caller: what an error names
#ifdef MSL_FLAT
#define MSL_DEVICE
#define MSL_GROUP
#else
#define MSL_DEVICE __attribute__((address_space(1)))
#define MSL_GROUP __attribute__((address_space(3)))
#endif

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags flags, MSL_LINE) { msl_tg_barrier(int(flags), line); }
inline void simdgroup_barrier(mem_flags flags, MSL_LINE) { msl_simd_barrier(int(flags), line); }
}  // namespace metal

namespace msl {
template <class T> struct lanes {
  const char* p; unsigned mask;
  T operator[](unsigned i) const { T r; __builtin_memcpy(&r, p + i * 64, sizeof(T)); return r; }
};
template <class T> inline lanes<T> share(const T& v, int op, int line) {
  static_assert(sizeof(T) <= 64, "value too wide for a SIMD-group exchange");
  const char* p = msl_exchange(&v, sizeof(T), op, line);
  return lanes<T>{p, msl_mask()};
}
template <class T> constexpr bool exchangeable() {
  return sizeof(typename vt<T>::elem) < 8 && !metal::is_same_v<T, bool>;
}
template <class T> inline T pick(const T& own, const lanes<T>& l, int from, int line) {
  if (from < 0 || from > 31) return own;  // Metal leaves lanes shifted past the edge unchanged
  if (!(l.mask >> from & 1)) msl_bad_lane("read from an inactive SIMD lane", from, line);
  return l[from];
}
template <class T, class F> inline T reduce(const lanes<T>& l, unsigned mask, F f) {
  T v[32];
  int n = 0;
  for (unsigned i = 0; i < 32; i++) if (mask >> i & 1) v[n++] = l[i];
  for (; n > 1; n = (n + 1) / 2)
    for (int i = 0; i < n / 2; i++) {
      v[i] = f(v[2 * i], v[2 * i + 1]);
      if (i == n / 2 - 1 && n & 1) v[i + 1] = v[n - 1];
    }
  return v[0];
}
template <class T, class F> inline T prefix(const lanes<T>& l, unsigned end, T start, F f) {
  for (unsigned i = 0; i < end; i++) if (l.mask >> i & 1) start = f(start, l[i]);
  return start;
}
// `from` is counted within runs of `modulo` lanes; what lies outside its own run comes from `filling`.
template <class T> inline T fill(T x, T filling, int from, int modulo, int op, int line) {
  auto own = share(x, op, line), other = share(filling, op + 1, line);
  int run = int(msl_lane()) & ~(modulo - 1);
  return pick(x, from >= 0 && from < modulo ? own : other, run + (from & (modulo - 1)), line);
}
}  // namespace msl

namespace metal {
// ---- SIMD-group and quad-group operations
#define MSL_CHECK(T) static_assert(msl::exchangeable<T>(), "Metal has no SIMD-group operation on 64-bit or bool values")
#define MSL_RED(NAME, OP, EXPR) template <class T> inline T NAME(T x, MSL_LINE) { MSL_CHECK(T); \
    auto l = msl::share(x, OP, line); return msl::reduce(l, l.mask, [](T a, T b) -> T { return EXPR; }); }
#define MSL_REDQ(NAME, OP, EXPR) template <class T> inline T NAME(T x, MSL_LINE) { MSL_CHECK(T); \
    auto l = msl::share(x, OP, line); unsigned quad = 15u << (msl_lane() & ~3u); \
    return msl::reduce(l, l.mask & quad, [](T a, T b) -> T { return EXPR; }); }
#define MSL_PREFIX(NAME, OP, MORE, START, EXPR) template <class T> inline T NAME(T x, MSL_LINE) { MSL_CHECK(T); \
    auto l = msl::share(x, OP, line); \
    return msl::prefix(l, msl_lane() + MORE, T(START), [](T a, T b) -> T { return EXPR; }); }
MSL_RED(simd_sum, 2, a + b) MSL_RED(simd_product, 3, a * b) MSL_RED(simd_max, 4, max(a, b))
MSL_RED(simd_min, 5, min(a, b)) MSL_RED(simd_and, 6, a & b) MSL_RED(simd_or, 7, a | b) MSL_RED(simd_xor, 8, a ^ b)
MSL_REDQ(quad_sum, 9, a + b) MSL_REDQ(quad_max, 10, max(a, b)) MSL_REDQ(quad_min, 11, min(a, b))
MSL_REDQ(quad_product, 12, a * b) MSL_REDQ(quad_and, 13, a & b) MSL_REDQ(quad_or, 14, a | b)
MSL_PREFIX(simd_prefix_inclusive_sum, 15, 1, 0, a + b) MSL_PREFIX(simd_prefix_exclusive_sum, 16, 0, 0, a + b)
MSL_PREFIX(simd_prefix_inclusive_product, 17, 1, 1, a * b) MSL_PREFIX(simd_prefix_exclusive_product, 18, 0, 1, a * b)

// MLX puts 64-bit and bool forms of simd_shuffle, _up and _down before every kernel; of the others there are none.
#define MSL_SHUF(NAME, OP, FROM, CHECK) template <class T> inline T NAME(T x, ushort n, MSL_LINE) { CHECK; \
    auto l = msl::share(x, OP, line); int me = int(msl_lane()); (void)me; return msl::pick(x, l, FROM, line); }
MSL_SHUF(simd_shuffle, 20, int(n) & 31, ) MSL_SHUF(simd_shuffle_xor, 21, me ^ (int(n) & 31), MSL_CHECK(T))
MSL_SHUF(simd_shuffle_down, 22, me + int(n), ) MSL_SHUF(simd_shuffle_up, 23, me - int(n), )
MSL_SHUF(simd_shuffle_rotate_down, 24, (me + int(n)) & 31, MSL_CHECK(T))
MSL_SHUF(simd_shuffle_rotate_up, 25, (me - int(n)) & 31, MSL_CHECK(T))
MSL_SHUF(simd_broadcast, 26, int(n) & 31, MSL_CHECK(T))
MSL_SHUF(quad_shuffle, 27, (me & ~3) | (int(n) & 3), MSL_CHECK(T))
MSL_SHUF(quad_shuffle_xor, 28, me ^ (int(n) & 3), MSL_CHECK(T))
MSL_SHUF(quad_broadcast, 29, (me & ~3) | (int(n) & 3), MSL_CHECK(T))
MSL_SHUF(quad_shuffle_down, 33, (me & 3) + int(n) < 4 ? me + int(n) : -1, MSL_CHECK(T))
MSL_SHUF(quad_shuffle_up, 34, (me & 3) - int(n) >= 0 ? me - int(n) : -1, MSL_CHECK(T))
template <class T> inline T simd_shuffle_and_fill_down(T x, T filling, ushort n, ushort modulo = 32, MSL_LINE) {
  return msl::fill(x, filling, int(msl_lane() & (modulo - 1)) + int(n), modulo, 36, line); }
template <class T> inline T simd_shuffle_and_fill_up(T x, T filling, ushort n, ushort modulo = 32, MSL_LINE) {
  return msl::fill(x, filling, int(msl_lane() & (modulo - 1)) - int(n), modulo, 38, line); }
template <class T> inline T simd_broadcast_first(T x, MSL_LINE) { MSL_CHECK(T);
  auto l = msl::share(x, 30, line); return l[__builtin_ctz(l.mask)]; }
struct simd_vote {
  ulong v;
  explicit simd_vote(ulong mask = 0) : v(mask) {}
  explicit operator ulong() const { return v; }
  bool all() const { return v == 0xffffffffu; }
  bool any() const { return v != 0; }
};
inline simd_vote simd_ballot(bool b, MSL_LINE) {
  auto l = msl::share(b, 31, line);
  ulong r = 0;
  for (int i = 0; i < 32; i++) if ((l.mask >> i & 1) && l[i]) r |= 1ul << i;
  return simd_vote(r);
}
inline simd_vote simd_active_threads_mask(MSL_LINE) { return simd_ballot(true, line); }
inline bool simd_all(bool b, MSL_LINE) { auto v = simd_ballot(b, line).v; return v == msl_mask(); }
inline bool simd_any(bool b, MSL_LINE) { return simd_ballot(b, line).any(); }
inline bool simd_is_first(MSL_LINE) {
  char z = 0; auto l = msl::share(z, 32, line); return msl_lane() == unsigned(__builtin_ctz(l.mask)); }

// ---- 8x8 SIMD-group matrices: each lane owns two neighbours of one row
template <class T, int C, int R> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "only 8x8");
  vec<T, 2> e;
  simdgroup_matrix() { __builtin_memset(&e, 0xff, sizeof e); }  // undefined in Metal: NaN
  explicit simdgroup_matrix(T diagonal) {
    e[0] = row() == col() ? diagonal : T(0);
    e[1] = row() == col() + 1 ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return e; }
  static int row() { unsigned l = msl_lane(); return (l >> 2 & 4) + (l >> 1 & 3); }
  static int col() { unsigned l = msl_lane(); return (l >> 1 & 4) + (l & 1) * 2; }
  static int owner(int r, int c) { return (r & 4) << 2 | (r & 3) << 1 | (c & 4) << 1 | (c >> 1 & 1); }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R = C> inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, C, R> m; m.e = v; return m; }
#define MSL_MATRIX_MEMORY(SPACE) \
  template <class T> inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const SPACE T* src, ulong stride = 8, \
                                                ulong2 o = 0, bool transposed = false) { \
    ulong r = d.row(), c = d.col(); \
    for (ulong k = 0; k < 2; k++) d.e[k] = transposed ? src[(o[1] + c + k) * stride + o[0] + r] \
                                                      : src[(o[1] + r) * stride + o[0] + c + k]; } \
  template <class T> inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& s, SPACE T* dst, ulong stride = 8, \
                                                 ulong2 o = 0, bool transposed = false) { \
    ulong r = s.row(), c = s.col(); \
    for (ulong k = 0; k < 2; k++) \
      dst[transposed ? (o[1] + c + k) * stride + o[0] + r : (o[1] + r) * stride + o[0] + c + k] = s.e[k]; }
MSL_MATRIX_MEMORY(MSL_DEVICE)
#ifndef MSL_FLAT
MSL_MATRIX_MEMORY(MSL_GROUP)
#endif
template <class D, class A, class B, class E> inline void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
    const simdgroup_matrix<E, 8, 8>& c, MSL_LINE) {
  struct both { vec<A, 2> a; vec<B, 2> b; } mine{a.e, b.e};
  auto l = msl::share(mine, 40, line);
  if (l.mask != 0xffffffffu)
    msl_bad_lane("SIMD-group matrix operation with inactive lane", __builtin_ctz(~l.mask), line);
  int r = d.row(), q = d.col();
  float s0 = float(c.e[0]), s1 = float(c.e[1]);
  for (int k = 0; k < 8; k++) {
    float x = float(l[d.owner(r, k)].a[k & 1]);
    auto y = l[d.owner(k, q)].b;
    s0 += x * float(y[0]);
    s1 += x * float(y[1]);
  }
  d.e[0] = D(s0);
  d.e[1] = D(s1);
}
template <class D, class A, class B> inline void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, MSL_LINE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), line); }

// ---- atomics, relaxed as Metal offers them
enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T v; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
template <class T> struct same { typedef T type; };  // a value that is not deduced, so that literals convert
#define MSL_RMW(NAME, EXPR, SPACE) \
  template <class T> inline T NAME(volatile SPACE atomic<T>* p, typename same<T>::type b, memory_order) { \
    T* q = msl::flat<T*>((SPACE atomic<T>*)p); T a, r; \
    MSL_ATOMIC(q, true, true); __atomic_load(q, &a, __ATOMIC_RELAXED); \
    do r = T(EXPR); while (!__atomic_compare_exchange(q, &a, &r, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); return a; }
#define MSL_ATOMICS(SPACE) \
  MSL_RMW(atomic_fetch_add_explicit, a + b, SPACE) MSL_RMW(atomic_fetch_sub_explicit, a - b, SPACE) \
  MSL_RMW(atomic_fetch_max_explicit, a > b ? a : b, SPACE) MSL_RMW(atomic_fetch_min_explicit, a < b ? a : b, SPACE) \
  MSL_RMW(atomic_fetch_and_explicit, a & b, SPACE) MSL_RMW(atomic_fetch_or_explicit, a | b, SPACE) \
  MSL_RMW(atomic_fetch_xor_explicit, a ^ b, SPACE) MSL_RMW(atomic_exchange_explicit, b, SPACE) \
  template <class T> inline void atomic_store_explicit(volatile SPACE atomic<T>* p, typename same<T>::type v, \
                                                       memory_order) { \
    T* q = msl::flat<T*>((SPACE atomic<T>*)p); MSL_ATOMIC(q, false, true); __atomic_store(q, &v, __ATOMIC_RELAXED); } \
  template <class T> inline T atomic_load_explicit(const volatile SPACE atomic<T>* p, memory_order) { \
    T* q = msl::flat<T*>((SPACE atomic<T>*)p); T r; \
    MSL_ATOMIC(q, true, false); __atomic_load(q, &r, __ATOMIC_RELAXED); return r; } \
  template <class T> inline bool atomic_compare_exchange_weak_explicit( \
      volatile SPACE atomic<T>* p, T* expected, typename same<T>::type v, memory_order, memory_order) { \
    T* q = msl::flat<T*>((SPACE atomic<T>*)p); MSL_ATOMIC(q, true, true); \
    return __atomic_compare_exchange(q, expected, &v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); }
MSL_ATOMICS(MSL_DEVICE)
#ifndef MSL_FLAT
MSL_ATOMICS(MSL_GROUP)
#endif
}  // namespace metal

// ---- the qualifiers, and what MLX itself puts before a custom kernel
#define device MSL_DEVICE
#define threadgroup MSL_GROUP
#ifdef MSL_FLAT
#define constant const
#else
#define constant const __attribute__((address_space(2)))
#endif
#define thread
#define kernel

using namespace metal;
template <class T, class U> inline T ceildiv(T a, U b) { return (a + b - 1) / b; }
namespace msl {  // the storage behind a threadgroup variable: guarded, undefined anew for each threadgroup
template <class T> inline threadgroup T& tg_var(int site, int line) {
  return *(threadgroup T*)msl_tg_alloc(site, sizeof(T), line); }
}
template <class I = int64_t> inline I elem_to_loc(I elem, constant int* shape, constant int64_t* strides, int ndim) {
  I at = 0;
  for (int d = ndim - 1; d >= 0 && elem > 0; --d) {
    at += (elem % shape[d]) * I(strides[d]);
    elem /= shape[d];
  }
  return at;
}
inline uint elem_to_loc(uint elem, constant int* shape, constant int64_t* strides, int ndim) {
  return elem_to_loc<uint>(elem, shape, strides, ndim); }
#define char2(...) (msl::make<char, 2>(__VA_ARGS__))
#define char3(...) (msl::make<char, 3>(__VA_ARGS__))
#define char4(...) (msl::make<char, 4>(__VA_ARGS__))
#define uchar2(...) (msl::make<uchar, 2>(__VA_ARGS__))
#define uchar3(...) (msl::make<uchar, 3>(__VA_ARGS__))
#define uchar4(...) (msl::make<uchar, 4>(__VA_ARGS__))
#define short2(...) (msl::make<short, 2>(__VA_ARGS__))
#define short3(...) (msl::make<short, 3>(__VA_ARGS__))
#define short4(...) (msl::make<short, 4>(__VA_ARGS__))
#define ushort2(...) (msl::make<ushort, 2>(__VA_ARGS__))
#define ushort3(...) (msl::make<ushort, 3>(__VA_ARGS__))
#define ushort4(...) (msl::make<ushort, 4>(__VA_ARGS__))
#define int2(...) (msl::make<int, 2>(__VA_ARGS__))
#define int3(...) (msl::make<int, 3>(__VA_ARGS__))
#define int4(...) (msl::make<int, 4>(__VA_ARGS__))
#define uint2(...) (msl::make<uint, 2>(__VA_ARGS__))
#define uint3(...) (msl::make<uint, 3>(__VA_ARGS__))
#define uint4(...) (msl::make<uint, 4>(__VA_ARGS__))
#define long2(...) (msl::make<long, 2>(__VA_ARGS__))
#define long3(...) (msl::make<long, 3>(__VA_ARGS__))
#define long4(...) (msl::make<long, 4>(__VA_ARGS__))
#define ulong2(...) (msl::make<ulong, 2>(__VA_ARGS__))
#define ulong3(...) (msl::make<ulong, 3>(__VA_ARGS__))
#define ulong4(...) (msl::make<ulong, 4>(__VA_ARGS__))
#define half2(...) (msl::make<half, 2>(__VA_ARGS__))
#define half3(...) (msl::make<half, 3>(__VA_ARGS__))
#define half4(...) (msl::make<half, 4>(__VA_ARGS__))
#define bfloat2(...) (msl::make<bfloat, 2>(__VA_ARGS__))
#define bfloat3(...) (msl::make<bfloat, 3>(__VA_ARGS__))
#define bfloat4(...) (msl::make<bfloat, 4>(__VA_ARGS__))
#define float2(...) (msl::make<float, 2>(__VA_ARGS__))
#define float3(...) (msl::make<float, 3>(__VA_ARGS__))
#define float4(...) (msl::make<float, 4>(__VA_ARGS__))
#pragma clang poison double goto try catch throw new delete virtual typeid dynamic_cast thread_local
