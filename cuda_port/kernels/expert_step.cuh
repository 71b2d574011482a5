// The experts of a few tokens, whose matrices lie in tiles of 16 rows and 256 columns (blocks.cuh). A pair is a token
// and one of its experts; pairs are taken in the order of experts, so that a second token finds what the first one read
// in the second cache. Macros: GATE_UP; KIND, WIDTH (columns), ROWS of the matrices; SLOTS of a token; MOST tokens;
// DEPTH, of what is on its way.
//
// Tiles are multiplied on units for tiles of bytes, 16 x 32 by 32 x 8. Lane 4 g + q decodes rows g and g + 8, of
// columns that share a scale; what the other lanes of a row hold has other scales. So the two planes of a vector
// (planes.cuh) are columns 2q and 2q + 1 of B for lane q's share of its rows, and zeros for the shares of others: C
// then holds for each lane the sums of its own share, which it scales without a word to its neighbours.

#ifndef WARPS
#define WARPS 16
#endif
#define THREADS (WARPS * LANES)
#define TILE_ROWS 16
#define SUPERS (WIDTH / 256)            // tiles side by side

extern __shared__ __align__(16) u8 memory[];

// order: pair | expert << 16, ascending where there are several tokens. All threads; `keys` is scratch of 16 bytes for
// four pairs, and order's writes are seen.
DEVICE void sort_pairs(const int* selected, int pairs, int* keys, int* order) {
    int padded = (pairs + 3) / 4 * 4;
    if (MOST == 1) keys = order, padded = pairs;    // they are the order
    for (int i = threadIdx.x; i < padded; i += THREADS) keys[i] = i < pairs ? selected[i] << 16 | i : 0x7fffffff;
    __syncthreads();
    if (MOST == 1) return;
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        int key = keys[i], place = 0;
#pragma unroll 4
        for (int j = 0; j < padded; j += 4) {
            int4 v = *(const int4*)(keys + j);
            place += (v.x < key) + (v.y < key) + (v.z < key) + (v.w < key);
        }
        order[place] = key;
    }
    __syncthreads();
}

DEVICE int pair_of_entry(int entry) { return entry & 65535; }
DEVICE int expert_of_entry(int entry) { return entry >> 16; }

// v[i] of the four lanes of a row added up: lane 4 g + q gets sum q.
DEVICE float quad_sums(const float (&v)[4]) {
    bool upper = lane_id() & 2, odd = lane_id() & 1;
    float a = (upper ? v[2] : v[0]) + lane_xor(upper ? v[0] : v[2], 2);
    float b = (upper ? v[3] : v[1]) + lane_xor(upper ? v[1] : v[3], 2);
    return (odd ? b : a) + lane_xor(odd ? a : b, 1);
}

// Where those sums are, for row r of 32.
DEVICE int lane_of_row(int r) { return r % 8 * 4 + r / 8; }

#if GATE_UP
#include "step_gate_up.cuh"
#else
#include "step_down.cuh"
#endif
