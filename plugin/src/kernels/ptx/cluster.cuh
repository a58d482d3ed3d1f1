// SPDX-License-Identifier: Apache-2.0
// The blocks of a cluster: their barrier, and loads from each other's shared memory. From sm_90 on.
#pragma once

#include "kernels/ptx/device.cuh"

namespace convpool {

// All threads of all blocks of the cluster; what they wrote to shared memory before is visible after.
CONVPOOL_DEVICE void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// 16 bytes from another block's shared memory, at the place that `address` is in this one's.
CONVPOOL_DEVICE float4 load_remote(uint32_t address, int block) {
    float4 v{0.f, 0.f, 0.f, 0.f};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(remote)
                 : "memory");
#endif
    return v;
}

}  // namespace convpool
