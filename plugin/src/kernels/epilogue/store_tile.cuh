// SPDX-License-Identifier: Apache-2.0
// Stores a warp's accumulators to Y.
//
// A warp passes its accumulators through shared memory, 16 pixels at a time, and stores whole chunks from there in a
// rolled loop. Stored straight from the fragments, the code for them all would not fit into the instruction cache, which
// costs a small layer more than its arithmetic does.
#pragma once

#include "kernels/epilogue/store_rows.cuh"
#include "kernels/mma/accumulators.cuh"

namespace convpool {

// Writes part kPart of a warp's accumulators, 16 pixels x Staging::kColumns channels, to its staging memory: `target` is the
// place of the lane's first pair of channels, row lane / 4.
template <class Config, int kPart> CONVPOOL_DEVICE void stage_part(const Accumulators<Config> &acc, uint32_t target) {
    constexpr int kAcross = Staging<Config>::kColumns / 8, kParts = Config::kFragmentsN / kAcross;
    constexpr int mi = kPart / kParts, first = kPart % kParts * kAcross;
#pragma unroll
    for (int i = 0; i < kAcross; ++i) {
        const float (&f)[4] = acc[mi][first + i];
        store_shared_pair(target + i * 32, f[0], f[1]);
        store_shared_pair(target + i * 32 + 8 * Staging<Config>::kPitch * 4, f[2], f[3]);
    }
}

// staging: Staging<Config>::kBytes of shared memory that no warp reads any more. pixel_of(row of the block's tile) gives
// an OutputPixel; channel0 is the warp's first channel.
template <class Config, class PixelOf>
CONVPOOL_DEVICE void store_tile(const Accumulators<Config> &acc, uint32_t staging, const Epilogue &e, const OutputView &view,
                                int first_row, int channel0, int lane, PixelOf pixel_of) {
    const uint32_t mine = staging + (threadIdx.x >> 5) * Staging<Config>::kWarpBytes;
    const uint32_t target = mine + ((lane >> 2) * Staging<Config>::kPitch + 2 * (lane & 3)) * 4;
    constexpr int kColumns = Staging<Config>::kColumns, kAcross = Config::kWarpN / kColumns;
    constexpr int kParts = Config::kFragmentsM * kAcross;
    static_assert(kParts <= 4, "a branch per part");
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
        __syncwarp();  // the part before has been read
        // Registers have no addresses: the index into acc is a constant in every branch.
        if constexpr (kParts > 0)
            if (part == 0) stage_part<Config, 0>(acc, target);
        if constexpr (kParts > 1)
            if (part == 1) stage_part<Config, 1>(acc, target);
        if constexpr (kParts > 2)
            if (part == 2) stage_part<Config, 2>(acc, target);
        if constexpr (kParts > 3)
            if (part == 3) stage_part<Config, 3>(acc, target);
        __syncwarp();  // this part is complete
        store_rows<Config, 16, kColumns>(mine, e, view, first_row + part / kAcross * 16, channel0 + part % kAcross * kColumns,
                                         lane, pixel_of);
    }
}

}  // namespace convpool
