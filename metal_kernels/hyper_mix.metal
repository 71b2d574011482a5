// Hyper-connections: streams [T, N, D] mixed back, multiplied with fn and squared; then mixed into one layer input.
//
// mix: if UPDATE, streams'[t, j] = post[t, j] y[t] + sum_i m[t, i, j] streams[t, i], else as they are; and
// sums[t, p, r] = part p of fn[r] . streams'[t], last of the squares. A threadgroup of four simdgroups takes CHANNELS
// channels of all streams, two a lane, and goes through `tokens` tokens. Row r of fn belongs to simdgroup r mod 4 and
// stays in its registers, so fn is read once a threadgroup. Each simdgroup mixes all streams, the first writes them.
//
// enter, leave: mix = sums of products / rms of the streams, pre from mix, x = rms(sum_n pre[n] streams[n]) norm. One
// threadgroup a token. Each simdgroup adds up its share of the sums; then a thread collapses EACH channels, while the
// last simdgroup, which has none, makes m doubly stochastic with an element a lane.
enum { CHANNELS = 64, MIXERS = 4, EACH = 8 };

// Rows of fn that a simdgroup holds, of M and one for the squares.
template <int M> constexpr uint rows_held() {
    return (M + MIXERS) / MIXERS;
}

// Channels d and d + 1 of each stream.
template <int N, int D> inline void load_streams(const device float* streams, ulong t, uint d, thread float2* x) {
    for (uint n = 0; n < N; ++n) {
        x[n] = d < D ? *(const device float2*)(streams + (t * N + n) * D + d) : float2(0.0f);
    }
}

// Two weights of fn: halves, floats, or the upper halves of floats.
inline float2 pair_at(const device half* p) {
    return float2(*(const device half2*)p);
}

inline float2 pair_at(const device float* p) {
    return *(const device float2*)p;
}

inline float2 pair_at(const device ushort* p) {
    return as_type<float2>(uint2(*(const device ushort2*)p) << 16);
}

// The weights of channels d and d + 1 in rows simdgroup, simdgroup + 4, ...
template <typename W, int N, int D, int M>
inline void load_weights(const device uint8_t* fn, uint d, uint simdgroup, thread float2* weights) {
    for (uint i = 0; i < rows_held<M>(); ++i) {
        uint row = simdgroup + MIXERS * i;
        for (uint n = 0; n < N; ++n) {
            const device W* p = (const device W*)fn + (row * N + n) * D + d;  // d is even
            weights[i * N + n] = row < M && d < D ? pair_at(p) : float2(0.0f);
        }
    }
}

// This simdgroup's rows of the sums, over its 64 channels of streams x.
template <int N, int M>
inline void write_sums(const thread float2* x, const thread float2* weights, uint simdgroup, uint lane,
                       device float* sums) {
    for (uint i = 0; i < rows_held<M>(); ++i) {
        uint row = simdgroup + MIXERS * i;
        float2 sum = 0.0f;
        for (uint n = 0; n < N; ++n) {
            sum += x[n] * (row == M ? x[n] : weights[i * N + n]);
        }
        float total = simd_sum(sum.x + sum.y);
        if (lane == 0 && row <= M) {
            sums[row] = total;
        }
    }
}

// totals[r] = sum over parts of sums[first + p (M + 1) + r]; a barrier must follow.
template <int M, typename Floats>
inline void add_parts(Floats sums, ulong first, uint parts, uint simdgroup, uint simdgroups, uint lane,
                      threadgroup float* totals) {
    for (uint row = simdgroup; row <= M; row += simdgroups) {
        float sum = 0.0f;
        for (uint p = lane; p < parts; p += 32) {
            sum += sums[first + p * (M + 1) + row];
        }
        sum = simd_sum(sum);
        if (lane == 0) {
            totals[row] = sum;
        }
    }
}

inline float sigmoid(float x) {
    return 1.0f / (1.0f + precise::exp(-x));
}

// x = the thread's channels index, index + threads, ... of sum_n pre[n] streams[n]. Returns the sum of their squares.
template <int N, int D>
inline float collapse(const device float* streams, const thread float* pre, uint index, uint threads,
                      thread float* x) {
    float squares = 0.0f;
    for (uint i = 0; i < EACH; ++i) {
        uint d = index + i * threads;
        x[i] = 0.0f;
        for (uint n = 0; n < N; ++n) {
            x[i] += d < D ? pre[n] * streams[n * D + d] : 0.0f;
        }
        squares += x[i] * x[i];
    }
    return squares;
}

// out = rms(x) norm, with the sums of squares that `simdgroups` simdgroups left.
template <int D, typename Floats>
inline void write_normalised(const thread float* x, const threadgroup float* squares, uint simdgroups, Floats norm,
                             float eps, uint index, uint lane, device float* out) {
    float scale = precise::rsqrt(simd_sum(lane < simdgroups ? squares[lane] : 0.0f) / D + eps);
    for (uint i = 0; i < EACH; ++i) {
        uint d = index + i * 32 * simdgroups;
        if (d < D) {
            out[d] = x[i] * scale * norm[d];
        }
    }
}

// Over the N lanes of a row (STRIDE 1) or a column (STRIDE N) of an N x N matrix, an element a lane.
template <int N, int STRIDE> inline float sum_along(float v) {
    for (uint offset = STRIDE; offset < N * STRIDE; offset *= 2) {
        v += simd_shuffle_xor(v, ushort(offset));
    }
    return v;
}

template <int N> inline float row_max(float v) {
    for (uint offset = 1; offset < N; offset *= 2) {
        v = max(v, simd_shuffle_xor(v, ushort(offset)));
    }
    return v;
}

// The lane's element of softmax(v) + eps after columns, then `iterations` - 1 times rows and columns, were divided by
// their sums + eps.
template <int N> inline float sinkhorn(float v, int iterations, float eps) {
    float e = precise::exp(v - row_max<N>(v));
    float m = e / sum_along<N, 1>(e) + eps;
    m /= sum_along<N, N>(m) + eps;
    for (int i = 1; i < iterations; ++i) {
        m /= sum_along<N, 1>(m) + eps;
        m /= sum_along<N, N>(m) + eps;
    }
    return m;
}
// ---- kernel mix
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint part = threadgroup_position_in_grid.x, parts = threadgroups_per_grid.x;
uint d = part * CHANNELS + 2 * lane, start = threadgroup_position_in_grid.y * uint(tokens);
float2 weights[rows_held<M>() * N];
load_weights<W, N, D, M>(fn, d, simdgroup, weights);
for (ulong t = start; t < min(start + uint(tokens), uint(T)); ++t) {
    float2 x[N];
    load_streams<N, D>(streams, t, d, x);
#if UPDATE
    float2 before[N];
    for (uint i = 0; i < N; ++i) {
        before[i] = x[i];
    }
    float2 added = d < D ? *(const device float2*)(y + t * D + d) : float2(0.0f);
    for (uint j = 0; j < N; ++j) {
        x[j] = post[t * N + j] * added;
        for (uint i = 0; i < N; ++i) {
            x[j] += m[(t * N + i) * N + j] * before[i];
        }
        if (simdgroup == 0 && d < D) {
            *(device float2*)(after + (t * N + j) * D + d) = x[j];
        }
    }
#endif
    write_sums<N, M>(x, weights, simdgroup, lane, sums + (t * parts + part) * (M + 1));
}
// ---- kernel enter
enum { M = 2 * N + N * N };
threadgroup float totals[M + 1];
threadgroup float squares[32];
ulong t = threadgroup_position_in_grid.x;
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint index = thread_index_in_threadgroup, collapsing = simdgroups_per_threadgroup - 1;
add_parts<M>(sums, t * uint(parts) * (M + 1), parts, simdgroup, collapsing + 1, lane, totals);
threadgroup_barrier(mem_flags::mem_threadgroup);

float inverse = precise::rsqrt(totals[M] / (N * D) + norm_eps);
float collapsed[EACH];
if (simdgroup < collapsing) {
    float pre[N];
    for (uint n = 0; n < N; ++n) {
        pre[n] = sigmoid(totals[n] * inverse * scale[0] + base[n]) + hc_eps;
    }
    float sum = simd_sum(collapse<N, D>(streams + t * N * D, pre, index, 32 * collapsing, collapsed));
    if (lane == 0) {
        squares[simdgroup] = sum;
    }
} else {
    uint slot = 2 * N + lane % (N * N);
    float element = sinkhorn<N>(totals[slot] * inverse * scale[2] + base[slot], iterations, hc_eps);
    if (lane < N * N) {
        m[t * (N * N) + lane] = element;
    }
    if (lane < N) {
        post[t * N + lane] = 2.0f * sigmoid(totals[N + lane] * inverse * scale[1] + base[N + lane]);
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup < collapsing) {
    write_normalised<D>(collapsed, squares, collapsing, norm, norm_eps, index, lane, x + t * D);
}
// ---- kernel leave
threadgroup float totals[N + 1];
threadgroup float squares[32];
ulong t = threadgroup_position_in_grid.x;
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint index = thread_index_in_threadgroup, simdgroups = simdgroups_per_threadgroup;
add_parts<N>(sums, t * uint(parts) * (N + 1), parts, simdgroup, simdgroups, lane, totals);
threadgroup_barrier(mem_flags::mem_threadgroup);

float inverse = precise::rsqrt(totals[N] / (N * D) + norm_eps);
float pre[N];
for (uint n = 0; n < N; ++n) {
    pre[n] = sigmoid(totals[n] * inverse * scale[0] + base[n]) + hc_eps;
}
float collapsed[EACH];
float sum = simd_sum(collapse<N, D>(streams + t * N * D, pre, index, 32 * simdgroups, collapsed));
if (lane == 0) {
    squares[simdgroup] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
write_normalised<D>(collapsed, squares, simdgroups, norm, norm_eps, index, lane, x + t * D);
