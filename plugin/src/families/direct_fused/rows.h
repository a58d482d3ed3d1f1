// SPDX-License-Identifier: Apache-2.0
// The tactics of direct_fused.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rows.h"

namespace convpool::direct_fused {

struct Tile {
    int32_t block_m, block_n, warps_m, warps_n;
    int32_t stages;      // buffers of weights in flight
    int32_t min_blocks;  // of a multiprocessor
    Step step;           // of one tap and 64 bytes of channels
};

// Fitted to all tiles of this table together. tf32x3 takes 1.6 times as long.
constexpr Step fitted(int block_m, int block_n) {
    const double products = block_m * block_n * 32 / 1e6;
    return {products * (0.19 + 59.0 / block_n + 54.0 / block_m), 0.23 + 0.65 * tile_share(block_m, block_n)};
}

constexpr Tile k128x128{
    .block_m = 128, .block_n = 128, .warps_m = 2, .warps_n = 2, .stages = 3, .min_blocks = 2, .step = fitted(128, 128)};
constexpr Tile k128x256{
    .block_m = 128, .block_n = 256, .warps_m = 2, .warps_n = 4, .stages = 3, .min_blocks = 1, .step = fitted(128, 256)};
constexpr Tile k128x64{
    .block_m = 128, .block_n = 64, .warps_m = 2, .warps_n = 2, .stages = 4, .min_blocks = 2, .step = fitted(128, 64)};
constexpr Tile k128x32{
    .block_m = 128, .block_n = 32, .warps_m = 4, .warps_n = 1, .stages = 8, .min_blocks = 2, .step = fitted(128, 32)};
constexpr Tile k64x64{
    .block_m = 64, .block_n = 64, .warps_m = 2, .warps_n = 2, .stages = 6, .min_blocks = 3, .step = fitted(64, 64)};
constexpr Tile k64x64x3{// of tf32x3, which holds three sums
                        .block_m = 64, .block_n = 64,   .warps_m = 2,          .warps_n = 2,
                        .stages = 6,   .min_blocks = 2, .step = fitted(64, 64)};
constexpr Tile k64x32{
    .block_m = 64, .block_n = 32, .warps_m = 2, .warps_n = 2, .stages = 8, .min_blocks = 3, .step = fitted(64, 32)};
constexpr Tile k32x32{
    .block_m = 32, .block_n = 32, .warps_m = 2, .warps_n = 2, .stages = 8, .min_blocks = 4, .step = fitted(32, 32)};

struct Row {
    int32_t id;  // never reused
    Precision precision;
    Tile tile;
    int32_t split = 1;  // thread blocks of a cluster that share the channels
};

inline constexpr Row kRows[] = {
    {.id = 2001, .precision = Precision::kF16, .tile = k128x128},
    {.id = 2002, .precision = Precision::kF16, .tile = k128x256},
    {.id = 2003, .precision = Precision::kF16, .tile = k128x64},
    {.id = 2004, .precision = Precision::kF16, .tile = k128x32},
    {.id = 2005, .precision = Precision::kF16, .tile = k64x64},
    {.id = 2006, .precision = Precision::kF16, .tile = k64x32},
    {.id = 2007, .precision = Precision::kF16, .tile = k32x32},
    {.id = 2021, .precision = Precision::kF16, .tile = k128x128, .split = 2},
    {.id = 2022, .precision = Precision::kF16, .tile = k128x128, .split = 4},
    {.id = 2023, .precision = Precision::kF16, .tile = k64x64, .split = 2},
    {.id = 2024, .precision = Precision::kF16, .tile = k64x64, .split = 4},
    {.id = 2025, .precision = Precision::kF16, .tile = k64x64, .split = 8},
    {.id = 2026, .precision = Precision::kF16, .tile = k32x32, .split = 2},
    {.id = 2027, .precision = Precision::kF16, .tile = k32x32, .split = 4},
    {.id = 2101, .precision = Precision::kBF16, .tile = k128x128},
    {.id = 2105, .precision = Precision::kBF16, .tile = k64x64},
    {.id = 2107, .precision = Precision::kBF16, .tile = k32x32},
    {.id = 2124, .precision = Precision::kBF16, .tile = k64x64, .split = 4},
    {.id = 2201, .precision = Precision::kTF32, .tile = k128x128},
    {.id = 2205, .precision = Precision::kTF32, .tile = k64x64},
    {.id = 2207, .precision = Precision::kTF32, .tile = k32x32},
    {.id = 2224, .precision = Precision::kTF32, .tile = k64x64, .split = 4},
    {.id = 2305, .precision = Precision::kTF32x3, .tile = k64x64x3},
    {.id = 2307, .precision = Precision::kTF32x3, .tile = k32x32},
    {.id = 2324, .precision = Precision::kTF32x3, .tile = k64x64x3, .split = 4},
};
static_assert(ids_rise(kRows));
static_assert(all_rows(kRows, +[](const Row &row) { return row.tile.step.issue_us > 0; }), "a row's tile has a fitted cost");

// The kernel of a row of this precision.
template <Precision kPrecision> const void *kernel(size_t row, bool prologue);

}  // namespace convpool::direct_fused
