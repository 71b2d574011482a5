// Between the products of many tokens: pairs sorted by expert, SwiGLU of whole matrices, the sum over a token's slots.

#define MOST_EXPERTS 1024

struct Tile { int expert, first, count; };

// order: pairs, those of an expert next to one another, in no order of their own; place: where each pair is in it;
// table: tiles of up to `size` pairs of one expert, `tiles` entries, the last of them empty. One block.
KERNEL void group(const int* selected, int pairs, int experts, int size, int tiles, int* order, int* place,
                  Tile* table) {
    __shared__ int count[MOST_EXPERTS], first[MOST_EXPERTS], tile[MOST_EXPERTS + 1];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) count[e] = 0;
    AWAIT_TURN();
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) atomicAdd(count + selected[i], 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        int at = 0, to = 0;
        for (int e = 0; e < experts; ++e) {
            first[e] = at, tile[e] = to;
            at += count[e], to += (count[e] + size - 1) / size;
        }
        tile[experts] = to;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        for (int k = 0; k * size < count[e]; ++k)
            table[tile[e] + k] = Tile{e, first[e] + k * size, min(size, count[e] - k * size)};
        count[e] = 0;
    }
    for (int i = tile[experts] + threadIdx.x; i < tiles; i += blockDim.x) table[i] = Tile{0, 0, 0};
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        int e = selected[i], at = first[e] + atomicAdd(count + e, 1);
        order[at] = i;
        place[i] = at;
    }
}

DEVICE void put(float* p, float v) { *p = v; }
DEVICE void put(__half* p, float v) { *p = __float2half_rn(v); }

// out [V, rows] = weight[v] swiglu(gate, up), weight 1 where there is none.
KERNEL void join(const float* gate, const float* up, const float* weight, float limit, OUT* out, int rows,
                 size_t count) {
    AWAIT_TURN();
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        put(out + i, (weight ? weight[i / rows] : 1.f) * swiglu(gate[i], up[i], limit));
}

// y[t] += sum_s parts[place[t, s]], in the order of slots; place is t slots + s where there is none.
KERNEL void add_slots(const float* parts, const int* place, float* y, int slots, int rows, size_t count) {
    AWAIT_TURN();
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count / 4; i += (size_t)gridDim.x * blockDim.x) {
        size_t t = i / (rows / 4), d = i % (rows / 4);
        float4 sum = ((float4*)y)[i];
        for (int s = 0; s < slots; ++s) {
            size_t at = place ? place[t * slots + s] : t * slots + s;
            float4 v = ((const float4*)parts)[at * (rows / 4) + d];
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        ((float4*)y)[i] = sum;
    }
}
