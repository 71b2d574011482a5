// Products of 16 x 16 by 16 x 8 tiles of halves into float32, by 32 lanes. Lane l = 4 g + q holds of A the pairs
// (row g, column 2q), (g + 8, 2q), (g, 2q + 8), (g + 8, 2q + 8); of B, by columns, the pairs (rows 2q, column g) and
// (2q + 8, g); of C the pairs (row g, columns 2q, 2q + 1) and (g + 8, 2q).
#ifndef DS4_MMA
#define DS4_MMA
#include "lanes.cuh"

#if DS4_ARCH >= 800
#define DS4_MMA_PTX 1
#endif

DEVICE u32 pair_at(const __half* p) { return *(const u32*)p; }

// A's tile at `tile`, rows `stride` halves apart (a multiple of 8).
DEVICE void load_a(u32 (&a)[4], const __half* tile, int stride) {
    int lane = lane_id();
#if DS4_MMA_PTX
    u32 at = (u32)__cvta_generic_to_shared(tile + lane % 16 * stride + lane / 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at));
#else
    const __half* p = tile + lane / 4 * stride + lane % 4 * 2;
    a[0] = pair_at(p), a[1] = pair_at(p + 8 * stride), a[2] = pair_at(p + 8), a[3] = pair_at(p + 8 * stride + 8);
#endif
}

// Two tiles of B side by side, 16 columns, each a row of 16 halves at `tile`, `stride` apart.
DEVICE void load_b(u32 (&b)[4], const __half* tile, int stride) {
    int lane = lane_id();
#if DS4_MMA_PTX
    u32 at = (u32)__cvta_generic_to_shared(tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
#else
    const __half* p = tile + lane / 4 * stride + lane % 4 * 2;
    b[0] = pair_at(p), b[1] = pair_at(p + 8), b[2] = pair_at(p + 8 * stride), b[3] = pair_at(p + 8 * stride + 8);
#endif
}

// The same where `tile` holds B by rows: 16 rows of 16 columns, `stride` apart.
DEVICE void load_b_rows(u32 (&b)[4], const __half* tile, int stride) {
    int lane = lane_id();
#if DS4_MMA_PTX
    u32 at = (u32)__cvta_generic_to_shared(tile + (lane % 8 + lane / 8 % 2 * 8) * stride + lane / 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
#else
    const u16* p = (const u16*)tile + lane % 4 * 2 * stride + lane / 4;
    for (int i = 0; i < 4; ++i) {
        const u16* at = p + i % 2 * 8 * stride + i / 2 * 8;
        b[i] = at[0] | (u32)at[stride] << 16;
    }
#endif
}

DEVICE float2 halves(u32 pair) {
    union { u32 word; __half2 h; } u;
    u.word = pair;
    return __half22float2(u.h);
}

// c += a b.
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DS4_MMA_PTX
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    int lane = lane_id(), row = lane & ~3, column = lane % 4 * 8;
    for (int k = 0; k < 4; ++k) {
        float2 low = halves(lane_get(a[0], row + k)), low8 = halves(lane_get(a[1], row + k));
        float2 high = halves(lane_get(a[2], row + k)), high8 = halves(lane_get(a[3], row + k));
        for (int n = 0; n < 2; ++n) {
            float2 first = halves(lane_get(b0, column + 4 * n + k)), second = halves(lane_get(b1, column + 4 * n + k));
            c[n] += low.x * first.x + low.y * first.y + high.x * second.x + high.y * second.y;
            c[2 + n] += low8.x * first.x + low8.y * first.y + high8.x * second.x + high8.y * second.y;
        }
    }
#endif
}

#endif
