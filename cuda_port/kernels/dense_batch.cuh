// y[t, n] = sum_k x[t, k] W[n, k] for 5 to 16 vectors and several matrices that share them. Blocks stay: each takes
// tiles of 16 rows in turn, shares a tile's K columns out among its groups of lanes and adds their parts up. A group of
// lanes always has the same columns, so it keeps its part of the vectors in registers. Macros: K; VECTORS, at most;
// HAS_Q8, HAS_F16; PHASES, in which K is covered where registers do not hold all of x; DEPTH, slices on their way to
// each group of lanes. Fewer vectors: dense_matmul.cu.
#define THREADS 512
#define WARPS (THREADS / LANES)
#define MATRICES 8
#define PART (K / PHASES)
#define SPLIT (PART / 256 < WARPS ? PART / 256 : WARPS)
#define COLUMNS ((PART / 256 + SPLIT - 1) / SPLIT * 256)   // of a group of lanes
#define ROW_PITCH (HAS_F16 ? 512 + 64 : 256 + 64)           // bytes, of a vector's part for 256 columns
#define ROWS_BYTES (8 * ROW_PITCH)
#define TOGETHER (WARPS / SPLIT)
#define TILE_ROWS 16
#define SUMS (WARPS * VECTORS * TILE_ROWS)

struct Job {
    const u8* weights[MATRICES];
    float* out[MATRICES];
    int rows[MATRICES], ends[MATRICES];
    int count, tokens, groups;
    int bytes_blocks, bytes_count;  // Q8_0 comes first, of the blocks too
    u8* planes;                     // [tokens][2][K] and [tokens][K / 256], for who multiplies x next; or null
    float* scales;
};

struct Place { int matrix, row; };

DEVICE Place place(const Job& job, int tile, int first) {
    int m = first;
    while (m < job.count - 1 && tile >= job.ends[m]) ++m;
    return Place{m, 16 * (tile - (m ? job.ends[m - 1] : 0))};
}

// Columns of the vectors that a group of lanes keeps in registers, as columns of B.
template <bool BYTES>
struct Columns {
    static const int columns = BYTES ? Q8_COLUMNS : F16_COLUMNS;
    static const int parts = COLUMNS / columns;
    static const int vectors = BYTES || VECTORS < 8 ? VECTORS : 8;
    static const int tiles = (vectors + 3) / 4;     // a vector is two columns of B, its high and low parts
    u32 b[parts][tiles][8];
    float scale[COLUMNS / 256][tiles];                            // of vector 4 n + q

    // x: of the first column of the phase, vectors `pitch` floats apart. `rows`: of this group of lanes, for a while.
    DEVICE void load(const float* x, size_t pitch, int split, int tokens, u8* rows, const Job& job) {
        int lane = lane_id(), g = lane / 4, q = lane % 4;
#pragma unroll
        for (int j = 0; j < COLUMNS / 256; ++j) {
            int k = split * COLUMNS + 256 * j < PART ? split * COLUMNS + 256 * j : 0;
#pragma unroll
            for (int n = 0; n < tiles; ++n) {
                float v[4][8];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4* from = (const float4*)(x + min(4 * n + i, tokens - 1) * pitch + k + 8 * lane);
                    *(float4*)v[i] = from[0], *(float4*)(v[i] + 4) = from[1];
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    u8* to = rows + 2 * i * ROW_PITCH;
                    if (BYTES) {
                        Octets o = encode(v[i]);
                        *(Duo*)(to + plane_offset(lane)) = o.high, *(Duo*)(to + ROW_PITCH + plane_offset(lane)) = o.low;
                        if (i == q) scale[j][n] = o.scale;
                        if (job.planes && 4 * n + i == (int)blockIdx.x && k == split * COLUMNS + 256 * j) {
                            u8* kept = job.planes + (size_t)blockIdx.x * 2 * K + k + 8 * lane;
                            *(Duo*)kept = o.high, *(Duo*)(kept + K) = o.low;
                            if (lane == 0) job.scales[blockIdx.x * (K / 256) + k / 256] = o.scale;
                        }
                    } else store_halves(v[i], (__half*)to + 8 * lane, (__half*)(to + ROW_PITCH) + 8 * lane);
                }
                lanes_meet();
#pragma unroll
                for (int i = 0; i < 256 / 64; ++i) {    // quads of a lane for 64 columns of bytes, or two for halves
#pragma unroll
                    for (int h = 0; h < (BYTES ? 1 : 2); ++h) {
                        Quad w = *(const Quad*)(rows + g * ROW_PITCH + (BYTES ? 64 * i : 128 * i + 64 * h) + 16 * q);
                        const int at = BYTES ? 4 * (i % 2) : 4 * h, part = j * (256 / columns) + (BYTES ? i / 2 : i);
#pragma unroll
                        for (int c = 0; c < 4; ++c) b[part][n][at + c] = w.w[c];
                    }
                }
                lanes_meet();
            }
        }
    }

    DEVICE void fetch(Ring& to, Rows rows, int k) const {
        if (BYTES) fetch_q8(to, rows, K, k);
        else fetch_f16(to, rows, k);
    }

    // acc += of a slice.
    DEVICE void consume(float (&acc)[tiles][4], const Ring& s, int p) const {
        if (BYTES) {
            float sum[tiles][2] = {};
            Duo d0 = s.scales(0), d1 = s.scales(1);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                Quad a = s.get(c), e = s.get(2 + c);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float by0 = half_bits(d0.w[c] >> 16 * i), by1 = half_bits(d1.w[c] >> 16 * i);
                    u32 w[4] = {a.w[2 * i], e.w[2 * i], a.w[2 * i + 1], e.w[2 * i + 1]};
#pragma unroll
                    for (int n = 0; n < tiles; ++n) {
                        int dot[4] = {};
                        mma_bytes(dot, w, b[p][n][4 * c + 2 * i], b[p][n][4 * c + 2 * i + 1]);
                        sum[n][0] += by0 * (float)(dot[0] * 256 + dot[1]);
                        sum[n][1] += by1 * (float)(dot[2] * 256 + dot[3]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < tiles; ++n) {
                acc[n][0] += scale[p * columns / 256][n] * sum[n][0];
                acc[n][2] += scale[p * columns / 256][n] * sum[n][1];
            }
        } else {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                Quad a = s.get(c), e = s.get(2 + c);
                u32 first[4] = {a.w[0], e.w[0], a.w[1], e.w[1]}, second[4] = {a.w[2], e.w[2], a.w[3], e.w[3]};
#pragma unroll
                for (int n = 0; n < tiles; ++n) {
                    mma(acc[n], first, b[p][n][4 * c], b[p][n][4 * c + 1]);
                    mma(acc[n], second, b[p][n][4 * c + 2], b[p][n][4 * c + 3]);
                }
            }
        }
    }

    DEVICE void keep(const float (&acc)[tiles][4], float* partial, int tokens) const {
        int g = lane_id() / 4, q = lane_id() % 4;
#pragma unroll
        for (int n = 0; n < tiles; ++n)
            if (4 * n + q < tokens) {
                float* to = partial + (4 * n + q) * TILE_ROWS;
                to[g] = acc[n][0] + (BYTES ? 0 : acc[n][1]), to[8 + g] = acc[n][2] + (BYTES ? 0 : acc[n][3]);
            }
    }
};

// Tiles first_tile ... of the matrices from `matrix` on, block `block` of `blocks` for them.
template <bool BYTES>
DEVICE void multiply(const float* x, const Job& job, int matrix, int first_tile, int tiles, int block, int blocks) {
    extern __shared__ __align__(16) u8 shared[];
    u8* ring = shared + group_id() * (DEPTH * SLICE_BYTES);
    u8* rows_of_x = shared + WARPS * DEPTH * SLICE_BYTES + group_id() * ROWS_BYTES;
    float* partial = (float*)(shared + WARPS * (DEPTH * SLICE_BYTES + ROWS_BYTES));     // [2][SUMS]
    Columns<BYTES> columns;
    // Halves for more than 8 vectors are more than registers hold: every second block has the other vectors.
    const int sets = VECTORS / Columns<BYTES>::vectors;
    int first = block % sets * Columns<BYTES>::vectors, tokens = min(job.tokens - first, Columns<BYTES>::vectors);
    int slot = group_id() / SPLIT, split = group_id() % SPLIT;
    int stride = blocks / sets * TOGETHER, base = first_tile + block / sets * TOGETHER;
    int rounds = base < tiles ? (tiles - base + stride - 1) / stride : 0;
    int mine = slot < TOGETHER ? tiles : 0;  // where this group of lanes stops
    const size_t pitch = BYTES ? K / 32 * 34 : 2 * K;
    auto rows = [&](int tile) {
        Place p = place(job, tile, matrix);
        return rows_of(job.weights[p.matrix] + ((size_t)blockIdx.y * job.rows[p.matrix] + p.row) * pitch, pitch);
    };
    int ahead = base + slot, ahead_phase = 0, part = 0, in = 0, out = 0, turn = 0;  // out, in: stages of the ring
    Rows at = {};
    if (ahead < mine) at = rows(ahead);
    auto begin = [&]() {
        if (ahead < mine) {
            int k = split * COLUMNS + part * columns.columns;
            Ring to = {ring + in * SLICE_BYTES};
            if (k < PART) columns.fetch(to, at, k + ahead_phase * PART);
            if (++part == columns.parts) {
                part = 0;
                ahead += stride;
                if (ahead >= mine && ahead_phase + 1 < PHASES) ++ahead_phase, ahead = base + slot;
                if (ahead < mine) at = rows(ahead);
            }
        }
        copies_end();
        in = in + 1 == DEPTH ? 0 : in + 1;
    };
    for (int i = 0; i < DEPTH; ++i) begin();
    for (int phase = 0; phase < PHASES; ++phase) {
        if (phase == 0) AWAIT_TURN();
        columns.load(x + ((size_t)first * job.groups + blockIdx.y) * K + phase * PART, (size_t)job.groups * K, split,
                     tokens, rows_of_x, job);
        for (int round = 0; round < rounds; ++round, ++turn) {
            float acc[columns.tiles][4] = {};
            if (base + slot + round * stride < mine)
#pragma unroll
                for (int p = 0; p < columns.parts; ++p) {
                    await_copies<DEPTH - 1>();
                    Ring from = {ring + out * SLICE_BYTES};
                    out = out + 1 == DEPTH ? 0 : out + 1;
                    if (split * COLUMNS + p * columns.columns < PART) columns.consume(acc, from, p);
                    begin();    // where the slice was that has just been read
                }
            float* sums = partial + turn % 2 * SUMS;
            columns.keep(acc, sums + group_id() * (VECTORS * TILE_ROWS), tokens);
            __syncthreads();
            for (int j = threadIdx.x; j < TOGETHER * tokens * TILE_ROWS; j += THREADS) {
                int of = j / (TILE_ROWS * tokens), t = j / TILE_ROWS % tokens, n = j % TILE_ROWS;
                int tile = base + of + round * stride;
                if (tile >= tiles) continue;
                float sum = 0;
#pragma unroll
                for (int w = 0; w < SPLIT; ++w) sum += sums[((of * SPLIT + w) * VECTORS + t) * TILE_ROWS + n];
                Place p = place(job, tile, matrix);
                size_t row = ((size_t)(first + t) * job.groups + blockIdx.y) * job.rows[p.matrix] + p.row + n;
                float* y = job.out[p.matrix] + row;
                *y = phase ? *y + sum : sum;
            }
        }
    }
    await_copies<0>();
}

KERNEL __launch_bounds__(THREADS, 1) void batch(const float* x, const __grid_constant__ Job job) {
    PASS_TURN();
    int blocks = job.bytes_blocks, tiles = job.bytes_count ? job.ends[job.bytes_count - 1] : 0, block = blockIdx.x;
    if (HAS_Q8 && (!HAS_F16 || block < blocks)) multiply<true>(x, job, 0, 0, tiles, block, blocks);
    else if (HAS_F16)
        multiply<false>(x, job, job.bytes_count, tiles, job.ends[job.count - 1], block - blocks, gridDim.x - blocks);
}
