// Products of a tile of vectors with a tile of a matrix's rows, for prefill: BM x 64 results by one threadgroup of
// 128 threads, BM 32 or 64, through 8x8 SIMD-group matrices. Needs blocks.h before it.
//
// For each 32 weights along K the threadgroup puts BM x 32 activations and 64 x 32 decoded weights into threadgroup
// memory, as S: half, or float where nothing may be rounded. Sums are float. Simdgroup s of the four computes half
// s / 2 of the vectors with the 32 rows of half s % 2. Which vectors a tile holds is a list, so that they may be
// gathered.

enum { TILE_THREADS = 128, TILE_ROWS = 64, TILE_RUN = 32 };

// A line of a tile: 32 values in units of four, and a pad that puts neighbouring lines into different memory banks.
template <typename S> struct Line { enum { quads = 8 + 4 / sizeof(S) }; };

// Activations as a tile holds them. What a half cannot hold becomes the largest that it can, for one infinite factor
// would spoil all results of its vector; NaN and what was infinite before stay so.
template <typename S> inline vec<S, 4> held(float4 v);

template <> inline float4 held<float>(float4 v) {
    return v;
}

template <> inline half4 held<half>(float4 v) {
    return half4(select(v, clamp(v, float4(-65504.0f), float4(65504.0f)), abs(v) < float4(INFINITY)));
}

// a, one line for each of BM vectors, = x[list[i] * stride + 32 run ...]; zeros where list[i] is negative.
template <typename S, int BM> inline void load_vectors(threadgroup vec<S, 4>* a, const device float* x, ulong stride,
                                                       const threadgroup int* list, uint run, uint thread_index) {
    for (uint i = thread_index; i < BM * 8; i += TILE_THREADS) {
        int vector = list[i / 8];
        float4 v = float4(0);
        if (vector >= 0) {
            v = *(const device float4*)(x + ulong(vector) * stride + run * TILE_RUN + i % 8 * 4);
        }
        a[i / 8 * Line<S>::quads + i % 8] = held<S>(v);
    }
}

// b, one line for each of ROWS rows from row n of w on, = weights 32 run ... of the row. Past row N - 1 that one is
// repeated: such results are not stored.
template <typename S, int KIND, int ROWS> inline void load_rows(
        threadgroup vec<S, 4>* b, const device uint8_t* w, ulong bytes, uint n, uint N, uint run,
        const threadgroup ulong* codebook, uint thread_index) {
    for (uint i = thread_index; i < ROWS * 4; i += TILE_THREADS) {
        float4 v[2];
        decode8<KIND>(w + min(n + i / 4, N - 1) * bytes, run * 4 + i % 4, codebook, v);
        threadgroup vec<S, 4>* line = b + i / 4 * Line<S>::quads + i % 4 * 2;
        line[0] = vec<S, 4>(v[0]);
        line[1] = vec<S, 4>(v[1]);
    }
}

// sums += a b^T over the 32 of a line. sums holds BM / 16 bands of 8 vectors, of four matrices of 8 rows each; bands
// past the first `count` vectors are left out.
template <typename S, int BM> inline void multiply(const threadgroup vec<S, 4>* a, const threadgroup vec<S, 4>* b,
                                                   uint count, uint simd,
                                                   thread simdgroup_matrix<float, 8, 8>* sums) {
    const uint line = Line<S>::quads * 4;
    const threadgroup S* vectors = (const threadgroup S*)a + simd / 2 * (BM / 2) * line;
    const threadgroup S* rows = (const threadgroup S*)b + simd % 2 * (TILE_ROWS / 2) * line;
    UNROLL for (uint k = 0; k < TILE_RUN; k += 8) {
        simdgroup_matrix<S, 8, 8> left, right[4];
        UNROLL for (uint j = 0; j < 4; ++j) {
            simdgroup_load(right[j], rows + j * 8 * line + k, line, ulong2(0, 0), true);
        }
        UNROLL for (uint i = 0; i < BM / 16; ++i) {
            if (simd / 2 * (BM / 2) + i * 8 >= count) {
                break;
            }
            simdgroup_load(left, vectors + i * 8 * line + k, line);
            UNROLL for (uint j = 0; j < 4; ++j) {
                simdgroup_multiply_accumulate(sums[i * 4 + j], left, right[j], sums[i * 4 + j]);
            }
        }
    }
}

// Sets BM / 16 bands of sums to zero.
template <int BM> inline void clear(thread simdgroup_matrix<float, 8, 8>* sums) {
    UNROLL for (uint i = 0; i < BM / 4; ++i) {
        sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
}

// 32 rows from row n of a matrix [N, ...] on: half of a tile's.
struct HalfRows {
    const device uint8_t* w;
    uint n, N;
};

// sums = the products of the first `count` vectors of `list`, x's of K weights `stride` apart, with both halves' rows.
template <typename S, int KIND, int BM> inline void multiply_tile(
        const device float* x, ulong stride, uint K, const threadgroup int* list, uint count, HalfRows low,
        HalfRows high, const threadgroup ulong* codebook, threadgroup vec<S, 4>* a, threadgroup vec<S, 4>* b,
        uint thread_index, thread simdgroup_matrix<float, 8, 8>* sums) {
    const uint half_rows = TILE_ROWS / 2;
    const ulong bytes = row_bytes<KIND>(K);
    clear<BM>(sums);
    for (uint run = 0; run < K / TILE_RUN; ++run) {
        load_vectors<S, BM>(a, x, stride, list, run, thread_index);
        load_rows<S, KIND, half_rows>(b, low.w, bytes, low.n, low.N, run, codebook, thread_index);
        load_rows<S, KIND, half_rows>(b + half_rows * Line<S>::quads, high.w, bytes, high.n, high.N, run, codebook,
                                      thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply<S, BM>(a, b, count, thread_index / 32, sums);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// strip [8 vectors][32 rows] = a band of sums, for the simdgroup to read. Before it is overwritten another
// simdgroup_barrier must come.
inline void spread(thread simdgroup_matrix<float, 8, 8>* band, threadgroup float* strip) {
    UNROLL for (uint j = 0; j < 4; ++j) {
        simdgroup_store(band[j], strip + j * 8, 32);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// y[list[i] * stride + n + column] = the sums of vector i; none where list[i] is negative or past row N - 1.
// strip is 256 floats for each simdgroup.
template <int BM> inline void store(thread simdgroup_matrix<float, 8, 8>* sums, device float* y, ulong stride,
                                    const threadgroup int* list, uint n, uint N, threadgroup float* strip, uint simd,
                                    uint lane) {
    uint row = n + simd % 2 * (TILE_ROWS / 2) + lane;
    UNROLL for (uint i = 0; i < BM / 16; ++i) {
        spread(sums + i * 4, strip);
        for (uint j = 0; j < 8; ++j) {
            int vector = list[simd / 2 * (BM / 2) + i * 8 + j];
            if (vector >= 0 && row < N) {
                y[ulong(vector) * stride + row] = strip[j * 32 + lane];
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}
