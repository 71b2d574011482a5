// Half a layer's output mixed back into the N streams, streams'[j] = post[j] y + sum_i m[i, j] streams[i]; the M products
// of fn with all N D of them; and, by the block that is last to finish for its tokens, what the next half layer reads:
// x = rms(sum_n pre[n] streams'[n]) norm, with post and m for its own output.
//
// A block has CHANNELS channels of every stream, a thread each, and walks its tokens with its numbers of fn in
// registers; its ninth group of lanes does nothing but the matrix, which the others need not wait for.
#include "lanes.cuh"

#define CHANNELS 64
#define WORKERS (N * CHANNELS)
#define THREADS (WORKERS + LANES)
#define GROUPS (WORKERS / LANES)

#if FN_HALF
typedef __half Number;
DEVICE float number(__half v) { return __half2float(v); }
#else
typedef float Number;
DEVICE float number(float v) { return v; }
#endif

// The sums over parts p of sums[p], M products and the streams' sum of squares, to mix: products of the normalised streams.
DEVICE void totals(const float* sums, int parts, float eps, float (&partial)[GROUPS][LANES], float (&mix)[LANES]) {
    int lane = lane_id(), group = group_id();
    if (group < GROUPS) {
        float sum = 0;
        if (lane <= M) for (int p = group; p < parts; p += GROUPS) sum += __ldcg(&sums[p * (M + 1) + lane]);
        partial[group][lane] = sum;
    }
    __syncthreads();
    if (group == 0) {
        float sum = 0;
        for (int g = 0; g < GROUPS; ++g) sum += partial[g][lane];
        float scale = rsqrtf(lane_get(sum, M) / (N * D) + eps);
        mix[lane] = sum * scale;
    }
    __syncthreads();
}

// A lane an element: rows' softmax, then columns, then alternately. Lanes past N N repeat the first ones.
DEVICE void doubly_stochastic(const float (&mix)[LANES], const float* scale, const float* base, float* post, float* m,
                              int iterations, float eps) {
#if M > N
    int lane = lane_id(), at = lane % (N * N);
    float z = mix[2 * N + at] * scale[2] + base[2 * N + at], most = z;
    for (int bit = 1; bit < N; bit *= 2) most = fmaxf(most, lane_xor(most, bit));
    float v = expf(z - most), sum = v;
    for (int bit = 1; bit < N; bit *= 2) sum += lane_xor(sum, bit);
    v = v / sum + eps;
    for (int i = 0; i < iterations; ++i) {
        if (i) {
            sum = v;
            for (int bit = 1; bit < N; bit *= 2) sum += lane_xor(sum, bit);
            v = __fdividef(v, sum + eps);
        }
        sum = v;
        for (int bit = N; bit < N * N; bit *= 2) sum += lane_xor(sum, bit);
        v = __fdividef(v, sum + eps);
    }
    if (lane < N * N) m[lane] = v;
    if (lane < N) post[lane] = 2 * sigmoid(mix[N + lane] * scale[1] + base[N + lane]);
#endif
}

DEVICE void collapse(const float* streams, const float (&mix)[LANES], const float* scale, const float* base,
                     const float* norm, float* x, float hc_eps, float eps, float* shared) {
    const int STEPS = (D + 4 * WORKERS - 1) / (4 * WORKERS);
    float4 v[STEPS];
    float pre[N], squares = 0;
    bool works = threadIdx.x < WORKERS;
    for (int n = 0; n < N; ++n) pre[n] = sigmoid(mix[n] * scale[0] + base[n]) + hc_eps;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        int d = (i * WORKERS + threadIdx.x) * 4;
        v[i] = make_float4(0, 0, 0, 0);
        if (!works || d >= D) continue;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float4 h = __ldcg((const float4*)(streams + (size_t)n * D + d));
            v[i].x += pre[n] * h.x, v[i].y += pre[n] * h.y, v[i].z += pre[n] * h.z, v[i].w += pre[n] * h.w;
        }
        squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    float r = rsqrtf(block_sum(squares, shared) / D + eps);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        int d = (i * WORKERS + threadIdx.x) * 4;
        if (!works || d >= D) continue;
        float4 w = *(const float4*)(norm + d);
        *(float4*)(x + d) = make_float4(v[i].x * r * w.x, v[i].y * r * w.y, v[i].z * r * w.z, v[i].w * r * w.w);
    }
}

// streams [T, N, D] in place; fn [M, N D]; y [T, D]; post [T, N] and m [T, N, N] of the half layer before, and then of
// the next; sums [T, D / CHANNELS, M + 1]; done [T / tokens], zero between launches; x [T, D]. Grid (D / CHANNELS,
// T / tokens up).
KERNEL __launch_bounds__(THREADS) void mix(float* streams, const Number* fn, const float* y, float* post, float* m,
                                           int update, float* sums, u32* done, const float* scale, const float* base,
                                           const float* norm, int iterations, float hc_eps, float eps, float* x, int T,
                                           int tokens) {
    PASS_TURN();
    __shared__ float partial[GROUPS][LANES], mixed[LANES], shared[GROUPS + 1];
    __shared__ bool last;
    int tid = threadIdx.x, j = tid / CHANNELS, d = blockIdx.x * CHANNELS + tid % CHANNELS;
    bool works = tid < WORKERS;
    int begin = blockIdx.y * tokens, end = min(begin + tokens, T);
    float f[M];
#pragma unroll
    for (int i = 0; i < M; ++i) f[i] = works ? number(fn[((size_t)i * N + j) * D + d]) : 0.f;
    AWAIT_TURN();
    for (int t = begin; t < end; ++t) {
        float* at = streams + (size_t)t * N * D + d;
        float v = 0;
        if (works) {
            if (update) {
                v = post[t * N + j] * y[(size_t)t * D + d];
#pragma unroll
                for (int i = 0; i < N; ++i) v += m[(t * N + i) * N + j] * at[(size_t)i * D];
            } else {
                v = at[(size_t)j * D];
            }
        }
        __syncthreads();  // all streams of these channels are read before any is written; so is `partial`
        if (works) {
            if (update) at[(size_t)j * D] = v;
            float values[LANES];
#pragma unroll
            for (int i = 0; i < LANES; ++i) values[i] = i < M ? v * f[i < M ? i : 0] : i == M ? v * v : 0.f;
            partial[tid / LANES][tid % LANES] = lane_sums(values);
        }
        __syncthreads();
        if (tid <= M) {
            float sum = 0;
            for (int g = 0; g < GROUPS; ++g) sum += partial[g][tid];
            sums[((size_t)t * gridDim.x + blockIdx.x) * (M + 1) + tid] = sum;
        }
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        last = atomicAdd(&done[blockIdx.y], 1u) == gridDim.x - 1;
        if (last) done[blockIdx.y] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int t = begin; t < end; ++t) {
        totals(sums + (size_t)t * gridDim.x * (M + 1), gridDim.x, eps, partial, mixed);
        if (!works) doubly_stochastic(mixed, scale, base, post + t * N, m + t * N * N, iterations, hc_eps);
        collapse(streams + (size_t)t * N * D, mixed, scale, base, norm, x + (size_t)t * D, hc_eps, eps, shared);
        __syncthreads();
    }
}
