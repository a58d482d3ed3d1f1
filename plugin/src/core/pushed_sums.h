// SPDX-License-Identifier: Apache-2.0
// The shared memory by which the blocks of a cluster push parts of a tile's sum to each other (kernels/epilogue/pushed_sums.cuh).
#pragma once

#include <cstdint>

namespace convpool {

constexpr int kPushedHead = 128;     // a barrier
constexpr int kPartBytes = 32 * 16;  // of a fragment, 16 pixels x 8 channels of floats

// Bytes of a block, for a tile's fragments.
constexpr int64_t pushed_bytes(int split, int fragments) {
    return split == 1 ? 0 : kPushedHead + int64_t{split} * ((fragments + split - 1) / split) * kPartBytes;
}

}  // namespace convpool
