// SPDX-License-Identifier: Apache-2.0
// Implicit GEMM: what the host tells the kernels, and the rows of the families.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/rows.h"

namespace convpool {

// implicit GEMM over a channels-last tensor: direct_gemm and filter_fused.
struct ImplicitGemmParams {
    const void *x, *w;  // x [n,h,w,c], w [m,kh,kw,c], c a whole number of chunks
    void *y;
    Epilogue epilogue;
    Shape2d shape;  // h, w: of x here; pooled_* unused
    int32_t y_vectors, y_runs;
    int32_t pixels;  // n * out_h * out_w
    int32_t slices, m_tiles;
    int32_t split;          // thread blocks of a cluster that share the sum
    int32_t round_pixels;   // sm90, TF32: x is not rounded to it
    int32_t early_weights;  // sm90: the kernel before this one does not write w, so it is read before that ends
    int32_t chunks;         // of a filter: taps times those of a tap
    FastDiv div_out_w, div_out_hw, div_m_tiles, div_tap_chunks, div_kw, div_split;
};

// True where blocks of a cluster push their parts of a tile's sum to each other (kernels/epilogue/pushed_sums.cuh) instead of loading
// them. For larger tiles that takes longer; for full fp32 it was not measured.
constexpr bool pushes_sums(Precision precision, int block_m, int block_n) {
    return precision != Precision::kTF32x3 && block_m * block_n <= 64 * 64;
}
// Where the memory for that is: behind the ring of copies and its barriers.
constexpr int exchange_offset(int stages, int block_m, int block_n) { return stages * (block_m + block_n) * 128 + 128; }

// Shared memory of kernels of differences: stages of pixels, 16 rows x 8 columns of places and their neighbours, and of two taps'
// weights; behind them boxes of sums, and barriers.
constexpr int kDifferencePixels = 3, kDifferenceWeights = 4, kDifferencePixelBytes = 22 * 1024,
              kDifferenceBoxBytes = 8 * 2 * 2048;
constexpr int kDifferenceBoxes = kDifferencePixels * kDifferencePixelBytes + kDifferenceWeights * 2 * 128 * 128;
constexpr int kDifferenceBytes = kDifferenceBoxes + kDifferenceBoxBytes + (kDifferencePixels + kDifferenceWeights) * 16;

}  // namespace convpool

namespace convpool::gemm {

// The part of AveragePool or Upsample that is done before the GEMM.
enum class Operand {
    kPooledX,   // direct_gemm: X is pooled, and convolved with W
    kFusedW,    // filter_fused: W is summed over pooling windows, and X convolved with it
    kPhasesOfW  // upsample: W is summed over the copies of a pixel, for each phase of Y, and X convolved with that
};
inline constexpr size_t kOperands = 3;

struct Tile {
    int32_t block_m, block_n, warps_m, warps_n;
    int32_t stages;      // buffers of pixels and weights in flight
    int32_t min_blocks;  // of a multiprocessor
    Step step;
    // Kernels of phases: blocks take tiles one after the other. The sums of one go to Y through memory of their own, behind the ring, while
    // the next one is copied: of every warp 16 pixels and so many channels at a time, or what TMA copies. 0: a block takes one tile.
    int32_t staged_channels = 0;
    // Of phases, fitted apart: a step as above, and a tile's start and end. Zeros: as of other rows.
    double phase_step_us = 0, phase_ends_us = 0;
    bool differences = false;  // of phases: both of the columns in a tile (implicit_gemm_tma/differences.cuh)

    constexpr int staged_bytes() const { return staged_channels == 0 ? 0 : warps_m * warps_n * 16 * (staged_channels + 8) * 4; }
};

struct Row {
    int32_t id;  // never reused
    Precision precision;
    Operand operand;
    Tile tile;
    int32_t split;  // thread blocks of a cluster that share the sum

    constexpr bool is_fitted() const { return tile.step.issue_us > 0; }
};

// A line of a family's table: a tile and split, and the ids of its rows; 0: there is no such row.
struct Line {
    Tile tile;
    int32_t split;
    int32_t ids[kOperands * kPrecisions];  // of each precision with X pooled, then of each with W fused, then with its phases

    constexpr Row row(size_t kind) const {
        return {ids[kind], static_cast<Precision>(kind % kPrecisions), static_cast<Operand>(kind / kPrecisions), tile, split};
    }
};

}  // namespace convpool::gemm
