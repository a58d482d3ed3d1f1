// SPDX-License-Identifier: Apache-2.0
// What every device header needs: the inlining of device functions, and programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace convpool {

#define CONVPOOL_DEVICE __device__ __forceinline__

// A launch may overlap the end of the kernel before it in the stream (programmatic dependent launch): before anything is
// read or written, wait until that kernel's results are there. Returns at once where the launch did not ask for overlap.
CONVPOOL_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel's blocks may be started where there is room; they wait as above.
CONVPOOL_DEVICE void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace convpool
