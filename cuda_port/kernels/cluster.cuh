// Blocks that run together and write to one another's shared memory, where a device has that; else a cluster is one.
#ifndef DS4_CLUSTER
#define DS4_CLUSTER
#include "lanes.cuh"

#if DS4_ARCH >= 900
#define CLUSTER_OF(x, y, z) __cluster_dims__(x, y, z)

// A meeting of the blocks, which does not wait for what they are writing.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// The same, after which all that they have written is there for all of them.
DEVICE void cluster_share() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// A barrier of the block's first `Threads` threads, which are whole groups of lanes.
template <int Threads>
DEVICE void meet() { asm volatile("bar.sync 1, %0;" :: "n"(Threads) : "memory"); }

// Where block `rank` has what is `shared` here.
DEVICE u32 remote(const void* shared, int rank) {
    u32 at = (u32)__cvta_generic_to_shared(shared), there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// A number that block `rank` has where this one has `shared`; it was written before a cluster_share().
DEVICE float remote_float(const float* shared, int rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote(shared, rank)));
    return v;
}

// What blocks put into one another's shared memory, and wait for: sooner there than through barriers, which wait for
// all that a block has written anywhere. For one use; opened by one thread before the cluster meets.
struct Arrivals {
    u64 barrier;

    DEVICE void open(int bytes) {
        u32 at = (u32)__cvta_generic_to_shared(&barrier);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(bytes) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // v to where block `to` has what is `place` here.
    DEVICE void post(int to, float* place, float v) {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     :: "r"(remote(place, to)), "r"(__float_as_uint(v)), "r"(remote(&barrier, to)) : "memory");
    }

    DEVICE void post(int to, float* place, float2 v) {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
                     :: "r"(remote(place, to)), "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)),
                        "r"(remote(&barrier, to)) : "memory");
    }

    // `bytes` bytes, a multiple of 16, by the copy engine. What they are read from was written before each thread's
    // send_ready and a barrier of the block, and stays until the cluster has met.
    DEVICE void send(int to, float* place, const float* from, int bytes) {
        asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(remote(place, to)), "r"((u32)__cvta_generic_to_shared(from)), "r"(bytes),
                        "r"(remote(&barrier, to)) : "memory");
    }

    static DEVICE void send_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

    // Until all that this block was promised has come; threads one by one.
    DEVICE void wait() {
        u32 done = 0, at = (u32)__cvta_generic_to_shared(&barrier);
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; "
                         "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at) : "memory");
    }
};
#else
#define CLUSTER_OF(x, y, z)
template <int Threads>
DEVICE void meet() { __syncthreads(); }

struct Arrivals {
    DEVICE void open(int) {}
    DEVICE void post(int, float* place, float v) { *place = v; }
    DEVICE void post(int, float* place, float2 v) { *(float2*)place = v; }
    DEVICE void send(int, float*, const float*, int) {}
    static DEVICE void send_ready() {}
    DEVICE void wait() { __syncthreads(); }
};

DEVICE float remote_float(const float* shared, int) { return *shared; }
DEVICE void cluster_arrive() { __syncthreads(); }
DEVICE void cluster_wait() {}
DEVICE void cluster_share() { __syncthreads(); }
#endif

// Numbers that each block has for others, or for all.
template <int Blocks, int Count>
struct Mailbox {
    Arrivals arrivals;
    float values[Blocks][Count];

    DEVICE void open() { arrivals.open(4 * Blocks * Count); }
    DEVICE void post(int to, int from, int i, float v) { arrivals.post(to, &values[from][i], v); }
    DEVICE void wait() { arrivals.wait(); }
};

#endif
