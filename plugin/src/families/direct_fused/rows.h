// SPDX-License-Identifier: Apache-2.0
// The tactics of direct_fused, and what the host tells its kernels.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/rows.h"

namespace convpool {

constexpr int kMaxTaps = 81;  // of direct_fused

// direct_fused. kernel.cuh draws raw and P, of which this tells. Lengths in chunks of 16 bytes unless said otherwise.
struct DirectFusedParams {
    const void *x, *w;
    void *y;
    Prologue prologue;
    Epilogue epilogue;
    BoxMean box;
    Shape2d shape;
    int32_t x_chunked, w_chunked;  // rows of channels are whole aligned chunks: cp.async
    int32_t y_vectors;             // rows of channels of Y, residual and bias are whole aligned chunks
    int32_t y_runs;                // channels first: rows of pixels of Y and residual are whole aligned runs
    int32_t tile_images, tile_h_log2, tile_w_log2;
    int32_t tiles_h, tiles_w, m_tiles, tiles;
    int32_t slices;          // channel slices
    int32_t split;           // thread blocks of a cluster that share the slices
    int32_t resident;        // every weight of the block's slices stays in shared memory
    int32_t weight_stages;   // buffers of one tap and slice each
    int32_t halo_h, halo_w;  // box means per image of a tile
    int32_t raw_h, raw_w;    // pixels of X they cover
    int32_t taps;
    int32_t box_pairs;                  // windows of 2x2, one apart
    int32_t segments, segment_h;        // the rows of box means a thread walks down
    int32_t walks;                      // tile_images * segments * halo_w * kChunks
    int32_t phase_pitch;                // chunks between column phases; a row has stride_w phases
    int32_t plane;                      // chunks between planes of P: all positions of one channel chunk
    int32_t raw_offset, weight_offset;  // bytes into shared memory
    FastDiv div_m_tiles, div_tiles_w, div_tiles_h, div_raw_h, div_halo_w, div_stride_w, div_segments;
    int32_t tap_offsets[kMaxTaps];  // bytes from an output pixel's place in P to what a tap of it reads
};

namespace direct_fused {

struct Tile {
    int32_t block_m, block_n, warps_m, warps_n;
    int32_t stages;      // buffers of weights in flight
    int32_t min_blocks;  // of a multiprocessor
    Step step;           // of one tap and 64 bytes of channels

    constexpr bool is_fitted() const { return step.issue_us > 0; }
};

// Fitted to all tiles of this table together. tf32x3 takes 1.6 times as long.
constexpr Step fitted(int block_m, int block_n) {
    const double products = block_m * block_n * 32 / 1e6;
    return {products * (0.19 + 59.0 / block_n + 54.0 / block_m), 0.23 + 0.65 * tile_share(block_m, block_n)};
}

// clang-format off
// block_m, block_n, warps_m, warps_n, stages, min_blocks, step
constexpr Tile k128x128{128, 128, 2, 2, 3, 2, fitted(128, 128)};
constexpr Tile k128x256{128, 256, 2, 4, 3, 1, fitted(128, 256)};
constexpr Tile k128x64{ 128,  64, 2, 2, 4, 2, fitted(128, 64)};
constexpr Tile k128x32{ 128,  32, 4, 1, 8, 2, fitted(128, 32)};
constexpr Tile k64x64{   64,  64, 2, 2, 6, 3, fitted(64, 64)};
constexpr Tile k64x64x3{ 64,  64, 2, 2, 6, 2, fitted(64, 64)};
constexpr Tile k64x32{   64,  32, 2, 2, 8, 3, fitted(64, 32)};
constexpr Tile k32x32{   32,  32, 2, 2, 8, 4, fitted(32, 32)};

inline constexpr TileLine<Tile> kLines[] = {
    // tile, split, {F16, BF16, TF32, TF32x3}
    {k128x128, 1, {2001, 2101, 2201,    0}},
    {k128x256, 1, {2002,    0,    0,    0}},
    {k128x64,  1, {2003,    0,    0,    0}},
    {k128x32,  1, {2004,    0,    0,    0}},
    {k64x64,   1, {2005, 2105, 2205,    0}},
    {k64x32,   1, {2006,    0,    0,    0}},
    {k32x32,   1, {2007, 2107, 2207, 2307}},
    {k128x128, 2, {2021,    0,    0,    0}},
    {k128x128, 4, {2022,    0,    0,    0}},
    {k64x64,   2, {2023,    0,    0,    0}},
    {k64x64,   4, {2024, 2124, 2224,    0}},
    {k64x64,   8, {2025,    0,    0,    0}},
    {k32x32,   2, {2026,    0,    0,    0}},
    {k32x32,   4, {2027,    0,    0,    0}},
    {k64x64x3, 1, {   0,    0,    0, 2305}},
    {k64x64x3, 4, {   0,    0,    0, 2324}},
};
// clang-format on
inline constexpr auto kRows = rows_of<kLines>();
using Row = TileRow<Tile>;

}  // namespace direct_fused
}  // namespace convpool
