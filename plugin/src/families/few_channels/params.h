// SPDX-License-Identifier: Apache-2.0
// What the host tells few_channels.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace convpool {

// What a tap and channel see of X: their window's first pixel, and the bytes to it, from where the output pixel's are counted.
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

}  // namespace convpool
