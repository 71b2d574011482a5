// Half a layer's output mixed back into the N streams, streams'[j] = post[j] y + sum_i m[i, j] streams[i], and what the
// next half layer reads of them: x = rms(sum_n pre[n] streams'[n]) norm, with pre, post and m from the M products of fn
// with all N D numbers. The sum of squares of x is pre^T G pre, G the products of streams with one another: so products
// and norm take one pass, and what is left of a channel is done while it is in registers.
#include "cluster.cuh"

#if FN_HALF
typedef __half2 Pair;
DEVICE float2 numbers(Pair v) { return __half22float2(v); }
#else
typedef float2 Pair;
DEVICE float2 numbers(Pair v) { return v; }
#endif

struct Setting {
    const float *scale, *base, *norm;
    int iterations;
    float hc_eps, eps;
};

// A thread's work: columns, then alternately rows and columns are made to sum to 1. z: N N logits.
DEVICE void doubly_stochastic(const float (&z)[N * N], float* m, int iterations, float eps) {
    float a[N][N], row[N], column[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float most = z[N * i], sum = 0;
#pragma unroll
        for (int j = 1; j < N; ++j) most = fmaxf(most, z[N * i + j]);
#pragma unroll
        for (int j = 0; j < N; ++j) a[i][j] = expf(z[N * i + j] - most), sum += a[i][j];
#pragma unroll
        for (int j = 0; j < N; ++j) a[i][j] = a[i][j] / sum + eps;
        row[i] = column[i] = 1;
    }
    for (int turn = 0; turn < iterations; ++turn) {  // the matrix is row[i] a[i][j] column[j]
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < N; ++j) sum += a[i][j] * column[j];
            if (turn) row[i] = __fdividef(row[i], row[i] * sum + eps);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) sum += a[i][j] * row[i];
            column[j] = __fdividef(column[j], column[j] * sum + eps);
        }
    }
#pragma unroll
    for (int i = 0; i < N * N; ++i) m[i] = row[i / N] * a[i / N][i % N] * column[i % N];
}

// Of one token: products [M] and gram [N, N], as sums, to what all its channels need: N factors of the streams.
DEVICE void factors(const float* products, const float* gram, const Setting& of, float* pre) {
    float squares = 0, total = 0;
    for (int n = 0; n < N; ++n) squares += gram[n * N + n];
    float r = rsqrtf(squares / (N * D) + of.eps);
    for (int n = 0; n < N; ++n) pre[n] = sigmoid(products[n] * r * of.scale[0] + of.base[n]) + of.hc_eps;
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < N; ++j) total += pre[i] * pre[j] * gram[i * N + j];
    float by = rsqrtf(fmaxf(total, 0.f) / D + of.eps);
    for (int n = 0; n < N; ++n) pre[n] *= by;
}

// And to how its next output is mixed back.
DEVICE void way_back(const float* products, const float* gram, const Setting& of, float* post, float* m) {
#if M > N
    float squares = 0, z[N * N];
    for (int n = 0; n < N; ++n) squares += gram[n * N + n];
    float r = rsqrtf(squares / (N * D) + of.eps);
    for (int n = 0; n < N; ++n) post[n] = 2 * sigmoid(products[N + n] * r * of.scale[1] + of.base[N + n]);
#pragma unroll
    for (int i = 0; i < N * N; ++i) z[i] = products[2 * N + i] * r * of.scale[2] + of.base[2 * N + i];
    doubly_stochastic(z, m, of.iterations, of.hc_eps);
#endif
}

#if STEP
// A token is a cluster of CLUSTER blocks, a thread PASSES pairs of channels of one stream. Macros: PAIRS of a block's
// pass; D = 2 PAIRS PASSES CLUSTER.
#define THREADS (N * PAIRS)
#define GROUPS (THREADS / LANES)
#define SUMS (M + N * N)

KERNEL CLUSTER_OF(CLUSTER, 1, 1) __launch_bounds__(THREADS) void mix(
    float* streams, const Pair* fn, const float* y, float* post, float* m, int update, const float* scale,
    const float* base, const float* norm, int iterations, float hc_eps, float eps, float* x) {
    PASS_TURN();
    __shared__ float partial[GROUPS][LANES + 1], sums[SUMS], totals[SUMS];
    int tid = threadIdx.x, j = tid / PAIRS, rank = blockIdx.x, t = blockIdx.y;
    Setting of = {scale, base, norm, iterations, hc_eps, eps};
    Pair f[PASSES][M];
    float2 weight[PASSES];
    int at[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
        at[p] = (rank * PASSES + p) * PAIRS + tid % PAIRS;
#pragma unroll
        for (int i = 0; i < M; ++i) f[p][i] = fn[(i * N + j) * (D / 2) + at[p]];
        weight[p] = ((const float2*)norm)[at[p]];
    }
    AWAIT_TURN();
    streams += (size_t)t * N * D, y += (size_t)t * D, post += t * N, m += t * N * N, x += (size_t)t * D;
    float2 v[PASSES][N];
    float values[LANES] = {};
    float back[N], mixing[N][N];
    if (update) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            back[n] = post[n];
#pragma unroll
            for (int i = 0; i < N; ++i) mixing[i][n] = m[i * N + n];
        }
    }
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
        float2 old[N];
#pragma unroll
        for (int n = 0; n < N; ++n) old[n] = ((const float2*)streams)[n * (D / 2) + at[p]];
        if (update) {
            float2 part = ((const float2*)y)[at[p]];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                v[p][n] = make_float2(back[n] * part.x, back[n] * part.y);
#pragma unroll
                for (int i = 0; i < N; ++i) v[p][n].x += mixing[i][n] * old[i].x, v[p][n].y += mixing[i][n] * old[i].y;
            }
        } else {
#pragma unroll
            for (int n = 0; n < N; ++n) v[p][n] = old[n];
        }
        float2 mine = v[p][0];
#pragma unroll
        for (int n = 1; n < N; ++n)
            if (j == n) mine = v[p][n];
#pragma unroll
        for (int i = 0; i < M; ++i) {
            float2 number = numbers(f[p][i]);
            values[i] += mine.x * number.x + mine.y * number.y;
        }
#pragma unroll
        for (int n = 0; n < N; ++n) values[M + n] += mine.x * v[p][n].x + mine.y * v[p][n].y;
    }
    partial[group_id()][lane_id()] = lane_sums(values);
    __syncthreads();  // also: all streams of these channels have been read
    if (update) {
#pragma unroll
        for (int p = 0; p < PASSES; ++p)
#pragma unroll
            for (int n = 0; n < N; ++n)
                if (j == n) ((float2*)streams)[n * (D / 2) + at[p]] = v[p][n];
    }
    for (int i = group_id(); i < SUMS; i += GROUPS) {  // a group of lanes a sum: products of all, G's row j of stream j
        int row = (i - M) / N, column = i < M ? i : M + (i - M) % N;
        float sum = 0;
        for (int g = lane_id(); g < GROUPS; g += LANES)
            if (i < M || g / (PAIRS / LANES) == row) sum += partial[g][column];
        sum = lane_sum(sum);
        if (lane_id() == 0) sums[i] = sum;
    }
    cluster_arrive();
    cluster_wait();
    if (tid < SUMS) {
        float sum = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) sum += remote_float(&sums[tid], r);
        totals[tid] = sum;
    }
    cluster_arrive();  // a block must not end while another reads its sums
    __syncthreads();
    float by[N];
    factors(totals, totals + M, of, by);
    if (j == 0) {
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int n = 0; n < N; ++n) sum.x += by[n] * v[p][n].x, sum.y += by[n] * v[p][n].y;
            ((float2*)x)[at[p]] = make_float2(sum.x * weight[p].x, sum.y * weight[p].y);
        }
    }
    if (rank == 0 && tid == THREADS - LANES) way_back(totals, totals + M, of, post, m);
    cluster_wait();
}
#else
// A block TOKENS tokens, which share its reads of fn. It walks all channels, CHANNELS at a time of every stream: first a
// thread has a channel of PER tokens, then a group of lanes an eighth of those channels for all products.
#define TOKENS 8
#define PER (TOKENS / 4)
#define CHANNELS 64
#define WIDTH (N * CHANNELS)    // numbers of a token at a time
#define STRIDE (WIDTH + 4)
#define GROUPS 8
#define EACH ((M + 7) / 8)      // products of a lane
#define GRAM (N * (N + 1) / 2)

KERNEL __launch_bounds__(GROUPS * LANES) void mix(float* streams, const Pair* fn, const float* y, float* post, float* m,
                                                  int update, const float* scale, const float* base, const float* norm,
                                                  int iterations, float hc_eps, float eps, float* x, int T) {
    TAKE_TURN();
    extern __shared__ __align__(16) float memory[];
    float *values = memory, *numbers_ = values + TOKENS * STRIDE;             // [TOKENS][STRIDE], [8 EACH][STRIDE]
    __shared__ float coefficients[TOKENS][N + N * N], products[TOKENS][8 * EACH], grams[TOKENS][N * N], by[TOKENS][N];
    Setting of = {scale, base, norm, iterations, hc_eps, eps};
    int tid = threadIdx.x, lane = lane_id(), group = group_id(), first = blockIdx.x * TOKENS;
    int c = tid % CHANNELS, quad = tid / CHANNELS;  // this thread's tokens: PER quad, ...
    for (int i = tid; i < TOKENS * (N + N * N); i += GROUPS * LANES) {
        int t = i / (N + N * N), k = i % (N + N * N), token = min(first + t, T - 1);
        coefficients[t][k] = k < N ? post[token * N + k] : m[token * N * N + k - N];
    }
    float gram[PER][GRAM] = {}, sums[PER][EACH] = {};
    for (int d = 0; d < D; d += CHANNELS) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int t = PER * quad + i, token = min(first + t, T - 1);
            float* at = streams + (size_t)token * N * D + d + c;
            float old[N], v[N];
#pragma unroll
            for (int n = 0; n < N; ++n) old[n] = at[(size_t)n * D];
            float part = update ? y[(size_t)token * D + d + c] : 0.f;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                v[n] = old[n];
                if (update) {
                    v[n] = coefficients[t][n] * part;
#pragma unroll
                    for (int k = 0; k < N; ++k) v[n] += coefficients[t][N + k * N + n] * old[k];
                    if (first + t < T) at[(size_t)n * D] = v[n];
                }
                values[t * STRIDE + n * CHANNELS + c] = v[n];
            }
            int at_gram = 0;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int k = n; k < N; ++k) gram[i][at_gram++] += v[n] * v[k];
        }
        for (int i = tid; i < M * WIDTH / 2; i += GROUPS * LANES) {
            int row = i / (WIDTH / 2), k = i % (WIDTH / 2) * 2;
            float2 pair = numbers(fn[((size_t)row * N + k / CHANNELS) * (D / 2) + (d + k % CHANNELS) / 2]);
            *(float2*)(numbers_ + row * STRIDE + k) = pair;
        }
        __syncthreads();
        // Lane: tokens lane / 8, + 4, ... and products lane % 8, + 8, ...; group: WIDTH / GROUPS of the numbers.
#pragma unroll
        for (int k = 0; k < WIDTH / GROUPS; k += 4) {
            int at = group * (WIDTH / GROUPS) + k;
            float4 a[PER], b[EACH];
#pragma unroll
            for (int i = 0; i < PER; ++i) a[i] = *(const float4*)(values + (lane / 8 + 4 * i) * STRIDE + at);
#pragma unroll
            for (int i = 0; i < EACH; ++i) b[i] = *(const float4*)(numbers_ + (lane % 8 + 8 * i) * STRIDE + at);
#pragma unroll
            for (int i = 0; i < PER; ++i)
#pragma unroll
                for (int n = 0; n < EACH; ++n)
                    sums[i][n] += a[i].x * b[n].x + a[i].y * b[n].y + a[i].z * b[n].z + a[i].w * b[n].w;
        }
    }
    __syncthreads();
    for (int i = 0; i < PER; ++i)
        for (int n = 0; n < EACH; ++n)
            memory[(group * TOKENS + lane / 8 + 4 * i) * 8 * EACH + lane % 8 + 8 * n] = sums[i][n];
    float* halves = memory + GROUPS * TOKENS * 8 * EACH;  // the gram's sums of 32 channels each
    for (int i = 0; i < PER; ++i)
        for (int n = 0; n < GRAM; ++n) {
            float sum = lane_sum(gram[i][n]);
            if (lane == 0) halves[(2 * (PER * quad + i) + group % 2) * GRAM + n] = sum;
        }
    __syncthreads();
    for (int i = tid; i < TOKENS * 8 * EACH; i += GROUPS * LANES) {
        float sum = 0;
        for (int g = 0; g < GROUPS; ++g) sum += memory[g * TOKENS * 8 * EACH + i];
        products[i / (8 * EACH)][i % (8 * EACH)] = sum;
    }
    for (int t = tid; t < TOKENS; t += GROUPS * LANES) {
        int at = 0;
        for (int n = 0; n < N; ++n)
            for (int k = n; k < N; ++k, ++at)
                grams[t][n * N + k] = grams[t][k * N + n] = halves[2 * t * GRAM + at] + halves[(2 * t + 1) * GRAM + at];
    }
    __syncthreads();
    if (tid < TOKENS) {
        factors(products[tid], grams[tid], of, by[tid]);
        int token = first + tid;
        if (token < T) way_back(products[tid], grams[tid], of, post + token * N, m + token * N * N);
    }
    __syncthreads();
    for (int i = tid; i < min(TOKENS, T - first) * (D / 4); i += GROUPS * LANES) {
        int t = i / (D / 4), d = i % (D / 4) * 4;
        float4 sum = make_float4(0, 0, 0, 0), w = *(const float4*)(norm + d);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float4 v = *(const float4*)(streams + ((size_t)(first + t) * N + n) * D + d);
            float f = by[t][n];
            sum.x += f * v.x, sum.y += f * v.y, sum.z += f * v.z, sum.w += f * v.w;
        }
        *(float4*)(x + (size_t)(first + t) * D + d) = make_float4(sum.x * w.x, sum.y * w.y, sum.z * w.z, sum.w * w.w);
    }
}
#endif
