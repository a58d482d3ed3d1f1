// SPDX-License-Identifier: Apache-2.0
// A place in a ring of buffers that barriers guard.
#pragma once

#include "kernels/ptx/device.cuh"

namespace convpool {

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

}  // namespace convpool
