// SPDX-License-Identifier: Apache-2.0
// Hopper's barriers in shared memory that count arrivals and the bytes of asynchronous copies. sm_90a only.
//
// A barrier's phase ends when its arrivals are complete and the bytes announced by expect() have come; wait() takes the
// parity of the phase it waits for. A fresh barrier is in phase 0: waiting for parity 1 returns at once, which is how the
// first round over a ring finds its buffers free.
#pragma once

#include "kernels/ptx/device.cuh"
#include "kernels/ptx/stress.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A phase ends after so many calls of arrive() or expect(), and when the expected bytes have come.
CONVPOOL_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to copies; a barrier of the block must follow.
CONVPOOL_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

CONVPOOL_DEVICE void barrier_arrive(uint32_t barrier) {
    stress_delay(barrier);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, and so many bytes that copies will bring.
CONVPOOL_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns when the phase of this parity has ended. try_wait gives up after a while, hence the loop.
CONVPOOL_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (done == 0);
    stress_delay(barrier);
}
// The same, where other blocks of the cluster wrote what the barrier counts.
CONVPOOL_DEVICE void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (done == 0);
    stress_delay(barrier);
}
// A barrier of the block's first kThreads threads, whole warps, by name 1; the other warps take no part.
template <int kThreads> CONVPOOL_DEVICE void barrier_of_first() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// A barrier of kThreads threads of the block, whole warps, by a name from 1 to 15: some wait, others only arrive.
CONVPOOL_DEVICE void barrier_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
CONVPOOL_DEVICE void barrier_join(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

#endif

}  // namespace convpool
