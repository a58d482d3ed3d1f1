// SPDX-License-Identifier: Apache-2.0
// The tactics of pointwise, what the host tells its kernels, and how their shared memory is laid out.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/rows.h"

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

namespace pointwise {

struct Tile {
    int32_t block_m, block_n, warps_m, warps_n;
    int32_t stages;
    Step step;           // of 128 bytes of channels
    double ends_us = 0;  // of a tile's start and end

    constexpr bool is_fitted() const { return step.issue_us > 0 && ends_us > 0; }
};

// clang-format off
// block_m, block_n, warps_m, warps_n, stages, step, ends_us
constexpr Tile kN64{ 64,  64, 4, 2, 5, {0.65}, 1.67};
constexpr Tile kN128{64, 128, 4, 2, 4, {0.78}, 1.86};
constexpr Tile kN256{64, 256, 4, 2, 3, {1.14}, 3.29};

inline constexpr TileLine<Tile> kLines[] = {
    // tile, split, {F16, BF16, TF32, TF32x3}
    {kN64,  1, {2751, 2851, 0, 0}},
    {kN128, 1, {2752, 2852, 0, 0}},
    {kN256, 1, {2753, 2853, 0, 0}},
    {kN64,  2, {2771, 2871, 0, 0}},
    {kN64,  4, {2772, 2872, 0, 0}},
    {kN64,  8, {2773, 2873, 0, 0}},
    {kN128, 4, {2775, 2875, 0, 0}},
};
// clang-format on
inline constexpr auto kRows = rows_of<kLines>();
using Row = TileRow<Tile>;

}  // namespace pointwise
}  // namespace convpool
