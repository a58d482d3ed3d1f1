// SPDX-License-Identifier: Apache-2.0
// What the host tells pointwise, and how its shared memory is laid out.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace convpool {

// direct_fused for 1x1 kernels and 2x2 pooling: families/pointwise/kernel.cuh. Lengths in chunks of 16 bytes.
struct PointwiseParams {
    const void *x, *w;
    void *y;
    Prologue prologue;
    Epilogue epilogue;
    int32_t h, w_pixels, chunks, m, out_h, out_w;
    int32_t stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;  // from output pixels to their windows in X
    int32_t column, row;                                               // between pixels of a window
    int32_t y_channels_last, y_vectors;
    int32_t pixels;  // n * out_h * out_w
    int32_t split;   // thread blocks of a cluster that share the sum
    int32_t tiles;
    FastDiv div_out_w, div_out_hw, div_m_tiles;
};

// Shared memory of a pointwise block, in bytes: weights, box means (or accumulators on their way out), pixels of X.
struct PointwiseShared {
    int weight_stage, mean_offset, pixel_offset, pixel_stage, bytes;
};
constexpr PointwiseShared pointwise_shared(int block_m, int block_n, int warps, int warp_n, int stages) {
    PointwiseShared s{};
    s.weight_stage = block_n * 128;
    s.mean_offset = stages * s.weight_stage;
    const int means = 3 * block_m * 128, staging = warps * 16 * ((warp_n < 64 ? warp_n : 64) + 8) * 4;
    s.pixel_offset = s.mean_offset + (means > staging ? means : staging);
    s.pixel_stage = 4 * block_m * 128;
    s.bytes = s.pixel_offset + (stages - 1) * s.pixel_stage;
    return s;
}

}  // namespace convpool
