// Activations as 16-bit integers in two planes of bytes: x = scale (256 high + low), one scale for 256 of them.
// Products with 8-bit weights are then exact in integers, on units that multiply bytes: a vector's two planes are two
// rows of a 16 x 32 tile, so the second costs nothing where fewer than 9 vectors are multiplied. The error is 2^-16 of
// the largest.
#ifndef DS4_PLANES
#define DS4_PLANES
#include "mma.cuh"

#define BLOCK 256             // activations of one scale
#define PAD 64                // bytes between rows of a plane, so that 8 rows fall into different banks
#define MOST_CODE 32512.f     // 127 * 256: the high byte stays within -127 .. 127

struct __align__(16) Quad { u32 w[4]; };
struct __align__(8) Duo { u32 w[2]; };

// Weights are read once: they need not stay in the first cache.
DEVICE Quad stream16(const u8* p) {
    Quad v;
#if DS4_ARCH
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
#else
    v = *(const Quad*)p;
#endif
    return v;
}

DEVICE u32 stream4(const u8* p) {
    u32 v;
#if DS4_ARCH
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
#else
    v = *(const u32*)p;
#endif
    return v;
}

DEVICE u16 stream2(const u8* p) {
    u16 v;
#if DS4_ARCH
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

// 16 bytes to shared memory, there when the copies of their group have been awaited.
DEVICE void copy16(void* to, const void* from) {
#if DS4_MMA_PTX
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *(Quad*)to = *(const Quad*)from;
#endif
}
DEVICE void copy8(void* to, const void* from) {
#if DS4_MMA_PTX
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *(Duo*)to = *(const Duo*)from;
#endif
}
DEVICE void copies_end() {
#if DS4_MMA_PTX
    asm volatile("cp.async.commit_group;");
#endif
}
// All but the last N groups of this thread's copies have arrived.
template <int N>
DEVICE void await_copies() {
#if DS4_MMA_PTX
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
}

// What the 32 lanes have written to shared memory is seen by all of them.
DEVICE void lanes_meet() {
#if defined(__HIP__)
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
#else
    __syncwarp();
#endif
}

// The bytes of two words that the first four nibbles of `which` name; none of them is above 7.
DEVICE u32 bytes_of(u32 low, u32 high, u32 which) {
#if DS4_ARCH
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "r"(which));
    return v;
#else
    return __byte_perm(low, high, which);
#endif
}

// sum + a . b over four signed bytes.
DEVICE int dot4(u32 a, u32 b, int sum) {
#if DS4_ARCH
    return __dp4a((int)a, (int)b, sum);
#else
    for (int i = 0; i < 4; ++i) sum += (int)(signed char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i);
    return sum;
#endif
}

// The same where a's bytes have no sign.
DEVICE int dot4_unsigned(u32 a, u32 b, int sum) {
#if DS4_ARCH
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sum));
    return d;
#else
    for (int i = 0; i < 4; ++i) sum += (int)(a >> 8 * i & 255) * (int)(signed char)(b >> 8 * i);
    return sum;
#endif
}

// c += a b over bytes: a 16 x 32, b 32 x 8. Lane l = 4 g + q holds of A bytes 4q .. 4q + 3 of rows g, g + 8, and again
// at 16 + 4q; of B the same of column g; of C what mma() holds.
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

// The same where A's bytes have no sign.
DEVICE void mma_bytes_unsigned(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DS4_MMA_PTX
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    u32 low[4], high[4] = {};
    for (int i = 0; i < 4; ++i) low[i] = a[i] & 0x7f7f7f7f, high[i] = a[i] >> 7 & 0x01010101;
    int over[4] = {};
    mma_bytes(c, low, b0, b1);
    mma_bytes(over, high, b0, b1);
    for (int i = 0; i < 4; ++i) c[i] += over[i] * 128;
#endif
}

// Where the eight activations 8 octet ... of a row lie in a plane: in runs of 64, those that one lane multiplies
// together are neighbours, so that 16 bytes serve it for two blocks of 32.
DEVICE int plane_offset(int octet) { return octet / 8 * 64 + octet % 4 * 16 + octet / 4 % 2 * 8; }

// A lane's eight of 256 activations, as octets of both planes; the scale is that of the 256, the sum that of the codes.
struct Octets { Duo high, low; float scale; int sum; };

// The bytes that end the four words, or those before them.
DEVICE u32 last_bytes(const u32* w) { return bytes_of(bytes_of(w[0], w[1], 0x40), bytes_of(w[2], w[3], 0x40), 0x5410); }
DEVICE u32 next_bytes(const u32* w) { return bytes_of(bytes_of(w[0], w[1], 0x51), bytes_of(w[2], w[3], 0x51), 0x5410); }

DEVICE Octets encode(const float (&v)[8]) {
    const float ones = 12582912.f;  // 3 2^22: ones are its last bits
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(v[i]));
    most = __int_as_float((int)lanes_max((u32)__float_as_int(most)));   // not negative: its bits are in its order
    float inverse = most > 0 ? __fdividef(MOST_CODE, most) : 0;
    u32 code[8], above[8], sum = 0;     // above: 128 more, so that its second byte is the high one
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        code[i] = (u32)__float_as_int(fmaf(v[i], inverse, ones));
        above[i] = (u32)__float_as_int(fmaf(v[i], inverse, ones + 128));
        sum += code[i] - (u32)__float_as_int(ones);
    }
    return Octets{Duo{{next_bytes(above), next_bytes(above + 4)}}, Duo{{last_bytes(code), last_bytes(code + 4)}},
                  most * (1 / MOST_CODE), (int)sum};
}

// keep(i, v) for blocks of 256 activations i < count, read at from(i), shared out among groups of lanes; v: a lane's
// eight. Several blocks are on their way at once, for each takes as long as memory is far.
template <int AHEAD, class From, class Keep>
DEVICE void for_blocks(int count, From from, Keep keep) {
    int lane = lane_id(), groups = blockDim.x / LANES;
    for (int first = group_id(); first < count; first += AHEAD * groups) {
        float v[AHEAD][8];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const float4* x = (const float4*)from(min(first + j * groups, count - 1));
            *(float4*)v[j] = x[2 * lane];
            *(float4*)(v[j] + 4) = x[2 * lane + 1];
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
            if (first + j * groups < count) keep(first + j * groups, v[j]);
    }
}

// Eight activations as two rows of halves that add up to them.
DEVICE void store_halves(const float (&v)[8], __half* high, __half* low) {
    __align__(16) __half h[8];
    __align__(16) __half l[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        h[i] = __float2half_rn(v[i]);
        l[i] = __float2half_rn(v[i] - __half2float(h[i]));
    }
    *(Quad*)high = *(Quad*)h;
    *(Quad*)low = *(Quad*)l;
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
