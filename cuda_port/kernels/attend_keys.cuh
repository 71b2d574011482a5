// What attends: keys and queries of a token, where they lie and on their way into shared memory.
#ifndef DS4_ATTEND_KEYS
#define DS4_ATTEND_KEYS
#include "cluster.cuh"
#include "mma.cuh"
#include "rows.cuh"
#include "sinkhorn.cuh"

#define LOG2E 1.4426950408889634f

struct Keys {
    const u8 *ring, *fresh, *rows;     // the window of positions before `start`, rows from there on; compressed rows
    const int *pages, *chosen;
    int start, position, near, count;  // `near` positions of the window, then rows: `count` keys

    DEVICE Keys(const u8* ring, const u8* fresh, const u8* rows, const int* pages, const int* chosen, int picks,
                int start, int position)
        : ring(ring), fresh(fresh), rows(rows), pages(pages), chosen(chosen), start(start), position(position) {
        near = min(position + 1, WIDTH);
        count = near;
#if RATIO
        int seen = (position + 1) / RATIO;
        if (CHOSEN && seen > picks) count += picks;
        else count += seen, this->chosen = 0;
#endif
    }

    // Whether key i of a step was there before it. What earlier steps have written is there before this one begins, for
    // copies lie between them.
    DEVICE bool old(int i) const {
#if RATIO
        return i < near - 1 || i >= near && !chosen && i - near < position / RATIO;
#else
        return i < near - 1;
#endif
    }

    DEVICE const u8* at(int i) const {
        if (i < near) {
            int p = position - near + 1 + i;
            return p < start ? ring + (size_t)(p % RING) * ROW : fresh + (size_t)(p - start) * ROW;
        }
#if RATIO
        int c = CHOSEN && chosen ? chosen[i - near] : i - near;
        return rows + ((size_t)pages[c / PAGE_ROWS] * PAGE_ROWS + c % PAGE_ROWS) * ROW;
#else
        return ring;
#endif
    }
};

// A head's query: divided by its rms, rotated, times `by`. 32 lanes; channels in fours.
#define QUADS ((D / 4 + LANES - 1) / LANES)
DEVICE void load_query(const float* q, float4 (&v)[QUADS]) {
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        int c = 4 * (LANES * i + lane_id());
        v[i] = c < D ? *(const float4*)(q + c) : make_float4(0, 0, 0, 0);
    }
}

DEVICE void query(float4 (&v)[QUADS], const float* cosine, const float* sine, float eps, float by) {
    int lane = lane_id();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
        sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    float r = rsqrtf(lane_sum(sum) / D + eps) * by;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        int c = 4 * (LANES * i + lane), pair = (c - (D - R)) / 2;
        v[i].x *= r, v[i].y *= r, v[i].z *= r, v[i].w *= r;
        if (c < D - R || c >= D) continue;
        float c0 = cosine[pair], s0 = sine[pair], c1 = cosine[pair + 1], s1 = sine[pair + 1];
        v[i] = make_float4(v[i].x * c0 - v[i].y * s0, v[i].x * s0 + v[i].y * c0, v[i].z * c1 - v[i].w * s1,
                           v[i].z * s1 + v[i].w * c1);
    }
}

// A pair of channels (c, c + 1) of an output, turned back where they are rotary.
DEVICE float2 turned_back(float2 v, int c, const float* cosine, const float* sine) {
    if (c < D - R) return v;
    int pair = (c - (D - R)) / 2;
    float co = cosine[pair], si = sine[pair];
    return make_float2(v.x * co + v.y * si, v.y * co - v.x * si);
}

#define THREADS (GROUPS * LANES)
#if STEP && BLOCKS == 1 && GROUPS == 8
#define IN_FLIGHT 10            // chunks of 8 channels that a thread has on their way
#else
#define IN_FLIGHT 5
#endif
#define PAD (D + 8)             // halves between vectors in shared memory
#define SCORE_PAD (KEYS + 4)    // floats
#define WEIGHT_PAD (KEYS + 8)
#define GROUP_CHANNELS (D / GROUPS)  // of the outputs, a multiple of 16

// Rows at[first ... end - 1] as halves [KEYS][PAD], but for those that are null.
DEVICE void load_keys(const u8** at, __half* keys, int first, int end) {
    int stop = end * (D / 8);
#pragma unroll 1  // code that is run once takes longer to fetch than to run
    for (int batch = first * (D / 8); batch < stop; batch += IN_FLIGHT * THREADS) {
        RawChunk raw[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            int chunk = batch + i * THREADS + threadIdx.x;
            const u8* row = chunk < stop ? at[chunk / (D / 8)] : 0;
            if (row) raw[i] = load_raw<D, R, PACKED>(row, chunk % (D / 8));
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            int chunk = batch + i * THREADS + threadIdx.x, key = chunk / (D / 8), part = chunk % (D / 8);
            if (chunk < stop && at[key])
                *(uint4*)(keys + key * PAD + 8 * part) = chunk_halves<D, R, PACKED>(raw[i], part);
        }
    }
}

// Zeros for keys `first` up to the next whole tile of 16.
DEVICE void no_keys(__half* keys, int first) {
    int end = min((first + 15) / 16 * 16, KEYS);
    for (int i = first * (D / 8) + threadIdx.x; i < end * (D / 8); i += THREADS)
        *(uint4*)(keys + i / (D / 8) * PAD + 8 * (i % (D / 8))) = make_uint4(0, 0, 0, 0);
}

// A head of a token, as loaded, in halves at `to`, its scores to be powers of two; zeros where there is no such head.
DEVICE void put_query(float4 (&v)[QUADS], bool real, const float* cosine, const float* sine, float eps, __half* to) {
    query(v, cosine, sine, eps, real ? rsqrtf((float)D) * LOG2E : 0.f);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        int c = 4 * (LANES * i + lane_id());
        if (c >= D) continue;
        ((__half2*)(to + c))[0] = __floats2half2_rn(v[i].x, v[i].y);
        ((__half2*)(to + c))[1] = __floats2half2_rn(v[i].z, v[i].w);
    }
}

#endif
