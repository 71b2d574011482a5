// y[t, n] = sum_k x[t, k] W[n, k] for up to 16 vectors and several matrices that share them. Blocks stay: each takes tiles
// of 8 rows in turn, shares a tile's K columns out among its groups of lanes and adds their parts up. Macros: K; VECTORS, at
// most; HAS_Q8, HAS_F16; PHASES, in which K is covered where all of x does not fit into shared memory; DEPTH, ROUNDS (below).
// `plain` is for all other shapes and types: macros KIND, K.
#include "blocks.cuh"
#include "matvec.cuh"

#if PLAIN
#define ROW_BYTES ((size_t)(KIND == KIND_F32 ? K * 4 : KIND == KIND_F16 || KIND == KIND_BF16 ? K * 2 : \
    KIND == KIND_Q8_0 ? K / 32 * 34 : KIND == KIND_MXFP4 ? K / 32 * 17 : \
    K / 256 * (KIND == KIND_Q2_K ? 84 : KIND == KIND_Q4_K ? 144 : 66)))

// y[v, n] = W x[v / share]: of row n of matrix matrices[v] of a stack where there are any, of block v % groups of a matrix's
// rows otherwise. One group of lanes a result, in float32.
KERNEL void plain(const float* x, const u8* w, const int* matrices, float* y, int rows, int share, int groups,
                  size_t count) {
    AWAIT_INPUTS();
    for (size_t i = blockIdx.x * (size_t)(blockDim.x / LANES) + group_id(); i < count;
         i += (size_t)gridDim.x * (blockDim.x / LANES)) {
        size_t v = i / rows, n = i % rows;
        const u8* row = w + ((matrices ? matrices[v] : v % groups) * (size_t)rows + n) * ROW_BYTES;
        const float* from = x + v / share * K;
        float sum = 0;
        for (int k = lane_id(); k < K; k += LANES) sum += weight_at<KIND>(row, k) * from[k];
        sum = lane_sum(sum);
        if (lane_id() == 0) y[i] = sum;
    }
}
#else

#define THREADS 512
#define WARPS (THREADS / LANES)
#define MATRICES 8                                                 // at most
#define PART (K / PHASES)                                          // columns of a phase
#define SPLIT (PART / SLICE < WARPS ? PART / SLICE : WARPS)        // groups of lanes that share a tile
#define TOGETHER (WARPS / SPLIT)                                   // tiles that a block works on at a time
#define PARTS ((PART / SLICE + SPLIT - 1) / SPLIT)                 // slices of a tile for a group of lanes
#define TOKEN_TILES ((VECTORS + 7) / 8)
#define PLANE (PART + PAD)                                         // bytes
#define HALVES (PART + PAD / 2)
#define PIECES (HAS_F16 ? 8 : 6)                                   // of a slice
#define STAGE (PIECES * LANES)                                     // of a group of lanes, in pieces
#define SUMS (WARPS * VECTORS * 8)                                 // of tiles that a block works on at a time

// `ends`: tiles of matrices 0 .. i of one group. Rows of a group follow one another, groups follow one another.
struct Job {
    const u8* weights[MATRICES];
    float* out[MATRICES];
    int kinds[MATRICES], rows[MATRICES], ends[MATRICES];
    int count, tokens, groups;
};

struct Place { int matrix, row; };

DEVICE Place place(const Job& job, int tile) {
    int m = 0;
    while (m < job.count - 1 && tile >= job.ends[m]) ++m;
    return Place{m, 8 * (tile - (m ? job.ends[m - 1] : 0))};
}

DEVICE void fetch(Ring s, const Job& job, int tile, int k) {
    Place p = place(job, tile);
    size_t row = (size_t)blockIdx.y * job.rows[p.matrix] + p.row;
    const u8* w = job.weights[p.matrix];
#if HAS_Q8 && HAS_F16
    if (job.kinds[p.matrix] == KIND_Q8_0) fetch_q8(s, w + row * (K / 32 * 34), K, k);
    else fetch_f16(s, w + row * (2 * K), K, k);
#elif HAS_Q8
    fetch_q8(s, w + row * (K / 32 * 34), K, k);
#else
    fetch_f16(s, w + row * (2 * K), K, k);
#endif
}

// Each group of lanes keeps DEPTH slices on their way; parts are added up after every ROUNDS tiles.
KERNEL __launch_bounds__(THREADS, 3 - TOKEN_TILES) void decode(const float* x, const __grid_constant__ Job job) {
    extern __shared__ __align__(16) u8 shared[];
    Quad* ring = (Quad*)shared + group_id() * (DEPTH * STAGE) + lane_id();
    u8* high = shared + WARPS * DEPTH * STAGE * sizeof(Quad);
    u8* low = high + HAS_Q8 * VECTORS * PLANE;
    __half* high_half = (__half*)(low + HAS_Q8 * VECTORS * PLANE);
    __half* low_half = high_half + HAS_F16 * VECTORS * HALVES;
    float* scales = (float*)(low_half + HAS_F16 * VECTORS * HALVES);
    float* partial = scales + VECTORS * (PART / BLOCK);               // [2][ROUNDS][SUMS]
    int warp = group_id(), slot = warp / SPLIT, part = warp % SPLIT;
    int tiles = job.ends[job.count - 1], stride = gridDim.x * TOGETHER, base = blockIdx.x * TOGETHER;
    int rounds = base < tiles ? (tiles - base + stride - 1) / stride : 0;
    bool busy = slot < TOGETHER;
    LET_NEXT_BEGIN();
    // Slice `i` of this group of lanes: part i % PARTS of the tile of round i / PARTS.
    auto tile_of = [&](int i) { return base + slot + i / PARTS * stride; };
    auto column = [&](int i) { return (part + i % PARTS * SPLIT) * SLICE; };
    auto has = [&](int i) { return busy && i < rounds * PARTS && tile_of(i) < tiles && column(i) < PART; };
    for (int phase = 0; phase < PHASES; ++phase) {
        auto begin = [&](int i) {
            if (has(i)) fetch(Ring{ring + i % DEPTH * STAGE}, job, tile_of(i), phase * PART + column(i));
            copies_end();
        };
        for (int i = 0; i < DEPTH - 1; ++i) begin(i);
        if (phase == 0) AWAIT_INPUTS();
        else __syncthreads();
        for_blocks<4>(
            job.tokens * (PART / BLOCK),
            [&](int i) {
                return x + ((size_t)(i / (PART / BLOCK)) * job.groups + blockIdx.y) * K + phase * PART
                     + i % (PART / BLOCK) * BLOCK;
            },
            [&](int i, const float(&v)[8]) {
                int t = i / (PART / BLOCK), b = i % (PART / BLOCK) * BLOCK, lane = lane_id();
#if HAS_Q8
                Octets o = encode(v);
                *(Duo*)(high + t * PLANE + b + plane_offset(lane)) = o.high;
                *(Duo*)(low + t * PLANE + b + plane_offset(lane)) = o.low;
                if (lane == 0) scales[i] = o.scale;
#endif
#if HAS_F16
                store_halves(v, high_half + t * HALVES + b + 8 * lane, low_half + t * HALVES + b + 8 * lane);
#endif
            });
        __syncthreads();
        float acc[TOKEN_TILES][4] = {};
        for (int i = 0; i < rounds * PARTS; ++i) {
            begin(i + DEPTH - 1);
            await_copies<DEPTH - 1>();
            if (has(i)) {
                int k = column(i);
                Ring now = {ring + i % DEPTH * STAGE};
#if HAS_F16
                bool bytes = HAS_Q8 && job.kinds[place(job, tile_of(i)).matrix] == KIND_Q8_0;
                if (!bytes) consume_f16(acc, now, high_half + k, low_half + k, HALVES, job.tokens);
#else
                const bool bytes = true;
#endif
#if HAS_Q8
                if (bytes)
                    consume_q8(acc, now, high + k, low + k, PLANE, scales + k / BLOCK, PART / BLOCK, job.tokens);
#endif
            }
            if (i % PARTS < PARTS - 1) continue;
            int round = i / PARTS;
            float* sums = partial + round / ROUNDS % 2 * (ROUNDS * SUMS);
            keep_partial(acc, sums + round % ROUNDS * SUMS + warp * (VECTORS * 8), 8, job.tokens);
#pragma unroll
            for (int m = 0; m < TOKEN_TILES; ++m) acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0;
            if (round % ROUNDS < ROUNDS - 1 && round < rounds - 1) continue;
            __syncthreads();
            int of_round = TOGETHER * job.tokens * 8;
            for (int j = threadIdx.x; j < (round % ROUNDS + 1) * of_round; j += THREADS) {
                int r = j / of_round, of = j % of_round / (8 * job.tokens), t = j / 8 % job.tokens, n = j % 8;
                int tile = base + of + (round / ROUNDS * ROUNDS + r) * stride;
                if (tile >= tiles) continue;
                float sum = 0;
#pragma unroll 4
                for (int w = of * SPLIT; w < (of + 1) * SPLIT; ++w) sum += sums[r * SUMS + (w * VECTORS + t) * 8 + n];
                Place p = place(job, tile);
                float* y = job.out[p.matrix] + ((size_t)t * job.groups + blockIdx.y) * job.rows[p.matrix] + p.row + n;
                *y = phase ? *y + sum : sum;
            }
        }
        await_copies<0>();
    }
}
#endif
