// SPDX-License-Identifier: Apache-2.0
// The needs of every device header: the inlining of device functions, and programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace convpool {

#define CONVPOOL_DEVICE __device__ __forceinline__
// for (...) that is unrolled.
#define UNROLLED_FOR(...) _Pragma("unroll") for (__VA_ARGS__)

// asm statements from Ampere on, from Hopper on, and on Hopper alone; nothing elsewhere.
#define CONVPOOL_ASM_SM80(...)
#define CONVPOOL_ASM_SM90(...)
#define CONVPOOL_ASM_SM90A(...)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#undef CONVPOOL_ASM_SM80
#define CONVPOOL_ASM_SM80(...) asm volatile(__VA_ARGS__)
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#undef CONVPOOL_ASM_SM90
#define CONVPOOL_ASM_SM90(...) asm volatile(__VA_ARGS__)
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#undef CONVPOOL_ASM_SM90A
#define CONVPOOL_ASM_SM90A(...) asm volatile(__VA_ARGS__)
#endif

// A launch may overlap the end of the kernel before it in the stream (programmatic dependent launch): before anything is
// read or written, wait until that kernel's results are there. Returns at once where the launch did not ask for overlap.
CONVPOOL_DEVICE void wait_for_previous_kernel() { CONVPOOL_ASM_SM90("griddepcontrol.wait;" :: : "memory"); }
// The next kernel's blocks may be started where there is room; they wait as above.
CONVPOOL_DEVICE void let_next_kernel_start() { CONVPOOL_ASM_SM90("griddepcontrol.launch_dependents;" :: : "memory"); }

struct Launch {
    dim3 grid;
    int threads;
    cudaStream_t stream;
    bool overlap = false;  // the kernel may start before the end of the one before it, for which it waits itself
    size_t shared_bytes = 0;
};
template <class... Parameters, class... Arguments>
cudaError_t queue(const Launch &launch, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{launch.grid, dim3(launch.threads), launch.shared_bytes, launch.stream, &attribute, launch.overlap};
    return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// All threads of all blocks of a cluster, from sm_90 on; what they wrote to shared memory before is visible after.
CONVPOOL_DEVICE void cluster_barrier() {
    CONVPOOL_ASM_SM90("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :: : "memory");
}

// The barrier in two parts. A thread that has arrived may end without waiting.
CONVPOOL_DEVICE void cluster_arrive() { CONVPOOL_ASM_SM90("barrier.cluster.arrive.release.aligned;" :: : "memory"); }
CONVPOOL_DEVICE void cluster_wait() { CONVPOOL_ASM_SM90("barrier.cluster.wait.acquire.aligned;" :: : "memory"); }

// 16 bytes to a block's shared memory, at the place that `address` is in this one's; that block's `barrier` counts them.
CONVPOOL_DEVICE void push(uint32_t address, int block, const float (&v)[4], uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t remote, remote_barrier;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(barrier), "r"(block));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
                 "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(remote_barrier)
                 : "memory");
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
