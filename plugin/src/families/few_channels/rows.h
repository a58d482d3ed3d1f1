// SPDX-License-Identifier: Apache-2.0
// The tactics of few_channels, and what the host tells its kernels.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/rows.h"

namespace convpool {

// The place in X that a tap and channel see: their window's first pixel, and the bytes to it, counted from the output pixel's.
struct FewChannelsOperand {
    int32_t offset, y, x, channel;
};
// A row or column of taps: the same along one axis, and a bit for each of its operands.
struct FewChannelsTaps {
    uint64_t operands;
    int32_t first;
};
constexpr int kMaxOperands = 64;
constexpr int kFewChannelsNowhere = -(1 << 30);  // outside X, whatever is added

// direct_fused for few input channels: families/few_channels/kernel.cuh. Lengths in elements of X.
struct FewChannelsParams {
    const void *x, *w;  // x: of floats where x_float
    void *y;
    Prologue prologue;
    Epilogue epilogue;
    BoxMean box;
    Shape2d shape;
    int32_t plain;  // every operand is a pixel of X
    int32_t x_float, x_element_bytes;
    int32_t y_vectors, y_runs;
    int32_t operands;                      // of an output pixel: taps by channels
    uint32_t weight_bytes, bias_bytes;     // in shared memory
    int32_t step_h, step_w;                // pixels of X from one output pixel to the next
    uint32_t pooled_rows, pooled_columns;  // of AveragePool(X), in pixels of X
    int32_t channel, column, row;          // from one to the next
    int64_t image;
    int32_t pixels;  // of Y
    FastDiv div_out_w, div_out_hw;
    int32_t kh, kw;
    FewChannelsOperand table[kMaxOperands];
    FewChannelsTaps rows[kMaxOperands], columns[kMaxOperands];
};
// Operands of a step: two chunks of 16 bytes.
constexpr int few_channels_step(Precision precision) {
    return precision == Precision::kF16 || precision == Precision::kBF16 ? 16 : 8;
}
// Shared memory of a few_channels warp: 32 pixels' operands, 16 bytes apart, then accumulators of 16.
constexpr int few_channels_warp_bytes(int steps, int block_n) { return 32 * (steps * 32 + 16) + 16 * (block_n + 8) * 4; }

namespace few_channels {

// Fitted to six layers of 3 channels (in TF32 entry 65 of benchmarks/log.md), in microseconds of a warp's 32 pixels.
struct Cost {
    double plain_gather_us = 0;  // of operands that are pixels of X
    double gather_us = 0;        // of others, but for the loads of their windows
    double part_us = 0;          // of the products and stores of 64 channels
};

struct Tile {
    int32_t block_m, block_n, warps;
    int32_t steps;       // of 16 taps and channels, in TF32 of 8
    int32_t min_blocks;  // of a multiprocessor
    Cost cost;

    constexpr bool is_fitted() const { return cost.plain_gather_us > 0 && cost.part_us > 0; }
};

// clang-format off
inline constexpr TileLine<Tile> kLines[] = {
    // {block_m, block_n, warps, steps, min_blocks, cost}, split, {F16, BF16, TF32, TF32x3}
    {{256, 64, 8, 1, 2, {0.0492, 0.1224, 0.1104}}, 1, {2781, 2881,    0, 0}},
    {{256, 64, 8, 2, 2, {0.0684, 0.1448, 0.1408}}, 1, {2782, 2882,    0, 0}},
    {{256, 64, 8, 4, 2, {0.1068, 0.1896, 0.2016}}, 1, {2784, 2884,    0, 0}},
    {{256, 64, 8, 2, 2, {0.07, 0.15, 0.2}},        1, {   0,    0, 2981, 0}},
    {{256, 64, 8, 4, 2, {0.11, 0.19, 0.22}},       1, {   0,    0, 2982, 0}},
    {{256, 64, 8, 8, 1, {0.29, 0.53, 0.3}},        1, {   0,    0, 2984, 0}},
};
// clang-format on
inline constexpr auto kRows = rows_of<kLines>();
using Row = TileRow<Tile>;

}  // namespace few_channels
}  // namespace convpool
