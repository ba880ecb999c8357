// Test kernels of the launch machinery: clusters, programmatic launches, faults that end a context.
#include "common/copy.cuh"
#include "common/pdl.cuh"

struct ChainArgs {
    Fault* fault;
    const float* in;    // [blocks]
    float* out;         // [blocks]: in of the cluster's other block, plus one
    uint64_t* times;    // nanoseconds: when block 0 began, when it ended
    int sleep;          // microseconds between trigger and work
    int reserved;
};

__device__ __forceinline__ uint64_t now() {
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

extern "C" __global__ void __launch_bounds__(32) swap_in_cluster(const __grid_constant__ ChainArgs a) {
    __shared__ float mine;
    const uint64_t began = now();
    pdl_wait();
    pdl_trigger();
    if (threadIdx.x == 0) {
        while (now() - began < 1000ull * a.sleep) {}
        mine = a.in[blockIdx.x];
        uint32_t rank, count, remote;
        asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
        asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(count));
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");  // both stored
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(&mine)), "r"((rank + 1) % count));
        float other;
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(other) : "r"(remote) : "memory");
        a.out[blockIdx.x] = other + 1.0f;
        if (blockIdx.x == 0 && a.times != nullptr) {
            a.times[0] = began;
            a.times[1] = now();
        }
        // neither block may end while the other reads its memory
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
    } else {
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
    }
}

// A copy that never arrives, without the seconds of waiting for it.
extern "C" __global__ void __launch_bounds__(32) die(const __grid_constant__ ChainArgs a) {
    pdl_wait();
    if (threadIdx.x == 0) {
        report_fault(a.fault, FAULT_COPY, KERNEL_DOWN, 7);
        asm volatile("trap;");
    }
}
