// SPDX-License-Identifier: Apache-2.0
// Random delays of readers and copies, in builds with -DCONVPOOL_STRESS=<seed>: races between rings' readers and copies show.
#pragma once

#include "kernels/ptx/device.cuh"

namespace convpool {

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

}  // namespace convpool
