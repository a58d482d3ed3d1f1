// SPDX-License-Identifier: Apache-2.0
// Hopper's copies by the tensor memory accelerator (TMA): boxes and im2col columns of tensors that a map describes. sm_90a only.
//
// One thread issues a copy; its bytes are counted by a barrier of ptx/mbarrier.cuh.
#pragma once

#include <cuda.h>

#include "kernels/ptx/device.cuh"
#include "kernels/ptx/stress.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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

#endif

}  // namespace convpool
