// What blocks of a cluster send each other: 16 bytes into a peer's shared memory, counted by the peer's mbarrier. No
// cluster-wide barrier lies on the path; one in the prologue, behind the predecessor, makes the mbarriers known.
#pragma once
#include "common/copy.cuh"

// No message may be sent to a block that has not started, or whose barriers are not armed. All threads of all blocks.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// slot and barrier: addresses in this block's shared memory, of the same things in the peer's.
__device__ __forceinline__ void cluster_send(const float4* slot, const uint64_t* barrier, int peer, float4 x) {
    uint32_t remote_slot, remote_barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_slot) : "r"(shared_address(slot)), "r"(peer));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(peer));
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_slot),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(remote_barrier)
        : "memory");
}

// Waits for all that was armed in a barrier's first phase: as barrier_wait, but for what other blocks wrote.
__device__ __forceinline__ void cluster_receive(uint64_t* barrier, Fault* fault, int kernel, int layer) {
    for (int tries = 0;; ++tries) {
        uint32_t done;
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier))
            : "memory");
        if (done) return;
        if (tries > (1 << 22)) {
            report_fault(fault, FAULT_COPY, kernel, layer);
            asm volatile("trap;");
        }
    }
}
