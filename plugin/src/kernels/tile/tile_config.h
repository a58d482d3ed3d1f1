// SPDX-License-Identifier: Apache-2.0
// The shape of a tensor-core kernel's work: everything else about it follows from these numbers.
#pragma once

#include <cstddef>

#include "core/params.h"

namespace convpool {

template <Precision kPrecision_, int kBlockM_, int kBlockN_, int kWarpsM_, int kWarpsN_, int kStages_, int kMinBlocks_>
struct TileConfig {
    static constexpr Precision kPrecision = kPrecision_;
    static constexpr int kBlockM = kBlockM_;  // output pixels of a block
    static constexpr int kBlockN = kBlockN_;  // output channels of a block
    static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
    static constexpr int kStages = kStages_;        // buffers of weights (implicit GEMM: and of pixels) in flight
    static constexpr int kMinBlocks = kMinBlocks_;  // per multiprocessor, a bound on registers

    static constexpr int kChunks = 4;  // 16-byte chunks of channels in a slice: 32 channels of 16 bits, 16 of fp32
    static constexpr int kPerChunk = kPrecision == Precision::kF16 || kPrecision == Precision::kBF16 ? 8 : 4;
    static constexpr int kElementBytes = 16 / kPerChunk;
    static constexpr int kSliceChannels = kChunks * kPerChunk;
    static constexpr int kWarps = kWarpsM * kWarpsN;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kWarpM = kBlockM / kWarpsM, kWarpN = kBlockN / kWarpsN;
    static constexpr int kFragmentsM = kWarpM / 16, kFragmentsN = kWarpN / 8;
    // A row of a slice: its chunks lie side by side, so that the lanes that copy them ask for one piece of memory, in an
    // order that turns with the row: chunk_in_row().
    static constexpr int kRowBytes = kChunks * 16;
    static constexpr int kPixelStageBytes = kBlockM * kRowBytes, kWeightStageBytes = kBlockN * kRowBytes;

    static_assert((kBlockM & (kBlockM - 1)) == 0, "a tile is a box of powers of two");
    static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "a warp multiplies 16 x 16 blocks");
    static_assert(kBlockM % kWarpsM == 0 && kBlockN % kWarpsN == 0, "warps divide the tile");
    static_assert(kThreads % kChunks == 0 && kThreads <= 1024, "a thread copies one chunk of a slice");
    static_assert(kStages >= 2, "copies run ahead of products");
    static_assert(kFragmentsM * kFragmentsN * 4 <= 128, "accumulators leave room for operands");
};

// The tile of a row of a family's table.
template <const auto &kTable, size_t kRow>
using TileConfigOf =
    TileConfig<kTable[kRow].precision, kTable[kRow].tile.block_m, kTable[kRow].tile.block_n, kTable[kRow].tile.warps_m,
               kTable[kRow].tile.warps_n, kTable[kRow].tile.stages, kTable[kRow].tile.min_blocks>;

}  // namespace convpool
