// 32 lanes that work together, whether the hardware runs 32 or 64 of them in step; a block is some such groups.
#ifndef DS4_LANES
#define DS4_LANES
#if defined(__HIP__)
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#define __grid_constant__
#else
#include <cuda_fp16.h>
#endif

// What the card can do that others cannot, as __CUDA_ARCH__ tells. DS4_PLAIN: nothing, to try here what runs there.
#if defined(__CUDA_ARCH__) && !defined(DS4_PLAIN)
#define DS4_ARCH __CUDA_ARCH__
#else
#define DS4_ARCH 0
#endif

// A step's kernels are launched before the ones in front of them have ended: each lets the next one begin, and then
// waits until what is in front is done and its writes are seen. Weights may be read before.
#if DS4_ARCH >= 900
#define PASS_TURN() asm volatile("griddepcontrol.launch_dependents;")
#define AWAIT_TURN() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define PASS_TURN()
#define AWAIT_TURN()
#endif
#define TAKE_TURN() PASS_TURN(); AWAIT_TURN()
// As long kernels do it, whose multiprocessors have no room for the next one's blocks anyway: once that one has begun,
// all that was in front of this one is done, and may be read before the next turn, past the first cache (`settled`).
#define HOLD_TURN() do { AWAIT_TURN(); PASS_TURN(); } while (0)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define LANES 32
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define INFINITE __int_as_float(0x7f800000)

DEVICE float2 settled(const float2* p) {
#if DS4_ARCH
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
#else
    return *p;
#endif
}

DEVICE int lane_id() { return threadIdx.x % LANES; }
DEVICE int group_id() { return threadIdx.x / LANES; }

template <class T>
DEVICE T lane_xor(T v, int mask) {
#if defined(__HIP__)
    return __shfl_xor(v, mask, LANES);
#else
    return __shfl_xor_sync(0xffffffffu, v, mask);
#endif
}

template <class T>
DEVICE T lane_get(T v, int from) {
#if defined(__HIP__)
    return __shfl(v, from, LANES);
#else
    return __shfl_sync(0xffffffffu, v, from);
#endif
}

// Lane l's value from lane l - by, its own where there is none.
template <class T>
DEVICE T lane_up(T v, int by) {
#if defined(__HIP__)
    return __shfl_up(v, by, LANES);
#else
    return __shfl_up_sync(0xffffffffu, v, by);
#endif
}

DEVICE float lane_sum(float v) {
    for (int mask = LANES / 2; mask; mask /= 2) v += lane_xor(v, mask);
    return v;
}

DEVICE float lane_max(float v) {
    for (int mask = LANES / 2; mask; mask /= 2) v = fmaxf(v, lane_xor(v, mask));
    return v;
}

DEVICE u32 lanes_max(u32 v) {
#if DS4_ARCH >= 800
    return __reduce_max_sync(0xffffffffu, v);
#else
    for (int mask = LANES / 2; mask; mask /= 2) v = max(v, lane_xor(v, mask));
    return v;
#endif
}

DEVICE u32 lanes_min(u32 v) { return ~lanes_max(~v); }

// A barrier of `Groups` consecutive groups of lanes, the `team`-th of a block. Without a card that has such barriers it
// is the block's: all teams must come to it equally often.
template <int Groups>
DEVICE void team_meets(int team) {
#if DS4_ARCH
    if (Groups == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(Groups * LANES) : "memory");
#else
    __syncthreads();
#endif
}

// A bit for each lane.
DEVICE u32 lanes_where(bool v) {
#if defined(__HIP__)
    return (u32)(__ballot(v) >> threadIdx.x % warpSize / LANES * LANES);
#else
    return __ballot_sync(0xffffffffu, v);
#endif
}

// Over a block; `shared` holds a float for each group of lanes. Every thread gets the result.
DEVICE float block_sum(float v, float* shared) {
    v = lane_sum(v);
    __syncthreads();  // what the last call left in `shared` may still be being read
    if (lane_id() == 0) shared[group_id()] = v;
    __syncthreads();
    float sum = 0;
    for (int g = 0; g < (int)blockDim.x / LANES; ++g) sum += shared[g];
    return sum;
}

DEVICE float block_max(float v, float* shared) {
    v = lane_max(v);
    __syncthreads();
    if (lane_id() == 0) shared[group_id()] = v;
    __syncthreads();
    float most = shared[0];
    for (int g = 1; g < (int)blockDim.x / LANES; ++g) most = fmaxf(most, shared[g]);
    return most;
}

template <int Left, int Count>
DEVICE void lane_sums_from(float (&values)[Count]) {
    if constexpr (Left > 1) {
        const int HALF = Left / 2, MASK = LANES / Count * HALF;
        bool upper = lane_id() & MASK;
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            float given = upper ? values[i] : values[i + HALF], kept = upper ? values[i + HALF] : values[i];
            values[i] = kept + lane_xor(given, MASK);
        }
        lane_sums_from<HALF>(values);
    }
}

// values[i] of all lanes added up, for `Count` i at once, a power of two: lanes l with l / (LANES / Count) = i get sum
// i. For 32 it takes 31 exchanges where one sum takes 5.
template <int Count>
DEVICE float lane_sums(float (&values)[Count]) {
    lane_sums_from<Count>(values);
#pragma unroll
    for (int mask = LANES / Count / 2; mask; mask /= 2) values[0] += lane_xor(values[0], mask);
    return values[0];
}

DEVICE float sigmoid(float x) { return 1 / (1 + expf(-x)); }

#endif
