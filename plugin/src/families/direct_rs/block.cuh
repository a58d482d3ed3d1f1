// SPDX-License-Identifier: Apache-2.0
// direct_rs: the shape of a block's work and its place in shared memory. Used by all of its warps.
#pragma once

#include "families/direct_rs/rows.h"
#include "kernels/epilogue/pushed_sums.cuh"
#include "kernels/prologue/prologue.cuh"
#include "kernels/ptx/device.cuh"
#include "kernels/ptx/numbers.cuh"
#include "kernels/tile/chunk.cuh"
#include "subtiles/subtiles.cuh"

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
// barrier for each of the stages, then sums on their way between blocks (DirectRsShared has the offsets). Pixels of kSubtiles
// subtiles are copied by kCopiers threads.
template <class Config_, class Grid, int kCopiers_, int kSubtiles, int kPlanes_> struct DirectRsRings : Grid {
    using Config = Config_;
    static constexpr int kStages = Config::kStages, kRawStages = Config::kRawStages, kCopiers = kCopiers_, kPlanes = kPlanes_;
    static constexpr DirectRsShared kShared = Config::kShared;
    static constexpr int kPlaneBytes = kShared.plane, kRawBytes = kPlanes * kPlaneBytes;  // of a subtile

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
};

// Warps that copy pixels. One for each subtile has its buffers back sooner; measured in TF32.
template <class Config> inline constexpr int kDirectRsCopiers = Config::kPrecision == Precision::kTF32 ? Config::kSubtiles : 1;

template <class Config_>
struct DirectRsBlock : DirectRsRings<Config_, SubtileGrid<Config_::kSubtiles, Config_::kBlockN, Config_::kSide>,
                                     kDirectRsCopiers<Config_>, Config_::kSubtiles, Config_::kPool> {
    using Config = Config_;
    using Grid = SubtileGrid<Config_::kSubtiles, Config_::kBlockN, Config_::kSide>;
    using Pushed = PushedSums<Config::kPrecision, 4 * Config::kSubtiles, Config::kFragments>;
    using Grid::p;
    static constexpr DirectRsShared kShared = Config::kShared;
    static constexpr int kColumns = kShared.raw_columns, kRows = kShared.raw_rows;  // of pixels of X in a plane
    static constexpr int kPool = Config::kPool, kCopySubtiles = Config::kSubtiles / kDirectRsCopiers<Config>;
    static_assert(kDirectRsCopiers<Config> <= 3, "warps beside the one that copies weights");

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
    CONVPOOL_DEVICE Pushed pushed_sums() const { return {this->shared + kShared.push_offset, p.split, rank(), p.div_split}; }
};

// direct_rs: the prologue f(x) = activation(scale * x + shift) of pixels as ldmatrix gives them, in X's type.
//
// A word of a lane is of the same channels in all pixels of a slice, so scales and shifts stay in registers. Pixels outside X are zero
// as copied, and stay as they are where a shift might make f(0) another number.

template <class Config> struct DirectRsPrologue {
    using Element = typename Traits<Config::kPrecision>::Element;
    static constexpr RsPrologue kKind = Config::kPrologue;
    static constexpr bool kAffine = kKind == RsPrologue::kRelu || kKind == RsPrologue::kAffine;
    static constexpr int kPool = Config::kPool, kPixels = Config::kKernel + kPool - 1,
                         kRows = kPixels + kPool;  // that a lane sees
    static_assert(!kAffine || kRows * kPixels <= 32, "a bit for each pixel");

    uint32_t scale[Config::kSteps][2], shift[Config::kSteps][2];  // of this lane's words: (step, chunk)
    uint32_t slope;
    uint32_t inside = ~0u;  // a bit for each pixel of two output rows: whether it lies in X

    CONVPOOL_DEVICE explicit DirectRsPrologue(const Prologue &p) {
        if constexpr (kKind != RsPrologue::kNone) {
            slope = packed(p.activation == Activation::kLeakyRelu ? p.alpha : 1.f);
            UNROLLED_FOR (int k = 0; k < Config::kSteps; ++k)
                UNROLLED_FOR (int chunk = 0; chunk < 2; ++chunk) scale[k][chunk] = packed(1.f), shift[k][chunk] = packed(0.f);
        }
    }
    // Loads those of a slice's channels, or a part's; zeros past the last, where X is zero too.
    template <class Block> CONVPOOL_DEVICE void load(const Block &block, int slice, int part) {
        if constexpr (kAffine) {
            const Prologue &p = block.p.prologue;
            if (p.scale == nullptr) return;
            UNROLLED_FOR (int k = 0; k < Config::kSteps; ++k)
                UNROLLED_FOR (int chunk = 0; chunk < 2; ++chunk) {
                    const int at = slice * Config::kChunks + 2 * (part + k) + chunk;
                    const bool valid = at * Config::kPerChunk < block.p.c;
                    const int word = at * 4 + (block.lane & 3);
                    scale[k][chunk] = valid ? static_cast<const uint32_t *>(p.scale)[word] : 0;
                    shift[k][chunk] = valid ? static_cast<const uint32_t *>(p.shift)[word] : 0;
                }
        }
    }
    // Finds which pixels of a subtile lie in X.
    template <class Block> CONVPOOL_DEVICE void start_tile(const Block &block, int subtile) {
        if constexpr (kAffine) {
            if (block.p.prologue.scale == nullptr) return;
            const typename Block::Corner corner = block.corner_of(subtile);
            const int y = (corner.y + block.warp % 4 * 2 % Config::kSide) * kPool - block.p.pad_h;
            const int x = (corner.x + (block.lane >> 2) % Config::kSide) * kPool - block.p.pad_w;
            inside = 0;
            UNROLLED_FOR (int row = 0; row < kRows; ++row)
                UNROLLED_FOR (int i = 0; i < kPixels; ++i)
                    if (static_cast<uint32_t>(y + row) < static_cast<uint32_t>(block.p.h) &&
                        static_cast<uint32_t>(x + i) < static_cast<uint32_t>(block.p.w))
                        inside |= 1u << (row * kPixels + i);
        }
    }
    // f of a row of pixels.
    CONVPOOL_DEVICE void apply(uint32_t (&words)[Config::kSteps][2][kPixels], int row) const {
        if constexpr (kKind != RsPrologue::kNone) {
            UNROLLED_FOR (int i = 0; i < kPixels; ++i)
                if (!kAffine || (inside >> (row * kPixels + i) & 1)) {
                    UNROLLED_FOR (int k = 0; k < Config::kSteps; ++k)
                        UNROLLED_FOR (int chunk = 0; chunk < 2; ++chunk)
                            words[k][chunk][i] = f(words[k][chunk][i], scale[k][chunk], shift[k][chunk]);
                }
        }
    }

private:
    CONVPOOL_DEVICE static uint32_t packed(float v) { return PackedPrologue<Config::kPrecision>::packed(v); }
    // max(u, slope * u) of u = scale * v + shift is an activation whose slope is at most 1; 1 stands for none.
    CONVPOOL_DEVICE uint32_t f(uint32_t v, uint32_t scale, uint32_t shift) const {
        if constexpr (kKind == RsPrologue::kRelu) {
            return fma_relu(v, scale, shift, Element{});
        } else {
            const uint32_t u = kAffine ? fma_packed(v, scale, shift, Element{}) : v;
            return larger(u, fma_packed(u, slope, 0, Element{}), Element{});
        }
    }
};

#endif

}  // namespace convpool
