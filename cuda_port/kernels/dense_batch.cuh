// y[t, n] = sum_k x[t, k] W[n, k] for 5 to 16 vectors and several matrices that share them. A cluster of SHARES blocks
// shares out K's columns, so that each block reads and encodes its part of the vectors alone; it takes tiles of 16 rows
// in turn, and shares a tile's columns out among its groups of lanes, which keep their part of the vectors in
// registers. What the blocks have found for all their tiles they add up at the end. Macros: K; VECTORS, at most;
// HAS_Q8, HAS_F16; SHARES; TOTALS, tiles of a cluster at most, where there are SHARES; DEPTH, slices on their way to
// each group of lanes; STAGED_BYTES, of vectors that are being encoded. Fewer vectors: dense_matmul.cu.
#include "cluster.cuh"

#define THREADS 512
#define WARPS (THREADS / LANES)
#define MATRICES 8
#define PART (K / SHARES)               // columns of a block
#define TILE_ROWS 16
#define RESULTS (VECTORS * TILE_ROWS)   // of a tile

struct Job {
    const u8* weights[MATRICES];
    float* out[MATRICES];
    int rows[MATRICES], ends[MATRICES];
    int count, tokens, groups;
    int bytes_clusters, bytes_count;    // Q8_0 comes first, of the clusters too
    u8* planes;                         // [tokens][2][K] and [tokens][K / 256], for who multiplies x next; or null
    float* scales;
};

struct Place { int matrix, row; };

DEVICE Place place(const Job& job, int tile, int first) {
    int m = first;
    while (m < job.count - 1 && tile >= job.ends[m]) ++m;
    return Place{m, 16 * (tile - (m ? job.ends[m - 1] : 0))};
}

// How a block's columns are shared out among its groups of lanes, and what is staged of the vectors.
template <bool BYTES>
struct Shape {
    static const int columns = BYTES ? Q8_COLUMNS : F16_COLUMNS;    // of a slice
    static const int least = BYTES || VECTORS <= 8 ? 256 : 128;     // of a group of lanes: what registers hold
    static const int split = PART / least < WARPS ? PART / least : WARPS;
    static const int width = (PART / least + split - 1) / split * least;    // of a group of lanes
    static const int parts = width / columns;
    static const int together = WARPS / split;  // tiles at a time, each of a team of groups of lanes
    static const int tiles = VECTORS / 4;       // a vector is two columns of B, its high and low parts
    static const int of_vector = PART * (BYTES ? 2 : 4);
    static const int staged = VECTORS * of_vector <= STAGED_BYTES ? VECTORS
                              : VECTORS > 8 && 8 * of_vector <= STAGED_BYTES ? 8 : 4;   // vectors at a time

    // A barrier of a team, or of the block where some groups of lanes belong to none.
    static DEVICE void meet(int team) {
        if (together * split < WARPS) __syncthreads();
        else team_meets<split>(team);
    }
};

// Whose part of K a block has, and for which tiles.
struct Share { int rank, cluster, clusters; };

// Where four lanes' 16 bytes of columns 64 i + 32 c ... lie in what is staged: `vectors` of them.
template <int Vectors>
DEVICE int staged_at(int i, int c, int v) { return ((i * (Vectors / 4) + v / 4) * 2 + c) * 512 + v % 4 * 128; }

// Columns of the vectors that a group of lanes keeps in registers, as columns of B.
template <bool BYTES>
struct Columns {
    typedef Shape<BYTES> S;
    Quad b[S::parts][S::tiles][2];
    float by[(S::width + 255) / 256][S::tiles];     // of vector 4 n + q

    struct Held {
        const Quad (&b)[S::tiles][2];
        const float (&by)[S::tiles];
        DEVICE Quad get(int n, int c) const { return b[n][c]; }
        DEVICE float scale(int n) const { return by[n]; }
    };
    DEVICE Held part(int p) const { return Held{b[p], by[p * S::columns / 256]}; }

    // x: of this block's columns, vectors `pitch` floats apart; first: of this group of lanes. All threads; nothing
    // that was staged is needed any more when it returns.
    DEVICE void load(const float* x, size_t pitch, int first, const Job& job, Share share, u8* staged, float* scales) {
        const int blocks = PART / 256;
        int lane = lane_id(), q = lane % 4;
#pragma unroll
        for (int start = 0; start < VECTORS; start += S::staged) {
            for_blocks<S::staged == 4 ? 2 : 4>(
                max(min(job.tokens - start, S::staged), 0) * blocks,
                [&](int i) { return x + (start + i / blocks) * pitch + i % blocks * 256; },
                [&](int i, const float(&v)[8]) {
                    int t = i / blocks, block = i % blocks;
                    if (BYTES) {
                        Octets o = encode(v);
                        u8* to = staged + staged_at<S::staged>(block * 2 + lane / 16, lane / 8 % 2, t) + 16 * q
                               + lane / 4 % 2 * 8;
                        *(Duo*)to = o.high, *(Duo*)(to + 64) = o.low;
                        if (lane == 0) scales[block * VECTORS + start + t] = o.scale;
                        if (job.planes && (start + t) % share.clusters == share.cluster)
                            keep(job, share, start + t, block, o);
                    } else {
                        u8* to = staged + staged_at<S::staged>(block * 4 + lane / 8, lane / 4 % 2, t) + 16 * q;
                        store_halves(v, (__half*)to, (__half*)(to + 64));
                    }
                });
            __syncthreads();
#pragma unroll
            for (int p = 0; p < S::parts; ++p)
#pragma unroll
                for (int n = 0; n < S::staged / 4; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        if (first + p * S::columns < PART)
                            b[p][start / 4 + n][c] = *(const Quad*)(
                                staged + staged_at<S::staged>(first / S::columns + p, c, 4 * n) + 16 * lane);
            if (BYTES && start + S::staged == VECTORS)
#pragma unroll
                for (int j = 0; j < S::width / 256; ++j)
#pragma unroll
                    for (int n = 0; n < S::tiles; ++n)
                        by[j][n] = first + 256 * j < PART ? scales[(first / 256 + j) * VECTORS + 4 * n + q] : 0.f;
            __syncthreads();
        }
    }

    static DEVICE void keep(const Job& job, Share share, int t, int block, const Octets& o) {
        int k = share.rank * PART + 256 * block;
        u8* to = job.planes + (size_t)t * 2 * K + k + 8 * lane_id();
        *(Duo*)to = o.high, *(Duo*)(to + K) = o.low;
        if (lane_id() == 0) job.scales[t * (K / 256) + k / 256] = o.scale;
    }
};

// A group of lanes' way through its tiles.
struct Way {
    const u8* at;   // this lane's first row
    int tile, end;  // of the matrix

    template <size_t Pitch>
    DEVICE void locate(const Job& job, int matrix) {
        Place p = place(job, tile, matrix);
        at = job.weights[p.matrix] + ((size_t)blockIdx.y * job.rows[p.matrix] + p.row + lane_id() / 4) * Pitch;
        end = job.ends[p.matrix];
    }
    template <size_t Pitch>
    DEVICE void advance(const Job& job, int matrix, int stride, int stop) {
        tile += stride;
        if (tile < end) at += (size_t)stride * (TILE_ROWS * Pitch);
        else if (tile < stop) locate<Pitch>(job, matrix);
    }
};

DEVICE void put(const Job& job, int matrix, int tile, int i, float sum) {
    Place p = place(job, tile, matrix);
    int t = i / TILE_ROWS, rows = job.rows[p.matrix];
    job.out[p.matrix][((size_t)t * job.groups + blockIdx.y) * rows + p.row + i % TILE_ROWS] = sum;
}

// Tiles first_tile ... of the matrices from `matrix` on.
template <bool BYTES>
DEVICE void multiply(const float* x, const Job& job, int matrix, int first_tile, int tiles, Share share) {
    typedef Shape<BYTES> S;
    extern __shared__ __align__(16) u8 shared[];
    u8* ring = shared + group_id() * (DEPTH * SLICE_BYTES);
    u8* staged = shared + WARPS * DEPTH * SLICE_BYTES;
    float* partial = (float*)staged;                        // [2][WARPS][RESULTS]
    float* scales = (float*)(staged + STAGED_BYTES);        // [PART / 256][VECTORS]
    float* totals = scales + PART / 256 * VECTORS;          // [TOTALS][RESULTS]
    int slot = group_id() / S::split, first = group_id() % S::split * S::width;
    int stride = share.clusters * S::together, base = first_tile + share.cluster * S::together;
    int rounds = base < tiles ? (tiles - base + stride - 1) / stride : 0;
    int mine = slot < S::together ? tiles : 0;  // where this group of lanes stops
    const size_t pitch = BYTES ? K / 32 * 34 : 2 * K;
    Way ahead = {0, base + slot, 0};
    if (ahead.tile < mine) ahead.locate<pitch>(job, matrix);
    int part = 0, in = 0, out = 0;              // in, out: stages of the ring
    auto begin = [&]() {
        if (ahead.tile < mine) {
            int k = first + part * S::columns;
            Ring to = {ring + in * SLICE_BYTES};
            Rows rows = {ahead.at, ahead.at + 8 * pitch};
            if (k < PART) {
                if (BYTES) fetch_q8(to, rows, K, share.rank * PART + k);
                else fetch_f16(to, rows, share.rank * PART + k);
            }
            if (++part == S::parts) part = 0, ahead.advance<pitch>(job, matrix, stride, mine);
        }
        copies_end();
        in = in + 1 == DEPTH ? 0 : in + 1;
    };
    for (int i = 0; i < DEPTH; ++i) begin();
    HOLD_TURN();
    Columns<BYTES> columns;
    columns.load(x + (size_t)blockIdx.y * K + share.rank * PART, (size_t)job.groups * K, first, job, share, staged,
                 scales);
    for (int round = 0; round < rounds; ++round) {
        float acc[S::tiles][4] = {};
        if (base + slot + round * stride < mine)
#pragma unroll
            for (int p = 0; p < S::parts; ++p) {
                await_copies<DEPTH - 1>();
                Ring from = {ring + out * SLICE_BYTES};
                out = out + 1 == DEPTH ? 0 : out + 1;
                if (first + p * S::columns < PART) {
                    if (BYTES) consume_q8(acc, from, columns.part(p));
                    else consume_f16(acc, from, columns.part(p));
                }
                begin();    // where the slice was that has just been read
            }
        float* sums = partial + round % 2 * (WARPS * RESULTS);
        keep_partial(acc, sums + group_id() * RESULTS, TILE_ROWS, job.tokens);
        S::meet(slot);
        int tile = base + slot + round * stride;
        if (tile >= mine) continue;
#pragma unroll
        for (int i = threadIdx.x % (S::split * LANES); i < RESULTS; i += S::split * LANES) {
            if (i / TILE_ROWS >= job.tokens) break;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < S::split; ++w) sum += sums[(slot * S::split + w) * RESULTS + i];
            if (SHARES > 1) totals[(round * S::together + slot) * RESULTS + i] = sum;
            else put(job, matrix, tile, i, sum);
        }
    }
    await_copies<0>();
    if (SHARES == 1) return;
    cluster_share();
    for (int j = share.rank * THREADS + threadIdx.x; j < rounds * S::together * RESULTS; j += SHARES * THREADS) {
        int of = j / RESULTS, i = j % RESULTS, tile = base + of % S::together + of / S::together * stride;
        if (tile >= tiles || i / TILE_ROWS >= job.tokens) continue;
        float sum = 0;
#pragma unroll
        for (int r = 0; r < SHARES; ++r) sum += remote_float(totals + j, r);
        put(job, matrix, tile, i, sum);
    }
    cluster_share();    // a block must not end while its totals are read
}

KERNEL CLUSTER_OF(SHARES, 1, 1) __launch_bounds__(THREADS, 1) void batch(const float* x,
                                                                         const __grid_constant__ Job job) {
    int cluster = blockIdx.x / SHARES, rank = blockIdx.x % SHARES, clusters = gridDim.x / SHARES;
    int bytes = job.bytes_clusters, tiles = job.bytes_count ? job.ends[job.bytes_count - 1] : 0;
    if (HAS_Q8 && (!HAS_F16 || cluster < bytes)) multiply<true>(x, job, 0, 0, tiles, Share{rank, cluster, bytes});
    else if (HAS_F16)
        multiply<false>(x, job, job.bytes_count, tiles, job.ends[job.count - 1],
                        Share{rank, cluster - bytes, clusters - bytes});
}
