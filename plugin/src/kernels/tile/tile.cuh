// SPDX-License-Identifier: Apache-2.0
// The shape of a tensor-core kernel's work, and where its operands, sums and results are.
#pragma once

#include <cstddef>

#include "core/params.h"
#include "kernels/ptx/device.cuh"

namespace convpool {

// The shape of a tensor-core kernel's work: everything else about it follows from these numbers.
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

// One output pixel: channel m of it is element base + m * step of Y. Or one part of it, at element base.
struct OutputPixel {
    int64_t base;
    bool valid;
};

// Y as an epilogue sees it.
struct OutputView {
    void *y;
    int64_t step;  // between channels
    int32_t m;
    bool vectors;       // Y, residual and bias are whole aligned chunks of channels
    bool runs = false;  // channels first: Y and residual are whole aligned runs of kRunPixels
};

// Shared memory that a warp's accumulators pass through: 16 pixels x kColumns channels of floats.
template <class Config, int kMostColumns = 64> struct Staging {
    static constexpr int kColumns = Config::kWarpN < kMostColumns ? Config::kWarpN : kMostColumns;  // channels at a time
    static constexpr int kPitch = kColumns + 8;  // floats: a warp's 8-byte stores meet in no bank
    static constexpr int kWarpBytes = 16 * kPitch * 4;
    static constexpr int kBytes = Config::kWarps * kWarpBytes;
};

// True where a thread that holds the accumulators of a warp's tile has registers for several chunks beside them.
template <class Config>
constexpr bool kRegistersLeft =
    Config::kFragmentsM * Config::kFragmentsN * 4 <= (Config::kWarps * Config::kMinBlocks <= 8 ? 64 : 32);

// A slice is rows of 64 bytes, four chunks of channels, of pixels or weights in shared memory. Bytes from its start to a chunk of
// a row: eight rows of one chunk, which an ldmatrix reads, lie in eight bank groups, and two rows of all chunks do. The pattern
// is the 64-byte swizzle of wgmma, too. Chunk c + 2 is chunk c with bit 5 turned.
CONVPOOL_DEVICE uint32_t chunk_in_row(int row, int chunk) { return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4); }

// A lane's ldmatrix row of the weights: lanes 0-7 channels 0-7 of chunk 0, 8-15 the same of chunk 1, 16-31 channels 8-15
// likewise.
template <class Config> CONVPOOL_DEVICE uint32_t weight_lane_offset(int warp_n, int lane) {
    return chunk_in_row(warp_n * Config::kWarpN + (lane & 7) + ((lane >> 4) << 3), lane >> 3 & 1);
}

// A lane's ldmatrix row of pixels that lie as rows of a slice: lanes 0-15 their row of chunk 0, 16-31 of chunk 1.
CONVPOOL_DEVICE uint32_t pixel_lane_offset(int first_row, int lane) { return chunk_in_row(first_row + (lane & 15), lane >> 4); }

// Where pixels come from: kMeans, P of direct_fused, in planes of a chunk; kRows, rows of a slice as they are in memory,
// fp32 not yet rounded to TF32.
enum class Pixels { kMeans, kRows };

// Step k, two chunks, of a lane's row: an exclusive or moves by two chunks in a swizzled row, an addition by two planes in P.
template <Pixels kPixels> CONVPOOL_DEVICE uint32_t pixel_address(uint32_t row, uint32_t offset, uint32_t two_planes, int k) {
    return kPixels == Pixels::kRows ? (row ^ (k * 32)) + offset : row + offset + k * two_planes;
}

// A warp's, (mi, ni, register): fragment (mi, ni) is 16 pixels x 8 channels, of which lane 4g+t has in registers 0 and 1 pixel g,
// channels 2t and 2t+1, and in 2 and 3 the same channels of pixel g+8.
template <class Config> using Accumulators = float[Config::kFragmentsM][Config::kFragmentsN][4];

template <class Config> CONVPOOL_DEVICE void clear(Accumulators<Config> &acc) {
    UNROLLED_FOR (int mi = 0; mi < Config::kFragmentsM; ++mi)
        UNROLLED_FOR (int ni = 0; ni < Config::kFragmentsN; ++ni)
            UNROLLED_FOR (int i = 0; i < 4; ++i) acc[mi][ni][i] = 0.f;
}

}  // namespace convpool
