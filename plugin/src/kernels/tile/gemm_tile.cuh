// SPDX-License-Identifier: Apache-2.0
// What a block of an implicit GEMM by wgmma computes, and a stage of its ring in shared memory.
#pragma once

#include "gemm/params.h"
#include "kernels/tile/output.cuh"

namespace convpool {

// A stage of the ring in shared memory: rows of pixels, then of weights.
template <class Config> struct GemmStage {
    static constexpr int kChunks = 8, kRowBytes = kChunks * 16;  // 128 bytes, the width of wgmma's swizzle
    static constexpr int kPixelBytes = Config::kBlockM * kRowBytes;
    static constexpr int kBytes = kPixelBytes + Config::kBlockN * kRowBytes;
    static_assert(Config::kWarpM == 16 && Config::kWarpsN == 1, "a warp holds 16 rows of a warpgroup's product");
    static_assert(Config::kWarpsM % 4 == 0, "whole warpgroups");
    static_assert(Staging<Config>::kBytes <= Config::kStages * kBytes, "accumulators pass through the ring's place");
};

// What of Y a block computes, and its place among the blocks that share the sum.
template <class Config> struct GemmTile {
    int rank, pixel_tile, first_pixel, first_channel;

    CONVPOOL_DEVICE explicit GemmTile(const ImplicitGemmParams &p) {
        uint32_t tile, part, pixels, channels;
        p.div_split.divmod(blockIdx.x, tile, part);
        p.div_m_tiles.divmod(tile, pixels, channels);
        rank = part;
        pixel_tile = pixels;
        first_pixel = pixels * Config::kBlockM;
        first_channel = channels * Config::kBlockN;
    }
    // The first of its own steps, and how many they are.
    CONVPOOL_DEVICE int2 steps_of(int all, const ImplicitGemmParams &p) const {
        const int first = p.div_split.div(all * rank);
        return {first, static_cast<int>(p.div_split.div(all * (rank + 1))) - first};
    }
};

}  // namespace convpool
