// 32 lanes that work together, whether the hardware runs 32 or 64 of them in step; a block is some such groups.
#ifndef DS4_LANES
#define DS4_LANES
#if defined(__HIP__)
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#else
#include <cuda_fp16.h>
#endif

// A step's kernels are launched before the ones in front of them have ended: each lets the next one begin, and then waits
// until what is in front is done and its writes are seen. Weights may be read before.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PASS_TURN() asm volatile("griddepcontrol.launch_dependents;")
#define AWAIT_TURN() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define PASS_TURN()
#define AWAIT_TURN()
#endif
#define TAKE_TURN() PASS_TURN(); AWAIT_TURN()

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define LANES 32
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define INFINITE __int_as_float(0x7f800000)

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

// values[i] of all lanes added up, for 32 i at once: lane i gets sum i. 31 exchanges where one sum takes 5.
DEVICE float lane_sums(float (&values)[LANES]) {
    int lane = lane_id();
#pragma unroll
    for (int half = LANES / 2; half; half /= 2) {
        bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            float given = upper ? values[i] : values[i + half], kept = upper ? values[i + half] : values[i];
            values[i] = kept + lane_xor(given, half);
        }
    }
    return values[0];
}

DEVICE float sigmoid(float x) { return 1 / (1 + expf(-x)); }

#endif
