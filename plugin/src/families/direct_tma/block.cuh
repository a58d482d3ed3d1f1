// SPDX-License-Identifier: Apache-2.0
// direct_tma: the shape of a block's work, its place in shared memory and in Y. Used by all of its warps.
#pragma once

#include "families/direct_tma/params.h"
#include "kernels/ptx/device.cuh"
#include "kernels/tile/chunk.cuh"
#include "subtiles/grid.cuh"

namespace convpool {

template <Precision kPrecision_, int kSubtiles_, int kBlockN_, int kKernel_, int kStageTaps_, int kStages_, int kRawStages_,
          int kMeanStages_, int kMeanWarps_, int kMeanGroups_>
struct DirectTmaConfig {
    static constexpr Precision kPrecision = kPrecision_;
    static constexpr int kSubtiles = kSubtiles_, kBlockN = kBlockN_, kKernel = kKernel_, kStageTaps = kStageTaps_,
                         kStages = kStages_, kRawStages = kRawStages_, kMeanStages = kMeanStages_, kMeanWarps = kMeanWarps_,
                         kMeanGroups = kMeanGroups_;
    static constexpr int kSliceWarps = kMeanGroups == 1 ? kMeanWarps : (kMeanWarps - 1) / kMeanGroups;
    static constexpr int kTaps = kKernel * kKernel, kPerChunk = Traits<kPrecision>::kPerChunk, kChunks = 4;
    static constexpr int kThreads = 32 + kMeanWarps * 32 + 256;
    static constexpr int kConsumerN = kSubtiles == 1 ? kBlockN / 2 : kBlockN;  // channels of a warpgroup
    static constexpr int kFragments = kConsumerN / 8;
    static constexpr DirectTmaShared kShared =
        direct_tma_shared(kSubtiles, kBlockN, kKernel, kStageTaps, kStages, kRawStages, kMeanStages);

    static_assert(kKernel == 1 || kKernel == 3, "the planes of box means are laid out for these");
    static_assert(kMeanWarps % 4 == 3, "whole warpgroups, with the warp that copies");
    static_assert(kMeanGroups == 1 || kMeanGroups * kSliceWarps + 1 == kMeanWarps, "equal groups, and the warp that copies");
    static_assert(kMeanGroups <= kMeanStages, "a group that skips slices sees every phase of a buffer it waits for");
    static_assert(kMeanGroups == 1 || kMeanStages <= kRawStages, "and of raw pixels, as it waits for a buffer of means");
    static_assert(kSubtiles <= 2 && kRawStages >= 2, "a warpgroup has a subtile, or half of its channels; copies run ahead");
    static_assert(kTaps % kStageTaps == 0, "whole stages of weights in a slice");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Shared memory: kStages of weights, kRawStages of pixels of X, kMeanStages of box means, then a full and an empty barrier for
// each of these buffers (DirectTmaShared has the offsets).
template <class Config_> struct DirectTmaBlock : SubtileGrid<Config_::kSubtiles, Config_::kBlockN> {
    using Config = Config_;
    static constexpr int kSubtiles = Config::kSubtiles, kStages = Config::kStages, kRawStages = Config::kRawStages,
                         kMeanStages = Config::kMeanStages, kChunks = Config::kChunks, kPerChunk = Config::kPerChunk;
    static constexpr DirectTmaShared kShared = Config::kShared;
    static constexpr int kPlane = kShared.plane * 16;                               // bytes from chunk to chunk
    static constexpr int kColumns = kShared.raw_columns, kRows = kShared.raw_rows;  // of pixels of X, of one parity
    static constexpr int kPool = 2, kPlaneBytes = kColumns * kRows * 64;            // pixels of one parity of a subtile
    static constexpr int kRawBytes = kPool * kPlaneBytes;
    static constexpr int kCopySubtiles = kSubtiles;  // whose pixels a thread copies

    const uint32_t shared;
    const int warp, lane;

    // ---- shared memory ----

    CONVPOOL_DEVICE uint32_t barrier(int index) const { return shared + kShared.barrier_offset + index * 8; }
    CONVPOOL_DEVICE uint32_t weights_full(int i) const { return barrier(i); }
    CONVPOOL_DEVICE uint32_t weights_empty(int i) const { return barrier(kStages + i); }
    CONVPOOL_DEVICE uint32_t raw_full(int i, int = 0) const { return barrier(2 * kStages + i); }
    CONVPOOL_DEVICE uint32_t raw_empty(int i, int = 0) const { return barrier(2 * kStages + kRawStages + i); }
    CONVPOOL_DEVICE uint32_t means_full(int i) const { return barrier(2 * (kStages + kRawStages) + i); }
    CONVPOOL_DEVICE uint32_t means_empty(int i) const { return barrier(2 * (kStages + kRawStages) + kMeanStages + i); }
    CONVPOOL_DEVICE uint32_t weights_at(int i) const { return shared + i * kShared.weight_stage; }
    CONVPOOL_DEVICE uint32_t raw_at(int i, int subtile) const {
        return shared + kShared.raw_offset + (i * kSubtiles + subtile) * kRawBytes;
    }
    CONVPOOL_DEVICE uint32_t means_at(int i, int subtile) const {
        return shared + kShared.mean_offset + (i * kSubtiles + subtile) * kChunks * kPlane;
    }
};

#endif

}  // namespace convpool
