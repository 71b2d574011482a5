// 32 lanes that work together, whether the hardware runs 32 or 64 of them in step; a block is some such groups.
#ifndef DS4_LANES
#define DS4_LANES
#if defined(__HIP__)
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#else
#include <cuda_fp16.h>
#endif

// A step's kernels are launched before the ones in front of them have ended: each lets the next one begin, and then
// waits until what is in front is done and its writes are seen. Weights may be read before.
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

DEVICE u32 lanes_max(u32 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, v);
#else
    for (int mask = LANES / 2; mask; mask /= 2) v = max(v, lane_xor(v, mask));
    return v;
#endif
}

DEVICE u32 lanes_min(u32 v) { return ~lanes_max(~v); }

// A bit for each lane, of blocks of 32 threads.
DEVICE u32 lanes_where(bool v) {
#if defined(__HIP__)
    return (u32)__ballot(v);
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

template <int Half>
DEVICE void lane_sums_from(float (&values)[LANES]) {
    bool upper = lane_id() & Half;
#pragma unroll
    for (int i = 0; i < Half; ++i) {
        float given = upper ? values[i] : values[i + Half], kept = upper ? values[i + Half] : values[i];
        values[i] = kept + lane_xor(given, Half);
    }
    if (Half > 1) lane_sums_from<(Half > 1 ? Half / 2 : 1)>(values);
}

template <>
DEVICE void lane_sums_from<1>(float (&values)[LANES]) {
    bool upper = lane_id() & 1;
    values[0] = (upper ? values[1] : values[0]) + lane_xor(upper ? values[0] : values[1], 1);
}

// values[i] of all lanes added up, for 32 i at once: lane i gets sum i. 31 exchanges where one sum takes 5.
DEVICE float lane_sums(float (&values)[LANES]) {
    lane_sums_from<LANES / 2>(values);
    return values[0];
}

DEVICE float sigmoid(float x) { return 1 / (1 + expf(-x)); }

#endif
