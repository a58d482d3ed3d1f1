// Hopper's asynchronous copies: tensor memory access (TMA) and the barriers in shared memory that count its bytes.
//
// A barrier's phase ends when its arrivals are complete and the bytes announced by expect() have come; wait() takes the
// parity of the phase it waits for. A fresh barrier is in phase 0: waiting for parity 1 returns at once, which is how the
// first round over a ring finds its buffers free.
#pragma once

#include <cuda.h>

#include "common.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

CONVPOOL_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to copies; a barrier of the block must follow.
CONVPOOL_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

CONVPOOL_DEVICE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
CONVPOOL_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
CONVPOOL_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (done == 0);
}
// Of the block's first kThreads threads, whole warps; the other warps have work of their own.
template <int kThreads> CONVPOOL_DEVICE void barrier_of_first() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// A ring's place: buffer and parity of its phase.
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

CONVPOOL_DEVICE void prefetch_map(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Boxes of a map to shared memory, zeros outside the tensor; coordinates from the innermost dimension on.
CONVPOOL_DEVICE void copy_box(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], "
                 "[%2];" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
CONVPOOL_DEVICE void copy_box(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], "
                 "[%2];" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}
// The same box on its way to the L2, ahead of its use.
CONVPOOL_DEVICE void prefetch_box(const CUtensorMap *map, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1,%2,%3}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
// A column of an im2col map, channels from c on: of the pixel (y + dy, x + dx) of image n, which is what its window that starts
// at (y, x) sees by one tap, and of what the windows after it see by the same. Zeros outside the tensor.
CONVPOOL_DEVICE void copy_column(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int c, int x, int y, int n, int dx,
                                 int dy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3,%4,%5,%6}], [%2], {%7,%8};" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c), "r"(x), "r"(y), "r"(n), "h"(static_cast<uint16_t>(dx)),
                 "h"(static_cast<uint16_t>(dy))
                 : "memory");
}
#endif

}  // namespace convpool
