// Half a layer's output mixed back into the N streams, streams'[j] = post[j] y + sum_i m[i, j] streams[i], and what the
// next half layer reads of them: x = rms(sum_n pre[n] streams'[n]) norm, with pre, post and m from the M products of fn
// with all N D numbers. The sum of squares of x is pre^T G pre, G the products of streams with one another: so products
// and norm take one pass, and what is left of a channel is done while it is in registers.
#include "cluster.cuh"
#include "sinkhorn.cuh"

#if FN_HALF
typedef __half2 Pair;
DEVICE float2 numbers(Pair v) { return __half22float2(v); }
#else
typedef float2 Pair;
DEVICE float2 numbers(Pair v) { return v; }
#endif

#define SUMS (M + N * N)  // of a token: products, and G

// What a token's channels need of its sums: N factors of the streams, whose squares are the norm's.
DEVICE void factors(const float* sums, float scale, const float* base, float hc_eps, float eps, float* by) {
    const float* gram = sums + M;
    float squares = 0, total = 0;
    for (int n = 0; n < N; ++n) squares += gram[n * N + n];
    float r = rsqrtf(squares / (N * D) + eps);
    for (int n = 0; n < N; ++n) by[n] = sigmoid(sums[n] * r * scale + base[n]) + hc_eps;
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < N; ++j) total += by[i] * by[j] * gram[i * N + j];
    r = rsqrtf(fmaxf(total, 0.f) / D + eps);
    for (int n = 0; n < N; ++n) by[n] *= r;
}

#if defined(PARTS)
#include "hyper_parts.cuh"
#elif STEP
// TOKENS in turn are a cluster of CLUSTER blocks, a thread PASSES pairs of channels of one stream. Macros: PAIRS of a
// block's pass; D = 2 PAIRS PASSES CLUSTER. sums [T, SUMS] are left to `way_back`.
#define THREADS (N * PAIRS)
#define GROUPS (THREADS / LANES)
#define AHEAD (PASSES <= 4)         // all of fn that a thread needs is loaded at once, and its streams stay with it
const int HELD = AHEAD ? PASSES : 1;

// `factors` by lanes that hold the sums from `lane` on, and from LANES + `lane` on.
DEVICE void factors_of(const float (&total)[2], float scale, const float (&base)[N], float hc_eps, float eps,
                       float (&by)[N]) {
    float gram[N][N], squares = 0, sum = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        by[n] = lane_get(total[0], n);
#pragma unroll
        for (int k = n; k < N; ++k) {
            const int at = M + n * N + k;
            gram[n][k] = gram[k][n] = lane_get(total[at / LANES], at % LANES);
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) squares += gram[n][n];
    float r = rsqrtf(squares / (N * D) + eps);
#pragma unroll
    for (int n = 0; n < N; ++n) by[n] = __fdividef(1.f, 1.f + __expf(-(by[n] * r * scale + base[n]))) + hc_eps;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float row = 0;
#pragma unroll
        for (int k = 0; k < N; ++k) row += by[k] * gram[n][k];
        sum += by[n] * row;
    }
    r = rsqrtf(fmaxf(sum, 0.f) / D + eps);
#pragma unroll
    for (int n = 0; n < N; ++n) by[n] *= r;
}

KERNEL CLUSTER_OF(CLUSTER, 1, 1) __launch_bounds__(THREADS) void mix(
    float* streams, const Pair* fn, const float* y, const float* post, const float* m, int update, const float* scale,
    const float* base, const float* norm, float hc_eps, float eps, float* x, float* sums, int T) {
    PASS_TURN();
    __shared__ float partial[GROUPS][LANES + 1], weights[TOKENS][N + N * N];
    __shared__ Mailbox<CLUSTER, SUMS> mail[TOKENS];
    int tid = threadIdx.x, j = tid / PAIRS, rank = blockIdx.x, lane = lane_id();
    if (tid < TOKENS) mail[tid].open();
    cluster_arrive();
    Pair f[HELD][M];
    float2 weight[HELD], old[TOKENS][HELD][N], part[TOKENS][HELD];
    auto at = [&](int p) { return (rank * PASSES + p) * PAIRS + tid % PAIRS; };
    auto load_fn = [&](int p, int held) {
#pragma unroll
        for (int i = 0; i < M; ++i) f[held][i] = fn[(i * N + j) * (D / 2) + at(p)];
    };
    auto load_streams = [&](int k, int p, int held) {
        int t = min((int)blockIdx.y * TOKENS + k, T - 1);
#pragma unroll
        for (int n = 0; n < N; ++n)
            old[k][held][n] = settled((const float2*)streams + ((size_t)t * N + n) * (D / 2) + at(p));
    };
    auto load_update = [&](int k, int p, int held) {
        int t = min((int)blockIdx.y * TOKENS + k, T - 1);
        if (update) part[k][held] = ((const float2*)y)[(size_t)t * (D / 2) + at(p)];
    };
    auto store_stream = [&](int t, int p, const float2 (&v)[N]) {
#pragma unroll
        for (int n = 0; n < N; ++n)
            if (j == n) ((float2*)streams)[((size_t)t * N + n) * (D / 2) + at(p)] = v[n];
    };
#pragma unroll
    for (int p = 0; AHEAD && p < PASSES; ++p) load_fn(p, p), weight[p] = ((const float2*)norm)[at(p)];
    // The streams are of the half layer before the kernel in front, which holds its turn; the first ones are not.
#pragma unroll
    for (int k = 0; k < TOKENS; ++k)
#pragma unroll
        for (int p = 0; AHEAD && update && p < PASSES; ++p) load_streams(k, p, p);
    float first_scale = scale[0], first_base[N];
#pragma unroll
    for (int n = 0; n < N; ++n) first_base[n] = base[n];
    cluster_wait();
    AWAIT_TURN();
#pragma unroll
    for (int k = 0; k < TOKENS; ++k) {
        int t = min((int)blockIdx.y * TOKENS + k, T - 1);
#pragma unroll
        for (int p = 0; AHEAD && p < PASSES; ++p) {
            if (!update) load_streams(k, p, p);
            load_update(k, p, p);
        }
        if (update && tid < N + N * N) weights[k][tid] = tid < N ? post[t * N + tid] : m[t * N * N + tid - N];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TOKENS; ++k) {
        int t = blockIdx.y * TOKENS + k;
        float values[LANES] = {};
#pragma unroll (HELD)
        for (int p = 0; p < PASSES; ++p) {
            const int held = AHEAD ? p : 0;
            if (!AHEAD) {
                load_fn(p, 0), load_streams(k, p, 0), load_update(k, p, 0);
                __syncthreads();  // all have read what this pass overwrites
            }
            float2 own = make_float2(0, 0), v[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                v[n] = old[k][held][n];
                if (update) {
                    v[n] = make_float2(weights[k][n] * part[k][held].x, weights[k][n] * part[k][held].y);
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        float by_stream = weights[k][N + i * N + n];
                        v[n].x += by_stream * old[k][held][i].x, v[n].y += by_stream * old[k][held][i].y;
                    }
                }
                if (j == n) own = v[n];
            }
#pragma unroll
            for (int i = 0; i < M; ++i) {
                float2 number = numbers(f[held][i]);
                values[i] += own.x * number.x + own.y * number.y;
            }
#pragma unroll
            for (int n = 0; n < N; ++n) {
                values[M + n] += own.x * v[n].x + own.y * v[n].y;
                if (AHEAD) old[k][held][n] = v[n];
            }
            if (!AHEAD && update && t < T) store_stream(t, p, v);
        }
        if (k) __syncthreads();  // the last token's parts have been read
        partial[group_id()][lane] = lane_sums(values);
        __syncthreads();
        for (int i = tid; i < CLUSTER * SUMS; i += THREADS) {
            int to = i / SUMS, which = i % SUMS, row = (which - M) / N;  // row n of G has those of stream n
            int column = which < M ? which : M + (which - M) % N;
            float sum = 0;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                sum += which < M || g / (PAIRS / LANES) == row ? partial[g][column] : 0.f;
            mail[k].post(to, rank, which, sum);
        }
        if (update && t < T)  // all have read what this overwrites
#pragma unroll
            for (int p = 0; AHEAD && p < PASSES; ++p) store_stream(t, p, old[k][p]);
    }
#pragma unroll
    for (int k = 0; k < TOKENS; ++k) {
        int t = blockIdx.y * TOKENS + k;
        mail[k].wait();
        if (j || t >= T) continue;
        float total[2] = {}, by[N];
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
            if (lane < SUMS) total[0] += mail[k].values[r][lane];
            if (lane + LANES < SUMS) total[1] += mail[k].values[r][lane + LANES];
        }
        factors_of(total, first_scale, first_base, hc_eps, eps, by);
#pragma unroll (HELD)
        for (int p = 0; p < PASSES; ++p) {
            const int held = AHEAD ? p : 0;
            if (!AHEAD) load_streams(k, p, 0), weight[0] = ((const float2*)norm)[at(p)];
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int n = 0; n < N; ++n) sum.x += by[n] * old[k][held][n].x, sum.y += by[n] * old[k][held][n].y;
            ((float2*)x)[(size_t)t * (D / 2) + at(p)] = make_float2(sum.x * weight[held].x, sum.y * weight[held].y);
        }
        if (rank == 0 && tid < LANES) {
            if (lane < SUMS) sums[t * SUMS + lane] = total[0];
            if (lane + LANES < SUMS) sums[t * SUMS + lane + LANES] = total[1];
        }
    }
}
#else
// A block TOKENS tokens, which share its reads of fn. It walks all channels, CHANNELS at a time of every stream: first
// a thread has a channel of PER tokens, then a group of lanes an eighth of those channels for all products.
#define TOKENS 8
#define PER (TOKENS / 4)
#define CHANNELS 64
#define WIDTH (N * CHANNELS)    // numbers of a token at a time
#define STRIDE (WIDTH + 4)
#define GROUPS 8
#define EACH ((M + 7) / 8)      // products of a lane
#define GRAM (N * (N + 1) / 2)

KERNEL __launch_bounds__(GROUPS * LANES, 2) void mix(
    float* streams, const Pair* fn, const float* y, float* post, float* m, int update, const float* scale,
    const float* base, const float* norm, float hc_eps, float eps, float* x, float*, int T, int iterations) {
    TAKE_TURN();
    extern __shared__ __align__(16) float memory[];
    float *values = memory, *numbers_ = values + TOKENS * STRIDE;             // [TOKENS][STRIDE], [8 EACH][STRIDE]
    __shared__ float coefficients[TOKENS][N + N * N], totals[TOKENS][SUMS], by[TOKENS][N];
    int tid = threadIdx.x, lane = lane_id(), group = group_id(), first = blockIdx.x * TOKENS;
    int c = tid % CHANNELS, quad = tid / CHANNELS;  // this thread's tokens: PER quad, ...
    for (int i = tid; i < TOKENS * (N + N * N); i += GROUPS * LANES) {
        int t = i / (N + N * N), k = i % (N + N * N), token = min(first + t, T - 1);
        coefficients[t][k] = k < N ? post[token * N + k] : m[token * N * N + k - N];
    }
    float gram[PER][GRAM] = {}, sums[PER][EACH] = {}, old[PER][N], part[PER];
    Pair f[M * WIDTH / 2 / (GROUPS * LANES)];
    auto load = [&](int d) {
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int token = min(first + PER * quad + i, T - 1);
#pragma unroll
            for (int n = 0; n < N; ++n) old[i][n] = streams[((size_t)token * N + n) * D + d + c];
            part[i] = update ? y[(size_t)token * D + d + c] : 0.f;
        }
#pragma unroll
        for (int i = 0; i < M * WIDTH / 2 / (GROUPS * LANES); ++i) {
            int at = i * GROUPS * LANES + tid, row = at / (WIDTH / 2), k = at % (WIDTH / 2) * 2;
            f[i] = fn[((size_t)row * N + k / CHANNELS) * (D / 2) + (d + k % CHANNELS) / 2];
        }
    };
    load(0);
    for (int d = 0; d < D; d += CHANNELS) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int t = PER * quad + i, at_gram = 0;
            float v[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                v[n] = old[i][n];
                if (update) {
                    v[n] = coefficients[t][n] * part[i];
#pragma unroll
                    for (int k = 0; k < N; ++k) v[n] += coefficients[t][N + k * N + n] * old[i][k];
                    if (first + t < T) streams[((size_t)(first + t) * N + n) * D + d + c] = v[n];
                }
                values[t * STRIDE + n * CHANNELS + c] = v[n];
            }
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int k = n; k < N; ++k) gram[i][at_gram++] += v[n] * v[k];
        }
#pragma unroll
        for (int i = 0; i < M * WIDTH / 2 / (GROUPS * LANES); ++i) {
            int at = i * GROUPS * LANES + tid;
            *(float2*)(numbers_ + at / (WIDTH / 2) * STRIDE + at % (WIDTH / 2) * 2) = numbers(f[i]);
        }
        __syncthreads();
        if (d + CHANNELS < D) load(d + CHANNELS);  // on their way while these are multiplied
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
        if (i % (8 * EACH) < M) totals[i / (8 * EACH)][i % (8 * EACH)] = sum;
    }
    for (int t = tid; t < TOKENS; t += GROUPS * LANES) {
        int at = 0;
        for (int n = 0; n < N; ++n)
            for (int k = n; k < N; ++k, ++at)
                totals[t][M + n * N + k] = totals[t][M + k * N + n] =
                    halves[2 * t * GRAM + at] + halves[(2 * t + 1) * GRAM + at];
    }
    __syncthreads();
    if (tid < TOKENS) factors(totals[tid], scale[0], base, hc_eps, eps, by[tid]);
#if M > N
    if (first + tid < min(first + TOKENS, T)) {
        WayBack of = {totals[0], scale, base, iterations, hc_eps, eps, post + first * N, m + first * N * N};
        way_back<N, D>(of, tid);
    }
#endif
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
