// Activations as 16-bit integers in two planes of bytes: x = scale (256 high + low), one scale for 256 of them. Products
// with 8-bit weights are then exact in integers, on units that multiply bytes: a vector's two planes are two rows of a
// 16 x 32 tile, so the second costs nothing where fewer than 9 vectors are multiplied. The error is 2^-16 of the largest.
#ifndef DS4_PLANES
#define DS4_PLANES
#include "mma.cuh"

// Kernels that are launched to overlap: the next one may begin once all blocks of this one have come here ...
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define LET_NEXT_BEGIN() asm volatile("griddepcontrol.launch_dependents;")
// ... and it sees nothing that this one writes before it has waited. Weights may be read earlier.
#define AWAIT_INPUTS() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define LET_NEXT_BEGIN()
#define AWAIT_INPUTS()
#endif

#define BLOCK 256             // activations of one scale
#define PAD 64                // bytes between rows of a plane, so that 8 rows fall into different banks
#define MOST_CODE 32512.f     // 127 * 256: the high byte stays within -127 .. 127

struct __align__(16) Quad { u32 w[4]; };
struct __align__(8) Duo { u32 w[2]; };

// Weights are read once: they need not stay in the first cache.
DEVICE Quad stream16(const u8* p) {
    Quad v;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
#else
    v = *(const Quad*)p;
#endif
    return v;
}

DEVICE u32 stream4(const u8* p) {
    u32 v;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
#else
    v = *(const u32*)p;
#endif
    return v;
}

DEVICE u16 stream2(const u8* p) {
    u16 v;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
#else
    v = *(const u16*)p;
#endif
    return v;
}

DEVICE float half_bits(u32 bits) {
    union { u16 word; __half h; } u;
    u.word = (u16)bits;
    return __half2float(u.h);
}

// sum + a . b over four signed bytes.
DEVICE int dot4(u32 a, u32 b, int sum) {
#if defined(__CUDA_ARCH__)
    return __dp4a((int)a, (int)b, sum);
#else
    for (int i = 0; i < 4; ++i) sum += (int)(signed char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i);
    return sum;
#endif
}

// c += a b over bytes: a 16 x 32, b 32 x 8. Lane l = 4 g + q holds of A bytes 4q .. 4q + 3 of rows g, g + 8, and again at
// 16 + 4q; of B the same of column g; of C what mma() holds.
DEVICE void mma_bytes(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DS4_MMA_PTX
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    int lane = lane_id(), row = lane & ~3, column = lane % 4 * 8;
    for (int k = 0; k < 4; ++k) {
        u32 low = lane_get(a[0], row + k), low8 = lane_get(a[1], row + k);
        u32 high = lane_get(a[2], row + k), high8 = lane_get(a[3], row + k);
        for (int n = 0; n < 2; ++n) {
            u32 first = lane_get(b0, column + 4 * n + k), second = lane_get(b1, column + 4 * n + k);
            c[n] = dot4(high, second, dot4(low, first, c[n]));
            c[2 + n] = dot4(high8, second, dot4(low8, first, c[2 + n]));
        }
    }
#endif
}

// Where the eight activations 8 octet ... of a row lie in a plane: in runs of 64, those that one lane multiplies together
// are neighbours, so that 16 bytes serve it for two blocks of 32.
DEVICE int plane_offset(int octet) { return octet / 8 * 64 + octet % 4 * 16 + octet / 4 % 2 * 8; }

DEVICE u32 four_bytes(int a, int b, int c, int d) {
    return (u32)(a & 255) | (u32)(b & 255) << 8 | (u32)(c & 255) << 16 | (u32)d << 24;
}

// 256 activations at x to both planes at `high` and `low`, whose scale is returned to every lane. All lanes.
DEVICE float stage_block(const float* x, u8* high, u8* low) {
    int lane = lane_id();
    float v[8], most = 0;
    *(float4*)v = ((const float4*)x)[2 * lane];
    *(float4*)(v + 4) = ((const float4*)x)[2 * lane + 1];
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(v[i]));
    most = lane_max(most);
    float inverse = most > 0 ? MOST_CODE / most : 0;
    int h[8], l[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int code = __float2int_rn(v[i] * inverse);
        h[i] = (code + 128) >> 8;
        l[i] = code - (h[i] << 8);
    }
    int at = plane_offset(lane);
    *(Duo*)(high + at) = Duo{{four_bytes(h[0], h[1], h[2], h[3]), four_bytes(h[4], h[5], h[6], h[7])}};
    *(Duo*)(low + at) = Duo{{four_bytes(l[0], l[1], l[2], l[3]), four_bytes(l[4], l[5], l[6], l[7])}};
    return most * (1 / MOST_CODE);
}

// The same as two rows of halves that add up to x.
DEVICE void stage_halves(const float* x, __half* high, __half* low) {
    int lane = lane_id();
    __half h[8], l[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float v = x[8 * lane + i];
        h[i] = __float2half_rn(v);
        l[i] = __float2half_rn(v - __half2float(h[i]));
    }
    *(Quad*)(high + 8 * lane) = *(Quad*)h;
    *(Quad*)(low + 8 * lane) = *(Quad*)l;
}

// v[i] of all lanes added up, for N values at once, N a power of two: the lanes l with l / (32 / N) = i get sum i.
template <int N>
DEVICE float lane_sums_of(float (&v)[N]) {
    int lane = lane_id(), mask = LANES / 2;
#pragma unroll
    for (int n = N / 2; n; n /= 2, mask /= 2) {
        bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            float given = upper ? v[i] : v[i + n], kept = upper ? v[i + n] : v[i];
            v[i] = kept + lane_xor(given, mask);
        }
    }
    for (; mask; mask /= 2) v[0] += lane_xor(v[0], mask);
    return v[0];
}

#endif
