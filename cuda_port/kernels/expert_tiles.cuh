// Many tokens: pairs (token, slot) sorted by expert and cut into tiles, of which a block multiplies one by some rows of
// its expert on units for tiles of halves. Weights are decoded into the registers that multiply them. A block is eight
// groups of lanes, each has all vectors of the tile and rows of its own. Macros: KIND, WIDTH, ROWS, SLOTS, M (of 16
// vectors each).

#define THREADS 256
#define VECTORS (16 * M)
#define K_STEP 128                        // columns
#define STEPS (WIDTH / K_STEP)
#define STAGES 3                          // tiles of x in shared memory
#define PITCH (K_STEP + 32)               // halves: 8 rows fall into different banks
#define ROW_BYTES ((size_t)(WIDTH / Size<KIND>::block * Size<KIND>::bytes))
#define HAS_CODEBOOK (KIND == KIND_IQ2_XXS)
#define TABLES_BYTES (HAS_CODEBOOK * (256 + TILED * 128) * LANES * 4)  // of the codebook, and the signs of tiles
#if TILED
#define ROWS_AT(matrix, row, j) ((matrix) + ((size_t)tile.expert * ROWS + (row) + (j) / 2 * 16) * ROW_BYTES)
#define FETCH(s, rows, j, step) fetch_strip<KIND, WIDTH>(s[j], rows[j], (j) % 2, step)
#else
#define ROWS_AT(matrix, row, j) ((matrix) + ((size_t)tile.expert * ROWS + (row) + (j) * 8 + lane_id() / 4) * ROW_BYTES)
#define FETCH(s, rows, j, step) fetch_strip<KIND, WIDTH>(s[j], rows[j], step)
#endif

// acc[tile of vectors][8 rows] = x of `from` times the rows, UP times too large, for the first `Filled` tiles.
template <int Filled>
DEVICE void multiply(float (&acc)[M][4][4], const __half* x, const int* from, const u8* (&rows)[4], __half* stages,
                     const u8* codebook) {
    int g = lane_id() / 4, q = lane_id() % 4;
    auto copy = [&](int step) {
        __half* to = stages + step % STAGES * (VECTORS * PITCH);
        for (int i = threadIdx.x; step < STEPS && i < 16 * Filled * (K_STEP / 8); i += THREADS) {
            int r = i / (K_STEP / 8), c = i % (K_STEP / 8) * 8;
            copy16(to + r * PITCH + c, x + (size_t)from[r] * WIDTH + step * K_STEP + c);
        }
        copies_end();
    };
    copy(0);
    copy(1);
    Strip<KIND> next[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) FETCH(next, rows, j, 0);
    for (int step = 0; step < STEPS; ++step) {
        Strip<KIND> now[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            now[j] = next[j];
            prepare_strip(now[j]);
            if (step + 1 < STEPS) FETCH(next, rows, j, step + 1);
        }
        await_copies<1>();
        __syncthreads();
        copy(step + 2);
        const __half* tile = stages + step % STAGES * (VECTORS * PITCH) + g * PITCH + 8 * q;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 w[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) octet<KIND>(w[j], now[j], step, i, codebook);
#pragma unroll
            for (int m = 0; m < Filled; ++m) {
                Quad a = *(const Quad*)(tile + 16 * m * PITCH + 32 * i);
                Quad b = *(const Quad*)(tile + (16 * m + 8) * PITCH + 32 * i);
                u32 first[4] = {a.w[0], b.w[0], a.w[1], b.w[1]}, second[4] = {a.w[2], b.w[2], a.w[3], b.w[3]};
                own(first), own(second);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    mma(acc[m][j], first, w[j][0], w[j][1]);
                    mma(acc[m][j], second, w[j][2], w[j][3]);
                }
            }
        }
    }
}

// What no vector is in is left out: with some 48 pairs of an expert, a quarter of every second tile.
DEVICE void multiply(float (&acc)[M][4][4], int count, const __half* x, const int* from, const u8* (&rows)[4],
                     __half* stages, const u8* codebook) {
    if (M > 1 && count <= VECTORS - 16) multiply<M - 1>(acc, x, from, rows, stages, codebook);
    else multiply<M>(acc, x, from, rows, stages, codebook);
}

// `table`: of each tile its expert, its first place in `order` and how many pairs it has, none past the last one.
struct Tile { int expert, first, count; };

extern __shared__ __align__(16) u8 memory[];

#if GATE_UP
// mid[place] = weight swiglu(W1 x, W3 x), in the order of places.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gate_up_tiles(const __half* x, const int* order, const Tile* table, const float* weight, const u8* gate,
                  const u8* up, float limit, __half* mid) {
    __shared__ int from[VECTORS];
    if (HAS_CODEBOOK) fill_codebook(memory, LANES * 4);
    if (HAS_CODEBOOK && TILED) fill_signs(memory + 256 * LANES * 4, 128);
    AWAIT_TURN();
    Tile tile = table[blockIdx.y];
    if (!tile.count) return;
    __half* stages = (__half*)(memory + TABLES_BYTES);
    int g = lane_id() / 4, q = lane_id() % 4, row = ((int)blockIdx.x * (THREADS / LANES) + group_id()) * 16;
    if (threadIdx.x < VECTORS) from[threadIdx.x] = order[tile.first + min((int)threadIdx.x, tile.count - 1)] / SLOTS;
    const u8* rows[4];
    for (int j = 0; j < 4; ++j) rows[j] = ROWS_AT(j < 2 ? gate : up, row, j % 2);
    float acc[M][4][4] = {};
    __syncthreads();
    multiply(acc, tile.count, x, from, rows, stages, memory);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int at = 16 * m + 8 * h + g;
            if (at >= tile.count) continue;
            float by = weight[order[tile.first + at]];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float v[2];
                for (int n = 0; n < 2; ++n)
                    v[n] = by * swiglu(acc[m][j][2 * h + n] * (1 / UP), acc[m][j + 2][2 * h + n] * (1 / UP), limit);
                __half* to = mid + (size_t)(tile.first + at) * ROWS + row + 8 * j + 2 * q;
                *(__half2*)to = __floats2half2_rn(v[0], v[1]);
            }
        }
}
#else
// parts[place] = W2 mid[place].
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    down_tiles(const __half* mid, const Tile* table, const u8* matrix, float* parts) {
    __shared__ int from[VECTORS];
    if (HAS_CODEBOOK) fill_codebook(memory, LANES * 4);
    if (HAS_CODEBOOK && TILED) fill_signs(memory + 256 * LANES * 4, 128);
    AWAIT_TURN();
    Tile tile = table[blockIdx.y];
    if (!tile.count) return;
    __half* stages = (__half*)(memory + TABLES_BYTES);
    int g = lane_id() / 4, q = lane_id() % 4, row = ((int)blockIdx.x * (THREADS / LANES) + group_id()) * 32;
    if (threadIdx.x < VECTORS) from[threadIdx.x] = tile.first + min((int)threadIdx.x, tile.count - 1);
    const u8* rows[4];
    for (int j = 0; j < 4; ++j) rows[j] = ROWS_AT(matrix, row, j);
    float acc[M][4][4] = {};
    __syncthreads();
    multiply(acc, tile.count, mid, from, rows, stages, memory);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int at = 16 * m + 8 * h + g;
            if (at >= tile.count) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                *(float2*)(parts + (size_t)(tile.first + at) * ROWS + row + 8 * j + 2 * q) =
                    make_float2(acc[m][j][2 * h] * (1 / UP), acc[m][j][2 * h + 1] * (1 / UP));
        }
}
#endif
