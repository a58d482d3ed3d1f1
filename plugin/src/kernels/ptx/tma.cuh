// SPDX-License-Identifier: Apache-2.0
// Hopper's copies by the tensor memory accelerator (TMA), the barriers that count their bytes, and rings of buffers between them.
#pragma once

#include <cuda.h>

#include "kernels/ptx/device.cuh"

namespace convpool {

// Random delays of readers and copies, in builds with -DCONVPOOL_STRESS=<seed>: races between rings' readers and copies show.
// Every fourth call of a warp waits, up to 4096 clocks. All lanes that call together wait alike.
CONVPOOL_DEVICE void stress_delay([[maybe_unused]] uint32_t place) {
#ifdef CONVPOOL_STRESS
    const uint32_t start = static_cast<uint32_t>(clock());
    uint32_t random =
        start ^ place * 0x9e3779b9u ^ (blockIdx.x * 64 + (threadIdx.x >> 5)) * 0x85ebca6bu ^ (CONVPOOL_STRESS * 0xc2b2ae35u);
    random ^= random >> 15;
    random *= 0x2c1b3c6du;
    random ^= random >> 12;
    random *= 0x297a2d39u;
    random ^= random >> 15;
    if ((random & 3) != 0) return;
    const uint32_t clocks = random >> 20;
    while (static_cast<uint32_t>(clock()) - start < clocks) {}
#endif
}

// A place in a ring of buffers that barriers guard: buffer and parity of its phase.
template <int kLength> struct Ring {
    int buffer = 0;
    uint32_t parity = 0;
    CONVPOOL_DEVICE void next() {
        if (++buffer == kLength) {
            buffer = 0;
            parity ^= 1;
        }
    }
};

// Hopper's barriers in shared memory that count arrivals and the bytes of asynchronous copies. sm_90a only.
//
// A barrier's phase ends when its arrivals are complete and the bytes announced by expect() have come; wait() takes the
// parity of the phase it waits for. A fresh barrier is in phase 0: waiting for parity 1 returns at once, which is how the
// first round over a ring finds its buffers free.

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
#define CONVPOOL_BARRIER_WAIT(name, order)                                                                    \
    CONVPOOL_DEVICE void name(uint32_t barrier, uint32_t parity) {                                            \
        uint32_t done;                                                                                        \
        do {                                                                                                  \
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity" order ".shared::cta.b64 p, [%1], %2;\n" \
                         "selp.b32 %0, 1, 0, p;\n}"                                                           \
                         : "=r"(done)                                                                         \
                         : "r"(barrier), "r"(parity)                                                          \
                         : "memory");                                                                         \
        } while (done == 0);                                                                                  \
        stress_delay(barrier);                                                                                \
    }
// Returns when the phase of this parity has ended. try_wait gives up after a while, hence the loop.
CONVPOOL_BARRIER_WAIT(barrier_wait, "")
// The same, where other blocks of the cluster wrote what the barrier counts.
CONVPOOL_BARRIER_WAIT(barrier_wait_cluster, ".acquire.cluster")
// A barrier of the block's first kThreads threads, whole warps, by name 1; the other warps take no part.
template <int kThreads> CONVPOOL_DEVICE void barrier_of_first() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// A barrier of kThreads threads of the block, whole warps, by a name from 1 to 15: some wait, others only arrive.
CONVPOOL_DEVICE void barrier_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
CONVPOOL_DEVICE void barrier_join(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Copies by TMA, boxes and im2col columns of tensors that a map describes: one thread issues each, a barrier counts its bytes.

// Loads a map, which lies in the kernel's parameters, into the cache of maps, ahead of the first copy.
CONVPOOL_DEVICE void prefetch_map(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Boxes of a map to shared memory, zeros outside the tensor; coordinates from the innermost dimension on.
CONVPOOL_DEVICE void copy_box(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2, int c3) {
    stress_delay(dst);
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], "
                 "[%2];" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
CONVPOOL_DEVICE void copy_box(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2) {
    stress_delay(dst);
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], "
                 "[%2];" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}
// Starts the copy of a box to the L2, ahead of its use. No barrier counts it.
CONVPOOL_DEVICE void prefetch_box(const CUtensorMap *map, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1,%2,%3}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
// A column of an im2col map, channels from c on: of the pixel (y + dy, x + dx) of image n, which is what its window that starts
// at (y, x) sees by one tap, and of what the windows after it see by the same. Zeros outside the tensor.
CONVPOOL_DEVICE void copy_column(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int c, int x, int y, int n, int dx,
                                 int dy) {
    stress_delay(dst);
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3,%4,%5,%6}], [%2], {%7,%8};" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c), "r"(x), "r"(y), "r"(n), "h"(static_cast<uint16_t>(dx)),
                 "h"(static_cast<uint16_t>(dy))
                 : "memory");
}

// A box of a map from shared memory, without what is outside the tensor, in groups that a thread commits. It reads what the thread
// has published (publish_shared), and others before a barrier.
CONVPOOL_DEVICE void store_box(const CUtensorMap *map, uint32_t from, int c0, int c1, int c2, int c3, int c4) {
    stress_delay(from);
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];" ::"l"(map), "r"(from),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}
CONVPOOL_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's groups have read shared memory, which others may write after a barrier.
CONVPOOL_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

#endif

}  // namespace convpool
