// Blocks that run together and read one another's shared memory, where the device has that; elsewhere a cluster is one.
#ifndef DS4_CLUSTER
#define DS4_CLUSTER
#include "lanes.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTER_OF(x, y, z) __cluster_dims__(x, y, z)

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

DEVICE u32 remote(const void* shared, int rank) {
    u32 at = (u32)__cvta_generic_to_shared(shared), there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// What `shared` holds in block `rank` of the cluster.
DEVICE float remote_float(const float* shared, int rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote(shared, rank)) : "memory");
    return v;
}

DEVICE float4 remote_float4(const float* shared, int rank) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote(shared, rank)) : "memory");
    return v;
}
#else
#define CLUSTER_OF(x, y, z)
DEVICE void cluster_arrive() { __syncthreads(); }
DEVICE void cluster_wait() {}
DEVICE float remote_float(const float* shared, int) { return *shared; }
DEVICE float4 remote_float4(const float* shared, int) { return *(const float4*)shared; }
#endif

#endif
