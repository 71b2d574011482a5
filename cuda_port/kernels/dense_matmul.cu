// y[t, n] = sum_k x[t, k] W[n, k] for up to 16 vectors and several matrices that share them. Blocks stay: each takes
// tiles of 16 rows in turn, shares a tile's K columns out among its groups of lanes and adds their parts up. Macros: K;
// VECTORS, at most; HAS_Q8, HAS_F16; PHASES, in which K is covered where all of x does not fit into shared memory;
// DEPTH, ROUNDS (below). `plain` is for all other shapes and types: macros KIND, K. BATCH: dense_batch.cuh.
#include "blocks.cuh"
#include "matvec.cuh"

#if PLAIN
#define ROW_BYTES ((size_t)(KIND == KIND_F32 ? K * 4 : KIND == KIND_F16 || KIND == KIND_BF16 ? K * 2 : \
    KIND == KIND_Q8_0 ? K / 32 * 34 : KIND == KIND_MXFP4 ? K / 32 * 17 : \
    K / 256 * (KIND == KIND_Q2_K ? 84 : KIND == KIND_Q4_K ? 144 : 66)))

// y[v, n] = W x[v / share]: of row n of matrix matrices[v] of a stack where there are any, of block v % groups of a
// matrix's rows otherwise. One group of lanes a result, in float32.
KERNEL void plain(const float* x, const u8* w, const int* matrices, float* y, int rows, int share, int groups,
                  size_t count) {
    AWAIT_TURN();
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
#elif BATCH
#include "dense_batch.cuh"
#else

#define THREADS 512
#define WARPS (THREADS / LANES)
#define MATRICES 8                                                 // at most
#define PART (K / PHASES)                                                       // columns of a phase
#define SPLIT (PART / Q8_COLUMNS < WARPS ? PART / Q8_COLUMNS : WARPS)           // groups of lanes that share a tile
#define TOGETHER (WARPS / SPLIT)                                                // tiles that a block works on at a time
#define TILES_OF_TOKENS ((VECTORS + 3) / 4)
#define PLANE (PART + PAD)                                                      // bytes
#define HALVES (PART + PAD / 2)
#define SUMS (WARPS * VECTORS * 16)                                             // of tiles worked on at a time

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
    return Place{m, 16 * (tile - (m ? job.ends[m - 1] : 0))};
}

// A group of lanes' way through its tiles: slice `part` of `tile`, whose rows are there.
struct Cursor {
    Rows rows;
    int tile, part, parts, columns;

    DEVICE void locate(const Job& job, int tiles) {
        if (tile >= tiles) return;
        Place p = place(job, tile);
#if HAS_Q8 && HAS_F16
        bool bytes = job.kinds[p.matrix] == KIND_Q8_0;
#else
        const bool bytes = HAS_Q8;
#endif
        columns = bytes ? Q8_COLUMNS : F16_COLUMNS;
        parts = (PART / columns + SPLIT - 1) / SPLIT;
        size_t pitch = bytes ? K / 32 * 34 : 2 * K;
        rows = rows_of(job.weights[p.matrix] + ((size_t)blockIdx.y * job.rows[p.matrix] + p.row) * pitch, pitch);
    }
};

// Each group of lanes keeps DEPTH slices on their way; parts are added up after every ROUNDS tiles.
KERNEL __launch_bounds__(THREADS, TILES_OF_TOKENS > 2 ? 1 : 2) void decode(const float* x,
                                                                            const __grid_constant__ Job job) {
    extern __shared__ __align__(16) u8 shared[];
    u8* ring = shared + group_id() * (DEPTH * SLICE_BYTES);
    u8* planes = shared + WARPS * DEPTH * SLICE_BYTES;
    __half* halves = (__half*)(planes + HAS_Q8 * 2 * VECTORS * PLANE);
    float* scales = (float*)(halves + HAS_F16 * 2 * VECTORS * HALVES);
    float* partial = scales + VECTORS * (PART / BLOCK);               // [2][ROUNDS][SUMS]
    int slot = group_id() / SPLIT, split = group_id() % SPLIT;
    int tiles = job.ends[job.count - 1], stride = gridDim.x * TOGETHER, base = blockIdx.x * TOGETHER;
    int rounds = base < tiles ? (tiles - base + stride - 1) / stride : 0;
    int mine = slot < TOGETHER ? tiles : 0;  // where this group of lanes stops
    for (int phase = 0; phase < PHASES; ++phase) {
        Cursor ahead = {{}, base + slot};
        ahead.locate(job, mine);
        int in = 0, out = 0;  // stages of the ring
        auto begin = [&]() {
            if (ahead.tile < mine) {
                int k = (ahead.part * SPLIT + split) * ahead.columns;
                Ring to = {ring + in * SLICE_BYTES};
                if (k < PART) {
                    k += phase * PART;
                    if (HAS_Q8 && (!HAS_F16 || ahead.columns == Q8_COLUMNS)) fetch_q8(to, ahead.rows, K, k);
                    else fetch_f16(to, ahead.rows, k);
                }
                if (++ahead.part == ahead.parts) {
                    ahead.part = 0;
                    ahead.tile += stride;
                    ahead.locate(job, mine);
                }
            }
            copies_end();
            in = in + 1 == DEPTH ? 0 : in + 1;
        };
        for (int i = 0; i < DEPTH; ++i) begin();
        if (phase == 0) HOLD_TURN();
        else __syncthreads();
        for_blocks<TILES_OF_TOKENS == 1 ? 2 : 4>(
            job.tokens * (PART / BLOCK),
            [&](int i) {
                return x + ((size_t)(i / (PART / BLOCK)) * job.groups + blockIdx.y) * K + phase * PART
                     + i % (PART / BLOCK) * BLOCK;
            },
            [&](int i, const float(&v)[8]) {
                int t = i / (PART / BLOCK), b = i % (PART / BLOCK) * BLOCK, lane = lane_id();
#if HAS_Q8
                Octets o = encode(v);
                u8* to = planes + 2 * t * PLANE + b + plane_offset(lane);
                *(Duo*)to = o.high;
                *(Duo*)(to + PLANE) = o.low;
                if (lane == 0) scales[i] = o.scale;
#endif
#if HAS_F16
                store_halves(v, halves + 2 * t * HALVES + b + 8 * lane, halves + (2 * t + 1) * HALVES + b + 8 * lane);
#endif
            });
        __syncthreads();
        Cursor now = {{}, base + slot};
        for (int round = 0; round < rounds; ++round, now.tile += stride) {
            float acc[TILES_OF_TOKENS][4] = {};
            if (HAS_Q8 && HAS_F16 || round == 0) now.locate(job, mine);
            for (int part = 0; now.tile < mine && part < now.parts; ++part) {
                await_copies<DEPTH - 1>();
                int k = (part * SPLIT + split) * now.columns;
                Ring from = {ring + out * SLICE_BYTES};
                out = out + 1 == DEPTH ? 0 : out + 1;
                if (k < PART) {
                    if (HAS_Q8 && (!HAS_F16 || now.columns == Q8_COLUMNS))
                        consume_q8(acc, from, SharedVectors{planes + k, PLANE, job.tokens, scales + k / BLOCK,
                                                            PART / BLOCK});
                    else consume_f16(acc, from, SharedVectors{(const u8*)(halves + k), 2 * HALVES, job.tokens});
                }
                begin();  // where the slice was that has just been read
            }
            float* sums = partial + round / ROUNDS % 2 * (ROUNDS * SUMS);
            keep_partial(acc, sums + round % ROUNDS * SUMS + group_id() * (VECTORS * 16), 16, job.tokens);
            if (round % ROUNDS < ROUNDS - 1 && round < rounds - 1) continue;
            __syncthreads();
            int of_round = TOGETHER * job.tokens * 16;
            for (int j = threadIdx.x; j < (round % ROUNDS + 1) * of_round; j += THREADS) {
                int r = j / of_round, of = j % of_round / (16 * job.tokens), t = j / 16 % job.tokens, n = j % 16;
                int tile = base + of + (round / ROUNDS * ROUNDS + r) * stride;
                if (tile >= tiles) continue;
                float sum = 0;
#pragma unroll
                for (int w = 0; w < SPLIT; ++w) sum += sums[r * SUMS + ((of * SPLIT + w) * VECTORS + t) * 16 + n];
                Place p = place(job, tile);
                float* y = job.out[p.matrix] + ((size_t)t * job.groups + blockIdx.y) * job.rows[p.matrix] + p.row + n;
                *y = phase ? *y + sum : sum;
            }
        }
        await_copies<0>();
    }
}
#endif
