// SPDX-License-Identifier: Apache-2.0
// direct_rs: the shape of a block's work and its place in shared memory. Used by all of its warps.
#pragma once

#include "families/direct_rs/params.h"
#include "kernels/epilogue/pushed_sums.cuh"
#include "kernels/ptx/device.cuh"
#include "kernels/tile/chunk.cuh"
#include "subtiles/grid.cuh"

namespace convpool {

template <Precision kPrecision_, bool kPacked_, int kKernel_, int kPool_, int kSide_, int kGroups_, int kParts_, int kBlockN_,
          int kStageTaps_, int kStages_, int kRawStages_, RsOrder kOrder_, bool kSplits_, RsPrologue kPrologue_>
struct DirectRsConfig {
    static constexpr Precision kPrecision = kPrecision_;
    static constexpr bool kPacked = kPacked_, kChannelsFirst = false;
    static constexpr int kDepth = 1;  // tiles side by side that share weights
    static constexpr RsOrder kOrder = kOrder_;
    static constexpr bool kTurns = kOrder == RsOrder::kTurns;
    static constexpr RsPrologue kPrologue = kPrologue_;
    static constexpr bool kSplits = kSplits_;  // blocks of a cluster may share a tile's slices
    static constexpr int kKernel = kKernel_, kPool = kPool_, kSide = kSide_, kGroups = kGroups_, kParts = kParts_,
                         kSubtiles = kGroups / kParts, kBlockN = kBlockN_, kStageTaps = kStageTaps_, kStages = kStages_,
                         kRawStages = kRawStages_;
    static constexpr int kTaps = kKernel * kKernel, kPerChunk = Traits<kPrecision>::kPerChunk, kChunks = 4;
    static constexpr int kThreads = 128 * (kGroups + 1);
    // Parts of a slice, two chunks each, whose box means a warpgroup holds at once.
    static constexpr int kSteps = kParts == 2 || kOrder == RsOrder::kSteps ? 1 : 2;
    // Registers of a thread that multiplies and of one that copies, out of 65,536 and of what the block is launched with.
    static constexpr int kRegisters = kGroups == 2 ? 240 : 112, kCopyRegisters = kGroups == 2 ? 24 : 32;
    static constexpr int kConsumerN = kBlockN, kFragments = kConsumerN / 8;  // channels of a warpgroup
    static constexpr DirectRsShared kShared =
        direct_rs_shared(kSide, kSubtiles, kParts, kBlockN, kKernel, kPool, kStageTaps, kStages, kRawStages);

    static_assert(kKernel % 2 == 1, "planes of an even number of rows");
    static_assert(kPool == 2 || (kPool == 3 && !kPacked && kOrder == RsOrder::kRows), "how means of 3x3 are formed");
    static_assert(kGroups == 2 || kGroups == 4, "a warpgroup has a subtile, or a part of one's slices");
    static_assert(kParts <= 2 && kGroups % kParts == 0, "a slice has two parts");
    static_assert(!kTurns || (kGroups == 2 && kParts == 1), "two take turns");
    static_assert(kPrologue == RsPrologue::kNone || (kKernel <= 3 && kPool == 2 && kOrder != RsOrder::kSteps),
                  "a bit for each pixel, one set of scales and shifts for a slice");
    static_assert(kOrder != RsOrder::kSteps || (kParts == 1 && kStages * kStageTaps > kTaps), "weights stay for both steps");
    static_assert(!kSplits || !kTurns, "the last turn is that of all slices");
    static_assert(kSide == 8 || kShared.raw_columns * kShared.raw_rows % 8 == 4, "ldmatrix meets two images in no bank");
    static_assert(kKernel % kStageTaps == 0, "whole stages of weights in a row of taps");
    static_assert(kStages * kStageTaps >= (kOrder == RsOrder::kRows ? 2 * kKernel : kTaps) && kRawStages >= 2,
                  "what is multiplied before the first weights are handed back");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Shared memory: kStages of weights, kRawStages of pixels of X, sums on their way between warpgroups, then a full and an empty
// barrier for each of the stages, then sums on their way between blocks (DirectRsShared has the offsets).
template <class Config_> struct DirectRsBlock : SubtileGrid<Config_::kSubtiles, Config_::kBlockN, Config_::kSide> {
    using Config = Config_;
    using Grid = SubtileGrid<Config_::kSubtiles, Config_::kBlockN, Config_::kSide>;
    using Pushed = PushedSums<Config::kPrecision, 4 * Config::kSubtiles, Config::kFragments>;
    using Grid::p;
    static constexpr int kSubtiles = Config::kSubtiles, kStages = Config::kStages, kRawStages = Config::kRawStages;
    static constexpr DirectRsShared kShared = Config::kShared;
    static constexpr int kColumns = kShared.raw_columns, kRows = kShared.raw_rows;  // of pixels of X in a plane
    static constexpr int kPool = Config::kPool, kPlaneBytes = kShared.plane, kRawBytes = kPool * kPlaneBytes;  // of a subtile
    // Warps that copy pixels, and for how many subtiles each. One for each subtile has its buffers back sooner; measured in TF32.
    static constexpr int kCopiers = Config::kPrecision == Precision::kTF32 ? kSubtiles : 1, kCopySubtiles = kSubtiles / kCopiers;
    static_assert(kCopiers <= 3, "warps beside the one that copies weights");

    const uint32_t shared;
    const int warp, lane;

    CONVPOOL_DEVICE uint32_t barrier(int index) const { return shared + kShared.barrier_offset + index * 8; }
    CONVPOOL_DEVICE uint32_t weights_full(int i) const { return barrier(i); }
    CONVPOOL_DEVICE uint32_t weights_empty(int i) const { return barrier(kStages + i); }
    CONVPOOL_DEVICE uint32_t raw_full(int i, int copier) const { return barrier(2 * kStages + i * kCopiers + copier); }
    CONVPOOL_DEVICE uint32_t raw_empty(int i, int copier) const { return raw_full(kRawStages + i, copier); }
    CONVPOOL_DEVICE uint32_t weights_at(int i) const { return shared + i * kShared.weight_stage; }
    CONVPOOL_DEVICE uint32_t raw_at(int i, int subtile) const {
        return shared + kShared.raw_offset + (i * kSubtiles + subtile) * kRawBytes;
    }
    CONVPOOL_DEVICE uint32_t sums() const { return shared + kShared.sum_offset; }

    // A block of a cluster has one tile and a part of its slices.
    CONVPOOL_DEVICE int rank() const { return static_cast<int>(blockIdx.x - p.div_split.div(blockIdx.x) * p.div_split.divisor); }
    CONVPOOL_DEVICE int first_tile() const {
        if constexpr (Config::kSplits) return static_cast<int>(p.div_split.div(blockIdx.x));
        else return Grid::first_tile();
    }
    CONVPOOL_DEVICE int first_slice() const {
        if constexpr (Config::kSplits) return static_cast<int>(p.div_split.div(p.slices * rank()));
        else return Grid::first_slice();
    }
    CONVPOOL_DEVICE int end_slice() const {
        if constexpr (Config::kSplits) return static_cast<int>(p.div_split.div(p.slices * (rank() + 1)));
        else return Grid::end_slice();
    }
    CONVPOOL_DEVICE Pushed pushed_sums() const { return {shared + kShared.push_offset, p.split, rank(), p.div_split}; }
};

#endif

}  // namespace convpool
