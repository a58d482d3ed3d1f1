// SPDX-License-Identifier: Apache-2.0
// direct_rs_nchw: the shape of a block's work and its place in shared memory. Used by all of its warps.
#pragma once

#include "families/direct_rs/params.h"
#include "families/direct_rs_nchw/params.h"
#include "kernels/ptx/device.cuh"
#include "kernels/tile/chunk.cuh"
#include "subtiles/grid.cuh"

namespace convpool {

// kPaddedByOne: X's columns, modulo 4 (box_means.cuh).
template <Precision kPrecision_, bool kPacked_, bool kPaddedByOne_, int kColumns_, int kDepth_, int kParts_, int kBlockN_,
          int kStageTaps_, int kStages_, int kRawStages_, RsOrder kOrder_>
struct DirectRsNchwConfig {
    static constexpr Precision kPrecision = kPrecision_;
    static constexpr bool kPacked = kPacked_, kChannelsFirst = true, kSplits = false, kPaddedByOne = kPaddedByOne_;
    static constexpr RsOrder kOrder = kOrder_;
    static constexpr bool kTurns = kOrder == RsOrder::kTurns;
    static constexpr int kKernel = 3, kGroups = 2, kParts = kParts_, kColumns = kColumns_, kRows = 128 / kParts / kColumns,
                         kDepth = kDepth_, kBlockN = kBlockN_, kStageTaps = kStageTaps_, kStages = kStages_,
                         kRawStages = kRawStages_;
    static constexpr int kTaps = 9, kPerChunk = Traits<kPrecision>::kPerChunk, kChunks = 4, kElement = 16 / kPerChunk;  // bytes
    static constexpr int kThreads = 128 * (kGroups + 1);
    // Parts of a slice, two chunks each, whose box means a warpgroup holds at once.
    static constexpr int kSteps = kParts == 2 ? 1 : 2;
    // Of a thread that multiplies and of one that copies.
    static constexpr int kRegisters = kDepth == 1 ? 240 : 232, kCopyRegisters = kDepth == 1 ? 24 : 40;
    static constexpr int kFragments = kBlockN / 8;  // channels of a warpgroup
    // A warp's 16 outputs are of a row, or eight of each of two; lanes of a row are apart in these bits of their number.
    static constexpr int kWarpRows = kColumns == 8 ? 2 : 1, kLaneColumns = 32 / kWarpRows - 4;
    static constexpr DirectRsNchwShared kShared =
        direct_rs_nchw_shared(kPerChunk == 8, kColumns, kRows, kParts, kBlockN, kStageTaps, kStages, kRawStages);

    static_assert((kColumns == 8 || kColumns % 16 == 0) && kShared.raw_columns * kShared.raw_rows * kElement % 64 == 32,
                  "no bank conflicts");
    static_assert(kShared.raw_columns * kElement % 16 == 0 && kShared.raw_stage % 128 == 0,
                  "what TMA copies, and where it starts");
    static_assert(!kTurns || kParts == 1, "two take turns");
    static_assert(kDepth == 1 || (kTurns && kStages * kStageTaps > kTaps), "weights stay for all tiles");
    static_assert(kKernel % kStageTaps == 0, "whole stages of weights in a row of taps");
    static_assert(kStages * kStageTaps >= (kTurns ? kTaps : 2 * kKernel) && kRawStages >= 2,
                  "what is multiplied before the first weights are handed back");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Shared memory: kStages of weights, kRawStages of pixels of X, sums on their way between warpgroups, then a full and an empty
// barrier for each of the stages. A subtile is a tile's pixels here.
template <class Config_> struct DirectRsNchwBlock : SubtileGrid<Config_::kDepth, Config_::kBlockN> {
    using Config = Config_;
    static constexpr int kStages = Config::kStages, kRawStages = Config::kRawStages, kCopiers = 1;
    static constexpr DirectRsNchwShared kShared = Config::kShared;

    const uint32_t shared;
    const int warp, lane;

    CONVPOOL_DEVICE uint32_t barrier(int index) const { return shared + kShared.barrier_offset + index * 8; }
    CONVPOOL_DEVICE uint32_t weights_full(int i) const { return barrier(i); }
    CONVPOOL_DEVICE uint32_t weights_empty(int i) const { return barrier(kStages + i); }
    CONVPOOL_DEVICE uint32_t raw_full(int i, int = 0) const { return barrier(2 * kStages + i); }
    CONVPOOL_DEVICE uint32_t raw_empty(int i, int = 0) const { return barrier(2 * kStages + kRawStages + i); }
    CONVPOOL_DEVICE uint32_t weights_at(int i) const { return shared + i * kShared.weight_stage; }
    CONVPOOL_DEVICE uint32_t raw_at(int i, int = 0) const { return shared + kShared.raw_offset + i * kShared.raw_stage; }
    CONVPOOL_DEVICE uint32_t sums() const { return shared + kShared.sum_offset; }

    struct Corner {
        int image, y, x;  // first output row and column
    };
    CONVPOOL_DEVICE Corner corner_of(int subtile) const {
        uint32_t rest, column, row, image;
        this->p.div_tiles_w.divmod(subtile, rest, column);
        this->p.div_tiles_h.divmod(rest, image, row);
        return {static_cast<int>(image), static_cast<int>(row) * Config::kRows, static_cast<int>(column) * Config::kColumns};
    }
    // Of a tile, this lane's row of outputs, and the first column of its warp's.
    CONVPOOL_DEVICE int row() const {
        const int number = warp % (8 / Config::kParts);
        if constexpr (Config::kWarpRows == 2) return 2 * number + (lane >> 4);
        else return number / (Config::kColumns / 16);
    }
    CONVPOOL_DEVICE int column() const {
        if constexpr (Config::kWarpRows == 2) return 0;
        else return warp % (Config::kColumns / 16) * 16;
    }
    // Columns of X from what the row's first lane sees to what this one does: four for each, for two outputs.
    CONVPOOL_DEVICE int lane_column() const { return lane & Config::kLaneColumns; }
    // Columns from a box's first one to that which the first output sees first.
    CONVPOOL_DEVICE int shift() const { return -this->p.pad_w & (kNchwAlignment - 1); }
};

#endif

}  // namespace convpool
