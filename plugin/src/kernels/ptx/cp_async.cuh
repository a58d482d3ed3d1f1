// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies of 16 bytes from global to shared memory (cp.async), in groups that a thread commits and waits for.
#pragma once

#include "kernels/ptx/shared_memory.cuh"

namespace convpool {

// 16 bytes from global to shared memory, or zeros. Before sm_80 the copy is synchronous and commit and wait do nothing.
CONVPOOL_DEVICE void copy_chunk(uint32_t dst, const void *src, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
#else
    uint4 v = valid ? *reinterpret_cast<const uint4 *>(src) : uint4{0, 0, 0, 0};
    store_shared(dst, v);
#endif
}

// Starts to load a line of 128 bytes to the L2, ahead of its use.
CONVPOOL_DEVICE void prefetch_line(const void *src) { asm volatile("prefetch.global.L2 [%0];" ::"l"(src)); }

// Ends a group of this thread's copies; a group may be empty.
CONVPOOL_DEVICE void copy_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most the last kPending groups of this thread are under way. Hazard: other threads' copies need a barrier besides.
template <int kPending> CONVPOOL_DEVICE void copy_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace convpool
