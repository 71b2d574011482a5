// A step in two launches, for graphs in which blocks cannot run as clusters: `parts` leaves each block's sums over its
// channels, `enter` adds them up. Macros: PAIRS of channels of a block; PARTS, such blocks, D = 2 PAIRS PARTS.
#define THREADS (N * PAIRS)
#define GROUPS (THREADS / LANES)
#define OF_STREAM (PAIRS / LANES)  // groups of lanes that have channels of one stream

// Grid (PARTS, T), a thread a pair of channels of one stream. sums [T, PARTS, SUMS] of streams', which go to `after`
// where there is an update.
KERNEL __launch_bounds__(THREADS) void parts(const float* streams, const Pair* fn, const float* y, const float* post,
                                             const float* m, float* after, float* sums) {
    TAKE_TURN();
    __shared__ float partial[GROUPS][LANES + 1], weights[N + N * N];
    int tid = threadIdx.x, j = tid / PAIRS, t = blockIdx.y, at = blockIdx.x * PAIRS + tid % PAIRS;
    if (y && tid < N + N * N) weights[tid] = tid < N ? post[t * N + tid] : m[t * N * N + tid - N];
    float2 old[N], v[N], own = make_float2(0, 0), given = make_float2(0, 0);
#pragma unroll
    for (int n = 0; n < N; ++n) old[n] = ((const float2*)streams)[((size_t)t * N + n) * (D / 2) + at];
    if (y) given = ((const float2*)y)[(size_t)t * (D / 2) + at];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
        v[n] = old[n];
        if (y) {
            v[n] = make_float2(weights[n] * given.x, weights[n] * given.y);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float by_stream = weights[N + i * N + n];
                v[n].x += by_stream * old[i].x, v[n].y += by_stream * old[i].y;
            }
        }
        if (j == n) own = v[n];
    }
    if (y) ((float2*)after)[((size_t)t * N + j) * (D / 2) + at] = own;
    float values[LANES] = {};
#pragma unroll
    for (int i = 0; i < M; ++i) {
        float2 number = numbers(fn[(i * N + j) * (D / 2) + at]);
        values[i] = own.x * number.x + own.y * number.y;
    }
#pragma unroll
    for (int n = 0; n < N; ++n) values[M + n] = own.x * v[n].x + own.y * v[n].y;
    partial[group_id()][lane_id()] = lane_sums(values);
    __syncthreads();
    for (int i = tid; i < SUMS; i += THREADS) {
        int row = (i - M) / N, column = i < M ? i : M + (i - M) % N;  // row n of G has those of stream n
        float sum = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) sum += i < M || g / OF_STREAM == row ? partial[g][column] : 0.f;
        sums[((size_t)t * PARTS + blockIdx.x) * SUMS + i] = sum;
    }
}

// Grid (blocks, T) for x of the streams as `parts` has left them; where there is a way back, the last block makes it.
KERNEL void enter(const float* streams, const float* sums, const float* scale, const float* base, const float* norm,
                  int iterations, float hc_eps, float eps, float* x, float* post, float* m) {
    TAKE_TURN();
    __shared__ float totals[SUMS], by[N];
    int tid = threadIdx.x, t = blockIdx.y, blocks = gridDim.x - (M > N);
    for (int i = tid; i < SUMS; i += blockDim.x) {
        float sum = 0;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) sum += sums[((size_t)t * PARTS + p) * SUMS + i];
        totals[i] = sum;
    }
    __syncthreads();
#if M > N
    if (blockIdx.x == blocks) {
        WayBack back = {totals, scale, base, iterations, hc_eps, eps, post + (size_t)t * N, m + (size_t)t * N * N};
        if (tid == 0) way_back<N, D>(back, 0);
        return;
    }
#endif
    if (tid == 0) factors(totals, scale[0], base, hc_eps, eps, by);
    __syncthreads();
    for (int d = blockIdx.x * blockDim.x + tid; d < D / 4; d += blocks * blockDim.x) {
        float4 sum = make_float4(0, 0, 0, 0), w = ((const float4*)norm)[d];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float4 v = ((const float4*)streams)[((size_t)t * N + n) * (D / 4) + d];
            sum.x += by[n] * v.x, sum.y += by[n] * v.y, sum.z += by[n] * v.z, sum.w += by[n] * v.w;
        }
        ((float4*)x)[(size_t)t * (D / 4) + d] = make_float4(sum.x * w.x, sum.y * w.y, sum.z * w.z, sum.w * w.w);
    }
}
